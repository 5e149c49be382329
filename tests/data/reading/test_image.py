"""Any file becomes upright 8-bit RGB, or BadImage."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from selftask.data.reading.files import POLICY
from selftask.data.reading.image import (
    as_pixels,
    check_header,
    decode_image,
    from_array,
    read_image,
    to_rgb,
)
from selftask.errors import BadImage

ODD_IMAGES = Path(__file__).parents[4] / "shared" / "data" / "odd_images"


@pytest.fixture
def rgb() -> Image.Image:
    """A 12x8 RGB image without any symmetry."""
    ramp = np.arange(8 * 12 * 3, dtype=np.uint8).reshape(8, 12, 3)
    return Image.fromarray(ramp)


def test_orientation_is_undone(rgb: Image.Image, tmp_path: Path) -> None:
    pixels = np.asarray(rgb)
    stored = {  # what a camera would store for each orientation, so that upright is `pixels`
        1: pixels,
        2: pixels[:, ::-1],
        3: pixels[::-1, ::-1],
        4: pixels[::-1],
        5: pixels.transpose(1, 0, 2),
        6: np.rot90(pixels, 1),
        7: pixels[::-1, ::-1].transpose(1, 0, 2),
        8: np.rot90(pixels, -1),
    }
    for orientation, array in stored.items():
        exif = Image.Exif()
        exif[0x0112] = orientation
        path = tmp_path / f"{orientation}.png"
        turned = Image.fromarray(np.ascontiguousarray(array))
        turned.save(path, exif=exif)
        assert np.array_equal(read_image(str(path)), pixels), orientation
        large = turned.resize((16 * turned.width, 16 * turned.height), Image.Resampling.NEAREST)
        large.save(tmp_path / "turned.jpg", exif=exif, quality=95, subsampling=0)
        upright = read_image(str(tmp_path / "turned.jpg"))
        assert upright.flags.c_contiguous
        assert np.abs(upright[8::16, 8::16].astype(int) - pixels).max() <= 6, orientation


def test_orientation_behind_long_blocks_is_undone(rgb: Image.Image) -> None:
    """Photoshop's block, which ImageMagick writes first, and those of XMP can be long."""
    file, exif = io.BytesIO(), Image.Exif()
    exif[0x0112] = 6
    rgb.save(file, "JPEG", exif=exif, quality=95, subsampling=0)
    data = file.getvalue()
    block = b"\xff\xed" + (50_002).to_bytes(2, "big") + bytes(50_000)
    expected = decode_image(data, "turned.jpg")
    assert expected.shape == (12, 8, 3)
    assert np.array_equal(decode_image(data[:2] + 2 * block + data[2:], "long.jpg"), expected)


def test_orientation_is_that_of_xmp_and_of_opened_images_too(rgb: Image.Image) -> None:
    """Some editors write no EXIF; items of data sets are often opened images."""
    file, exif = io.BytesIO(), Image.Exif()
    xmp = b'<x:xmpmeta><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'
    rgb.save(file, "JPEG", xmp=xmp, quality=95, subsampling=0)
    with Image.open(file) as opened:
        expected = np.rot90(np.asarray(opened), -1)
        assert np.array_equal(as_pixels(opened), expected)
    assert np.array_equal(decode_image(file.getvalue(), "xmp.jpg"), expected)
    exif[0x0112] = 6
    rgb.save(file := io.BytesIO(), "PNG", exif=exif)
    assert np.array_equal(as_pixels(Image.open(file)), np.rot90(np.asarray(rgb), -1))


def test_16_bit_is_scaled_not_clipped(tmp_path: Path) -> None:
    deep = np.array([[0, 257, 400, 32896, 65535]], dtype=np.uint16)
    for suffix in ("png", "tif", "pgm"):
        path = tmp_path / f"deep.{suffix}"
        Image.fromarray(deep).save(path)
        image = read_image(str(path))
        assert image.shape == (1, 5, 3)
        assert image[0, :, 0].tolist() == [0, 1, 2, 128, 255], suffix


@pytest.mark.parametrize(
    "mode", ["1", "L", "P", "LA", "RGBA", "CMYK", "YCbCr", "HSV", "I", "F", "La", "RGBa"]
)
def test_every_mode_becomes_rgb(mode: str, rgb: Image.Image) -> None:
    through = {"La": "LA", "RGBa": "RGBA", "HSV": "RGB"}.get(mode)
    image = (rgb.convert(through) if through else rgb).convert(mode)
    assert to_rgb(image).shape == (8, 12, 3)
    assert to_rgb(image).dtype == np.uint8


