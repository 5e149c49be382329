"""What a config may say about transforms is known from their source alone."""

from __future__ import annotations

from dataclasses import fields

import pytest

from selftask.config.config_class import config_class
from selftask.registry import TRANSFORMS, Registry


@pytest.mark.parametrize("name", TRANSFORMS.names())
def test_keys_are_read_without_importing_the_transform(name: str) -> None:
    """A registry of its own has imported nothing, as a command that only reads configs."""
    unread = config_class(Registry("transform", "selftask.data.transforms"), name)
    assert unread is not None
    imported = TRANSFORMS[name]
    assert [f.name for f in fields(unread)] == [f.name for f in fields(imported)]
    assert hasattr(unread, "problems") == hasattr(imported, "problems")


def test_every_chance_is_a_probability() -> None:
    chances = [f for name in TRANSFORMS.names() for f in fields(TRANSFORMS[name]) if f.name == "p"]
    assert len(chances) > 10
    assert all((f.metadata["min"], f.metadata["max"]) == (0, 1) for f in chances)
