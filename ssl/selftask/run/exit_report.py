"""Report the end of a run consistently in its last log line, ``status.json`` and exit code."""

from __future__ import annotations

import errno
import re
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from selftask.config.compose.provenance import show_path
from selftask.config.extensions.user_code import is_users, place_of, user_frames
from selftask.errors import RunError, UserError, masked, message_of, with_advice, with_noun
from selftask.hooks.failures.non_finite import NonFiniteLoss
from selftask.logs import LOGGER
from selftask.logs.events import add_event
from selftask.logs.lines import add_line, log_result
from selftask.logs.unreadable import UNREADABLE
from selftask.report.at_end import write_end_page
from selftask.run import slurm_job
from selftask.run.failure import Failure
from selftask.run.status import Status
from selftask.run.watchdog import Watch
from selftask.task import Task
from selftask.task.memory_report import is_out_of_memory, memory_report


class Ending:
    """Reporter of how the run of ``task`` ended; rank 0 writes ``status.json``.

    Nothing is written to a folder in which another run has begun meanwhile.
    """

    def __init__(self, task: Task, status: Status) -> None:
        self.task, self.status = task, status
        self.first = task.world.rank == 0
        self.failed_at: int | None = None  # step of the failure; None: the step in progress

    @property
    def step(self) -> int:
        """Number of finished steps."""
        return self.task.steps_done if hasattr(self.task, "clock") else 0

    @property
    def unreadable(self) -> list[str]:
        """A sentence for each data set with unreadable images."""
        data = getattr(self.task, "data_module", None)
        return [] if data is None else data.unreadable()

    def _write_status(self, state: str, kind: str, line: str, **more: Any) -> None:
        """Write ``status.json``, and add an event ``kind`` with the line."""
        if self.status.is_replaced():
            return
        unreadable = {UNREADABLE: self.unreadable} if self.unreadable else {}
        self.status.write(state, step=self.step, **more, **unreadable)
        add_event(self.task.out, kind, line, step=self.step, **more)

    def finished(self) -> int:
        """Report success; return 0."""
        seconds = time.monotonic() - self.status.started_clock
        steps = with_noun(self.step, "step")
        line = f"RUN finished: {steps} in {seconds:.0f} s, {self.task.config.out}"
        if self.task.clock.stopped is not None:
            line += f"; {self.task.clock.stopped}"
        if self.first:
            self._write_status("finished", "finish", line)
        self._write_page()
        log_result("; ".join([line, *self.unreadable]))
        return 0

    def interrupted(self, by: str) -> int:
        """Report a stop after a saved checkpoint.

        Args:
            by: Name of the signal or cause.

        Returns:
            0 if the job was requeued (on other ranks than 0: if rank 0 may requeue it), 1 if
            another rank has failed, 128 + the signal's number after a signal, else 75.
        """
        return self._interrupted(by, f"checkpoint saved in {self.task.config.out}/checkpoints")

    def aborted(self, by: str) -> int:
        """Report a stop without a checkpoint: after a second signal or before the first step.

        Arguments and result are those of ``interrupted``.
        """
        return self._interrupted(by, "left at once; nothing was saved after the last checkpoint")

    def _interrupted(self, by: str, how: str) -> int:
        if self.status.failed_by_another():
            return 1  # another rank failed; the signal only ends the remaining ranks
        decision = slurm_job.depart(by, self.task.config.launch, self.task.out, first=self.first)
        line = f"RUN interrupted by {decision.by} at step {self.step}; {how}; {decision.outlook}"
        kind = "requeue" if decision.state == "requeued" else "stop"
        if self.first:
            self._write_status(decision.state, kind, line, by=decision.by)
        self._write_page()
        log_result("; ".join([line, *self.unreadable]))
        return decision.code

    def failed(self, error: BaseException, watch: Watch | None) -> int:
        """Report a failure, with its original cause if another rank failed first.

        Args:
            error: The exception raised on this rank.
            watch: The watchdog, or None if the process group does not exist yet.

        Returns:
            2 for an error the user must fix, else 1.
        """
        trace = "".join(traceback.format_exception(error))
        self._write_error(self.task.world.rank, trace)
        if isinstance(error, NonFiniteLoss):
            self.failed_at = error.step
        is_explained = isinstance(error, UserError | RunError)
        message = explain(error)
        if is_out_of_memory(error):
            message = "\n".join([message, *memory_report(self.task)])
        failure = Failure(self.task.world.rank, message, "" if is_explained else trace.rstrip())
        if watch is None:  # no process group yet
            failure.rank0_hears = self.first
        else:
            failure = watch.cause(failure, of_connection=_is_of_connection(error))
        self.report(failure)
        return error.exit_code if isinstance(error, UserError) else 1

    def report(self, failure: Failure) -> None:
        """Log the failure. Rank 0 also writes the status; if it is gone, another rank does so.

        Rank 0 does nothing if another rank has already written it.
        """
        first, *rest = failure.message.splitlines() or [""]
        step = self.failed_at or (self.task.clock.step if hasattr(self.task, "clock") else 0)
        line = f"RUN FAILED at step {step} on rank {failure.rank}: {first}"
        is_reported = self.status.failed_by_another()
        if self.first and is_reported:  # rank 0 was suspended, and the others gave up
            return
        for_rank0 = not failure.rank0_hears and not is_reported
        if self.first or for_rank0:
            with _os_errors_logged():
                facts = {"rank": failure.rank, "error": failure.message, "lost": failure.lost}
                self._write_status("failed", "failure", line, **facts)
            self._write_error_for(failure)
            self._write_page(for_rank0=for_rank0)
        for text in (failure.details, *(line for line in rest if line not in failure.details)):
            if text:
                LOGGER.error("%s", text)
        LOGGER.error("%s", line)
        if for_rank0:
            with _os_errors_logged():
                add_line(self.task.out, line)
            print(line, file=sys.stderr, flush=True)

    def _write_page(self, *, for_rank0: bool = False) -> None:
        """Write the report before the last line of the log."""
        is_ours = (self.first or for_rank0) and not self.status.is_replaced()
        if self.task.config.train.report and is_ours:
            write_end_page(self.task.out)

    def _write_error_for(self, failure: Failure) -> None:
        """Write the error file of a rank that was killed or hangs, if it did not write its own."""
        path = self._errors_of(failure.rank)
        if not path.exists() or path.stat().st_mtime < self.status.started:  # stale file
            self._write_error(failure.rank, f"{failure.message}\n{failure.details}")

    def _write_error(self, rank: int, text: str) -> None:
        if self.status.is_replaced():
            return
        with _os_errors_logged():
            path = self._errors_of(rank)
            path.parent.mkdir(exist_ok=True)
            path.write_text(masked(text), encoding="utf-8")

    def _errors_of(self, rank: int) -> Path:
        return self.task.out / "errors" / f"rank{rank}.txt"


