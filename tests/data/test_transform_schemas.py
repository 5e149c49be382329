"""What a config may say about transforms is known from their source alone."""

from __future__ import annotations

from dataclasses import fields

import pytest

from selftask.registry import TRANSFORMS, Registry


@pytest.mark.parametrize("name", TRANSFORMS.names())
def test_keys_are_read_without_importing_the_transform(name: str) -> None:
    """A registry of its own has imported nothing, as a command that only reads configs."""
    unread = Registry("transform", "selftask.data.transforms").config_class(name)
    assert unread is not None
    imported = TRANSFORMS[name]
    assert [f.name for f in fields(unread)] == [f.name for f in fields(imported)]
    assert hasattr(unread, "problems") == hasattr(imported, "problems")
