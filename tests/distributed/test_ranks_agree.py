"""Ranks that run different configs, code or images are refused before the first step."""

from __future__ import annotations

import os
import random
import socket
import sys
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import tiny
from ranks import run_ranks
from selftask.checkpoint import store
from selftask.config.load import load_config
from selftask.config.schema import Component, Config
from selftask.data import fingerprint
from selftask.data.fingerprint import check_same_on_all_ranks, sample_contents, sampled
from selftask.data.open_source import open_source
from selftask.errors import UserError
from selftask.task.rank_agreement import check_same_on_ranks

HOST = socket.gethostname()


def _message(config: Config) -> str:
    try:
        check_same_on_ranks(config)
    except UserError as error:
        return str(error)
    return ""


def _compare_configs(rank: int, folder: Path, words: list[list[str]]) -> list[str]:
    configs = [load_config("simclr/digits", tiny.overrides("simclr", folder))]
    configs += [
        load_config(
            "simclr/digits", tiny.overrides("simclr", folder, "run", *(own if rank else []))
        )
        for own in words
    ]
    return [_message(config) for config in configs]


def test_ranks_with_different_configs(tmp_path: Path) -> None:
    """The first keys that differ, with both values, on all ranks; settings of a node may differ."""
    (tmp_path / "elsewhere").mkdir()
    elsewhere = tiny.digits_file(tmp_path / "elsewhere")
    words = [
        ["optimizer.lr=0.123"],
        ["train.batch_size=8", "method.temperature=0.7", "train.seed=5", "train.epochs=9"],
        ["hooks.ema={}"],
        ["data.num_workers=1", "out=other", "launch.hang_timeout_s=9", "train.threads=2"],
        [f"data.path={elsewhere}", "data.cache=ram", "data.read_retries=0"],
    ]
    first, second = run_ranks(_compare_configs, 2, tmp_path, words)
    assert first == second
    same, rate, several, hook, machine, path = first
    lr = load_config("simclr/digits", tiny.overrides("simclr", tmp_path)).optimizer.to_dict()["lr"]
    assert same == machine == path == ""
    assert f"rank 1 on {HOST} has optimizer.lr 0.123, rank 0 has {lr};" in rate
    assert "train.batch_size 8, rank 0 has 16" in several
    assert "and 1 more; start every rank with the same command" in several
    assert "hooks.ema" in hook and "rank 0 has nothing" in hook


def _begin(rank: int, folder: Path) -> tuple[int, float, list[float]]:
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_PORT": 0}
    os.environ.update({name: str(number) for name, number in names.items()})
    os.environ["MASTER_ADDR"] = "localhost"  # not used: the process group is there
    task = tiny.task("simclr", folder)
    task.prepare()
    total = sum(float(p.detach().double().sum()) for p in task.base_model.parameters())
    task.close()
    return torch.initial_seed(), total, [random.random(), float(np.random.rand())]


def test_ranks_begin_with_equal_weights_and_draw_each_for_itself(tmp_path: Path) -> None:
    """Draws such as a user's dropout would be the same for the images of all ranks otherwise."""
    tiny.digits_file(tmp_path)
    (seed, total, draws), (other_seed, other_total, other_draws) = run_ranks(_begin, 2, tmp_path)
    assert total == other_total
    assert seed != other_seed and not set(draws) & set(other_draws)


def _compare_code(rank: int, folder: Path) -> list[str]:
    sys.path.insert(0, str(folder / str(rank)))
    import mine  # type: ignore[import-not-found]

    assert rank + 1 == mine.VALUE
    config = load_config("simclr/digits", [])
    messages = [_message(replace(config, imports=["mine"]))]
    if rank:
        (folder / "1" / "mine.py").write_text((folder / "0" / "mine.py").read_text())
    return [*messages, _message(replace(config, imports=["mine"]))]


def test_ranks_with_different_code(tmp_path: Path) -> None:
    """A plug-in that was edited on one node only; a file that one rank alone imports may differ."""
    for rank, value in enumerate((1, 2)):
        folder = tmp_path / str(rank)
        folder.mkdir()
        (folder / "mine.py").write_text(f"import only{rank}\nVALUE = {value}\n")
        (folder / f"only{rank}.py").write_text("")
    first, second = run_ranks(_compare_code, 2, tmp_path)
    assert first == second
    assert f"rank 1 on {HOST} has imported another mine.py than rank 0" in first[0]
    assert first[1] == ""


