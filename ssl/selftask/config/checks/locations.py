"""Files and addresses in a config: ``out``, ``resume`` and ``init.backbone``.

The checkpoint that a run resumes from is chosen by file names alone. Does not import torch.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from pathlib import Path

from selftask.config.keys import Key, Problem
from selftask.config.library_names import check_name, split_address
from selftask.config.schema import Config, InitConfig
from selftask.errors import UserError, nearest
from selftask.files import addresses
from selftask.files.addresses import is_remote
from selftask.files.paths import is_file, is_folder


def location_problems(config: Config) -> Iterator[Problem]:
    """Yield key and text of each problem of ``out``, ``resume`` and ``init``."""
    if not config.out.strip():  # as from out=$FOLDER without such a variable
        yield ("out",), "out is empty; give a folder, or out=. for the current one"
        return
    try:
        if is_remote(config.out):
            addresses.manager(config.out)
        else:
            config.out.encode()
        newest, resumed = uses_newest(config), goes_on(config)
    except UnicodeEncodeError:  # bytes that are no UTF-8 are kept as lone surrogates
        text = "this name is no UTF-8, and torch reads no checkpoint in such a folder; give another"
        hint = "(if it looks right to you, LC_ALL is no UTF-8 locale)"
        yield ("out",), f"out={config.out}: {text} name {hint}"
        return
    except UserError as error:
        yield ("out",), f"out={error}"
        return
    resume = config.resume.checkpoint
    if resume != "never" and not newest:
        wanted = "neither 'auto', 'never' nor an existing checkpoint"
        yield from _unreadable(
            ("resume", "checkpoint"), "resume", resume, wanted, ["auto", "never"]
        )
    yield from _broken_rules(config.init)
    yield from _of_init(config.init, resumed)


def _of_init(init: InitConfig, resumed: bool) -> Iterator[Problem]:
    """Yield problems of the initial weights, whose file is not read if all weights are resumed."""
    start = init.backbone
    if start is None:
        for name in ("rename", "prefix", "skip", "head"):
            if value := getattr(init, name):
                yield ("init", name), f"init.{name}={value!r} has no effect without init.backbone"
        return
    library, model = split_address(start)
    if library and init.head:
        yield ("init", "head"), f"init.head: {start} has no head; give a run or its checkpoint"
    if resumed:
        return
    if library:
        try:
            check_name(library, model)
        except UserError as error:
            yield ("init", "backbone"), f"init.backbone: {error}"
        return
    run, separator, which = start.rpartition("@")
    of_run = separator and (which == "best" or which.isdecimal()) and is_folder(run)
    if not of_run:  # the checkpoint of a run is found later, when weights are read
        wanted = "neither a file or run nor timm:NAME or torchvision:NAME"
        yield from _unreadable(("init", "backbone"), "init.backbone", start, wanted)


def check_not_moved(recipe: str, config: Config) -> None:
    """Raise UserError if ``recipe`` is the config.yaml of a run folder that is not its ``out``.

    Such a folder was moved or copied, or ``out`` is relative to another working folder; a new run
    would begin there. An ``out`` from the command line is accepted.
    """
    path = Path(recipe).expanduser()
    if path.name != "config.yaml" or not is_file(path.parent / "status.json"):
        return
    is_out = path.parent.resolve() == config.out_folder.resolve()
    if not is_out and not config.place("out").startswith("command line"):
        raise UserError(
            f"{recipe}: its out={config.out} is another folder than this one, which was moved or "
            f"copied, or named in another working folder; out={path.parent} resumes the run here, "
            f"out={config.out} trains there"
        )


def _broken_rules(init: InitConfig) -> Iterator[Problem]:
    """Yield a problem for each rule of ``init.rename`` with an invalid pattern or replacement."""
    for index, (pattern, replacement) in enumerate(init.rename):
        try:
            re.sub(pattern, replacement, "")
        except (re.error, IndexError) as error:
            yield ("init", "rename", str(index)), f"init.rename.{index}: {pattern!r}: {error}"


def _unreadable(
    key: Key, name: str, path: str, wanted: str, words: Collection[str] = ()
) -> Iterator[Problem]:
    """Yield a problem unless there is a regular file or a folder at a path or address.

    ``words`` are other valid values, for a hint. A pipe is refused, since reading it would block.
    """
    try:
        is_there = addresses.exists(path) if is_remote(path) else is_file(path) or is_folder(path)
    except UserError as error:
        yield key, f"{name}={error}"
        return
    if not is_there:
        hint = f"; {nearest(path, words)}" if words else ""
        yield key, f"{name}={path!r}: {wanted}{hint}"


def has_checkpoints(config: Config) -> bool:
    """Return whether ``out`` holds a checkpoint, good or damaged."""
    if is_remote(config.out):
        names = addresses.list_names(f"{config.out.rstrip('/')}/checkpoints")
    else:
        names = [path.name for path in Path(config.out, "checkpoints").glob("step_*")]
    return any(name.startswith("step_") and not name.endswith(".json") for name in names)


def uses_newest(config: Config) -> bool:
    """Return whether the run resumes from the newest checkpoint of ``out``, if there is one.

    A checkpoint of another folder is only used until the run has its own.
    """
    asked = asked_checkpoint(config)
    if asked in ("auto", "never"):
        return asked == "auto"
    folder = config.out_folder / "checkpoints"
    return has_checkpoints(config) and Path(asked).resolve().parent != folder.resolve()


def asked_checkpoint(config: Config) -> str:
    """Return ``resume.checkpoint``; an address below a remote ``out`` becomes a local path."""
    asked, prefix = config.resume.checkpoint, f"{config.out.rstrip('/')}/"
    if is_remote(config.out) and asked.startswith(prefix):
        return str(config.out_folder / asked.removeprefix(prefix))
    return asked


def goes_on(config: Config) -> bool:
    """Return whether the run resumes from a checkpoint, so that ``init.backbone`` is not read."""
    asked = config.resume.checkpoint
    return has_checkpoints(config) if asked == "auto" else asked != "never"
