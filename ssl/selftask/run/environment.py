"""Versions, machine and command of a run, for ``environment.json``."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

import selftask


def _commit() -> str | None:
    """Return the git commit of the checkout or the pip installation, or None if unknown.

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
    words = [
        "git",
        "-C",
        str(root),
        "describe",
        "--always",
        "--dirty",
        "--abbrev=40",
        "--exclude=*",
    ]
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def describe() -> dict[str, Any]:
    """Return the content of ``environment.json``: versions, machine, command."""
    packages = ("torch", "torchvision", "classy-vision", "fvcore", "iopath", "timm", "numpy")
    versions = {}
    for package in packages:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "packages": versions,
        "selftask": {"version": selftask.__version__, "commit": _commit()},
        "command": sys.argv,
    }
