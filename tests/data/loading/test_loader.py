"""The same samples whatever the workers, ranks and stops."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numbered import Numbers, assert_same, dataset, read
from PIL import Image

from selftask.config.load import load_config
from selftask.config.schema import Component, DataConfig, ViewConfig
from selftask.data.cache.on_device import CachedBatches
from selftask.data.device.batches import DeviceDataset
from selftask.data.device.engine import Engine
from selftask.data.loading.bad_files import BadFiles
from selftask.data.loading.dataset import EvalDataset, ViewDataset
from selftask.data.loading.loader import Batches, EvalBatches, in_equal_numbers
from selftask.data.loading.open_data import check_data, open_data
from selftask.data.open_source import open_source
from selftask.data.reading.files import POLICY
from selftask.data.sampling.repeated import Repeated
from selftask.data.sampling.sampler import Pool
from selftask.data.transforms.pipeline import build_pipeline
from selftask.data.transforms.pretext import drawn_rotation
from selftask.data.views import Views
from selftask.errors import BadImage, ConfigError
from selftask.random.views import draw_rng


@pytest.fixture(scope="module")
def digits() -> ViewDataset:
    source = open_source(Component(name="digits", args={}))
    source.images, source.labels = source.images[:65], source.labels[:65]  # type: ignore[attr-defined]
    affine = Component(name="random_affine", args={"degrees": 45, "translate": 0.2})
    noise = Component(name="contrast_noise", args={"noise": 0.05})
    return ViewDataset(source, Views({"main": ViewConfig(count=2, transforms=[affine, noise])}), 3)


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_samples_do_not_depend_on_workers_or_stops(digits: ViewDataset) -> None:
    make = lambda workers: Batches(digits, batch_size=20, seed=3, num_workers=workers)  # noqa: E731
    whole = read(make(0), 7)
    sample = whole[0]
    assert [view.shape for view in sample.all_views] == [(20, 3, 32, 32)] * 2
    assert sample.labels.dtype == sample.index.dtype == torch.int64
    assert np.array_equal(sample.labels, digits.source.labels[sample.index])
    assert [s.epoch for s in whole] == [0, 0, 0, 1, 1, 1, 2]
    assert [s.number for s in whole] == list(range(7))
    assert not torch.equal(whole[0].index, whole[3].index)
    for workers in (1, 3):
        assert_same(read(make(workers), 7), whole)
        assert_same(read(make(workers), 3, start=4), whole[4:])


def test_an_image_looks_different_in_each_epoch(digits: ViewDataset) -> None:
    first, second = digits[0, 17], digits[1, 17]
    assert not np.array_equal(first.views[0], second.views[0])
    assert np.array_equal(first.views[0], digits[0, 17].views[0])


def test_ranks_share_the_batches() -> None:
    """Of endless permutations by seed and epoch, of four full batches each."""
    data = dataset(Numbers(50))
    whole = read(Batches(data, batch_size=12, seed=0), 9)
    parts = [
        read(Batches(data, batch_size=12, seed=0, rank=rank, world_size=2), 9) for rank in (0, 1)
    ]
    for sample, *shares in zip(whole, *parts, strict=True):
        assert torch.equal(sample.index, torch.cat([part.index for part in shares]))
        for view in range(2):
            joined = torch.cat([part.all_views[view] for part in shares])
            assert torch.equal(sample.all_views[view], joined)
    epochs = [torch.cat([sample.index for sample in whole[at : at + 4]]) for at in (0, 4)]
    for order in epochs:
        assert len(order.unique()) == 48 and not torch.equal(order, order.sort().values)
    assert not torch.equal(*epochs)
    other = read(Batches(data, batch_size=12, seed=1), 1)
    assert not torch.equal(other[0].index, whole[0].index)


def test_reading_does_not_touch_the_global_generator() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    for workers in (0, 1):
        read(Batches(dataset(Numbers(20)), batch_size=4, seed=0, num_workers=workers), 3)
    assert torch.equal(before, torch.get_rng_state())


def test_start_again_keeps_the_workers_if_it_is_the_next_step() -> None:
    batches = Batches(dataset(Numbers(20)), batch_size=4, seed=0, num_workers=1)
    batches.start(0)
    next(batches)
    reader = batches._reader
    batches.start(1)
    assert batches._reader is reader
    batches.start(9)
    assert next(batches).number == 9
    assert batches.data_wait_s > 0
    batches.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_evaluation_reads_everything_once_in_order(workers: int) -> None:
    crop = Component(name="center_crop", args={"size": 8})
    data = EvalDataset(Numbers(23, bad=(5,)), build_pipeline([crop]))  # type: ignore[arg-type]
    indices, targets = [], []
    for rank in range(2):
        bad_files = BadFiles(None, 23, max_unreadable=1.0)
        batches = EvalBatches(
            *(data,),
            batch_size=4,
            num_workers=workers,
            rank=rank,
            world_size=2,
            bad_files=bad_files,
        )
        assert len(batches) == 3
        for sample in batches:
            indices += sample.index.tolist()
            targets += sample.labels.tolist()
            assert sample.input.shape == (len(sample.index), 3, 8, 8)
            assert (sample.input[:, 0, 0, 0] * 255).round().tolist() == sample.index.tolist()
    assert indices == [i for i in range(23) if i != 5]
    assert targets == [i % 3 for i in indices]
    parts = [EvalBatches(data, batch_size=4, rank=r, world_size=10).batches for r in range(10)]
    assert {sum(map(len, part)) for part in parts} == {2, 3}


def test_check_data() -> None:
    def config(batch_size: int, accumulate: int = 1) -> Any:
        step = "accumulate" if accumulate > 1 else "standard"
        sizes = [f"train.batch_size={batch_size}", f"train.accumulate={accumulate}"]
        return load_config("simclr/digits", [*sizes, f"train.step={step}"])

    source: Any = Numbers(100)
    check_data(config(100), source)
    check_data(config(20, 5), source)
    with pytest.raises(ConfigError, match=r"train\.batch_size: 101 is more than the 100 images"):
        check_data(config(101), source)
    with pytest.raises(
        ConfigError, match=r"train\.accumulate: 6 batches are more than the 5 of an"
    ):
        check_data(config(20, 6), source)


def test_the_pixel_limit_holds_for_all_images_also_within_concat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(POLICY, "max_pixels", POLICY.max_pixels)  # reset when the test ends
    Image.new("RGB", (10, 8)).save(tmp_path / "a.png")
    folder = Component(name="folder", args={"path": str(tmp_path)})
    both = Component(name="concat", args={"sources": [folder.to_dict()]})
    sources = open_data(DataConfig(source=both, val=folder, max_pixels=79))
    for source in (sources.train, sources.val):
        assert source is not None
        with pytest.raises(BadImage, match=r"10x8 pixels, more than data\.max_pixels=79"):
            source[0]
    open_data(DataConfig(source=both, max_pixels=80)).train[0]


class Corners(Numbers):
    """Images with one white corner: how far each was turned can be seen."""

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        image, target = super().__getitem__(index)
        image = np.zeros_like(image)
        image[0, 0] = 255
        return image, target


def turned(pictures: torch.Tensor) -> list[int]:
    """Quarters, anticlockwise, of each of (B, C, H, W)."""
    corners = pictures[:, 0][:, [0, -1, -1, 0], [0, 0, -1, -1]]  # in that order they are reached
    assert (corners.sum(1) == 1).all()
    return corners.argmax(1).tolist()


def drawn_flip(seed: int, epoch: int, index: int, view: int) -> int:
    """Where a flip moves the first corner, in the order of `turned`."""
    return 3 if draw_rng(seed, epoch, index, view).random() < 0.5 else 0


@pytest.mark.parametrize(
    ("kind", "workers"), [(Batches, 0), (Batches, 2), (CachedBatches, 0)], ids=str
)
@pytest.mark.parametrize("repeated", [False, True])
def test_the_key_of_a_sample_names_its_draws(
    kind: type[Batches], workers: int, repeated: bool
) -> None:
    """So what was drawn is known of images in place of others, and of second showings."""
    cached = kind is CachedBatches  # which needs transforms for whole batches
    name, drawn = ("horizontal_flip", drawn_flip) if cached else ("rotate_90", drawn_rotation)
    config = {"main": ViewConfig(count=2, transforms=[Component(name=name)])}
    source: Any = Corners(24, bad=() if repeated else tuple(range(0, 24, 3)))
    views = Views(config)
    data: Any = ViewDataset(source, views, 3)
    if cached:
        data = DeviceDataset(source, views, 3, Engine(views, config))
    pool = Pool(24, 12, 3)
    sampler = Repeated(Repeated.Config(times=3), pool) if repeated else None
    bad_files = BadFiles(None, 24, max_unreadable=1.0)
    batches = kind(
        *(data,), batch_size=12, seed=3, num_workers=workers, sampler=sampler, bad_files=bad_files
    )
    wrong = 0
    for sample in read(batches, 3, start=1):
        assert sample.key.shape == (12, 2)
        assert sample.key.dtype == torch.int64
        keys = sample.key.tolist()
        for number, view in enumerate(sample.all_views):
            actual = turned(view)
            assert actual == [drawn(3, *key, number) for key in keys]
            by_image = [drawn(3, sample.epoch, index, number) for index in sample.index.tolist()]
            wrong += actual != by_image
    assert wrong >= 3  # index and epoch do not name them


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("size", [1, 2, 8])
def test_every_rank_has_as_many_test_batches(size: int, world_size: int) -> None:
    for count in range(world_size, 40):
        ranks = [in_equal_numbers(count, size, rank, world_size) for rank in range(world_size)]
        assert [i for batches in ranks for batch in batches for i in batch] == list(range(count))
        assert len({len(batches) for batches in ranks}) == 1
        shares = [sum(map(len, batches)) for batches in ranks]
        assert max(shares) - min(shares) <= 1
        assert {len(batch) for batches in ranks for batch in batches} <= {
            *range(1, max(3, size + 1))
        }
