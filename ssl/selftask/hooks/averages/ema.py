"""Exponential moving average of the trained weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from selftask.config.fields import setting
from selftask.hooks.averages.weight_average import WeightAverage
from selftask.hooks.base import Task
from selftask.registry import register_hook

_DECAYS = ("decay", "half_life", "alpha")


@register_hook("ema")
@dataclass(eq=False, kw_only=True)
class ExponentialAverage(WeightAverage):
    """Exponential average of the weights: average <- d * average + (1 - d) * weights.

    See Mean Teacher, arXiv:1703.01780, section 2. d is ``decay``, or computed from ``half_life`` or
    ``alpha``. With ``warmup`` d is at most (1 + t) / (10 + t) after t steps, so that the initial
    weights are forgotten. Until ``start`` the average is a copy of the network, and t counts the
    steps after it.
    """

    name: ClassVar[str] = "ema"

    decay: float | None = setting(None, min=0, below=1)
    """Decay per step; null: 0.9999, unless ``half_life`` or ``alpha`` is given."""
    half_life: int | None = setting(None, min=1)
    """Number of images after which the contribution of old weights has halved. An alternative to
    ``decay`` that is independent of the batch size.
    """
    alpha: float | None = setting(None, above=0)
    """Rule of pycls: each update has the decay 1 - alpha * samples in a step * ``every`` / epochs;
    a typical alpha is 1e-5. An alternative to ``decay`` that also follows the length of the run.
    """
    warmup: bool = True
    """Whether the decay is smaller in the first steps, so that initial weights are forgotten."""
    every: int = setting(1, min=1)
    """Number of steps between updates; each update applies the decay to this power."""
    start: int | str = setting(0, duration=True, min=0)
    """Time until which the average is a copy of the network."""

    def problems(self, config: dict[str, Any]) -> Iterator[str]:
        yield from super().problems(config)
        names = [name for name in _DECAYS if getattr(self, name) is not None]
        for name in names[1:]:
            yield f"{name}: {names[0]} is given too, and only one can count; take one of them out"

    def on_start(self, task: Task) -> None:
        super().on_start(task)
        self.first = self.step_of(self.start, task)
        if not self.weights:
            self._begin(task)
        self.decay_of_step = 0.9999 if self.decay is None else self.decay
        length = task.length
        samples = length.samples_per_step
        if self.half_life is not None:
            self.decay_of_step = 0.5 ** (samples / self.half_life)
        elif self.alpha is not None:
            epochs = length.total_steps / length.steps_per_epoch
            decay = max(0.0, 1.0 - self.alpha * samples * self.every / epochs)
            self.decay_of_step = decay ** (1 / self.every)

    def on_update(self, task: Task) -> None:
        step = task.steps_done + 1 - self.first
        if step % self.every == 0:
            decay = self.decay_of_step if step > 0 else 0.0
            if self.warmup and step > 0:
                decay = min(decay, (1 + step) / (10 + step))
            self.update(1.0 - decay**self.every)
