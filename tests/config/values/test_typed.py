"""Conversion of values by annotation."""

from __future__ import annotations

from typing import Any, Literal

import pytest

from selftask.config.values.coerce import Mismatch, convert


@pytest.mark.parametrize(
    ("value", "annotation", "expected"),
    [
        (3, int, 3),
        ("3", int, 3),
        (3, float, 3.0),
        ("1e-3", float, 0.001),
        (True, bool, True),
        ("true", bool, True),
        (5, str, "5"),
        (None, int | None, None),
        (3, int | float, 3),
        (3.5, int | str, "3.5"),
        ("auto", int | Literal["auto"], "auto"),
        (4, int | Literal["auto"], 4),
        ("no", Literal[False, "model"], False),
        ("no", Literal["no", "index"], "no"),
        ([1, 2], tuple[float, float], (1.0, 2.0)),
        ([1, 2, 3], tuple[int, ...], (1, 2, 3)),
        ([[1, 2]], list[tuple[int, int]], [(1, 2)]),
        ({"a": 1}, dict[str, float], {"a": 1.0}),
        ({"a": [1]}, float | dict[str, Any], {"a": [1]}),
        ("mean", Literal["sum", "mean"], "mean"),
        (False, Literal["no", "zero"], "no"),
    ],
)
def test_values_are_converted_to_their_annotation(
    value: Any, annotation: Any, expected: Any
) -> None:
    converted = convert(value, annotation)
    assert converted == expected
    assert type(converted) is type(expected)


@pytest.mark.parametrize(
    ("value", "annotation", "message"),
    [
        (3.5, int, "a whole number"),
        ("many", int, "a whole number"),
        (True, int, "a whole number"),
        (True, float, "a number"),
        (1, bool, "true or false"),
        (None, int, "a whole number"),
        ([1], str, "text"),
        ("meen", Literal["sum", "mean"], "did you mean 'mean'? one of sum, mean"),
        ("x", Literal["sum", "mean"], "one of sum, mean"),
        ("aut", int | Literal["auto"], "did you mean 'auto'"),
        ([1, 2, 3], tuple[float, float], "a list of 2: a number, a number"),
        ("x", list[int], "a list, each a whole number"),
        (5, list[int], "a list, each a whole number; write [5]"),
        ([1, "x"], list[int], "a whole number"),
        (5, dict[str, Any], "key: value pairs"),
    ],
)
def test_values_of_the_wrong_type_are_refused(value: Any, annotation: Any, message: str) -> None:
    with pytest.raises(Mismatch) as error:
        convert(value, annotation)
    assert message in str(error.value)
