"""data.cache=ram and disk: the same samples from pictures that were decoded once."""

from __future__ import annotations

import io
import math
import os
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import tiny
from selftask.config.schema import Component, DataConfig
from selftask.data.cache.decoded import Decoded
from selftask.data.cache.fill import decode_once
from selftask.data.loading.bad_files import BadFiles
from selftask.data.loading.dataset import EvalDataset
from selftask.data.open_source import open_source
from selftask.data.source import Source, Wrapped
from selftask.data.sources.files import Folder
from selftask.errors import BadImage, UserError


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Seven pictures of different sizes in two folders; the last is none."""
    monkeypatch.setenv("SELFTASK_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "photos"
    rng = np.random.default_rng(0)
    for number in range(6):
        (folder / f"{number % 2}").mkdir(parents=True, exist_ok=True)
        pixels = rng.integers(0, 256, (20 + number, 30 - number, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number % 2}" / f"{number}.png")
    (folder / "1" / "bad.png").write_bytes(b"no picture")
    return folder


def opened(folder: Path) -> Source:
    return open_source(Component(name="folder", args={"path": str(folder)}))


def decoded(source: Source, cache: Any, max_unreadable: float = 1.0, **data: Any) -> Source:
    config = DataConfig(source=Component(name="folder"), cache=cache, **data)
    return decode_once(source, config, BadFiles(None, len(source), max_unreadable=max_unreadable))


def all_of(source: Source) -> list[Any]:
    results: list[Any] = []
    for index in range(len(source)):
        try:
            image, label = source[index]
        except BadImage as error:
            results.append((error.path, error.reason))
        else:
            results.append((image.shape, image.tobytes(), label))
    return results


@pytest.mark.parametrize("cache", ["ram", "disk"])
def test_classes_without_an_image_in_the_subset_still_count(photos: Path, cache: str) -> None:
    class OfTheFirst(Wrapped):
        """The images of class 0."""

        def __init__(self, source: Source) -> None:
            super().__init__(source)
            self.labels = source.labels[:3]

        def __len__(self) -> int:
            return 3

    part = OfTheFirst(opened(photos))
    assert part.labels.tolist() == [0, 0, 0]
    assert decoded(part, cache).num_classes == 2


@pytest.mark.parametrize("cache", ["ram", "disk"])
def test_the_same_pictures_labels_and_bad_files(photos: Path, cache: str) -> None:
    source = opened(photos)
    kept = decoded(source, cache)
    expected = all_of(source)
    assert len(expected) == 7
    assert sum(len(one) == 2 for one in expected) == 1  # the bad one
    assert all_of(kept) == expected
    assert kept.path(3) == source.path(3)
    assert kept.num_classes == source.num_classes


@pytest.mark.parametrize("cache", ["ram", "disk"])
def test_files_are_not_read_again(photos: Path, cache: str) -> None:
    source = opened(photos)
    expected = all_of(source)
    kept = decoded(source, cache)
    for file in photos.rglob("*.png"):
        file.unlink()
    assert all_of(kept) == expected


def test_the_next_run_finds_the_file(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = all_of(decoded(opened(photos), "disk"))
    monkeypatch.setattr("selftask.data.cache.fill.EvalBatches", None)  # nothing is read
    assert all_of(decoded(opened(photos), "disk")) == expected


def test_images_that_the_storage_did_not_give_are_read_again(
    photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = all_of(opened(photos))
    read = Folder.__getitem__

    def fails(self: Any, index: int) -> Any:
        if index == 2:
            raise BadImage(self.path(index), "no answer", storage_failed=True)
        return read(self, index)

    with monkeypatch.context() as context:
        context.setattr(Folder, "__getitem__", fails)
        first = all_of(decoded(opened(photos), "disk"))
        assert first[2][1] == "no answer"
        assert first[:2] + first[3:] == expected[:2] + expected[3:]
    assert all_of(decoded(opened(photos), "disk")) == expected


def test_a_changed_file_is_noticed(photos: Path) -> None:
    before = all_of(decoded(opened(photos), "disk"))
    Image.new("RGB", (9, 9), "red").save(photos / "0" / "2.png")
    after = decoded(opened(photos), "disk")
    assert all_of(after) == all_of(opened(photos)) != before


@pytest.mark.parametrize("name", ["webdataset", "concat"])
def test_one_changed_image_in_a_tar_is_noticed(name: str, photos: Path) -> None:
    path = photos.parent / "shard.tar"

    def reopened(changed: int) -> Source:
        with tarfile.open(path, "w") as tar:
            for number in range(20):
                file = io.BytesIO()
                Image.new("RGB", (8, 8), (number, int(number == changed), 0)).save(file, "PNG")
                member = tarfile.TarInfo(f"{number}.png")
                member.size = len(file.getvalue())
                file.seek(0)
                tar.addfile(member, file)
        os.utime(path, ns=(changed * 10**9,) * 2)
        shards = {"name": "webdataset", "path": str(path)}
        if name == "concat":
            shards = {"name": name, "sources": [shards], "subset": 20}
        kind = shards.pop("name")
        return decoded(open_source(Component(name=kind, args=shards)), "disk")

    for changed in (1, 2, 3):
        values = [image[0, 0, 1] for image, _ in map(reopened(changed).__getitem__, range(20))]
        assert values == [int(number == changed) for number in range(20)]


def test_changed_labels_and_boxes_are_noticed(photos: Path) -> None:
    """All rows but the few whose pixels are looked at may have changed."""

    def table(label: int, right: int) -> Source:
        rows = [f"0/0.png,{i % 2},0,0,9,9" for i in range(20)]
        rows[1] = f"0/0.png,{label},0,0,{right},9"
        (photos / "x.csv").write_text("\n".join(["path,label,l,t,r,b", *rows]))
        args = {"path": str(photos / "x.csv"), "box": ["l", "t", "r", "b"]}
        return open_source(Component(name="table", args=args))

    for label, right in ((1, 9), (0, 9), (0, 5)):
        image, number = decoded(table(label, right), "disk")[1]
        assert (image.shape, number) == ((9, right, 3), label)


def test_shrunk_pictures_are_kept_apart(photos: Path) -> None:
    whole, small = (decoded(opened(photos), "disk", max_side=side) for side in (None, 15))
    assert whole[0][0].shape == (20, 30, 3)
    assert small[0][0].shape == (10, 15, 3)


def test_what_is_read_can_be_written_to_by_its_reader_alone(photos: Path) -> None:
    """torch warns of arrays that it may not write to."""
    kept = decoded(opened(photos), "disk")
    picture = kept[0][0]
    assert picture.flags.c_contiguous
    picture[:] = 7
    assert not (decoded(opened(photos), "disk")[0][0] == 7).all()


def test_too_many_bad_files(photos: Path) -> None:
    with pytest.raises(UserError, match="1 of 7 images"):
        decoded(opened(photos), "disk", max_unreadable=0.1)
    assert not list((photos.parent / "cache").rglob("*.pixels"))
    assert not list((photos.parent / "cache").rglob(".*.tmp"))


@pytest.mark.parametrize("cache", ["ram", "disk"])
def test_too_little_space(photos: Path, cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("selftask.data.cache.fill.free_bytes", lambda device: 1000)
    monkeypatch.setattr("selftask.data.cache.fill._SHARE", 0.9 if cache == "ram" else -1.0)
    with pytest.raises(UserError, match=rf"data.cache={cache}: 7 decoded images would take about"):
        decoded(opened(photos), cache)


def cached_files(photos: Path) -> tuple[Path, Path]:
    """Pixels and table of ``data.cache=disk``."""
    (pixels,) = (photos.parent / "cache").rglob("*.pixels")
    return pixels, pixels.with_suffix(".table")


@pytest.mark.parametrize("which", ["pixels", "table"])
@pytest.mark.parametrize("left", [0.0, 0.5])
def test_a_truncated_file_is_made_anew(photos: Path, which: str, left: float) -> None:
    expected = all_of(decoded(opened(photos), "disk"))
    path = cached_files(photos)[which == "table"]
    content = path.read_bytes()
    path.write_bytes(content[: int(left * len(content))])
    assert all_of(decoded(opened(photos), "disk")) == expected
    assert path.stat().st_size == len(content)


def test_zeros_in_the_place_of_images_are_noticed(photos: Path) -> None:
    """As a crash of the machine leaves them, or another program; then the file is made again."""
    source = opened(photos)
    expected = all_of(source)
    decoded(source, "disk")
    pixels, _ = cached_files(photos)
    content = bytearray(pixels.read_bytes())
    shape = source[2][0].shape
    start = sum(source[index][0].nbytes for index in range(2))
    content[start : start + math.prod(shape)] = bytes(math.prod(shape))
    pixels.write_bytes(content)
    kept = decoded(source, "disk")
    assert kept[1][0].tobytes() == source[1][0].tobytes()
    with pytest.raises(UserError, match=r"\.pixels has changed .*same command makes it again"):
        kept[2]
    assert all_of(decoded(source, "disk")) == expected


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="Linux only")
def test_memory_is_not_taken_from_dev_shm(photos: Path) -> None:
    """Docker gives it 64 MB, whatever the memory."""
    kept = decoded(opened(photos), "ram")
    maps = Path("/proc/self/maps").read_text()
    assert len(kept) == 7
    assert "/memfd:selftask-decoded" in maps


@pytest.mark.parametrize("max_side", [None, 16])
def test_evaluations_read_decoded_images_of_full_size(
    tmp_path: Path, max_side: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    side = f"data.max_side={max_side or 'null'}"
    task = tiny.task("simclr", tmp_path, "run", side, "data.cache=ram")
    task.prepare()
    before = [batch.input for batch in task.data_module.labeled_samples()]
    next(task.data_module.train_batches(0))
    sources: list[Source] = []

    def dataset(source: Source, *more: Any) -> EvalDataset:
        sources.append(source)
        return EvalDataset(source, *more)

    monkeypatch.setattr("selftask.data.data_module.EvalDataset", dataset)
    after = [batch.input for batch in task.data_module.labeled_samples()]
    task.close()
    assert isinstance(sources[0], Decoded) == (max_side is None)
    assert all(map(torch.equal, before, after))
