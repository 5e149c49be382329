"""Versions, code, machine and command of a run: ``environment.json`` and ``git.diff``."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import selftask
from selftask.config.values.auto_values import cores
from selftask.logs import write_json

FILE = "environment.json"
DIFF = "git.diff"
MAX_DIFF = 2**20  # bytes; a longer diff is truncated


def write(out: Path, origins: Mapping[str, str] | None = None) -> None:
    """Write ``environment.json``, and ``git.diff`` if tracked files have uncommitted changes.

    The diff is that of the checkout around the current folder, up to 1 MiB.

    Args:
        out: The run folder.
        origins: Dotted key -> origin of values of the config; defaults are not written.
    """
    content = describe()
    chosen = {key: origin for key, origin in (origins or {}).items() if not _is_default(origin)}
    content["origins"] = chosen
    diff = _git("diff", "HEAD", "--no-ext-diff", "--no-color") or ""
    (out / DIFF).unlink(missing_ok=True)  # from the previous attempt
    if diff and content["git"]:
        cut = diff.encode()[:MAX_DIFF].decode(errors="ignore")
        (out / DIFF).write_text(f"{cut}\n", encoding="utf-8")
        content["git"]["diff"] = DIFF
    write_json(out / FILE, content)


def _is_default(origin: str) -> bool:
    return origin == "default" or origin.startswith("default of ")


def describe() -> dict[str, Any]:
    """Return the content of ``environment.json``: versions, code, machine, command."""
    return {
        "command": sys.argv,
        "folder": os.getcwd(),
        "selftask": {"version": selftask.__version__, "commit": _commit()},
        "git": _checkout(),
        "python": platform.python_version(),
        "packages": _packages(),
        "platform": platform.platform(),
        "host": socket.gethostname(),
        "cpu": _cpu(),
        "cpus": cores(),
        "memory_gib": _memory_gib(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "cuda": torch.version.cuda,
    }


def _packages() -> dict[str, str]:
    """Return the versions of all installed packages by name."""
    versions: dict[str, str] = {}
    for package in importlib.metadata.distributions():
        name, version = _name_and_version(package)
        if name:  # empty for a package whose removal was interrupted
            versions.setdefault(name, version)  # the first one on the search path is imported
    return dict(sorted(versions.items(), key=lambda item: item[0].lower()))


def _name_and_version(package: importlib.metadata.Distribution) -> tuple[str, str]:
    """Return name and version of a package without parsing all of its metadata."""
    text = package.read_text("METADATA") or package.read_text("PKG-INFO") or ""
    head = text.partition("\n\n")[0]
    fields = dict(re.findall(r"(?m)^(Name|Version):[ \t]*(.*?)[ \t]*$", head))
    return fields.get("Name", ""), fields.get("Version", "")


def _checkout() -> dict[str, Any] | None:
    """Return folder, commit and state of the git checkout around the current folder, or None."""
    commit = _git("rev-parse", "HEAD")
    if commit is None:
        return None
    changed = _git("status", "--porcelain", "--untracked-files=no")
    return {
        "folder": _git("rev-parse", "--show-toplevel"),
        "commit": commit,
        "branch": _git("rev-parse", "--abbrev-ref", "HEAD"),
        "dirty": None if changed is None else bool(changed),  # None: not known
    }


def _commit() -> str | None:
    """Return the commit of selftask's checkout or pip installation, or None if unknown.

    The suffix ``-dirty`` marks a checkout with uncommitted changes.
    """
    try:
        direct = importlib.metadata.distribution("selftask").read_text("direct_url.json")
        installed = json.loads(direct or "{}").get("vcs_info", {}).get("commit_id")
        if installed:
            return str(installed)
    except importlib.metadata.PackageNotFoundError:
        pass
    root = Path(selftask.__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    return _git("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*", folder=root)


def _git(*words: str, folder: Path | None = None) -> str | None:
    """Return the output of a git command without its last newline, or None if it fails."""
    command = ["git", *(["-C", str(folder)] if folder else []), *words]
    try:
        done = subprocess.run(command, capture_output=True, check=False, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    output = done.stdout.decode(errors="replace").removesuffix("\n")
    return output if done.returncode == 0 else None


def _cpu() -> str:
    """Return the name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _memory_gib() -> float | None:
    """Return the size of the machine's memory in GiB, or None if unknown."""
    try:
        size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None
    return round(size / 2**30, 1)
