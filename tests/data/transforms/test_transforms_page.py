"""``docs/transforms.md`` names every transform with all of its keys and their defaults."""

from __future__ import annotations

import re
import textwrap
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from selftask.config.config_class import config_class
from selftask.config.load import load_config
from selftask.data.views import Views
from selftask.registry import TRANSFORMS, Registry

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "transforms.md").read_text(encoding="utf-8")
ROWS = {row[1]: row[0] for row in re.finditer(r"^\| `(\w+)` \|.*$", PAGE, re.MULTILINE)}
BUILT_IN = Registry("transform", "selftask.data.transforms").names()  # none of another test


def as_yaml(default: Any) -> str:
    value = list(default) if isinstance(default, tuple) else default
    text = yaml.safe_dump(value, default_flow_style=True, width=1000)
    return text.removesuffix("\n").removesuffix("\n...")


def test_every_transform_is_on_the_page_and_nothing_else() -> None:
    assert set(ROWS) == set(BUILT_IN)
    assert len(re.findall(r"^\| `\w+` \|", PAGE, re.MULTILINE)) == len(ROWS)


@pytest.mark.parametrize("name", BUILT_IN)
def test_keys_and_defaults(name: str) -> None:
    cell = ROWS[name].split(" | ")[1]
    config = config_class(TRANSFORMS, name)
    assert config is not None
    given = {}
    for part in cell.strip(" |").split("; "):
        key = re.match(r"`(\w+)`", part)
        if key:
            given[key[1]] = part
    assert list(given) == [field.name for field in fields(config)]
    for field in fields(config):
        default = field.default_factory() if callable(field.default_factory) else field.default
        if default is not MISSING:
            expected = f"`{field.name}` {as_yaml(default)}"
            assert re.match(re.escape(expected) + r"(?![\w.])", given[field.name]), expected


@pytest.mark.usefixtures("forget_names")
def test_the_pages_examples_run(tmp_path: Path) -> None:
    views = yaml.safe_load(PAGE[PAGE.index("    views:") : PAGE.index("A key without")])
    module = tmp_path / "shift_red_module.py"
    module.write_text(
        "from dataclasses import dataclass\nimport numpy as np\n"
        "from selftask.registry import register_transform\n"
        + textwrap.dedent(PAGE[PAGE.index('    @register_transform("shift_red")') :])
    )
    views["views"]["main"]["transforms"].insert(1, "shift_red")
    recipe = {"defaults": ["simclr/digits", "_self_"], "import": [module.stem], **views}
    (tmp_path / "my.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False))
    config = load_config(str(tmp_path / "my.yaml"), [])
    image = np.random.default_rng(0).integers(0, 256, (50, 60, 3), dtype=np.uint8)
    out = Views(config.views)(image, 0, 0, 0)
    assert [view.shape for view in out] == [(224, 224, 3)] * 2
