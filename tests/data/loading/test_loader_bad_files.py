"""Images that cannot be read, and views that make no batch: replaced, listed, explained."""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numbered import CROP, Numbers, assert_same, dataset, read
from PIL import Image

from selftask.config.schema import Component, ViewConfig
from selftask.data.loading.bad_files import BadFiles
from selftask.data.loading.dataset import EvalDataset, ViewDataset, replacement
from selftask.data.loading.dataset import read as read_one
from selftask.data.loading.loader import Batches, EvalBatches
from selftask.data.open_source import open_source
from selftask.data.sources.dataset_objects import DatasetSource
from selftask.data.transforms.pipeline import Compose
from selftask.data.views import Views
from selftask.errors import BadImage, UserError
from selftask.registry import TRANSFORMS

ODD_IMAGES = Path(__file__).parents[4] / "shared" / "data" / "odd_images"


@pytest.mark.parametrize("workers", [0, 2])
def test_bad_files_are_replaced_listed_once_and_read_back(tmp_path: Path, workers: int) -> None:
    data = dataset(Numbers(60, bad=(3, 10, 44)))
    listed = tmp_path / "out" / "bad_files.txt"

    def batches() -> Batches:
        bad_files = BadFiles(listed, 60, max_unreadable=0.05)
        return Batches(data, batch_size=20, seed=0, num_workers=workers, bad_files=bad_files)

    samples = read(batches(), 6)
    lines = sorted(listed.read_text().splitlines())
    assert lines == ["images/10\tbroken", "images/3\tbroken", "images/44\tbroken"]
    for sample in samples:
        assert len(sample.index) == 20
        assert not set(sample.index.tolist()) & {3, 10, 44}
        shown = (sample.all_views[0][:, 0, 0, 0] * 255).round().long()
        assert torch.equal(shown, sample.index)  # the index is that of the image shown
    assert_same(read(batches(), 3, start=3), samples[3:])
    assert sorted(listed.read_text().splitlines()) == lines


def test_replacements_are_their_own_draws() -> None:
    data = dataset(Numbers(60, bad=(3,)))
    sample = data[0, 3]
    again = data[0, 3]
    assert sample.index == again.index != 3
    assert sample.index != data[1, 3].index or sample.index != data[2, 3].index
    assert [error.path for error in sample.bad] == ["images/3"]
    for place in range(4):  # seed, epoch, index, attempt
        numbers = [[value if i == place else 1 for i in range(4)] for value in range(20)]
        assert len({replacement(*each, 1000) for each in numbers}) > 15, "others for each"


def test_a_batch_with_one_sample_too_few_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("selftask.data.loading.dataset.MAX_REPLACEMENTS", 0)
    with pytest.raises(UserError, match=r"no readable image was found.*images/3: broken"):
        read(Batches(dataset(Numbers(10, bad=(3,))), batch_size=10, seed=0), 1)


class Ramps(Numbers):
    """The same image, without any symmetry, at each index."""

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        _, label = super().__getitem__(index)
        return np.arange(243, dtype=np.uint8).reshape(9, 9, 3), label


def test_a_replacement_has_the_draws_of_the_image_it_replaces() -> None:
    data = dataset(Ramps(60, bad=(3,)), seed=5)
    sample = data[4, 3]
    assert sample.index != 3
    expected = data.views(data.source[0][0], 5, 4, 3)
    assert np.array_equal(sample.views, expected)
    assert not np.array_equal(data[4, sample.index].views, expected)


def test_random_evaluation_views_depend_on_seed_and_image_only() -> None:
    pipeline = Compose([TRANSFORMS[CROP.name](**CROP.args)])

    def view(seed: int, epoch: int, index: int) -> list[int]:
        (made,) = EvalDataset(Ramps(9), pipeline, seed)[epoch, index].views  # type: ignore[arg-type]
        return made.ravel().tolist()

    assert view(0, 0, 1) == view(0, 7, 1)
    assert view(0, 0, 1) != view(1, 0, 1)
    assert view(0, 0, 1) != view(0, 0, 2)


def test_a_damaged_image_between_two_failures_of_the_disk_shows_that_it_answers() -> None:
    failed, damaged = (BadImage("x", "why", storage_failed=storage) for storage in (True, False))
    errors = iter([*[failed] * 4, damaged, *[failed] * 5])

    class Failing(Numbers):
        def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
            raise next(errors)

    source: Any = Failing(1)
    for _ in range(9):
        with pytest.raises(BadImage):
            read_one(source, 0)
    with pytest.raises(UserError, match="the last 5 reads failed"):
        read_one(source, 0)


