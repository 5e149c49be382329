"""``selftask.evaluate`` beside the command, and ``selftask.Predictor`` beside its parts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import selftask
import tiny
from selftask.checkpoint.rotation import checkpoints, step_of
from selftask.cli.main import main
from selftask.errors import UserError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of SimCLR and a classifier, trained on a tree of images with four classes."""
    folder = tmp_path_factory.mktemp("models")
    draws = np.random.default_rng(0)
    for number, name in enumerate(("bee", "cat", "dog", "elk")):
        (folder / "images" / name).mkdir(parents=True)
        for row in range(8):
            tiles = draws.integers(0, 60, (4, 4, 3)) + 60 * number
            pixels = np.kron(tiles, np.ones((8, 8, 1)))
            Image.fromarray(pixels.astype(np.uint8)).save(folder / f"images/{name}/{row}.png")
    for method in ("simclr", "supervised"):
        words = tiny.overrides(method, folder, method, f"data={folder / 'images'}", "data.val=null")
        assert main(["train", f"{method}/digits", *words]) == 0
    return folder


def command(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["eval", *words]) == 0
    row: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return row


@pytest.mark.parametrize(
    ("name", "fields"), [("knn", {"k": [3, 5]}), ("linear", {}), ("spectrum", {"last": 8})]
)
def test_python_and_the_command_agree(
    name: str, fields: dict[str, Any], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By address, and for the loaded model; both append to the file of the run."""
    run, data = folder / "simclr", f"{tiny.digits_file(folder)}"
    val = f"{tiny.digits_file(folder, 'val.npz', 100, 160)}"
    words = [f"{key}={value}" for key, value in fields.items()]
    expected = command(capsys, name, str(run), f"data={data}", f"data.val={val}", *words)
    kept = run / "evaluations.jsonl"
    lines = kept.read_text().splitlines()
    row = selftask.evaluate(run, name, data=data, data_val=val, **fields)
    assert row == pytest.approx(expected, rel=1e-7)
    assert json.loads(lines[-1])["evaluation"] == name
    added = kept.read_text().splitlines()[len(lines) :]
    facts = {"date", "step", "evaluation", "overrides", "image_scores"}
    facts |= {"options", "model_digest", "data_digests"}
    assert [{k: v for k, v in json.loads(x).items() if k not in facts} for x in added] == [expected]
    of_model = selftask.evaluate(selftask.load(run), name, data=data, data_val=val, **fields)
    assert of_model == pytest.approx(expected, rel=1e-7)


def test_random_numbers_of_the_caller_stay_the_same(folder: Path) -> None:
    """Random weights are drawn anew by each call."""
    words = {"data": str(folder / "images"), "k": [3]}
    before = torch.get_rng_state()
    selftask.evaluate(folder / "simclr", **words)
    selftask.evaluate(selftask.load(folder / "simclr"), **words)
    assert torch.equal(torch.get_rng_state(), before)
    first, second = (selftask.load("timm:resnet10t", weights="none") for _ in range(2))
    assert not torch.equal(*(model.backbone.conv1[0].weight for model in (first, second)))


def test_data_sets_are_data(folder: Path, forget_names: None) -> None:
    file = tiny.digits_file(folder)
    arrays = np.load(file)

    class Pairs(torch.utils.data.Dataset):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return len(arrays["labels"])

        def __getitem__(self, index: int) -> tuple[Any, int]:
            image = np.repeat(arrays["images"][index][..., None], 3, axis=2)
            return image, int(arrays["labels"][index])

    expected = selftask.evaluate(folder / "simclr", data=str(file), k=[5])
    assert selftask.evaluate(folder / "simclr", data=Pairs(), k=[5]) == pytest.approx(expected)


def test_weights_are_those_of_the_command(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file for a library's model, and a checkpoint of a run."""
    run, data = folder / "simclr", str(folder / "images")
    address = f"{run}@{step_of(checkpoints(run / 'checkpoints')[0])}"
    expected = command(capsys, "knn", address, f"data={data}", "k=[3]")
    assert selftask.evaluate(address, data=data, k=[3]) == pytest.approx(expected)
    small = {"image_size": 32, "weights": "none", "data": data, "k": [3]}
    assert selftask.evaluate("timm:resnet10t", **small)["test_images"] == 32


def test_predictions_are_those_of_the_parts(folder: Path) -> None:
    """Features of ``load``, cosines by hand, and the classifier of the checkpoint by hand."""
    run = folder / "supervised"
    model = selftask.load(run)
    predict = selftask.Predictor(run, neighbors=folder / "images", k=4)
    path = folder / "images/cat/3.png"
    found = predict(path)
    features = model.features([path])
    np.testing.assert_allclose(found.features, features[0], rtol=1e-5, atol=1e-6)
    files = sorted((folder / "images").rglob("*.png"))
    units = torch.nn.functional.normalize(model.features(files), dim=1)
    cosine, order = (units @ units[files.index(path)]).topk(4)
    assert [Path(name).name for name, _ in found.neighbors] == [files[i].name for i in order]
    assert Path(found.neighbors[0][0]).parent.name == "cat"
    assert [value for _, value in found.neighbors] == pytest.approx(cosine.tolist(), abs=1e-5)
    head = tiny.last_state(run)["model"]
    weight, bias = (
        next(v for k, v in head.items() if k.startswith("head") and k.endswith(end))
        for end in ("weight", "bias")
    )
    scores = (features[0] @ weight.T + bias).softmax(dim=0)
    assert found.label == ("bee", "cat", "dog", "elk")[int(scores.argmax())]
    assert found.score == pytest.approx(float(scores.max()), rel=1e-5)
    many = predict.predict([path, folder / "images/elk/0.png"])
    assert [name for name, _ in many[0].neighbors] == [name for name, _ in found.neighbors]
    assert many[1].neighbors[0][0].endswith("elk/0.png")


def test_without_classifier_and_neighbors_there_are_none(folder: Path) -> None:
    found = selftask.Predictor(selftask.load(folder / "simclr"))(np.zeros((40, 40, 3), np.uint8))
    assert (found.neighbors, found.label, found.score) == ([], None, None)
    again = selftask.Predictor(folder / "simclr/export/backbone.pt")(
        np.zeros((40, 40, 3), np.uint8)
    )
    np.testing.assert_allclose(again.features, found.features, rtol=1e-5, atol=1e-6)


def test_a_model_without_weights() -> None:
    model = selftask.Model(torch.nn.Flatten(), {"embed_dim": 12})
    images = torch.rand(3, 3, 2, 2)
    assert torch.equal(model.features(images), images.flatten(1))


def test_mistakes_are_told_in_one_line(folder: Path) -> None:
    run = folder / "simclr"
    with pytest.raises(UserError, match=r"no evaluation named 'kn'; did you mean 'knn'"):
        selftask.evaluate(run, "kn")
    with pytest.raises(UserError, match=r"eval knn: there is no 'kk'; did you mean 'k'"):
        selftask.evaluate(run, kk=[3])
    with pytest.raises(UserError, match="evaluate: weights is for a model by its name"):
        selftask.evaluate(selftask.load(run), weights="none", data=str(folder / "images"))
    with pytest.raises(UserError, match="robustness is a command only: selftask eval robustness"):
        selftask.evaluate(run, "robustness")
    with pytest.raises(UserError, match="no-such-run"):
        selftask.Predictor(folder / "no-such-run")
    with pytest.raises(UserError, match=r"missing\.jpg"):
        selftask.Predictor(run)(folder / "missing.jpg")
