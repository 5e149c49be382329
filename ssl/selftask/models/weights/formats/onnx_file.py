"""Export of a backbone as an ONNX graph, for runtimes without PyTorch."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from selftask.errors import UserError, explained
from selftask.models.eval_mode import in_eval_mode
from selftask.models.weights.export import example_images, write_whole

FILE = "backbone.onnx"
_PACKAGES = ("onnx", "onnxscript")
_LIMIT = 2**31 - 2**24  # bytes of one protobuf message, minus room for the graph


def check_onnx() -> None:
    """Raise UserError if the packages that write ONNX are missing."""
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(
            f"export: --to onnx needs {' and '.join(missing)}: pip install 'selftask[onnx]'"
        )


@torch.no_grad()
def save_onnx(backbone: nn.Module, folder: Path, facts: dict[str, Any]) -> Path:
    """Write ``backbone.onnx``; return its path.

    The input ``images`` (B, C, S, S) is float32 and normalized, the output ``features`` is (B, E),
    and B is dynamic. S is the only size that the backbone accepts, if there is one. Otherwise it is
    ``input_size`` of ``facts``, or 224. The content of ``backbone.json`` is stored as the property
    ``selftask``.

    Args:
        backbone: The backbone.
        folder: Folder to write to.
        facts: Metadata, see ``save_backbone``.

    Raises:
        UserError: If torch cannot export this backbone as a graph, or its weights exceed 2 GB, the
            limit of one ONNX file.
    """
    num_bytes = sum(t.numel() * t.element_size() for t in backbone.state_dict().values())
    if num_bytes > _LIMIT:
        raise UserError(
            f"export: --to onnx: {num_bytes / 1e9:.1f} GB of weights; one ONNX file holds 2 GB"
        )
    problem = "export: --to onnx: torch cannot write this backbone as a graph"
    raised = torch.onnx.errors.OnnxExporterError, RuntimeError
    with in_eval_mode(backbone), explained(problem, *raised):
        program = torch.onnx.export(
            backbone,
            (example_images(backbone, facts),),
            input_names=["images"],
            output_names=["features"],
            dynamic_shapes=({0: torch.export.Dim("batch")},),
            dynamo=True,
            verbose=False,
        )
    assert program is not None  # None only if torch writes the file itself
    program.model.metadata_props["selftask"] = json.dumps(facts)
    write_whole(folder / FILE, lambda temporary: program.save(str(temporary)))
    return folder / FILE
