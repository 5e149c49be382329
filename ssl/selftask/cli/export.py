"""``selftask export``: the backbone of a run, or its whole state, from its newest checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from selftask.cli.options import take_options
from selftask.config.trust import TRUST, take_trust
from selftask.errors import UserError, nearest
from selftask.file_system import exists

if TYPE_CHECKING:
    from torch import nn

USAGE = f"""\
usage: selftask export RUN [--to torchvision|timm|safetensors|checkpoint] [--out DIR] [trust=true]

Writes backbone.pt, backbone.safetensors and backbone.json from the newest checkpoint of the run
into RUN/export (or DIR), with the key names of the library the backbone comes from.
--to torchvision and --to timm also check that the library's own model loads them, strictly.
--to checkpoint writes the whole state instead, as one plain file step_N.pt: what a sharded
checkpoint would have been without train.sharded_checkpoints.
{TRUST}"""

OPTIONS = {"--to": str, "--out": str}
FORMATS = ("torchvision", "timm", "safetensors", "checkpoint")


def main(argv: list[str]) -> int:
    """Export; prints the folder."""
    if not argv:
        print(USAGE)
        return 0
    words, options = take_options(argv, OPTIONS)
    words, trust = take_trust(words)
    if len(words) != 1:
        raise UserError(f"export needs one RUN\n{USAGE}")
    to = options.get("--to", "safetensors")
    if to not in FORMATS:
        raise UserError(f"export: --to {to}; {nearest(to, FORMATS)}")
    run = Path(words[0])
    if not exists(run / "config.yaml"):
        raise UserError(f"{run}: not a run of selftask: it has no config.yaml")
    out = Path(options.get("--out", run / "export"))
    try:
        print(export_run(run, out, to=to, trust=trust))
    except OSError as error:
        raise UserError(f"export: {error}; --out DIR writes to another folder") from error
    return 0


def export_run(run: Path, out: Path, *, to: str = "safetensors", trust: bool = False) -> Path:
    """Write what the newest checkpoint of ``run`` holds; returns the path of the file.

    ``trust`` allows a backbone, or modules, of the user's own code that the run names.
    Raises UserError without a checkpoint, and if the library named by ``to`` is another one.
    """
    from selftask import checkpoint
    from selftask.config.load import load_config
    from selftask.hooks.export import facts
    from selftask.models.build import build_backbone
    from selftask.models.export import save_backbone
    from selftask.models.weights import backbone_state, load_weights

    found = checkpoint.load_newest(run / "checkpoints")
    if found is None:
        raise UserError(f"{run}: has no checkpoint yet")
    state, path = found
    if to == "checkpoint":
        return checkpoint.write(state, out, int(state["clock"]["iteration"]))
    config = load_config(str(run / "config.yaml"), [], trust=trust)
    channels = state.get("channels", 3)
    backbone = build_backbone(config.backbone, channels)
    load_weights(backbone, backbone_state(state), what=str(path))
    if to in ("torchvision", "timm"):
        _check_library(backbone, to)
    return save_backbone(backbone, out, facts(config, int(state["clock"]["iteration"]), channels))


def _check_library(backbone: nn.Module, library: str) -> None:
    home = type(backbone).__module__.partition(".")[0]
    if home != library:
        raise UserError(f"export: --to {library}: this backbone is a model of {home}")
