"""What a source gives beside image and label reaches the batch, whatever the way there."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from clips import Clips, batches, config

from selftask.batch import Batch
from selftask.data.data_module import DataModule
from selftask.data.loading.open_data import Sources
from selftask.data.subset import subset_of
from selftask.distributed.world import World
from selftask.errors import BadImage, ConfigError, UserError


def check(batch: Batch, row: Any = lambda index: index) -> None:
    """Every field of a sample is that of the image with its index."""
    rows = torch.tensor([row(int(index)) for index in batch.index])
    (now,), then = batch.views["now"], batch.views["then"]
    torch.testing.assert_close(_grey(now), rows.double(), atol=0.01, rtol=0)
    assert len(then) == 2
    for view in then:
        torch.testing.assert_close(_grey(view), rows.double() + 100, atol=0.01, rtol=0)
    assert batch.extras.keys() == {"caption", "time", "mask"}  # the image went into views
    assert torch.equal(batch.extras["time"], rows.float() / 2)
    assert torch.equal(batch.extras["mask"], rows.short()[:, None, None].expand(-1, 3, 5))
    for ids, number in zip(batch.extras["caption"].tolist(), rows.tolist(), strict=True):
        letters = [ord("a") + number + 1] * (number + 1)  # ids of bytes are one more
        assert ids[: number + 3] == [257, *letters, 258]
        assert not any(ids[number + 3 :])


def _grey(view: torch.Tensor) -> torch.Tensor:
    """Gray levels of plain images that were normalized by ImageNet's statistics, (B,) float64."""
    values = view.double().amax((2, 3))[:, 0]
    return (values * 0.229 + 0.485) * 255


@pytest.mark.parametrize(
    "more",
    [
        [],
        ["data.num_workers=2"],
        ["data.cache=ram"],
        ["data.cache=disk", "data.num_workers=1"],
        ["data.augment_on=device", "data.num_workers=1"],
        ["data.augment_on=device", "data.cache=device"],
    ],
    ids=str,
)
def test_every_field_is_that_of_its_image(
    more: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SELFTASK_CACHE", str(tmp_path))
    for batch in batches(config(tmp_path, *more), Clips()):
        check(batch)


@pytest.mark.parametrize("cache", ["ram", "disk", "device"])
def test_a_cache_reads_further_images_once(
    cache: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SELFTASK_CACHE", str(tmp_path))
    source, asked = Clips(), []
    monkeypatch.setattr(
        source, "extra", lambda i, name: asked.append((i, name)) or Clips.extra(source, i, name)
    )
    more = [f"data.cache={cache}", "data.augment_on=device", "data.num_workers=0"]
    loaded = config(tmp_path, *more)
    module = DataModule(loaded, Sources(source, None), World(), torch.device("cpu"))
    stream = module.train_batches(0)
    next(stream)
    images = [index for index, name in asked if name == "later"]
    assert {*images} == {*range(12)}
    for batch in itertools.islice(stream, 5):
        check(batch)
    assert [index for index, name in asked if name == "later"] == images
    module.close()


@pytest.mark.parametrize("more", [[], ["data.cache=device"]], ids=str)
def test_views_of_further_images_are_alike_on_both_engines(more: list[str]) -> None:
    """Textures of two sizes, cropped and mirrored by each view's own draws."""

    class Textures(Clips):
        def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
            return _texture(20, 24 + index, index), -1

        def extra(self, index: int, name: str) -> Any:
            return (
                _texture(30 - index, 18, -index) if name == "later" else super().extra(index, name)
            )

    crop = "transforms: [{name: random_resized_crop, size: 12}, horizontal_flip, normalize]"
    views = f"views={{main: null, now: {{{crop}}}, then: {{image: later, count: 2, {crop}}}}}"
    of = {
        engine: batches(config(Path(), views, f"data.augment_on={engine}", *extra), Textures())
        for engine, extra in (("cpu", []), ("device", more))
    }
    for cpu, device in zip(of["cpu"], of["device"], strict=True):
        assert torch.equal(cpu.index, device.index)
        for one, other in zip(cpu.all_views, device.all_views, strict=True):
            assert one.std() > 0.1
            torch.testing.assert_close(one, other, atol=0.02, rtol=0)


def _texture(height: int, width: int, phase: int) -> np.ndarray:
    y, x = np.mgrid[0:height, 0:width]
    planes = [np.sin(x / 5 + phase), np.cos(y / 4 - phase), np.sin((x + y) / 6)]
    return (np.stack(planes, -1) * 127 + 128).astype(np.uint8)


def test_fields_of_a_subset() -> None:
    part = subset_of(Clips(), {"count": 8})
    rows = part.rows  # type: ignore[attr-defined]
    for batch in batches(config(Path()), part):
        check(batch, lambda index: rows[index])


def test_a_sample_without_caption_is_replaced_and_listed(tmp_path: Path) -> None:
    loaded = config(tmp_path, "data.max_unreadable=0.5", f"out={tmp_path}")
    for batch in batches(loaded, Clips(without_caption=3)):
        assert 3 not in batch.index.tolist()
        check(batch)
    assert "clips[3]\tits caption is empty" in (tmp_path / "bad_files.txt").read_text()


def test_an_image_that_is_not_there_is_refused_with_the_config() -> None:
    wrong = config(Path(), "views.then.image=after")
    with pytest.raises(ConfigError, match=r"views\.then\.image: .* 'after'; it has later"):
        batches(wrong, Clips())


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("time", "noon", r"clips\[\d+\]: its 'time' is 'noon'; a number"),
        ("caption", 3, "its 'caption' is 3; a text"),
        ("later", np.zeros((4, 4, 1), np.uint8), r"its 'later' is uint8 of shape \(4, 4, 1\)"),
    ],
)
def test_a_broken_contract_is_told(name: str, value: Any, message: str) -> None:
    class Broken(Clips):
        def extra(self, index: int, asked: str) -> Any:
            return value if asked == name else super().extra(index, asked)

    with pytest.raises(UserError, match=message):
        batches(config(Path()), Broken())


def test_arrays_of_different_shapes_make_no_batch() -> None:
    class Ragged(Clips):
        def extra(self, index: int, name: str) -> Any:
            return np.zeros(index % 2) if name == "mask" else super().extra(index, name)

    with pytest.raises(UserError, match=r"its 'mask' differs between samples \(float64 \(0,\)"):
        batches(config(Path(), "data.num_workers=1"), Ragged())


def test_a_test_phase_has_extras_and_an_evaluation_none() -> None:
    module = DataModule(config(Path()), Sources(Clips(), Clips(4)), World(), torch.device("cpu"))
    (batch,) = module.test_batches()
    assert batch.extras["time"].tolist() == [0, 0.5, 1, 1.5]
    assert next(module.test_samples()).extras == {}
    module.close()


def test_a_bad_extra_image_counts_as_unreadable(tmp_path: Path) -> None:
    class Torn(Clips):
        def extra(self, index: int, name: str) -> Any:
            if (index, name) == (5, "later"):
                raise BadImage("clips/5b.jpg", "torn")
            return super().extra(index, name)

    loaded = config(Path(), "data.max_unreadable=0.5", f"out={tmp_path}")
    assert all(5 not in batch.index.tolist() for batch in batches(loaded, Torn()))
