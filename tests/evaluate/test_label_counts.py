"""What labels do not allow is refused before features are computed; what is odd is told."""

from __future__ import annotations

import json
import shutil
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import selftask
import tiny
from selftask.cli.main import main
from selftask.config.schema import Component
from selftask.data.loading.open_data import open_data
from selftask.errors import UserError
from selftask.evaluate import offline
from selftask.evaluate.features import Features
from selftask.evaluate.label_counts import LabelCounts, count_shared_images
from selftask.models.build import build_backbone
from selftask.models.weights.export import save_backbone
from selftask.run.run import run


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """8 images of class cat and 6 of dog below ``train``, 3 of each below ``val``."""
    root = tmp_path_factory.mktemp("images")
    draws = np.random.default_rng(0)
    for name, num in (("train/cat", 8), ("train/dog", 6), ("val/cat", 3), ("val/dog", 3)):
        (root / name).mkdir(parents=True)
        for number in range(num):
            pixels = draws.integers(0, 256, (32, 32, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / name / f"{number}.png")
    return root


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    normalize = {"name": "normalize", "mean": [0.5] * 3, "std": [0.25] * 3}
    architecture = {"name": "small_resnet", "args": {"width": 8}}
    meta = {"architecture": architecture, "channels": 3, "transforms": [normalize], "step": 7}
    folder = tmp_path_factory.mktemp("run") / "export"
    return save_backbone(build_backbone(Component(**architecture)), folder, meta)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["linear", "few_labels=[6,7,100]"],
            "few_labels: [7, 100]: class 'dog' has 6 training images; use at most 6",
        ),
        (["knn", "k=[3,15]"], "k: 15 neighbors are asked for, and there are 14 images"),
        (["knn", "k=[14]", "data.val=null"], "there are 13 images to choose from; use at most 13"),
        (
            ["knn", "k=[1]", "data={root}", "data.val=null"],
            "data: its classes are train, val: these are parts of a data set",
        ),
    ],
)
def test_refused_before_features_are_computed(
    words: list[str],
    message: str,
    images: Path,
    exported: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def compute(*_: object, **__: object) -> Features:
        raise AssertionError("features are computed")

    monkeypatch.setattr(offline, "iterate_in_order", compute)
    sets = [f"data={images / 'train'}", f"data.val={images / 'val'}", "train.device=cpu"]
    asked = [word.format(root=images) for word in words[1:]]
    assert main(["eval", words[0], str(exported), *sets, *asked]) == 2
    assert message in capsys.readouterr().err


class Floats:
    """A data set of six images with labels 0.5, 1.5, ..."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> tuple[np.ndarray, float]:
        return np.full((32, 32, 3), index, dtype=np.uint8), index + 0.5


@pytest.mark.parametrize(
    "words",
    [
        *(["knn", "k=[1]"], ["linear"], ["svm"], ["clusters"], ["linear", "protocol=mae"]),
        *(["robustness", "k=1"], ["retrieval"]),
    ],
    ids="_".join,
)
@pytest.mark.parametrize("nan", [False, True])
def test_labels_that_are_no_whole_numbers_are_refused(
    words: list[str],
    nan: bool,
    exported: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In one line. In a data set of Python they may have another use, and are no labels."""
    labels = np.full(6, np.nan) if nan else np.arange(6) + 0.5
    np.savez(tmp_path / "floats.npz", images=np.zeros((6, 32, 32, 3), np.uint8), labels=labels)
    sets = ["data=FLOATS", *([] if words[0] == "retrieval" else ["data.val=FLOATS"])]
    sets = [word.replace("FLOATS", str(tmp_path / "floats.npz")) for word in sets]
    assert main(["eval", words[0], str(exported), *sets, *words[1:]]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "floats.npz are float64; whole numbers or texts are expected" in line
    if words[0] in ("robustness", "retrieval"):
        return
    settings = {"protocol": "mae"} if "protocol=mae" in words else {}
    with pytest.raises(UserError, match="6 of 6 images have no label, or none that is a whole"):
        selftask.evaluate(exported, words[0], data=Floats(), data_val=Floats(), **settings)


def test_a_run_is_refused_before_it_begins(tmp_path: Path) -> None:
    val = f"data.val={tiny.digits_file(tmp_path, 'val.npz', 400, 430)}"
    config = tiny.config("simclr", tmp_path, "run", val, "eval.evaluations={knn: {k: [81]}}")
    with pytest.raises(UserError, match=r"eval\.evaluations\.knn\.k: 81 neighbors .* 80 images"):
        run(config, open_data(config.data))
    assert not (tmp_path / "run").exists()


def test_chance_is_among_the_classes_that_may_be_predicted(
    exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three classes are trained on, and two of them tested."""
    for name, classes in (("train", 3), ("val", 2)):
        labels = np.arange(12) % classes
        pixels = np.random.default_rng(classes).integers(0, 256, (12, 32, 32, 3), dtype=np.uint8)
        np.savez(tmp_path / f"{name}.npz", images=pixels, labels=labels)
    words = ["eval", "knn", str(exported), "k=[3]"]
    words += [f"data={tmp_path}/train.npz", f"data.val={tmp_path}/val.npz"]
    for more, expected in ([], 1 / 3), (["only_test_classes=true"], 1 / 2):
        assert main([*words, *more]) == 0
        *_, message, row = capsys.readouterr().out.splitlines()
        assert json.loads(row)["chance"] == pytest.approx(expected, abs=1e-8)
        assert f"chance {expected:.4g}," in message


def test_counts_chance_step_and_date_stand_beside_the_figures(
    images: Path, exported: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = exported.parent
    sets = [f"data={images / 'train'}", f"data.val={images / 'val'}", "train.device=cpu"]
    assert main(["eval", "knn", str(folder), *sets, "k=[3]"]) == 0
    *_, message, row = capsys.readouterr().out.splitlines()
    assert message == (
        "14 training and 6 test images; 2 classes ('cat', 'dog'); chance 0.5, "
        "most frequent class 0.5"
    )
    kept = json.loads((folder / "evaluations.jsonl").read_text().splitlines()[-1])
    assert kept["step"] == 7 and kept["chance"] == 0.5 and kept["train_images"] == 14
    assert abs((datetime.now().astimezone() - datetime.fromisoformat(kept["date"])).days) < 1
    assert json.loads(row).items() <= kept.items()


def test_several_models_have_a_line_each(
    images: Path, exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = shutil.copytree(exported.parent, tmp_path / "other")
    torch.manual_seed(3)
    state = {
        name: torch.rand_like(w.float()).to(w.dtype) for name, w in torch.load(exported).items()
    }
    torch.save(state, other / exported.name)
    sets = [f"data={images / 'train'}", f"data.val={images / 'val'}", "train.device=cpu", "k=[1]"]
    models = [str(exported), str(other / exported.name)]
    alone = []
    for model in models:
        assert main(["eval", "knn", model, *sets]) == 0
        alone.append(json.loads(capsys.readouterr().out.splitlines()[-1]))
    assert main(["eval", "knn", *models, *sets]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line[0] == "{"]
    assert rows == [{"model": m, **row} for m, row in zip(models, alone, strict=True)]


def test_images_that_are_in_both_sets_are_told(
    images: Path, exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copied = tmp_path / "copy"
    shutil.copytree(images / "val", copied)
    shutil.copy(images / "train/dog/3.png", copied / "dog/another_name.png")
    for val, message in ((images / "train", "14 of 14"), (copied, "1 of 7"), (images / "val", "")):
        sets = [f"data={images / 'train'}", f"data.val={val}", "train.device=cpu"]
        assert main(["eval", "knn", str(exported), *sets, "k=[1]"]) == 0
        warning = f"warning: {message} test images are also training images"
        assert (warning in capsys.readouterr().out) == bool(message)


def test_a_network_that_tells_nothing_apart_shares_no_images() -> None:
    same = Features(torch.ones(6, 3), torch.zeros(6, dtype=torch.int64), torch.arange(6))
    assert count_shared_images(same, same) == 0


def test_chance_is_that_of_known_classes() -> None:
    counts = LabelCounts.of_targets(np.array([0, 0, 2, -1]), np.array([2, 2, 2, 1]))
    assert counts.chance == 0.5 * 3 / 4  # class 1 was never seen in training
    assert counts.classes.tolist() == [0, 2]
    assert "3 training and 4 test images; 2 classes (0, 2)" in counts.describe()
    assert "most frequent class 0.75" in counts.describe()
