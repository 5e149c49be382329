"""Export of a ResNet in the layouts of detectron2 and VISSL."""

from __future__ import annotations

import pickle
import re
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from selftask.checkpoint.manifest import write_checked
from selftask.errors import UserError
from selftask.models.weights.export import portable_state, write_whole
from selftask.models.weights.layouts import Layout, Rename

FILES = {"detectron2": "detectron2.pkl", "vissl": "vissl.torch"}

_NORM = r"(weight|bias|running_mean|running_var|num_batches_tracked)"
_TORCHVISION = re.compile(
    rf"(layer[1-4]\.\d+\.)?(conv[123]\.weight|bn[123]\.{_NORM})"
    rf"|layer[1-4]\.\d+\.downsample\.(0\.weight|1\.{_NORM})"
)
"""Names of a ResNet's tensors; deep stems, average pools before a shortcut and others have more."""

_RENAMES: tuple[Rename, ...] = (  # as in MoCo's convert-pretrain-to-detectron2.py
    (r"^(?=conv1|bn1)", "stem."),
    (r"^layer(\d)", lambda match: f"res{int(match[1]) + 1}"),
    (r"\bbn(\d)", r"conv\1.norm"),
    (r"downsample\.0", "shortcut"),
    (r"downsample\.1", "shortcut.norm"),
)
_TO_DETECTRON2 = Layout("detectron2", "", renames=_RENAMES)


def check_foreign(backbone: nn.Module, layout: str) -> None:
    """Raise UserError unless a backbone is a ResNet with torchvision's names."""
    state = portable_state(backbone)
    others = [key for key in state if not _TORCHVISION.fullmatch(key)]
    if others or "layer4.0.conv1.weight" not in state:
        reason = f", which has {others[0]!r}" if others else ""
        raise UserError(
            f"export: --to {layout} is for ResNets with torchvision's names, and not for a "
            f"{type(backbone).__name__}{reason}; --to safetensors writes any backbone"
        )


def save_foreign(backbone: nn.Module, folder: Path, layout: str) -> Path:
    """Write the weights for another framework; return the path of the file.

    Args:
        backbone: A ResNet.
        folder: Folder to write to.
        layout: ``"detectron2"``: a pickle of arrays for ``MODEL.WEIGHTS``, without counters of
            BatchNorm. ``"vissl"``: a checkpoint for ``WEIGHTS_INIT.PARAMS_FILE``, without heads.
    """
    state, path = portable_state(backbone), folder / FILES[layout]
    if layout == "vissl":
        trunk = {f"_feature_blocks.{key}": value for key, value in state.items()}
        model = {"trunk": trunk, "heads": {}}
        content = {"classy_state_dict": {"base_model": {"model": model}}}
        write_whole(path, lambda temporary: write_checked(content, temporary))
    else:
        text = pickle.dumps(to_detectron2(state), protocol=2)  # as in detectron2's model zoo
        write_whole(path, lambda temporary: temporary.write_bytes(text))
    return path


def to_detectron2(state: dict[str, Tensor]) -> dict[str, Any]:
    """Return the content of a file whose keys detectron2 matches with its ResNet by suffix."""
    arrays = {}
    for key, value in state.items():
        if key.endswith("num_batches_tracked"):
            continue
        arrays[_TO_DETECTRON2.rename(key)] = value.numpy()
    return {"model": arrays, "__author__": "selftask", "matching_heuristics": True}
