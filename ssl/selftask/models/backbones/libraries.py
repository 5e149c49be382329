"""Backbones of torchvision and timm by name, and custom ones by import path."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from selftask.config.extensions.imports import import_object
from selftask.config.library_names import check_name
from selftask.errors import UserError, explained
from selftask.registry import register_backbone

if TYPE_CHECKING:
    from torch import nn

_CLASSIFIERS = ("fc", "classifier", "head", "heads")
"""Names of the layers after the features in torchvision's image classifiers."""
_SIZED = ("vit_", "deit", "beit", "eva", "swin", "cait")
"""Prefixes of timm model names that take ``img_size``."""


def _tiny(model: str, **kept: Any) -> dict[str, Any]:
    """Return the config of a tiny selftask transformer or ResNet, of the same kind as ``model``."""
    if "vit" in model or any(kind in model for kind in _SIZED):
        return {"name": "vit_micro", "img_size": 32, "patch_size": 4, "depth": 2, **kept}
    return {"name": "small_resnet", "width": 8}


@register_backbone("timm")
@dataclass(frozen=True, kw_only=True)
class Timm:
    """Any timm model by its timm name, without classifier: timm:vit_small_patch16_224."""

    model: str
    """Name of a timm model."""
    args: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of timm.create_model, such as ``img_size``."""
    drop_path_uniform: bool = False
    """Whether all blocks have the rate of stochastic depth ``args.drop_path_rate``, as in DINOv2;
    by default it increases linearly from 0 in the first block.
    """

    library = "timm"
    sizes_in = "args"

    def problems(self, config: dict[str, Any]) -> Iterator[str]:
        if self.drop_path_uniform and not self.args.get("drop_path_rate"):
            yield "backbone.drop_path_uniform: true, and backbone.args.drop_path_rate is not set"
        yield from _name_problems(self)

    def tiny(self) -> dict[str, Any]:
        names = {"drop_path_rate": "drop_path", "dynamic_img_size": "dynamic_img_size"}
        kept = {ours: self.args[name] for name, ours in names.items() if name in self.args}
        return _tiny(self.model, **kept, drop_path_uniform=self.drop_path_uniform)

    def grid(self) -> dict[str, Any]:
        patch = re.search(r"patch(\d+)", self.model)
        named = {"patch_size": int(patch[1])} if patch else {}
        fixed = {"dynamic_img_size": False} if self.model.startswith("vit_") else {}
        return {**named, **fixed, **(self.args if fixed else {})}

    def in_timm(self) -> tuple[str, dict[str, Any]]:
        """Return the name and the arguments of the timm model."""
        return self.model, dict(self.args)

    @property
    def size_argument(self) -> str | None:
        return "img_size" if self.model.startswith(_SIZED) else None

    def build(self, channels: int = 3) -> nn.Module:
        """Build the model with timm's parameter names and random weights.

        Raises UserError for an unknown name, for arguments that the model does not take, and for
        weights, classes or another number of channels in ``args``.
        """
        import timm

        from selftask.models.backbones.rope import draw_coordinates_per_sample
        from selftask.models.dropout import set_uniform_stochastic_depth

        _check_model(self)
        _refuse_given(self, "timm", "pretrained", "checkpoint_path")
        args = {"num_classes": 0, **self.args, "pretrained": False}
        if args.setdefault("in_chans", channels) != channels:
            raise UserError(
                f"backbone.args.in_chans: {args['in_chans']}, the data have {channels} channels; "
                "it is taken from them"
            )
        create = partial(timm.create_model, self.model, **args)
        model = _call(create, "timm", self)
        if self.drop_path_uniform:
            set_uniform_stochastic_depth(model, self.args.get("drop_path_rate", 0.0))
        draw_coordinates_per_sample(model)
        return model


@register_backbone("torchvision")
@dataclass(frozen=True, kw_only=True)
class Torchvision:
    """Any torchvision classification model by its torchvision name, without classifier."""

    model: str
    """Name of a torchvision model."""
    args: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of torchvision.models.get_model."""

    library = "torchvision"
    sizes_in = "args"

    def problems(self, config: dict[str, Any]) -> Iterator[str]:
        yield from _name_problems(self)

    def tiny(self) -> dict[str, Any]:
        return _tiny(self.model)

    def grid(self) -> dict[str, Any]:
        return {}  # known only after building

    def in_timm(self) -> tuple[str, dict[str, Any]]:
        """Return the name, which may be unknown to timm, and no arguments."""
        return self.model, {}

    @property
    def size_argument(self) -> str | None:
        return "image_size" if self.model.startswith("vit_") else None

    def build(self, channels: int = 3) -> nn.Module:
        """Build the model with torchvision's parameter names and random weights.

        Unless there are three channels, the first convolution is adapted. Raises UserError for an
        unknown name, for arguments that the model does not take, and for weights or classes in
        ``args``.
        """
        import torchvision

        _check_model(self)
        _refuse_given(self, "torchvision", "weights")
        create = partial(torchvision.models.get_model, self.model, **{**self.args, "weights": None})
        model = _call(create, "torchvision", self)
        for name in _CLASSIFIERS:
            if hasattr(model, name):
                setattr(model, name, _without_classes(getattr(model, name)))
        if channels != 3:
            _widen(model, channels)
        return model


