"""The base class of hooks, and the points at which they are called.

The order of the calls::

    on_start
    for each phase:                 # an epoch of training (or a part of one, if
                                    # train.phases_per_epoch > 1), or a pass over the test set
        on_phase_start
        for each step:
            before_step             # training only: before the batch is read
            forward;  on_forward
            loss;     on_loss_and_meter
            backward; on_backward   # training only: gradients are final and unscaled
            update;   on_update     # training only
            on_step
        on_phase_end
    on_end
    before_save / after_load        # around checkpoints
    before_evaluation               # of the frozen backbone; called on every rank; what is logged
                                    # here is part of the evaluation's row
    after_evaluation                # its row is task.last_row
    on_row                          # task.last_row was written to the log; the row of an
                                    # evaluation at step 0 may come before a hook's on_start
    on_exception                    # after an error or a stop (task.exception), before the process
                                    # ends, and before the run returns to a checkpoint

Two other methods wrap parts of a step: ``wrap_batches`` and ``wrap_reduction``. ``release`` is
called whenever the task is closed, even if ``task.steps()`` is abandoned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar

from selftask.classy import ClassyHook
from selftask.errors import check_known

if TYPE_CHECKING:
    from selftask.batch import Batch
    from selftask.task import Task as Task
else:
    Task = Any  # for annotations in hooks and in the parts of a task, which it imports


class Hook(ClassyHook):  # type: ignore[misc]  # classy-vision ships no types
    """Base class of hooks; a subclass defines the points it needs.

    Hooks run in the order of ``priority``, lowest first, after the method; ``hooks.NAME.priority``
    changes it for one run. A hook with state returns it from ``state_dict`` as tensors and plain
    Python objects. A class with a method named ``on_...``, ``before_...`` or ``after_...`` that is
    not a hook point raises a TypeError when it is defined.
    """

    priority: ClassVar[int] = 50
    loaded: dict[str, Any] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name in vars(cls):
            if name.startswith(("on_", "before_", "after_")) and name not in POINTS:
                points = ", ".join(POINTS)
                raise TypeError(f"{cls.__name__}.{name} is not a hook point; there are: {points}")

    def on_start(self, task: Task) -> None: ...
    def on_phase_start(self, task: Task) -> None: ...
    def before_step(self, task: Task) -> None: ...
    def on_forward(self, task: Task) -> None: ...
    def on_loss_and_meter(self, task: Task) -> None: ...
    def on_backward(self, task: Task) -> None: ...
    def on_update(self, task: Task) -> None: ...
    def on_step(self, task: Task) -> None: ...
    def on_phase_end(self, task: Task) -> None: ...
    def on_end(self, task: Task) -> None: ...
    def before_save(self, task: Task) -> None: ...
    def after_load(self, task: Task) -> None: ...
    def before_evaluation(self, task: Task) -> None: ...
    def after_evaluation(self, task: Task) -> None: ...
    def on_row(self, task: Task) -> None: ...
    def on_exception(self, task: Task) -> None: ...

    def wrap_batches(self, task: Task, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Return the batches of a phase, possibly changed; called after ``on_phase_start``.

        Hooks wrap in calling order: the one with the lowest ``priority`` is nearest to the loader.

        Args:
            task: The task; ``task.train`` is False in a test phase.
            batches: The batches of the loader, or those returned by the previous hook.
        """
        return batches

    def wrap_reduction(self, task: Task, reduce: Callable[[], None]) -> Callable[[], None]:
        """Return the function that reduces the gradients of ``optimizer`` over ranks.

        It must call ``reduce`` once. This method is called when the task is built, before the first
        step.

        Args:
            task: The task.
            reduce: The reduction, or the function returned by the previous hook.
        """
        return reduce

    def release(self) -> None:
        """Release resources of the process, such as signal handlers or a thread.

        Called whenever the task is closed: after ``on_end`` or ``on_exception``, or without either
        if its steps were abandoned or never started.
        """

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep the saved state as ``loaded``, for ``on_start``."""
        self.loaded = state

    def get_classy_state(self) -> dict[str, Any]:
        return self.state_dict()

    def set_classy_state(self, state_dict: dict[str, Any]) -> None:
        self.load_state_dict(state_dict)


POINTS = tuple(name for name in vars(Hook) if name.startswith(("on_", "before_", "after_")))
"""Hook points; those of a step in the order of its calls."""

WRAPPERS = tuple(name for name in vars(Hook) if name.startswith("wrap_"))


class ReleasedAtEnd(Hook):
    """Base class of hooks that release what they hold at the end of a run or after an error."""

    def on_end(self, task: Task) -> None:
        self.release()

    def on_exception(self, task: Task) -> None:
        self.release()


def defines(hook: Any, point: str) -> bool:
    """Return True if a hook has a method ``point`` other than that of ``Hook`` or ``ClassyHook``.

    Args:
        hook: A hook of selftask or of Classy Vision; hooks of the latter have only five of the
            points.
        point: Name of a hook point, or of a method in ``WRAPPERS``.
    """
    method = getattr(type(hook), point, None)
    idle = (getattr(Hook, point), getattr(ClassyHook, point, None), ClassyHook._noop)
    return method is not None and method not in idle


def function_hook(*, priority: int = 50, **functions: Callable[[Task], None]) -> Hook:
    """Return a hook of plain functions: ``function_hook(on_step=lambda task: print(task.where))``.

    Args:
        priority: Position among the hooks of a point; lower runs earlier.
        **functions: Functions of the task, by hook point.

    Raises:
        UserError: If a name is not a hook point.
    """
    for name in functions:
        check_known(name, POINTS, f"function_hook: no hook point {name!r}")
    calls = {name: staticmethod(function) for name, function in functions.items()}
    return type("FunctionHook", (Hook,), {"priority": priority, **calls})()
