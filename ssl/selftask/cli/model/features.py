"""``selftask features``: write the features of a frozen backbone for other tools."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from selftask.cli.model.load_model import MODEL, WEIGHTS, open_frozen
from selftask.errors import UserError
from selftask.files import addresses
from selftask.files.addresses import is_remote, output_folder
from selftask.files.paths import exists, expand_user

if TYPE_CHECKING:
    from selftask.data.source import Source
    from selftask.evaluate.features import Features

USAGE = f"""\
usage: selftask features RUN_OR_MODEL out=DIR [data=DIR] [key=value ...]

{MODEL}
out=DIR       a folder for features.npy (images, features), float32; images.csv, whose rows are
              path and label of the same rows; features.json, what they were made with
data=DIR      the images, with or without labels; default: those the run was trained on
{WEIGHTS}
An image that cannot be read has no row."""

FEATURES, IMAGES, FACTS = "features.npy", "images.csv", "features.json"


def main(argv: list[str]) -> int:
    """Compute and write features; print the folder."""
    if not argv:
        print(USAGE)
        return 0
    address, overrides = argv[0], argv[1:]
    if "=" in address:
        raise UserError(f"features needs a run or model before any key=value\n{USAGE}")
    asked = [text.partition("=")[2] for text in overrides if text.startswith("out=")]
    if not asked or not asked[-1]:
        raise UserError("features needs out=DIR, the folder to write to")
    out = asked[-1]
    features = f"{out}/{FEATURES}"
    if addresses.exists(features) if is_remote(out) else exists(expand_user(features)):
        raise UserError(f"out: {features} is there already; choose another folder")
    if any(text.partition("=")[0].startswith("data.val") for text in overrides):
        raise UserError("data.val: features takes those of data= alone; call it once more for them")
    frozen = open_frozen(address, ["data.val=null", *overrides])

    from selftask.evaluate.offline import features_of

    source = frozen.sources.train
    backbone = frozen.backbone.to(frozen.device)
    found = features_of(backbone, frozen.config, source, device=frozen.device)
    facts = {
        "model": address,
        "backbone": frozen.facts,
        "data": frozen.config.data.to_dict(),
        "transforms": [transform.to_dict() for transform in frozen.config.eval.transforms],
    }
    with output_folder(out) as folder:
        write(folder, found, source, facts)
    print(f"{out}: {len(found):,} images, {found.features.shape[1]} features")
    return 0


def write(out: Path, found: Features, source: Source, facts: dict[str, Any]) -> None:
    """Write the three files, the features last: if they exist, the others do."""
    import numpy as np

    out.mkdir(parents=True, exist_ok=True)
    (out / FACTS).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    with (out / IMAGES).open("w", encoding="utf-8", errors="surrogateescape", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(("path", "label"))
        for index, label in zip(found.indices.tolist(), found.targets.tolist(), strict=True):
            rows.writerow((source.path(index), label if label >= 0 else ""))
    part = out / f"{FEATURES}.part"
    with part.open("wb") as file:
        np.save(file, found.features.numpy())
    part.rename(out / FEATURES)
