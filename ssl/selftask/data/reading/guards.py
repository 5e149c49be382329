"""Guards for damaged or malicious files, against tracebacks and exhausted memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from selftask.config.values.budget import show_bytes
from selftask.distributed.out_of_memory import available_bytes
from selftask.errors import UserError


@contextmanager
def no_traceback(message: str) -> Iterator[None]:
    """Context manager that turns errors of a library into a UserError ``message: why``.

    Parsers may raise any error on damaged headers, also MemoryError if a header has a wrong size.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        why = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"{message}: {why}") from error


def check_memory(num_bytes: int, what: str, advice: str) -> None:
    """Raise UserError if ``what``, which needs ``num_bytes``, does not fit into free memory.

    Args:
        num_bytes: Bytes that are needed.
        what: What needs them.
        advice: What the user can do.
    """
    free = available_bytes()
    if free is not None and num_bytes > free:
        raise UserError(
            f"{what} would take {show_bytes(num_bytes)} of memory, and {show_bytes(free)} are "
            f"free; {advice}"
        )
