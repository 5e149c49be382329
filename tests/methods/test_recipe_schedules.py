"""Schedules of shipped recipes at their full length, beside the formula of the published code."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from selftask.config.load import load_config
from selftask.config.run_length import RunLength
from selftask.config.schema import Config
from selftask.data.transforms.normalize import Normalize
from selftask.optim.build import lr_schedule
from selftask.optim.param_groups import assign_settings
from selftask.optim.schedules import build_schedule
from selftask.registry import METHODS

IMAGENET, CIFAR = 1_281_167, 50_000
Formula = Callable[[int], float]


def at_steps(section: Any, config: Config, steps: tuple[int, ...], images: int) -> list[float]:
    length = RunLength.of(config.train, images)
    schedule = build_schedule(section, length)
    return [schedule(step / length.total_steps) for step in steps]


def lr_at(config: Config, steps: tuple[int, ...], images: int = IMAGENET) -> list[float]:
    section = config.optimizer.lr_section(config.train.batch_size)
    return at_steps(section, config, steps, images)


def cosine(start: float, end: float, progress: float) -> float:
    return end + (start - end) * 0.5 * (1 + math.cos(math.pi * progress))


DINOV2_STEPS = (0, 1, 1249, 1250, 6250, 12_500, 37_499, 37_500, 62_500, 124_999)


def dinov2_lr(step: int) -> float:
    """train.py and ssl_default_config.yaml: 4e-3 at batch 1024, square root; 12,500 of 125,000."""
    peak = 4e-3 * math.sqrt(2048 / 1024)
    if step < 12_500:
        return peak * step / 12_500
    return cosine(peak, 1e-6, (step - 12_500) / 112_500)


def test_dinov2s_recipe_has_the_schedules_of_the_published_run() -> None:
    config = load_config("dinov2/vit_large_imagenet", [])
    assert RunLength.of(config.train, IMAGENET).total_steps == 100 * 1250
    expected = [dinov2_lr(step) for step in DINOV2_STEPS]
    assert lr_at(config, DINOV2_STEPS) == pytest.approx(expected, rel=1e-7)

    last = next(rule for rule in config.optimizer.groups if "last_layer" in str(rule.match))
    section = config.optimizer.lr_section(2048, last.given["schedule"])
    frozen = [0.0 if step < 1250 else lr for step, lr in zip(DINOV2_STEPS, expected, strict=True)]
    assert at_steps(section, config, DINOV2_STEPS, IMAGENET) == pytest.approx(frozen, rel=1e-7)

    decay = [cosine(0.04, 0.4, step / 125_000) for step in DINOV2_STEPS]
    actual = at_steps(config.optimizer.weight_decay, config, DINOV2_STEPS, IMAGENET)
    assert actual == pytest.approx(decay, rel=1e-12)

    method = METHODS["dinov2"].Config(**config.method.args)
    momentum = [cosine(0.992, 1.0, step / 125_000) for step in DINOV2_STEPS]
    actual = at_steps(method.momentum, config, DINOV2_STEPS, IMAGENET)
    assert actual == pytest.approx(momentum, rel=1e-12)
    warm = [0.04 + 0.03 * min(step / 37_500, 1.0) for step in DINOV2_STEPS]
    actual = at_steps(method.teacher_temperature, config, DINOV2_STEPS, IMAGENET)
    assert actual == pytest.approx(warm, rel=1e-12)


@pytest.mark.parametrize(
    ("recipe", "layer_decay", "depth"),
    [
        ("dinov2/vit_large_imagenet", 0.9, 24),
        ("dinov2/vitg14_imagenet", 1.0, 40),
        ("dinov3/vit_large_imagenet", 0.9, 24),
        ("dinov3/vit7b", 0.98, 40),
        ("dinov3/vit7b_high_resolution", 0.98, 40),
    ],
)
def test_dinov2s_recipes_have_the_blur_the_drop_path_and_the_heads_of_the_code(
    recipe: str, layer_decay: float, depth: int
) -> None:
    config = load_config(recipe, [])
    blur = [
        {t.name: t.args.get("p", 1.0) for t in view.transforms}.get("gaussian_blur", 0)
        for view in config.views.values()
    ]
    assert blur == [0, 0.9, 0.5]  # transforms.py keeps an image with the probability that it names
    assert config.backbone.args["drop_path_uniform"]
    assert config.method.args["norm_last_layer"] is False
    rates = {str(rule.match): rule.lr for rule in config.optimizer.groups}
    assert rates["backbone.patch_embed"] == 0.2
    assert config.optimizer.layer_decay == layer_decay
    assert rates.get("mask_token", 1.0) == pytest.approx(layer_decay ** (depth + 1), rel=1e-14)


def timm_cosine(step: int) -> float:
    """SimMIM's config of Swin-B for batch 2048, and timm's CosineLRScheduler."""
    total, warmup = 62_500, 6250
    if step < warmup:
        return 4e-6 + (8e-4 - 4e-6) * step / warmup
    return cosine(8e-4, 4e-5, step / total)


def multistep(step: int) -> float:
    """SimMIM's config of ViT-B for batch 2048: a tenth from epoch 700 on."""
    if step < 6250:
        return 2e-6 + (4e-4 - 2e-6) * step / 6250
    return 4e-4 if step < 700 * 625 else 4e-5


