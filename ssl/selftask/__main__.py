"""Entry point of ``python -m selftask`` and of the script ``selftask``."""

from __future__ import annotations

import atexit
import gc
import io
import os
import sys
import threading
from types import FrameType
from typing import NoReturn

from selftask.cli.main import main

_CALLERS = (["<module>"], ["<module>", "_run_code", "_run_module_as_main"])  # script; python -m


def run() -> NoReturn:
    """Run the command of ``sys.argv`` and exit with its exit code.

    If torch has been imported, the process exits without freeing its objects, which would take a
    second of CPU time. It exits normally if other code has called this function, such as a
    profiler, a debugger or a test.
    """
    code = _flush_output(main())
    if "torch" in sys.modules and _is_whole_process(sys._getframe().f_back):
        _exit_without_freeing(code)
    sys.exit(code)


def _is_whole_process(frame: FrameType | None) -> bool:
    """Return True if ``frame``, the caller of ``run``, is the entry point and nothing follows it.

    With ``python -i``, a prompt follows.
    """
    names = []
    while frame is not None:
        names.append(frame.f_code.co_name)
        frame = frame.f_back
    return names in _CALLERS and not sys.flags.inspect


def _exit_without_freeing(code: int) -> NoReturn:
    """End the process as Python does, up to the point where it would free its modules.

    Threads are joined, exit handlers run (loader workers, wandb, TensorBoard, logging), and open
    files are flushed. The exit code is ``code``, or 1 if that is 0 and stdout cannot be written.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for value in gc.get_objects():
        kind = type(value)  # isinstance() would ask proxies of libraries for their class
        if issubclass(kind, io.TextIOWrapper | io.BufferedWriter) and not value.closed:
            _flush(value)  # a file that a plug-in never closed; freeing it would write its buffer
    os._exit(_flush_output(code))


def _flush(file: io.TextIOWrapper | io.BufferedWriter) -> None:
    try:
        file.flush()
    except (OSError, ValueError) as error:
        print(f"error: {file.name}: could not be written: {error}", file=sys.stderr)


def _flush_output(code: int) -> int:
    """Flush stdout; return ``code``, or 1 if it is 0 and the output could not be written."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:  # `selftask plan simclr | head`: the reader has exited
        pass
    except OSError as error:
        print(f"error: the output could not be written: {error.strerror}", file=sys.stderr)
    else:
        return code
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python tries once more
    return code or 1


if __name__ == "__main__":
    run()
