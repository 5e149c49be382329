"""What the compiled kernel refuses, and what it says."""

from __future__ import annotations

import math

import numpy as np
import pytest

from selftask.data import kernel
from selftask.data.kernel import Op

if not kernel.available():
    pytest.skip("built without a compiler", allow_module_level=True)


def gradient(height: int, width: int) -> np.ndarray:
    return np.arange(height * width * 3, dtype=np.uint8).reshape(height, width, 3)


WRONG = {
    "program[0] is 9": [9.0],
    "program[0] is 1.5": [1.5],
    "takes 7 numbers; 2 are left": [Op.CROP_RESIZE, 1, 2],
    "program[1] is nan": [Op.HUE, math.nan],
    "program[1] is inf": [Op.CONTRAST, math.inf],
    "at most 1e+06": [Op.CONTRAST, 2e6],
    "whole numbers inside": [Op.CROP_RESIZE, 0, 0, 41, 30, 8, 8, 0],
    "left -1": [Op.CROP_RESIZE, -1, 0, 10, 10, 8, 8, 0],
    "top 0.5": [Op.CROP_RESIZE, 0, 0.5, 10, 10, 8, 8, 0],
    "width 0": [Op.CROP_RESIZE, 0, 0, 0, 10, 8, 8, 0],
    "resize to 1e+30 rows": [Op.CROP_RESIZE, 0, 0, 10, 10, 1e30, 8, 0],
    "filter 2": [Op.CROP_RESIZE, 0, 0, 10, 10, 8, 8, 2],
    "at most 134217728 pixels": [Op.CROP_RESIZE, 0, 0, 10, 10, 60000, 60000, 0],
    "above 0": [Op.BLUR, 0],
    "up to 100": [Op.BLUR, 100.5],
    "the program makes 8 rows of 9": [Op.CROP_RESIZE, 0, 0, 10, 10, 8, 9, 0],
    "more than 64 operations": [Op.HFLIP] * 65,
    "at most 64 operations": [Op.HFLIP] * 1000,
    "program[1] is no number": [Op.HUE, "much"],
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_programs(message: str) -> None:
    out = np.full((30, 40, 3), 9, np.uint8)
    with pytest.raises(ValueError, match=r".") as caught:
        kernel.run(gradient(30, 40), WRONG[message], out)
    assert message in str(caught.value)
    assert (out == 9).all()


@pytest.mark.parametrize("program", [3.0, None, np.zeros((2, 2)), np.zeros(2, np.float32)])
def test_programs_that_are_none(program: object) -> None:
    image = gradient(8, 8)
    if isinstance(program, np.ndarray) and program.ndim == 1:
        program = np.full(2, 300.0, np.float32)
    with pytest.raises(ValueError, match="program"):
        kernel.run(image, program, image.copy())  # type: ignore[arg-type]


def test_wrong_arrays() -> None:
    image = gradient(8, 8)
    out = np.empty((8, 8, 3), np.uint8)
    read_only = out.copy()
    read_only.flags.writeable = False
    for bad in (
        image[..., 0],
        image.astype(np.int8),
        image.astype(np.float32),
        image[:, ::2],
        image[:, :, ::-1],
        image[:0],
        np.zeros((8, 8, 4), np.uint8)[..., :3],
        "image",
        None,
    ):
        with pytest.raises(ValueError, match=r"image: .* is expected"):
            kernel.run(bad, [], out)  # type: ignore[arg-type]
    for bad in (read_only, out[::2], out[..., 0], out.astype(np.uint16), image[:, :4], None):
        with pytest.raises(ValueError, match=r"out: .* is expected"):
            kernel.run(image, [], bad)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="variants"):
        kernel._augment.run(image, [], out, "mmx")
