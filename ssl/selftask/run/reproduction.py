"""Compare the environment and config of a run with the present ones."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from selftask.config.load import load_config
from selftask.errors import ConfigError, UserError
from selftask.files.paths import exists
from selftask.files.received import UnreadableFile, drop_misfits, read_json
from selftask.files.yaml_file import read_yaml
from selftask.report.record_forms import ENVIRONMENT
from selftask.run import environment
from selftask.run.compatibility import changes

_MACHINE = ("python", "platform", "cpu", "cpus", "memory_gib", "gpus", "cuda")


def read_environment(run: Path) -> dict[str, Any]:
    """Return the ``environment.json`` of a run.

    Raises:
        UserError: If it is missing.
        UnreadableFile: If it is invalid.
    """
    path = run / environment.FILE
    if not exists(path):
        raise UserError(f"{run}: no run, or one that never began: there is no {path}")
    content = read_json(path)
    for problem in drop_misfits(content, ENVIRONMENT):
        raise UnreadableFile(path, problem)
    return content


def differences(
    run: Path, typed: Sequence[str] = (), *, trust: bool = False
) -> dict[str, list[str]]:
    """Return the differences between a run and the present environment, as a list by topic.

    The topic ``config`` is missing if the recorded command names no recipe to compare with.

    Args:
        run: The run folder.
        typed: ``import=`` arguments of the user; imports that only the run names are refused unless
            ``trust``.
        trust: Import code that the run or its recipe names.

    Raises:
        UserError: If the run has no ``environment.json``.
        UnreadableFile: If a file of the run is damaged.
    """
    there, here = read_environment(run), environment.describe()
    topics = {
        "packages": [*changes(there.get("packages", {}), here["packages"], "")],
        "code": [*_code(there, here)],
        "machine": [
            *changes({k: there.get(k) for k in _MACHINE}, {k: here[k] for k in _MACHINE}, "")
        ],
    }
    if words := recipe_words(there):
        topics["config"] = [*_config(run, there, words, typed, trust)]
    return topics


def _code(there: dict[str, Any], here: dict[str, Any]) -> Iterator[str]:
    yield from changes(there.get("selftask"), here["selftask"], "selftask")
    if str((there.get("selftask") or {}).get("commit")).endswith("-dirty"):
        yield "selftask: its checkout had uncommitted changes there"
    before, now = (facts.get("git") or {} for facts in (there, here))
    yield from changes(before.get("commit"), now.get("commit"), "git.commit")
    if before.get("dirty"):
        kept = before.get("diff")
        yield f"git: there were uncommitted changes there{f', see {kept}' if kept else ''}"
    if now.get("dirty"):
        yield "git: there are uncommitted changes here"
    for where, facts in (("there", before), ("here", now)):
        if facts and facts.get("dirty") is None:
            yield f"git: it is not known whether there were uncommitted changes {where}"


def _config(
    run: Path, there: dict[str, Any], words: list[str], typed: Sequence[str], trust: bool
) -> Iterator[str]:
    """Yield differences between the config of the run and that of its command now."""
    stored = read_yaml(run / "config.yaml")
    try:
        now = load_config(words[0], [*words[1:], *typed], trust=trust, typed=typed).to_dict()
    except (ConfigError, UserError) as error:
        yield f"the recipe cannot be read here: {error}"
        return
    # config.yaml holds the value that the run chose; the recipe still says auto
    chosen = (there.get("origins") or {}).get("train.precision", "").startswith("auto: ")
    if chosen and now["train"]["precision"] == "auto" and isinstance(stored.get("train"), dict):
        now["train"]["precision"] = stored["train"].get("precision")
    yield from changes(stored, now, "")


def recipe_words(there: dict[str, Any]) -> list[str]:
    """Return recipe and overrides of the recorded command; [] for commands other than ``train``."""
    words = [word for word in there.get("command") or [] if not word.startswith("-")]
    if words[1:2] == ["train"]:
        return words[2:]
    return words[1:] if words and Path(words[0]).name == "train.py" else []


def command(run: Path, there: dict[str, Any]) -> list[str]:
    """Return the shell lines that repeat a run in a new folder, each word quoted.

    Args:
        run: The run folder.
        there: Its ``environment.json``.

    Raises:
        UnreadableFile: If the recorded commit is not a hash.
    """
    git, folder = there.get("git") or {}, there.get("folder")
    run = run.resolve()
    commands = [["cd", folder]] if folder and not folder.startswith("-") else []
    if commit := git.get("commit"):
        if not re.fullmatch(r"[0-9a-f]{7,64}", commit):
            raise UnreadableFile(run / environment.FILE, f"git.commit: {commit!r} is no commit")
        commands.append(["git", "checkout", commit])
    if git.get("diff") and git.get("folder"):
        commands.append(["git", "-C", git["folder"], "apply", str(run / git["diff"])])
    commands.append(["selftask", "train", str(run / "config.yaml"), f"out={run}_again"])
    return [shlex.join(words) for words in commands]
