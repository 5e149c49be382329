"""The ``train`` section."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from selftask.config.fields import setting
from selftask.config.schema.component import Component, own


@dataclass(frozen=True, kw_only=True)
class KeepBest:
    """Which checkpoints stay because a metric of theirs is best."""

    metric: str | None = None  # any key of metrics.jsonl, such as knn_top1; none: no metric
    mode: Literal["max", "min"] = "max"  # whether a large value is good
    count: int = setting(1, min=1)


@dataclass(frozen=True, kw_only=True)
class GradScalerConfig:
    """Scaling of the loss, so that float16 represents small gradients."""

    enabled: bool | None = None  # null: with float16 only
    init_scale: float = setting(2.0**16, above=0, also=["loss_scale"])
    growth_factor: float = setting(2.0, min=1)  # after growth_interval steps without overflow
    backoff_factor: float = setting(0.5, above=0, below=1)  # after an overflow, which skips a step
    growth_interval: int = setting(2000, min=1)  # steps


@dataclass(frozen=True, kw_only=True)
class CompileConfig:
    """Arguments of torch.compile."""

    backend: str = "inductor"
    mode: str | None = None  # such as reduce-overhead, max-autotune
    dynamic: bool | None = None  # null: shapes that change become dynamic


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Length, batch size, precision and checkpoints of the training."""

    epochs: int | float | None = setting(
        None, above=0, also=["num_epochs", "max_epochs", "n_epochs"]
    )
    max_steps: int | None = setting(None, min=1, also=["steps", "num_steps", "iterations"])
    # epochs and max_steps: at least one; with both, whichever comes first
    batch_size: int = setting(256, min=1, also=["batch", "bs"])  # images, over all processes
    precision: Literal["float32", "bfloat16", "float16"] = setting(
        "float32", also=["amp", "fp16", "bf16", "dtype"]
    )
    step: Component = setting(Component(name="standard"), of="train_steps", also=["train_step"])
    accumulate: int = setting(1, min=1, also=["accum", "grad_accum", "accumulation"])
    # batches per step (step: accumulate), each of batch_size; a loss sees one batch at a time
    seed: int = setting(0, min=0)
    # NaN or infinity: end the run; skip the step, for which each step waits for the device; or
    # return to the last checkpoint and leave out the batches in question
    on_nan: Literal["stop", "skip", "rollback"] = setting("stop", also=["terminate_on_nan"])
    nan_budget: int = setting(3, min=0)  # skip: steps in a row; rollback: returns of a run
    grad_scaler: GradScalerConfig = setting(GradScalerConfig(), also=["scaler", "amp_args"])
    # null: as torch has it, which is highest. high: float32 products on TF32 units (10 of 23 bits
    # of the fraction), medium: on bfloat16 units (7 bits)
    matmul_precision: Literal["highest", "high", "medium"] | None = setting(
        None, also=["tf32", "allow_tf32", "float32_matmul_precision"]
    )
    cudnn_benchmark: bool = setting(False, also=["benchmark"])  # measure convolution algorithms
    # once for each shape and take the fastest
    # only operations with the same result each time; those without such a form are an error
    deterministic: bool = setting(False, also=["cudnn_deterministic"])
    compile: Literal[False, "model", "step"] = False  # model: forward and backward of the network
    compile_options: CompileConfig = CompileConfig()
    log_every: int = setting(50, min=1, also=["log_interval"])  # steps
    device: str = setting("auto", also=["gpu", "accelerator"])  # or cpu, cuda, mps, xpu; auto: the
    # accelerator that torch sees, else the CPU
    checkpoint_every: int | str = setting(
        "1 epoch", duration=True, min=1, also=["save_every", "save_interval"]
    )
    keep_checkpoints: int = setting(3, min=1)  # the newest; older ones are deleted
    keep_every: int | str | None = setting(None, duration=True, min=1)  # saved and kept for good
    keep_best: KeepBest = setting(KeepBest(), also=["save_best", "monitor", "best_checkpoint"])
    async_checkpoints: bool = True  # write while training goes on, from a copy in host memory
    sharded_checkpoints: bool = setting(False, also=["sharded", "dcp"])  # every process writes
    # its part into a folder, nothing is gathered (parallel.reduce: fsdp)
    threads: int | Literal["auto"] = setting(
        "auto", min=1, max=1024
    )  # of torch on the CPU, per process;
    # auto: three quarters of the cores, with a GPU those that workers leave; kept on resume
    stop_at: int | None = setting(None, min=1)  # stop after this step as if interrupted

    @property
    def uses_compiler(self) -> bool:
        """True if torch.compile is used."""
        return bool(self.compile) or self.step.name == "compiled"

    def to_dict(self) -> dict[str, Any]:
        """Return the section as in the yaml."""
        inner = {
            "keep_best": own(self.keep_best),
            "step": self.step.to_dict() if self.step.args else self.step.name,
            "grad_scaler": own(self.grad_scaler),
            "compile_options": own(self.compile_options),
        }
        return {**own(self, without=[*inner]), **inner}
