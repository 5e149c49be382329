"""projects/vissl_migration: VISSL's yaml becomes a recipe, and its checkpoint is evaluated."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image
from sklearn.datasets import load_digits

import tiny
from selftask.config.load import load_config

PROJECT = tiny.ROOT / "projects" / "vissl_migration"
EXAMPLES = ("moco", "simclr", "swav")


def convert(source: Path, out: Path) -> tuple[int, str]:
    """Run the script; return exit code and output."""
    words = [sys.executable, str(PROJECT / "convert.py"), str(source), "--out", str(out)]
    done = tiny.run(words, out.parent)
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout + done.stderr


def edited(tmp_path: Path, **changes: Any) -> Path:
    """The SimCLR example with other values, by key with / for the dot."""
    content = yaml.safe_load((PROJECT / "examples/simclr.yaml").read_text())
    for key, value in changes.items():
        section = content["config"]
        *path, last = key.split("/")
        for name in path:
            section = section.setdefault(name, {})
        section[last] = value
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def test_examples_become_recipes(tmp_path: Path) -> None:
    """Everything is converted, `selftask config` accepts it, and the values are VISSL's."""
    configs = {}
    for name in EXAMPLES:
        code, text = convert(PROJECT / f"examples/{name}.yaml", tmp_path / f"{name}.yaml")
        assert (code, "keys converted, 0 not" in text) == (0, True), text
        configs[name] = load_config(str(tmp_path / f"{name}.yaml"), ["data=digits"])
    simclr, swav, moco = (configs[name] for name in ("simclr", "swav", "moco"))
    assert [c.train.batch_size for c in (simclr, swav, moco)] == [64 * 64, 64 * 64, 32 * 8]
    expected = {"name": "larc", "sgd_momentum": 0.9, "trust_coefficient": 1e-3, "decay_1d": True}
    expected |= {"lr": {"base": 0.3, "per": 256, "rule": "linear"}, "schedule": "cosine"}
    expected |= {"warmup": "10%", "start_lr": 0.3 * 512 / 256, "end_lr": 0.0, "weight_decay": 1e-6}
    assert expected.items() <= simclr.optimizer.to_dict().items()
    assert simclr.method.args["temperature"] == 0.1
    assert (simclr.method.args["hidden_dim"], simclr.method.args["out_dim"]) == (2048, 128)
    assert simclr.parallel.sync_batch_norm == 8
    assert swav.optimizer.end_lr == pytest.approx(0.0048)
    assert swav.train.precision == "float16"
    assert swav.method.args["num_prototypes"] == 3000
    assert swav.method.args["freeze_prototypes"] == "313 steps"
    crops = [
        (group.count, group.transforms[0].args["size"], group.transforms[0].args["scale"])
        for group in swav.views.values()
    ]
    assert crops == [(2, 224, (0.14, 1.0)), (6, 96, (0.05, 0.14))]
    shipped = load_config("moco/resnet50_imagenet", ["data=digits"])
    assert moco.method.args == {**shipped.method.args, "hidden_dim": 2048}
    schedule = {"name": "multistep", "milestones": ["120 epochs", "160 epochs"]}
    assert moco.optimizer.schedule == {**schedule, "factor": pytest.approx(0.1)}
    assert (moco.optimizer.lr, moco.optimizer.args["nesterov"]) == (0.03, True)


