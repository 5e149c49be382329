"""Pretraining on images of five channels: train, stop, resume, evaluate, export."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from selftask.cli import evaluate, export
from selftask.config.load import load_config, to_yaml
from selftask.config.schema import Config
from selftask.data.dataset import check_sizes, open_data
from selftask.errors import ConfigError, UserError
from selftask.models.address import open_model
from selftask.task import Task
from selftask.trainer import Interrupted, Trainer

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
    net = "backbone.depth=2" if "mae" in recipe else "backbone.width=8"
    train = "train={batch_size: 16, epochs: 2, log_every: 1, threads: 1, device: cpu}"
    evaluations = "eval.evaluations={knn: null, linear: null}"
    return load_config(recipe, [net, train, evaluations, f"out={out}", *more])


def train(chosen: Config) -> Task:
    torch.set_num_threads(1)
    task = Task(chosen, sources=open_data(chosen.data))
    task.out.mkdir(parents=True, exist_ok=True)
    (task.out / "config.yaml").write_text(to_yaml(chosen))  # as a command does
    try:
        Trainer().train(task)
    except Interrupted:
        assert chosen.train.stop_at is not None
    return task


@pytest.mark.parametrize(
    ("method", "engine"), [("simclr", "cpu"), ("mae", "cpu"), ("simclr", "device")]
)
def test_stopped_resumed_evaluated_and_exported(
    method: str,
    engine: str,
    recipe: Callable[[str], str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = recipe(method), f"data.engine={engine}"
    whole = train(config(given[0], tmp_path / "whole", given[1]))
    train(config(given[0], tmp_path / "parts", given[1], "train.stop_at=2"))
    parts = train(config(given[0], tmp_path / "parts", given[1]))
    assert parts.resumed and parts.iteration == whole.iteration == 6
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
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert 0 <= found["knn_top1"] <= 1
    with pytest.raises(UserError, match=r"its images have 3 channels, and .*whole takes 5"):
        evaluate.main(["knn", str(tmp_path / "whole"), "data.bands=[0,1,2]"])


def test_all_that_cannot_be_is_said_before_training(
    recipe: Callable[[str], str], tmp_path: Path
) -> None:
    more = "views.main.transforms.2.hue=0.1", "eval.transforms.1.mean=null"
    chosen = config(recipe("simclr"), tmp_path, *more, "eval.transforms.1.std=null")
    with pytest.raises(ConfigError) as error:
        check_sizes(chosen, open_data(chosen.data).train)
    hue, normalize = error.value.problems
    assert hue.startswith("views.main.transforms.2.hue: 0.1 needs 3 channels, the data have 5")
    assert normalize.startswith("eval.transforms.1.of: imagenet has 3 numbers, the data have 5")
    chosen = config(recipe("simclr"), tmp_path, "data.val={name: digits}")
    with pytest.raises(
        UserError, match=r"data\.val: its images have 3 channels, those of data have"
    ):
        open_data(chosen.data)