@contextmanager
def _os_errors_logged() -> Iterator[None]:
    """Context that logs an OSError, so that a full disk does not hide the failure itself."""
    try:
        yield
    except OSError as error:
        LOGGER.error("the end of the run could not be written down: %s", error)


def explain(error: BaseException) -> str:
    """Return an error's message, with its type unless it is a UserError or RunError.

    The message begins with file and line if the error was raised in the user's own code. It
    includes advice if memory or disk space ran out, and for common mistakes with gradients.
    """
    message = message_of(error)
    frames = user_frames(error)
    if "in DataLoader worker process" in message.partition("\n")[0]:
        return f"{_cause_in_worker(message)}\n{message}"
    if frames and not isinstance(error, UserError | RunError):
        message = f"{place_of(frames[-1])}: {message}"
    if isinstance(error, torch.OutOfMemoryError):
        return (
            "the GPU's memory is full; try a smaller train.batch_size, train.precision=bfloat16 or "
            f"parallel.activation_checkpointing=blocks\n{message}"
        )
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{message}; make room and start the same command again: it continues"
    if isinstance(error, MemoryError):
        return f"the machine's memory is full; try fewer data.num_workers\n{message}"
    if "DefaultCPUAllocator" in message:  # torch raises a RuntimeError for CPU memory
        return f"the machine's memory is full; try a smaller model or train.batch_size\n{message}"
    return with_advice(message)


def _cause_in_worker(message: str) -> str:
    """Return the error of a loader's worker, from the traceback in torch's message."""
    cause = "; ".join(message.rpartition("\n  ")[2].splitlines()[1:])  # below its last line of code
    frames = re.findall(r'File "(.+)", line (\d+)', message)
    places = [f"{show_path(Path(file))}:{line}" for file, line in frames if is_users(file)]
    return ": ".join([*places[-1:], cause])


def _is_of_connection(error: BaseException) -> bool:
    """Return True for a broken connection, which usually means that another rank failed."""
    return isinstance(error, dist.DistError) or "/gloo/" in str(error)