def test_nothing_is_dropped_in_silence(tmp_path: Path) -> None:
    changes = {
        "OPTIMIZER/larc_config/clip": True,
        "DATA/TRAIN/MIXUP/alpha": 0.2,
        "DATA/TRAIN/MIXUP/off": False,
    }
    code, text = convert(edited(tmp_path, **changes), tmp_path / "out.yaml")
    assert (code, text.splitlines()[0]) == (
        1,
        "not converted: OPTIMIZER.larc_config.clip: True: optimizer.name=lars with clip_lr",
    )
    assert "not converted: DATA.TRAIN.MIXUP.alpha = 0.2: nothing here corresponds to it" in text
    assert "note: 1 more keys are unknown here, and off" in text


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("LOSS/name", "nce_loss_with_memory", "LOSS.name: nce_loss_with_memory; known: simclr_"),
        ("MODEL/TRUNK/NAME", "xcit", "MODEL.TRUNK: xcit: write the backbone of timm"),
        ("MODEL/TRUNK/TRUNK_PARAMS/RESNETS/WIDTH_MULTIPLIER", 2, "no such ResNet here"),
        ("DATA/TRAIN/TRANSFORMS", [{"name": "ImgToTensor"}], "views begin with ImgToTensor"),
        ("OPTIMIZER/param_schedulers/lr", {"name": "cosine_warm_restart"}, "the schedule cosine_w"),
        ("OPTIMIZER/param_schedulers/lr", {"name": "cosine"}, "KeyError: 'start_value'"),
        ("TRAINER/TRAIN_STEP_NAME", "dummy_step", "dummy_step: see `selftask list train_steps`"),
    ],
)
def test_what_has_no_counterpart_is_printed(
    tmp_path: Path, key: str, value: Any, reason: str
) -> None:
    code, text = convert(edited(tmp_path, **{key: value}), tmp_path / "out.yaml")
    assert code == 1
    assert reason in text


def test_another_yaml_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "other.yaml").write_text("a: 1\n")
    code, text = convert(tmp_path / "other.yaml", tmp_path / "out.yaml")
    assert (code, "no VISSL config: DATA, MODEL and OPTIMIZER are missing" in text) == (1, True)


def digit_files(folder: Path, count: int) -> Path:
    """Handwritten digits as image files, one folder a class: train and test."""
    digits = load_digits()
    for place in range(count):
        part = "test" if place % 4 == 0 else "train"
        path = folder / part / str(digits.target[place]) / f"{place}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.kron(digits.images[place], np.ones((4, 4))) * 15.9
        Image.fromarray(pixels.astype(np.uint8)).convert("RGB").save(path)
    return folder


@pytest.mark.slow
def test_readme_commands_keep_the_scores_of_the_vissl_weights(tmp_path: Path) -> None:
    """The README's commands: the file of VISSL's layout is evaluated as the same weights are."""
    data = digit_files(tmp_path / "data", 160)
    data_words = [f"data={data / 'train'}", f"data.val={data / 'test'}", "data.num_workers=0"]
    selftask = [sys.executable, "-m", "selftask"]
    views = "views={main: {count: 2, transforms: [{name: random_crop, size: 32}, normalize]}}"
    small = [views, "backbone=resnet18", "train.batch_size=16", "launch=null", "parallel=null"]
    small += ["train.threads=1", "out=first", "train.max_steps=2", "eval.evaluations={knn: null}"]
    small += ["train.precision=float32", "eval.transforms=[normalize]"]
    convert(PROJECT / "examples/simclr.yaml", tmp_path / "simclr.yaml")
    first = tiny.run([*selftask, "train", "simclr.yaml", *data_words, *small], tmp_path)
    assert first.stdout.splitlines()[-1].startswith("RUN finished: 2 steps"), first.stderr

    make = [sys.executable, str(PROJECT / "make_checkpoint.py"), "first", "vissl.torch"]
    assert "120 tensors of the trunk" in tiny.run(make, tmp_path).stdout
    figures = []
    for model in (["torchvision:resnet18", "weights=vissl.torch"], ["first"]):
        for kind in ("knn", "linear"):
            evaluate = [*selftask, "eval", kind, *model, *data_words, "eval.transforms=[normalize]"]
            done = tiny.run(evaluate, tmp_path)
            assert done.returncode == 0, done.stderr
            figures.append(json.loads(done.stdout.splitlines()[-1]))
    assert figures[:2] == figures[2:]
    assert figures[0]["knn_top1"] > 0.5

    again = [word.replace("out=first", "out=second") for word in small]
    init = "init.backbone=vissl.torch"
    second = tiny.run([*selftask, "train", "simclr.yaml", *data_words, *again, init], tmp_path)
    assert "init.backbone: 120/120 tensors" in second.stdout, second.stdout + second.stderr
