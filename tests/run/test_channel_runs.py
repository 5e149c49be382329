"""Pretraining on images of five channels: train, stop, resume, evaluate, export."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

import tiny
from selftask.cli.main import main
from selftask.cli.model import evaluate, export
from selftask.config.load import load_config, to_yaml
from selftask.config.schema import Config
from selftask.data.data_module import DataModule
from selftask.data.loading.open_data import check_data, open_data
from selftask.distributed.world import World
from selftask.equivalence.tiny_recipe import images_for
from selftask.errors import ConfigError, UserError
from selftask.models.weights.model_source import open_model
from selftask.task import Task
from selftask.task.loop import Interrupted, train_loop

CHANNELS = 5
MOMENTS = {"mean": [0.1, 0.2, 0.3, 0.4, 0.5], "std": [0.5, 0.4, 0.3, 0.2, 0.1]}
NORMALIZE = {"name": "normalize", **MOMENTS}
DATA = {"name": "bands", "value_range": [0, 4000], "val": None, "num_workers": 0}
VIEW = [
    {"name": "random_resized_crop", "size": 32},
    {"name": "horizontal_flip"},
    {"name": "color_jitter", "brightness": 0.4, "contrast": 0.4},
    {"name": "gaussian_blur"},
    NORMALIZE,
]


@pytest.fixture(scope="module")
def plates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two kinds of plates of 16 bits and five stains, half of them .npy and half .tif."""
    tifffile = pytest.importorskip("tifffile")
    root = tmp_path_factory.mktemp("plates")
    draws = np.random.default_rng(0)
    for kind in range(2):
        folder = root / "images" / f"kind_{kind}"
        folder.mkdir(parents=True)
        for number in range(24):
            pixels = draws.integers(0, 3000, (CHANNELS, 36, 40), dtype=np.uint16)
            pixels[kind] += 1000
            name = folder / f"{number:02}"
            if number % 2:
                tifffile.imwrite(f"{name}.tif", pixels, photometric="minisblack")
            else:
                np.save(f"{name}.npy", pixels.transpose(1, 2, 0))
    return root


@pytest.fixture(scope="module")
def recipe(plates: Path) -> Callable[[str], str]:
    """The path of a recipe: the digits' one of a method, but for the data and what is seen."""

    def write(method: str) -> str:
        config = {
            "defaults": [f"/{method}/digits", "_self_"],
            "data": {**DATA, "path": str(plates / "images")},
            "views": {"main": {"transforms": VIEW}},
            "eval": {"transforms": [{"name": "center_crop", "size": 32}, NORMALIZE]},
        }
        path = plates / f"{method}.yaml"
        path.write_text(yaml.safe_dump(config))
        return str(path)

    return write


def config(recipe: str, out: Path, *more: str) -> Config:
    net = "backbone={depth: 2, img_size: 32}" if "mae" in recipe else "backbone.width=8"
    train = "train={batch_size: 16, epochs: 2, log_every: 1, threads: 1, device: cpu}"
    evaluations = "eval.evaluations={knn: null, linear: null}"
    return load_config(recipe, [net, train, evaluations, f"out={out}", *more])


def train(chosen: Config) -> Task:
    torch.set_num_threads(1)
    task = Task(chosen, sources=open_data(chosen.data))
    task.out.mkdir(parents=True, exist_ok=True)
    (task.out / "config.yaml").write_text(to_yaml(chosen))  # as a command does
    try:
        train_loop(task)
    except Interrupted:
        assert chosen.train.stop_at is not None
    return task


