"""The end of a run, told once: its last line, ``status.json`` and exit code say the same."""

from __future__ import annotations

import errno
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from selftask.errors import RunError, UserError
from selftask.logs import LOGGER, add_line
from selftask.run import slurm_job
from selftask.run.failure import Failure
from selftask.run.status import Status
from selftask.run.watchdog import Watch
from selftask.task import Task


class Ending:
    """How the run of ``task`` ended, in the words of this rank; rank 0 speaks for all."""

    def __init__(self, task: Task, status: Status) -> None:
        self.task, self.status = task, status
        self.first = task.world.rank == 0

    @property
    def step(self) -> int:
        return self.task.steps_done if hasattr(self.task, "clock") else 0

    def finished(self) -> int:
        """All steps are done; 0."""
        if self.first:
            self.status.write("finished", step=self.step)
        seconds = time.monotonic() - self.status.started_clock
        LOGGER.info(
            "RUN finished: %d steps in %.0f s, %s", self.step, seconds, self.task.config.out
        )
        return 0

    def interrupted(self, by: str) -> int:
        """Asked to stop, and saved; 0 with a requeue, else the signal's code, or 75."""
        return self._interrupted(by, f"checkpoint saved in {self.task.config.out}/checkpoints")

    def left_at_once(self, by: str) -> int:
        """Asked twice, or before the first step: there was no time to save."""
        return self._interrupted(by, "left at once; nothing was saved after the last checkpoint")

    def _interrupted(self, by: str, how: str) -> int:
        if self.status.failed_by_another():
            return 1  # the signal ends what is left of the job
        leaving = slurm_job.depart(by, self.task.config.launch, first=self.first)
        if self.first:
            self.status.write(leaving.state, step=self.step, by=leaving.by)
        line = "RUN interrupted by %s at step %d; %s; %s"
        LOGGER.info(line, leaving.by, self.step, how, leaving.outlook)
        return leaving.code

    def failed(self, error: BaseException, watch: Watch | None) -> int:
        """Tell what went wrong, here or where it began; 2 for what the user has to put right."""
        trace = "".join(traceback.format_exception(error))
        self._write_error(self.task.world.rank, trace)
        known = isinstance(error, UserError | RunError)
        failure = Failure(self.task.world.rank, explain(error), "" if known else trace.rstrip())
        if watch is None:  # the ranks have not met
            failure.rank0_hears = self.first
        else:
            failure = watch.cause(failure, of_connection=_is_of_connection(error))
        self.tell(failure)
        return error.exit_code if isinstance(error, UserError) else 1

    def tell(self, failure: Failure) -> None:
        """The last lines of a failed run; whoever is left speaks when rank 0 is gone."""
        first, *rest = failure.message.splitlines() or [""]
        line = f"RUN FAILED at step {self.step} on rank {failure.rank}: {first}"
        told = self.status.failed_by_another()
        if self.first and told:  # it was stopped, the others gave up, and it wakes
            return
        for_rank0 = not failure.rank0_hears and not told
        if self.first or for_rank0:
            with _written_or_said():
                what = {"rank": failure.rank, "error": failure.message, "lost": failure.lost}
                self.status.write("failed", step=self.step, **what)
            self._write_error_for(failure)
        for text in (failure.details, *rest):
            if text:
                LOGGER.error("%s", text)
        LOGGER.error("%s", line)
        if for_rank0:
            with _written_or_said():
                add_line(self.task.out, line)
            print(line, file=sys.stderr, flush=True)

    def _write_error_for(self, failure: Failure) -> None:
        """A rank that was killed, or hangs, has not written why."""
        path = self._errors_of(failure.rank)
        if not path.exists() or path.stat().st_mtime < self.status.started:  # of an attempt before
            self._write_error(failure.rank, f"{failure.message}\n{failure.details}")

    def _write_error(self, rank: int, text: str) -> None:
        with _written_or_said():
            path = self._errors_of(rank)
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")

    def _errors_of(self, rank: int) -> Path:
        return self.task.out / "errors" / f"rank{rank}.txt"


@contextmanager
def _written_or_said() -> Iterator[None]:
    """Context in which a file is written to tell of an end, which a full disk must not replace."""
    try:
        yield
    except OSError as error:
        LOGGER.error("the end of the run could not be written down: %s", error)


def explain(error: BaseException) -> str:
    """The message of an error whose cause we know; else its type and message."""
    if isinstance(error, UserError | RunError):
        return str(error)
    message = f"{type(error).__name__}: {error}"
    if isinstance(error, torch.OutOfMemoryError):
        return (
            "the GPU's memory is full; try a smaller train.batch_size, train.precision=bfloat16 or "
            f"parallel.activation_checkpointing=blocks\n{message}"
        )
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{message}; make room and start the same command again: it goes on"
    if isinstance(error, MemoryError):
        return f"the machine's memory is full; try fewer data.num_workers\n{message}"
    if "DefaultCPUAllocator" in message:  # a RuntimeError of torch's
        return f"the machine's memory is full; try a smaller model or train.batch_size\n{message}"
    return message


def _is_of_connection(error: BaseException) -> bool:
    """Whether that is what the failure of another rank looks like from here."""
    return isinstance(error, dist.DistError) or "/gloo/" in str(error)
