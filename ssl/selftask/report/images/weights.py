"""Weights of a run for its report: the export or the newest checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from selftask.checkpoint.manifest import CHECKSUM, DamagedCheckpoint, checksum, read_file
from selftask.checkpoint.rotation import MANIFEST, checkpoints, step_of
from selftask.config.schema import Config
from selftask.logs import read_json
from selftask.models.build import build_backbone
from selftask.models.weights.export import META, WEIGHTS
from selftask.models.weights.model_source import open_model
from selftask.models.weights.read import backbone_state, read_backbone


@dataclass(frozen=True)
class Weights:
    """A file with weights that has not been read yet."""

    path: Path  # path of an export or a checkpoint
    step: int
    exported: bool

    @property
    def digest(self) -> str:
        """Identifier of these weights: step and checksum of the file."""
        if self.exported:
            return f"{self.step}-{checksum(self.path)}"
        manifest = self.path / MANIFEST if self.path.is_dir() else self.path.with_suffix(".json")
        facts = read_json(manifest)
        return f"{self.step}-{facts.get(CHECKSUM, self.path.stat().st_mtime_ns)}"

    def load(self, config: Config, *, trust: bool) -> nn.Module:
        """Return the backbone on the CPU.

        Raises:
            UserError: If the file is damaged, or names code and ``trust`` is False.
        """
        if self.exported:
            return open_model(str(self.path), trust=trust)[0]
        state = read_backbone(self.path)
        backbone = build_backbone(config.backbone, state.get("channels", 3))
        backbone.load_state_dict(backbone_state(state))
        return backbone.eval()


def trained_on(run: Path) -> dict[str, Any] | None:
    """Return the fingerprint of the training images in the newest checkpoint of a run.

    None if there is no checkpoint, or if it is sharded, damaged or has no fingerprint.
    """
    newest = next(iter(checkpoints(run / "checkpoints")), None)
    if newest is None or newest.is_dir():
        return None
    try:
        data = read_file(newest, mmap=True).get("data")
    except DamagedCheckpoint:
        return None
    return None if data is None else {**data, "tokenizer": None}


def find_weights(run: Path) -> Weights | None:
    """Return the export of a run, or its newest checkpoint if that is of another step, or None.

    The export of a run that was begun anew is of a later step.
    """
    newest = next(iter(checkpoints(run / "checkpoints")), None)
    exported = run / "export" / WEIGHTS
    step = _exported_step(run) if exported.is_file() else None
    if step is not None and (newest is None or step_of(newest) == step):
        return Weights(exported, step, exported=True)
    return None if newest is None else Weights(newest, step_of(newest), exported=False)


def _exported_step(run: Path) -> int | None:
    try:
        return int(read_json(run / "export" / META)["step"])
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return None  # incomplete export; the checkpoint is used instead
