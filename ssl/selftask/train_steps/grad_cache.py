"""Gradient caching: the loss of a large batch, with the memory of one chunk.

Gao et al., Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup, RepL4NLP 2021,
arXiv:2101.06983.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only, tree_structure, tree_unflatten

from selftask.batch import Batch
from selftask.config.fields import setting
from selftask.errors import UserError
from selftask.random.keyed import LAYER_DRAWS
from selftask.random.process_state import restored_rng, rng_state, set_rng_state
from selftask.registry import METHODS, register_train_step
from selftask.task import Task
from selftask.task.second_pass import second_pass
from selftask.task.update import apply_gradients, record_loss


@register_train_step("grad_cache")
@dataclass(frozen=True, kw_only=True)
class GradCache:
    """Two forward passes in chunks: a loss over the whole batch with the memory of one chunk."""

    chunks: int = setting(16, min=2)
    """Number of chunks into which each rank's batch is divided, at most one per sample. Their sizes
    differ by at most one sample.
    """

    def problems(self, config: dict[str, Any]) -> Iterator[str]:
        method, train = config["method"]["name"], config["train"]
        if METHODS.declared(method, "sample_dim", 1) is None:
            yield (
                "train.step: 'grad_cache' divides the network's output into samples, and that of "
                f"{method} is not one tensor of samples; use train.step=accumulate"
            )
        if train["batch_size"] < self.chunks:
            yield f"chunks: {self.chunks}; train.batch_size={train['batch_size']} has fewer samples"

    def __call__(self, task: Task) -> None:
        """Compute the loss and its gradient at the outputs, then run the backward pass in chunks.

        The first forward pass of each chunk has no graph. The second one has a graph and repeats
        the dropout draws of the first. BatchNorm normalizes each chunk by its own statistics and
        updates the running ones once per chunk. A teacher's forward pass, which has no graph, is
        not divided. A test phase stops after the loss.
        """
        batch = task.last_batch = next(task.batches)
        chunks = self._chunks(len(batch.index))

        with task.autocast():
            batch.output, draws = _forward(task, batch, chunks)
            task.run_hooks("on_forward")
            batch.local_loss = task.loss(batch.output, batch)

        record_loss(task, batch)
        if not task.train:
            return

        task.optimizer.zero_grad()
        with task.no_sync():
            task.grad_scaler.scale(batch.local_loss).backward()  # ends at batch.output
        _backward(task, batch, chunks, draws)
        task.reduce_gradients()
        apply_gradients(task)

    def _chunks(self, size: int) -> list[slice]:
        number = min(self.chunks, size)
        edges = [size * position // number for position in range(number + 1)]
        return [slice(*pair) for pair in pairwise(edges)]


@torch.no_grad()
def _forward(task: Task, batch: Batch, chunks: list[slice]) -> tuple[Any, list[Any]]:
    """Return the joined output of all chunks, and the states of the random generators before each.

    The network's ``embedding`` is set to the joined embeddings, if it has any.
    """
    outputs, draws = [], []
    embeddings: list[Any] = []
    for rows in chunks:
        draws.append(rng_state())
        outputs.append(_of_chunk(task, batch, rows))
        embeddings.append(getattr(task.base_model, "embedding", None))
    if all(embedding is not None for embedding in embeddings):
        by_view = [
            embedding.unflatten(0, (-1, rows.stop - rows.start))  # (V, chunk, E)
            for embedding, rows in zip(embeddings, chunks, strict=True)
        ]
        task.base_model.embedding = torch.cat(by_view, dim=1).flatten(0, 1)
    sizes = [rows.stop - rows.start for rows in chunks]
    leaves = zip(*(tree_leaves(output) for output in outputs), strict=True)
    joined = [_join(parts, sizes, position, task) for position, parts in enumerate(leaves)]
    return tree_unflatten(joined, tree_structure(outputs[0])), draws


def _join(parts: Sequence[Any], sizes: list[int], position: int, task: Task) -> Any:
    """Concatenate one tensor of the outputs of all chunks, as a leaf of the loss's graph.

    Args:
        parts: The tensor of each chunk. Of values that are not tensors, the first is returned.
        sizes: Number of samples of each chunk.
        position: Index of the tensor among the leaves of an output.
        task: The task.

    Raises:
        UserError: If the first tensor does not have the samples in ``sample_dim``.
    """
    if not isinstance(parts[0], Tensor):
        return parts[0]
    dim = task.loss.sample_dim
    divided = [_by_sample(x, position, n, dim) for x, n in zip(parts, sizes, strict=True)]
    joined = torch.cat([x for x, _ in divided], dim=divided[0][1])
    if position:
        joined = joined.flatten(0, 1)
    elif joined.shape[dim] != sum(sizes):
        raise UserError(
            f"train.step=grad_cache: the network's output {tuple(joined.shape)} does not have the "
            f"{sum(sizes)} samples in dimension {dim}, the sample_dim of "
            f"{type(task.loss).__name__}; correct it, or set it to None"
        )
    return joined.requires_grad_(task.train and joined.is_floating_point())


def _by_sample(x: Tensor, position: int, number: int, sample_dim: int) -> tuple[Tensor, int]:
    """Return a tensor with all samples along one dimension, and the index of this dimension.

    The first tensor of an output has them in ``sample_dim``. The others are features of a
    ``PatchOutput``, whose rows are the samples of each view, view after view.
    """
    return (x.unflatten(0, (-1, number)), 1) if position else (x, sample_dim)


def _backward(task: Task, batch: Batch, chunks: list[slice], draws: list[Any]) -> None:
    """Accumulate the gradients of the parameters chunk by chunk, from that of ``batch.output``."""
    tensors = enumerate(tree_leaves(batch.output))
    gradients = {
        position: x.grad for position, x in tensors if getattr(x, "grad", None) is not None
    }
    if not gradients:
        return
    size, dim = len(batch.index), task.loss.sample_dim
    for rows, state in zip(chunks, draws, strict=True):
        parts = []
        for position, gradient in gradients.items():
            by_sample, samples = _by_sample(gradient, position, size, dim)
            part = by_sample.narrow(samples, rows.start, rows.stop - rows.start)
            parts.append(part.flatten(0, 1) if position else part)
        with nullcontext() if rows == chunks[-1] else task.no_sync():
            with _replayed(state), second_pass(task.base_model), task.autocast():
                output = tree_leaves(_of_chunk(task, batch, rows))
            torch.autograd.backward([output[position] for position in gradients], parts)


def _of_chunk(task: Task, batch: Batch, rows: slice) -> Any:
    """Return the network's output for some samples of the batch."""
    size = len(batch.index)

    def take(x: Tensor) -> Tensor:
        return x[rows] if x.ndim and len(x) == size else x

    with LAYER_DRAWS.exchanged(lambda samples: samples[rows]):
        return task.model(tree_map_only(Tensor, take, batch.input))


@contextmanager
def _replayed(state: dict[str, Any]) -> Iterator[None]:
    """Context in which the random generators start from a saved state."""
    with restored_rng():
        set_rng_state(state)
        yield
