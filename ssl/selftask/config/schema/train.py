"""The ``train`` section."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from selftask.config.fields import setting
from selftask.config.schema.component import Component, Section


@dataclass(frozen=True, kw_only=True)
class KeepBest:
    """Checkpoints that are kept because they have the best values of a metric."""

    metric: str | None = None
    """Any column of metrics.jsonl, such as ``knn_top1``; null: keep no best checkpoints."""
    mode: Literal["auto", "max", "min"] = "auto"
    """Whether large (max) or small (min) values are better; auto: by the name of the metric, small
    for losses, errors and distances.
    """
    count: int = setting(1, min=1)
    """Number of best checkpoints to keep."""


@dataclass(frozen=True, kw_only=True)
class GradScalerConfig:
    """Scaling of the loss, so that float16 represents small gradients."""

    enabled: bool | None = None
    """Whether to scale the loss; null: with float16 only."""
    init_scale: float = setting(2.0**16, above=0, also=["loss_scale"])
    """Initial scale of the loss."""
    growth_factor: float = setting(2.0, min=1)
    """Factor that multiplies the scale after ``growth_interval`` steps without overflow."""
    backoff_factor: float = setting(0.5, above=0, below=1)
    """Factor that multiplies the scale after an overflow, which also skips the step."""
    growth_interval: int = setting(2000, min=1)
    """Steps without overflow after which the scale grows."""


GRAPH_MODES = ("reduce-overhead", "max-autotune")


@dataclass(frozen=True, kw_only=True)
class CompileConfig:
    """Arguments of torch.compile."""

    backend: str = "inductor"
    """Backend of torch.compile."""
    mode: (
        Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] | None
    ) = None
    """Mode of torch.compile with ``backend: inductor``; null: torch's default."""
    dynamic: bool | None = None
    """Whether shapes are dynamic; null: a shape becomes dynamic when it changes."""

    @property
    def records_graphs(self) -> bool:
        """True if ``mode`` runs networks as CUDA graphs, whose outputs the next step overwrites."""
        return self.mode in GRAPH_MODES


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Section):
    """Length, batch size, precision and checkpoints of the training."""

    epochs: int | float | None = setting(
        None, above=0, also=["num_epochs", "max_epochs", "n_epochs"]
    )
    """Length in epochs; at least one of ``epochs`` and ``max_steps`` is required, and the shorter
    one applies.
    """
    max_steps: int | None = setting(None, min=1, also=["steps", "num_steps", "iterations"])
    """Length in optimizer steps; null: no limit."""
    phases_per_epoch: int = setting(1, min=1, also=["num_phases", "train_phases_per_epoch"])
    """Train phases per epoch; with several, hooks at the start and end of a phase, and test phases,
    run more often.
    """
    batch_size: int = setting(256, min=1, also=["batch", "bs"])
    """Images in a batch, over all processes; in training, a last batch with fewer is left out."""
    precision: Literal["auto", "float32", "bfloat16", "float16"] = setting(
        "auto", also=["amp", "fp16", "bf16", "dtype"]
    )
    """Data type of forward and backward passes under autocast; weights stay float32. auto: bfloat16
    on a CUDA GPU with native support, and on a CPU with support (AMX, AVX512-BF16) if the
    backbone is wide enough to be faster in it, else float32; kept on resume. ``step: manual`` has
    float32 only.
    """
    step: Component = setting(Component(name="standard"), of="train_steps", also=["train_step"])
    """Train step, by name."""
    accumulate: int = setting(1, min=1, also=["accum", "grad_accum", "accumulation"])
    """Batches per step with ``step: accumulate``, each of ``batch_size`` images; the loss is
    computed on one batch at a time.
    """
    seed: int = setting(0, min=0)
    """Seed of initial weights, order of the images and augmentations."""
    on_nan: Literal["stop", "skip", "rollback"] = setting("stop", also=["terminate_on_nan"])
    """What to do after NaN or infinity: ``stop`` ends the run; ``skip`` skips the step, and makes
    every step wait for the device; ``rollback`` returns to the last checkpoint and skips the
    affected batches.
    """
    nan_budget: int = setting(3, min=0)
    """Largest number of consecutive skipped steps, or of rollbacks in a run, before it fails."""
    grad_scaler: GradScalerConfig = setting(GradScalerConfig(), also=["scaler", "amp_args"])
    """Scaling of the loss for float16."""
    matmul_precision: Literal["highest", "high", "medium"] | None = setting(
        None, also=["tf32", "allow_tf32", "float32_matmul_precision"]
    )
    """Precision of products of float32 matrices: highest: float32; high: TF32 (10 of the 23 bits of
    the fraction); medium: bfloat16 (7 bits); null: torch's default, highest.
    """
    cudnn_tf32: bool | None = setting(None, also=["cudnn_allow_tf32"])
    """Whether cuDNN's float32 convolutions use TF32; null: torch's default, true."""
    cudnn_benchmark: bool | None = setting(None, also=["benchmark"])
    """Whether cuDNN times its convolution algorithms once for each shape and uses the fastest;
    null: on CUDA without ``deterministic``.
    """
    deterministic: bool = setting(False, also=["cudnn_deterministic"])
    """Whether to allow only deterministic operations; others raise an error."""
    compile: Literal[False, "model", "step"] = False
    """What torch.compile compiles: nothing, or forward and backward pass of the network. To compile
    the loss with them, set ``train.step=compiled``; ``step`` is an error that says so.
    """
    compile_options: CompileConfig = CompileConfig()
    """Arguments of torch.compile."""
    log_every: int = setting(50, min=1, also=["log_interval"])
    """Steps between rows of metrics.jsonl."""
    device: str = setting("auto", also=["gpu", "accelerator"])
    """``auto``: the accelerator that torch finds, or else the CPU; or ``cpu``, ``cuda``, ``mps``,
    ``xpu``.
    """
    checkpoint_every: int | str = setting(
        "1 epoch", duration=True, min=1, also=["save_every", "save_interval"]
    )
    """Time between checkpoints."""
    keep_checkpoints: int = setting(3, min=1)
    """Number of newest checkpoints to keep. Older ones are deleted, except those that
    ``keep_every`` or ``keep_best`` keeps.
    """
    keep_every: int | str | None = setting(None, duration=True, min=1)
    """Time between checkpoints that are kept permanently; null: none are."""
    keep_best: KeepBest = setting(KeepBest(), also=["save_best", "monitor", "best_checkpoint"])
    """Checkpoints to keep because they have the best values of a metric."""
    async_checkpoints: bool = True
    """Whether to write checkpoints while training continues, from a copy in host memory."""
    sharded_checkpoints: bool = setting(False, also=["sharded", "dcp"])
    """Whether a checkpoint is a folder to which every process writes its own part, without
    gathering (``parallel.reduce=fsdp``).
    """
    report: bool = True
    """Whether to write ``report.html`` into the run folder when the run ends."""
    threads: int | Literal["auto"] = setting("auto", min=1, max=1024)
    """Threads of torch on the CPU, per process; auto: three quarters of the cores, or with a GPU
    the cores that loader workers leave free; kept on resume.
    """
    stop_at: int | None = setting(None, min=1)
    """Step after which the run stops as if interrupted; for tests."""

    @property
    def uses_compiler(self) -> bool:
        """True if ``compile`` or the train step uses torch.compile."""
        return bool(self.compile) or self.step.name == "compiled"

    def to_dict(self) -> dict[str, Any]:
        """Return the section as in the yaml; a train step without arguments becomes its name."""
        return {**super().to_dict(), **({} if self.step.args else {"step": self.step.name})}
