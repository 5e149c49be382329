"""docs/finetune.md and docs/from-vissl.md: keys of the tables exist, layouts are the code's."""

from __future__ import annotations

import re
from pathlib import Path

from selftask.config.load import load_config
from selftask.config.schema import Config
from selftask.models.weights.layouts import LAYOUTS

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGES = {
    name: (DOCS / name).read_text(encoding="utf-8") for name in ("finetune.md", "from-vissl.md")
}
RECIPES = ("moco/images", "supervised/finetune")


def has(config: Config, key: str) -> bool:
    values = config.to_dict()
    for part in key.split("."):
        if not isinstance(values, dict) or part not in values:
            return False
        values = values[part]
    return True


def test_every_key_of_the_tables_exists() -> None:
    configs = [load_config(recipe, ["data=no/such/folder"]) for recipe in RECIPES]
    rows = re.findall(r"^\|.*\| (.*) \|$", PAGES["from-vissl.md"].partition("## Launch")[0], re.M)
    keys = re.findall(r"`([\w.]+)(?:=\w+)?`", "\n".join(rows))
    assert len(keys) > 30
    for key in keys:
        known = key == "supervised" or any(has(config, key) for config in configs)
        assert known, key


def test_the_table_of_layouts_is_that_of_the_code() -> None:
    written = re.findall(r"^\| (.*) \| `(.*)` \|$", PAGES["finetune.md"], re.M)
    assert [(row.writer, row.prefix) for row in LAYOUTS] == [
        row for row in written if row[1].endswith(".")
    ]
