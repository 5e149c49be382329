"""Choice of the checkpoint that a run resumes from, by file names alone. Does not import torch."""

from __future__ import annotations

from pathlib import Path

from selftask.config.schema import Config
from selftask.files import addresses
from selftask.files.addresses import is_remote


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
    """Return ``resume.checkpoint``; one below a remote ``out`` as a path in the local copy."""
    asked, prefix = config.resume.checkpoint, f"{config.out.rstrip('/')}/"
    if is_remote(config.out) and asked.startswith(prefix):
        return str(config.out_folder / asked.removeprefix(prefix))
    return asked


def goes_on(config: Config) -> bool:
    """Return whether all weights come from a checkpoint, so that ``init.backbone`` is not read."""
    asked = config.resume.checkpoint
    return has_checkpoints(config) if asked == "auto" else asked != "never"