@register_backbone("custom")
@dataclass(frozen=True, kw_only=True)
class Custom:
    """Your own function or class, package.module:name, that returns an nn.Module."""

    model: str
    """Class or function that returns the module: ``package.module:name``."""
    args: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of that class or function."""

    def problems(self, config: dict[str, Any]) -> Any:
        if ":" not in self.model:
            yield f"backbone.model: {self.model!r} is not an address; write package.module:function"

    def build(self, channels: int = 3) -> nn.Module:
        """Import and call the object; pass ``channels`` if it is accepted and is not 3.

        A value of ``channels`` in ``args`` has precedence. Raises UserError if the object does not
        exist, does not take the arguments or does not return a module.
        """
        from torch import nn

        factory, args = import_object(self.model, "backbone.model"), dict(self.args)
        if channels != 3 and "channels" in inspect.signature(factory).parameters:
            args.setdefault("channels", channels)
        model = _call(partial(factory, **args), self.model.partition(":")[0], self)
        if not isinstance(model, nn.Module):
            raise UserError(f"backbone.model: {self.model} returned {type(model)}, not nn.Module")
        return model


def _name_problems(config: Timm | Torchvision) -> Iterator[str]:
    """Yield an error message if the name of the model is unknown."""
    try:
        check_name(config.library, config.model)
    except UserError as error:
        yield f"model: {error}"


def _check_model(config: Timm | Torchvision) -> None:
    for problem in _name_problems(config):
        raise UserError(f"backbone.{problem}")


def _refuse_given(config: Timm | Torchvision, library: str, *weights: str) -> None:
    """Raise UserError for library arguments that the user must not set here.

    These include files of weights, which a library may unpickle.
    """
    if names := [name for name in weights if config.args.get(name)]:
        raise UserError(
            f"backbone.args.{names[0]}={config.args[names[0]]!r}: a backbone is made with random "
            f"weights; to start from those of {library}: init.backbone={library}:{config.model}"
        )
    if config.args.get("num_classes"):
        raise UserError(
            f"backbone.args.num_classes={config.args['num_classes']}: a backbone ends before its "
            "classifier; leave it out"
        )


def _without_classes(classifier: nn.Module) -> nn.Module:
    """Return a classifier without its linear layer, or an identity if it does not flatten.

    ConvNeXt's classifier is LayerNorm, Flatten and Linear; those of other models take flat
    features.
    """
    from torch import nn

    flattens = any(isinstance(part, nn.Flatten) for part in classifier.children())
    if not flattens:
        return nn.Identity()
    kept = [part for part in classifier.children() if not isinstance(part, nn.Linear)]
    return nn.Sequential(*kept)


def _widen(model: nn.Module, channels: int) -> None:
    """Adapt the first convolution to ``channels``, with random weights of matching variance."""
    import torch
    from torch import nn

    first = next(part for part in model.modules() if isinstance(part, nn.Conv2d))
    first.in_channels = channels
    deviation = first.weight.std().item() * (3 / channels) ** 0.5
    weight = torch.empty(first.out_channels, channels, *first.kernel_size)
    first.weight = nn.Parameter(nn.init.normal_(weight, std=deviation))


def _call(
    build: Callable[[], nn.Module], library: str, config: Timm | Torchvision | Custom
) -> nn.Module:
    """Call ``build`` and turn the TypeError of a wrong argument into a UserError."""
    problem = f"backbone.args: {library} cannot build {config.model!r} with {config.args}"
    with explained(problem, TypeError):
        return build()