def msn(step: int) -> float:
    """msn_vits16.yaml with ipe_scale 1.25: T_max is 1.25 times the 800 epochs of 1,251 batches."""
    total, warmup = 800 * 1251, 15 * 1251
    if step < warmup:
        return 2e-4 + (1e-3 - 2e-4) * step / warmup
    return cosine(1e-3, 1e-6, (step - warmup) / (1.25 * total - warmup))


def data2vec(step: int) -> float:
    total, warmup = 800 * 625, 40 * 625
    if step < warmup:
        return 2e-3 * step / warmup
    return cosine(2e-3, 1e-5, (step - warmup) / (total - warmup))


def pirl(step: int) -> float:
    return cosine(0.12, 1.2e-4, step / (800 * 1251))


def adco(step: int) -> float:
    """--lr_final of ops/argparser.py."""
    return cosine(0.03, 6e-4, step / (200 * 5004))


def jigsaw(step: int) -> float:
    """jigsaw_8gpu_resnet.yaml of VISSL, between its epochs, too."""
    epoch = step / 5004
    if epoch < 5:
        return 0.025 + 0.075 * epoch / 5
    return float(0.1 * 0.1 ** sum(epoch >= milestone for milestone in (30, 60, 90, 100)))


@pytest.mark.parametrize(
    ("recipe", "formula"),
    [
        ("jigsaw/resnet50_imagenet", jigsaw),
        ("simmim/swin_base_imagenet", timm_cosine),
        ("simmim/vit_base_imagenet", multistep),
        ("msn/vit_small_imagenet", msn),
        ("data2vec/vit_base_imagenet", data2vec),
        ("pirl/resnet50_imagenet", pirl),
        ("adco/resnet50_imagenet", adco),
    ],
)
def test_the_learning_rate_is_that_of_the_published_run(recipe: str, formula: Formula) -> None:
    config = load_config(recipe, [])
    total = RunLength.of(config.train, IMAGENET).total_steps
    steps = (0, 1, 5000, 6249, 6250, total // 3, 2 * total // 3, 437_499, 437_500, total - 1)
    steps = tuple(step for step in steps if step < total)
    assert lr_at(config, steps) == pytest.approx([formula(step) for step in steps], rel=1e-9)


def test_pirls_learning_rate_moves_once_an_epoch() -> None:
    config = load_config("pirl/resnet50_imagenet", [])
    length = RunLength.of(config.train, IMAGENET)
    schedule = lr_schedule(config.optimizer, length, batch=config.train.batch_size)
    assert schedule.update_interval.value == "epoch"


@pytest.mark.parametrize("recipe", ["rotation/resnet50_imagenet", "jigsaw/resnet50_imagenet"])
def test_biases_of_linear_layers_decay_as_in_vissl(recipe: str) -> None:
    """regularize_bias: True, regularize_bn: False."""
    config = load_config(recipe, [])
    length = RunLength.of(config.train, IMAGENET)
    layers = [("network.head", nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)))]
    settings = assign_settings(layers, config.optimizer, length, {})
    decays = {setting.parameter.name: setting.weight_decay for setting in settings}
    assert decays == {
        "network.head.0.weight": 1e-4,
        "network.head.0.bias": 1e-4,
        "network.head.1.weight": 0.0,
        "network.head.1.bias": 0.0,
    }


