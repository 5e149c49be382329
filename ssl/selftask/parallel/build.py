"""Set up gradient reduction, synchronized BatchNorm and activation checkpointing."""

from __future__ import annotations

import torch
from torch import nn

from selftask.config.schema import ParallelConfig
from selftask.config.values.budget import Budget, parse_budget
from selftask.distributed.collectives import world_size
from selftask.errors import UserError
from selftask.parallel.activation_budget import ActivationBudget
from selftask.parallel.activation_checkpointing import checkpoint_blocks
from selftask.parallel.blocks import find_blocks
from selftask.parallel.reduction import Reduction
from selftask.parallel.sync_batch_norm import form_groups, synchronize_batch_norm

NO_BUDGET = Budget(1.0, "share")


def build_reduction(
    config: ParallelConfig, low_precision: torch.dtype | None, *, overlap: bool = True
) -> Reduction:
    """Build the configured gradient reduction, or one that does nothing for a single process.

    Args:
        config: The ``parallel`` section.
        low_precision: Dtype of the forward pass; None for float32.
        overlap: As in ``ManualReduction``; other reductions ignore it.
    """
    if world_size() == 1:
        return Reduction()
    if config.reduce == "ddp":
        from selftask.parallel.ddp import DDPReduction

        return DDPReduction(
            bucket_mb=config.bucket_mb,
            static_graph=config.static_graph,
            find_unused=config.find_unused,
        )
    if config.reduce == "fsdp":
        from selftask.parallel.fsdp import FSDPReduction

        return FSDPReduction(
            bucket_mb=config.bucket_mb,
            low_precision=low_precision,
            shard_over=config.shard_over,
            cpu_offload=config.cpu_offload,
            prefetch=config.prefetch,
        )
    from selftask.parallel.manual import ManualReduction

    return ManualReduction(
        bucket_mb=config.bucket_mb, compression=config.grad_compression, overlap=overlap
    )


def synchronize(config: ParallelConfig, modules: list[nn.Module]) -> None:
    """Make BatchNorm layers use the statistics of several ranks, if configured.

    Every rank must call this function.

    Raises:
        UserError: If the ranks cannot be divided as configured, or a BatchNorm class is not one of
            ``torch.nn``.
    """
    if config.sync_batch_norm != "none" and world_size() > 1:
        ranks = form_groups(config.sync_batch_norm)
        for module in modules:
            synchronize_batch_norm(module, ranks)


def save_activations(config: ParallelConfig, network: nn.Module) -> ActivationBudget:
    """Set up activation checkpointing of a network, if configured.

    Args:
        config: The ``parallel`` section.
        network: The trained network, modified in place.

    Returns:
        The budget, to be finalized after the first backward pass. It has no blocks unless the
        config sets a budget.

    Raises:
        UserError: If activation checkpointing is configured and the network has no blocks.
    """
    choice = config.activation_checkpointing
    if choice == "none":
        return ActivationBudget([], NO_BUDGET)
    blocks = find_blocks(network)
    if not blocks:
        raise UserError(
            f"parallel.activation_checkpointing={choice}: the network has no blocks, such as "
            "children of a Sequential or ModuleList that are made of several modules; use none"
        )
    if choice == "blocks":
        checkpoint_blocks(blocks)
        return ActivationBudget([], NO_BUDGET)
    return ActivationBudget(blocks, parse_budget(choice))
