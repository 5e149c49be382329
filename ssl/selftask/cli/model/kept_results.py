"""Append results of evaluations to a file in the run folder."""

from __future__ import annotations

import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

from selftask.checkpoint.mirror import local_run, upload_files
from selftask.cli.model.load_model import Frozen
from selftask.errors import UserError
from selftask.files import addresses
from selftask.files.addresses import is_remote
from selftask.files.paths import is_folder
from selftask.logs.rows import append_row, utc_now

NAME = "evaluations.jsonl"  # in the run folder


def keep(
    address: str,
    evaluation: str,
    overrides: list[str],
    frozen: Frozen,
    options: Any,
    row: dict[str, Any],
) -> None:
    """Append a result to the ``evaluations.jsonl`` of a run; print a note if that fails.

    The line also has all options, such as the seed and the name of the protocol, and digests of the
    weights and images.

    Args:
        address: The run; results of other models are not written.
        evaluation: Name of the evaluation.
        overrides: Its ``key=value`` words.
        frozen: The model and its images.
        options: Options of the evaluation, a dataclass instance.
        row: Metrics by name.
    """
    if not (addresses.is_folder(address) if is_remote(address) else is_folder(address)):
        return
    facts = {
        "date": utc_now(),
        "step": frozen.facts.get("step"),
        "evaluation": evaluation,
        "overrides": overrides,
        "options": {f.name: getattr(options, f.name) for f in fields(options)},
        "model_digest": frozen.model_digest,
        "data_digests": frozen.data_digests,
    }
    folder = Path(local_run(address))
    try:
        append_row(folder / NAME, {**facts, **row})
        upload_files(address, folder, NAME)
    except (OSError, UserError) as error:
        print(f"printed only, not kept: {error}", file=sys.stderr)
