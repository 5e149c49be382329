"""``data.augment_on`` and ``data.cache`` do not change the samples."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from selftask.batch import Batch
from selftask.config.load import load_config
from selftask.data.cache.decoded import Decoded
from selftask.data.cache.on_device import CachedBatches
from selftask.data.data_module import DataModule
from selftask.data.device.batches import DeviceDataset
from selftask.data.loading.open_data import open_data
from selftask.distributed.world import World
from selftask.errors import ConfigError


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SELFTASK_CACHE", str(tmp_path))


def feed(out: Path, *settings: str) -> DataModule:
    words = ["data.num_workers=0", "train.batch_size=32", f"out={out}", *settings]
    config = load_config("simclr", words)
    return DataModule(config, open_data(config.data), World(), torch.device("cpu"))


def batches(feed: DataModule, start: int) -> list[Batch]:
    actual = feed.train_batches(start)
    read = [next(actual) for _ in range(2)]
    feed.close()
    return read


@pytest.mark.parametrize("engine", ["cpu", "device"])
def test_caches_do_not_change_samples(tmp_path: Path, engine: str) -> None:
    settings = [f"data.augment_on={engine}"]
    if engine == "device":  # the recipe's transforms have no batched version
        settings.append("views.main.transforms=[{name: random_resized_crop, size: 16}, normalize]")
    plain = feed(tmp_path, *settings)
    assert isinstance(plain.batches.dataset, DeviceDataset) == (engine == "device")
    expected = batches(plain, 5)
    for cache in ("disk", "device") if engine == "device" else ("ram",):
        cached = feed(tmp_path, *settings, f"data.cache={cache}")
        assert isinstance(cached.batches, CachedBatches) == (cache == "device")
        actual = batches(cached, 5)
        assert isinstance(cached.batches.dataset.source, Decoded) == (cache != "device")
        for one, other in zip(actual, expected, strict=True):
            assert one.number == other.number
            assert torch.equal(one.index, other.index)
            assert torch.equal(one.labels, other.labels)
            for view, expected_view in zip(one.all_views, other.all_views, strict=True):
                torch.testing.assert_close(view, expected_view, rtol=0, atol=1e-5)


def test_engines_differ_by_rounding(tmp_path: Path) -> None:
    cpu, device = (
        batches(feed(tmp_path, f"data.augment_on={name}"), 3) for name in ("cpu", "device")
    )
    for one, other in zip(cpu, device, strict=True):
        assert torch.equal(one.index, other.index)
        for view, other_view in zip(one.all_views, other.all_views, strict=True):
            assert (view - other_view).abs().mean() < 1.5 / 127.5  # gray levels, normalized


def test_iterate_all_reads_every_image_once(tmp_path: Path) -> None:
    made = feed(tmp_path, "data.augment_on=device", "data.cache=ram", "train.batch_size=256")
    actual = torch.cat([batch.index for batch in made.iterate_all()])
    assert actual.tolist() == list(range(made.num_images))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["data.cache=device"], "data.cache='device' needs data.augment_on=device"),
        (
            ["data.max_side=64"],
            "data.max_side=64 has no effect with data.augment_on='cpu' without a cache",
        ),
        (["data.augment_on=gpu"], "data.augment_on='gpu'"),
    ],
)
def test_what_does_not_go_together(tmp_path: Path, settings: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        feed(tmp_path, *settings)
    assert message in str(caught.value)
