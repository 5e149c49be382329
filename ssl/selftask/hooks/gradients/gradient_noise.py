"""Gradient noise scale: an estimate of the largest useful batch size."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from selftask.config.fields import setting
from selftask.distributed.collectives import all_reduce_mean, world_size
from selftask.hooks.base import Hook, Task
from selftask.hooks.gradients.trained import updated_parameters
from selftask.logs import get_logger
from selftask.optim.gradients import gradients, total_norm
from selftask.registry import register_hook

log = get_logger(__name__)


@register_hook("gradient_noise")
@dataclass(eq=False, kw_only=True)
class GradientNoise(Hook):
    """Logs ``gradient_noise_scale``, in samples (arXiv:1812.06162, appendix A.1).

    In logged steps, the norm of the step's gradient is compared with the norms of its parts: the
    gradients of each rank and each accumulated batch. There must be at least two parts; no
    additional forward or backward pass is needed. The formula assumes a loss that is a mean over
    samples; for other losses only the trend is meaningful.
    """

    priority: ClassVar[int] = 15  # before clip_gradients
    decay: float = setting(0.9, min=0, below=1)
    """Decay per logged step of the running means of noise and gradient, whose ratio is logged."""

    def problems(self, config: dict[str, Any]) -> Iterator[str]:
        step = config["train"]["step"]["name"]
        if step not in ("standard", "accumulate"):
            yield f"train.step={step!r}: hooks.gradient_noise knows 'standard' and 'accumulate'"
        if config["parallel"]["reduce"] == "fsdp":
            yield "parallel.reduce='fsdp': hooks.gradient_noise needs 'manual' or 'ddp'"

    def on_start(self, task: Task) -> None:
        self.means: tuple[float, float] = getattr(self, "means", (0.0, 0.0))
        self.handles: list[Any] = []
        if world_size() * task.config.train.accumulate == 1:
            log.warning("hooks.gradient_noise: needs several ranks or train.accumulate=2 or more")

    def before_step(self, task: Task) -> None:
        self._stop()  # the previous step may have been abandoned
        if not task.should_log:
            return
        self.square = torch.zeros((), device=task.device)  # summed over the parts of this rank
        self.parts = min(task.config.train.accumulate, task.batches_left)
        frozen = task.frozen.now(task.steps_done)  # no part of the step's gradient
        trained = [p for p in updated_parameters(task) if p not in frozen]
        self.handles = [p.register_hook(self._add) for p in trained]

    def _add(self, grad: Tensor) -> None:
        """Add the squared norm of a parameter's gradient on one batch, with the loss's scale."""
        self.square += grad.detach().float().square().sum()

    def on_backward(self, task: Task) -> None:
        if not self.handles:
            return
        self._stop()
        number = self.parts * world_size()
        if number == 1:
            return
        big = float(total_norm(gradients(updated_parameters(task))) ** 2)
        scale = task.grad_scaler.get_scale() / self.parts  # scale of a part's loss
        small = float(all_reduce_mean(self.square)) / self.parts / scale**2
        size = task.length.batch_size * self.parts
        estimates = estimate(small, big, size / number, size)
        self.means = tuple(  # type: ignore[assignment]
            self.decay * mean + (1 - self.decay) * new
            for mean, new in zip(self.means, estimates, strict=True)
        )
        noise, signal = self.means
        if signal > 0:  # the estimate may be negative at first
            task.log("gradient_noise_scale", noise / signal)

    def _stop(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles.clear()

    def release(self) -> None:
        if hasattr(self, "handles"):
            self._stop()

    def state_dict(self) -> dict[str, Any]:
        return {"means": list(getattr(self, "means", (0.0, 0.0)))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.means = tuple(state["means"])


def estimate(small: float, big: float, small_size: float, size: float) -> tuple[float, float]:
    """Return unbiased estimates of tr(Sigma) and |G|^2.

    Sigma is the covariance of the gradients of single samples, G their mean over all data.

    Args:
        small: Mean squared norm of gradients of ``small_size`` samples.
        big: Squared norm of the gradient of ``size`` samples.
        small_size: Number of samples of a part.
        size: Number of samples of the step.
    """
    noise = (small - big) / (1 / small_size - 1 / size)
    signal = (size * big - small_size * small) / (size - small_size)
    return noise, signal
