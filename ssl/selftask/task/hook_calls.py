"""Order the hooks of a task, and call them at their points."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from selftask.config.extensions.user_code import calling_place, check_takes, source_of
from selftask.errors import UserError, check_known
from selftask.hooks.base import POINTS, Hook, Task, defines
from selftask.parallel.reduction import Reduction


def in_order(hooks: Iterable[Any]) -> list[Any]:
    """Return hooks in ascending order of priority; a hook without a priority counts as 50.

    Raises:
        UserError: If a priority is not a number.
    """

    def priority(hook: Any) -> float:
        value = getattr(hook, "priority", 50)
        if not isinstance(value, int | float):
            raise UserError(
                f"{source_of(type(hook))}: priority of {type(hook).__name__} is {value!r}; a "
                "number is expected, such as 50, and the hook with the lowest runs first"
            )
        return value

    return sorted(hooks, key=priority)


def calls(hooks: Iterable[Any], points: Iterable[str]) -> dict[str, list[Any]]:
    """Return, for each point, the methods of the hooks that define it.

    Raises:
        UserError: If a method does not take the arguments of its point.
    """
    by_point: dict[str, list[Any]] = {}
    for point in points:
        _, *arguments = inspect.signature(getattr(Hook, point)).parameters
        by_point[point] = [getattr(hook, point) for hook in hooks if defines(hook, point)]
        for call in by_point[point]:
            check_takes(call, arguments, f"the hook point {point}")
    return by_point


def call_hooks(task: Task, point: str) -> None:
    """Call the functions of a hook point, in the first steps after a check of the step.

    Raises:
        UserError: If there is no such point, or a hook has raised StopIteration, which would end
            the phase; also as ``StepCheck.at``.
    """
    if task.step_check.remaining:
        task.step_check.at(point, task)
    functions = task.calls.get(point)
    if functions is None:
        check_known(point, POINTS, f"{calling_place()}: run_hooks: no hook point {point!r}")
        return
    for call in functions:
        try:
            call(task)
        except StopIteration:
            raise UserError(
                f"{source_of(call)}: a hook has raised StopIteration at {point}; to end the run, "
                'set task.clock.stopped = "the reason" at on_step'
            ) from None


def wrapped_batches(wrap: Any, task: Task, batches: Iterator[Any]) -> Iterator[Any]:
    """Return the batches of a phase, wrapped by the ``wrap_batches`` of a hook.

    Raises:
        UserError: If the hook does not return an iterator.
    """
    wrapped = wrap(task, batches)
    if not isinstance(wrapped, Iterator):
        raise UserError(
            f"{source_of(wrap)}: wrap_batches returned a {type(wrapped).__name__}, not an "
            "iterator; yield the batches one by one"
        )
    return wrapped


def gradient_reductions(
    task: Task, wrappers: Iterable[Any]
) -> dict[str | None, Callable[[], None]]:
    """Return functions that average gradients over ranks and drop those of frozen parameters.

    The functions hold no reference to the task, so they do not keep its memory alive.

    Args:
        task: The task.
        wrappers: ``wrap_reduction`` of the hooks that define it, in order; they wrap the reduction
            for ``optimizer``.

    Returns:
        Functions by the name of the optimizer in ``optimizers``; None for ``optimizer``.

    Raises:
        UserError: If a hook's ``wrap_reduction`` does not return a function.
    """

    activations, frozen, clock = task.activations, task.frozen, task.clock
    check = task.step_check

    def reduce(name: str | None, reduction: Reduction) -> None:
        check.reductions += 1
        reduction.reduce()
        if name is None and activations.is_open:
            activations.finalize()
        if frozen.until:
            frozen.drop_gradients(clock.steps_done)

    functions: dict[str | None, Callable[[], None]]
    functions = {name: partial(reduce, name, one) for name, one in task.reductions.items()}
    for wrap in wrappers:
        functions[None] = wrapped = wrap(task, functions[None])
        if not callable(wrapped):
            raise UserError(
                f"{source_of(wrap)}: wrap_reduction returned {wrapped!r}, not a function that "
                "calls `reduce`"
            )
    return functions
