"""``selftask adapt``: continue a trained model on other images without labels."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from selftask.cli.adapt import choices
from selftask.cli.adapt.choices import Choice
from selftask.cli.model.finetune import flow, start_settings, take_start
from selftask.cli.model.load_model import MODEL
from selftask.cli.options import needs_first
from selftask.cli.verbosity import USAGE as VERBOSITY
from selftask.config.checks.grid import patch_size
from selftask.config.trust import TRUST
from selftask.errors import UserError

if TYPE_CHECKING:
    from selftask.config.schema import Config
    from selftask.data.loading.open_data import Sources

USAGE = f"""\
usage: selftask adapt RUN_OR_MODEL data=DIR [data.val=LABELED] [key=value ...]

{MODEL}
data=DIR          images to continue on; labels are not used in training
data.val=LABELED  labeled images: k-NN before, during and after, if data has labels, too
weights=FILE      for timm: and torchvision: the weights to start from
memory=24GB       of the device; default: that of this machine
--dry-run         print the choices and do not train
{TRUST}

Chooses method, image size, length, learning rate, LoRA or all weights, and preservation, and prints
each choice with its reason; key=value overrides it. Rates, epochs and weights of preservation are
starting points that were not tuned. The end says whether the features are better than at the start.
If they are worse, export/ has the best ones, which may be those of the start.
The same command again resumes a run with the choices it began with. More: docs/how-to-continue.md.
{VERBOSITY}"""

_BY_MEMORY = ("backbone.lora", "train.batch_size", "train.accumulate", "train.step")
"""Keys whose values are chosen according to the free memory."""


def main(argv: list[str]) -> int:
    """Choose the settings, train, and compare the features with those at the start.

    With ``--dry-run``, only the choices are printed. Returns the exit code of the training.
    """
    needs_first(argv, "adapt needs a run or model", USAGE)
    from selftask.cli import train
    from selftask.config.load import load_config

    dry_run, argv = "--dry-run" in argv, [word for word in argv if word != "--dry-run"]
    recipe, words = recipe_words(argv[0], argv[1:])
    if dry_run:
        return 0
    code = train.main([recipe, *words])
    if code == 0 and os.environ.get("RANK", "0") == "0":
        conclude(load_config(recipe, words))
    return code


def recipe_words(address: str, words: list[str]) -> tuple[str, list[str]]:
    """Print the choices for a model and its images; return the recipe and all overrides.

    A resumed run keeps its choices, since a different amount of free memory could change them.

    Raises:
        UserError: If the model or ``data`` is missing, if ``weights=none``, if the architecture is
            the user's code and ``trust=true`` is not given, or if the memory is too small.
    """
    from selftask.models.weights.address import NONE
    from selftask.plan.assumptions import take_assumptions

    words, trust, weights = take_start(address, words)
    words, assumptions = take_assumptions(words)
    keys = {word.partition("=")[0] for word in words}
    if not keys & {"data", "data.name", "data.path"}:
        raise UserError("adapt: data is missing; give data=DIR with images to continue on")

    from selftask.models.weights.model_source import describe_model  # imports torch

    facts = describe_model(address, weights=weights, trust=trust)
    if weights == NONE:
        raise UserError("adapt: weights=none are random; adapt continues trained weights")
    method, reason = choices.choose_method(facts)
    recipe = f"{method}/images"
    sides = choices.choose_side(facts)
    settings = start_settings("adapt", address, weights, facts) | _normalization(facts, recipe)
    fixed = _words([*(Choice(*one, "") for one in settings.items()), *sides], keys)
    print(f"adapt: {recipe}: {reason}")
    chosen = _chosen(sides, recipe, [*fixed, *words], keys, assumptions)
    return recipe, [*fixed, *chosen, *words]


def _normalization(facts: dict[str, Any], recipe: str) -> dict[str, Any]:
    """Return overrides that give all pipelines of the recipe the model's normalization.

    The result is empty if the model has none.
    """
    from selftask.config.load import load_config

    normalize = next((t for t in facts.get("transforms") or () if t["name"] == "normalize"), None)
    if normalize is None:
        return {}
    return {
        ".".join((*key, str(index))): normalize
        for key, transforms in load_config(recipe, ["data=digits"], trust=True).pipelines.items()
        for index, transform in enumerate(transforms)
        if transform.name == "normalize"
    }


def _chosen(
    sides: list[Choice], recipe: str, words: list[str], keys: set[str], assumptions: Any
) -> list[str]:
    """Print all choices; return those that the user has not overridden, as ``key=value``."""
    from selftask.config.load import load_config
    from selftask.data.loading.open_data import open_data

    config = load_config(recipe, words)
    sources = open_data(config.data)
    made = _choices(config, sources, recipe, words, keys, assumptions)
    for choice in (*sides, *made):
        typed = " (overridden)" if _is_typed(choice.key, keys) else ""
        print(f"adapt: {choice.key}={flow(choice.value)}: {choice.reason}{typed}")
    if not _has_labels(sources):
        print("adapt: without labels in both data and data.val nothing measures what is learned")
    return _words(made, keys)


def _choices(
    config: Config,
    sources: Sources,
    recipe: str,
    words: list[str],
    keys: set[str],
    assumptions: Any,
) -> list[Choice]:
    """Return the choices that depend on the images and the memory; a resumed run keeps its own."""
    from selftask.config.load import load_config
    from selftask.task.task_state import resumes

    saved = None
    if resumes(config):
        saved = load_config(str(config.out_folder / "config.yaml"), []).to_dict()
    num_images = len(sources.train)
    made = [choices.choose_preservation(num_images), choices.choose_batch(num_images)]
    made += choices.choose_measures(has_labels=_has_labels(sources))
    if recipe.startswith("dinov3"):
        for name in ("gram_start", "gram_copy", "gram_renewals"):
            made.append(Choice(f"method.{name}", 0, "the start is the Gram teacher"))
    if saved is not None:
        made = _kept([*made, *(Choice(key, None, "") for key in _BY_MEMORY)], saved)
    elif not any(word.startswith("backbone.lora") for word in words):
        parts = _trained_part(recipe, [*_words(made, keys), *words], keys, assumptions)
        made = [one for one in made if one.key not in {part.key for part in parts}] + parts
    config = load_config(recipe, [*_words(made, keys), *words])  # with the user's batch and LoRA
    schedule = choices.choose_schedule(
        num_images,
        config.train.batch_size * config.train.accumulate,
        is_small=config.backbone.lora is not None,
        has_layers=patch_size(config.backbone) is not None,
    )
    made += schedule if saved is None else _kept(schedule, saved)
    return made


def _kept(made: Iterable[Choice], saved: dict[str, Any]) -> list[Choice]:
    """Return the choices whose keys are in a run's config ``saved``, with the values there."""
    kept = {}
    for choice in made:
        *sections, name = choice.key.split(".")
        values: Any = saved
        for section in sections:
            values = values.get(section) or {}
        if name in values:
            kept[choice.key] = Choice(choice.key, values[name], "as the run began")
    return list(kept.values())