def _photographs(folder: Path, count: int) -> Path:
    draws = np.random.default_rng(0)
    folder.mkdir()
    for number in range(count):
        pixels = draws.integers(0, 256, (8, 8, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number:03}.png")
    return folder


def _compare_images(rank: int, folder: Path) -> str:
    source = open_source(Component(name="folder", args={"path": str(folder / str(rank))}))
    try:
        check_same_on_all_ranks(source, "data")
    except UserError as error:
        return str(error)
    return ""


def test_ranks_with_other_images_under_the_same_names(tmp_path: Path) -> None:
    for rank in (0, 1):
        _photographs(tmp_path / str(rank), 5)
    assert run_ranks(_compare_images, 2, tmp_path) == ["", ""]
    Image.new("RGB", (8, 8)).save(tmp_path / "1/003.png")
    first, second = run_ranks(_compare_images, 2, tmp_path)
    assert f"rank 0 on {HOST}: other images under the same names (1 of 5 compared: " in first
    assert "1/003.png" in second and "0/003.png" in first


@pytest.mark.parametrize("kind", ["folder", "list", "array", "webdataset", "lmdb", "hdf5"])
def test_a_replaced_image_changes_the_sample(kind: str, tmp_path: Path) -> None:
    """Of each kind of source that stores its images, and through a subset."""
    draws = np.random.default_rng(0)
    images = draws.integers(0, 256, (6, 8, 8, 3), dtype=np.uint8)
    changed = images.copy()
    changed[3, 4, 4] ^= 1
    samples = []
    for name, pixels in (("before", images), ("now", changed)):
        (tmp_path / name).mkdir()
        args = _stored(kind, tmp_path / name, pixels)
        samples.append(sample_contents(open_source(Component(name=kind, args=args))))
        part = open_source(Component(name=kind, args={**args, "subset": 1.0}))
        assert sample_contents(part) == samples[-1]
    before, now = samples
    assert [old == new for old, new in zip(before, now, strict=True)] == [i != 3 for i in range(6)]
    assert None not in before and len(set(before)) == 6


def _stored(kind: str, folder: Path, pixels: np.ndarray) -> dict[str, Any]:
    """Write images as a source of this kind; return its arguments."""
    if kind == "array":
        np.savez(folder / "x.npz", images=pixels)
        return {"path": str(folder / "x.npz")}
    if kind == "hdf5":
        h5py = pytest.importorskip("h5py")
        with h5py.File(folder / "x.h5", "w") as file:
            file["images"] = pixels
        return {"path": str(folder / "x.h5")}
    if kind == "lmdb":
        lmdb = pytest.importorskip("lmdb")
        with lmdb.open(str(folder / "x.lmdb")) as env, env.begin(write=True) as transaction:
            for number, image in enumerate(pixels):
                transaction.put(b"%03d" % number, image.tobytes())
        return {"path": str(folder / "x.lmdb"), "shape": [8, 8, 3]}
    for number, image in enumerate(pixels):
        Image.fromarray(image).save(folder / f"{number:03}.png")
    names = [f"{number:03}.png" for number in range(len(pixels))]
    if kind == "folder":
        return {"path": str(folder)}
    if kind == "webdataset":
        with tarfile.open(folder / "x.tar", "w") as tar:
            for name in names:
                tar.add(folder / name, name)
        return {"path": str(folder / "x.tar")}
    (folder / "x.txt").write_text("\n".join(names))
    return {"path": str(folder / "x.txt")}


def test_what_is_sampled(tmp_path: Path) -> None:
    """All of a small set, a few hundred of a large one; what cannot be read is not compared."""
    assert sampled(200) == list(range(200))
    million = sampled(1_000_000)
    assert 250 <= len(million) <= fingerprint.SAMPLED and million == sorted(set(million))
    assert million[-1] < 1_000_000 and np.histogram(million, 4, (0, 1_000_000))[0].min() > 30
    source = open_source(
        Component(name="folder", args={"path": str(_photographs(tmp_path / "a", 4))})
    )
    before = {**fingerprint.fingerprint(source), "contents": sample_contents(source)}
    (tmp_path / "a/002.png").unlink()
    now = {**before, "contents": sample_contents(source)}
    assert now["contents"][2] is None and fingerprint.differences(before, now) == []
    older = {key: value for key, value in before.items() if key != "contents"}
    assert fingerprint.differences(older, before) == []


def _state(step: int) -> dict[str, Any]:
    names = ("model", "method", "optimizer", "scaler", "clock", "hooks", "scalars")
    return {**{name: {} for name in names}, "meters": [], "rng": [], "metrics_bytes": step}


def _find_checkpoints(rank: int, folder: Path, steps: list[tuple[list[int], ...]]) -> list[Any]:
    """Save these steps in a folder of this rank, as if a disk showed different files to each."""
    answers: list[Any] = []
    for number, of_rank in enumerate(steps):
        own = folder / f"{number}_{rank}"
        own.mkdir()
        for step in of_rank[rank]:
            store.save(_state(abs(step)), own, max(step, 1), keep=9)
        try:
            newest = store.find("auto", own)
            answers.append(None if newest is None else newest[1].name)
        except UserError as error:
            answers.append(str(error))
    return answers


def test_ranks_that_see_different_checkpoints(tmp_path: Path) -> None:
    """All ranks refuse in one line, whichever of them lags; equal ones resume as before."""
    cases = [
        ([1, 2], [1, 2]),
        ([], []),
        ([1, 2], [2]),
        ([1, 2], [1]),
        ([1], []),
        ([], [1]),
        ([1], [-9]),
    ]
    first, second = run_ranks(_find_checkpoints, 2, tmp_path, cases)
    same, new, fewer, *others = first
    assert (same, new, fewer) == ("step_000000002.pt", None, "step_000000002.pt")
    assert second[:3] == first[:3]
    lagging, missing, ahead, changed = others
    assert f"is step_000000002.pt for rank 0 on {HOST}, and step_000000001.pt for rank 1" in lagging
    assert f"is step_000000001.pt for rank 0 on {HOST}, and none for rank 1" in missing
    assert f"is none for rank 0 on {HOST}, and step_000000001.pt for rank 1" in ahead
    assert f"is step_000000001.pt for rank 0 on {HOST}, and another step_000000001.pt" in changed
    assert all("\n" not in message for message in others)
    assert [message.partition(" is ")[2] for message in second[3:]] == [
        message.partition(" is ")[2] for message in others
    ]
