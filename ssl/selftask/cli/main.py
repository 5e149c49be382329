"""``selftask COMMAND ...``: find and run a command, and print user errors as messages.

No expensive module is imported here, so that ``selftask --help`` is fast.
"""

from __future__ import annotations

import importlib
import io
import os
import signal
import sys
from collections.abc import Callable

from selftask.cli.options import HELP, asks_for_help, refuse_ranks
from selftask.cli.verbosity import TALKATIVE, print_versions, take_verbosity
from selftask.distributed.garbage import seldom_collected
from selftask.errors import (
    ConfigError,
    RunError,
    UserError,
    check_known,
    interrupt_in,
    printable,
)
from selftask.files import paths
from selftask.logs.verbosity import verbosity

_COMMANDS = """\
train | train | RECIPE [key=value ...] | pretrain, or resume a run
adapt | adapt.adapt | RUN_OR_MODEL data=DIR | continue a trained model on your images
submit | cluster.submit | RECIPE [key=value ...] | train on SLURM; a=1,2: a sweep
jobs | cluster.jobs | [OUT ...] | state of submitted runs
cancel | cluster.cancel | OUT|JOBID [...] | cancel jobs
eval | model.evaluate | knn|linear|svm|segmentation|retrieval|suite|predictions RUN_OR_MODEL \
data=... | evaluate features
test | model.score | RUN [data=DIR] | score a trained classifier
finetune | model.finetune | RUN_OR_MODEL data=... | fine-tune on labeled images
features | model.features | RUN_OR_MODEL out=DIR data=... | save features as files
export | model.export | RUN [--to FORMAT] | export the backbone
report | report | RUN [RUN ...] [out=FILE] | HTML page of a run, or several
watch | monitor.watch | [DIR] [port=...] | live pages of all runs below DIR
runs | monitor.runs | [DIR ...] [sort=...] | table of all runs below DIR
checkpoints | checkpoints | RUN | list the checkpoints of a run
plan | plan | RECIPE [key=value ...] | memory, FLOPs, time, price of a run
model-summary | model.summary | RECIPE [key=value ...] | cost by module
replay | replay | RUN/failures/step_N | repeat a step that gave NaN
new | scaffold.new | method|hook|step|project NAME | create files from templates
check | check | METHOD|--all [key=value ...] | compare 1, 2 and 4 ranks
data | data | check|stats SOURCE, show RECIPE | look at the images
bench | bench | data RECIPE [key=value ...] | speed of data loading
config | show | RECIPE [key=value ...] | every value and its origin
explain | explain | KEY|NAME|COLUMN [...] | what a key or a metric means
repro | repro | RUN | compare this machine with that run's
list | list | [methods|hooks|recipes|...] | the names a config may use
env | env |  | versions, devices, what is supported
completion | shell.completion | bash|zsh|fish | completion by the Tab key
"""  # name, module below selftask.cli, arguments, description in one line

COMMANDS = {
    name: (f"selftask.cli.{module}", arguments, about)
    for name, module, arguments, about in (row.split(" | ") for row in _COMMANDS.splitlines())
}  # name -> module with USAGE and main(argv) -> exit code, arguments, description

GROUPS = {
    "train": ("train", "adapt", "finetune", "plan", "config", "explain", "model-summary"),
    "inspect": ("report", "watch", "runs", "checkpoints", "data", "bench", "replay", "repro"),
    "evaluate and use": ("eval", "test", "features", "export"),
    "cluster": ("submit", "jobs", "cancel"),
    "write code": ("new", "check", "list", "env", "completion"),
}  # sections of `selftask --help`; names that are not commands are left out

ALONE = ("test", "export", "report", "replay", "check", "bench", "submit")
"""Commands that run in one process, since ranks cannot share their work."""

WITHOUT_DEFAULT = ("adapt", "bench", "check", "export", "features", "finetune")
"""Commands that print their usage if they are called without arguments."""