@pytest.mark.parametrize(
    ("method", "engine"),
    [
        ("simclr", "cpu"),
        ("mae", "cpu"),
        pytest.param("simclr", "device", marks=pytest.mark.slow),
    ],
)
def test_stopped_resumed_evaluated_and_exported(
    method: str,
    engine: str,
    recipe: Callable[[str], str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = recipe(method), f"data.augment_on={engine}"
    whole = train(config(given[0], tmp_path / "whole", given[1]))
    train(config(given[0], tmp_path / "parts", given[1], "train.stop_at=2"))
    parts = train(config(given[0], tmp_path / "parts", given[1]))
    assert parts.resumed and parts.steps_done == whole.steps_done == 6
    for a, b in zip(whole.base_model.parameters(), parts.base_model.parameters(), strict=True):
        assert torch.equal(a, b)

    exported = export.export_run(tmp_path / "whole", tmp_path / "again")
    for path in (exported, tmp_path / "whole"):
        backbone, facts = open_model(str(path))
        assert facts["channels"] == CHANNELS and facts["normalization"] == MOMENTS
        images = torch.zeros(1, CHANNELS, 32, 32)
        assert backbone(images).shape == (1, facts["embed_dim"])

    capsys.readouterr()
    assert evaluate.main(["knn", str(tmp_path / "whole")]) == 0
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert 0 <= printed["knn_top1"] <= 1
    with pytest.raises(UserError, match=r"its images have 3 channels, and .*whole takes 5"):
        evaluate.main(["knn", str(tmp_path / "whole"), "data.bands=[0,1,2]"])


@pytest.mark.slow
@pytest.mark.parametrize("method", ["simclr", "mae", "dino", "deepcluster"])
def test_methods_train(method: str, recipe: Callable[[str], str], tmp_path: Path) -> None:
    small = [text for text in tiny.overrides(method, tmp_path) if not text.startswith("data")]
    task = train(load_config(recipe(method), [*small, "train.epochs=1", "train.max_steps=2"]))
    assert task.steps_done == 2
    first = next(p for p in task.export_backbone().parameters() if p.ndim == 4)
    assert first.shape[1] == CHANNELS


def test_the_same_views_from_every_engine_and_cache(
    recipe: Callable[[str], str], tmp_path: Path
) -> None:
    results = {}
    for engine, cache in (
        ("cpu", "none"),
        ("cpu", "ram"),
        ("device", "none"),
        ("device", "device"),
    ):
        chosen = config(
            recipe("simclr"), tmp_path, f"data.augment_on={engine}", f"data.cache={cache}"
        )
        feed = DataModule(chosen, open_data(chosen.data), World(), torch.device("cpu"))
        try:
            batch = next(feed.train_batches(0))
        finally:
            feed.close()
        order = batch.index.argsort()
        results[engine, cache] = torch.stack(batch.all_views)[:, order]
        assert results[engine, cache].shape == (2, 16, CHANNELS, 32, 32)
    first = results["cpu", "none"]
    assert torch.equal(results["cpu", "ram"], first)
    std = torch.tensor(MOMENTS["std"])[:, None, None]
    for cache in ("none", "device"):
        levels = (255 * std * (results["device", cache] - first)).abs()
        assert levels.mean() < 0.5 and levels.max() < 8


def test_data_commands(
    recipe: Callable[[str], str],
    plates: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source = [str(plates / "images"), "data.name=bands", "data.value_range=[0, 4000]"]
    assert main(["data", "stats", *source, "--workers=1"]) == 0
    line = yaml.safe_load(capsys.readouterr().out.splitlines()[-1])[0]
    images = open_data(config(recipe("mae"), tmp_path).data).train
    pixels = np.stack([images[index][0] for index in range(len(images))])
    expected = pixels.reshape(-1, CHANNELS) / 255
    assert np.allclose(line["mean"], expected.mean(axis=0), atol=1e-4)
    assert np.allclose(line["std"], expected.std(axis=0), atol=1e-4)
    assert main(["data", "check", *source, "--workers=1"]) == 0
    assert "modes      5 channels 48" in capsys.readouterr().out
    for bands, drawn in (
        ([0, 1, 2, 3, 4], "of 5 channels it shows channels 0 to 2 as red, green and blue"),
        ([3], "of 1 channel it shows channel 0 in gray"),
    ):
        last = "{name: normalize, stats: half, mean: null, std: null}"
        half = [f"eval.transforms=[{last}]", f"views.main.transforms.4={last}"]
        sheet = ["--images=2", f"--out={tmp_path}/x.png", f"data.bands={bands}", *half]
        assert main(["data", "show", recipe("simclr"), *sheet]) == 0
        assert drawn in capsys.readouterr().out
        shown = np.asarray(Image.open(tmp_path / "x.png").convert("RGB"))
        gray = (np.ptp(shown, axis=2) == 0).all()
        assert gray == (len(bands) == 1)


def test_the_small_version_of_a_recipe_has_as_many_channels(
    recipe: Callable[[str], str], tmp_path: Path
) -> None:
    """What `selftask check` and `selftask submit` try a recipe out with."""
    images = images_for(config(recipe("mae"), tmp_path))
    assert images.channels == images[0][0].shape[2] == CHANNELS
    assert images_for(load_config("mae/digits", [])).channels == 3


def test_all_that_cannot_be_is_said_before_training(
    recipe: Callable[[str], str], tmp_path: Path
) -> None:
    more = "views.main.transforms.2.hue=0.1", "eval.transforms.1.mean=null"
    chosen = config(recipe("simclr"), tmp_path, *more, "eval.transforms.1.std=null")
    with pytest.raises(ConfigError) as error:
        check_data(chosen, open_data(chosen.data).train)
    hue, normalize = error.value.problems
    assert hue.startswith("views.main.transforms.2.hue: 0.1 needs 3 channels, the data have 5")
    assert normalize.startswith(
        "eval.transforms.1.stats: imagenet is for 3 channels, the data have 5"
    )
    chosen = config(recipe("simclr"), tmp_path, "data.val={name: digits}")
    with pytest.raises(
        UserError, match=r"data\.val: its images have 3 channels, those of data have"
    ):
        open_data(chosen.data)
