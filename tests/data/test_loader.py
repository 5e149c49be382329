"""The same samples whatever the workers, ranks and stops; bad files; dying workers."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import selftask
from selftask.config.schema import Component, DataConfig, ViewConfig
from selftask.data.dataset import (
    BadFiles,
    EvalDataset,
    ViewDataset,
    check_sizes,
    open_data,
    open_source,
)
from selftask.data.loader import Batches, EvalBatches
from selftask.data.reading import BadImage
from selftask.data.views import Views, build_pipeline
from selftask.errors import ConfigError, UserError

ODD_IMAGES = Path(__file__).parents[3] / "shared" / "data" / "odd_images"
CROP = Component(name="random_resized_crop", args={"size": 8})


ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(selftask.__file__).parents[1])}
START_WORKERS = """
from selftask.config.schema import Component, ViewConfig
from selftask.data.dataset import ViewDataset, open_source
from selftask.data.loader import Batches
from selftask.data.views import Views
data = ViewDataset(open_source(Component(name="digits")), Views({"a": ViewConfig()}), 0)
batches = Batches(data, batch_size=64, seed=0, num_workers=2)
next(batches)
print(*(worker.pid for worker in batches._reader._workers), flush=True)
"""


class Numbers:
    """n plain images, image i of grey level i; those in ``bad`` cannot be read."""

    labels = None

    def __init__(self, n: int, bad: tuple[int, ...] = (), dies_at: int = -1) -> None:
        self.n, self.bad, self.dies_at = n, bad, dies_at

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        if index == self.dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if index in self.bad:
            raise BadImage(self.path(index), "broken")
        return np.full((9, 9, 3), index, dtype=np.uint8), index % 3

    def path(self, index: int) -> str:
        return f"images/{index}"


def dataset(source: Any, seed: int = 0) -> ViewDataset:
    views = Views({"main": ViewConfig(count=2, transforms=[CROP])})
    return ViewDataset(source, views, seed)


def read(batches: Batches, count: int, start: int = 0) -> list[dict[str, Any]]:
    batches.start(start)
    samples = list(itertools.islice(batches, count))
    batches.close()
    return samples


def assert_same(a: list[dict[str, Any]], b: list[dict[str, Any]]) -> None:
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
        assert (x["epoch"], x["step"]) == (y["epoch"], y["step"])
        assert torch.equal(x["index"], y["index"])
        assert torch.equal(x["target"], y["target"])
        assert all(torch.equal(v, w) for v, w in zip(x["views"], y["views"], strict=True))


@pytest.fixture(scope="module")
def digits() -> ViewDataset:
    source = open_source(Component(name="digits", args={}))
    source.images, source.labels = source.images[:65], source.labels[:65]  # type: ignore[attr-defined]
    affine = Component(name="random_affine", args={"degrees": 45, "shift": 0.2})
    noise = Component(name="contrast_noise", args={"noise": 0.05})
    return ViewDataset(source, Views({"main": ViewConfig(count=2, transforms=[affine, noise])}), 3)


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_samples_do_not_depend_on_workers_or_stops(digits: ViewDataset) -> None:
    make = lambda workers: Batches(digits, batch_size=20, seed=3, num_workers=workers)  # noqa: E731
    whole = read(make(0), 7)
    sample = whole[0]
    assert [view.shape for view in sample["views"]] == [(20, 3, 32, 32)] * 2
    assert sample["target"].dtype == sample["index"].dtype == torch.int64
    assert np.array_equal(sample["target"], digits.source.labels[sample["index"]])
    assert [s["epoch"] for s in whole] == [0, 0, 0, 1, 1, 1, 2]
    assert [s["step"] for s in whole] == list(range(7))
    assert not torch.equal(whole[0]["index"], whole[3]["index"])
    for workers in (1, 3):
        assert_same(read(make(workers), 7), whole)
        assert_same(read(make(workers), 3, start=4), whole[4:])


def test_an_image_looks_different_in_each_epoch(digits: ViewDataset) -> None:
    first, second = digits[0, 17], digits[1, 17]
    assert not np.array_equal(first.views[0], second.views[0])
    assert np.array_equal(first.views[0], digits[0, 17].views[0])


def test_ranks_share_the_batches() -> None:
    data = dataset(Numbers(50))
    whole = read(Batches(data, batch_size=12, seed=0), 9)
    parts = [
        read(Batches(data, batch_size=12, seed=0, rank=rank, world_size=2), 9) for rank in (0, 1)
    ]
    for sample, *shares in zip(whole, *parts, strict=True):
        assert torch.equal(sample["index"], torch.cat([part["index"] for part in shares]))
        for view in range(2):
            joined = torch.cat([part["views"][view] for part in shares])
            assert torch.equal(sample["views"][view], joined)


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
    assert next(batches)["step"] == 9
    assert batches.data_wait_s > 0
    batches.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_bad_files_are_replaced_listed_once_and_read_back(tmp_path: Path, workers: int) -> None:
    data = dataset(Numbers(60, bad=(3, 10, 44)))
    listed = tmp_path / "out" / "bad_files.txt"

    def batches() -> Batches:
        bad_files = BadFiles(listed, 60, max_bad=0.05)
        return Batches(data, batch_size=20, seed=0, num_workers=workers, bad_files=bad_files)

    samples = read(batches(), 6)
    lines = sorted(listed.read_text().splitlines())
    assert lines == ["images/10\tbroken", "images/3\tbroken", "images/44\tbroken"]
    for sample in samples:
        assert len(sample["index"]) == 20
        assert not set(sample["index"].tolist()) & {3, 10, 44}
        shown = (sample["views"][0][:, 0, 0, 0] * 255).round().long()
        assert torch.equal(shown, sample["index"])  # the index is that of the image shown
    assert_same(read(batches(), 3, start=3), samples[3:])
    assert sorted(listed.read_text().splitlines()) == lines


def test_replacements_are_their_own_draws() -> None:
    data = dataset(Numbers(60, bad=(3,)))
    sample = data[0, 3]
    again = data[0, 3]
    assert sample.index == again.index != 3
    assert sample.index != data[1, 3].index or sample.index != data[2, 3].index
    assert [error.path for error in sample.bad] == ["images/3"]


def test_too_many_bad_files_stop_the_run(tmp_path: Path) -> None:
    bad_files = BadFiles(tmp_path / "bad_files.txt", 60, max_bad=0.04)
    batches = Batches(
        dataset(Numbers(60, bad=(3, 10, 44))), batch_size=20, seed=0, bad_files=bad_files
    )
    with pytest.raises(UserError) as caught:
        read(batches, 3)
    message = str(caught.value)
    assert message.startswith("3 of 60 images (5.00%) cannot be read, more than data.max_bad=0.04")
    assert "images/3: broken" in message
    assert str(tmp_path / "bad_files.txt") in message


def test_fail_names_the_file_in_the_first_line() -> None:
    bad_files = BadFiles(None, 60, on_error="fail", max_bad=1.0)
    batches = Batches(dataset(Numbers(60, bad=(3,))), batch_size=20, seed=0, bad_files=bad_files)
    with pytest.raises(UserError) as caught:
        read(batches, 3)
    assert "images/3" in str(caught.value).splitlines()[0]


def test_only_bad_files() -> None:
    batches = Batches(
        dataset(Numbers(8, bad=tuple(range(8)))),
        batch_size=4,
        seed=0,
        bad_files=BadFiles(None, 8, max_bad=1.0),
    )
    with pytest.raises(UserError, match="no readable image"):
        next(batches)


def test_other_ranks_lines_are_not_repeated(tmp_path: Path) -> None:
    path = tmp_path / "bad_files.txt"
    ranks = [BadFiles(path, 10, max_bad=1.0) for _ in range(2)]
    for bad_files in (*ranks, BadFiles(path, 10, max_bad=1.0)):
        bad_files.add([BadImage("a\tb", "why"), BadImage("c", "why\nnot")])
    assert path.read_text() == "a\\tb\twhy\nc\twhy not\n"


@pytest.mark.parametrize("workers", [0, 1])
def test_views_of_different_sizes_are_explained(tmp_path: Path, workers: int) -> None:
    for size in (4, 5, 6):
        Image.new("RGB", (size, 4)).save(tmp_path / f"{size}.png")
    source = open_source(Component(name="folder", args={"path": str(tmp_path)}))
    data = ViewDataset(source, Views({"main": ViewConfig(transforms=[])}), 0)
    with pytest.raises(UserError, match=r"view 0: .* different sizes \(4x4, 5x4, 6x4\)") as caught:
        read(Batches(data, batch_size=3, seed=0, num_workers=workers), 1)
    assert "Traceback" not in str(caught.value)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_transform_that_makes_floats_is_explained(workers: int) -> None:
    data = dataset(Numbers(20))
    data.views.pipelines[1].transforms.append(lambda image, rng: image / 255)
    with pytest.raises(
        UserError, match=r"view 0: its transforms gave float64 of shape \(8, 8, 3\)"
    ):
        read(Batches(data, batch_size=4, seed=0, num_workers=workers), 1)


@pytest.mark.parametrize("workers", [0, 1])
def test_what_a_user_can_put_right_comes_without_a_traceback(workers: int) -> None:
    def refuse(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        raise UserError("views.main.transforms.0: these tiles do not fit")

    data = dataset(Numbers(20))
    data.views.pipelines[0].transforms[0] = refuse
    with pytest.raises(UserError) as caught:
        read(Batches(data, batch_size=4, seed=0, num_workers=workers), 1)
    assert str(caught.value) == "views.main.transforms.0: these tiles do not fit"


def test_a_killed_worker_is_named() -> None:
    batches = Batches(dataset(Numbers(20, dies_at=7)), batch_size=10, seed=0, num_workers=1)
    with pytest.raises(UserError, match=r"worker process \d+ was killed by SIGKILL; out of memory"):
        read(batches, 4)


def test_workers_leave_signals_to_the_main_process() -> None:
    batches = Batches(dataset(Numbers(40)), batch_size=4, seed=0, num_workers=2)
    batches.start(0)
    next(batches)
    for worker in batches._reader._workers:  # type: ignore[union-attr]
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2):
            os.kill(worker.pid, number)  # type: ignore[arg-type]
    assert [next(batches)["step"] for _ in range(20)] == list(range(1, 21))
    batches.close()


@pytest.mark.parametrize(
    ("ending", "code"),
    [
        ("", 0),
        ("raise RuntimeError('mine')", 1),  # its traceback keeps the loader alive
        ("kept = batches._reader._iterator; del batches", 0),  # nobody is left to close it
    ],
)
def test_a_script_that_forgets_to_close_ends(ending: str, code: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", START_WORKERS + ending],
        env=ENVIRONMENT,
        capture_output=True,
        timeout=20,
        check=False,
    )
    assert done.returncode == code


def test_a_stuck_worker_does_not_keep_the_run_from_ending() -> None:
    batches = Batches(dataset(Numbers(40)), batch_size=4, seed=0, num_workers=1)
    next(batches)
    (worker,) = batches._reader._workers  # type: ignore[union-attr]
    os.kill(worker.pid, signal.SIGSTOP)  # type: ignore[arg-type]
    batches.close()
    worker.join(timeout=10)
    assert not worker.is_alive()


def test_no_orphans_when_the_main_process_is_killed() -> None:
    """Nor when it dies before a worker has begun."""
    at_once = START_WORKERS.replace("next(batches)", "batches.start(0)")
    command = [sys.executable, "-c", at_once + "import time; time.sleep(60)"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT) as main:
        assert main.stdout is not None
        pids = [int(pid) for pid in main.stdout.readline().split()]
        assert len(pids) == 2
        main.kill()
    deadline = time.monotonic() + 40
    while any(map(_is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(_is_running, pids))


@pytest.mark.parametrize("workers", [0, 2])
def test_evaluation_reads_everything_once_in_order(workers: int) -> None:
    crop = Component(name="center_crop", args={"size": 8})
    data = EvalDataset(Numbers(23, bad=(5,)), build_pipeline([crop]))  # type: ignore[arg-type]
    indices, targets = [], []
    for rank in range(2):
        bad_files = BadFiles(None, 23, max_bad=1.0)
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
            indices += sample["index"].tolist()
            targets += sample["target"].tolist()
            assert sample["input"].shape == (len(sample["index"]), 3, 8, 8)
            assert (sample["input"][:, 0, 0, 0] * 255).round().tolist() == sample["index"].tolist()
    assert indices == [i for i in range(23) if i != 5]
    assert targets == [i % 3 for i in indices]


def test_check_sizes() -> None:
    def config(batch_size: int, accumulate: int = 1) -> Any:
        train = SimpleNamespace(batch_size=batch_size, accumulate=accumulate, seed=0)
        data = SimpleNamespace(sampler=Component(name="shuffled"))
        return SimpleNamespace(train=train, data=data)

    source: Any = Numbers(100)
    check_sizes(config(100), source)
    check_sizes(config(20, 5), source)
    with pytest.raises(ConfigError, match=r"train\.batch_size: 101 is more than the 100 images"):
        check_sizes(config(101), source)
    with pytest.raises(
        ConfigError, match=r"train\.accumulate: 6 batches are more than the 5 of an"
    ):
        check_sizes(config(20, 6), source)


def test_open_data_passes_the_pixel_limit() -> None:
    digits = Component(name="digits", args={"split": "val"})
    sources = open_data(DataConfig(source=digits, val=digits, max_pixels=77))
    assert sources.train.max_pixels == 77
    assert sources.val is not None
    assert len(sources.val) == 450


@pytest.mark.skipif(not ODD_IMAGES.is_dir(), reason="shared test images are not here")
def test_odd_images_lists_exactly_the_undecodable(tmp_path: Path) -> None:
    source = open_source(Component(name="folder", args={"path": str(ODD_IMAGES)}), 100_000_000)
    assert len(source) == 80
    bad_files = BadFiles(tmp_path / "bad_files.txt", len(source), max_bad=1.0)
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
        UserError, match=r"of 80 images \(.*%\) cannot be read, more than data\.max_bad"
    ):
        read(Batches(data, batch_size=16, seed=0, bad_files=BadFiles(None, 80)), 5)


def _is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"
