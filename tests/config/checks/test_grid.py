"""Views of several sizes and a vision transformer that takes one: said before anything starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tiny
from selftask.config.load import load_config
from selftask.data.loading.open_data import open_data
from selftask.errors import ConfigError, UserError
from selftask.models.build import build_backbone, check_backbone, check_sizes, embed_dim
from selftask.run.run import run

CROP = "{name: random_resized_crop, size: 32}"
SURELY = f"{{name: random_apply, p: 1.0, transforms: [{CROP}]}}"


@pytest.mark.parametrize(
    ("recipe", "words", "right"),
    [
        ("dino/images", ["backbone=vit_tiny"], "backbone.img_size=96"),
        ("simclr/images", ["backbone=vit_tiny"], "backbone.img_size=96"),
    ],
)
def test_other_sizes_than_the_grid_s(recipe: str, words: list[str], right: str) -> None:
    with pytest.raises(ConfigError, match="one grid of patches") as error:
        load_config(recipe, ["data=digits", *words])
    assert len(error.value.problems) == 1
    assert error.value.problems[0].startswith(f"command line: {words[0]}: ")
    assert error.value.problems[0].endswith(right)


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        ("dino/images", ["backbone=vit_tiny", "backbone.dynamic_img_size=true"]),
        ("dino/images", ["backbone=vit_tiny", "backbone.img_size=96"]),
        ("dino/images", ["backbone=timm:vit_tiny_patch16_224", "backbone.args.img_size=96"]),
        ("dino/images", ["backbone=timm:resnet18"]),
        (  # the digits themselves are of a size that only the data tell
            "dino/digits",
            [
                "backbone=vit_micro",
                "backbone.img_size=28",
                f"views.a.transforms=[{CROP},normalize]",
            ],
        ),
        ("simclr/images", ["backbone=vit_tiny", "backbone.img_size=96"]),
        ("simclr/digits", ["backbone=vit_micro", f"views.main.transforms=[{SURELY},normalize]"]),
        (
            "simclr/digits",
            ["backbone=vit_tiny", f"views.main.transforms=[{CROP},{{name: jigsaw}},normalize]"],
        ),
    ],
)
def test_what_fits_or_is_not_known_passes(recipe: str, words: list[str]) -> None:
    load_config(recipe, ["data=digits", *words])


TWO_SIZES = ["views.main.count=1", f"views.a.transforms=[{CROP},normalize]"]
NO_PATCHES = [word.replace("32", "40") for word in TWO_SIZES]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["backbone=timm:vit_tiny_patch16_224"],
            r"224 pixels, .*\(views.main: 96\); set backbone.args.img_size=96$",
        ),
        (["backbone=torchvision:vit_b_32"], "set backbone.args.image_size=96$"),
        (
            ["backbone=timm:cait_xxs24_224", *TWO_SIZES],
            "args.img_size=96, and all views to that size",
        ),
        (
            ["backbone=timm:swin_tiny_patch4_window7_224", *TWO_SIZES],
            "set backbone.args.dynamic_img_size=true$",
        ),
        (
            ["backbone=torchvision:vit_b_32", *TWO_SIZES],
            r"224 pixels, .*\(views.main: 96, views.a: 32\); set backbone.args.image_size=96$",
        ),
        (
            ["backbone=torchvision:vit_b_32", "backbone.args.image_size=96", *NO_PATCHES],
            "views.a.transforms: images of 40 pixels cannot be divided .* try 32 or 64",
        ),
        (
            ["backbone=timm:vit_tiny_patch16_224", "views.main.transforms.0.size=224"],
            "of 96 pixels, and backbone 'timm:vit_tiny_patch16_224' takes those of 224 only; image",
        ),
        (
            ["backbone=vit_tiny", "backbone.img_size=224", "views.main.transforms.0.size=224"],
            "eval.transforms: images of 96 pixels, and backbone 'vit_tiny' takes those of 224",
        ),
    ],
)
def test_a_library_s_size_is_compared_when_it_is_built(words: list[str], message: str) -> None:
    """All of these are told before the first batch is read, in the words of the config."""

    def check() -> None:
        config = load_config("simclr/images", ["data=digits", "data.val=digits", *words])
        check_sizes(build_backbone(config.backbone), config)

    with pytest.raises(ConfigError, match=message):
        check()


DYNAMIC = ["backbone=vit_tiny", "backbone.dynamic_img_size=true"]
DYNAMIC_TIMM = ["backbone=timm:vit_tiny_patch16_224", "backbone.args.dynamic_img_size=true"]


@pytest.mark.parametrize("backbone", [DYNAMIC, DYNAMIC_TIMM])
def test_sizes_that_are_no_whole_patches(backbone: list[str]) -> None:
    """Once an AssertionError of timm's in the first step, with a traceback."""
    words = [*backbone, "views.main.transforms.0.size=90", "data.val=digits"]
    words += ["eval.transforms=[{name: center_crop, size: 100},normalize]"]
    with pytest.raises(ConfigError) as error:
        load_config("simclr/images", ["data=digits", *words])
    title = "vit_tiny" if backbone is DYNAMIC else "timm:vit_tiny_patch16_224"
    message = f"cannot be divided into the patches of 16 pixels of backbone '{title}'; try"
    views, evaluation = error.value.problems
    assert f"views.main.transforms: images of 90 pixels {message} 80 or 96" in views
    assert f"eval.transforms: images of 100 pixels {message} 96 or 112" in evaluation


