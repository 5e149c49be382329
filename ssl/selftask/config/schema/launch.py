"""The sections ``launch`` and ``parallel``: processes and how they train together."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from selftask.config.fields import setting
from selftask.config.schema.component import Section


@dataclass(frozen=True, kw_only=True)
class LaunchConfig(Section):
    """Number of machines and processes, restarts, SLURM options."""

    nodes: int = setting(1, min=1, also=["num_nodes"])
    """Number of machines."""
    processes: int = setting(1, min=1, also=["gpus", "num_gpus", "nproc_per_node"])
    """Processes (ranks) on each machine, one per GPU."""
    slurm: dict[str, Any] = field(default_factory=dict)
    """Options of sbatch, such as ``partition``, ``time``, ``account``; also submitit's ``setup``,
    ``teardown``, ``srun_args``, ``signal_delay_s``, ``array_parallelism``, ``stderr_to_stdout``.
    """
    hang_timeout_s: float = setting(600.0, min=1)
    """Time after which a run ends as stuck if no rank has made progress, in seconds."""
    snapshot: bool = False
    """Whether SLURM jobs import your modules from a copy of the git repository made at submission.
    """
    parallel_runs: int = setting(1, min=1)
    """Number of runs of a local sweep that train at the same time."""
    max_restarts: int = setting(0, min=0)
    """Number of restarts after a rank failed, and without SLURM also after a rank was killed."""
    max_requeues: int = setting(100, min=0)
    """Number of requeues after a time-out or the loss of a rank or node; at most 5 for a local job.
    Requeues by SLURM itself, after a preemption, do not count.
    """

    @property
    def world_size(self) -> int:
        """Total number of processes."""
        return self.nodes * self.processes


@dataclass(frozen=True, kw_only=True)
class ParallelConfig(Section):
    """Reduction of gradients, sharding, synchronization of buffers, activation checkpointing."""

    reduce: Literal["manual", "ddp", "fsdp"] = setting("manual", also=["strategy", "backend"])
    """How gradients are averaged over ranks: ``manual``: by the train step itself; ``ddp``: by
    DistributedDataParallel; ``fsdp``: by FSDP2, which also shards parameters and optimizer state.
    """
    bucket_mb: float = setting(25.0, min=0.001)
    """Size of the buckets in which gradients are reduced, in MiB; with fsdp only gradients of
    parameters that are not sharded.
    """
    grad_compression: Literal["none", "fp16", "bf16"] = "none"
    """Data type in which gradients are sent between ranks (manual)."""
    buffers: Literal["broadcast", "mean"] = "broadcast"
    """How buffers are synchronized: ``broadcast``: all ranks get those of the first rank; ``mean``:
    they get the mean of BatchNorm's running statistics, and the first rank's other buffers.
    """
    sync_buffers: Literal["evaluation", "step", "never"] = setting(
        "evaluation", also=["broadcast_buffers", "broadcast_buffers_mode"]
    )
    """When buffers are synchronized over ranks. ``evaluation``: before evaluations, exports and
    saves; ``step``: also after every step; ``never``: each rank evaluates with its own buffers, and
    those of the first rank are saved.
    """
    static_graph: bool = False
    """Whether to tell DistributedDataParallel that every step uses the same parameters, equally
    often (ddp).
    """
    find_unused: bool = setting(False, also=["find_unused_parameters"])
    """Whether parameters may have no gradient in some steps (ddp; manual and fsdp always allow it).
    """
    shard_over: int | Literal["all", "node"] = setting("all", min=1, also=["sharding_strategy"])
    """Ranks that together hold one copy of the network (fsdp): ``all``, those of a ``node``, or a
    number of ranks.
    """
    cpu_offload: bool = setting(False, also=["offload_params"])
    """Whether shards, their gradients and optimizer state are kept on the CPU, on which the
    optimizer then runs (fsdp).
    """
    meta_init: bool = setting(False, also=["meta_device", "delayed_init"])
    """Whether only the first rank initializes or reads the weights; the others receive them part by
    part and never hold the whole network (fsdp).
    """
    prefetch: int = setting(0, min=0, also=["forward_prefetch", "backward_prefetch"])
    """Blocks to gather ahead of the current one (fsdp); 0: torch's default, one."""
    activation_checkpointing: float | str = setting(
        "none", also=["checkpointing", "grad_checkpointing", "gradient_checkpointing"]
    )
    """Activations that are recomputed in the backward pass: ``none``; ``blocks``: all but the
    inputs of blocks; or a limit for the kept activations, as a size ('8 GB') or a share (0.5): as
    few blocks are recomputed as it allows.
    """
    sync_batch_norm: int | Literal["none", "all", "node"] = setting(
        "none", min=1, also=["sync_bn", "syncbn", "sync_batchnorm"]
    )
    """Groups of processes that share BatchNorm statistics: ``all``, those of a ``node``, or groups
    of this size; ``none``: each process computes its own.
    """
