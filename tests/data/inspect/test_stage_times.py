"""``selftask bench data`` measures what it says, and the advice fits what was measured."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from data.odd_files import make_photographs
from selftask.cli.main import main
from selftask.config.load import load_config
from selftask.config.schema import Config
from selftask.data.inspect.profile import (
    StageTimes,
    decodes_per_sample,
    loader_rate,
    measure,
    transform_shares,
)
from selftask.data.inspect.profile_report import advice, table
from selftask.data.loading.data_stall import (
    Cores,
    WaitWatch,
    advice_at_start,
    loader_advice,
    wait_advice,
    workers_advice,
)
from selftask.data.loading.open_data import Sources, open_data
from selftask.data.source import Source
from selftask.errors import BadImage
from selftask.hooks import metrics
from selftask.hooks.watching import loader_check
from selftask.logs import pace

CPU = torch.device("cpu")


class Slow(Source):
    """Images that take a known time each."""

    def __init__(self, number: int, seconds: float) -> None:
        self.number, self.seconds = number, seconds

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        time.sleep(self.seconds)
        return np.full((40, 50, 3), index % 256, dtype=np.uint8), -1

    def path(self, index: int) -> str:
        return str(index)

    def describe(self) -> str:
        return "slow"


def config_for(folder: Path, *more: str) -> Config:
    return load_config(
        "simclr/images", [f"data={folder}", "train.batch_size=8", "train.device=cpu", *more]
    )


def stage_times(**changes: object) -> StageTimes:
    """A measurement of photographs on 8 cores, with some of it changed."""
    usual = StageTimes(
        read_s=1e-4,
        decode_s=1e-3,
        augment_s=1e-3,
        collate_s=1e-4,
        to_device_s=1e-5,
        loader_images_per_s=3000.0,
        decodes_per_sample=1.0,
        num_images=100,
        batch_size=64,
        num_workers=8,
        processes=1,
        device="cpu",
        num_cores=8,
        views=[(224, 224)] * 2,
        image_pixels=500 * 375,
        transforms={"gaussian_blur": 0.6, "color_jitter": 0.4},
    )
    return replace(usual, **changes)  # type: ignore[arg-type]


def test_stages_take_the_time_they_take(tmp_path: Path) -> None:
    config = config_for(tmp_path, "data.num_workers=0")
    times = measure(config, Sources(Slow(40, 0.01), None), CPU, seconds=0.3)
    assert times.read_s is None, "there are no files"
    assert 0.0099 < times.decode_s < 0.03
    assert times.decodes_per_sample == 1
    assert 10 <= times.num_images <= 31, "as many as fit into the time"
    assert times.views == [(96, 96)] * 2
    assert times.image_pixels == 2000
    assert 0 < times.collate_s < times.decode_s
    rate = times.loader_images_per_s
    assert 0.3 / times.worker_s < rate < 1 / 0.0099


@pytest.mark.slow
def test_workers_share_the_waiting(tmp_path: Path) -> None:
    """Sleeping takes no core, so that two workers sleep twice as much."""
    make = "views={main: {count: 2, transforms: [{name: random_resized_crop, size: 8}, normalize]}}"
    config = config_for(tmp_path, make, f"out={tmp_path}")
    sources = Sources(Slow(1000, 0.02), None)
    one, two = (
        loader_rate(replace(config, data=replace(config.data, num_workers=n)), sources, CPU, 0.5)
        for n in (1, 2)
    )
    assert one < 1 / 0.02
    assert 1.4 * one < two < 2 / 0.02 * 1.3


@pytest.mark.parametrize("cache", ["none", "device"])
def test_views_made_on_the_device(cache: str, tmp_path: Path) -> None:
    config = config_for(
        tmp_path, "data.num_workers=0", "data.augment_on=device", f"data.cache={cache}"
    )
    times = measure(config, Sources(Slow(24, 0.005), None), CPU, seconds=0.3)
    assert list(times.stages) == ["read+decode", "draw", "collate", "device views"]
    assert all(seconds > 0 for seconds in times.stages.values())
    assert times.views == [(96, 96)] * 2
    assert times.decodes_per_sample == 1
    assert times.loader_images_per_s > 0
    assert times.cache == cache
    assert torch.get_num_threads() == 1, "as before"


def test_files_are_read_and_decoded_apart(tmp_path: Path) -> None:
    make_photographs(tmp_path / "images", 20, size=(200, 150))
    (tmp_path / "images" / "bad.jpg").write_bytes(b"no image")
    config = config_for(tmp_path / "images", "data.num_workers=0")
    times = measure(config, open_data(config.data), CPU, seconds=1.5)
    assert times.read_s is not None
    assert times.read_s > 0
    assert times.decode_s > 0
    assert times.num_images == 20
    assert not Path(config.out).exists(), "a run's folder is left alone"


def test_decodes_are_counted(tmp_path: Path) -> None:
    config = config_for(tmp_path, "data.num_workers=0", "data.max_unreadable=1", f"out={tmp_path}")
    source = Slow(40, 0.0)
    assert decodes_per_sample(config, source) == 1.0

    class HalfBad(Slow):
        def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
            if index % 2:
                raise BadImage(str(index), "torn")
            return super().__getitem__(index)

    assert decodes_per_sample(config, HalfBad(40, 0.0)) > 1.0


SLEEPY = """
import time
from dataclasses import dataclass

