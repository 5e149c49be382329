"""Export of a backbone as a program of ``torch.export``, which runs without selftask."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from selftask.errors import UserError, explained
from selftask.models.eval_mode import in_eval_mode
from selftask.models.weights.export import example_images, same_features, write_whole

FILE = "backbone.pt2"


@torch.no_grad()
def save_program(backbone: nn.Module, folder: Path, facts: dict[str, Any]) -> Path:
    """Write ``backbone.pt2``, load it again and compare its features; return its path.

    The program maps float32, normalized images (B, C, S, S) to features (B, E), and B is dynamic.
    S is as in ``save_onnx``. The content of ``backbone.json`` is stored as the extra file
    ``selftask``.

    Args:
        backbone: The backbone, on the CPU.
        folder: Folder to write to.
        facts: Metadata, see ``save_backbone``.

    Raises:
        UserError: If torch cannot export this backbone, or if the saved program computes different
            features.
    """
    images = example_images(backbone, facts)

    def write(path: Path) -> None:
        with path.open("wb") as file:  # torch warns of a temporary file's name
            torch.export.save(program, file, extra_files={"selftask": json.dumps(facts)})
        with path.open("rb") as file:
            loaded = torch.export.load(file).module()
        others = torch.rand(3, *images.shape[1:])  # another size of batch than the traced one
        if not same_features(loaded(others), backbone(others)):
            raise UserError("export: --to torch_export: the file computes other features")

    problem = "export: --to torch_export: torch cannot export this backbone"
    with in_eval_mode(backbone):
        with explained(problem, RuntimeError, ValueError):
            dynamic = ({0: torch.export.Dim("batch")},)
            program = torch.export.export(backbone, (images,), dynamic_shapes=dynamic)
        write_whole(folder / FILE, write)
    return folder / FILE
