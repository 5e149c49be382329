"""Pages for users of other frameworks: what stands on our side of their tables exists."""

from __future__ import annotations

import dataclasses
import importlib
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from selftask.cli.main import COMMANDS
from selftask.config.load import load_config
from selftask.registry import METHODS, REGISTRIES

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = {"from-vissl": 75, "from-solo-learn": 45, "from-lightly": 35, "from-dinov2": 40}
RECIPES = (
    "swav/resnet18_cifar10",  # LARS
    "dinov2/vit_large_imagenet",
    "dinov2/images",  # views.global
    "supervised/finetune",
    "moco/images",
    "moco/digits",
)
HOOKS = (
    *("ema", "clip_gradients", "empty_cache", "timing", "memory_snapshot", "activations"),
    *("profiler", "tensorboard", "wandb", "mlflow", "mixup", "histograms", "online_probe"),
)
PATTERN = re.compile(r"`([\w.]+)(?:=([^`]*))?`")


def ours(page: str) -> list[str]:
    """The last cell of each row of the page's tables, without their headers."""
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| .* \| (.*) \|$", text, re.MULTILINE)
    return [cell for cell in rows if cell != "selftask"]


@cache
def keys() -> dict[str, Any]:
    """Every key that one of the recipes has, with the hooks of the tables."""
    results: dict[str, Any] = {"image_size": None}
    for recipe in RECIPES:
        words = ["data=no/such/folder", "eval.evaluations.linear={}", "launch.slurm.time=60"]
        words += ["launch.slurm.partition=gpu", "meters.accuracy={}"] * ("moco" not in recipe)
        words += [f"hooks.{hook}={{}}" for hook in HOOKS]
        words += ["hooks.wandb.mode=offline"]  # no login is wanted here
        config = load_config(recipe, words).to_dict()
        _flatten(config, "", results)
    _flatten(
        {"optimizer": {**load_config("simclr", ["optimizer=larc"]).optimizer.args}}, "", results
    )
    _flatten({"optimizer": load_config("simclr", ["optimizer=sgd"]).optimizer.args}, "", results)
    for name in METHODS.names():
        for field in dataclasses.fields(METHODS[name].Config):
            results[f"method.{field.name}"] = None
    return {**results, "meters.mean_average_precision": None, "task": None, "resume": None}


def _flatten(value: Any, prefix: str, results: dict[str, Any]) -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            results[f"{prefix}{key}"] = item
            _flatten(item, f"{prefix}{key}.", results)


def _known(word: str) -> bool:
    """A key, a command, or a registered name such as a transform."""
    names = {name for registry in REGISTRIES.values() for name in registry.names()}
    return word in keys() or word in names


@pytest.mark.parametrize("page", PAGES)
def test_keys_of_the_tables_exist(page: str) -> None:
    cells = ours(page)
    assert len(cells) >= PAGES[page]
    dotted = set()
    for cell in cells:
        for word, value in PATTERN.findall(cell):
            if "." in word and not word.endswith((".md", ".pt", ".npy", ".h5")):
                assert _known(word), f"{page}: {word}"
                dotted.add(word)
            elif value:
                assert _known(word), f"{page}: {word}={value}"
    assert len(dotted) >= PAGES[page] // 3


@pytest.mark.parametrize("page", PAGES)
def test_commands_of_the_tables_exist(page: str) -> None:
    words = re.findall(r"`selftask ([\w-]+)[^`]*`", "\n".join(ours(page)))
    assert words and set(words) <= set(COMMANDS)


SETTINGS = sorted(
    {
        f"{key}={value}"
        for page in PAGES
        for cell in ours(page)
        for key, value in PATTERN.findall(cell)
        if "." in key and value and "..." not in value and not key.startswith("backbone.")
    }
)


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS)
def test_values_of_the_tables_are_valid(setting: str) -> None:
    """Each in the first recipe that has its key."""
    key, _, value = setting.partition("=")
    recipe = next(
        (name for name in RECIPES if _accepts(name, key)),
        "simclr",
    )
    words = ["data=no/such/folder"]
    if key.startswith("optimizer.groups"):
        value = value.replace("backbone.patch_embed", "backbone")
    if key == "launch.slurm.time":
        words.append("launch.slurm.partition=gpu")
    if key == "data.relabel":  # refused with evaluations that learn from labels
        words.append("eval.evaluations={}")
    load_config(recipe, [*words, *re.split(r"\s+(?=[\w.]+=)", f"{key}={value}")])


@cache
def _config(recipe: str) -> dict[str, Any]:
    results: dict[str, Any] = {}
    _flatten(load_config(recipe, ["data=no/such/folder"]).to_dict(), "", results)
    return results


def _accepts(recipe: str, key: str) -> bool:
    return key in _config(recipe)


@pytest.mark.slow
def test_lightlys_names_are_lightlys() -> None:
    pytest.importorskip("lightly")
    modules = ["models.modules", "models.utils", "loss", "transforms", "data", "utils.scheduler"]
    known = {
        name
        for module in [*modules, "utils.debug"]
        for name in vars(importlib.import_module(f"lightly.{module}"))
    }
    text = (DOCS / "from-lightly.md").read_text(encoding="utf-8").partition("Python library")[2]
    names = re.findall(r"\b([A-Z]\w*(?:Head|Loss|Xent\w*|Similarity|Prototypes|Scheduler))\b", text)
    names += ["deactivate_requires_grad", "update_momentum", "std_of_l2_normalized"]
    names += ["LightlyDataset", "SimCLRTransform"]
    assert len(set(names)) >= 15
    assert set(names) <= known


# Sections and keys of dinov2/configs/ssl_default_config.yaml, as of commit 01c36387.
DINOV2_KEYS = {
    "dino": "loss_weight head_n_prototypes head_bottleneck_dim head_nlayers head_hidden_dim "
    "koleo_loss_weight",
    "ibot": "loss_weight mask_sample_probability mask_ratio_min_max separate_head "
    "head_n_prototypes",
    "train": "batch_size_per_gpu dataset_path output_dir saveckp_freq seed num_workers "
    "OFFICIAL_EPOCH_LENGTH cache_dataset centering",
    "student": "arch patch_size drop_path_rate pretrained_weights ffn_layer interpolate_antialias",
    "teacher": "momentum_teacher teacher_temp",
    "optim": "epochs weight_decay base_lr warmup_epochs min_lr clip_grad freeze_last_layer_epochs "
    "patch_embed_lr_mult layerwise_decay adamw_beta1",
    "crops": "global_crops_size local_crops_number local_crops_size",
    "evaluation": "eval_period_iterations",
}
DINOV2_FURTHER = (
    "layerscale block_chunks qkv_bias num_register_tokens interpolate_offset "
    "final_momentum_teacher warmup_teacher_temp warmup_teacher_temp_epochs weight_decay_end "
    "scaling_rule adamw_beta2 global_crops_scale local_crops_scale nb_knn temperature"
)


def test_dinov2s_keys_are_all_there() -> None:
    page = (DOCS / "from-dinov2.md").read_text(encoding="utf-8")
    keys = [f"{section}.{name}" for section in DINOV2_KEYS for name in DINOV2_KEYS[section].split()]
    missing = [key for key in [*keys, *DINOV2_FURTHER.split()] if not re.search(rf"`{key}\b", page)]
    assert missing == []
