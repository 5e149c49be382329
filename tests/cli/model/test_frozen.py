"""``selftask eval`` and ``features``: images are shown as the model expects, rows are right."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
import torchvision
from PIL import Image
from shown import shown
from torch import Tensor

import selftask
from page_blocks import write_files
from selftask.cli.main import main
from selftask.cli.model.load_model import open_frozen
from selftask.config.schema import Component
from selftask.evaluate import offline
from selftask.models.build import build_backbone
from selftask.models.weights import model_source
from selftask.models.weights.export import save_backbone

MEAN, STD = [0.4, 0.5, 0.6], [0.2, 0.25, 0.3]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A backbone as a run leaves it, which was shown 32 pixels of another mean and deviation."""
    torch.manual_seed(0)
    transforms = [
        {"name": "resize", "size": 40, "interpolation": "bilinear"},
        {"name": "center_crop", "size": 32},
        {"name": "normalize", "mean": MEAN, "std": STD},
    ]
    component = Component(name="small_resnet", args={"width": 8})
    architecture = {"name": component.name, "args": component.args}
    meta = {"architecture": architecture, "channels": 3, "transforms": transforms}
    return save_backbone(build_backbone(component), tmp_path_factory.mktemp("export"), meta)


@pytest.mark.parametrize(
    "name", ["timm:vit_tiny_patch16_224", "timm:resnet18", "torchvision:resnet18"]
)
def test_trained_models_see_images_as_their_library_shows_them(
    name: str, images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of timm's models, its ViTs among them, want another mean than ImageNet's."""

    def download(library: str, model: str) -> dict[str, Tensor]:
        return dict(build_backbone(Component(name=library, args={"model": model})).state_dict())

    monkeypatch.setattr(model_source, "download", download)
    frozen = open_frozen(name, [f"data={images}", "train.device=cpu"])
    library, _, model = name.partition(":")
    if library == "timm":
        settings = timm.data.resolve_model_data_config(timm.create_model(model))
        theirs = timm.data.create_transform(**settings, is_training=False)
    else:
        theirs = torchvision.models.get_model_weights(model).DEFAULT.transforms()
    path = images / "a" / "0.png"
    expected = theirs(Image.open(path))
    got = shown(frozen.config, path)
    assert got.shape == expected.shape
    assert (got - expected).abs().mean() < 0.02  # a level of 255 is 0.008 to 0.017 here
    mine = open_frozen(name, [f"data={images}", "train.device=cpu", "eval.transforms.1.size=64"])
    assert shown(mine.config, path).shape == (3, 64, 64), "what is asked for counts more"


def test_an_exported_file_sees_images_as_its_run_did(exported: Path, images: Path) -> None:
    frozen = open_frozen(str(exported), [f"data={images}", "train.device=cpu"])
    path = images / "b" / "1.png"
    picture = Image.open(path).resize((40, 51), Image.Resampling.BILINEAR).crop((4, 10, 36, 42))
    moments = [torch.tensor(values)[:, None, None] for values in (MEAN, STD)]
    pixels = torch.from_numpy(np.asarray(picture).copy()).permute(2, 0, 1) / 255
    assert (shown(frozen.config, path) - (pixels - moments[0]) / moments[1]).abs().mean() < 0.02


def test_a_loaded_model_takes_files_pictures_and_arrays(
    exported: Path, images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its input beside Pillow's own resize and crop, three images at a time."""
    monkeypatch.setattr("selftask.api.model._BATCH_SIZE", 3)
    model = selftask.load(exported)
    paths = [images / folder / f"{number}.png" for folder in ("b", "a") for number in (1, 0)]
    pictures = [Image.open(path).convert("RGB") for path in paths]
    actual = model.features(paths)
    for given in (pictures, [np.asarray(picture) for picture in pictures]):
        assert torch.equal(model.features(given), actual)
    moments = [torch.tensor(values)[:, None, None] for values in (MEAN, STD)]
    inputs = torch.stack([model.transform(path) for path in paths])
    for picture, seen in zip(pictures, inputs, strict=True):
        small = picture.resize((40, 51), Image.Resampling.BILINEAR).crop((4, 10, 36, 42))
        pixels = torch.from_numpy(np.asarray(small).copy()).permute(2, 0, 1) / 255
        assert (seen - (pixels - moments[0]) / moments[1]).abs().mean() < 0.02
    backbone = build_backbone(Component(name="small_resnet", args={"width": 8})).eval()
    backbone.load_state_dict(torch.load(exported))
    with torch.no_grad():
        torch.testing.assert_close(actual, backbone(inputs))
    assert actual.shape == (4, model.embed_dim) and not model.backbone.training
    assert model.features([]).shape == (0, model.embed_dim)
    torch.testing.assert_close(model.bfloat16().features(paths), actual, rtol=0.02, atol=0.02)


def test_features_are_those_of_the_rows_beside_them(
    exported: Path, images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "features"
    words = [f"data={images}", f"out={out}", "data.max_unreadable=1", "data.num_workers=0"]
    assert main(["features", str(exported), *words, "train.device=cpu"]) == 0
    assert f"{out}: 4 images, " in capsys.readouterr().out
    features = np.load(out / "features.npy", mmap_mode="r")
    with (out / "images.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [Path(row["path"]).relative_to(images).as_posix() for row in rows] == [
        "a/0.png",
        "a/1.png",
        "b/0.png",
        "b/1.png",
    ], "the broken one has no row"
    assert [row["label"] for row in rows] == ["0", "0", "1", "1"]
    frozen = open_frozen(str(exported), [f"data={images}", "train.device=cpu"])
    for row, given in zip(rows, features, strict=True):
        with torch.no_grad():
            expected = frozen.backbone(shown(frozen.config, Path(row["path"]))[None])[0]
        assert np.allclose(given, expected.numpy(), atol=1e-5)
    facts = json.loads((out / "features.json").read_text())
    assert facts["model"] == str(exported) and facts["transforms"][1]["size"] == 32
    named = [facts["classes"][int(row["label"])] for row in rows]
    assert named == [Path(row["path"]).parent.name for row in rows]
    assert main(["features", str(exported), *words]) == 2
    assert "features.npy exists already" in capsys.readouterr().err


def test_a_parquet_file_has_the_rows_of_the_folder(
    exported: Path,
    images: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    words = [f"data={images}", "data.max_unreadable=1", "data.num_workers=0", "train.device=cpu"]
    words += ["layers=[1,-1]"]
    monkeypatch.setattr(offline, "_BATCH_SIZE", 3)
    for out in ("folder", "deep/rows.parquet"):
        assert main(["features", str(exported), *words, f"out={tmp_path / out}"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].endswith("rows.parquet: 4 images, 32 features")
    table = parquet.read_table(tmp_path / "deep" / "rows.parquet")
    with (tmp_path / "folder" / "images.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert table["path"].to_pylist() == [row["path"] for row in rows]
    assert table["label"].to_pylist() == [int(row["label"]) for row in rows]
    assert table.column_names[2:] == ["feature_layer1", "feature_layer3"]
    for name in table.column_names[2:]:
        expected = np.load(tmp_path / "folder" / f"{name.replace('feature', 'features')}.npy")
        assert np.array_equal(np.array(table[name].to_pylist()), expected)
    assert main(["features", str(exported), f"out={tmp_path / 'deep/rows.parquet'}"]) == 2
    assert "rows.parquet exists already" in capsys.readouterr().err
    facts = json.loads((tmp_path / "folder" / "features.json").read_text())
    assert json.loads(table.schema.metadata[b"selftask"]) == facts and facts["classes"] == [
        "a",
        "b",
    ]


@pytest.mark.parametrize("word", ["rank=true", "clusters=2"])
def test_what_needs_a_folder_is_refused_for_a_parquet_file(
    word: str, exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["features", str(exported), f"out={tmp_path / 'rows.parquet'}", word]) == 2
    assert "clusters and rank write into a folder; give out=DIR" in capsys.readouterr().err


def test_parts_of_the_images_make_the_whole(exported: Path, images: Path, tmp_path: Path) -> None:
    """As several processes with a part each write them, to folders of their own."""
    results: dict[str, dict[str, list[float]]] = {"whole": {}, "parts": {}}
    for out, more in (
        ("whole", []),
        *((f"part{k}", [f"data.subset={{part: {k}, of: 2}}"]) for k in range(2)),
    ):
        words = [f"data={images}", f"out={tmp_path / out}", "data.max_unreadable=1"]
        words += ["data.num_workers=0", "train.device=cpu", *more]
        assert main(["features", str(exported), *words]) == 0
        with (tmp_path / out / "images.csv").open(newline="") as file:
            paths = [row["path"] for row in csv.DictReader(file)]
        rows = np.load(tmp_path / out / "features.npy")
        kept = results["whole" if out == "whole" else "parts"]
        assert not kept.keys() & set(paths) and 0 < len(paths) == len(rows)
        kept.update({path: row.tolist() for path, row in zip(paths, rows, strict=True)})
    assert results["whole"].keys() == results["parts"].keys()
    assert all(
        results["parts"][p] == pytest.approx(row, abs=1e-5) for p, row in results["whole"].items()
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["out=x"], "needs a run or model before any key=value"),
        (["MODEL"], "needs out=DIR"),
        (["MODEL", "out=x.csv"], "out=x.csv: expected a folder, or one table FILE.parquet"),
        (["MODEL", "out=x", "data.val=y"], "data.val: features reads data= only"),
        (["MODEL", "out=x", "dat=y"], "features: there is no 'dat'; did you mean 'data'?"),
        (["MODEL", "out=x", "train.batch_size=8"], "features: there is no 'train.batch_size'"),
        (["nowhere", "out=x"], "nowhere: there is no such file or run"),
    ],
)
def test_what_features_refuses(
    words: list[str],
    message: str,
    exported: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["features", *(word.replace("MODEL", str(exported)) for word in words)]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["knn", "k=[]"], "knn.k=[]: one or more are expected"),
        (["knn", "k=[5, 0]"], "eval.evaluations.knn.k=[5, 0]: must be at least 1"),
        (["knn", "temperature=0"], "eval.evaluations.knn.temperature=0: must be above 0"),
        (
            ["knn", "temprature=1"],
            "there is no 'temprature'; did you mean 'temperature'?",
        ),
        (["knn", "weight=none"], "eval knn: there is no 'weight'; did you mean 'weights'?"),
        (["knn", "weights=none"], "weights=none: is for timm:NAME and torchvision:NAME"),
        (["linear", "lr=0.1"], "eval linear: there is no 'lr'; known: data, eval, few_labels"),
        (["linear", "optimizer.lr=1"], "eval linear: there is no 'optimizer.lr'; known: data"),
        (["knn", "train.precision=bfloat16"], "eval knn: there is no 'train.precision'"),
        (["linear", "few_labels=[0]"], "few_labels=[0]: must be at least 1"),
        (["linear", "weight_decay=[]"], "weight_decay=[]: one or more are expected"),
        (["linear", "repeats=0"], "repeats=0: must be at least 1"),
    ],
)
def test_what_eval_refuses(
    words: list[str],
    message: str,
    exported: Path,
    images: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["eval", words[0], str(exported), f"data={images}", *words[1:]]) == 2
    assert message in capsys.readouterr().err


def test_eval_finds_an_evaluation_by_import(
    exported: Path,
    images: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert write_files("evaluation", tmp_path) == ["centroid.py"]
    monkeypatch.chdir(tmp_path)
    words = [f"data={images}", "data.max_unreadable=1", f"data.val={images}", "import=[centroid]"]
    assert main(["eval", "centroid", str(exported), *words, "power=0.5"]) == 0
    row = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert 0.5 <= row["centroid_top1"] <= 1  # two images of each class, tested on themselves


def test_eval_computes_with_the_threads_asked_for(exported: Path, images: Path) -> None:
    before = torch.get_num_threads()
    try:
        words = [f"data={images}", "k=[1]", f"train.threads={before + 1}"]
        assert main(["eval", "knn", str(exported), *words]) == 0
        assert torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)


def test_a_folder_that_cannot_be_written_to_costs_the_copy_and_not_the_numbers(
    exported: Path, images: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (exported.parent / "evaluations.jsonl").mkdir()
    words = ["knn", str(exported.parent), f"data={images}", "data.max_unreadable=1", "k=[1]"]
    try:
        assert main(["eval", *words]) == 0
    finally:
        (exported.parent / "evaluations.jsonl").rmdir()
    printed = capsys.readouterr()
    assert "knn_top1" in json.loads(printed.out.splitlines()[-1])
    assert "printed only, not kept: " in printed.err


def test_eval_of_an_exported_file(
    exported: Path, images: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [images / folder / f"{number}.png" for folder in ("a", "b") for number in (0, 1)]
    frozen = open_frozen(str(exported), [f"data={images}", "train.device=cpu"])
    with torch.no_grad():
        rows = frozen.backbone(torch.stack([shown(frozen.config, path) for path in paths]))
    cosine = torch.nn.functional.normalize(rows, dim=1) @ torch.nn.functional.normalize(rows).T
    nearest = cosine.fill_diagonal_(-2).argmax(dim=1)  # without data.val, of the others
    expected = float((nearest // 2 == torch.arange(4) // 2).float().mean())

    words = [
        "knn",
        str(exported),
        f"data={images}",
        "data.max_unreadable=1",
        "k=[1]",
        "train.device=cpu",
    ]
    assert main(["eval", *words]) == 0
    printed = capsys.readouterr().out.splitlines()
    counts = {"train_images": 4, "test_images": 4, "classes": 2, "chance": 0.5}
    row = json.loads(printed[-1])
    assert row.pop("knn_top1_low") <= row["knn_top1"] <= row.pop("knn_top1_high")
    assert row == {"knn_top1": expected, **counts}
    assert (
        "4 images, each tested against the others; 2 classes ('a', 'b'); chance 0.5" in printed[-2]
    )
