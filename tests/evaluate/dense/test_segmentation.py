"""``selftask eval segmentation``: the command, votes of neighbors, and mistakes in masks."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from dense_data import interpolated, save_scene, scene, write_scenes
from figures import draw
from selftask.cli.main import main
from selftask.config.load import load_config
from selftask.config.schema import Component
from selftask.data.sources.files import Folder
from selftask.evaluate.dense.masks import MaskFolder, classes_of, images_in
from selftask.evaluate.segmentation import SegmentationOptions, evaluate_segmentation
from selftask.models.build import build_backbone
from selftask.models.features.tokens import Features, from_map
from selftask.models.weights.export import save_backbone

SIZE, PATCH = 48, 8


class Blocks(nn.Module):
    """Backbone without training: products of the pixels of each patch with fixed vectors."""

    offers = frozenset({"dense"})

    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Parameter(draw(7, 16, 3 * PATCH * PATCH).float())

    def extract(self, images: Tensor) -> Features:
        x = nn.functional.unfold(images, PATCH, stride=PATCH)  # (B, 3 * P * P, N)
        side = images.shape[-1] // PATCH
        maps = (self.kernel @ x).unflatten(2, (side, side))
        return Features(maps.mean(dim=(2, 3)), from_map(maps), {})


def folder_of(root: Path, key: str = "data", ignore: tuple[int, ...] = (255,)) -> MaskFolder:
    source = Folder(Folder.Config(path=images_in(str(root)), labels=False))
    return MaskFolder(str(root), source, key, ignore=ignore, table=None)


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``train`` with 12 scenes, and ``val`` with 5 others."""
    root = tmp_path_factory.mktemp("scenes")
    write_scenes(root / "train", 12)
    write_scenes(root / "val", 5, first=12)
    return root


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small ResNet with random weights, exported."""
    torch.manual_seed(0)
    component = Component(name="small_resnet", args={"width": 8})
    meta = {
        "architecture": {"name": component.name, "args": component.args},
        "channels": 3,
        "transforms": [{"name": "center_crop", "size": SIZE}, {"name": "normalize"}],
        "step": 7,
    }
    return save_backbone(build_backbone(component), tmp_path_factory.mktemp("model"), meta)


def flat(rows: np.ndarray) -> np.ndarray:
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def read_double(root: Path, kernel: np.ndarray) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Patch features (N, E) and masks (S, S) of the images of a folder, in their order."""
    maps, masks = [], []
    for path in sorted((root / "images").rglob("*.jpg")):
        pixels = np.asarray(Image.open(path), dtype=np.float64)
        mean, std = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
        x = (pixels / 255 - mean) / std
        side = SIZE // PATCH
        blocks = x.reshape(side, PATCH, side, PATCH, 3).transpose(0, 2, 4, 1, 3)
        maps.append(blocks.reshape(side * side, -1) @ kernel.T)
        name = path.relative_to(root / "images").with_suffix(".png")
        masks.append(np.asarray(Image.open(root / "masks" / name)).astype(int))
    return maps, masks


