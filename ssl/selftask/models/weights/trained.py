"""Trained networks that return features, or scores of classes or prototypes.

They are teachers for methods that learn from another run, a file of weights or a timm model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from selftask.config.schema import Component, FrozenModule
from selftask.config.trust import code_in, refuse_code
from selftask.errors import UserError
from selftask.models.build import build_backbone, embed_dim, with_embed_dim
from selftask.models.eval_mode import in_eval_mode
from selftask.models.network import Network
from selftask.models.weights.address import NONE, PRETRAINED, check_model
from selftask.models.weights.load import is_on_meta, load_weights
from selftask.models.weights.model_source import (
    describe_model,
    download,
    open_checkpoint,
    open_model,
)
from selftask.models.weights.places import component, config_of, written_by_selftask
from selftask.models.weights.read import backbone_state, read_state
from selftask.registry import BACKBONES, METHODS

if TYPE_CHECKING:
    from selftask.data.tokenizers.base import Tokenizer

Targets = Literal["softmax", "centering", "sinkhorn"]


@dataclass(frozen=True)
class Scores:
    """A head for scores of classes or prototypes, and how scores become probabilities.

    Args:
        head: Features (N, E) -> scores (N, K).
        temperature: Temperature of the softmax, or epsilon of Sinkhorn-Knopp.
        targets: How the method turns scores into probabilities: ``softmax``, ``centering`` (softmax
            after subtracting ``center``) or ``sinkhorn``.
        center: (K,), subtracted from the scores for ``centering``.
        power: For ``sinkhorn``: prototype k gets a share proportional to k ** -power; 0: equal
            shares.
        patches: Scores of a head for patches: tokens (M, E) -> scores (M, K).
    """

    head: nn.Module
    temperature: float = 1.0
    targets: Targets = "softmax"
    center: Tensor | None = None
    power: float = 0.0
    patches: Scores | None = None

    def width(self, backbone: nn.Module) -> int:
        """Return the number of outputs of the head, K, found by applying the head to zeros."""
        like = next(backbone.parameters())
        with torch.no_grad(), in_eval_mode(self.head):
            return int(self.head(like.new_zeros(1, embed_dim(backbone))).shape[-1])


@dataclass(frozen=True)
class TrainedNetwork:
    """A trained network and its properties.

    Args:
        network: V views of (B, C, H, W) -> (V, B, D).
        width: Number of features or scores, D.
        channels: Number of channels of its input images, C.
        transforms: Transforms of its input images, as in a config.
        scores: Its head with scores of classes or prototypes; None if it only returns features.
    """

    network: Network
    width: int
    channels: int
    transforms: list[dict[str, Any]]
    scores: Scores | None = None


def open_features(module: FrozenModule, channels: int = 3) -> TrainedNetwork:
    """Return a trained backbone as a network whose outputs are its features.

    Args:
        module: A run, an exported file, a library's model, or your own class that maps images (B,
            C, H, W) to features (B, D). ``RUN@best`` and ``RUN@STEP`` select a checkpoint of a run.
        channels: Number of channels of the images, for your own class.

    Raises:
        UserError: If the model or its weights are missing, or the weights do not fit the model.
    """
    transforms: list[dict[str, Any]] = []
    if module.is_code:
        backbone = with_embed_dim(build_own(module), module.model, channels)
    else:
        weights = module.weights or PRETRAINED
        backbone, facts = open_model(module.model, weights=weights, trust=module.trust, option="")
        channels, transforms = facts.get("channels", 3), list(facts.get("transforms") or ())
    network = Network(backbone, nn.Identity())
    return TrainedNetwork(network, embed_dim(backbone), channels, transforms)


def open_scores(module: FrozenModule) -> TrainedNetwork:
    """Return a trained network with a head that gives scores.

    Args:
        module: A run (its newest checkpoint), ``RUN@best``, ``RUN@STEP`` or the file of a
            checkpoint, whose method selects the head (``Method.load_scores``); or ``timm:NAME``,
            with the model's own classifier.

    Raises:
        UserError: If something is missing, or there are no scores.
    """
    address = module.model
    if module.library == "torchvision" or module.is_code:
        raise UserError(f"{address}: scores are those of a run or of timm:NAME")
    if module.library == "timm":
        weights = module.weights or PRETRAINED
        backbone, head = _classifier(address.partition(":")[2], weights)
        facts = describe_model(address, weights=weights)
        return _with_scores(backbone, Scores(head), facts["channels"], facts["transforms"])
    checkpoint = open_checkpoint(address)
    backbone, channels, transforms = _read_run(module, checkpoint)
    with written_by_selftask(address):
        method = component(config_of(checkpoint, address)["method"])
        scores = _scores(method, backbone, checkpoint, address)
        return _with_scores(backbone, scores, channels, transforms)


def open_text(address: str, embed_dim: int, tokenizer: Tokenizer) -> tuple[nn.Module, nn.Module]:
    """Return the head for images and the text tower of a checkpoint; see ``Method.load_text``.

    Args:
        address: Checkpoint of a run, as for ``open_checkpoint``.
        embed_dim: Number of features of its backbone, E.
        tokenizer: Tokenizer of the run.

    Raises:
        UserError: If the method has no text tower, or was trained with another tokenizer.
    """
    checkpoint, tokens = open_checkpoint(address), tokenizer.describe()
    with written_by_selftask(address):
        section = component(config_of(checkpoint, address)["method"])
        trained = checkpoint["data"].get("tokenizer", tokens)
    if trained != tokens:
        raise UserError(f"data.tokenizer: {tokens}; {address} was trained with {trained}")
    method = METHODS[section.name]
    with written_by_selftask(address):
        towers: tuple[nn.Module, nn.Module] | None = method(
            method.Config(**section.args)
        ).load_text(embed_dim, checkpoint, tokenizer)
    if towers is None:
        names = [n for n in METHODS if "captions" in METHODS.declared(n, "requires", ())]
        raise UserError(
            f"{address}: {section.name} has no text tower; runs of {', '.join(names)} have"
        )
    return towers


def build_own(module: FrozenModule) -> nn.Module:
    """Build a user's class, ``package.module:Class``, and load its file of weights, if any.

    On the meta device no weights are loaded. Raises UserError if building or loading fails.
    """
    built: nn.Module = BACKBONES["custom"](model=module.model, args=module.args).build()
    if module.weights is not None and not is_on_meta(built):
        load_weights(built, read_state(module.weights), what=module.weights)
    return built


def _read_run(
    module: FrozenModule, checkpoint: Mapping[str, Any]
) -> tuple[nn.Module, int, list[dict[str, Any]]]:
    """Return the backbone of a checkpoint, its number of channels, and its transforms."""
    address = module.model
    with written_by_selftask(address):
        config = config_of(checkpoint, address)
        if not module.trust:
            refuse_code(code_in({key: config[key] for key in ("backbone", "eval")}), address)
        backbone = build_backbone(component(config["backbone"]), checkpoint["channels"])
        transforms = list(config["eval"]["transforms"])
    load_weights(backbone, backbone_state(checkpoint), what=address)
    return backbone, checkpoint["channels"], transforms


def _with_scores(
    backbone: nn.Module, scores: Scores, channels: int, transforms: list[dict[str, Any]]
) -> TrainedNetwork:
    """Return the network with its number of scores."""
    network, width = Network(backbone, scores.head), scores.width(backbone)
    return TrainedNetwork(network, width, channels, transforms, scores)


def _scores(
    component: Component, backbone: nn.Module, checkpoint: Mapping[str, Any], address: str
) -> Scores:
    """Return the scores of the run's method; raise UserError if it has none."""
    method = METHODS[component.name]
    scores: Scores | None = method(method.Config(**component.args)).load_scores(
        embed_dim(backbone), checkpoint
    )
    if scores is None:
        names = [name for name in METHODS if "load_scores" in vars(METHODS[name])]
        raise UserError(
            f"{address}: {component.name} has no scores of classes or prototypes; runs of "
            f"{', '.join(names)} have"
        )
    return scores


def _classifier(name: str, weights: str) -> tuple[nn.Module, nn.Linear]:
    """Return a timm model without its classifier, and the classifier."""
    import timm

    check_model(f"timm:{name}", weights)
    model: Any = timm.create_model(name, pretrained=False)
    if weights == PRETRAINED:
        load_weights(model, download("timm", name), what=f"timm:{name}")
    elif weights != NONE:
        load_weights(model, read_state(weights), what=weights)
    head = model.get_classifier()
    if not isinstance(head, nn.Linear):
        raise UserError(f"timm:{name}: has no classifier that is one linear layer")
    model.reset_classifier(0)
    model.embed_dim = head.in_features
    return model, head
