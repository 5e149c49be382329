"""Training on dirty data: it goes on, lists what is bad, and ends in time."""

from __future__ import annotations

import errno
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from data.odd_files import encoded, make_bad, make_odd_but_sound, make_photographs, picture
from selftask.config.load import load_config
from selftask.config.schema import Config
from selftask.data.data_module import DataModule
from selftask.data.loading.open_data import Sources, open_data
from selftask.data.reading import files
from selftask.data.reading.files import Policy, read_bytes
from selftask.data.sources.dataset_objects import DatasetSource
from selftask.data.sources.files import FileSource
from selftask.distributed.world import World
from selftask.errors import BadImage, RunError, UserError
from selftask.task import Task
from selftask.task.loop import train_loop

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _usual_patience() -> Iterator[None]:
    yield
    files.set_policy(Policy())


def config_for(folder: Path, out: Path, *more: str) -> Config:
    """SimCLR on a folder, two small views, batches of 10."""
    transforms = "[{name: random_resized_crop, size: 16}, normalize]"
    return load_config(
        "simclr/images",
        [
            f"data={folder}",
            f"views={{main: {{count: 2, transforms: {transforms}}}}}",
            "backbone={name: small_resnet, width: 8}",
            "method={hidden_dim: 16, out_dim: 8}",
            "train={batch_size: 10, epochs: 1, threads: 1, device: cpu}",
            "eval.evaluations={knn: null, linear: null}",
            f"out={out}",
            *more,
        ],
    )


def one_epoch(config: Config, sources: Sources | None = None) -> list[int]:
    """Read one epoch as training does; the indices of the images shown."""
    feed = DataModule(config, sources or open_data(config.data), World(), CPU)
    batches = feed.train_batches(0)
    try:
        shown = [next(batches).index for _ in range(feed.batches.sampler.steps_per_epoch)]
    finally:
        feed.close()
    return torch.cat(shown).tolist()


def listed(out: Path) -> dict[str, str]:
    """``bad_files.txt`` of a run: path -> reason."""
    lines = (out / "bad_files.txt").read_text().splitlines()
    assert len({line.split("\t")[0] for line in lines}) == len(lines), "each path once"
    return dict(line.split("\t") for line in lines)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_every_odd_file_at_once(num_workers: int, tmp_path: Path) -> None:
    folder, out = tmp_path / "images", tmp_path / "out"
    make_photographs(folder / "sound", 32)
    sound = make_odd_but_sound(folder / "odd")
    bad = make_bad(folder / "bad")
    config = config_for(folder, out, "data.max_unreadable=0.5", f"data.num_workers={num_workers}")
    started = time.perf_counter()
    assert len(open_data(config.data).train) == 32 + len(sound) + len(bad)
    assert f"{len(bad) - 2} unreadable" in open_data(config.data).train.describe(), (
        "all but the two whose header is sound"
    )
    shown = one_epoch(config)
    assert time.perf_counter() - started < 20
    assert len(shown) == 50
    assert sorted(listed(out)) == sorted(f"{folder}/bad/{name}" for name in bad)
    for path, reason in listed(out).items():
        assert bad[os.path.basename(path)] in reason.lower(), path
    source = open_data(config.data).train
    assert not {source.path(index) for index in shown} & set(listed(out)), "none of them is shown"


@pytest.mark.parametrize("more", [[], ["data.augment_on=device"], ["data.cache=ram"]])
def test_a_pass_over_all_images_leaves_out_unreadable_ones(more: list[str], tmp_path: Path) -> None:
    """A replacement would be in the parts of two ranks, which add their results by index."""
    folder = tmp_path / "images"
    make_photographs(folder, 20)
    (folder / "a.jpg").write_bytes(b"no image")
    config = config_for(folder, tmp_path / "out", *more)
    feed = DataModule(config, open_data(config.data), World(), CPU)
    source = feed.train_source
    bad = [i for i in range(len(source)) if source.path(i).endswith("a.jpg")]
    seen = torch.cat([batch.index for batch in feed.iterate_all()]).tolist()
    assert seen == [i for i in range(len(source)) if i not in bad]
    assert len(one_epoch(config)) == 20, "replaced in training"


