"""The sections ``launch`` and ``parallel``: processes and how they share the work."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from selftask.config.fields import setting
from selftask.config.schema.component import own


@dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    """Number of machines and processes, restarts, options of SLURM."""

    nodes: int = setting(1, min=1, also=["num_nodes"])
    processes: int = setting(1, min=1, also=["gpus", "num_gpus", "nproc_per_node"])  # per node
    slurm: dict[str, Any] = field(default_factory=dict)
    hang_timeout_s: float = setting(
        600.0, min=1
    )  # a run in which no rank moves for so long is stuck
    snapshot: bool = (
        False  # SLURM: jobs import the user's modules from a copy of the git repository
    )
    parallel_runs: int = setting(1, min=1)  # of a local sweep that train at the same time
    max_restarts: int = setting(0, min=0)  # new attempts after a rank failed or was killed
    max_requeues: int = setting(100, min=0)  # SLURM: returns to the queue, preempted or timed out

    @property
    def world_size(self) -> int:
        """Total number of processes."""
        return self.nodes * self.processes

    def to_dict(self) -> dict[str, Any]:
        """Return the section as in the yaml."""
        return own(self)


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How processes share the work; without cost on one process."""

    reduce: Literal["manual", "ddp", "fsdp"] = setting("manual", also=["strategy", "backend"])
    bucket_mb: float = setting(25.0, min=0.001)  # MiB of gradients that travel together
    grad_compression: Literal["none", "fp16", "bf16"] = "none"  # of gradients on their way (manual)
    buffers: Literal["broadcast", "mean"] = "broadcast"  # BatchNorm's running statistics before
    # evaluations and saves: those of the first rank, or the mean over ranks
    static_graph: bool = False  # every step uses the same parameters, equally often (ddp)
    find_unused: bool = setting(False, also=["find_unused_parameters"])  # parameters may lack a
    # gradient in some steps (ddp; manual and fsdp always allow it)
    shard_over: int | Literal["all", "node"] = setting("all", min=1, also=["sharding_strategy"])
    # ranks that together hold one copy of the network (fsdp): all, those of a node, or so many
    cpu_offload: bool = setting(False, also=["offload_params"])  # shards, their gradients and
    # optimizer state on the CPU, which takes the steps (fsdp)
    prefetch: int = setting(0, min=0, also=["forward_prefetch", "backward_prefetch"])
    # blocks to gather ahead of the one that computes (fsdp); 0: torch's choice, one
    activation_checkpointing: float | str = setting(
        "none", also=["checkpointing", "grad_checkpointing", "gradient_checkpointing"]
    )  # blocks: keep what enters a block only, compute the rest again: memory for time; a size
    # ('8 GB') or a share (0.5): of as few blocks as keep the rest within that
    sync_batch_norm: int | Literal["none", "all", "node"] = setting(
        "none", min=1, also=["sync_bn", "syncbn", "sync_batchnorm"]
    )  # statistics over all processes, those of a node, or groups of so many

    def to_dict(self) -> dict[str, Any]:
        """Return the section as in the yaml."""
        return own(self)
