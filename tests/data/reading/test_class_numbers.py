"""Numbers of classes."""

from __future__ import annotations

from typing import Any

import pytest

from selftask.data.reading.class_numbers import number_labels


@pytest.mark.parametrize(
    ("labels", "numbers", "names"),
    [
        (["dog", "", "cat", "dog"], [1, -1, 0, 1], ["cat", "dog"]),
        (["dog", "-1", "cat", None], [1, -1, 0, -1], ["cat", "dog"]),
        (["3", "5.0", "-1", "-1.0"], [3, 5, -1, -1], None),
        ([2, -1, None], [2, -1, -1], None),
        (["", "-1"], [-1, -1], None),
        (["7", "1234567890123456789"], [1, 0], ["1234567890123456789", "7"]),
    ],
)
def test_numbers_of_labels(labels: list[Any], numbers: list[int], names: list[str] | None) -> None:
    made, classes = number_labels(labels)
    assert (made.tolist(), classes) == (numbers, names)
