"""Views that are copies of one another: a note before anything starts, compared with real views."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from selftask.api.objects import overrides
from selftask.cli.main import main
from selftask.config.load import load_config
from selftask.data.views import Views

CROP = {"name": "random_resized_crop", "size": 8}
CENTER = {"name": "center_crop", "size": 8}


def invert(p: float) -> dict[str, Any]:
    return {"name": "invert", "p": p}


def sometimes(p: float, *transforms: Any) -> dict[str, Any]:
    return {"name": "random_apply", "p": p, "transforms": [*transforms]}


def group(count: int, *transforms: Any, **more: Any) -> dict[str, Any]:
    return {"count": count, "transforms": [*transforms, {"name": "normalize"}], **more}


@pytest.mark.parametrize(
    ("views", "copies"),
    [
        ({"main": group(2)}, True),
        ({"main": group(2, CROP)}, False),
        ({"main": group(2, invert(1.0))}, True),
        ({"main": group(2, invert(0.5))}, False),
        ({"main": group(2, sometimes(0.0, CROP), CENTER)}, True),
        ({"main": group(2, sometimes(1.0, CROP))}, False),
        ({"main": group(2, sometimes(1.0, CENTER))}, True),
        ({"main": group(1), "b": group(1, CENTER)}, False),
        ({"main": group(1, CENTER), "b": group(1, CENTER)}, True),
        ({"main": group(2, CROP), "b": group(1, invert(1.0), of="main")}, False),
        ({"main": {"count": 0, "transforms": [CROP]}, "b": group(2, of="main")}, True),
    ],
)
def test_a_note_if_and_only_if_views_are_copies(views: dict[str, Any], copies: bool) -> None:
    config = load_config("simclr/digits", overrides({"views": views}))
    image = np.random.default_rng(0).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    made = [Views(config.views)(image, 0, 0, index) for index in range(20)]
    are_copies = all(len({view.tobytes() for view in row}) < len(row) for row in made)
    assert are_copies == copies
    assert any("identical, since none" in note for note in config.notes) == copies


def test_a_note_if_the_export_has_no_transforms() -> None:
    """The transforms of exported backbones and of ``selftask features`` are ``eval.transforms``."""
    (note,) = load_config("simclr/digits", ["eval=null"]).notes
    assert note.startswith("eval.transforms is empty") and "eval.evaluations=null" in note
    kept = load_config("simclr/digits", ["eval.evaluations=null"])
    assert kept.eval.transforms and not kept.eval.evaluations and kept.notes == []


def test_one_view_is_no_copy() -> None:
    assert load_config("mae/digits", overrides({"views": {"main": group(1)}})).notes == []


def test_the_note_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    (views,) = overrides({"views": {"main": group(3)}})
    assert main(["config", "simclr/digits", views]) == 0
    assert "# note: views.main: 3 views of an image are identical" in capsys.readouterr().out
