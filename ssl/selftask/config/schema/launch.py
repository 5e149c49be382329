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
    """Number of machines."""
    processes: int = setting(1, min=1, also=["gpus", "num_gpus", "nproc_per_node"])
    """Processes (ranks) on each machine, one per GPU."""
    slurm: dict[str, Any] = field(default_factory=dict)
    """Options of sbatch, such as ``partition``, ``time``, ``account``; also ``setup``,
    ``teardown``, ``srun_args``, ``signal_delay_s``.
    """
    hang_timeout_s: float = setting(600.0, min=1)
    """Time without progress on any rank after which the run is ended as stuck, in seconds."""
    snapshot: bool = False
    """SLURM: whether jobs import your modules from a copy of the git repository made at submission.
    """
    parallel_runs: int = setting(1, min=1)
    """Runs of a local sweep that train at the same time."""
    max_restarts: int = setting(0, min=0)
    """New attempts after a rank failed; without SLURM also after one was killed."""
    max_requeues: int = setting(100, min=0)
    """Requeues allowed after preemption, a time-out or the loss of a rank or node; 5 at most of a
    local job.
    """

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
    """How gradients are reduced: by the train step itself, by DistributedDataParallel, or sharded
    by FSDP2.
    """
    bucket_mb: float = setting(25.0, min=0.001)
    """Gradients that travel together, in MiB."""
    grad_compression: Literal["none", "fp16", "bf16"] = "none"
    """Type of gradients on their way between ranks (manual)."""
    buffers: Literal["broadcast", "mean"] = "broadcast"
    """Running statistics of BatchNorm and other buffers that ranks share: those of the first rank,
    or the mean over ranks.
    """
    sync_buffers: Literal["evaluation", "step", "never"] = setting(
        "evaluation", also=["broadcast_buffers", "broadcast_buffers_mode"]
    )
    """When buffers are synchronised over ranks: before evaluations, exports and saves; also after
    every step; or never: each rank evaluates with its own, and those of the first are saved.
    """
    static_graph: bool = False
    """Whether every step uses the same parameters, equally often (ddp)."""
    find_unused: bool = setting(False, also=["find_unused_parameters"])
    """Whether parameters may lack a gradient in some steps (ddp; manual and fsdp always allow it).
    """
    shard_over: int | Literal["all", "node"] = setting("all", min=1, also=["sharding_strategy"])
    """Ranks that together hold one copy of the network (fsdp): all, those of a node, or a number.
    """
    cpu_offload: bool = setting(False, also=["offload_params"])
    """Whether shards, their gradients and optimizer state are kept on the CPU, which takes the
    steps (fsdp).
    """
    meta_init: bool = setting(False, also=["meta_device", "delayed_init"])
    """Whether only the first rank draws or reads the initial weights; the others receive them, part
    by part, and never hold a whole network (fsdp).
    """
    prefetch: int = setting(0, min=0, also=["forward_prefetch", "backward_prefetch"])
    """Blocks to gather ahead of the one that computes (fsdp); 0: torch's choice, one."""
    activation_checkpointing: float | str = setting(
        "none", also=["checkpointing", "grad_checkpointing", "gradient_checkpointing"]
    )
    """Activations that are recomputed in the backward pass: ``none``; ``blocks`` keeps only the
    inputs of blocks; a size ('8 GB') or a share (0.5): of as few blocks as keep the rest within it.
    """
    sync_batch_norm: int | Literal["none", "all", "node"] = setting(
        "none", min=1, also=["sync_bn", "syncbn", "sync_batchnorm"]
    )
    """BatchNorm statistics over all processes, those of a node, or groups of so many."""

    def to_dict(self) -> dict[str, Any]:
        """Return the section as in the yaml."""
        return own(self)