def test_one_per_cent_truncated_copies(tmp_path: Path) -> None:
    folder, out = tmp_path / "images", tmp_path / "out"
    photographs = make_photographs(folder, 297)
    cut = [folder / f"copy_{number}.jpg" for number in range(3)]
    for number, path in enumerate(cut):
        content = photographs[number].read_bytes()
        path.write_bytes(content[: len(content) // 2 + 50 * number])
    config = config_for(folder, out, "data.max_unreadable=0.01", "data.num_workers=2")
    one_epoch(config)
    assert sorted(listed(out)) == sorted(map(str, cut))

    too_strict = config_for(
        folder, tmp_path / "out2", "data.max_unreadable=0.009", "data.num_workers=2"
    )
    with pytest.raises(UserError, match=r"3 of 300 images \(1.00%\) cannot be read"):
        one_epoch(too_strict)


def test_what_the_headers_say_stops_a_run_before_its_first_batch(tmp_path: Path) -> None:
    """Four of 100: more than the three that are allowed by default."""
    folder, out = tmp_path / "images", tmp_path / "out"
    make_photographs(folder, 96)
    texts = [folder / f"text_{number}.jpg" for number in range(4)]
    for path in texts[:3]:
        path.write_bytes(b"no image")
    DataModule(
        config_for(folder, out), open_data(config_for(folder, out).data), World(), CPU
    ).close()
    assert not (out / "bad_files.txt").exists(), "listed when they are asked for"
    texts[3].write_bytes(b"no image")
    for more in (
        [],
        ["data.subset={count: 50, seed: 1}", "data.max_unreadable=0"],
        ["data.on_error=fail"],
    ):
        config = config_for(folder, out, *more)
        with pytest.raises(UserError, match=r"cannot (be )?read"):
            DataModule(config, open_data(config.data), World(), CPU)
    assert sorted(listed(out)) == sorted(map(str, texts))
    make_photographs(tmp_path / "sound", 20)
    config = config_for(tmp_path / "sound", out, f"data.val={folder}")
    with pytest.raises(UserError, match=r"4 of 100 images .*; all of them: .*/bad_files_val\.txt$"):
        DataModule(config, open_data(config.data), World(), CPU)


def test_training_on_dirty_data_finishes(tmp_path: Path) -> None:
    folder, out = tmp_path / "images", tmp_path / "out"
    make_photographs(folder / "sound", 31)
    bad = make_bad(folder / "bad")
    config = config_for(folder, out, "data.max_unreadable=0.3", "data.num_workers=2")
    task = Task(config, sources=open_data(config.data))
    started = time.perf_counter()
    train_loop(task)
    assert time.perf_counter() - started < 60
    assert task.steps_done == 4
    assert sorted(listed(out)) == sorted(f"{folder}/bad/{name}" for name in bad)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_read_that_never_ends_is_given_up(
    num_workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a dead network mount: the file is there, and opening it waits for ever."""
    folder, out = tmp_path / "images", tmp_path / "out"
    make_photographs(folder, 39)
    stuck = folder / "stuck.jpg"
    os.mkfifo(stuck)
    real_stat, real_open = os.stat, os.open

    def stat_as_file(path: Any, **more: Any) -> os.stat_result:
        return real_stat(folder / "0000.jpg" if str(path) == str(stuck) else path, **more)

    def open_and_wait(path: Any, flags: int, *more: Any, **named: Any) -> int:
        blocking = flags & ~os.O_NONBLOCK if str(path) == str(stuck) else flags
        return real_open(path, blocking, *more, **named)

    config = config_for(
        folder,
        out,
        "data.max_unreadable=0.1",
        f"data.num_workers={num_workers}",
        "data.read_timeout_s=0.3",
        "data.read_retries=1",
    )
    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", stat_as_file)
        patch.setattr(os, "open", open_and_wait)
        started = time.perf_counter()
        one_epoch(config)
        assert time.perf_counter() - started < 60  # and not for ever
        assert open_data(config.data).train.describe().endswith(" 1 unreadable")
    reason = "no answer from the file system within 0.3 s (tried 2 times)"
    assert listed(out) == {str(stuck): reason}
    while any(thread.is_alive() for thread in files._STUCK):  # those of this process may leave
        with open(stuck, "wb", buffering=0) as writer:
            writer.write(b"x")
        time.sleep(0.01)


@pytest.mark.parametrize(("loop", "num_workers"), [("train", 0), ("train", 2), ("evaluate", 0)])
def test_a_dead_disk_ends_a_run_at_once_and_is_named(
    loop: str, num_workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its images are not bad: none is replaced a hundred times, and none is listed."""
    folder, out = tmp_path / "images", tmp_path / "out"
    make_photographs(folder, 40)
    real_open, failed = os.open, []

    def fail(path: Any, flags: int, *more: Any, **named: Any) -> int:
        if str(path).startswith(str(folder)):
            failed.append(path)
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return real_open(path, flags, *more, **named)

    config = config_for(folder, out, "data.max_unreadable=1", f"data.num_workers={num_workers}")
    feed = DataModule(config, open_data(config.data), World(), CPU)
    monkeypatch.setattr(os, "open", fail)
    monkeypatch.setattr(files, "FIRST_PAUSE_S", 0.001)
    reason = r"last 5 reads failed.*\.jpg: input/output error \(tried 3 times\)$"
    with pytest.raises(UserError, match=reason):
        next(feed.train_batches(0) if loop == "train" else feed.labeled_samples())
    feed.close()
    assert len(failed) == (15 if num_workers == 0 else 0)
    assert not (out / "bad_files.txt").exists()


def test_a_disk_that_does_not_answer_the_scan_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_photographs(tmp_path / "images", 20)
    config = config_for(tmp_path / "images", tmp_path / "out")
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", _raise_stale)
        sources = open_data(config.data)
        assert len(sources.train.unreadable()) == 20
    assert len(one_epoch(config, sources)) == 20


def _raise_stale(*_: Any, **__: Any) -> int:
    raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))


def test_limits_on_encoded_images_are_set_by_the_config(tmp_path: Path) -> None:
    make_photographs(tmp_path, 10)
    size = (tmp_path / "0000.jpg").stat().st_size
    config = config_for(tmp_path, tmp_path / "out", f"data.max_bytes={size - 1}")
    with pytest.raises(BadImage, match=f"{size} bytes, more than data.max_bytes={size - 1}"):
        open_data(config.data).train[0]
    picture(1).save(tmp_path / "0001.jpg", progressive=True)
    config = config_for(tmp_path, tmp_path / "out", "data.max_scans=3")
    with pytest.raises(BadImage, match=r"scans, more than data\.max_scans=3"):
        open_data(config.data).train[1]
    assert open_data(config.data).train[0][0].shape == (20, 24, 3)


def test_patience_is_set_by_the_config(tmp_path: Path) -> None:
    make_photographs(tmp_path, 10)
    open_data(config_for(tmp_path, tmp_path, "data.read_timeout_s=7", "data.read_retries=5").data)
    assert Policy(7.0, 5, max_pixels=100_000_000) == files.POLICY
    open_data(config_for(tmp_path, tmp_path).data)
    assert Policy(60.0, 2, max_pixels=100_000_000) == files.POLICY


class Crashing(FileSource):
    """Files of which one kills the process that has read it, as a faulty decoder does."""

    def __init__(self, paths: list[Path], deadly: Path) -> None:
        self.files, self.deadly = [str(path) for path in paths], str(deadly)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        read_bytes(self.files[index])
        if self.files[index] == self.deadly:
            signal.signal(signal.SIGSEGV, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGSEGV)
        return np.zeros((20, 24, 3), dtype=np.uint8), -1

    def path(self, index: int) -> str:
        return self.files[index]


def test_a_crash_of_a_worker_names_the_file(tmp_path: Path) -> None:
    paths = make_photographs(tmp_path / "images", 40)
    config = config_for(tmp_path / "images", tmp_path / "out", "data.num_workers=2")
    sources = open_data(config.data)._replace(train=Crashing(paths, paths[17]))
    feed = DataModule(config, sources, World(), torch.device("cpu"))
    batches = feed.train_batches(0)
    said = rf"was killed by SIGSEGV; the last image it began to read: {re.escape(str(paths[17]))}$"
    try:
        with pytest.raises(RunError, match=said):
            list(batches)
    finally:
        feed.close()


class Deadly:
    """A map-style data set of which one item ends the process."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> np.ndarray:
        if index == 23:
            os._exit(9)
        return np.zeros((20, 24, 3), dtype=np.uint8)


@pytest.mark.slow  # torch looks after its workers every five seconds
def test_a_crash_in_a_data_set_of_the_users_names_the_item(tmp_path: Path) -> None:
    make_photographs(tmp_path / "images", 40)
    config = config_for(tmp_path / "images", tmp_path / "out", "data.num_workers=1")
    source = DatasetSource(Deadly(), "mine:Deadly")
    feed = DataModule(config, Sources(source, None), World(), torch.device("cpu"))
    try:
        with pytest.raises(RunError, match=r"ended with code 9; .* read: mine:Deadly\[23\]$"):
            list(feed.train_batches(0))
    finally:
        feed.close()


def test_a_file_that_is_mended_meanwhile_is_read_again(tmp_path: Path) -> None:
    """Nothing about a bad file is remembered by its reader: only the list is."""
    (tmp_path / "a.jpg").write_bytes(b"")
    make_photographs(tmp_path / "more", 10)
    source = open_data(config_for(tmp_path, tmp_path).data).train
    with pytest.raises(BadImage):
        source[0]
    (tmp_path / "a.jpg").write_bytes(encoded(5, "PNG"))
    expected = np.asarray(Image.open(tmp_path / "a.jpg"))
    assert np.array_equal(source[0][0], expected)
