"""Words ``key=value``: what is formatted is parsed again, and what cannot be meant is refused."""

from __future__ import annotations

from typing import Any

import pytest

from selftask.config.compose.overrides import format_value, parse_overrides
from selftask.config.load import load_config
from selftask.errors import ConfigError


@pytest.mark.parametrize(
    "key", ["classy:profiler", "a:b c", "a,b", "(x)", "[0]", "x=y", "{z}", "a\\b", "*.bias", "80%"]
)
def test_keys_of_a_mapping_keep_special_characters(key: str) -> None:
    value: dict[str, Any] = {key: {"inner": [1, "a:b"]}}
    ((override,), problems) = parse_overrides([f"hooks={format_value(value)}"])
    assert override.value == value and problems == []


def test_an_empty_run_folder_is_refused() -> None:
    """As of ``out=$RUN`` without such a variable; it would be the current folder."""
    with pytest.raises(ConfigError, match="out is empty; give a folder"):
        load_config("simclr/digits", ["out="])
    assert load_config("simclr/digits", ["out=."]).out == "."
