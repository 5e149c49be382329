"""docs/expected-curves.md: losses at chance are those of the methods."""

from __future__ import annotations

import math
import re
from types import SimpleNamespace

import pytest
from torch import nn

from page_blocks import ROOT
from selftask.config.compose.recipes import shipped
from selftask.config.load import load_config
from selftask.config.schema.views import num_views
from selftask.methods.base import Method
from selftask.registry import METHODS

PAGE = (ROOT / "docs/expected-curves.md").read_text(encoding="utf-8")
ROWS = {
    name: cells
    for name, *cells in re.findall(
        r"^\| `(\w+)` \| (.*) \| (\S+) \| (\S+) \| (\S+) \|$", PAGE, re.MULTILINE
    )
}
TEACHERS = {  # numbers of prototypes
    "distill_prototypes/digits": {"out_dim": 1000},  # timm:test_vit
    "distill_prototypes/images": {"out_dim": 4096, "patch_dim": 4096},  # dinov2/images
}
NUM_CLASSES = {"digits": 10, "images": 10, "imagenet": 1000}


def chance(recipe: str, num_classes: int) -> float | None:
    """The method's chance_loss without a network: what ``setup`` counts is set by hand."""
    config = load_config(recipe, ["data=no/such/folder"] if recipe.endswith("/images") else [])
    cls = METHODS[config.method.name]
    method: Method = cls.__new__(cls)
    nn.Module.__init__(method)
    counted = {
        "num_negatives": sum(num_views(config.views).values()) * (config.train.batch_size - 1),
        "num_pairs": config.train.batch_size,
        "num_classes": num_classes,
        "memory": range(1347),  # of the digits
        **TEACHERS.get(recipe, {}),
    }
    method.config = SimpleNamespace(**config.method.args)
    for name, value in counted.items():
        setattr(method, name, value)
    return method.chance_loss


def large_recipe(method: str) -> str | None:
    """Its recipe for ImageNet, or for as many images."""
    large = rf"{method}/.*(imagenet|captions)$"
    return max((name for name in shipped() if re.match(large, name)), default=None)


@pytest.mark.parametrize("method", sorted(ROWS))
def test_losses_at_chance(method: str) -> None:
    """To the digits that the table has."""
    _, *values = ROWS[method]
    recipes = (f"{method}/digits", f"{method}/images", large_recipe(method))
    for value, recipe, classes in zip(values, recipes, NUM_CLASSES.values(), strict=True):
        found = None if recipe is None else chance(recipe, classes)
        if value == "none":
            assert found is None
        else:
            digits = len(value.partition(".")[2])
            assert found == pytest.approx(float(value), abs=0.51 * 10**-digits), recipe


def test_every_method_with_a_chance_level_is_listed() -> None:
    with_chance = {n for n in METHODS.names() if METHODS[n].chance_loss is not Method.chance_loss}
    assert with_chance == set(ROWS)


def test_numbers_that_people_paste() -> None:
    for value, number in re.findall(r"([\d.]{4,}) is ln ([\d,]+)", PAGE):
        digits = len(value.partition(".")[2])
        assert math.log(int(number.replace(",", ""))) == pytest.approx(
            float(value), abs=0.51 * 10**-digits
        )
    assert math.log(65_537) == pytest.approx(11.09, abs=0.005)
