"""Features for probes: of augmented views or of ``eval.transforms``, from blocks and poolings.

B images, N patches, E features.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from selftask.batch import Batch
from selftask.config.checks.grid import nominal_size
from selftask.config.schema import Component, Config
from selftask.data.loading.dataset import EvalDataset
from selftask.data.loading.loader import EvalBatches, in_batches
from selftask.data.source import Source, channels_of
from selftask.data.transforms.pipeline import build_pipeline
from selftask.distributed.collectives import world_size
from selftask.errors import UserError
from selftask.evaluate.chunks import InChunks
from selftask.evaluate.features import check_finite, check_targets
from selftask.evaluate.on_ranks import in_order
from selftask.evaluate.probe.protocols import Pool
from selftask.models.features.extract import adapter_of, extract

_BATCH_SIZE = 256  # images read at once; affects memory only

Rows = tuple[Tensor, ...]
"""Features of images, one tensor for each input of a probe, then their labels (B,)."""


@dataclass(frozen=True)
class Input:
    """Features on which heads are trained: a pooling of the last blocks.

    Attributes:
        pool: Pooling, see ``Probe.pool``.
        blocks: Number of last blocks whose features are concatenated; unused by ``attentive``.
    """

    pool: Pool
    blocks: int

    def of(self, layers: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """Return features (B, F), or the patches (B, N, E) of the last block for ``attentive``.

        F is E times ``blocks``, for ``both`` E times ``blocks`` + 1.

        Args:
            layers: Class token (B, E) and patches (B, N, E) of each block, the last one last.
        """
        last = layers[-self.blocks :]
        if self.pool == "attentive":
            return last[-1][1]
        if self.pool == "mean":
            return torch.cat([patches.mean(dim=1) for _, patches in last], dim=1)
        tokens = [token for token, _ in last]
        mean = [last[-1][1].mean(dim=1)] if self.pool == "both" else []
        return torch.cat([*tokens, *mean], dim=1)


class ProbeInputs:
    """Frozen features of a backbone.

    Args:
        backbone: A backbone with patches, see ``models.features``; the caller sets eval mode.
        inputs: The features to compute.
        config: Config with ``eval.transforms``.
        device: Device of the backbone.

    Raises:
        UserError: If the backbone has no patches or too few blocks.
    """

    def __init__(
        self, backbone: nn.Module, inputs: Sequence[Input], config: Config, device: torch.device
    ) -> None:
        self._adapter = adapter_of(backbone)
        most, count = max(part.blocks for part in inputs), self._adapter.num_layers
        if most > count:
            raise UserError(
                f"blocks: {most}; a {type(backbone).__name__} has {count}; use at most {count}"
            )
        self.backbone = backbone
        self.inputs = inputs
        self.config = config
        self.device = device
        self._hidden = range(count - most, count - 1)  # of all blocks but the last
        self._run = InChunks(self._features, "images")

    @torch.no_grad()
    def _features(self, images: Tensor) -> Rows:
        features = extract(self.backbone, images, layers=self._hidden)
        hidden = [self._adapter.normalized(features.hidden[number]) for number in self._hidden]
        tokens = [*hidden, features.tokens]
        layers = [(part.class_token[:, 0].float(), part.patches.float()) for part in tokens]
        return tuple(part.of(layers) for part in self.inputs)

    def batches(
        self, source: Source, key: str, rows: Sequence[int], seed: int | None = None
    ) -> Iterator[Rows]:
        """Yield features and labels of images, in the order of ``rows``; skip unreadable images.

        Ranks share the work, and each yields the features of all images.

        Args:
            source: The images.
            key: Config key of the images, for messages.
            rows: Indices of the images.
            seed: Seed of random crops and flips; None for ``eval.transforms``.

        Raises:
            UserError: If features are not finite, images have no label, or too many of them cannot
                be read.
        """
        transforms = self.config.eval.transforms
        if seed is not None:
            transforms = augmented(transforms)
        pipeline = build_pipeline(transforms, "eval.transforms", channels_of(source))
        dataset, data = EvalDataset(source, pipeline, seed or 0), self.config.data
        batches = EvalBatches.of(
            dataset, source, data, batch_size=_BATCH_SIZE, device=self.device, key=key
        )
        batches.batches = in_batches(rows, _BATCH_SIZE)
        sent = self.device if world_size() == 1 else torch.device("cpu")

        def compute(batch: Batch) -> Rows:
            return tuple(part.to(sent) for part in self._of(batch, key))

        for parts in in_order(compute, batches):
            yield tuple(part.to(self.device) for part in parts)

    def _of(self, batch: Batch, key: str) -> Rows:
        features = self._run(batch.all_views[0].to(self.device, non_blocking=True))
        for part in features:
            check_finite(part, f"{key}: features")
        check_targets(batch.labels, f"probe, {key}")
        return *features, batch.labels


def augmented(transforms: Sequence[Component]) -> list[Component]:
    """Return random crops and flips at the size of ``eval.transforms``, then its ``normalize``.

    Raises:
        UserError: If the size of ``eval.transforms`` is not known.
    """
    size = nominal_size(list(transforms))
    if size is None:
        raise UserError(
            "augment: eval.transforms has no crop, so the size of random crops is unknown; use "
            "augment=false, or give eval.transforms"
        )
    crop = Component(name="random_resized_crop", args={"size": size})
    normalize = [part for part in transforms if part.name == "normalize"]
    return [crop, Component(name="horizontal_flip", args={}), *normalize]


def regrouped(parts: Iterable[Rows], size: int) -> Iterator[Rows]:
    """Yield the rows of all parts in batches of exactly ``size``; remaining rows are dropped."""
    waiting: list[Rows] = []
    count = 0
    for part in parts:
        waiting.append(part)
        count += len(part[-1])
        if count < size:
            continue
        joined = tuple(map(torch.cat, zip(*waiting, strict=True)))
        full = count - count % size
        yield from zip(*(column[:full].split(size) for column in joined), strict=True)
        waiting, count = [tuple(column[full:] for column in joined)], count - full
