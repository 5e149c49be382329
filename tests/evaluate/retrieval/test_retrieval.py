"""``selftask eval retrieval`` on small benchmarks with copies that are known."""

from __future__ import annotations

import csv
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.io
import torch
from PIL import Image

from selftask.cli.main import main
from selftask.config.schema import Component
from selftask.errors import UserError
from selftask.evaluate.retrieval.buildings import read_instre, read_truth
from selftask.models.build import build_backbone
from selftask.models.weights.export import save_backbone

SIZES = ((40, 30), (30, 44), (36, 36))


def picture(seed: int) -> Image.Image:
    """A smooth picture, whose size depends on the seed."""
    draws = np.random.default_rng(seed)
    small = Image.fromarray(draws.integers(0, 256, (6, 6, 3), dtype=np.uint8))
    return small.resize(SIZES[seed % len(SIZES)], Image.Resampling.BICUBIC)


def save(path: Path, image: Image.Image) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small ResNet with random weights, exported."""
    torch.manual_seed(0)
    component = Component(name="small_resnet", args={"width": 8})
    meta = {
        "architecture": {"name": component.name, "args": component.args},
        "channels": 3,
        "transforms": [{"name": "normalize", "stats": "half"}],
        "step": 7,
    }
    return save_backbone(build_backbone(component), tmp_path_factory.mktemp("model"), meta)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight classes of a picture and its copy, pixel by pixel."""
    root = tmp_path_factory.mktemp("pairs")
    for number in range(8):
        for name in ("a", "b"):
            save(root / f"class_{number}" / f"{name}.png", picture(number))
    return root


def printed_row(capsys: pytest.CaptureFixture[str], model: Path, *words: str) -> dict[str, float]:
    """The JSON line of the command."""
    capsys.readouterr()
    assert main(["eval", "retrieval", str(model), *words, "train.device=cpu"]) == 0
    row: dict[str, float] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return row


WAYS = (
    [],
    ["pool=mean"],
    ["pool=gem", "p=4", "scales=[1,0.7071,0.5]"],
    ["pool=rmac", "levels=2", "side=32"],
    ["pool=gem", "whiten=PAIRS", "whiten_dim=5"],
    ["pool=rmac", "whiten=PAIRS"],
)


