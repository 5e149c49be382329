"""``selftask finetune``: train a pretrained backbone on labeled images."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from selftask.checkpoint.kept import named_checkpoint
from selftask.checkpoint.mirror import local_run
from selftask.cli.model.load_model import MODEL
from selftask.cli.options import needs_first, take
from selftask.cli.verbosity import USAGE as VERBOSITY
from selftask.config.trust import TRUST, refuse_addresses, take_trust
from selftask.errors import UserError
from selftask.files.paths import exists, expand_user

RECIPE = "supervised/finetune"
_FILE = re.compile(r"\.(pt|pth|bin|ckpt|torch|safetensors)$")  # a run may be called `lr_0.5`
USAGE = f"""\
usage: selftask finetune RUN_OR_MODEL [data=DIR data.val=DIR] [key=value ...]

{MODEL}
data=DIR      labeled images, one folder a class; default: those of the run
data.val=DIR  labeled images to test on after each epoch; without it, no accuracy is measured
data.subset='{{count: 10, per_class: true}}' or 0.1: train on fewer of the labels
train.epochs=50 train.batch_size=32 optimizer.lr=1e-3: what to change first
method.freeze_backbone=true  trains the classifier alone
weights=FILE  for timm: and torchvision: the weights to start from
prefix=NAME.  the tensors under this prefix, of a file with several networks
init.backbone=null  starts from random weights, as a baseline for pretraining
image_size=PIXELS  default: that of the model; positions of a vision transformer are interpolated
out=DIR       default: runs/finetune_NAME; the same command again resumes the run
{TRUST}

It is `selftask train {RECIPE} init.backbone=RUN_OR_MODEL` with the model's backbone, size and
normalization; `selftask config {RECIPE}` shows the recipe.
{VERBOSITY}"""


def main(argv: list[str]) -> int:
    """Convert the model to config overrides and run ``selftask train``; return its exit code."""
    needs_first(argv, "finetune needs a run or model", USAGE)
    from selftask.cli import train

    return train.main([RECIPE, *recipe_words(argv[0], argv[1:])])


def recipe_words(address: str, words: list[str]) -> list[str]:
    """Return the overrides of ``RECIPE`` for a model and its run, followed by those in ``words``.

    Raises:
        UserError: If there is no such model, if neither its run nor ``words`` give data, or if its
            architecture is the user's code and ``trust=true`` is not given.
    """
    words, trust, weights = take_start(address, words)
    prefix, words = take("prefix", words)
    asked_size, words = take("image_size", words)
    if asked_size is not None and not asked_size.isdecimal():
        raise UserError(f"image_size={asked_size}: expected a whole number of pixels")
    size = int(asked_size) if asked_size else None
    data = _data(address, words, trust=trust)

    from selftask.models.weights.model_source import describe_model  # imports torch

    facts = describe_model(address, weights=weights, trust=trust, image_size=size)
    settings = {
        **data,
        **start_settings("finetune", address, weights, facts),
        **({} if prefix is None else {"init.prefix": prefix}),
        **_transforms(facts),
    }
    return [*(f"{key}={flow(value)}" for key, value in settings.items()), *words]


def take_start(address: str, words: list[str]) -> tuple[list[str], bool, str]:
    """Take ``trust=`` and ``weights=`` from the words; return the others, and both values.

    Modules of ``import=`` are imported. Without ``weights=``, the value is ``pretrained``.

    Raises:
        UserError: If there is no such model, or a value is invalid.
    """
    from selftask.config.compose.overrides import import_plugins
    from selftask.models.weights.address import PRETRAINED, check_model

    import_plugins(words)  # a plug-in may register a handler for the address
    words, trust = take_trust(words)
    weights, words = take("weights", words)
    check_model(address, weights)
    return words, trust, weights or PRETRAINED


def start_settings(
    command: str, address: str, weights: str, facts: dict[str, Any]
) -> dict[str, Any]:
    """Return the settings that follow from the model, by key: backbone, its weights, and ``out``.

    Args:
        command: Name of the command, for ``out``.
        address: A run, a file, or a model of timm or torchvision.
        weights: Value of ``weights=``: ``pretrained``, ``none`` or a file.
        facts: Metadata of the model.
    """
    from selftask.models.weights.address import NONE, PRETRAINED

    architecture = facts["architecture"]
    return {
        "backbone": {"name": architecture["name"], **architecture["args"]},
        "init.backbone": {PRETRAINED: address, NONE: None}.get(weights, weights),
        "out": f"runs/{command}_{_FILE.sub('', Path(address.rpartition(':')[2]).name)}",
    }


def _transforms(facts: dict[str, Any]) -> dict[str, Any]:
    """Return overrides that give views and evaluation the model's size and normalization.

    A model that received images in their own size (the digits) is trained with the transforms of
    its evaluation. The result is empty if the transforms are unknown.
    """
    shown = facts.get("transforms")
    if not shown:
        return {}
    side = facts.get("input_size")
    if side is None:
        return {"views.main.transforms": shown, "eval.transforms": shown}
    return {
        "views.main.transforms.0.size": side,
        "views.main.transforms.2": shown[-1],
        "eval.transforms": shown,
    }


def _data(address: str, words: list[str], *, trust: bool) -> dict[str, Any]:
    """Return the data of the run as an override; empty if ``words`` give other data.

    Raises UserError if neither gives data.
    """
    checkpoint = named_checkpoint(address)
    run = expand_user(local_run(address)) if checkpoint is None else checkpoint.parent.parent
    saved = run / "config.yaml"
    keys = {word.partition("=")[0] for word in words}
    if keys & {"data", "data.name", "data.path"}:
        return {}
    if not exists(saved):
        raise UserError(f"finetune: data is missing: {address} names no images; give data=DIR")
    from selftask.config.load import load_config

    config = load_config(str(saved), [], trust=trust)
    if not trust:
        refuse_addresses(config, "data")
    data = config.data
    source = {**data.source.to_dict()}
    if data.val is not None and not any(key.startswith("data.val") for key in keys):
        source["val"] = data.val.to_dict()
    return {"data": source}


def flow(value: Any) -> str:
    """Format a plain value for ``key=value``; raise UserError if it has a reference, ``${...}``."""
    from selftask.config.compose.overrides import format_value

    text = format_value(value)
    if "${" in text:
        raise UserError(f"{text}: a reference in a run or file is not resolved")
    return text
