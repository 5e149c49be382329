"""Activation checkpointing within a memory budget, measured in the first step.

In the first step every block is recomputed, so that the step fits into memory if any choice of
blocks fits. Before its forward pass, each block is run once more to measure the memory that it
would keep for the backward pass. The measurement uses the real images of every pass (multi-crop),
and its result is freed immediately. After the backward pass, the blocks to recompute in the rest of
the run are chosen, the same ones on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from selftask.config.values.budget import Budget, show_bytes
from selftask.distributed.accelerator import forked_rng
from selftask.distributed.collectives import gather_objects
from selftask.logs import get_logger
from selftask.parallel.activation_checkpointing import (
    checkpoint_blocks,
    keeping_statistics,
    meter_with,
    recompute,
)

log = get_logger(__name__)


class ActivationBudget:
    """Chooses which blocks to recompute, to keep activations in a memory budget.

    Args:
        blocks: The blocks of the network, which are modified in place.
        budget: Limit of the bytes that they keep for the backward pass.
    """

    def __init__(self, blocks: Sequence[nn.Module], budget: Budget) -> None:
        self._blocks, self._budget = blocks, budget
        self._numbers = {block: number for number, block in enumerate(blocks)}
        self._stored = [0] * len(blocks)  # bytes kept by each block if it is not recomputed
        self._recomputed = [0] * len(blocks)  # bytes kept by each block if it is recomputed
        self.is_open = bool(blocks)
        checkpoint_blocks(blocks)
        for block in blocks:
            meter_with(block, self)

    def finalize(self) -> None:
        """Choose the blocks after the first backward pass; later calls do nothing.

        The first call is collective: every rank must make it.
        """
        if not self.is_open:
            return
        self.is_open = False
        ranks = gather_objects((self._stored, self._recomputed))
        stored, recomputed = (
            [max(sizes) for sizes in zip(*(of_rank[kind] for of_rank in ranks), strict=True)]
            for kind in (0, 1)
        )
        limit = self._budget.limit(sum(stored))
        chosen = choose(stored, recomputed, limit)
        for number, block in enumerate(self._blocks):
            meter_with(block, None)
            recompute(block, number in chosen)
        kept = sum(recomputed[n] if n in chosen else size for n, size in enumerate(stored))
        log_choice = log.info if kept <= limit else log.warning
        log_choice(
            "activations: %d of %d blocks are recomputed; the blocks keep about %s of %s, the "
            "budget is %s%s",
            len(chosen),
            len(stored),
            show_bytes(kept),
            show_bytes(sum(stored)),
            show_bytes(limit),
            "" if kept <= limit else ": less is not possible",
        )

    def measure(self, block: nn.Module, run: Callable[[], Any], arguments: Iterable[Any]) -> None:
        """Run a block once, and count the memory that it keeps for its backward pass.

        Random states and running statistics are restored.

        Args:
            block: The block.
            run: Its forward pass.
            arguments: Arguments of the pass, which a block that is recomputed keeps.
        """
        of_block = {_place(tensor) for tensor in (*block.parameters(), *block.buffers())}
        saved: dict[int, int] = {}

        def see(tensor: Tensor) -> Tensor:
            saved[_place(tensor)] = tensor.untyped_storage().nbytes()
            return tensor

        inputs = [tensor for tensor in arguments if isinstance(tensor, Tensor)]
        with (
            forked_rng(),
            keeping_statistics(block),
            torch.autograd.graph.saved_tensors_hooks(see, lambda tensor: tensor),
        ):
            output = run()  # keeps memory addresses unique while it is alive
        del output
        entering = {_place(tensor): tensor.untyped_storage().nbytes() for tensor in inputs}
        kept = [size for address, size in saved.items() if address not in of_block]
        self._stored[self._numbers[block]] += sum(kept)
        self._recomputed[self._numbers[block]] += sum(entering.values())

    def close(self) -> None:
        """Stop measuring once the backward pass begins, since later batches reuse its memory."""
        for block in self._blocks:
            meter_with(block, None)


def choose(stored: Sequence[int], recomputed: Sequence[int], limit: int) -> set[int]:
    """Return the fewest blocks to recompute so that all blocks keep at most ``limit`` bytes.

    If blocks save equally many bytes, the first ones are chosen: when they are recomputed in the
    backward pass, the activations of later blocks are already freed. If the limit cannot be met,
    all blocks that save memory are returned.

    Args:
        stored: Bytes kept by each block if it is not recomputed.
        recomputed: Bytes kept by each block if it is recomputed.
        limit: Bytes that all blocks together may keep.

    Returns:
        The indices of the blocks to recompute.
    """
    chosen: set[int] = set()
    kept = sum(stored)
    saving = [w - r for w, r in zip(stored, recomputed, strict=True)]
    for number in sorted(range(len(stored)), key=lambda n: (-saving[n], n)):
        if kept <= limit or saving[number] <= 0:
            break
        chosen.add(number)
        kept -= saving[number]
    return chosen


def _place(tensor: Tensor) -> int:
    """Return the address of a tensor's storage, which is shared by its views."""
    return tensor.untyped_storage().data_ptr()
