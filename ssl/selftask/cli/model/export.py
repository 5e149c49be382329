"""``selftask export``: write the backbone or the whole state of a checkpoint of a run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from selftask.checkpoint.kept import named_checkpoint
from selftask.checkpoint.mirror import local_run
from selftask.cli.model.load_model import MODEL
from selftask.cli.options import take, take_options
from selftask.cli.verbosity import USAGE as VERBOSITY
from selftask.config.compose.overrides import import_plugins
from selftask.config.schema import Component
from selftask.config.trust import TRUST, take_trust
from selftask.errors import UserError, check_known, plural
from selftask.files.addresses import is_remote, output_folder
from selftask.files.paths import exists, expand_user

if TYPE_CHECKING:
    from torch import nn

    from selftask.config.schema import Config

USAGE = f"""\
usage: selftask export RUN_OR_MODEL [--out DIR]
                       [--to torchvision|timm|safetensors|huggingface|onnx|torch_export
                             |detectron2|vissl|checkpoint]
                       [--weights ema|swa | --average N] [--name NAME]

{MODEL}
Writes backbone.pt, backbone.safetensors and backbone.json, of a run from its newest checkpoint
(RUN@best: from the best by train.keep_best; RUN@STEP: from that of a step),
into RUN/export (or DIR), with the key names of the library the backbone comes from. Further
students of a method (method.students) go to folders of their names in it, unless weights are
averaged (--weights, --average).
--to torchvision and --to timm also check that the library's own model loads them, strictly, and
computes the same features.
--to huggingface also writes the folder huggingface, which transformers.AutoModel and timm load, if
a model of timm computes the same features.
--to onnx also writes backbone.onnx: normalized images (B, C, S, S) -> features (B, E).
--to torch_export also writes backbone.pt2, the same as a program for torch.export.load.
--to detectron2 and --to vissl also write a ResNet as detectron2.pkl (MODEL.WEIGHTS) or vissl.torch.
--to checkpoint writes a run's whole state instead, as one plain file step_N.pt: what a sharded
checkpoint would have been without train.sharded_checkpoints.
--weights ema (swa) exports the average that hooks.ema (hooks.swa) keeps; --average 5 the mean of
the 5 newest checkpoints. hooks.precise_bn, if the run has it, then recomputes BatchNorm's
statistics from the images of the run.
--name NAME calls the files NAME-1a2b3c4d.pt, .safetensors and .json, with the first digits of the
SHA-256 of the .pt file, which torch.hub.load_state_dict_from_url(..., check_hash=True) compares.
weights=FILE  for timm: and torchvision: models: weights of a file, such as one of VISSL, or `none`
prefix=NAME.  the tensors under this prefix, of a file with several networks
import=[MODULE]  a plug-in, such as one with a handler for an address
{TRUST}
{VERBOSITY}"""

OPTIONS = {"--to": str, "--out": str, "--weights": str, "--average": int, "--name": str}
LIBRARIES = ("torchvision", "timm")
FOREIGN = ("detectron2", "vissl")
FORMATS = (*LIBRARIES, *FOREIGN, "safetensors", "huggingface", "onnx", "torch_export", "checkpoint")


def main(argv: list[str]) -> int:
    """Export the model and print the path of the written file or folder."""
    words, options = take_options(argv, OPTIONS)
    words, trust = take_trust(words)
    weights, words = take("weights", words)
    prefix, words = take("prefix", words)
    imports, words = take("import", words)
    if len(words) != 1:
        raise UserError(f"export needs one RUN or model\n{USAGE}")
    (address,) = words
    to, name, out = options.get("--to", "safetensors"), options.get("--name"), options.get("--out")
    check_known(to, FORMATS, f"export: --to {to}")
    if name is not None and (to not in ("safetensors", *LIBRARIES) or "/" in name):
        raise UserError(
            f"export: --name {name}: renames backbone.pt only, and must not contain a folder"
        )
    average = Average(options.get("--weights"), options.get("--average"))
    import_plugins([f"import={imports}"] if imports else [])
    checkpoint = named_checkpoint(address)
    if checkpoint is not None:
        address = str(checkpoint.parent.parent)
    run = Path(local_run(address, num_checkpoints=None))
    if out is not None and not is_remote(out):
        _check_no_other_run(expand_user(out), run)
    write_to: Callable[[Path], Path]
    try:
        if exists(run / "config.yaml"):
            _check_options_of_run(address, weights, prefix)
            _check_average(average, to, checkpoint)
            out = out or f"{address}/export"
            kwargs: Any = {"trust": trust, "average": average, "checkpoint": checkpoint}
            write_to = partial(export_run, run, to=to, **kwargs)
        else:
            _check_options_of_model(address, to, average)
            backbone, facts = _open(address, weights, out, trust=trust, prefix=prefix)
            write_to = partial(write, backbone, facts=facts, to=to)
        assert out is not None, "_open has refused None"
        with output_folder(out) as folder:
            path = write_to(folder)
            if name is not None:
                from selftask.models.weights.export import rename_by_hash

                path = rename_by_hash(path, name)
    except OSError as error:
        raise UserError(f"export: {error}; --out DIR writes to another folder") from error
    print(f"{out}/{path.name}" if is_remote(out) else path)
    return 0


def _check_options_of_run(run: str, weights: str | None, prefix: str | None) -> None:
    """Raise UserError for options that only other models have."""
    if weights is not None:
        raise UserError(
            f"weights={weights}: {run} is a run, and has its own; --weights ema or swa exports an "
            "average"
        )
    if prefix is not None:
        raise UserError(f"prefix={prefix}: {run} is a run, and has one backbone")


def _check_average(average: Average, to: str, checkpoint: Path | None) -> None:
    """Raise UserError for an average that would not be written."""
    if to == "checkpoint" and average != Average():
        raise UserError("export: --to checkpoint has all weights; leave --weights, --average out")
    if average.checkpoints is not None and checkpoint is not None:
        raise UserError(f"export: --average takes the newest checkpoints, not {checkpoint.stem}")


def _check_options_of_model(model: str, to: str, average: Average) -> None:
    """Raise UserError for options that only runs have."""
    if average != Average():
        raise UserError(f"export: --weights and --average need a run, and {model} is none")
    if to == "checkpoint":
        raise UserError(f"export: --to checkpoint needs a run, and {model} is none")


def _check_no_other_run(out: Path, model: Path) -> None:
    """Raise UserError if ``out`` is a run folder without ``model``, or a folder directly in one."""
    for run in (out, out.parent):
        is_run = exists(run / "config.yaml") and exists(run / "status.json")
        if is_run and not model.resolve().is_relative_to(run.resolve()):
            raise UserError(f"export: --out {out}: {run} is another run; name another folder")


def _open(
    address: str, weights: str | None, out: str | None, *, trust: bool, prefix: str | None
) -> tuple[nn.Module, dict[str, Any]]:
    """Return the backbone of a file or library, and its metadata; see ``open_model``.

    Raises UserError if ``out`` is None, since only a run has a folder for its export.
    """
    from selftask.logs.lines import info_on_stderr
    from selftask.models.weights.address import PRETRAINED, check_model

    check_model(address, weights)  # before torch is imported
    from selftask.models.weights.model_source import describe_model, open_model

    weights = weights or PRETRAINED
    if out is None:
        describe_model(address, weights=weights, trust=trust)  # is it a model at all?
        raise UserError("export: --out DIR is missing; only a run has a folder for its export")
    with info_on_stderr():
        return open_model(address, weights=weights, trust=trust, prefix=prefix)


@dataclass(frozen=True)
class Average:
    """Average of weights to export: that which the hook ``kept`` keeps, or that of the newest
    checkpoints, whose number is ``checkpoints``. If both are None, the weights are not averaged.
    """

    kept: str | None = None
    checkpoints: int | None = None

    def __post_init__(self) -> None:
        if self.kept is not None and self.checkpoints is not None:
            raise UserError("export: --weights and --average: give one of them")
        if self.checkpoints == 0:
            raise UserError("export: --average 0: must be at least 1")


def export_run(
    run: Path,
    out: Path,
    *,
    to: str = "safetensors",
    trust: bool = False,
    average: Average = Average(),
    checkpoint: Path | None = None,
) -> Path:
    """Write the model of a checkpoint of ``run``; return the path of the written file or folder.

    Further students of the method are written to folders in ``out``, unless weights are averaged.

    Args:
        run: The run folder.
        out: The folder to write to.
        to: A format of ``FORMATS``; ``checkpoint`` writes the whole state instead of the model.
        trust: Allow code that the run names, such as a backbone of the user's own.
        average: Average of weights to write, if any.
        checkpoint: A checkpoint of the run; None for the newest.

    Raises:
        UserError: If the run lacks the checkpoints or the average, or as ``write``.
    """
    from selftask.checkpoint import store
    from selftask.config.load import load_config
    from selftask.hooks.export import facts
    from selftask.models.build import build_backbone
    from selftask.models.weights.load import load_weights

    read = _reader(to, average)
    loaded = (
        store.load_newest(run / "checkpoints", read)
        if checkpoint is None
        else (store.load_named(checkpoint, read), checkpoint)
    )
    if loaded is None:
        raise UserError(f"{run}: has no checkpoint yet")
    state, path = loaded
    step = int(state["clock"]["steps_done"])
    if to == "checkpoint":
        return store.write(state, out, step)
    config = load_config(str(run / "config.yaml"), [], trust=trust)
    channels = state.get("channels", 3)
    weights, averaging = _backbone_weights(run, state, average, read)
    backbone = build_backbone(config.backbone, channels)
    load_weights(backbone, weights, what=str(path))
    meta = facts(config, step, channels, averaging)
    if averaging is None:
        _write_students(config, state, path, meta, out, to)
    else:
        backbone = _with_statistics(backbone, config, trust=trust)
    return write(backbone, out, meta, to)


def _reader(to: str, average: Average) -> Callable[[Path], dict[str, Any]]:
    """Return a function that reads what an export needs of a checkpoint."""
    from selftask.checkpoint import store

    wanted: store.Wanted | None = _of_backbones
    if to == "checkpoint":
        wanted = None
    elif average.kept is not None:
        wanted = partial(_of_average, average.kept)
    load = partial(store.load, wanted=wanted)
    return partial(store.load_with, {"backbone": str, "clock": dict}, read=load)


def _backbone_weights(
    run: Path, state: dict[str, Any], average: Average, read: Callable[[Path], dict[str, Any]]
) -> tuple[Any, str | None]:
    """Return the weights of the backbone or of its average, and the average in words, or None."""
    from selftask.checkpoint import store
    from selftask.models.weights.averages import kept_average, mean_backbone
    from selftask.models.weights.read import backbone_state

    if average.kept is not None:
        return kept_average(state, average.kept), average.kept
    if average.checkpoints is not None:
        paths = _newest(run, average.checkpoints)
        states = (store.load_named(path, read) for path in paths)
        return mean_backbone(states), f"mean of {', '.join(path.stem for path in paths)}"
    return backbone_state(state), None


def _write_students(
    config: Config, state: dict[str, Any], path: Path, meta: dict[str, Any], out: Path, to: str
) -> None:
    """Write the further students of the method to folders of their names in ``out``."""
    from selftask.models.build import build_backbone
    from selftask.models.weights.export import shown
    from selftask.models.weights.load import load_weights
    from selftask.models.weights.read import weights_at
    from selftask.registry import METHODS

    kind = METHODS[config.method.name]
    students = kind(kind.Config(**config.method.args)).further_backbones()
    for name, component in students.items():
        student = build_backbone(component, state.get("channels", 3))
        load_weights(student, weights_at(state, f"model.further.{name}.backbone"), what=str(path))
        write(student, out / name, {**meta, "architecture": shown(component)}, to)


def _of_backbones(state: Mapping[str, Any], name: str) -> bool:
    """Return whether a tensor of a checkpoint is in a trained backbone."""
    from selftask.models.weights.read import of_backbone

    return of_backbone(state, name) or name.startswith("model.further.")


def _of_average(kept: str, state: Mapping[str, Any], name: str) -> bool:
    """Return whether a tensor of a checkpoint is in the backbone or in its average ``kept``."""
    return name.startswith(("model.backbone.", f"hooks.{kept}."))


def write(backbone: nn.Module, folder: Path, facts: dict[str, Any], to: str) -> Path:
    """Write a backbone to a folder; return ``backbone.pt``, or the file or folder that ``to`` adds.

    ``backbone.pt``, ``.safetensors`` and ``.json`` are written for every format. Limits of the
    result, such as a fixed image size, are printed as warnings.

    Args:
        backbone: The backbone.
        folder: Folder to write to.
        facts: Metadata, see ``save_backbone``.
        to: A format of ``FORMATS`` other than ``checkpoint``.

    Raises:
        UserError: If the format does not support the backbone, or a required package is missing.
    """
    from selftask.models.weights.export import (
        UNKNOWN_SIZE,
        check_library,
        save_backbone,
        traced_size,
    )
    from selftask.models.weights.formats.foreign import check_foreign, save_foreign
    from selftask.models.weights.formats.huggingface import (
        describe_for_huggingface,
        preprocessing_problem,
        save_huggingface,
    )
    from selftask.models.weights.formats.onnx_file import check_onnx, save_onnx
    from selftask.models.weights.formats.program_file import save_program

    if to in LIBRARIES:
        check_library(backbone, Component(**facts["architecture"]), facts.get("channels", 3), to)
    if to in FOREIGN:
        check_foreign(backbone, to)
    if to == "onnx":
        check_onnx()
    config = describe_for_huggingface(backbone, facts) if to == "huggingface" else None
    path = save_backbone(backbone, folder, facts)
    if to in ("onnx", "torch_export") and traced_size(backbone, facts) is None:
        print(
            f"warning: --to {to}: eval.transforms sets no image size; the file takes images of "
            f"{UNKNOWN_SIZE}x{UNKNOWN_SIZE} pixels only",
            file=sys.stderr,
        )
    if to == "onnx":
        return save_onnx(backbone, folder, facts)
    if to == "torch_export":
        return save_program(backbone, folder, facts)
    if config is not None:
        if problem := preprocessing_problem(config):
            print(f"warning: AutoImageProcessor of this folder: {problem}", file=sys.stderr)
        return save_huggingface(backbone, folder, config)
    return save_foreign(backbone, folder, to) if to in FOREIGN else path


def _newest(run: Path, number: int) -> list[Path]:
    """Return ``number`` checkpoints, newest first; raise UserError if there are fewer."""
    from selftask.checkpoint.rotation import checkpoints

    paths = checkpoints(run / "checkpoints")
    if len(paths) < number:
        raise UserError(
            f"export: --average {number}: {run} has {len(paths)} "
            f"{plural('checkpoint', len(paths))}; train.keep_checkpoints={number} keeps as many"
        )
    return paths[:number]


def _with_statistics(backbone: nn.Module, config: Config, *, trust: bool) -> nn.Module:
    """Return the averaged backbone, with new BatchNorm statistics if the run has ``precise_bn``.

    If it does not have that hook, a note on stderr says that the statistics belong to other
    weights. A backbone without BatchNorm is returned unchanged.
    """
    from torch.nn.modules.batchnorm import _BatchNorm

    from selftask.data.data_module import DataModule
    from selftask.data.loading.open_data import open_received
    from selftask.distributed.device import pick_device
    from selftask.distributed.world import World
    from selftask.registry import HOOKS

    if not any(isinstance(module, _BatchNorm) for module in backbone.modules()):
        return backbone
    hook = next((hook for hook in config.hooks.values() if hook.name == "precise_bn"), None)
    if hook is None:
        print(
            "BatchNorm's statistics are not those of the averaged weights; "
            "hooks.precise_bn={} in the run's config.yaml recomputes them here",
            file=sys.stderr,
        )
        return backbone
    device = pick_device(config.train.device, World())
    data = DataModule(config, open_received(config, trust=trust), World(), device)
    precise: nn.Module = HOOKS[hook.name](**hook.args).recompute(backbone.to(device), data)
    data.close()
    return precise.cpu()
