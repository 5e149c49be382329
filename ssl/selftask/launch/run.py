"""One process of a run, from config to exit code: its folder, log, status and last line."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
import traceback
from pathlib import Path
from typing import Any

import torch

from selftask import environment
from selftask.config.derive import cores
from selftask.config.load import to_yaml
from selftask.config.schema import Config
from selftask.data.dataset import Sources
from selftask.errors import RunError, UserError
from selftask.evaluate.online import evaluate_task
from selftask.launch.continuity import check_same_run
from selftask.logs import LOGGER, start_log, stop_log, write_json
from selftask.task import Task
from selftask.trainer import Interrupted, Trainer


def run(config: Config, sources: Sources) -> int:
    """Train what ``config`` says on ``sources``, or go on with it; the exit code.

    The last line is ``RUN finished``, ``RUN interrupted by`` or ``RUN FAILED``, and
    ``status.json`` says the same.
    """
    out = Path(config.out)
    check_same_run(config, out)
    status = Status(out, config)
    if status.says_finished():
        print(f"RUN finished already: {out} is complete; another out= or resume=never starts anew")
        return 0
    world = environment.read_world()
    torch.set_num_threads(num_threads(config))
    out.mkdir(parents=True, exist_ok=True)
    start_log(out, world.rank)
    LOGGER.info("data: %s", sources.train.describe())
    task = Task(config, sources=sources)
    task.evaluate = evaluate_task
    try:
        if world.rank == 0:
            (out / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
            write_json(out / "environment.json", environment.describe())
        status.write("running")
        Trainer().train(task)
        return _finished(task, status)
    except Interrupted as stop:
        return _interrupted(task, status, stop)
    except BaseException as error:  # noqa: BLE001 - told in full, and turned into the exit code
        return _failed(task, status, error)
    finally:
        stop_log()
        environment.leave_world()


def num_threads(config: Config) -> int:
    """Threads of torch on the CPU; ``auto``: the cores that the loader's workers leave, at least 1.

    More threads than free cores cost a factor: torch's threads wait for each other at every
    operation, and one that has lost its core to a worker makes all of them wait.
    """
    threads = config.train.threads
    return max(1, cores() - config.data.num_workers) if threads == "auto" else int(threads)


class Status:
    """``status.json``: state, step, process; written by the first rank only."""

    def __init__(self, out: Path, config: Config) -> None:
        self.path = out / "status.json"
        self.config = config
        self.first = environment.read_world().rank == 0
        self.started = time.time()

    def says_finished(self) -> bool:
        """Whether this very run is complete: asking for more steps than it had goes on with it."""
        if self.config.resume == "never" or not self.path.exists():
            return False
        status = json.loads(self.path.read_text(encoding="utf-8"))
        asked = [self.config.train.epochs, self.config.train.max_steps]
        return status.get("state") == "finished" and status.get("length") == asked

    def write(self, state: str, **more: Any) -> None:
        if self.first:
            content = {
                "state": state,
                "length": [self.config.train.epochs, self.config.train.max_steps],
                "host": socket.gethostname(),
                "pid": os.getpid(),
                "started": self.started,
                "updated": time.time(),
                **more,
            }
            write_json(self.path, content)


def _finished(task: Task, status: Status) -> int:
    status.write("finished", step=task.iteration)
    seconds = time.time() - status.started
    LOGGER.info("RUN finished: %d steps in %.0f s, %s", task.iteration, seconds, task.out)
    return 0


def _interrupted(task: Task, status: Status, stop: Interrupted) -> int:
    status.write("interrupted", step=task.iteration, by=str(stop))
    LOGGER.info(
        "RUN interrupted by %s at step %d; checkpoint saved in %s; the same command goes on",
        stop,
        task.iteration,
        task.out / "checkpoints",
    )
    number = getattr(signal, str(stop), None)
    return 128 + int(number) if number is not None else 75  # EX_TEMPFAIL: try again


def _failed(task: Task, status: Status, error: BaseException) -> int:
    """Tell what went wrong: the message where we know the cause, else the traceback too."""
    trace = "".join(traceback.format_exception(error))
    folder = task.out / "errors"
    folder.mkdir(exist_ok=True)
    (folder / f"rank{task.world.rank}.txt").write_text(trace, encoding="utf-8")
    known = isinstance(error, UserError | RunError)
    message = str(error) if known else f"{type(error).__name__}: {error}"
    step = task.iteration if hasattr(task, "clock") else 0
    status.write("failed", step=step, error=message)
    if not known:
        LOGGER.error("%s", trace.rstrip())
    *details, last = _last_line_last(message)
    for line in details:
        LOGGER.error("%s", line)
    LOGGER.error("RUN FAILED at step %d on rank %d: %s", step, task.world.rank, last)
    return error.exit_code if isinstance(error, UserError) else 1


def _last_line_last(message: str) -> list[str]:
    """The details of a message, then its first line: what a run says last must say it all."""
    first, *rest = message.splitlines() or [""]
    return [*rest, first]