def _trained_part(recipe: str, words: list[str], keys: set[str], assumptions: Any) -> list[Choice]:
    """Return the choices of LoRA and a smaller batch that are needed to fit into memory.

    The list is empty if all weights can be trained. A batch size set by the user is kept.

    Raises:
        UserError: If even LoRA on a small batch does not fit.
    """
    from selftask.config.load import load_config
    from selftask.config.values.budget import show_bytes
    from selftask.distributed import accelerator
    from selftask.distributed.device import pick_device
    from selftask.distributed.world import World
    from selftask.plan.plan import make_plan

    config = load_config(recipe, words)
    if assumptions.memory is None:
        device = pick_device(config.train.device, World())
        host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        size = accelerator.free_bytes(device) or host
        assumptions = replace(assumptions, memory=float(size))
    rank, batch = {"rank": 8}, config.train.batch_size
    is_fixed = keys & {"train", "train.batch_size", "train.accumulate", "train.step"}
    numbers = (1,) if is_fixed else (1, 2, 4, 8)
    smaller = [(rank, batch // parts, parts) for parts in numbers if batch // parts > 1]
    needed = 0
    for lora, size, parts in [(None, batch, 1), *smaller]:
        values: dict[str, Any] = {} if lora is None else {"backbone.lora": lora}
        if parts > 1:
            values |= {"train.batch_size": size, "train.accumulate": parts}
            values["train.step"] = "accumulate"
        changes = [Choice(key, value, "") for key, value in values.items()]
        plan = make_plan(load_config(recipe, [*words, *_words(changes, keys)]), assumptions)
        needed = needed or plan.memory.total
        if plan.memory.fits(assumptions.memory):
            reason = (
                f"all weights need {show_bytes(needed)}, the device has "
                f"{show_bytes(assumptions.memory)}; this needs {show_bytes(plan.memory.total)}"
            )
            return [replace(choice, reason=reason) for choice in changes]
    raise UserError(
        f"adapt: even LoRA on batches of {size} images needs {show_bytes(plan.memory.total)}, and "
        f"the device has {show_bytes(assumptions.memory)}; a smaller image_size needs less"
    )


def _has_labels(sources: Sources) -> bool:
    from selftask.data.labels import is_labeled

    return sources.val is not None and is_labeled(sources.train) and is_labeled(sources.val)


def _words(made: Iterable[Choice], keys: set[str]) -> list[str]:
    """Return choices as ``key=value`` words, except for keys that the user has set."""
    return [f"{one.key}={flow(one.value)}" for one in made if not _is_typed(one.key, keys)]


def _is_typed(key: str, keys: set[str]) -> bool:
    return any(typed == key or key.startswith(f"{typed}.") for typed in keys)


def conclude(config: Config) -> None:
    """Print how the features compare with those at the start.

    The best features are exported, unless the last ones are the best and better than those at the
    start. With fewer than two k-NN results, only the cosine between features and those at the start
    is printed; before the run has finished, nothing is.
    """
    from selftask.checkpoint.mirror import upload_files
    from selftask.logs import read_metrics
    from selftask.run.status import Status

    if not Status(config).is_finished():
        return
    rows = list(read_metrics(config.out_folder / "metrics.jsonl"))
    cosines = [row["start_cosine"] for row in rows if "start_cosine" in row]
    if cosines:
        print(f"adapt: cosine of the features and those at the start: {cosines[-1]:.3f}")
    scores = {int(row["step"]): row["knn_top1"] for row in rows if "knn_top1" in row}
    if len(scores) < 2:
        return
    steps = sorted(scores)
    start, last = steps[0], steps[-1]
    best = max(steps, key=lambda step: (scores[step], -step))
    print(
        f"adapt: k-NN {scores[start]:.4f} at the start, {scores[best]:.4f} at best (step {best}), "
        f"{scores[last]:.4f} at the end"
    )
    if scores[last] == scores[best] and best != start:
        print("adapt: the features are better than at the start; export/ has those of the end")
        return
    if best == start:
        _export_start(config)
        word = "not better" if scores[last] == scores[start] else "worse"
        print(f"adapt: the features are {word} than at the start; export/ has those of the start")
    else:
        print(
            f"adapt: the features are best at step {best}, better than at the start; later ones "
            f"are worse; export/ has those of {_export_best(config)}"
        )
    upload_files(config.out, config.out_folder, "export/**/*.*")  # the run is uploaded already


def _export_best(config: Config) -> str:
    """Export the best features, if their checkpoint was kept; return whose are exported."""
    if config.train.keep_best.metric != "knn_top1":
        return "the end, since train.keep_best.metric is not knn_top1"
    from selftask.cli.model import export

    export.main([f"{config.out_folder}@best", "trust=true"])  # its code has just trained it
    return "that step"


def _export_start(config: Config) -> None:
    """Replace the export by the weights that the run began with."""
    from selftask.checkpoint import store
    from selftask.config.schema import ResumeConfig
    from selftask.hooks.export import facts
    from selftask.models.build import build_backbone
    from selftask.models.weights.export import save_backbone
    from selftask.models.weights.model_source import load_init

    newest = store.load_newest(config.out_folder / "checkpoints")
    channels = 3 if newest is None else newest[0]["channels"]
    backbone = build_backbone(config.backbone, channels)
    load_init(backbone, replace(config, resume=ResumeConfig(checkpoint="never")))
    save_backbone(backbone, config.out_folder / "export", facts(config, 0, channels))