ABOUT = """\
RECIPE is a method (simclr), a shipped recipe (simclr/digits) or a yaml or json file.
key=value sets anything in it: train.epochs=10, optimizer=sgd, data=FOLDER_OF_IMAGES.
`selftask help COMMAND` says more."""


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code, see ``errors.EXIT_CODES``.

    Args:
        argv: The name of the command and its words; None: ``sys.argv``.
    """
    _open_missing_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):  # as stderr does: a locale may lack characters
        sys.stdout.reconfigure(errors="backslashreplace")
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["help"]:
        argv = [*argv[1:], "--help"]
    with seldom_collected():
        return guarded(_answer, argv)


def _answer(argv: list[str]) -> int:
    if not argv or argv[0] in HELP:
        print(usage(), flush=True)
        return 0
    if argv[0] in ("-V", "--version"):
        from selftask import __version__

        print(f"selftask {__version__}")
        return 0
    try:
        os.getcwd()
    except FileNotFoundError as error:
        raise UserError("the current folder was removed; change to one that exists") from error
    if not __debug__:
        raise UserError(
            "python -O (PYTHONOPTIMIZE) removes assert statements, in which Hydra's parser of "
            "key=value reads its input; start without it"
        )
    return _run(argv[0], argv[1:])


def guarded(command: Callable[[list[str]], int], argv: list[str]) -> int:
    """Return the exit code of ``command(argv)``; print known errors instead of raising them.

    These are errors of the user, of a run, of memory and of the system, and Ctrl-C. Other errors
    are raised.
    """
    try:
        return command(argv)
    except UserError as error:
        if interrupt_in(error) is not None:
            return _interrupted()
        problems = error.problems if isinstance(error, ConfigError) else [str(error)]
        for problem in problems:
            _print_error(problem)
        return error.exit_code
    except RunError as error:
        _print_error(str(error))
        return 1
    except MemoryError as error:
        _print_error(f"the machine's memory is full: {error}")
        return 1
    except BrokenPipeError:  # `selftask list | head`: the reader has exited
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        message = paths.explain(error)
        if message is None:
            raise
        _print_error(message)
        return UserError.exit_code
    except KeyboardInterrupt:  # Ctrl-C outside of a run; a run reports it itself
        return _interrupted()


def _print_error(message: str) -> None:
    print(f"error: {printable(message)}", file=sys.stderr)


def _interrupted() -> int:
    print("interrupted", file=sys.stderr)
    return 128 + signal.SIGINT


def _open_missing_streams() -> None:
    """Open /dev/null in place of closed standard streams.

    Otherwise the next opened file gets the descriptor of a closed stream, and its output.
    """
    if None not in (sys.stdin, sys.stdout, sys.stderr):
        return
    while (number := os.open(os.devnull, os.O_RDWR)) < 3:
        pass
    os.close(number)
    sys.stdin = sys.stdin or open(0, closefd=False)  # noqa: SIM115
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115


def usage() -> str:
    """Return the text of ``selftask --help``."""
    lines = ["usage: selftask COMMAND ..."]
    for title, names in GROUPS.items():
        lines += ["", f"{title}:"]
        for name in (name for name in names if name in COMMANDS):
            _, arguments, about = COMMANDS[name]
            lines.append(f"  {name:<14}{arguments:<34} {about}")
    return "\n".join([*lines, "", ABOUT])


def _run(name: str, argv: list[str]) -> int:
    check_known(name, COMMANDS, f"there is no command {name!r}")
    if name in ALONE:
        refuse_ranks(name)
    command = importlib.import_module(COMMANDS[name][0])
    wants_usage = asks_for_help(argv) or (not argv and name in WITHOUT_DEFAULT)
    if wants_usage and not hasattr(command, "COMMANDS"):  # subcommands print their own
        print(command.USAGE)
        return 0
    if name not in TALKATIVE:
        return int(command.main(argv) or 0)
    argv, word = take_verbosity(argv)
    with verbosity(word):
        print_versions()
        return int(command.main(argv) or 0)
