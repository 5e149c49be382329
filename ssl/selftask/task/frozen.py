"""Parameters that are not trained in the first steps."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

from torch import nn


class FrozenParameters:
    """Removes the gradients of frozen parameters, so that the optimizer skips them.

    Without a gradient, an optimizer applies neither weight decay nor momentum, and creates no
    state. The gradients are computed and reduced like all others, so every rank calls the same
    collectives. Whether a parameter is frozen depends on the step only, so there is no state.

    Args:
        frozen: Pairs (number of steps, parameter); the parameter is frozen for this number of
            steps.
    """

    def __init__(self, frozen: Iterable[tuple[int, nn.Parameter]]) -> None:
        self.until: dict[int, list[nn.Parameter]] = {}
        for steps, parameter in frozen:
            if steps:
                self.until.setdefault(steps, []).append(parameter)

    def now(self, steps_done: int) -> set[nn.Parameter]:
        """Return the parameters that are frozen after ``steps_done`` steps."""
        frozen = (group for steps, group in self.until.items() if steps_done < steps)
        return set(chain.from_iterable(frozen))

    def drop_gradients(self, steps_done: int) -> None:
        """Remove the gradients of all parameters that are frozen after ``steps_done`` steps."""
        for parameter in self.now(steps_done):
            parameter.grad = None
