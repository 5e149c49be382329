"""The base class of hooks, and the training loop that calls them::

on_start
for each phase:                 # an epoch of training, or a pass over the test set
    on_phase_start
    for each step:
        forward;  on_forward
        loss;     on_loss_and_meter
        backward; on_backward   # training only: gradients are final and unscaled
        update;   on_update     # training only
        on_step
    on_phase_end
on_end
before_save / after_load        # around checkpoints
on_exception                    # after any error, before the process ends
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from selftask.classy import ClassyHook

if TYPE_CHECKING:
    from selftask.task import Task

POINTS = (
    "on_start",
    "on_phase_start",
    "on_forward",
    "on_loss_and_meter",
    "on_backward",
    "on_update",
    "on_step",
    "on_phase_end",
    "on_end",
    "before_save",
    "after_load",
    "on_exception",
)


class Hook(ClassyHook):  # type: ignore[misc]  # classy-vision ships no types
    """Base class; a subclass defines the points it needs. A misspelt point is a TypeError.

    Hooks run in the order of ``priority``, lowest first, after the method. A hook with state
    returns it from ``state_dict`` as tensors and plain python.
    """

    priority: ClassVar[int] = 50

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name in vars(cls):
            if name.startswith(("on_", "before_", "after_")) and name not in POINTS:
                points = ", ".join(POINTS)
                raise TypeError(f"{cls.__name__}.{name} is not a hook point; there are: {points}")

    def on_start(self, task: Task) -> None: ...
    def on_phase_start(self, task: Task) -> None: ...
    def on_forward(self, task: Task) -> None: ...
    def on_loss_and_meter(self, task: Task) -> None: ...
    def on_backward(self, task: Task) -> None: ...
    def on_update(self, task: Task) -> None: ...
    def on_step(self, task: Task) -> None: ...
    def on_phase_end(self, task: Task) -> None: ...
    def on_end(self, task: Task) -> None: ...
    def before_save(self, task: Task) -> None: ...
    def after_load(self, task: Task) -> None: ...
    def on_exception(self, task: Task) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def get_classy_state(self) -> dict[str, Any]:
        return self.state_dict()

    def set_classy_state(self, state_dict: dict[str, Any]) -> None:
        self.load_state_dict(state_dict)


def defines(hook: Any, point: str) -> bool:
    """Return whether a hook defines ``point``; Classy's own hooks have five of the points."""
    method = getattr(type(hook), point, None)
    idle = (getattr(Hook, point), getattr(ClassyHook, point, None), ClassyHook._noop)
    return method is not None and method not in idle
