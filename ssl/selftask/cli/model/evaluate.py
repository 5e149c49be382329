"""``selftask eval``: evaluate features of a run, a file, or a model of timm or torchvision."""

from __future__ import annotations

import sys
from dataclasses import fields, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from selftask.checkpoint.mirror import local_run, upload_files
from selftask.cli.model.load_model import MODEL, WEIGHTS, open_frozen
from selftask.cli.verbosity import USAGE as VERBOSITY
from selftask.config.config_class import config_class
from selftask.config.schema import Config
from selftask.errors import UserError, nearest
from selftask.files import addresses
from selftask.files.addresses import is_remote
from selftask.files.paths import is_folder
from selftask.logs import announce, json_row
from selftask.registry import EVALUATIONS

USAGE = f"""\
usage: selftask eval knn|linear|svm RUN_OR_MODEL [key=value ...]

{MODEL}
data=DIR      the labelled images to learn from; default: those of the run
data.val=DIR  those to test on; without it, k-NN leaves each image out of its own neighbours
{WEIGHTS}
Fields of the evaluation need no prefix: k=[5,20], few_labels=[10]. Prints one JSON line last.
{VERBOSITY}"""

NAME = "evaluations.jsonl"  # in the folder of a run
_SECTIONS = ("data", "eval", "image_size", "import", "train")  # train: device, seed, threads


def main(argv: list[str]) -> int:
    """Evaluate, print the figures, and append them to the run's ``evaluations.jsonl``."""
    if not argv:
        print(USAGE)
        return 0
    if len(argv) < 2 or "=" in argv[1]:
        raise UserError(f"eval needs an evaluation and a run or model\n{USAGE}")
    name, address, overrides = argv[0], argv[1], argv[2:]
    EVALUATIONS.address(name)  # raises with the nearest name
    asked = [f"eval.evaluations={{{name}: {{}}}}", *_spelt_out(name, overrides)]
    frozen = open_frozen(address, asked)
    config = _only(frozen.config, name)

    from selftask.evaluate.offline import evaluate_backbone

    row = evaluate_backbone(
        frozen.backbone, config, frozen.sources, device=frozen.device, tell=announce
    )
    print(json_row(row))
    if addresses.is_folder(address) if is_remote(address) else is_folder(address):
        date = datetime.now(timezone.utc).isoformat(timespec="seconds")
        facts = {"date": date, "step": frozen.facts.get("step"), "evaluation": name}
        _keep(address, {**facts, "overrides": overrides, **row})
    return 0


def _keep(run: str, row: dict[str, Any]) -> None:
    """Append to the run's ``evaluations.jsonl``, if it can be written."""
    folder = Path(local_run(run))
    try:
        with (folder / NAME).open("a", encoding="utf-8") as file:
            file.write(json_row(row) + "\n")
        upload_files(run, folder, NAME)
    except (OSError, UserError) as error:
        print(f"printed only, not kept: {error}", file=sys.stderr)


def _only(config: Config, name: str) -> Config:
    """Return the config with this evaluation only."""
    chosen = {name: config.eval.evaluations[name]}
    return replace(config, eval=replace(config.eval, evaluations=chosen))


def _spelt_out(name: str, overrides: list[str]) -> list[str]:
    """Turn ``k=[5]`` into ``eval.evaluations.knn.k=[5]``; raise UserError for unknown fields."""
    config = config_class(EVALUATIONS, name)
    own = {field.name for field in fields(config)} if config is not None else set()
    prefix = f"eval.evaluations.{name}."
    short = own | {"weights", "trust"}
    for key in sorted({text.partition("=")[0] for text in overrides} - short):
        if key.partition(".")[0] not in _SECTIONS:  # what trains a run has no effect here
            raise UserError(
                f"eval {name}: there is no {key!r}; {nearest(key, {*short, *_SECTIONS})}"
            )
    return [prefix + text if text.partition("=")[0] in own else text for text in overrides]
