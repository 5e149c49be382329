"""Load frozen models and their images for ``eval`` and ``features``."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from selftask.cli.options import take
from selftask.config.trust import TRUST, take_trust
from selftask.errors import UserError
from selftask.files.paths import exists, expand_user

if TYPE_CHECKING:
    import torch
    from torch import nn

    from selftask.config.schema import Config
    from selftask.data.loading.open_data import Sources

IMAGES = {"data", "data.name", "data.path", "data.pattern", "data.dataset"}
SHIPPED = "base/evaluate.yaml"  # recipe for models that are not from a run
MODEL = """\
RUN_OR_MODEL  a run's folder (its export, or without one its newest checkpoint), the folder of a
              sharded checkpoint, an exported backbone.pt, timm:NAME or torchvision:NAME"""
FROZEN = f"""\
{MODEL},
              or RUN@STEP or RUN@best: a checkpoint of a run (weights=ema: its average)"""
WEIGHTS = f"""\
weights=FILE  for timm: and torchvision: the weights instead of the pretrained ones, or `none`
prefix=NAME.  the tensors under this prefix, of a file with several networks
image_size=PIXELS      of the images; the positions of a vision transformer are interpolated
eval.transforms=[...]  how images are shown; default: as in the run, or as the library does
{TRUST}"""


@dataclass(frozen=True)
class Frozen:
    """A model on the CPU, its metadata, config and images, and the device to compute on."""

    backbone: nn.Module
    facts: dict[str, Any]
    config: Config
    sources: Sources
    device: torch.device

    @cached_property
    def model_digest(self) -> str:
        """SHA-256 digest of the names and values of the backbone's tensors, in hexadecimal."""
        from selftask.models.weights.frozen import weights_digest

        return bytes(weights_digest(self.backbone).tolist()).hex()

    @cached_property
    def data_digests(self) -> dict[str, str]:
        """Digest of each set of images, by its config key; ``data`` are the training images."""
        from selftask.data.data_module import val_key
        from selftask.evaluate.image_scores import content_digest

        sets = {"": self.sources.val, **self.sources.val_sets}
        tests = {val_key(name): source for name, source in sets.items() if source is not None}
        return {key: content_digest(s) for key, s in {"data": self.sources.train, **tests}.items()}


def open_frozen(
    address: str,
    overrides: list[str],
    export: Path | None = None,
    loaded: tuple[nn.Module, dict[str, Any]] | None = None,
    *,
    name: str | None = None,
) -> Frozen:
    """Return the model at ``address``, and the images of its run or of ``overrides``.

    Images are transformed as in the run's config or, without a run, as in the model's metadata.
    Plug-ins of ``overrides`` are imported.

    Args:
        address: A run, a file, or a model of timm or torchvision.
        overrides: ``key=value`` words, which take precedence over config and metadata.
            ``trust=true`` allows code that the run or file names.
        export: A ``backbone.pt`` to load in place of the run's weights.
        loaded: A backbone and its metadata; ``address`` is then a name for messages.
        name: Name of the weights in messages; None for their path.

    Raises:
        UserError: If anything is missing or does not fit. Mistakes in ``overrides`` are reported
            before anything is loaded.
    """
    from selftask.checkpoint.mirror import local_run
    from selftask.config.compose import recipes
    from selftask.config.compose.overrides import import_plugins
    from selftask.config.compose.provenance import show_path
    from selftask.config.load import load_config
    from selftask.models.weights.address import PRETRAINED, check_model

    overrides, trust = take_trust(overrides)
    overrides = ["eval.loss=false", *without_old_val(overrides)]  # the method is not loaded
    import_plugins(overrides)  # a plug-in may register a handler for the address
    weights, overrides = take("weights", overrides)
    prefix, overrides = take("prefix", overrides)
    has_config = False
    if loaded is None:
        check_model(address if export is None else str(export), weights)
        address = local_run(address)
        saved = expand_user(address) / "config.yaml"
        has_config = exists(saved)
    recipe = str(saved if has_config else recipes.folder() / SHIPPED)
    config = load_config(recipe, overrides, trust=trust)
    if _has_lost_labels(config):
        overrides = ["data.labels=true", *overrides]
        config = load_config(recipe, overrides, trust=trust)
    asked_size, rest = take("image_size", overrides)
    size = int(asked_size) if asked_size and asked_size != "null" else None

    from selftask.data.source import channels_of
    from selftask.logs.lines import info_on_stderr
    from selftask.models.weights.model_source import open_model

    sources = _open_images(config, trust)
    with info_on_stderr():
        _log_origins(config, without=f"{show_path(Path(recipe))}:")
        backbone, facts = loaded or open_model(
            address if export is None else str(export),
            weights=weights or PRETRAINED,
            trust=trust,
            image_size=size,
            prefix=prefix,
            name=name,
        )
    if not has_config and facts.get("transforms"):
        shown = yaml.safe_dump(facts["transforms"], default_flow_style=True, width=float("inf"))
        config = load_config(recipe, [f"eval.transforms={shown.strip()}", *rest], trust=trust)
    taken, there = facts.get("channels", 3), channels_of(sources.train)
    if taken != there:
        raise UserError(f"data: its images have {there} channels, and {address} takes {taken}")
    return Frozen(backbone, facts, config, sources, _set_up_device(config))


def _open_images(config: Config, trust: bool) -> Sources:
    """Return the images of a config, copied to ``data.stage_to`` if the user may choose it."""
    from selftask.data.loading.open_data import copy_data, open_received

    # A run of someone else must not choose a folder to write to.
    may_write = trust or _is_typed(config, "data.stage_to")
    sources = open_received(config, trust=trust)
    return copy_data(sources, config.data.stage_to if may_write else None)


def _log_origins(config: Config, without: str) -> None:
    from selftask.config.explain import explain_chosen
    from selftask.logs import LOGGER

    for line in explain_chosen(config, without=without):
        LOGGER.debug("config: %s", line)


def _set_up_device(config: Config) -> torch.device:
    """Set the number of threads if it was typed, and return the device to compute on."""
    import torch

    from selftask.distributed.device import keep_freed_memory, pick_device
    from selftask.distributed.world import read_world

    threads = config.train.threads
    if threads != "auto" and _is_typed(config, "train.threads"):
        torch.set_num_threads(threads)
    device = pick_device(config.train.device, read_world())
    keep_freed_memory(device)
    return device


def _is_typed(config: Config, key: str) -> bool:
    return config.place(key).startswith("command line")


def without_old_val(words: list[str]) -> list[str]:
    """Drop the run's validation sets if the words name other training images.

    Args:
        words: ``key=value`` words for the config of a run.

    Returns:
        The words, preceded by words that remove the validation sets if necessary.
    """
    if IMAGES.isdisjoint(word.partition("=")[0] for word in words):
        return words
    return ["data.val=null", "data.val_sets=null", *words]  # later words may set them


def _has_lost_labels(config: Config) -> bool:
    """Return whether ``data.path`` was overridden but the run's ``labels: false`` was not."""
    was_typed = _is_typed(config, "data.path") and not _is_typed(config, "data.labels")
    return was_typed and config.data.source.args.get("labels") is False
