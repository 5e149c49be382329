"""``image_size`` sets the sizes of views, evaluation and a transformer's grid together."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from selftask.config.load import load_config, to_yaml
from selftask.config.schema import Component, Config
from selftask.errors import ConfigError
from selftask.models.build import build_backbone, check_sizes


def sizes(transforms: list[Component]) -> list[int]:
    return [t.args["size"] for t in transforms if "size" in t.args]


def load(recipe: str, *words: str, data: str = "no/such/folder") -> Config:
    return load_config(recipe, [f"data={data}", *words])


def test_views_evaluation_and_grid_together() -> None:
    config = load("mae/images", "image_size=64")
    assert sizes(config.views["main"].transforms) == [64]
    assert sizes(config.eval.transforms) == [73, 64]  # 110 and 96 before
    assert config.backbone.args["img_size"] == 64
    assert config.place("backbone.img_size") == "command line: image_size=64"
    assert config.place("eval.transforms.1.size") == "command line: image_size=64"


def test_small_crops_keep_their_share_in_whole_patches() -> None:
    config = load_config("dino/vit_small_imagenet", ["image_size=352"])
    assert [sizes(group.transforms) for group in config.views.values()] == [[352], [352], [144]]
    # 96 * 352 / 224 is 150.9: nine patches of 16


@pytest.mark.parametrize(
    ("backbone", "field"),
    [
        ("timm:vit_tiny_patch16_224", "img_size"),
        ("timm:deit_tiny_patch16_224", "img_size"),
        ("timm:swin_tiny_patch4_window7_224", "img_size"),
        ("timm:beit_base_patch16_224", "img_size"),
        ("timm:eva02_tiny_patch14_224", "img_size"),
        ("timm:cait_xxs24_224", "img_size"),
        ("torchvision:vit_b_16", "image_size"),
    ],
)
def test_models_of_libraries_are_built_for_it(backbone: str, field: str) -> None:
    config = load("simclr/images", f"backbone={backbone}", "image_size=448")
    assert config.backbone.args["args"] == {field: 448}
    with torch.device("meta"):
        model = build_backbone(config.backbone)
        check_sizes(model, config)
        assert model(torch.zeros(1, 3, 448, 448)).shape == (1, model.embed_dim)


def test_images_that_come_in_one_size_are_evaluated_in_another() -> None:
    config = load_config("simclr/resnet18_cifar10", ["image_size=64"])
    assert sizes(config.views["main"].transforms) == [64]
    assert sizes(config.eval.transforms) == [64, 64]
    assert [t.name for t in config.eval.transforms] == ["resize", "center_crop", "normalize"]


def test_digits_are_drawn_in_that_size() -> None:
    config = load_config("mae", ["image_size=24"])
    assert config.data.source.args["size"] == 24
    assert config.data.val is not None and config.data.val.args["size"] == 24
    assert config.backbone.args["img_size"] == 24
    assert sizes(config.eval.transforms) == []


def test_the_resolved_config_holds_what_it_stands_for(tmp_path: Path) -> None:
    config = load("dino/images", "image_size=48")
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(config))
    assert "image_size" not in path.read_text()
    assert load_config(str(path), []) == config
    again = load_config(str(path), ["image_size=96"])  # as `selftask eval RUN image_size=96`
    assert again.views == load("dino/images").views


def test_what_a_later_layer_sets_stays(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("defaults: [/simclr/images]\nimage_size: 64\n")
    recipe = str(tmp_path / "mine.yaml")
    crop = "eval.transforms=[{name: center_crop, size: 80},normalize]"
    config = load(recipe, crop)
    assert sizes(config.views["main"].transforms) == [64]
    assert sizes(config.eval.transforms) == [80]


@pytest.mark.parametrize(
    ("recipe", "words", "message"),
    [
        ("mae/images", ["image_size=100"], "patches of 8 pixels of backbone 'vit_tiny'; try 96 or"),
        ("mae/images", ["image_size=64", "backbone.img_size=32"], "backbone.img_size and image_"),
        ("mae/digits", ["backbone.img_size=2"], "2 pixels cannot .* patches of 4; try 4"),
        ("simclr/images", ["image_size=0"], "must be at least 1"),
        ("simclr/images", ["image_size=big"], "expected a whole number or null"),
        (
            "simclr/images",
            ["image_size=64", "views.main.transforms=[normalize]"],
            "views.main.transforms has no crop or resize whose size it could set",
        ),
        ("simclr/images", ["image_siz=64"], "did you mean 'image_size'"),
    ],
)
def test_what_it_cannot_set_is_told(recipe: str, words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        load(recipe, *words)
    assert error.value.problems[0].startswith("command line: ")