from selftask.registry import register_transform


@register_transform("sleepy")
@dataclass(frozen=True, kw_only=True)
class Sleepy:
    \"\"\"Takes its time.\"\"\"

    seconds: float = 0.01

    def __call__(self, image, rng):
        time.sleep(self.seconds)
        return image
"""


@pytest.mark.usefixtures("forget_names")
def test_the_costliest_transform_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sleepy_transform.py").write_text(SLEEPY)
    monkeypatch.chdir(tmp_path)
    transforms = "[{name: random_resized_crop, size: 16}, sleepy, horizontal_flip, normalize]"
    views = f"views={{main: {{count: 2, transforms: {transforms}}}}}"
    config = config_for(tmp_path, "import=[sleepy_transform]", views)
    shares = transform_shares(config, [np.zeros((40, 50, 3), dtype=np.uint8)] * 8)
    assert next(iter(shares)) == "sleepy"
    assert sorted(shares) == ["horizontal_flip", "random_resized_crop", "sleepy"]
    assert sum(shares.values()) == pytest.approx(1)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_workers": 0}, "data.num_workers=0 reads between the steps; try 8 (8 cores)"),
        ({"num_workers": 2}, "data.num_workers=2 leaves cores idle (8 cores); try 8"),
        ({"num_workers": 30}, "data.num_workers=30 is too many for 8 cores; try 8"),
        ({"processes": 4}, "data.num_workers=8 is too many for 8 cores for 4 processes; try 2"),
        ({"read_s": 9e-3}, "read takes 81%: data.stage_to=FOLDER_ON_A_LOCAL_DISK"),
        ({"decode_s": 9e-3}, "decode takes 88%: only more workers"),
        (
            {"decode_s": 9e-3, "image_pixels": 20 * 224 * 224},
            "decode takes 88%, of images with 20 times the pixels of the largest view",
        ),
        ({"read_s": None, "decode_s": 9e-3}, "read+decode takes 89%: only more workers"),
        ({"decode_s": 9e-3, "cache": "ram"}, "making 2 views takes"),
        ({"augment_s": 9e-3}, "making 2 views takes 88%, gaussian_blur 60% of that"),
        ({"collate_s": 9e-3}, "putting batches together takes 81%"),
        (
            {"augment_on": "device", "to_device_s": 2e-3, "num_workers": 8},
            "cpu takes 2.0 ms to make the views of an image, longer than the workers take",
        ),
        ({"decodes_per_sample": 2.0}, "an image is decoded 2.00 times for its views"),
    ],
)
def test_advice_fits_what_was_measured(changes: dict[str, object], said: str) -> None:
    sentences = advice(stage_times(**changes))
    assert sentences[0].startswith(said)
    assert len(sentences) <= 2


def test_nothing_to_advise() -> None:
    assert advice(stage_times()) == []
    assert advice(stage_times(num_workers=0, cache="device")) == [], "no worker is met"
    assert advice(stage_times(augment_on="device", to_device_s=2e-4)) == []


def test_the_table_adds_up() -> None:
    lines = list(table(stage_times()))
    rows = {line.split("  ")[0]: line.split() for line in lines}
    assert [rows[name][1] for name in ("read", "decode", "augment")] == ["0.100", "1.000", "1.000"]
    assert rows["all"][1:] == ["2.210", "452"]
    assert rows["decode"][3] == "45%"
    assert lines[-1].endswith("3,000 images/s, 6.60 times one process")
    assert "decodes per sample 1.00" in lines


def test_the_command(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    argv = ["bench", "data", "simclr/digits", "--seconds", "1", "data.num_workers=0"]
    assert main([*argv, "--json", "data.val=no/such/folder", f"out={tmp_path / 'out'}"]) == 0
    report = json.loads(capfd.readouterr().out)
    assert report["decodes_per_sample"] == 1
    assert set(report["ms_per_image"]) == {"read+decode", "augment", "collate", "to device"}
    assert report["loader_images_per_s"] > 0
    assert len(report["transforms"]) > 1 and sum(report["transforms"].values()) == pytest.approx(1)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["dta"], "did you mean 'data'?"),
        (["data"], "needs a RECIPE"),
        (["data", "simclr/digits", "--seconds", "0"], "--seconds 0"),
        (["data", "simclr/digits", "train.seeds=1"], "did you mean 'train.seed'?"),
    ],
)
def test_bad_arguments_of_bench_data_are_refused(
    argv: list[str], said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *argv]) == 2
    assert said in capfd.readouterr().err


# ---- data_wait of a run


def test_waiting_is_told_once_and_only_when_it_lasts() -> None:
    watch = WaitWatch()
    assert watch.add_row(50, 0.9) is None, "the workers start in the first row"
    assert watch.add_row(40, 0.9) is None
    assert watch.add_row(40, 0.2) is None, "20 % is not too much, and begins anew"
    assert watch.add_row(49, 0.3) is None
    assert watch.add_row(1, 0.8) == pytest.approx((49 * 0.3 + 0.8) / 50)
    assert watch.add_row(500, 0.9) is None, "reported already"
    long_rows = WaitWatch()
    assert [long_rows.add_row(200, 0.5) for _ in range(3)] == [None, 0.5, None]


def test_advice_on_workers() -> None:
    assert workers_advice(4, Cores(4, 1)) is None
    assert workers_advice(0, Cores(1, 1)) == "data.num_workers=0 leaves cores idle (1 core); try 1"
    assert workers_advice(8, Cores(64, 1)) == (
        "data.num_workers=8 leaves cores idle (64 cores); try 64"
    )
    few, idle = (
        loader_advice(4, Cores(4, 1), "simclr/images", has_idle_device=idle)
        for idle in (False, True)
    )
    assert wait_advice(0.456, few) == (
        "training has waited for data 46% of the time: the cores are all at work: cheaper or fewer "
        "views, or smaller images, would help; `selftask bench data simclr/images` shows where the "
        "time goes"
    )
    assert "all at work: data.augment_on=device makes the views on the GPU; cheaper" in idle
    assert "try 8 " not in loader_advice(8, Cores(8, 1), "x", has_idle_device=True)
    assert loader_advice(2, Cores(8, 1), "x", has_idle_device=True).startswith(
        "data.num_workers=2 leaves cores idle (8 cores); try 8"
    ), "cores come first"


def test_advice_in_the_first_steps_compares_loader_and_device() -> None:
    """Workers make a batch of 64 in 0.1 s: a step of 0.05 s would wait half of the time."""
    assert advice_at_start(0.1, 0.05, 64, "do this") == (
        "the loader makes 640 images a second, and the device could train on 1,280: do this"
    )
    assert advice_at_start(0.1, 0.081, 64, "do this") is None, "19 % of waiting is not much"


def test_a_run_that_waits_says_so_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hook in a task of 200 steps of a second, of which 0.1 and later 0.4 are waiting."""
    results, rows, clock = [], [], [0.0]
    monkeypatch.setattr(metrics.log, "warning", lambda text, *words: results.append(text % words))
    monkeypatch.setattr(pace.time, "perf_counter", lambda: clock[0])
    task: Any = SimpleNamespace(
        config=config_for(tmp_path, "train.log_every=10", "data.num_workers=1", "out=runs/a"),
        data_module=SimpleNamespace(data_wait_s=0.0),
        last_batch=SimpleNamespace(loss=torch.tensor(1.0), terms={}),
        length=SimpleNamespace(batch_size=8, total_steps=200),
        optimizer=SimpleNamespace(param_groups=[{"lr": 0.1}]),
        optimizers={},
        clock=SimpleNamespace(done=False),
        world=SimpleNamespace(local_size=2),
        losses=[],
        device=CPU,
        train=True,
        steps_done=0,
        pop_scalars=dict,
        write_row=rows.append,
    )
    monkeypatch.setattr(loader_check, "cores_of_ranks", lambda _: 8)
    hook = metrics.Metrics()
    hook.on_start(task)
    for step in range(200):
        clock[0] += 1.0
        task.data_module.data_wait_s += 0.4 if step >= 100 else 0.1
        hook.on_loss_and_meter(task)
        task.steps_done += 1
        hook.on_step(task)
    assert [(row["step_s"], row["images_per_s"]) for row in rows] == [(1.0, 8.0)] * 20
    assert [row["eta_s"] for row in rows] == pytest.approx([*range(190, -10, -10)])
    assert [row["data_wait"] for row in rows] == pytest.approx([0.1] * 10 + [0.4] * 10)
    (line,) = results
    assert line == (
        "step 150: training has waited for data 40% of the time: data.num_workers=1 leaves cores "
        "idle (8 cores for 2 processes); try 4; `selftask bench data runs/a/config.yaml` shows "
        "where the time goes"
    )
