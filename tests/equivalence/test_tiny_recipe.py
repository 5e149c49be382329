"""The small version of a recipe that ``selftask check`` trains, its images and its norms."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from selftask.cli.check import load
from selftask.equivalence.tiny_recipe import images_for, make_tiny
from selftask.equivalence.trace import batch_norm_replaced
from selftask.errors import ConfigError
from selftask.models.heads import mlp


def small(recipe: str, *settings: str, steps: int = 3) -> Any:
    return make_tiny(load(recipe, list(settings)), batch_size=8, steps=steps)


def test_a_large_recipe_becomes_small() -> None:
    config = small("dino/vit_small_imagenet")
    assert config.backbone.name == "vit_micro"
    assert config.backbone.args["dynamic_img_size"], "what multi-crop needs stays"
    assert config.backbone.args["drop_path"] == 0.1
    assert (config.train.batch_size, config.train.epochs, config.train.max_steps) == (8, 2, None)
    assert config.train.precision == "float32"
    sizes = {
        t.args["size"] for v in config.views.values() for t in v.transforms if "size" in t.args
    }
    assert sizes == {32, 12}, "224 and 96 pixels, whole patches"
    assert [view.count for view in config.views.values()] == [
        view.count for view in load("dino/vit_small_imagenet", []).views.values()
    ]
    assert config.hooks.keys() == {"clip_gradients"}, "only those that the recipe itself names"
    assert small("moco/resnet50_imagenet").method.args["queue_size"] == 16
    assert small("byol/resnet50_imagenet").optimizer.name == "lars"


@pytest.mark.parametrize(
    "recipe", ["eva/vitg14", "esvit/swin_tiny_imagenet", "beit/vit_base_imagenet"]
)
def test_a_transformer_of_timm_becomes_a_small_transformer(recipe: str) -> None:
    assert small(recipe).backbone.name == "vit_micro"


def test_numbers_of_images_are_scaled_and_null_stays() -> None:
    groups = [
        small(name).method.args["koleo_group_size"]
        for name in ("dinov2", "dinov2/vit_large_imagenet")
    ]
    assert groups == [None, 4], "else nothing compares ranks by KoLeo over the whole batch"


def test_what_the_command_line_says_stays() -> None:
    config = small("simclr", "method.out_dim=24", "train.batch_size=12", "backbone.width=4")
    assert (config.method.args["out_dim"], config.method.args["hidden_dim"]) == (24, 32)
    assert (config.train.batch_size, config.backbone.args["width"]) == (12, 4)
    assert len(images_for(config)) == 25
    assert small("simclr", "backbone=resnet34").backbone.name == "resnet34"
    assert small("dino", "optimizer.eps=1e-7").optimizer.args["eps"] == 1e-7


def test_a_small_version_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match=r"(?s)key=value.*decoder_dim: 16 must be divisible"):
        small("mae", "method.decoder_heads=32")


def test_images_are_functions_of_their_number() -> None:
    config = small("simclr")
    one, other = images_for(config), images_for(config)
    assert len(one) == 2 * 8 + 1
    for index in (0, 5, 16):
        assert np.array_equal(np.asarray(one[index][0]), np.asarray(other[index][0]))
        assert one[index][1] == index % 4
    assert not np.array_equal(np.asarray(one[0][0]), np.asarray(one[4][0]))


def test_batch_norm_gives_way_to_a_norm_of_one_sample() -> None:
    with batch_norm_replaced() as replaced:
        head = mlp(6, 8, 4, last_norm=True, last_affine=False)
        conv = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4, eps=0.1))
    assert len(replaced) == 3
    assert not [m for m in (*head, *conv) if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    assert head[-1].weight is None and conv[1].eps == 0.1
    x = torch.randn(5, 6)
    assert torch.allclose(head(x)[:2], head(x[:2]), atol=1e-6), "no sample knows the others"
    assert isinstance(mlp(6, 8, 4)[1], nn.BatchNorm1d), "only inside"
