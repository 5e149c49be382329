"""Which checkpoint a run resumes from, by file names alone. Does not import torch."""

from __future__ import annotations

from pathlib import Path

from selftask.config.schema import Config


def has_checkpoints(config: Config) -> bool:
    """Whether ``out`` holds a checkpoint, good or damaged."""
    found = Path(config.out, "checkpoints").glob("step_*")
    return any(path.suffix != ".json" for path in found)


def uses_newest(config: Config) -> bool:
    """Whether the newest checkpoint of ``out`` is taken, if there is one.

    One from elsewhere is where a run starts; once the run has its own, it goes on with that.
    """
    asked = config.resume.checkpoint
    if asked in ("auto", "never"):
        return asked == "auto"
    folder = Path(config.out, "checkpoints")
    return has_checkpoints(config) and Path(asked).resolve().parent != folder.resolve()


def goes_on(config: Config) -> bool:
    """Return whether all weights come from a checkpoint, so that ``init.backbone`` is not read."""
    asked = config.resume.checkpoint
    return has_checkpoints(config) if asked == "auto" else asked != "never"
