"""The compiled kernel against double-precision formulas, Pillow, torch and torchvision."""

from __future__ import annotations

import colorsys
import math
import multiprocessing
import threading

import numpy as np
import pytest
import torch
import torchvision.transforms.functional as tv
from PIL import Image

from selftask.data import kernel
from selftask.data.kernel import Filter, Op

if not kernel.available():
    pytest.skip("built without a compiler", allow_module_level=True)

SIZES = [(1, 1), (3, 500), (31, 33), (32, 32), (64, 65), (97, 40)]
LUMA = (0.299, 0.587, 0.114)


@pytest.fixture(params=kernel.variants())
def variant(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def photo(height: int, width: int, seed: int = 0) -> np.ndarray:
    """Smooth colors with noise, edges, saturated and equal channels: what hurts each operation."""
    rng = np.random.default_rng(seed)
    small = rng.integers(0, 256, (max(1, height // 8), max(1, width // 8), 3), dtype=np.uint8)
    smooth = np.asarray(Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC))
    noisy = smooth.astype(int) + rng.integers(-20, 21, smooth.shape)
    noisy[: height // 4, : width // 4] = rng.choice([0, 128, 255], (height // 4, width // 4, 3))
    noisy[-(height // 5) :, : width // 3] = noisy[-(height // 5) :, : width // 3, :1]
    return np.clip(noisy, 0, 255).astype(np.uint8)


def apply(
    image: np.ndarray,
    program: list[float],
    size: tuple[int, int] | None = None,
    variant: str | None = None,
) -> np.ndarray:
    height, width = size or image.shape[:2]
    out = np.full((height, width, 3), 77, np.uint8)
    if variant is None:
        kernel.run(image, program, out)
    else:
        kernel._augment.run(image, program, out, variant)
    return out


def levels(got: np.ndarray, expected: np.ndarray) -> tuple[float, float]:
    """Largest and mean distance in gray levels."""
    distance = np.abs(got.astype(float) - expected.astype(float))
    return float(distance.max()), float(distance.mean())


def rounded(values: np.ndarray) -> np.ndarray:
    return np.floor(np.clip(values, 0, 255) + 0.5)


def tent(x: np.ndarray) -> np.ndarray:
    return np.maximum(0, 1 - np.abs(x))


def cubic(x: np.ndarray) -> np.ndarray:
    x = np.abs(x)
    inner = 1.5 * x**3 - 2.5 * x**2 + 1
    outer = -0.5 * x**3 + 2.5 * x**2 - 4 * x + 2
    return np.where(x < 1, inner, np.where(x < 2, outer, 0))


def resampling(inputs: int, outputs: int, kind: Filter) -> np.ndarray:
    """(outputs, inputs) antialiased weights in double precision."""
    scale = inputs / outputs
    centers = (np.arange(outputs) + 0.5) * scale
    offsets = (np.arange(inputs)[None] + 0.5 - centers[:, None]) / max(scale, 1)
    weights = tent(offsets) if kind == Filter.BILINEAR else cubic(offsets)
    return weights / weights.sum(1, keepdims=True)


def resized(image: np.ndarray, height: int, width: int, kind: Filter) -> np.ndarray:
    across = resampling(image.shape[1], width, kind)
    down = resampling(image.shape[0], height, kind)
    rows = rounded(np.einsum("ow,hwc->hoc", across, image))
    return rounded(np.einsum("oh,hwc->owc", down, rows))


RESIZES = [
    ((300, 300), (224, 224)),
    ((100, 90), (224, 200)),
    ((20, 27), (32, 32)),
    ((3, 500), (32, 31)),
    ((37, 50), (1, 1)),
    ((1, 1), (7, 5)),
    ((40, 200), (96, 30)),
    ((200, 15), (33, 64)),
    ((500, 700), (32, 30)),
]


@pytest.mark.parametrize("kind", list(Filter))
@pytest.mark.parametrize(("size", "target"), RESIZES)
def test_resize(size: tuple[int, int], target: tuple[int, int], kind: Filter, variant: str) -> None:
    image = photo(*size)
    program = [Op.CROP_RESIZE, 0, 0, size[1], size[0], *target, kind]
    got = apply(image, program, target, variant)
    most, mean = levels(got, resized(image, *target, kind))
    assert most <= 1 and mean < 0.02  # one half is rounded either way
    if size != (200, 15):  # there Pillow 13 goes down the columns first
        names = (Image.Resampling.BILINEAR, Image.Resampling.BICUBIC)
        pillow = Image.fromarray(image).resize(target[::-1], names[kind])
        most, mean = levels(got, np.asarray(pillow))
        assert most <= 1 and mean < 0.1
    theirs = torch.nn.functional.interpolate(
        torch.from_numpy(image)[None].permute(0, 3, 1, 2),
        target,
        mode=kind.name.lower(),
        antialias=True,
    )
    most, mean = levels(got, theirs[0].permute(1, 2, 0).numpy())
    assert most <= 1 and mean < 0.1


@pytest.mark.parametrize("target", [(24, 40), (13, 50), (60, 9)])
def test_crop_of_a_view_is_a_crop_of_the_copy(target: tuple[int, int], variant: str) -> None:
    whole = photo(120, 130)
    view = whole[10:90, 20:100]
    program = [Op.CROP_RESIZE, 15, 7, 40, 24, *target, Filter.BILINEAR]
    crop = Image.fromarray(whole[17:41, 35:75]).resize(target[::-1], Image.Resampling.BILINEAR)
    got = apply(view, program, target, variant)
    assert levels(got, np.asarray(crop))[0] <= 1
    assert np.array_equal(got, apply(view.copy(), program, target, variant))
    upside_down = apply(view[::-1][::-1], program, target, variant)
    assert np.array_equal(got, upside_down)


def test_rows_may_run_backwards(variant: str) -> None:
    image = photo(50, 40)
    assert np.array_equal(apply(image[::-1], [], None, variant), image[::-1])
    program = [Op.CROP_RESIZE, 0, 0, 40, 50, 20, 20, Filter.BILINEAR]
    expected = apply(image[::-1].copy(), program, (20, 20), variant)
    assert np.array_equal(apply(image[::-1], program, (20, 20), variant), expected)


def test_crop_of_the_same_size_is_exact(variant: str) -> None:
    image = photo(70, 80)
    program = [Op.CROP_RESIZE, 11, 5, 37, 41, 41, 37, Filter.BICUBIC]
    assert np.array_equal(apply(image, program, (41, 37), variant), image[5:46, 11:48])


@pytest.mark.parametrize("size", SIZES)
def test_flip_and_nothing(size: tuple[int, int], variant: str) -> None:
    image = photo(*size)
    assert np.array_equal(apply(image, [], None, variant), image)
    assert np.array_equal(apply(image, [Op.HFLIP], None, variant), image[:, ::-1])
    assert np.array_equal(apply(image, [Op.HFLIP, Op.HFLIP], None, variant), image)


def test_crop_after_flip_is_of_the_flipped(variant: str) -> None:
    image = photo(60, 90)
    later = [Op.HFLIP, Op.GRAY, Op.CROP_RESIZE, 4, 3, 30, 20, 32, 33, Filter.BILINEAR]
    gray = apply(image, [Op.GRAY], None, variant)
    flipped = Image.fromarray(np.ascontiguousarray(gray[3:23, ::-1][:, 4:34]))
    expected = np.asarray(flipped.resize((33, 32), Image.Resampling.BILINEAR))
    assert levels(apply(image, later, (32, 33), variant), expected)[0] <= 1


def matrix_of(brightness: float = 1.0, saturation: float = 1.0) -> np.ndarray:
    blend = saturation * np.eye(3) + (1 - saturation) * np.tile(LUMA, (3, 1))
    return np.hstack([brightness * blend, np.zeros((3, 1))])


MATRICES = {
    "brightness": matrix_of(brightness=1.37),
    "dark": matrix_of(brightness=0.21),
    "saturation": matrix_of(saturation=1.8),
    "pale": matrix_of(saturation=0.2),
    "both": matrix_of(1.8, 1.8),
    "swap": np.array([[0.0, 0, 1, 5], [1, 0, 0, -7], [0, 1, 0, 0.4]]),
    "negative": np.array([[-1.0, 0, 0, 255], [0, -1, 0, 255], [0, 0, -1, 255]]),
    "large": np.array([[9.0, -8, 0.5, 3], [-20, 30, -9, 1], [1e6, -1e6, 0.3, 0]]),
    "constant": np.array([[0.0, 0, 0, 12], [0, 0, 0, 300], [0, 0, 0, -1e6]]),
}


@pytest.mark.parametrize("name", MATRICES)
@pytest.mark.parametrize("size", SIZES)
def test_matrix(name: str, size: tuple[int, int], variant: str) -> None:
    image, matrix = photo(*size), MATRICES[name]
    got = apply(image, [Op.MATRIX, *matrix.ravel()], None, variant)
    exact = np.clip(image @ matrix[:, :3].T + matrix[:, 3], 0, 255)
    assert levels(got, exact)[0] <= 0.6


@pytest.mark.parametrize("factor", [0.0, 0.2, 1.0, 1.8, 3.7, 50.0, -0.5])
@pytest.mark.parametrize("size", SIZES)
def test_contrast(factor: float, size: tuple[int, int], variant: str) -> None:
    image = photo(*size)
    mean = np.floor((image @ np.array(LUMA)).mean() + 0.5)
    exact = np.clip(image * factor + (1 - factor) * mean, 0, 255)
    got = apply(image, [Op.CONTRAST, factor], None, variant)
    assert levels(got, exact)[0] <= 0.6


def test_contrast_of_a_bright_image_too_large_for_sums_of_32_bits(variant: str) -> None:
    """69 megapixels; the rows of the input are one row in memory, and the output is 4 pixels."""
    side = 8320
    row = np.random.default_rng(0).integers(250, 256, (1, side, 3), dtype=np.uint8)
    image = np.broadcast_to(row, (side, side, 3))
    mean = np.floor((row.astype(np.float64) @ np.array(LUMA)).mean() + 0.5)
    exact = np.clip(row[:, :4] * 1.5 - 0.5 * mean, 0, 255)
    program = [Op.CONTRAST, 1.5, Op.CROP_RESIZE, 0, side - 1, 4, 1, 1, 4, Filter.BILINEAR]
    assert levels(apply(image, program, (1, 4), variant), exact)[0] <= 0.6


def test_gray(variant: str) -> None:
    image = photo(64, 65)
    exact = np.repeat((image @ np.array(LUMA))[..., None], 3, 2)
    assert levels(apply(image, [Op.GRAY], None, variant), exact)[0] <= 0.55


def every_color() -> np.ndarray:
    """All corners, edges and grays of the color cube, and 4,000 others."""
    steps = np.array([0, 1, 2, 60, 127, 128, 200, 254, 255])
    grid = np.stack(np.meshgrid(steps, steps, steps), -1).reshape(-1, 3)
    others = np.random.default_rng(1).integers(0, 256, (4000, 3))
    return np.vstack([grid, others])[None].astype(np.uint8)


@pytest.mark.parametrize("turn", [0.0, 0.1, -0.1, 1 / 3, 0.5, -0.5, 0.017, 0.99, -3.25])
def test_hue_is_a_rotation_in_hsv(turn: float, variant: str) -> None:
    colors = every_color()
    exact = [
        colorsys.hsv_to_rgb((h + turn) % 1, s, v)
        for h, s, v in (colorsys.rgb_to_hsv(*color) for color in colors[0] / 255)
    ]
    got = apply(colors, [Op.HUE, turn], None, variant)
    assert levels(got, 255 * np.array([exact]))[0] <= 0.7


@pytest.mark.parametrize("turn", [0.08, -0.08, 0.3])
def test_hue_is_torchvisions(turn: float, variant: str) -> None:
    image = photo(97, 120)
    theirs = np.asarray(tv.adjust_hue(Image.fromarray(image), turn))
    assert levels(apply(image, [Op.HUE, turn], None, variant), theirs)[1] < 1.5


@pytest.mark.parametrize("sigma", [0.1, 0.31, 0.5, 1.0, 2.0, 5.0, 40.0])
@pytest.mark.parametrize("size", SIZES)
def test_blur(sigma: float, size: tuple[int, int], variant: str) -> None:
    image = photo(*size)
    radius = max(1, math.ceil(3 * sigma))
    weights = np.exp(-0.5 * (np.arange(-radius, radius + 1) / sigma) ** 2)
    weights /= weights.sum()
    exact = image.astype(float)
    for axis in (0, 1):
        margins = [(radius, radius) if i == axis else (0, 0) for i in range(3)]
        padded = np.pad(exact, margins, mode="reflect")
        exact = sum(
            weight * np.take(padded, range(i, i + size[axis]), axis)
            for i, weight in enumerate(weights)
        )
    assert levels(apply(image, [Op.BLUR, sigma], None, variant), exact)[0] <= 0.8


@pytest.mark.parametrize("threshold", [-5.0, 0, 1, 127.5, 128, 255, 256, 1e9])
def test_solarize(threshold: float, variant: str) -> None:
    image = photo(33, 64)
    expected = np.where(image >= threshold, 255 - image, image)
    assert np.array_equal(apply(image, [Op.SOLARIZE, threshold], None, variant), expected)


EVERYTHING: list[list[float]] = [
    [Op.CROP_RESIZE, 3, 5, 80, 70, 64, 48, Filter.BILINEAR],
    [Op.HFLIP],
    [Op.CONTRAST, 1.5],
    [Op.HUE, 0.1],
    [Op.MATRIX, *matrix_of(brightness=0.8).ravel()],
    [Op.CONTRAST, 0.7],
    [Op.MATRIX, *matrix_of(saturation=1.6).ravel()],
    [Op.BLUR, 1.3],
    [Op.SOLARIZE, 128],
    [Op.GRAY],
    [Op.CROP_RESIZE, 1, 2, 40, 60, 32, 50, Filter.BICUBIC],
]


def test_a_program_is_its_operations_in_turn(variant: str) -> None:
    image = photo(90, 100)
    together = apply(image, [number for part in EVERYTHING for number in part], (32, 50), variant)
    apart = image
    for part in EVERYTHING:
        size = (int(part[5]), int(part[6])) if part[0] == Op.CROP_RESIZE else None
        apart = apply(apart, part, size, variant)
    most, mean = levels(together, apart)
    assert most <= 1 and mean < 0.01  # a flip may be done after the crop, with weights mirrored


@pytest.mark.parametrize("color", [[], [Op.MATRIX, *matrix_of(saturation=2.0).ravel()]])
def test_what_is_gray_is_blurred_alike(color: list[float], variant: str) -> None:
    tint = [Op.MATRIX, *np.hstack([np.diag([1.0, 0.5, 1.2]), [[0], [20], [0]]]).ravel()]
    steps = [[Op.GRAY], [Op.HUE, 0.3], [Op.CONTRAST, 1.4], color or tint, [Op.BLUR, 1.2]]
    for parts in (steps, [*steps[:3], *steps[4:]]):
        together = apply(photo(50, 70), [n for part in parts for n in part], None, variant)
        apart = photo(50, 70)
        for part in parts:
            apart = apply(apart, part, None, variant)
        assert np.array_equal(together, apart)


@pytest.mark.parametrize("size", [(90, 100), (224, 224), (32, 32)])
def test_variants_agree(size: tuple[int, int]) -> None:
    image = photo(*size)
    program = [n for part in EVERYTHING[1:-1] for n in part]
    first, *others = [apply(image, program, None, name) for name in kernel.variants()]
    assert all(np.array_equal(first, other) for other in others)


def test_torchvisions_jitter(variant: str) -> None:
    image = photo(120, 110)
    theirs = Image.fromarray(image)
    theirs = tv.adjust_contrast(tv.adjust_brightness(theirs, 1.3), 0.6)
    theirs = tv.adjust_hue(tv.adjust_saturation(theirs, 1.5), -0.07)
    program = [
        *(Op.MATRIX, *matrix_of(brightness=1.3).ravel(), Op.CONTRAST, 0.6),
        *(Op.MATRIX, *matrix_of(saturation=1.5).ravel(), Op.HUE, -0.07),
    ]
    assert levels(apply(image, program, None, variant), np.asarray(theirs))[1] < 1.5


def test_array_and_list_programs_agree_and_out_may_be_the_image() -> None:
    image = photo(40, 50)
    program = [Op.BLUR, 1.0, Op.HFLIP, Op.HUE, 0.2]
    expected = apply(image, program)
    assert np.array_equal(apply(image, np.array(program, float)), expected)
    kernel.run(image, tuple(program), image)
    assert np.array_equal(image, expected)


def test_nothing_is_written_beside_out(variant: str) -> None:
    for width in (1, 5, 31, 33, 64):
        around = np.full((9, width, 3), 5, np.uint8)
        program = [Op.CROP_RESIZE, 0, 0, 40, 30, 7, width, Filter.BILINEAR, Op.HFLIP, Op.BLUR, 2]
        kernel._augment.run(photo(30, 40), program, around[1:8], variant)
        assert (around[[0, 8]] == 5).all()


def test_threads() -> None:
    images = [photo(100 + 10 * i, 120, seed=i) for i in range(4)]
    program = [
        *(Op.CROP_RESIZE, 0, 0, 120, 100, 64, 64, Filter.BILINEAR),
        *(Op.CONTRAST, 1.4, Op.HUE, 0.1, Op.BLUR, 1.5),
    ]
    expected = [apply(image, program, (64, 64)) for image in images]
    wrong: list[int] = []

    def work(start: int) -> None:
        for i in range(200):
            which = (start + i) % 4
            if not np.array_equal(apply(images[which], program, (64, 64)), expected[which]):
                wrong.append(which)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_forked_workers() -> None:
    image, program = photo(60, 60), [Op.BLUR, 1.5, Op.HUE, 0.2]
    expected = apply(image, program)  # leaves memory behind for the next call, here and there
    context = multiprocessing.get_context("fork")
    with context.Pool(2) as pool:
        results = pool.starmap_async(apply, [(image, program)] * 8).get(timeout=60)  # may hang
    assert all(np.array_equal(result, expected) for result in results)
    assert np.array_equal(apply(image, program), expected)