def test_too_many_bad_files_stop_the_run(tmp_path: Path) -> None:
    bad_files = BadFiles(tmp_path / "bad_files.txt", 60, max_unreadable=0.04)
    batches = Batches(
        dataset(Numbers(60, bad=(3, 10, 44))), batch_size=20, seed=0, bad_files=bad_files
    )
    with pytest.raises(UserError) as caught:
        read(batches, 3)
    message = str(caught.value)
    assert message.startswith(
        "3 of 60 images (5.00%) cannot be read, more than data.max_unreadable=0.04"
    )
    assert "images/3: broken" in message
    assert str(tmp_path / "bad_files.txt") in message


@pytest.mark.parametrize(
    ("num_images", "max_unreadable", "allowed"),
    [(10, None, 3), (3000, None, 3), (5000, None, 5), (64, 0.001, 0), (1000, 0.001, 1), (9, 0, 0)],
)
def test_how_many_may_be_unreadable(
    num_images: int, max_unreadable: float | None, allowed: int
) -> None:
    bad = [BadImage(f"{number}.jpg", "broken") for number in range(allowed + 1)]
    BadFiles(None, num_images, max_unreadable=max_unreadable).add(bad[:-1])
    with pytest.raises(UserError, match=rf"{allowed + 1} of {num_images} images"):
        BadFiles(None, num_images, max_unreadable=max_unreadable).add(bad)


def test_the_message_of_too_many_is_one_line_that_ends_with_the_list(tmp_path: Path) -> None:
    """The last line of a run shows the first line of its error, and nothing else."""
    bad_files = BadFiles(tmp_path / "bad_files.txt", 100)
    with pytest.raises(UserError) as caught:
        bad_files.add(BadImage(f"{number}.jpg", "broken") for number in range(5))
    (line,) = str(caught.value).splitlines()
    assert "0.jpg: broken, 1.jpg: broken, 2.jpg: broken; all of them: " in line
    assert line.endswith("/bad_files.txt")


@pytest.mark.parametrize("attempts", [1, 2])
def test_fail_names_the_file_in_the_first_line(attempts: int, tmp_path: Path) -> None:
    """In the next attempt, too, which reads the list."""
    listed = tmp_path / "bad_files.txt"
    if attempts == 2:
        BadFiles(listed, 60, max_unreadable=1.0).add([BadImage("images/3", "broken")])
    bad_files = BadFiles(listed, 60, on_error="fail", max_unreadable=1.0)
    batches = Batches(dataset(Numbers(60, bad=(3,))), batch_size=20, seed=0, bad_files=bad_files)
    with pytest.raises(UserError) as caught:
        read(batches, 3)
    assert "images/3" in str(caught.value).splitlines()[0]


def test_only_bad_files() -> None:
    batches = Batches(
        dataset(Numbers(8, bad=tuple(range(8)))),
        batch_size=4,
        seed=0,
        bad_files=BadFiles(None, 8, max_unreadable=1.0),
    )
    with pytest.raises(UserError, match=r"no readable image.* images/\d: broken, .* and 5 more$"):
        next(batches)


def test_other_ranks_lines_are_not_repeated(tmp_path: Path) -> None:
    path = tmp_path / "bad_files.txt"
    ranks = [BadFiles(path, 10, max_unreadable=1.0) for _ in range(2)]
    for bad_files in (*ranks, BadFiles(path, 10, max_unreadable=1.0)):
        bad_files.add([BadImage("a\tb", "why"), BadImage("c", "why\nnot")])
    assert path.read_text() == "a\\tb\twhy\nc\twhy not\n"


def test_the_images_of_all_ranks_count() -> None:
    """Those of another rank, and those of a pass over images for evaluation."""
    allowed, fails = BadFiles(None, 100, max_unreadable=0.02), BadFiles(None, 100, on_error="fail")
    allowed.add([BadImage("a", "why")])
    allowed.merge({"a": "why", "b": "why"})
    with pytest.raises(UserError, match=r"3 of 100 images .3\.00%. cannot be read"):
        allowed.merge({"c": "why"})
    fails.merge({})
    with pytest.raises(UserError, match="cannot read c: why"):
        fails.merge({"c": "why"})
    data = EvalDataset(Numbers(8, bad=(3,)), Compose([]))  # type: ignore[arg-type]
    batches = EvalBatches(data, batch_size=4)
    assert [batch.index.tolist() for batch in batches] == [[0, 1, 2], [4, 5, 6, 7]]
    assert batches.bad_files.counted == {"images/3": "broken"}