def test_votes_are_those_of_a_brute_force_computation(tmp_path: Path) -> None:
    """Images of the size S, so that nothing is resized; some pixels do not count."""
    for number in range(10):
        image, mask = scene(6 * number, side=SIZE)  # these have 48 x 48 pixels
        mask[:4, number:] = 255
        save_scene(tmp_path / ("train" if number < 6 else "val"), str(number), image, mask)
    backbone, options = Blocks(), SegmentationOptions(size=SIZE, heads=["knn"], k=7)
    train, test = folder_of(tmp_path / "train"), folder_of(tmp_path / "val", "data.val")
    classes = classes_of(None, options.ignore, train.pixels, test.pixels)
    config = load_config("simclr/digits", ["eval.transforms=[{name: normalize}]"])
    result = evaluate_segmentation(
        backbone, config, train, test, classes, options, device=torch.device("cpu")
    )

    kernel = backbone.kernel.detach().double().numpy()
    maps, masks = read_double(tmp_path / "train", kernel)
    side = SIZE // PATCH
    rows, shares = [], []
    for features, mask in zip(maps, masks, strict=True):
        for number in range(side * side):
            y, x = PATCH * (number // side), PATCH * (number % side)
            inside = mask[y : y + PATCH, x : x + PATCH].ravel()
            inside = inside[inside != 255]
            if len(inside):
                rows.append(features[number])
                shares.append([np.mean(inside == label) for label in range(4)])
    bank, labels = flat(np.stack(rows)), np.array(shares)
    expected = np.zeros((4, 4), dtype=int)
    maps, masks = read_double(tmp_path / "val", kernel)
    for features, mask in zip(maps, masks, strict=True):
        votes = []
        for query in flat(features):
            cosine = bank @ query
            near = np.argsort(-cosine)[:7]
            weight = np.exp(cosine[near] / 0.02)
            votes.append(weight @ labels[near] / weight.sum())
        scores = np.array(votes).T.reshape(4, side, side)
        predicted = interpolated(scores, SIZE).argmax(axis=0)
        counts = mask != 255
        np.add.at(expected, (mask[counts], predicted[counts]), 1)
    assert result.facts["patches"] == len(bank)
    actual = result.confusions["knn"].counts.numpy()
    # at ties of interpolated votes, float32 and float64 may differ
    assert np.abs(actual - expected).sum() <= 4 and expected.sum() == actual.sum() > 8000
    assert 0.3 < result.row()["segmentation_knn_miou"] < 1


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[dict[str, float], str]:
    """Return the JSON line of the command, and all that it printed."""
    capsys.readouterr()
    assert main(["eval", "segmentation", *words, "train.device=cpu"]) == 0
    printed = capsys.readouterr().out
    row: dict[str, float] = json.loads(printed.splitlines()[-1])
    return row, printed


def data_of(root: Path) -> list[str]:
    return [f"data={root / 'train'}", f"data.val={root / 'val'}"]


def test_command_on_a_network_of_stages(
    scenes: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Colors are easy for early layers; a size and a layer change what is measured."""
    words = [*data_of(scenes), "layer=0", "steps=200"]
    row, printed = run(capsys, str(model.parent), *words)
    assert row["segmentation_knn_miou"] > 0.8 and row["segmentation_linear_miou"] > 0.8
    assert row["size"] == SIZE and (row["train_images"], row["test_images"]) == (12, 5)
    by_class = [row[f"segmentation_knn_iou/{n}"] for n in range(4)]
    assert row["segmentation_knn_miou"] == pytest.approx(np.mean(by_class))
    assert "memory: 6,912 patches of" in printed, "24 x 24 patches of each of 12 images"
    file = model.parent / "evaluations.jsonl"
    kept = json.loads(file.read_text().splitlines()[-1])
    file.unlink()
    assert kept["evaluation"] == "segmentation" and row.items() <= kept.items()
    words = [*words, "heads=[knn]", "size=32", "memory=300"]
    small, printed = run(capsys, str(model), *words)
    assert small["patches"] == 300 and "segmentation_linear_miou" not in small
    assert small["segmentation_knn_miou"] != row["segmentation_knn_miou"]


def test_command_on_a_transformer(scenes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["timm:vit_tiny_patch16_224", "weights=none", *data_of(scenes), "size=64", "steps=100"]
    row, _ = run(capsys, *words, "lr=[0.01]")
    assert row["patches"] == 12 * 16 and row["segmentation_linear_lr"] == 0.01
    assert row["segmentation_knn_accuracy"] > 0.6


def test_classes_of_one_set_and_without_pixels(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, labels in (("train", (0, 1, 2)), ("val", (0, 1, 3))):
        for number in range(3):
            image, mask = scene(number)
            mask = np.where(np.isin(mask, labels), mask, 0).astype(np.uint8)
            save_scene(tmp_path / name, str(number), image, mask)
    table = "index,name\n0,ground\n1,red\n2,green\n3,blue\n9,car\n"
    (tmp_path / "train" / "classes.csv").write_text(table)
    row, printed = run(capsys, str(model), *data_of(tmp_path), "heads=[knn]", "layer=0")
    lines = [line for line in printed.splitlines() if line.startswith("warning: ")]
    assert [line.rpartition(": ")[2] for line in lines] == ["car", "blue", "green"]
    assert "without a pixel in any mask" in lines[0] and "never predicted" in lines[1]
    assert row["segmentation_knn_iou/blue"] == 0 and "segmentation_knn_iou/car" not in row
    shown = [row[f"segmentation_knn_iou/{n}"] for n in ("ground", "red", "green", "blue")]
    assert row["segmentation_knn_miou"] == pytest.approx(np.mean(shown))


def test_one_image_is_enough_for_neighbors(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_scenes(tmp_path / "train", 1)
    write_scenes(tmp_path / "val", 1)
    row, _ = run(capsys, str(model), *data_of(tmp_path), "heads=[knn]", "layer=0", "k=1")
    assert row["segmentation_knn_miou"] > 0.95, "the same image"


def edit_mask(root: Path, change: str) -> None:
    """Make a mistake in the training masks of scenes."""
    path = root / "train" / "masks" / "part_1" / "1.png"
    mask = np.asarray(Image.open(path)).copy()
    if change == "missing":
        path.unlink()
    elif change == "size":
        Image.fromarray(mask[:-1]).save(path)
    elif change == "colors":
        Image.fromarray(np.stack([mask] * 3, axis=2)).save(path)
    elif change == "text":
        path.write_text("no image")
    elif change == "damaged":
        path.write_bytes(path.read_bytes()[:60])
    elif change == "unknown":
        (root / "train" / "classes.csv").write_text("index,name\n0,a\n1,b\n2,c\n")
    elif change == "table":
        (root / "train" / "classes.csv").write_text("id,label\n0,a\n")
    elif change == "twice":
        (root / "train" / "classes.csv").write_text("index,name\n0,a\n0,b\n")


@pytest.mark.parametrize(
    ("change", "words", "message"),
    [
        ("missing", [], "data: 1 of 3 images have no file in 'masks', such as"),
        ("size", [], "1.png: has 56x55 pixels, and"),
        ("colors", [], "1.png: has mode RGB; a mask has one channel"),
        ("damaged", [], "1.png: the mask cannot be read: "),
        ("text", [], "1.png: the mask cannot be read: not an image (no known header)"),
        ("unknown", [], "index 3 is not in classes.csv, which has 0, 1, 2; add it"),
        ("table", [], "classes.csv: expected the columns index,name"),
        ("twice", [], "classes.csv:3: index 0 is in the table twice"),
        ("", ["ignore=[0,1,2,3]"], "the masks have no pixel that counts"),
        ("", ["data=SCENES"], "data: there is no folder 'images' in SCENES; images/NAME.jpg"),
        (
            "",
            ["data.val=SCENES/val/images"],
            "data.val: there is no folder 'images' in SCENES/",
        ),
        ("", ["k=4000", "layer=-1"], "k: 4000 neighbors are asked for, and there are"),
        ("", ["layer=9"], "layer: 9; the backbone has layers 0 to"),
        ("", ["heads=[svm]"], "heads=[svm]: "),
        ("", ["heads=[]"], "heads=[]: one or more are expected"),
        ("", ["lr=[]"], "lr=[]: one or more are expected"),
        ("", ["temperature=0"], "temperature=0: must be above 0"),
        ("", ["memori=5"], "there is no 'memori'; did you mean 'memory'?"),
        ("", ["data.subset=1"], "lr: 1 training image with labels leaves none"),
    ],
)
def test_damaged_masks_and_bad_arguments_of_eval_segmentation_are_refused(
    change: str,
    words: list[str],
    message: str,
    model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_scenes(tmp_path / "train", 3)
    write_scenes(tmp_path / "val", 2)
    edit_mask(tmp_path, change)
    words = [word.replace("SCENES", str(tmp_path)) for word in words]
    assert main(["eval", "segmentation", str(model), *data_of(tmp_path), *words]) == 2
    printed = capsys.readouterr()
    (line,) = [x for x in printed.err.splitlines() if not x.startswith(str(model))]  # loaded
    assert message.replace("SCENES", str(tmp_path)) in line


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["MODEL", "data=SCENES/train"],
            "data.val is missing: give a folder with images and masks",
        ),
        (["data=SCENES/train"], "needs a run or model before any key=value"),
        (["timm:vit_tiny_patch16_224", "weights=none", "size=90"], "use 80 or 96"),
        (
            ["timm:swin_tiny_patch4_window7_224", "weights=none", "size=96"],
            "takes images of 224x224 pixels only; image_size=96 builds it for that size",
        ),
    ],
)
def test_mistakes_in_models(
    words: list[str],
    message: str,
    scenes: Path,
    model: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = [w.replace("SCENES", str(scenes)).replace("MODEL", str(model)) for w in words]
    data = [] if any(word.startswith("data=") for word in words) else data_of(scenes)
    assert main(["eval", "segmentation", *words, *data]) == 2
    printed = capsys.readouterr().err
    assert message in printed and "Traceback" not in printed


def test_features_that_are_not_finite(
    scenes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    component = Component(name="small_resnet", args={"width": 8})
    backbone = build_backbone(component)
    with torch.no_grad():
        next(backbone.parameters())[0] = torch.nan
    meta = {"architecture": {"name": component.name, "args": component.args}, "channels": 3}
    broken = save_backbone(backbone, tmp_path, {**meta, "transforms": [{"name": "normalize"}]})
    assert main(["eval", "segmentation", str(broken), *data_of(scenes), "size=48"]) == 2
    assert "the patch features of 12 of 12 images are not finite" in capsys.readouterr().err