@pytest.mark.parametrize(
    ("method", "backbone", "message"),
    [
        ("simclr", "timm:vit_tinny_patch16_224", "timm has no model named 'vit_tinny"),
        (
            "mae",
            "timm:resnet18",
            "mae needs patch tokens .* left out, .* take .*vit_small",
        ),
        ("mae", "torchvision:vit_b_32", "backbone 'torchvision:vit_b_32' has none; take"),
        ("ijepa", "timm:vit_tiny_patch16_224", "patches are trained, .* use global_pool: avg"),
        ("simclr", "timm:deit_tiny_patch16_224", r"\(views.main: 96\); set .*args.img_size=96"),
        ("simclr", "torchvision:resnet19", "did you mean 'resnet1"),
    ],
)
def test_a_library_s_model_is_checked_before_the_run_has_a_folder(
    method: str, backbone: str, message: str, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    words = ["data=digits", f"backbone={backbone}", f"out={out}", "train.device=cpu"]
    if method != "simclr" and "vit" in backbone:
        words += ["image_size=96"]

    def train() -> None:
        config = load_config(f"{method}/images", words)
        run(config, open_data(config.data))

    with pytest.raises(UserError, match=message):
        train()
    assert not out.exists()


@pytest.mark.parametrize("backbone", ["timm:resnet18", "torchvision:regnet_y_400mf"])
def test_what_can_be_trained_passes_the_check(backbone: str) -> None:
    """regnet draws its first weights by their values, which the meta device has not."""
    check_backbone(load_config("simclr/images", ["data=digits", f"backbone={backbone}"]), 3)


def test_a_library_s_model_for_the_views_passes() -> None:
    fits = ["backbone=torchvision:vit_b_32", "backbone.args.image_size=96", "data.val=digits"]
    config = load_config("simclr/images", ["data=digits", *fits])
    with torch.device("meta"):
        backbone = build_backbone(config.backbone)
    check_sizes(backbone, config)
    assert embed_dim(backbone) == 768


def test_the_command_says_so_without_torch(tmp_path: Path) -> None:
    words = ["train", "dino/images", f"data={tiny.digits_file(tmp_path)}", "backbone=vit_tiny"]
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "selftask", *words, "launch.processes=2"],
        env={**os.environ, **tiny.environment()},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "| torch\n" not in done.stderr
    assert [line for line in done.stderr.splitlines() if line.startswith("error: ")]
