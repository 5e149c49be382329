"""``selftask eval`` of features in files: as of the model that made them, without loading all."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import numpy as np
import pytest
from numpy.random import default_rng

import tiny
from selftask.cli.main import main
from selftask.evaluate import feature_files, features, knn, nearest


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A network, and its features of 120 and of 60 digits."""
    home = tmp_path_factory.mktemp("files")
    tiny.train("simclr", home, "run", "train.max_steps=2")
    for name, first, last in (("train", 0, 120), ("val", 120, 180)):
        tiny.digits_file(home, f"{name}.npz", first, last)
        words = [f"data={home}/{name}.npz", f"out={home}/{name}", "train.device=cpu"]
        assert main(["features", str(home / "run"), *words, "data.num_workers=0"]) == 0
    return home


def row(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, float]:
    capsys.readouterr()
    assert main(["eval", *words]) == 0, capsys.readouterr().err
    last: dict[str, float] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return last


@pytest.mark.parametrize("leaves_one_out", [False, True])
@pytest.mark.parametrize(
    "words",
    [["knn", "k=[3,7]"], ["spectrum", "last=6"], ["linear", "iterations=9"], ["clusters", "k=4"]],
)
def test_figures_are_those_of_the_model(
    words: list[str],
    leaves_one_out: bool,
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """k-NN and spectrum never read more than a block at once."""
    name, *options = words
    if name == "linear" and leaves_one_out:
        assert main(["eval", name, str(home / "train")]) == 2
        assert "data.val is missing" in capsys.readouterr().err
        return
    sets = {"data": f"{home}/train", "data.val": f"{home}/val"}
    if leaves_one_out:
        del sets["data.val"]
    images = [f"{key}={path}.npz" for key, path in sets.items()]
    expected = row(capsys, name, str(home / "run"), *images, *options, "train.device=cpu")
    monkeypatch.setattr(nearest, "_BLOCK", 32)
    monkeypatch.setattr(knn, "QUERIES", 16)
    monkeypatch.setattr(features, "_ROWS", 32)
    read, inner = [], features.FileRows.__getitem__

    def recorded(rows: features.FileRows, which: slice) -> object:
        block = inner(rows, which)
        read.append(len(block))
        return block

    monkeypatch.setattr(features.FileRows, "__getitem__", recorded)
    val = [f"data.val={home}/val"] if "data.val" in sets else []
    actual = row(capsys, name, str(home / "train" / "features.npy"), *val, *options)
    assert actual == pytest.approx(expected, rel=1e-6)
    if name == "knn":
        assert actual == expected and max(read) == 32
    if name == "spectrum":
        assert max(read) == (60 if val else 120), "the pairs of the uniformity"
        assert read.count(32) >= (2 if val else 6)


def test_classes_are_matched_by_name(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Features of some of the classes, numbered anew, as a folder of them has."""
    draws = default_rng(0)
    centers = np.eye(4, 8, dtype=np.float32) * 9
    for name, classes, numbers in (("all", "abcd", [0, 1, 2, 3]), ("two", "bd", [1, 3])):
        folder = tmp_path / name
        folder.mkdir()
        labels = np.arange(40) % len(classes)
        rows = centers[numbers][labels] + draws.normal(0, 1, (40, 8)).astype(np.float32)
        np.save(folder / "features.npy", rows.astype(np.float32))
        lines = [f"{n}.png,{label}" for n, label in enumerate(labels)]
        (folder / "images.csv").write_text("\n".join(["path,label", *lines]))
        (folder / "features.json").write_text(json.dumps({"classes": list(classes)}))
    words = [str(tmp_path / "all"), f"data.val={tmp_path}/two", "k=[5]"]
    assert row(capsys, "knn", *words)["knn_top1"] == 1.0
    assert main(["eval", "knn", str(tmp_path / "two"), f"data.val={tmp_path}/all", "k=[5]"]) == 2
    assert "the training features have no class 'a'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["knn", "train", "k=[120]"], "k: 120 neighbors are asked for, and there are 119"),
        (["knn", "train", "eval.flip=true"], "eval.flip=true: has no effect on features in files"),
        (
            ["knn", "train", "data.val=none"],
            "none/features.npy: there is no such file",
        ),
        (["knn", "train", "j=1"], "there is no 'j'"),
        (["linear", "train", "protocol=mae"], "are features, and eval probe takes a run or model"),
        (["knn", "short"], "images.csv: has 2 images, and features.npy 3"),
        (["knn", "double"], "is float64 of shape (3, 2); expected float32 (images, features)"),
        (["knn", "nan", "k=[1]"], "features are not finite"),
        (["knn", "large", "k=[1]"], "features are not finite, or too large"),
        (["knn", "one"], "k: there are no other images to choose neighbors from"),
        (["knn", "float"], "float/images.csv:2: label '0.5' is not the number of a class"),
        (
            ["knn", "killed"],
            "killed: has no features.npy; if `selftask features` was killed, repeat",
        ),
        (
            ["knn", "layers"],
            "layers: has features of layers; give one file, layers/features_layer2",
        ),
        (["knn", "unlabeled"], "knn, features: 3 of 3 images have no label"),
    ],
)
def test_mistakes_are_one_message(
    words: list[str],
    message: str,
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(home)
    values = np.arange(6, dtype=np.float32).reshape(3, 2)
    for name, rows, count, label in (
        ("short", values, 2, "0"),
        ("double", values.astype(np.float64), 3, "0"),
        ("nan", values * np.nan, 3, "0"),
        ("large", values * np.float32(1e20), 3, "0"),
        ("one", values[:1], 1, "0"),
        ("float", values, 3, "0.5"),
        ("unlabeled", values, 3, ""),
        ("killed", values, 3, "0"),
        ("layers", values, 3, "0"),
    ):
        Path(name).mkdir(exist_ok=True)
        np.save(f"{name}/features.npy", rows)
        Path(f"{name}/images.csv").write_text("path,label\n" + f"a.png,{label}\n" * count)
    Path("killed/features.npy").rename("killed/features.npy.part")
    Path("layers/features.npy").rename("layers/features_layer2.npy")
    assert main(["eval", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_full_disk_is_one_message_and_leaves_no_part(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def append(self: object, rows: np.ndarray) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(feature_files._NpyFile, "append", append)
    out = tmp_path / "features"
    words = [f"data={home}/val.npz", f"out={out}", "train.device=cpu", "data.num_workers=0"]
    assert main(["features", str(home / "run"), *words]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    expected = f"error: out={out}: the features could not be written: "
    assert last.startswith(expected) and last.endswith("No space left on device")
    assert not [*out.iterdir()]
