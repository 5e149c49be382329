"""Evaluations and meters that lack labels, class scores or classes say so."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from in_process import last_line, train
from PIL import Image

import tiny
from selftask.cli.main import main
from selftask.config.load import load_config
from selftask.data.loading.open_data import open_data
from selftask.errors import UserError
from selftask.evaluate.online import check_evaluations


@pytest.mark.parametrize("without", ["data", "data.val"])
def test_evaluations_without_labels_are_told(folder: Path, without: str) -> None:
    """Who gives data.val waits for its numbers."""
    val = f"data.val={tiny.digits_file(folder)}"
    knn = "eval.evaluations={knn: {}}"
    assert train(folder, val, f"{without}.labels=null", knn, "train.max_steps=1") == 0
    text = (folder / "run/log.txt").read_text()
    assert f"no knn while training: the images of {without} have no labels" in text
    assert "knn_top1" not in text


@pytest.mark.parametrize("some", ["data", "data.val"])
def test_images_of_which_some_have_labels_are_refused_before_training(
    tmp_path: Path, some: str
) -> None:
    """With eval.start, they were refused after hours."""
    images, labels = np.zeros((40, 8, 8, 3), dtype=np.uint8), np.arange(40) % 4
    np.savez(tmp_path / "all.npz", images=images, labels=labels)
    np.savez(tmp_path / "some.npz", images=images, labels=labels - 1)
    files = dict.fromkeys(("data", "data.val"), tmp_path / "all.npz")
    files[some] = tmp_path / "some.npz"
    words = [f"{key}={path}" for key, path in files.items()]
    config = load_config("simclr/digits", [*words, "eval.start=50%"])
    kind = {"data": "training", "data.val": "test"}[some]
    message = f"10 of 40 {kind} images have no label, and knn needs one for each image"
    with pytest.raises(UserError, match=message):
        check_evaluations(config, open_data(config.data))
    free = load_config("simclr/digits", [*words, "eval.evaluations={knn: null, spectrum: {}}"])
    check_evaluations(free, open_data(free.data))


def test_no_evaluations_without_validation_images() -> None:
    for more, expected in ([], True), (["data.val=null"], False):
        config = load_config("simclr/digits", more)
        assert config.eval.evaluations
        assert (check_evaluations(config, open_data(config.data)) is not None) == expected


@pytest.mark.parametrize("has_labels", [True, False])
def test_meters_without_labeled_images_are_told(tmp_path: Path, has_labels: bool) -> None:
    val = [f"data.val={tiny.digits_file(tmp_path)}"] if has_labels else []
    words = ["meters.accuracy={topk: [1]}", "train.max_steps=1", *val]
    words = tiny.overrides("supervised", tmp_path, "run", *words)
    assert main(["train", "supervised/digits", *words]) == 0
    text = (tmp_path / "run/log.txt").read_text()
    message = "meters (accuracy) measure nothing: there is no data.val"
    assert (message in text) == (not has_labels)
    assert ("test_accuracy_top_1" in tiny.rows(tmp_path / "run")[-1]) == has_labels


def test_meters_of_class_scores_need_a_method_that_gives_them(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = f"data.val={tiny.digits_file(folder)}"
    assert train(folder, "meters={accuracy: {}}", data) == 2
    assert "method.name=simclr gives none" in last_line(capsys)


def test_more_guesses_than_classes_are_told_before_the_first_epoch(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = f"data.val={tiny.digits_file(folder)}"
    words = tiny.overrides("supervised", folder, "run", "meters.accuracy.topk=[1,11]", data)
    assert main(["train", "supervised/digits", *words]) == 2
    expected = (
        "RUN FAILED at step 0 on rank 0: meters.accuracy.topk=[1, 11]: there are only 10 classes"
    )
    assert last_line(capsys) == expected


PLAIN = '''
import numpy as np

class Plain:
    """Stripes, wide or narrow: (image, label), and no `targets`."""
    def __len__(self):
        return 40
    def __getitem__(self, row):
        width = (2, 8)[row % 2]
        x = (np.arange(32) + row) // width % 2 * 255
        return np.broadcast_to(x[None, :, None], (32, 32, 3)).astype(np.uint8), row % 2

class WithTargets(Plain):
    """The same with `targets`."""
    targets = [row % 2 for row in range(40)]
'''


def test_labels_of_a_data_set_s_items_are_those_of_its_targets(folder: Path) -> None:
    """k-NN during training, and `eval knn` afterwards, with and without `targets`."""
    (folder / "plain.py").write_text(PLAIN)
    results = []
    for out in "Plain", "WithTargets":
        words = [f"data=plain:{out}", f"data.val=plain:{out}", "eval.evaluations={knn: {k: [3]}}"]
        more = tiny.overrides("simclr", folder, out, *words, "train.max_steps=2")
        assert main(["train", "simclr/digits", *more[1:]]) == 0
        assert "have no labels" not in (folder / out / "log.txt").read_text()
        assert main(["eval", "knn", out, "k=[3]", "trust=true"]) == 0
        rows = [row for row in tiny.rows(folder / out) if "knn_top1" in row]
        results.append([(row["step"], row["knn_top1"]) for row in rows])
    assert results[0] == results[1] and [step for step, _ in results[0]] == [0, 2]


def test_eval_of_a_run_on_other_images_tests_on_those(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The help says: without data.val, k-NN leaves each image out of its own neighbors."""
    val = tiny.digits_file(folder, "val.npz", 100, 130)
    assert train(folder, f"data.val={val}", "train.max_steps=1") == 0
    new = tiny.digits_file(folder, "new.npz", 200, 250)
    images = {}
    for words in (), (f"data={new}",), (f"data.path={new}",), (f"data={new}", f"data.val={val}"):
        assert main(["eval", "knn", "run", *words]) == 0
        row = json.loads(last_line(capsys))
        images[words[1:] or words] = row["train_images"], row["test_images"]
    assert list(images.values()) == [(80, 30), (50, 50), (50, 50), (50, 30)]
    assert main(["eval", "svm", "run", f"data={new}"]) == 2
    assert "data.val is missing" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "content", "key"),
    [
        ("a.csv", "path,lable\nx.png,3\n", "data.label_column"),
        ("a.csv", "path,Label\nx.png,3\n", "data.label_column"),
        ("a.jsonl", '{"path": "x.png", "labels": 3}\n', "data.label_column"),
        ("a.npz", "lables", "data.labels"),
        ("a.h5", "labelz", "data.labels"),
    ],
)
def test_a_misspelled_label_column_is_an_error_that_names_the_columns(
    tmp_path: Path, name: str, content: str, key: str
) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "x.png")
    images, labels = np.zeros((3, 8, 8, 3), np.uint8), np.arange(3)
    if name.endswith(".npz"):
        np.savez(tmp_path / name, images=images, **{content: labels})
    elif name.endswith(".h5"):
        with pytest.importorskip("h5py").File(tmp_path / name, "w") as file:
            file["images"], file[content] = images, labels
    else:
        (tmp_path / name).write_text(content)
    with pytest.raises(UserError) as error:
        open_data(load_config("simclr/images", [f"data={tmp_path / name}"]).data)
    message = str(error.value)
    typo = next(w for w in ("lables", "labelz", "labels", "lable", "Label") if w in content)
    assert message.startswith(f"{key}: ") and f"but {typo!r} (of: " in message
    assert message.count("\n") == 0
    for more, has_labels in (f"{key}=null", False), (f"{key}={typo}", True):
        words = [f"data={tmp_path / name}", more]
        source = open_data(load_config("simclr/images", words).data).train
        assert (source.labels is not None) == has_labels