@pytest.mark.parametrize("workers", [0, 1])
def test_views_of_different_sizes_are_explained(tmp_path: Path, workers: int) -> None:
    for size in (4, 5, 6):
        Image.new("RGB", (size, 4)).save(tmp_path / f"{size}.png")
    source = open_source(Component(name="folder", args={"path": str(tmp_path)}))
    data = ViewDataset(source, Views({"main": ViewConfig(transforms=[])}), 0)
    sizes = r"transforms: images of different sizes \(4x4, 5x4, 6x4\) make no batch; add a crop"
    with pytest.raises(UserError, match=rf"views\.main\.{sizes}") as caught:
        read(Batches(data, batch_size=3, seed=0, num_workers=workers), 1)
    assert "Traceback" not in str(caught.value)
    evaluated = EvalDataset(source, Compose([]))
    with pytest.raises(UserError, match=rf"eval\.{sizes}"):
        read(Batches(evaluated, batch_size=3, seed=0, num_workers=workers), 1)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_transform_that_makes_floats_is_explained(workers: int) -> None:
    data = dataset(Numbers(20))
    data.views.made[1].pipeline.transforms.append(lambda image, rng: image / 255)
    expected = r"images/\d+: .*test_loader_bad_files\.py:\d+: .* of float64 \(8, 8, 3\); an array"
    with pytest.raises(UserError, match=expected):
        read(Batches(data, batch_size=4, seed=0, num_workers=workers), 1)


def refusing(error: Exception) -> ViewDataset:
    """Return images whose number 7 cannot be transformed."""

    def refuse(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        if image[0, 0, 0] == 7:
            raise error
        return image

    data = dataset(Numbers(20))
    data.views.made[0].pipeline.transforms.insert(0, refuse)
    return data


@pytest.mark.parametrize("workers", [0, 1])
def test_what_a_user_can_put_right_comes_without_a_traceback(workers: int) -> None:
    data = refusing(UserError("these tiles do not fit"))
    with pytest.raises(UserError) as caught:
        read(Batches(data, batch_size=20, seed=0, num_workers=workers), 1)
    assert str(caught.value) == "images/7: these tiles do not fit"


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have no notes")
@pytest.mark.parametrize("workers", [0, 1])
def test_the_image_a_transform_fails_for_is_named(workers: int) -> None:
    data = refusing(ValueError("no sevens"))
    with pytest.raises(Exception, match="no sevens") as caught:
        read(Batches(data, batch_size=20, seed=0, num_workers=workers), 1)
    assert "The image is images/7." in "".join(traceback.format_exception(caught.value))


@pytest.mark.skipif(not ODD_IMAGES.is_dir(), reason="shared test images are not here")
def test_odd_images_lists_exactly_the_undecodable(tmp_path: Path) -> None:
    source = open_source(Component(name="folder", args={"path": str(ODD_IMAGES)}))
    assert len(source) == 80
    bad_files = BadFiles(tmp_path / "bad_files.txt", len(source), max_unreadable=1.0)
    data = dataset(source)
    read(Batches(data, batch_size=16, seed=0, num_workers=2, bad_files=bad_files), 5)
    manifest = json.loads((ODD_IMAGES / "manifest.json").read_text())
    expected = {
        str(ODD_IMAGES / entry["file"])
        for entry in manifest
        if entry.get("fresh_open_convert_RGB") != "ok"
    }
    lines = (tmp_path / "bad_files.txt").read_text().splitlines()
    assert {line.partition("\t")[0] for line in lines} == expected
    assert len(lines) == len(expected)
    with pytest.raises(
        UserError,
        match=r"of 80 images \(.*%\) cannot be read, more than the default of data\.max_unreadable",
    ):
        read(Batches(data, batch_size=16, seed=0, bad_files=BadFiles(None, 80)), 5)


class Sometimes:
    """A user's data set that skips an item by returning None, as Classy Vision's loaders allow."""

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> tuple[np.ndarray, int] | None:
        return None if index in (3, 44) else (np.full((4, 4, 3), index, np.uint8), index)


def test_samples_that_are_none_are_replaced(tmp_path: Path) -> None:
    listed = tmp_path / "bad_files.txt"
    bad_files = BadFiles(listed, 60, max_unreadable=0.05)
    data = dataset(DatasetSource(Sometimes(), "mine"))
    samples = read(Batches(data, batch_size=20, seed=0, bad_files=bad_files), 3)
    shown = torch.cat([sample.index for sample in samples])
    assert len(shown) == 60 and not {3, 44} & set(shown.tolist())
    assert listed.read_text().splitlines()[0].partition("\t")[2] == "the data set returned None"


def test_items_as_torch_and_pillow_have_them(tmp_path: Path) -> None:
    """A TensorDataset of images gives tuples of one; Pillow reads pixels after the item is made."""
    images = torch.arange(75, dtype=torch.uint8).reshape(1, 3, 5, 5)
    pixels, label = DatasetSource(torch.utils.data.TensorDataset(images), "mine")[0]
    assert (pixels[0, 0].tolist(), label) == ([0, 25, 50], -1)
    Image.effect_noise((64, 64), 90.0).save(tmp_path / "cut.jpg")
    content = (tmp_path / "cut.jpg").read_bytes()
    (tmp_path / "cut.jpg").write_bytes(content[: len(content) // 2])
    with pytest.raises(BadImage, match=r"^mine\[0\]: image file is truncated"):
        DatasetSource([Image.open(tmp_path / "cut.jpg")], "mine")[0]
