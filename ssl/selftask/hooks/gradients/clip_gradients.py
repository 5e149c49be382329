"""Gradient clipping: by norm, by value, per parameter, or adaptive."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from selftask.config.fields import setting
from selftask.hooks.base import Hook, Task
from selftask.hooks.gradients.trained import updated_parameters
from selftask.optim.gradients import clip_adaptively, clip_norm, clip_value, gradients, total_norm
from selftask.registry import register_hook

_MAX_RATIO = 0.01  # default


@register_hook("clip_gradients")
@dataclass(eq=False, kw_only=True)
class ClipGradients(Hook):
    """Clips the reduced, unscaled gradient; logs its norm before clipping as ``grad_norm``.

    Only parameters of the section ``optimizer`` count. ``norm`` scales all gradients down to a
    common norm of at most ``max_norm``; ``per_parameter`` does so for each parameter, as in DINO's
    published code; ``value`` clamps each element to [-``max_value``, ``max_value``]; ``adaptive``
    limits the norm of each output unit's gradient to ``max_ratio`` times that of its weights
    (NFNets, arXiv:2102.06171).
    """

    priority: ClassVar[int] = 20
    mode: Literal["norm", "per_parameter", "value", "adaptive"] = "norm"
    """Quantity that is limited: the norm of all gradients, the norm of each parameter's gradient,
    each value, or the norm relative to that of the weights.
    """
    max_norm: float = setting(3.0, above=0, also=["clip_grad", "clip_norm", "grad_clip"])
    """Largest norm (modes norm and per_parameter)."""
    norm_type: float | Literal["max"] = setting(2.0, min=1)
    """Order p of the norm (modes norm and per_parameter) and of ``grad_norm``; max: the largest
    absolute value.
    """
    max_value: float | None = setting(None, above=0, also=["clip_value"])
    """Largest absolute value of an element (mode value)."""
    max_ratio: float = setting(_MAX_RATIO, above=0)
    """Largest ratio of a unit's gradient norm to that of its weights (mode adaptive); lambda of the
    paper, section 4.1.
    """

    def problems(self, config: dict[str, Any]) -> Iterator[str]:
        if self.mode == "value" and self.max_value is None:
            yield "max_value: mode 'value' needs it; set hooks.clip_gradients.max_value"
        if self.mode != "value" and self.max_value is not None:
            yield f"max_value: has no effect with mode {self.mode!r}; set mode: value"
        if self.mode != "adaptive" and self.max_ratio != _MAX_RATIO:
            yield f"max_ratio: has no effect with mode {self.mode!r}; set mode: adaptive"

    def on_backward(self, task: Task) -> None:
        parameters = updated_parameters(task)
        grads = gradients(parameters)
        p = math.inf if self.norm_type == "max" else self.norm_type
        if self.mode in ("norm", "per_parameter"):
            each = self.mode == "per_parameter"
            task.log("grad_norm", clip_norm(grads, self.max_norm, p=p, each=each))
            return
        if task.should_log:
            task.log("grad_norm", total_norm(grads, p))
        if self.max_value is not None:
            clip_value(grads, self.max_value)
        else:
            clip_adaptively(parameters, self.max_ratio)
