"""Check that an existing run folder belongs to the requested run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from selftask.checkpoint import store
from selftask.config.checks.locations import uses_newest
from selftask.config.schema import Config
from selftask.errors import UserError, shorten
from selftask.files.paths import exists
from selftask.files.received import UnreadableFile
from selftask.files.yaml_file import parse_yaml, read_yaml
from selftask.task.task_state import resumes

_SECTIONS = ("method", "data", "backbone", "optimizer", "init", "train", "parallel", "views")
"""Sections that determine the result, in the order in which differences are listed."""
_FIXED_KEYS = {
    "train": ("batch_size", "accumulate", "seed", "precision", "step"),
    "parallel": ("sync_batch_norm", "grad_compression"),
}
"""Compared keys of sections in which all other keys may change."""
_TRAIN_MAY_CHANGE = (
    *("on_nan", "grad_scaler", "matmul_precision", "cudnn_tf32", "deterministic"),
    *("compile", "compile_options", "device"),
)
_DATA_MAY_CHANGE = (
    *("num_workers", "on_error", "max_unreadable", "max_pixels", "max_bytes", "max_scans"),
    *("val", "val_sets", "read_timeout_s", "read_retries", "stage_to", "cache"),
)


def check_same_run(config: Config) -> None:
    """Raise UserError if training would resume a run in its folder that has another config.

    It is also raised if the ``config.yaml`` there is damaged.

    The length of the run may change (train.epochs, train.max_steps). So may logging, checkpoints,
    hooks, evaluations, device, workers and other settings that are not compared, even if some of
    them affect the result (see ``allowed_changes``).
    """
    if not resumes(config):
        return
    out = config.out_folder
    before, now = _fixed(_saved_config(out)), _fixed(config.to_dict())
    if config.train.precision == "auto":  # the task settles it, and is checked once more
        del before["train"]["precision"], now["train"]["precision"]
    differences = list(changes(before, now, ""))
    if differences:
        listed = "\n".join(f"  {shorten(change)}" for change in differences[:8])
        raise UserError(
            f"out={out} has a run with another config; use another out=, resume=never to start a "
            f"new run there, or resume=CHECKPOINT to continue from it anyway\n{listed}"
        )


def unrecorded_changes(config: Config) -> list[str]:
    """Return the changed settings that affect the result of a run without ``config.yaml``.

    They are compared with the config in its newest checkpoint, and do not prevent a resume.
    """
    folder = config.out_folder / "checkpoints"
    if exists(config.out_folder / "config.yaml") or not uses_newest(config):
        return []
    newest = store.load_newest(folder, partial(store.load, wanted=lambda *_: False))
    if newest is None or not isinstance(newest[0].get("config"), str):
        return []
    before = parse_yaml(newest[0]["config"].encode(), newest[1])
    return [*changes(_fixed(before), _fixed(config.to_dict()), "")]


def allowed_changes(config: Config) -> list[str]:
    """Return the changed settings that may affect the result but do not prevent a resume.

    The list is empty if training would not resume.
    """
    if not resumes(config):
        return []
    before, now = (
        {
            "train": {key: (values.get("train") or {}).get(key) for key in _TRAIN_MAY_CHANGE},
            "parallel": values.get("parallel"),
            "hooks": values.get("hooks"),
        }
        for values in (_saved_config(config.out_folder), config.to_dict())
    )
    return [*changes(before, now, "")]


def _saved_config(out: Path) -> dict[str, Any]:
    """Return the content of ``config.yaml`` in ``out``.

    Raises:
        UserError: If it cannot be read, or a section is not a mapping.
    """
    saved = out / "config.yaml"
    with suppress(UnreadableFile):
        config = read_yaml(saved)
        sections = (*_SECTIONS, "hooks")
        if isinstance(config, dict) and all(
            isinstance(config.get(section) or {}, dict) for section in sections
        ):
            return config
    raise UserError(
        f"{saved}: is damaged, so nothing says whether this is the same run; if it is, remove "
        "that file and start the same command again"
    )


def _fixed(config: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a config that must stay the same in a resumed run."""
    fixed = {section: dict(config.get(section) or {}) for section in _SECTIONS}
    for key in _DATA_MAY_CHANGE:
        fixed["data"].pop(key, None)
    for section, keys in _FIXED_KEYS.items():
        fixed[section] = {key: fixed[section].get(key) for key in keys}
    return fixed


def changes(before: Any, now: Any, key: str) -> Iterator[str]:
    """Yield a text such as ``method.temperature: 0.1 there, 0.2 now`` for each difference.

    Args:
        before: Value in the run folder; nested dicts are compared key by key.
        now: Value in the present config.
        key: Dotted key of the values; empty for a whole config.
    """
    if isinstance(before, dict) and isinstance(now, dict):
        for name in {**before, **now}:
            yield from changes(before.get(name), now.get(name), f"{key}.{name}".lstrip("."))
    elif before != now:
        yield f"{key}: {before} there, {now} now"