def test_capis_tokens_decay_as_in_the_published_code() -> None:
    """utils.get_params_groups has exclusions for biases, gammas and norms only."""
    config = load_config("capi/vit_large_imagenet", [])
    length = RunLength.of(config.train, IMAGENET)
    layers = nn.ModuleDict({"patch_embed": nn.Linear(3, 2), "norm": nn.LayerNorm(2)})
    layers.register_parameter("mask_token", nn.Parameter(torch.zeros(1, 1, 2)))
    settings = assign_settings([("network.backbone", layers)], config.optimizer, length, {})
    decays = {setting.parameter.name: setting.weight_decay for setting in settings}
    assert decays["network.backbone.mask_token"] == 0.1


def test_msns_weight_decay_is_the_first_four_fifths_of_a_cosine() -> None:
    config = load_config("msn/vit_small_imagenet", [])
    steps = (0, 100_000, 667_200, 1_000_799)
    expected = [cosine(0.04, 0.4, step / (1.25 * 1_000_800)) for step in steps]
    actual = at_steps(config.optimizer.weight_decay, config, steps, IMAGENET)
    assert actual == pytest.approx(expected, rel=1e-12)


def test_the_warmup_on_cifar10_begins_at_solo_learns_rate() -> None:
    for recipe in ("simclr", "byol", "barlow", "vicreg", "nnclr", "moco", "swav", "dino"):
        config = load_config(f"{recipe}/resnet18_cifar10", [])
        peak = config.optimizer.lr.base
        expected = [3e-5 + (peak - 3e-5) * step / 1950 for step in (0, 1, 1000)]
        assert lr_at(config, (0, 1, 1000), CIFAR) == pytest.approx(expected, rel=1e-9)
    for recipe in ("deepcluster", "wmse"):
        assert lr_at(load_config(f"{recipe}/resnet18_cifar10", []), (0,), CIFAR) == [0.0]


def test_the_predictors_learning_rate_of_simsiam_is_constant_on_cifar10() -> None:
    """In solo-learn, from the first step on."""
    config = load_config("simsiam/resnet18_cifar10", [])
    (rule,) = config.optimizer.groups
    section = config.optimizer.lr_section(256, rule.given["schedule"])
    assert at_steps(section, config, (0, 1000, 100_000), CIFAR) == [0.5] * 3
    assert lr_at(config, (1950,), CIFAR) == [0.5]


def test_the_transformer_of_all4one_has_a_tenth_of_the_learning_rate_on_cifar10() -> None:
    """In solo-learn its group has an lr of 0.1, with the warm-up and cosine of the others."""
    config, steps = load_config("all4one/resnet18_cifar10", []), (0, 1950, 100_000, 194_999)
    (rule,) = config.optimizer.groups
    section = config.optimizer.lr_section(256, rule.given["schedule"])
    rates = [rule.lr * rate for rate in at_steps(section, config, steps, CIFAR)]
    assert rates == pytest.approx([0.1 * rate for rate in lr_at(config, steps, CIFAR)], rel=1e-12)
    assert rates[1] == pytest.approx(0.1, rel=1e-12)