def test_gray_modes_keep_their_values(rgb: Image.Image) -> None:
    gray = rgb.convert("L")
    for mode in ("LA", "F"):
        assert np.array_equal(to_rgb(gray.convert(mode))[..., 1], np.asarray(gray))
    shares = Image.fromarray(np.asarray(gray, dtype=np.float32) / np.float32(np.max(gray)))
    expected = np.rint(np.asarray(gray) * (255 / np.max(gray)))
    assert np.abs(to_rgb(shares)[..., 1] - expected).max() <= 1, "floats of at most 1"
    for mode, through in (("La", "LA"), ("RGBa", "RGBA")):  # premultiplied by alpha
        opaque = rgb.convert(through)
        opaque.putalpha(128)
        colors = np.asarray(opaque.convert("RGB")).astype(int)
        assert np.abs(to_rgb(opaque.convert(mode)) - colors).max() <= 2, mode


def test_palette_with_transparency(tmp_path: Path) -> None:
    image = Image.new("P", (2, 1))
    image.putpalette([255, 0, 0, 0, 0, 255])
    image.putdata([0, 1])
    image.save(tmp_path / "p.png", transparency=bytes([0, 128]))
    assert read_image(str(tmp_path / "p.png")).tolist() == [[[255, 0, 0], [0, 0, 255]]]


@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("options", [{}, {"subsampling": 0}, {"progressive": True}])
def test_jpegs_are_decoded_as_pillow_does(mode: str, options: Any, tmp_path: Path) -> None:
    y, x = np.mgrid[0:45, 0:61]
    waves = np.stack([np.sin(x / 7 + c) * np.cos(y / (5 + c)) for c in range(3)], -1)
    image = Image.fromarray((waves * 127 + 128).astype(np.uint8)).convert(mode)
    image.save(tmp_path / "x.jpg", **options)
    with Image.open(tmp_path / "x.jpg") as opened:
        expected = np.asarray(opened.convert("RGB"))
    assert np.array_equal(read_image(str(tmp_path / "x.jpg")), expected)


def test_cmyk_jpeg(tmp_path: Path) -> None:
    Image.new("CMYK", (16, 16), (0, 255, 255, 0)).save(tmp_path / "red.jpg", quality=95)
    red = read_image(str(tmp_path / "red.jpg"))[8, 8].astype(int)
    assert np.abs(red - [255, 0, 0]).max() <= 4


def test_first_frame_of_an_animation(tmp_path: Path) -> None:
    frames = [Image.new("RGB", (4, 4), color) for color in ("red", "lime")]
    frames[0].save(tmp_path / "a.gif", save_all=True, append_images=frames[1:])
    assert read_image(str(tmp_path / "a.gif"))[0, 0].tolist() == [255, 0, 0]


def test_content_decides_not_the_name(rgb: Image.Image, tmp_path: Path) -> None:
    rgb.save(tmp_path / "x.jpg", format="PNG")
    assert np.array_equal(read_image(str(tmp_path / "x.jpg")), np.asarray(rgb))


