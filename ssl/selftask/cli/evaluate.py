"""``selftask eval``: judge the features of a run, a file, or a model of timm or torchvision."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from selftask.errors import UserError
from selftask.registry import EVALUATIONS

if TYPE_CHECKING:
    from selftask.config.schema import Config

USAGE = """\
usage: selftask eval knn|linear RUN_OR_MODEL [key=value ...]

RUN_OR_MODEL  a run's folder, an exported backbone.pt, timm:NAME or torchvision:NAME
data=DIR      the labelled images to learn from; default: those of the run
data.val=DIR  those to test on; without it, k-NN leaves each image out of its own neighbours
weights=FILE  for timm: and torchvision: the weights instead of the pretrained ones, or `none`
Fields of the evaluation need no prefix: k=[5,20], few_labels=[10]. Prints one JSON line last."""

SHIPPED = "base/evaluate.yaml"  # the recipe for models that no run made


def main(argv: list[str]) -> int:
    """Evaluate; the numbers are printed, and kept in the folder of a run."""
    if not argv or any(word in ("-h", "--help") for word in argv):
        print(USAGE)
        return 0
    if len(argv) < 2 or "=" in argv[1]:
        raise UserError(f"eval needs an evaluation and a run or model\n{USAGE}")
    name, address, overrides = argv[0], argv[1], argv[2:]
    EVALUATIONS.address(name)  # raises with the nearest name
    weights = [text.partition("=")[2] for text in overrides if text.startswith("weights=")]
    overrides = [text for text in overrides if not text.startswith("weights=")]

    from selftask.config import recipes
    from selftask.config.load import load_config
    from selftask.data.dataset import copy_data, open_data
    from selftask.data.source import channels_of

    folder = Path(address) if Path(address).is_dir() else None
    own = folder / "config.yaml" if folder else None
    recipe = own if own and own.exists() else recipes.folder() / SHIPPED
    asked = [f"eval.evaluations={{{name}: {{}}}}", *_spelt_out(name, overrides)]
    config = _only(load_config(str(recipe), asked), name)
    sources = copy_data(open_data(config.data), config.data.copy_to)

    from selftask.environment import keep_freed_memory, pick_device
    from selftask.evaluate.offline import evaluate_backbone
    from selftask.models.address import PRETRAINED, open_model
    from selftask.world import World

    backbone, facts = open_model(address, weights=weights[-1] if weights else PRETRAINED)
    taken, there = facts.get("channels", 3), channels_of(sources.train)
    if taken != there:
        raise UserError(f"data: its images have {there} channels, and {address} takes {taken}")
    device = pick_device(config.train.device, World())
    keep_freed_memory(device)
    row = evaluate_backbone(backbone, config, sources, device=device)
    print(json.dumps(row))
    if folder is not None:
        with (folder / "evaluations.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({"evaluation": name, "overrides": overrides, **row}) + "\n")
    return 0


def _only(config: Config, name: str) -> Config:
    """The config with no other evaluation than the one called for."""
    chosen = {name: config.eval.evaluations[name]}
    return replace(config, eval=replace(config.eval, evaluations=chosen))


def _spelt_out(name: str, overrides: list[str]) -> list[str]:
    """``k=5`` means ``eval.evaluations.knn.k=5``."""
    config = EVALUATIONS.config_class(name)
    own = {field.name for field in fields(config)} if config is not None else set()
    prefix = f"eval.evaluations.{name}."
    return [prefix + text if text.partition("=")[0] in own else text for text in overrides]
