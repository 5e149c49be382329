"""A guard against files whose content exhausts the memory."""

from __future__ import annotations

from selftask.config.values.budget import show_bytes
from selftask.distributed.out_of_memory import available_bytes
from selftask.errors import UserError


def check_memory(num_bytes: int, subject: str, advice: str) -> None:
    """Raise UserError if data of this size does not fit into free memory.

    Nothing is checked if the free memory is unknown.

    Args:
        num_bytes: Size of the data, in bytes.
        subject: Description of the data, for the message.
        advice: Advice to the user, for the message.
    """
    free = available_bytes()
    if free is not None and num_bytes > free:
        raise UserError(
            f"{subject} would take {show_bytes(num_bytes)} of memory, and {show_bytes(free)} are "
            f"free; {advice}"
        )