def test_truncated_and_foreign_files_are_bad(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(noise).save(buffer, format="JPEG")
    contents = {"cut.jpg": buffer.getvalue()[:-2000], "text.jpg": b"no image", "empty.jpg": b""}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(BadImage) as caught:
            read_image(str(tmp_path / name))
        assert caught.value.path == str(tmp_path / name)
        assert caught.value.reason
        assert "\n" not in caught.value.reason
    with pytest.raises(BadImage, match="no such file"):
        read_image(str(tmp_path / "gone.jpg"))
    assert check_header(str(tmp_path / "cut.jpg")) is None  # a header is all it looks at
    assert check_header(str(tmp_path / "text.jpg")) is not None


def test_bombs_are_refused_before_decoding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Image.new("1", (5000, 5000)).save(tmp_path / "bomb.png")
    monkeypatch.setattr(POLICY, "max_pixels", 25_000_000)
    assert check_header(str(tmp_path / "bomb.png")) is None
    monkeypatch.setattr(POLICY, "max_pixels", 24_999_999)
    assert check_header(str(tmp_path / "bomb.png")) is not None
    with pytest.raises(BadImage, match=r"5000x5000 pixels.*max_pixels=24999999"):
        read_image(str(tmp_path / "bomb.png"))


def test_pillows_own_limit_is_as_before(tmp_path: Path) -> None:
    before = Image.MAX_IMAGE_PIXELS
    check_header(str(tmp_path / "gone.png"))
    assert before == Image.MAX_IMAGE_PIXELS


def test_arrays_of_any_layout() -> None:
    channels_last = np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    assert np.array_equal((from_array(channels_last)), channels_last)
    assert np.array_equal((from_array(channels_last.transpose(2, 0, 1))), channels_last)
    assert np.array_equal((from_array(channels_last / 255.0)), channels_last)
    assert np.array_equal((from_array(channels_last.astype(np.uint16) * 257)), channels_last)
    assert np.array_equal(from_array(channels_last.astype(np.int64)), channels_last)
    assert np.array_equal(from_array(channels_last.astype(np.int32) * 257), channels_last)
    five = np.arange(100, dtype=np.uint8).reshape(5, 4, 5)  # as many rows as channels
    assert np.array_equal(from_array(five, 5), five)
    four = np.concatenate([channels_last, channels_last[..., :1]], axis=2)
    assert np.array_equal(from_array(four.transpose(2, 0, 1)), channels_last)
    odd = np.array([[np.nan, np.inf, -np.inf, 0.5, 1.0]])
    assert from_array(odd)[0, :, 0].tolist() == [0, 0, 0, 128, 255]
    assert from_array(np.array([[-1.0, 0.0, 1.0]]))[0, :, 0].tolist() == [0, 128, 255]
    assert from_array(np.array([[-10, 41, 245]]))[0, :, 0].tolist() == [0, 51, 255]
    dark = channels_last.astype(np.uint16)  # 16 bits stay 16 bits, whatever is in them
    assert from_array(dark).max() <= 1
    gray = channels_last[..., :1]
    assert np.array_equal((from_array(gray)), gray.repeat(3, axis=2))
    with pytest.raises(ValueError, match=r"\(5, 7, 6\)"):
        from_array(np.zeros((5, 7, 6)))
    with pytest.raises(ValueError, match=r"\(0, 7, 3\) has no pixels"):
        from_array(np.zeros((0, 7, 3), dtype=np.uint8))


def test_torch_tensors_are_images_too() -> None:
    torch = pytest.importorskip("torch")
    pixels = torch.arange(60, dtype=torch.uint8).reshape(3, 4, 5)
    expected = pixels.permute(1, 2, 0).numpy()
    assert np.array_equal(np.asarray(as_pixels(pixels)), expected)
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        numbers = pixels.to(dtype).requires_grad_()
        assert np.array_equal(np.asarray(as_pixels(numbers)), expected)


@pytest.mark.skipif(not ODD_IMAGES.is_dir(), reason="shared test images are not here")
def test_odd_images() -> None:
    for entry in json.loads((ODD_IMAGES / "manifest.json").read_text()):
        path = str(ODD_IMAGES / entry["file"])
        if entry.get("fresh_open_convert_RGB") == "ok":
            assert read_image(path).shape[2] == 3
        else:
            with pytest.raises(BadImage):
                read_image(path)


def progressive(num_scans: int) -> bytes:
    """A progressive JPEG whose last scan is repeated; what is behind its end is no scan."""
    buffer = io.BytesIO()
    Image.new("RGB", (64, 48), (9, 99, 200)).save(buffer, "JPEG", progressive=True)
    content = buffer.getvalue()
    last, end = content.rindex(b"\xff\xda"), content.rindex(b"\xff\xd9")
    more = content[last:end] * (num_scans - content.count(b"\xff\xda"))
    return content[:end] + more + content[end:] + b"\0\2" + b"\xff\xda\0\2" * 200


@pytest.mark.parametrize("comment", [b"", b"\xff\xda\xff\xd9" * 200])
def test_a_jpeg_of_too_many_scans_is_refused_before_it_is_decoded(comment: bytes) -> None:
    segment = b"\xff\xfe" + (len(comment) + 2).to_bytes(2, "big") + comment
    for number in (100, 101):
        content = progressive(number)
        content = content[:2] + segment + content[2:]
        if number == 100:
            assert decode_image(content, "x").shape == (48, 64, 3)
        else:
            with pytest.raises(BadImage, match=r"^x: 101 scans, more than data\.max_scans=100"):
                decode_image(content, "x")
