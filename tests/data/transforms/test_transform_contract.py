"""What every registered transform promises: 8-bit RGB of any size, the given image untouched."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from selftask.data.transforms.pipeline import Compose
from selftask.random.views import draw_rng
from selftask.registry import TRANSFORMS, Registry

BUILT_IN = Registry("transform", "selftask.data.transforms").names()  # none of another test
NESTED: list[Any] = [{"name": "horizontal_flip"}, {"name": "cutout", "length": 2}]
REQUIRED: dict[str, dict[str, Any]] = {
    "random_resized_crop": {"size": 8},
    "random_crop": {"size": 8},
    "center_crop": {"size": 8},
    "resize": {"size": 8},
    "rotation": {"degrees": 30.0},
    "random_affine": {"degrees": 30.0, "scale": (0.5, 1.5), "translate": 0.5},
    "random_shear": {"x": 20.0, "y": 20.0},
    "color_jitter": {"brightness": 0.8, "contrast": 0.8, "saturation": 0.8, "hue": 0.2},
    "contrast_noise": {"contrast": (0.5, 1.5), "offset": (-0.5, 0.5), "noise": 0.1},
    "random_apply": {"transforms": NESTED},
    "random_choice": {"choices": [NESTED, []]},
    "random_order": {"transforms": NESTED},
    "jigsaw": {"grid": 2, "num_permutations": 24},
    "custom": {"transform": "PIL.ImageOps:mirror"},
}
SMALLEST = {"jigsaw": 2, "tile": 3}  # pixels of a side, where not 1
CHANGING = [name for name in BUILT_IN if name != "normalize"]


def build(name: str) -> Any:
    return TRANSFORMS[name](**REQUIRED.get(name, {}))


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
@pytest.mark.parametrize("size", [(1, 1), (2, 9), (9, 1), (33, 47)])
@pytest.mark.parametrize("name", CHANGING)
def test_any_size_the_same_again_and_in_place_never(name: str, size: tuple[int, int]) -> None:
    """The image cannot be written to, so that trying to would raise."""
    least = SMALLEST.get(name, 1)
    height, width = (max(least, side) for side in size)
    image = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    image.flags.writeable = False
    transform, pipeline = build(name), Compose([build(name)])
    before, changed = image.copy(), 0
    for index in range(12):
        out = transform(image, draw_rng(3, 0, index, 0))
        assert out.dtype == np.uint8 and out.ndim == 3 and out.shape[2] == 3
        assert out.flags.c_contiguous
        assert np.array_equal(transform(image, draw_rng(3, 0, index, 0)), out)
        assert pipeline(image, draw_rng(3, 0, index, 0)).shape == out.shape
        changed += out is not image
    assert np.array_equal(image, before)
    assert changed > 0 or min(size) == 1


def differ(transform: Any, size: int) -> bool:
    """Whether 40 views of one image are not all the same."""
    image = np.random.default_rng(0).integers(20, 200, (size, size + 8, 3), dtype=np.uint8)
    pipeline = Compose([transform])
    return len({pipeline(image, draw_rng(3, 0, at, 0)).tobytes() for at in range(40)}) > 1


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
@pytest.mark.parametrize("name", BUILT_IN)
def test_is_random_is_true(name: str) -> None:
    """``custom`` is unknown and counts as random; so does ``tile``, which differs by view."""
    declared = TRANSFORMS.declared(name, "is_random", True)
    if name in ("custom", "tile"):
        assert declared is True
    else:
        assert differ(build(name), 33) == bool(declared)
    if declared == "p":
        more = {key: value for key, value in REQUIRED.get(name, {}).items() if key != "p"}
        more = {"transforms": [{"name": "lab"}]} if name == "random_apply" else more
        assert [differ(TRANSFORMS[name](**more, p=p), 33) for p in (0.0, 0.5, 1.0)] == [
            False,
            True,
            False,
        ]


@pytest.mark.parametrize("name", CHANGING)
def test_gray_pictures_stay_gray_but_for_what_has_to_do_with_colours(name: str) -> None:
    """A image of equal channels keeps them equal unless the transform treats them apart."""
    apart = {"lab", "channel_drop", "gaussian_noise", "lighting"}
    gray = np.random.default_rng(0).integers(0, 256, (16, 20, 1), dtype=np.uint8)
    image = np.repeat(gray, 3, axis=2)
    transform = build(name)
    outs = [transform(image, draw_rng(0, 0, index, 0)).astype(int) for index in range(30)]
    spread = max(int(np.ptp(out, axis=2).max()) for out in outs)
    assert spread > 1 if name in apart else spread <= 1
