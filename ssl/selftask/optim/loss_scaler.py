"""Loss scaling for float16, in which small gradients would otherwise round to zero.

The interface is that of ``torch.amp.GradScaler``, which skips a step silently. Here a gradient that
overflows on any rank raises StepSkipped on all ranks, so that schedules, teachers, queues and the
optimizer do not change. The check waits for the device once per step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from selftask.config.schema import GradScalerConfig
from selftask.distributed.collectives import all_reduce_sum
from selftask.errors import RunError, StepSkipped
from selftask.optim.gradients import gradients, local_parts

MIN_SCALE = 1e-4  # below this scale, non-finite gradients have another cause than overflow


class NoScaler:
    """Scaler that leaves loss and gradients unchanged."""

    def is_enabled(self) -> bool:
        return False

    def get_scale(self) -> float:
        return 1.0

    def scale(self, loss: Tensor) -> Tensor:
        return loss

    def unscale_(self, optimizer: Any) -> None: ...

    def step(self, optimizer: Any, *, where: float) -> None:
        optimizer.step(where=where)

    def update(self) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class LossScaler(NoScaler):
    """Loss scaler whose scale falls if gradients overflow and rises after steps without overflow.

    Args:
        config: The section ``train.grad_scaler``.
        log: Function called with ``"loss_scale"`` and the scale at each step.
    """

    def __init__(self, config: GradScalerConfig, log: Callable[[str, float], None]) -> None:
        self._config, self._log = config, log
        self._scale = config.init_scale
        self._good_steps = 0  # since the last change of the scale

    def is_enabled(self) -> bool:
        return True

    def get_scale(self) -> float:
        return self._scale

    def scale(self, loss: Tensor) -> Tensor:
        return loss * self._scale

    @torch.no_grad()
    def unscale_(self, optimizer: Any) -> None:
        """Divide the reduced gradients by the scale; lower the scale if one is not finite.

        Raises:
            StepSkipped: On every rank, if a gradient is not finite on any rank.
            RunError: Instead of StepSkipped, if the scale falls below ``MIN_SCALE``.
        """
        every = (p for group in optimizer.param_groups for p in group["params"])
        parts = local_parts(gradients(every))
        if not parts:
            return
        device = parts[0].device
        overflow = torch.zeros((), device=device)
        inverse = torch.full((), 1.0 / self._scale, device=device)
        for dtype in {part.dtype for part in parts}:
            alike = [part for part in parts if part.dtype == dtype]
            torch._amp_foreach_non_finite_check_and_unscale_(alike, overflow, inverse)
        # only shards differ between ranks, but all ranks must know
        if all_reduce_sum(overflow).item() > 0:
            self._back_off()
            raise StepSkipped

    def update(self) -> None:
        """Count a step without overflow; after ``growth_interval`` in a row, increase the scale."""
        self._log("loss_scale", self._scale)
        self._good_steps += 1
        if self._good_steps == self._config.growth_interval:
            self._scale *= self._config.growth_factor
            self._good_steps = 0

    def _back_off(self) -> None:
        self._scale *= self._config.backoff_factor
        self._good_steps = 0
        self._log("loss_scale", self._scale)
        if self._scale < MIN_SCALE:
            raise RunError(
                f"train.precision=float16: gradients are not finite at a loss scale of "
                f"{self._scale:.0e} either; use train.precision=bfloat16 or float32, or a lower "
                "optimizer.lr"
            )

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self._scale, "_growth_tracker": self._good_steps}  # torch's names

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state; an empty one, from a run in another precision, has no effect."""
        if state:
            self._scale, self._good_steps = state["scale"], state["_growth_tracker"]
