"""Configs of other frameworks that are given as a recipe: one line instead of many unknown keys."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

_MANY = 3  # typical keys from which on a config is taken for one of that framework


class _Framework(NamedTuple):
    page: str  # of the documentation
    typical: frozenset[str]  # top-level keys that no beginner would write in a recipe
    others: frozenset[str] = frozenset()


_FRAMEWORKS = {
    "VISSL": _Framework(
        "docs/from-vissl.md",
        frozenset(
            {"DATA", "LOSS", "OPTIMIZER", "TRAINER", "METERS", "HOOKS", "DISTRIBUTED", "CHECKPOINT"}
            | {"MACHINE", "SEED_VALUE", "VERBOSE", "LOG_FREQUENCY", "TEST_MODEL"}
        ),
        frozenset({"MODEL"}),
    ),
    "DINOv2": _Framework(
        "docs/from-dinov2.md",
        frozenset({"compute_precision", "dino", "ibot", "crops"}),
        frozenset({"MODEL", "student", "teacher", "optim"}),
    ),
    "solo-learn": _Framework(
        "docs/from-solo-learn.md",
        frozenset({"method_kwargs", "augmentations", "auto_resume", "sync_batchnorm"}),
        frozenset({"name", "max_epochs", "devices", "momentum", "accelerator", "precision"}),
    ),
    "lightly-train": _Framework(
        "docs/from-lightly.md",
        frozenset({"model", "method_args", "transform_args", "loader_args", "trainer_args"}),
        frozenset({"epochs", "batch_size", "overwrite", "embed_dim", "num_nodes", "precision"}),
    ),
    "lightly": _Framework(
        "docs/from-lightly.md", frozenset({"input_dir", "loader", "trainer", "criterion"})
    ),
    "mmselfsup": _Framework(
        "docs/finetune.md, for its weights",
        frozenset(
            {"default_scope", "train_dataloader", "optim_wrapper", "param_scheduler", "train_cfg"}
            | {"default_hooks", "env_cfg", "log_config", "lr_config", "checkpoint_config"}
        ),
        frozenset({"model", "runner"}),
    ),
}

_PYTHON = ("_base_", "default_scope", "model = dict(", "model=dict(")


def foreign_framework(values: Mapping[str, Any], ours: frozenset[str]) -> str | None:
    """Return an error message if values are a config of another framework, else None.

    Args:
        values: The values of a file.
        ours: Top-level keys of a recipe, which do not count.
    """
    inner = values.get("config")  # of VISSL, whose files begin with `config:`
    keys = set(inner if isinstance(inner, Mapping) else values) - ours
    shared = {
        name: len(keys & (framework.typical | framework.others))
        for name, framework in _FRAMEWORKS.items()
        if keys & framework.typical
    }
    name = max(shared, key=shared.__getitem__, default="")
    return _message(name) if shared.get(name, 0) >= _MANY else None


def foreign_python(path: Path) -> str | None:
    """Return an error message if a file is a Python config of mmselfsup, else None."""
    if path.suffix != ".py" or not path.is_file():
        return None
    text = path.read_text(encoding="utf-8", errors="replace")
    return _message("mmselfsup") if any(word in text for word in _PYTHON) else None


def _message(name: str) -> str:
    page = _FRAMEWORKS[name].page
    return f"a config of {name}, whose keys are others: see {page}, and `selftask config simclr`"