def test_beit_has_the_crops_and_the_drop_path_of_beit_v2s_300_epochs() -> None:
    """beit2/PRETRAINING.md; BEiT and data2vec have crops from 0.08 on."""
    config = load_config("beit/vit_base_imagenet", [])
    assert config.views["main"].transforms[0].args["scale"] == (0.2, 1.0)
    assert config.backbone.args["args"]["drop_path_rate"] == 0.0
    others = [
        load_config(f"{name}/vit_base_imagenet", []).views["main"].transforms[1:]
        for name in ("beit", "data2vec")
    ]
    assert others[0] == others[1]


def test_data2vec_masks_120_patches() -> None:
    config = load_config("data2vec/vit_base_imagenet", [])
    method = METHODS["data2vec"](METHODS["data2vec"].Config(**config.method.args))
    assert method.num_hidden((14, 14)) == 120 and method.config.norm_target
    assert config.backbone.args["args"]["attn_drop_rate"] == 0.05


@pytest.mark.parametrize(
    ("recipe", "mean", "std"),
    [
        ("simclr/resnet50_imagenet", [0, 0, 0], [1, 1, 1]),
        ("npid/resnet18_cifar10", [0.4914, 0.4822, 0.4465], [0.2023, 0.1994, 0.2010]),
        ("empssl/resnet18_cifar10", [0.5, 0.5, 0.5], [0.5, 0.5, 0.5]),
    ],
)
def test_pixels_are_normalized_as_in_the_published_code(
    recipe: str, mean: list[float], std: list[float]
) -> None:
    config = load_config(recipe, [])
    lists = [*(view.transforms for view in config.views.values()), config.eval.transforms]
    for transforms in lists:
        assert transforms[-1].name == "normalize"
        assert Normalize(**transforms[-1].args).moments() == (mean, std)


@pytest.mark.parametrize(
    ("recipe", "group", "names"),
    [
        ("rotation/resnet50_imagenet", "main", "random_resized_crop horizontal_flip"),
        ("cmae/vit_base_imagenet", "target", "random_crop color_jitter grayscale gaussian_blur"),
        ("obow/resnet50_imagenet", "teacher", "resize center_crop horizontal_flip"),
        (
            "empssl/resnet18_cifar10",
            "main",
            "random_resized_crop horizontal_flip color_jitter grayscale gaussian_blur solarize",
        ),
        (
            "clsa/resnet50_imagenet",
            "strong",
            "random_resized_crop color_jitter grayscale gaussian_blur horizontal_flip rand_augment",
        ),
    ],
)
def test_views_have_the_transforms_of_the_published_code(
    recipe: str, group: str, names: str
) -> None:
    transforms = load_config(recipe, []).views[group].transforms
    assert " ".join(transform.name for transform in transforms) == f"{names} normalize"


@pytest.mark.parametrize("recipe", ["simmim/swin_base_imagenet", "simmim/vit_base_imagenet"])
def test_simmims_crops_are_bilinear_and_its_networks_as_published(recipe: str) -> None:
    config = load_config(recipe, [])
    crop = config.views["main"].transforms[0]
    assert crop.args.get("interpolation", "bilinear") == "bilinear"
    args = config.backbone.args["args"]
    swin = recipe == "simmim/swin_base_imagenet"
    assert args["drop_path_rate"] == (0.0 if swin else 0.1)
    assert args.get("init_values") == (None if swin else 0.1)


def test_mixmims_swin_has_no_stochastic_depth() -> None:
    """mixmim_base in models_mixmim.py; timm's Swin has a rate of 0.1 by default."""
    backbone = load_config("mixmim/swin_base_imagenet", []).backbone
    assert backbone.args["args"]["drop_path_rate"] == 0.0


def test_data2vec2s_class_token_decays() -> None:
    """data2vec2.py has no decay of biases and of what has one dimension; tokens have three."""
    assert load_config("data2vec2/vit_base_imagenet", []).optimizer.decay_tokens


def test_obows_word_generator_is_twice_as_wide_as_the_network() -> None:
    """num_channels_hidden in builder_obow.py, of 2048 channels."""
    assert load_config("obow/resnet50_imagenet", []).method.args["hidden_dim"] == 2 * 2048