@pytest.mark.parametrize("words", WAYS, ids=" ".join)
def test_copies_are_found(
    words: list[str], model: Path, pairs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [word.replace("PAIRS", str(pairs)) for word in words]
    row = printed_row(capsys, model, f"data={pairs}", *words, "k=[1,5]")
    assert row["retrieval_map"] == row["retrieval_precision_at_1"] == 1.0
    assert row["retrieval_precision_at_5"] == 1.0, "the one copy is the last that can be found"
    assert (row["queries"], row["database"]) == (16, 16)
    assert row["dimensions"] == (5 if "whiten_dim=5" in words else row["dimensions"])


def test_chance_without_copies(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Classes that mean nothing: far from 1, so the copies of the other test do matter."""
    for number in range(16):
        save(tmp_path / f"class_{number // 2}" / f"{number}.png", picture(number))
    assert printed_row(capsys, model, f"data={tmp_path}")["retrieval_map"] < 0.6


def test_a_network_that_tells_nothing_apart_finds_nothing(
    pairs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    component = Component(name="small_resnet", args={"width": 8})
    backbone = build_backbone(component)
    with torch.no_grad():
        for name, value in backbone.named_parameters():
            value.fill_(1.0 if name.endswith("bias") else 0.0)
    meta = {"architecture": {"name": component.name, "args": component.args}, "channels": 3}
    dead = save_backbone(backbone, tmp_path, {**meta, "transforms": [{"name": "normalize"}]})
    row = printed_row(capsys, dead, f"data={pairs}")
    assert row["retrieval_map"] == pytest.approx(1 / 15), "the copy comes last of 15"


@pytest.fixture
def oxford(tmp_path: Path) -> Path:
    """Two queries; of each an easy copy, a hard crop and a junk copy; three others."""
    names = []
    for number in range(2):
        whole = picture(3 * number + 2).resize((60, 60))
        save(tmp_path / "jpg" / f"query_{number}.png", whole)
        save(tmp_path / "jpg" / f"easy_{number}.png", whole.crop((10, 10, 50, 50)))
        save(tmp_path / "jpg" / f"hard_{number}.png", whole.crop((12, 8, 52, 48)))
        save(tmp_path / "jpg" / f"junk_{number}.png", whole.crop((10, 10, 50, 50)))
        names += [f"easy_{number}", f"hard_{number}", f"junk_{number}"]
    for number in range(3):
        save(tmp_path / "jpg" / f"other_{number}.png", picture(20 + number))
        names.append(f"other_{number}")
    gnd = [
        {
            "bbx": [np.float64(10.0), 10.0, 50.0, 50.0],
            "easy": np.array([3 * n]),
            "hard": np.array([[3.0 * n + 1]]),
            "junk": np.array([3 * n + 2], dtype=np.int32),
        }
        for n in range(2)
    ]
    truth = {"imlist": names, "qimlist": ["query_0", "query_1"], "gnd": gnd}
    with (tmp_path / "gnd_small.pkl").open("wb") as file:
        pickle.dump(truth, file, protocol=2)
    return tmp_path


def test_revisited_oxford(oxford: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [f"data={oxford / 'jpg'}", f"truth={oxford / 'gnd_small.pkl'}"]
    row = printed_row(capsys, model, *words)
    assert row["retrieval_easy_map"] == 1.0, "the cropped query has the pixels of the easy one"
    assert row["retrieval_easy_precision_at_10"] == 1.0
    assert 0 < row["retrieval_hard_map"] <= row["retrieval_medium_map"] <= 1
    assert (row["queries"], row["database"]) == (2, 9)
    whole = printed_row(capsys, model, *words, "crop_queries=false")
    assert whole["retrieval_medium_map"] < 1
    kept = (model.parent / "evaluations.jsonl").exists()
    assert not kept, "a file is no run"


def test_original_oxford(oxford: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Right are the images in `ok`; the crop of the hard one is a bit off, that of junk not."""
    with (oxford / "gnd_small.pkl").open("rb") as file:
        truth = pickle.load(file)
    for row in truth["gnd"]:
        row["ok"] = np.concatenate([row.pop("easy"), row.pop("hard").reshape(-1)])
    (oxford / "gnd_original.pkl").write_bytes(pickle.dumps(truth))
    words = [f"data={oxford / 'jpg'}", "k=[1]"]
    row = printed_row(capsys, model, *words, f"truth={oxford / 'gnd_original.pkl'}")
    both = printed_row(capsys, model, *words, f"truth={oxford / 'gnd_small.pkl'}")
    assert row["retrieval_map"] == both["retrieval_medium_map"]
    assert row["retrieval_precision_at_1"] == both["retrieval_medium_precision_at_1"]
    assert "retrieval_easy_map" not in row


def test_results_are_kept_with_a_run(
    pairs: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = printed_row(capsys, model.parent, f"data={pairs}", "pool=mean")
    file = model.parent / "evaluations.jsonl"
    kept = json.loads(file.read_text().splitlines()[-1])
    file.unlink()
    assert kept["evaluation"] == "retrieval" and kept["step"] == 7
    assert kept["overrides"][1] == "pool=mean" and row.items() <= kept.items()


def test_pickles_execute_nothing(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (tmp_path / "touched",))

    path = tmp_path / "gnd_evil.pkl"
    path.write_bytes(pickle.dumps({"imlist": ["a"], "qimlist": ["a"], "gnd": [Evil()]}))
    with pytest.raises(UserError, match="is no ground truth of Oxford or Paris"):
        read_truth(path)
    assert not (tmp_path / "touched").exists()
    wrong = {"bbx": [0, 0, 1, 1], "easy": [7], "hard": [], "junk": []}
    path.write_bytes(pickle.dumps({"imlist": ["a"], "qimlist": ["a"], "gnd": [wrong]}))
    with pytest.raises(UserError, match="easy holds no positions in imlist"):
        read_truth(path)
    path.write_bytes(b"\x80\x02no pickle")
    with pytest.raises(UserError, match="is no pickle that can be read"):
        read_truth(path)


def test_copydays(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Copies of 2001xx belong to 200100; those in `other` are of other pictures than they say."""
    for number in range(5):
        save(tmp_path / "original" / f"20{number}000.png", picture(number))
        save(tmp_path / "strong" / f"20{number}001.png", picture(number))
        save(tmp_path / "jpegqual" / "3" / f"20{number}012.png", picture((number + 1) % 5))
        save(tmp_path / "distractors" / f"flickr_{number}.png", picture(50 + number))
    row = printed_row(capsys, model, f"data={tmp_path}", "truth=copydays", "k=[1]")
    assert row["retrieval_strong_map"] == 1.0
    assert row["retrieval_jpegqual_3_map"] <= 0.25, "rank 2 at best, by trapezoids"
    assert (row["queries"], row["database"]) == (10, 10)


def instre_file(path: Path, queries: list[str], images: list[str], positives: Any) -> Path:
    """As MATLAB writes it: cells of names, and a struct with positives from 1."""
    gnd = np.zeros((1, len(positives)), dtype=[("ok", object)])
    for number, found in enumerate(positives):
        gnd[0, number]["ok"] = np.array([found], dtype=np.uint16)
    cells = {
        name: np.array([[*map(str, names)]], dtype=object)
        for name, names in (("qimlist", queries), ("imlist", images))
    }
    scipy.io.savemat(path, {**cells, "gnd": gnd})
    return path


def test_instre(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Query 0 finds its two copies; query 1 its copy at rank 2, by trapezoids (0 + 1 / 2) / 2."""
    images = [f"INSTRE-S1/{number:02}a/{number:03}.png" for number in range(6)]
    shown = (0, 0, 1, 2, 3, 4)
    for name, seed in zip(images, shown, strict=True):
        save(tmp_path / "images" / name, picture(seed))
    for number, seed in enumerate((0, 1)):
        save(tmp_path / "images" / "INSTRE-M" / f"q{number}.png", picture(seed))
    queries = ["INSTRE-M/q0.png", "INSTRE-M/q1.png"]
    words = [f"data={tmp_path / 'images'}", "k=[1]"]
    truth = instre_file(tmp_path / "gnd_instre.mat", queries, images, [[1, 2], [3]])
    row = printed_row(capsys, model, *words, f"truth={truth}")
    assert (row["retrieval_map"], row["retrieval_precision_at_1"]) == (1.0, 1.0)
    assert (row["queries"], row["database"]) == (2, 6)
    truth = instre_file(tmp_path / "other.mat", queries, images, [[1, 2], [4]])
    assert printed_row(capsys, model, *words, f"truth={truth}")["retrieval_map"] <= 0.625
    truth = instre_file(tmp_path / "wrong.mat", queries, images, [[1, 2], [7]])
    with pytest.raises(UserError, match=r"no ground truth of INSTRE .*no positions in imlist"):
        read_instre(truth)
    truth.write_bytes(b"no file of MATLAB" * 20)
    with pytest.raises(UserError, match="no ground truth of INSTRE"):
        read_instre(truth)


def test_a_table(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(6):
        save(tmp_path / "images" / "one" / f"{number}.png", picture(number))
        save(tmp_path / "images" / "two" / f"copy_{number}.png", picture(number))
    save(tmp_path / "images" / "two" / "0.png", picture(0))
    whole = picture(30).resize((60, 60))
    save(tmp_path / "images" / "whole.png", whole)
    save(tmp_path / "images" / "part.png", whole.crop((10, 20, 40, 56)))
    rows = [
        ("query", "positives", "junk", "box"),
        ("one/0.png", "copy_0.png;two/0.png", "", ""),
        ("one/1.png", "copy_2.png", "copy_1.png", ""),
        ("whole.png", "part.png", "", "10 20 40 56"),
    ]
    with (tmp_path / "truth.csv").open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    words = [f"data={tmp_path / 'images'}", f"truth={tmp_path / 'truth.csv'}"]
    row = printed_row(capsys, model, *words)
    assert 2 / 3 < row["retrieval_map"] < 1, "the second query looks for another picture"
    with (tmp_path / "truth.csv").open("w", newline="") as file:
        csv.writer(file).writerows([rows[0], rows[1], rows[3]])
    assert printed_row(capsys, model, *words)["retrieval_map"] == 1.0


@pytest.mark.slow
def test_transformers_take_any_size(
    pairs: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    vit = ("timm:vit_tiny_patch16_224", "weights=none")
    row = printed_row(capsys, Path(vit[0]), vit[1], f"data={pairs}", "pool=gem", "scales=[1,0.5]")
    assert row["retrieval_map"] == 1.0


def test_unreadable_images_are_left_out(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(3):
        for name in "ab":
            save(tmp_path / f"class_{number}" / f"{name}.png", picture(number))
    (tmp_path / "class_0" / "broken.png").write_bytes(b"no image")
    assert main(["eval", "retrieval", str(model), f"data={tmp_path}", "train.device=cpu"]) == 0
    *_, warning, _, line = capsys.readouterr().out.splitlines()
    assert warning == "warning: images that cannot be read are left out: 1"
    assert json.loads(line)["retrieval_map"] == 1.0
    strict = ["data.on_error=fail", f"data={tmp_path}", "train.device=cpu"]
    assert main(["eval", "retrieval", str(model), *strict]) == 2
    assert "broken.png" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["data=PAIRS"], "needs a run or model before any key=value"),
        (["MODEL", "data=PAIRS", "pol=gem"], "there is no 'pol'; did you mean 'pool'?"),
        (["MODEL", "data=PAIRS", "pool=gme"], "pool=gme: did you mean 'gem'?"),
        (["MODEL", "data=PAIRS", "p=0"], "p=0: must be above 0"),
        (["MODEL", "data=PAIRS", "scales=[]"], "scales=[]: one or more are expected"),
        (["MODEL", "data=PAIRS", "whiten_dim=3"], "whiten_dim: without whiten=DIR"),
        (["MODEL", "data=PAIRS", "whiten=PAIRS", "whiten_dim=99"], "use at most 15"),
        (["MODEL", "data=PAIRS", "truth=gnd.pkl"], "truth=gnd.pkl: there is no such file"),
        (["MODEL", "data=PAIRS", "truth=truth.txt"], "expected `copydays`, a .pkl"),
        (["MODEL", "data=PAIRS", "truth=copydays"], "0 folders `original`; one is expected"),
        (
            ["MODEL", "data=PAIRS", "truth=odd.csv"],
            "the columns query,positives and rows; has 'query,positive'",
        ),
        (["MODEL", "data=PAIRS", "truth=many.csv"], "'a.png' may be any of 8 images"),
        (
            ["MODEL", "data=PAIRS", "truth=none.csv"],
            "none.csv:2: no image of data is called 'z.png'",
        ),
        (["MODEL", "data=PAIRS/class_0"], "a sub-folder for each class, or truth=FILE"),
        (["MODEL", "data=PAIRS", "data.val=PAIRS"], "finds images of data= in data="),
        (
            ["timm:swin_tiny_patch4_window7_224", "weights=none", "data=PAIRS"],
            "takes images of 224x224 pixels only",
        ),
    ],
)
def test_bad_arguments_of_eval_retrieval_are_refused(
    words: list[str],
    message: str,
    model: Path,
    pairs: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("truth.txt").touch()
    Path("odd.csv").write_text("query,positive\na,b\n")
    Path("many.csv").write_text("query,positives\na.png,class_0/b.png\n")
    Path("none.csv").write_text("query,positives\nz.png,class_0/b.png\n")
    words = [word.replace("PAIRS", str(pairs)).replace("MODEL", str(model)) for word in words]
    assert main(["eval", "retrieval", *words]) == 2
    printed = capsys.readouterr()
    assert message in printed.err and "Traceback" not in printed.err
