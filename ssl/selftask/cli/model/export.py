"""``selftask export``: write the backbone, or the whole state, of a run's newest checkpoint."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from selftask.checkpoint.mirror import local_run
from selftask.cli.model.load_model import MODEL, take
from selftask.cli.options import take_options
from selftask.config.compose.compose import import_plugins
from selftask.config.schema import Component
from selftask.config.trust import TRUST, take_trust
from selftask.errors import UserError, nearest
from selftask.files.addresses import is_remote, output_folder
from selftask.files.paths import exists

USAGE = f"""\
usage: selftask export RUN_OR_MODEL [--to torchvision|timm|safetensors|checkpoint] [--out DIR]

{MODEL}
Writes backbone.pt, backbone.safetensors and backbone.json, of a run from its newest checkpoint,
into RUN/export (or DIR), with the key names of the library the backbone comes from.
--to torchvision and --to timm also check that the library's own model loads them, strictly, and
computes the same features.
--to checkpoint writes a run's whole state instead, as one plain file step_N.pt: what a sharded
checkpoint would have been without train.sharded_checkpoints.
weights=FILE  for timm: and torchvision: the weights of a file, of VISSL for one, or `none`
import=[MODULE]  a plug-in, such as one with a handler for an address
{TRUST}"""

OPTIONS = {"--to": str, "--out": str}
LIBRARIES = ("torchvision", "timm")
FORMATS = (*LIBRARIES, "safetensors", "checkpoint")


def main(argv: list[str]) -> int:
    """Export and print the folder."""
    if not argv:
        print(USAGE)
        return 0
    words, options = take_options(argv, OPTIONS)
    words, trust = take_trust(words)
    weights, words = take("weights", words)
    imports, words = take("import", words)
    if len(words) != 1:
        raise UserError(f"export needs one RUN or model\n{USAGE}")
    to = options.get("--to", "safetensors")
    if to not in FORMATS:
        raise UserError(f"export: --to {to}; {nearest(to, FORMATS)}")
    import_plugins([f"import={imports}"] if imports else [])
    run, out = Path(local_run(words[0], num_checkpoints=None)), options.get("--out")
    try:
        if exists(run / "config.yaml") and weights is None:
            out = out or f"{words[0]}/export"
            with output_folder(out) as folder:
                path = export_run(run, folder, to=to, trust=trust)
            print(f"{out}/{path.name}" if is_remote(out) else path)
        else:
            print(export_model(words[0], out, weights=weights, to=to, trust=trust))
    except OSError as error:
        raise UserError(f"export: {error}; --out DIR writes to another folder") from error
    return 0


def export_model(
    address: str, out: str | None, *, weights: str | None, to: str, trust: bool = False
) -> str:
    """Write the backbone of a file or library; return the path of the file.

    Raises UserError as ``export_run`` does, and without a folder to write to.
    """
    from selftask.logs import info_on_stderr
    from selftask.models.weights.export import check_library, save_backbone
    from selftask.models.weights.model_source import PRETRAINED, open_model

    if to == "checkpoint":
        raise UserError(f"export: --to checkpoint: {address} is no run, and has none")
    if out is None:
        raise UserError("export: of a model that no run made, --out DIR says where to")
    with info_on_stderr():
        backbone, facts = open_model(address, weights=weights or PRETRAINED, trust=trust)
    if to in LIBRARIES:
        check_library(backbone, Component(**facts["architecture"]), facts.get("channels", 3), to)
    with output_folder(out) as folder:
        path = save_backbone(backbone, folder, facts)
    return f"{out}/{path.name}" if is_remote(out) else str(path)


def export_run(run: Path, out: Path, *, to: str = "safetensors", trust: bool = False) -> Path:
    """Write the model of the newest checkpoint of ``run``; return the path of the file.

    ``trust`` allows a backbone, or modules, of the user's own code that the run names.
    Raises UserError without a checkpoint, and if the library named by ``to`` is another one.
    """
    from selftask.checkpoint import store
    from selftask.config.load import load_config
    from selftask.hooks.export import facts
    from selftask.models.build import build_backbone
    from selftask.models.weights.export import check_library, save_backbone
    from selftask.models.weights.load import backbone_state, load_weights

    read = partial(store.load_with, {"backbone": str, "clock": dict})
    found = store.load_newest(run / "checkpoints", read)
    if found is None:
        raise UserError(f"{run}: has no checkpoint yet")
    state, path = found
    if to == "checkpoint":
        return store.write(state, out, int(state["clock"]["steps_done"]))
    config = load_config(str(run / "config.yaml"), [], trust=trust)
    channels = state.get("channels", 3)
    backbone = build_backbone(config.backbone, channels)
    load_weights(backbone, backbone_state(state), what=str(path))
    if to in LIBRARIES:
        check_library(backbone, config.backbone, channels, to)
    return save_backbone(backbone, out, facts(config, int(state["clock"]["steps_done"]), channels))
