"""One process of a run, from config to exit code."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from logging import LogRecord
from logging.handlers import MemoryHandler
from types import FrameType

import torch
import torch.distributed as dist

from selftask.checkpoint.mirror import mirrored
from selftask.config.explain import explain_chosen
from selftask.config.load import to_yaml
from selftask.config.schema import Config
from selftask.config.values.auto_values import cores
from selftask.data import kernel
from selftask.data.loading.open_data import Sources, copy_data, open_data
from selftask.data.source import channels_of
from selftask.distributed import process_group
from selftask.distributed.collectives import barrier
from selftask.distributed.device import keep_freed_memory, precision_advice
from selftask.distributed.garbage import usually_collected
from selftask.distributed.local_process import raise_limit_of_open_files
from selftask.distributed.world import STOP_SIGNALS, read_world
from selftask.errors import RunError, UserError, explained, interrupt_in
from selftask.evaluate.online import check_evaluations, evaluate_task
from selftask.files.replace import write_durably
from selftask.logs import DETAIL, LOGGER, events
from selftask.logs.events import WarningEvents, add_event
from selftask.logs.lines import info_on_stderr, lasting_output, start_log, stop_log
from selftask.logs.startup import lap
from selftask.logs.unreadable import UNREADABLE
from selftask.logs.verbosity import is_verbose
from selftask.models.build import check_backbone
from selftask.models.weights.model_source import open_init
from selftask.registry import TASKS
from selftask.run import environment
from selftask.run.compatibility import allowed_changes, check_same_run, unrecorded_changes
from selftask.run.early_errors import watch_others
from selftask.run.exit_report import Ending
from selftask.run.expected import check_expected
from selftask.run.failure import Failure
from selftask.run.plugin_code import copy_plugins
from selftask.run.run_folder import fetch_out, locked
from selftask.run.status import Status
from selftask.run.watchdog import Watch
from selftask.task import Task
from selftask.task.loop import Interrupted, train_loop
from selftask.task.numerics import is_settled, num_threads, torch_threads
from selftask.task.unreadable_images import UnreadableImages


def run(config: Config, sources: Sources) -> int:
    """Train or resume the run of ``config`` on ``sources``; return the exit code.

    If the run is already finished, print a message and return 0.

    Raises:
        UserError: If the run cannot begin, as in ``run_task``.
    """
    fetch_out(config, read_world())
    check_same_run(config)
    if Status(config).is_finished():
        done = f"RUN finished already: {config.out} is complete"
        print(f"{done}; another out= or resume=never starts anew")
        return 0
    return run_task(TASKS[config.task](config, sources=sources))


def run_task(task: Task, *, raises: bool = False) -> int:
    """Train a task in its folder and return the exit code.

    The last log line is ``RUN finished``, ``RUN interrupted by`` or ``RUN FAILED``, in agreement
    with ``status.json``.

    Args:
        task: The task, not yet prepared.
        raises: If True, raise Interrupted or the error that ended the run early.

    Returns:
        The exit code of the process.

    Raises:
        UserError: Whatever ``raises`` is, if the run cannot begin: its folder has another run or is
            in use, or the config does not fit the data.
    """
    config, world = task.config, task.world
    fetched = fetch_out(config, world)
    check_same_run(config)
    sources = task.sources or open_data(config.data)
    check_backbone(config, channels_of(sources.train))
    labels = check_evaluations(config, sources)
    init_lines = _open_init(task, channels_of(sources.train))
    raise_limit_of_open_files()
    in_group = dist.is_initialized()
    with (
        _alone_in_process(config.out),
        torch_threads(num_threads(config, world)),
        lasting_output(),
        locked(config.out, first=world.rank == 0, alone=world.size == 1),
        mirrored(config.out, task.out, fetched) as upload,
    ):
        _open_log(task)
        try:
            if fetched is not None:
                LOGGER.info("out: works in %s, copied to %s while it runs", task.out, config.out)
                LOGGER.info("out: no locks there: a run on another machine is not noticed")
            if world.rank == 0:
                _log_previous_attempt(config)
            _log_opening(task, sources, labels)
            for line in init_lines:
                LOGGER.handle(line)
            task.sources = copy_data(sources, config.data.stage_to)
            return _run(task, upload, raises=raises)
        finally:
            stop_log()
            if not in_group:
                process_group.leave_world()


def _open_log(task: Task) -> None:
    """Open the log of this rank; on rank 0, also record warnings as events."""
    config, rank = task.config, task.world.rank
    with explained(f"out={config.out}: the log cannot be opened", OSError):
        start_log(task.out, rank)
    if rank == 0:
        if config.resume.checkpoint == "never":
            (task.out / events.NAME).unlink(missing_ok=True)  # of the run that was here
        LOGGER.addHandler(WarningEvents(task.out))


def _log_previous_attempt(config: Config) -> None:
    """Log how the attempt before was lost, if it was, and settings that have changed since."""
    if lost := Status(config).close_lost():
        LOGGER.warning("the attempt before: %s", lost)
    for change in (*unrecorded_changes(config), *allowed_changes(config)):
        LOGGER.info("config: %s", change)


def _log_opening(task: Task, sources: Sources, labels: str | None) -> None:
    """Log images, labels, threads and precision; the start-up table shows labels and precision.

    Args:
        task: The task.
        sources: Its images.
        labels: Description of the labels for evaluations; None without evaluations.
    """
    config = task.config
    if (absence := kernel.absence()) and config.data.augment_on == "cpu":
        LOGGER.warning("kernel: %s", absence)
    LOGGER.log(DETAIL, "data: %s", sources.train.describe())
    if labels is not None:
        LOGGER.log(DETAIL, "evaluations: %s", labels)
        task.opening["evaluate"] = labels
    LOGGER.log(DETAIL, "threads: %d of torch, of %d cores", torch.get_num_threads(), cores())
    settled = task.device.type == "cpu" and is_settled(config)
    advice = None if settled else precision_advice(config.train.precision, task.device)
    if advice:
        LOGGER.log(DETAIL, "precision: %s", advice)
        task.opening["precision"] = advice


_RUNNING = threading.Lock()  # held by the run of this process


@contextmanager
def _alone_in_process(out: str) -> Iterator[None]:
    """Context of a run; raises UserError if another run of this process is in progress.

    Random generators, log and standard streams are the process's: two runs would change each
    other's results. The lock of the run folder does not help, since POSIX locks belong to processes
    and not to threads.
    """
    if not _RUNNING.acquire(blocking=False):
        raise UserError(
            f"out={out}: another run is in progress in this process, and two would share random "
            "generators and log; wait for its end, or start this one in a process of its own"
        )
    try:
        yield
    finally:
        _RUNNING.release()


def _open_init(task: Task, channels: int) -> list[LogRecord]:
    """Open the initial weights before a rank creates the run folder; return the log lines."""
    if task.backbone is not None or (task.config.parallel.meta_init and task.world.rank):
        return []
    lines, level = MemoryHandler(sys.maxsize), LOGGER.level
    LOGGER.addHandler(lines)
    LOGGER.setLevel(DETAIL)
    try:
        task.init_weights = open_init(task.config, channels)
    except UserError:
        LOGGER.removeHandler(lines)
        with info_on_stderr():  # no log will have them
            for line in lines.buffer if task.world.rank == 0 else ():
                LOGGER.handle(line)
        raise
    finally:
        LOGGER.removeHandler(lines)
        LOGGER.setLevel(level)
    return lines.buffer


def _run(task: Task, upload: Callable[[], None], *, raises: bool) -> int:
    config, status = task.config, Status(task.config)
    keep_freed_memory(task.device)
    task.evaluate = evaluate_task
    world, timeout_s = task.world, config.launch.hang_timeout_s
    ending = Ending(task, status)
    watch: Watch | None = None
    stopped_by: str | None = None
    try:
        with _stop_signals_raised():
            if world.rank == 0:
                _record_start(task, status)
            # The watchdog reports a hang first; the collectives' longer timeout is a fallback.
            report = partial(_report_failure, ending, upload)
            with watch_others(task.out, world, report):
                process_group.join_world(world, task.device, timeout_s=2 * timeout_s + 60)
            lap("process group")
            watch = Watch(world.rank, world.size, timeout_s=timeout_s, report=report)
            stopped_by = _train(task)
            if stopped_by is None:
                check_expected(task)
            barrier()  # report success only if every rank has succeeded
            watch.stop()
            upload()
            code = ending.interrupted(stopped_by) if stopped_by else ending.finished()
    except BaseException as error:
        stop = interrupt_in(error)
        if stop is None:
            code = ending.failed(error, watch)
        else:
            code = ending.aborted(str(stop) or "SIGINT")
        if raises:
            raise
    finally:
        if watch is not None:
            watch.end()
    if stopped_by and raises:
        raise Interrupted(stopped_by)
    return code


def _record_start(task: Task, status: Status) -> None:
    """Write config, environment and the code of plug-ins to the run folder; status is running."""
    config, size = task.config, task.world.size
    write_durably(task.out / "config.yaml", to_yaml(config))
    environment.write(task.out, config.places)
    copy_plugins(config, task.out)
    _log_origins(config)
    status.write("running", world_size=size)
    text = f"RUN started: {config.recipe}, world size {size}"
    images = task.sources.train.describe() if task.sources else ""
    add_event(task.out, "start", text, world_size=size, images=images)
    task.added_hooks["unreadable_images"] = UnreadableImages(
        lambda sentences: status.add(**{UNREADABLE: sentences})
    )


def _log_origins(config: Config) -> None:
    """Log each value that is not a default, with its origin, if verbose."""
    if is_verbose():
        for line in explain_chosen(config):
            LOGGER.debug("config: %s", line)


def _report_failure(ending: Ending, upload: Callable[[], None], failure: Failure) -> None:
    """Report a failure from a thread that then ends the process."""
    ending.report(failure)
    try:
        upload()
    except RunError as error:
        LOGGER.error("%s", error)


@contextmanager
def _stop_signals_raised() -> Iterator[None]:
    """Context in which a stop signal raises KeyboardInterrupt, unless a user's handler is set.

    A signal may arrive before the ``preemption`` hook is installed. submitit's handlers would
    ignore it, or requeue the job without a line in the log. A second signal ends the process as
    usual. Signals that are ignored at the end stay ignored: SLURM sends SIGTERM after a requeue,
    and it would change the exit code of a process that is still ending.
    """
    main = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS if main}
    before = {
        number: handler
        for number, handler in handlers.items()
        if handler is signal.SIG_DFL or _is_of_submitit(handler)
    }
    try:
        for number in before:
            signal.signal(number, _raise_interrupt)
        yield
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, handler)


def _is_of_submitit(handler: object) -> bool:
    return str(getattr(handler, "__module__", "")).startswith("submitit.")


def _raise_interrupt(number: int, frame: FrameType | None) -> None:
    # SIGHUP stays ignored, since a closing terminal may send several.
    signal.signal(number, signal.SIG_IGN if number == signal.SIGHUP else signal.SIG_DFL)
    raise KeyboardInterrupt(signal.Signals(number).name)


def _train(task: Task) -> str | None:
    """Train; return the stop reason, or None if all steps are done."""
    try:
        with usually_collected():
            train_loop(task)
    except Interrupted as stop:
        return str(stop)
    return None
