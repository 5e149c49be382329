"""What a method declares that it needs: refused before a run starts, with the key to set."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from selftask.config.checks.requirements import of_backbone, required
from selftask.config.load import load_config
from selftask.data.loading.open_data import check_data, check_val, open_data
from selftask.errors import ConfigError, UserError
from selftask.registry import BACKBONES, METHODS, register_method


@pytest.mark.parametrize("method", METHODS.names())
def test_the_source_says_what_the_class_says(method: str) -> None:
    assert required(method) == {*METHODS[method].requires}


def test_a_batch_too_small_to_compare_images_is_refused() -> None:
    compare = [name for name in METHODS if METHODS.declared(name, "min_batch_size", 1) > 1]
    assert {"barlow", "clip", "dinov2", "simclr", "vicreg", "vicregl"} <= {*compare}
    assert {"byol", "msf", "msn", "odc", "simsiam", "smog", "tico"} <= {*compare}, "by BatchNorm"
    for name in compare:
        assert METHODS[name].min_batch_size == 2
        with pytest.raises(ConfigError, match=rf"train\.batch_size=1: {name} .* at least 2"):
            load_config(name, ["train.batch_size=1"])
    load_config("mae", ["train.batch_size=1"])


def test_numbers_outside_their_limits_are_refused() -> None:
    cases = {
        "simclr": "temperature=0.0",
        "deepcluster": "temperature=0.0",
        "mae": "mask_ratio=1.0",
        "ijepa": "max_context=0.0",
    }
    for name, setting in cases.items():
        with pytest.raises(ConfigError, match=f"method.{setting}.* must be"):
            load_config(name, [f"method.{setting}"])


@pytest.mark.parametrize("backbone", BACKBONES.names())
def test_offers_of_a_backbone_are_read_without_importing_it(backbone: str) -> None:
    built = getattr(BACKBONES[backbone], "offers", None)
    assert BACKBONES.declared(backbone, "offers", None) == built


@pytest.mark.parametrize("method", [m for m in METHODS if {"tokens", "subset"} & required(m)])
def test_a_network_without_tokens_is_refused_with_the_config(method: str) -> None:
    wanted = (
        f"backbone: {method} needs patch tokens .* backbone 'small_resnet' has none; .*vit_tiny"
    )
    with pytest.raises(ConfigError, match=wanted):
        load_config(f"{method}/digits", ["backbone={name: small_resnet}"])


def test_a_built_network_is_asked_for_what_it_offers() -> None:
    config = load_config("mae/images", ["data=digits", "backbone=timm:vit_tiny_patch16_224"])
    assert list(of_backbone(config, {"subset"})) == []
    (problem,) = of_backbone(config, {"dense"})
    assert "'timm:vit_tiny_patch16_224' has none" in problem


def _images(folder: Path, *labels: int) -> str:
    images = np.zeros((len(labels), 8, 8, 3), np.uint8)
    arrays = {"images": images} | ({"labels": np.array(labels)} if max(labels) >= 0 else {})
    np.savez(folder / "images.npz", **arrays)
    return f"data={folder / 'images.npz'}"


@pytest.mark.parametrize(
    ("labels", "wanted"),
    [
        (
            [-1, -1, -1],
            "data: method.name=supervised needs labels, and these images have none; put",
        ),
        ([0, -1, 1], "data: 1 of 3 images have no label, and method.name=supervised needs all"),
    ],
)
def test_missing_labels_are_refused_with_the_data(
    labels: list[int], wanted: str, tmp_path: Path
) -> None:
    small = [_images(tmp_path, *labels), "train.batch_size=2", "data.val=null"]
    config = load_config("supervised/digits", small)
    source = open_data(config.data).train
    with pytest.raises(ConfigError, match=wanted):
        check_data(config, source)
    check_data(load_config("simclr/digits", small), source)  # which needs none
    if labels[0] == 0:
        with pytest.raises(ConfigError, match=r"data\.val: 1 of 3 images have no label"):
            check_val(config, source, "data.val")


def test_classes_that_are_parts_of_a_data_set_are_refused(tmp_path: Path) -> None:
    for name in ("train/cat/0.png", "train/dog/1.png", "test/cat/2.png"):
        path = tmp_path / "images" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8)).save(path)
    small = ["train.batch_size=2", "data.val=null", f"data={tmp_path}/images"]
    config = load_config("supervised/images", small)
    source = open_data(config.data).train
    assert source.class_names() == ["test", "train"]
    with pytest.raises(ConfigError, match=r"data: its classes are test, train: .*data=DIR/train"):
        check_data(config, source)
    check_data(load_config("simclr/images", small), source)  # which needs none


def test_an_unknown_word_is_refused(tmp_path: Path) -> None:
    from selftask.methods.base import Method

    @register_method("wants_tokenz")
    class WantsTokenz(Method):
        loss_reduction = "samples"
        requires = ("tokenz",)

    with pytest.raises(UserError, match=r"test_requirements\.py:\d+: .* did you mean 'tokens'\?"):
        load_config("simclr/digits", ["method={name: wants_tokenz}"])
