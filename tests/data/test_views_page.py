"""``docs/views.md`` names every key of a group and every transform that has numbers."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import numpy as np
import yaml

from selftask.batch import Draws
from selftask.config.load import load_config
from selftask.config.schema import ViewConfig, num_views
from selftask.data.transforms.transform import Transform
from selftask.data.views import Views
from selftask.registry import TRANSFORMS, Registry

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "views.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| (`.*?) \|", PAGE, re.MULTILINE)


def test_every_key_and_every_tensor_is_named() -> None:
    named = {name for row in ROWS for name in re.findall(r"`(\w+)", row)}
    assert {field.name for field in fields(ViewConfig)} <= named
    assert {field.name for field in fields(Draws)} | {"boxes", "centers"} <= named


def test_every_transform_with_numbers_is_named() -> None:
    table = PAGE[PAGE.index("its numbers |") :]
    named = {name for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
             for name in re.findall(r"`(\w+)`", row)}  # fmt: skip
    with_numbers = set()
    for name in Registry("transform", "selftask.data.transforms").names():
        kind = TRANSFORMS[name]
        if isinstance(kind, type) and issubclass(kind, Transform):
            if kind.numbers is not Transform.numbers:
                with_numbers.add(name)
            assert kind.affine or f"`{name}`" in PAGE
    assert named == with_numbers


def test_the_example_runs(tmp_path: Path) -> None:
    example = yaml.safe_load(PAGE[PAGE.index("    views:") : PAGE.index("Random draws depend")])
    recipe = {"defaults": ["swav/digits", "_self_"], **example}
    (tmp_path / "my.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False))
    config = load_config(str(tmp_path / "my.yaml"), [])
    assert num_views(config.views) == {"main": 2, "small": 2, "tiles": 18}
    image = np.random.default_rng(0).integers(0, 256, (250, 260, 3), dtype=np.uint8)
    sizes = [view.shape[0] for view in Views(config.views)(image, 0, 0, 0)]
    assert sizes == [225] * 2 + [96] * 2 + [64] * 18
