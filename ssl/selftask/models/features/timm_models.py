"""Other timm models, by their common interface: Swin, ConvNeXt, ResNet, BEiT, EVA and more."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import Tensor, nn

from selftask.models.features.adapter import Adapter
from selftask.models.features.tokens import Features, Request, Tokens, from_map, from_sequence


class TimmModel(Adapter):
    """Adapter of models with ``forward_intermediates`` and ``forward_head``.

    Layers are numbered as in timm: blocks of a transformer, stages of a hierarchical network.
    Patches can be masked if the model begins with timm's ``PatchEmbed``, and hidden from the
    convolutions of a ResNet or ConvNeXt.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.num_layers = len(model.feature_info)
        offers = {"dense", "hidden"}
        if _begins_with_patches(model):
            offers.add("tokens")
            self.patch_size = tuple(model.patch_embed.patch_size)
            self.stride = model.feature_info[-1]["reduction"]
            self.built_grid = tuple(model.patch_embed.grid_size)
            self.mask_dim = model.patch_embed.proj.out_channels
        elif _is_convolutional(model):
            offers.add("sparse")
            self.stride = model.feature_info[-1]["reduction"]
            self.patch_size = (self.stride, self.stride)
        self.offers = frozenset(offers)
        parameters = inspect.signature(model.forward_intermediates).parameters
        self.gives_prefix = "return_prefix_tokens" in parameters
        self.num_prefix = getattr(model, "num_prefix_tokens", 0)
        self.channels_last = getattr(model, "output_fmt", "NCHW") == "NHWC"

    @staticmethod
    def fits(backbone: Any) -> bool:
        """Return True if a model has timm's common interface."""
        return all(
            callable(getattr(backbone, name, None))
            for name in ("forward_intermediates", "forward_head")
        ) and bool(getattr(backbone, "feature_info", None))

    def extract(self, images: Tensor, request: Request) -> Features:
        model = self.model
        asked = sorted({*request.layers, self.num_layers - 1})
        options = {"return_prefix_tokens": True} if self.gives_prefix else {}
        with nullcontext() if request.mask is None else _masking(model.patch_embed, request):
            final, outputs = model.forward_intermediates(images, indices=asked, **options)
        hidden = {
            number: _with_prefix(*output) if isinstance(output, tuple) else from_map(output)
            for number, output in zip(asked, outputs, strict=True)
        }
        tokens = self._last(final, hidden[asked[-1]])
        wanted = {number: hidden[number] for number in request.layers}
        return Features(model.forward_head(final), tokens, wanted)

    def _last(self, final: Tensor, before_norm: Tokens) -> Tokens:
        """Return the tokens of the output of ``forward_features`` in any layout."""
        rows, columns = before_norm.grid or (0, 0)
        if final.ndim == 3:
            return from_sequence(final, final.shape[1] - rows * columns, before_norm.grid)
        return from_map(final.permute(0, 3, 1, 2) if self.channels_last else final)

    def normalized(self, hidden: Tokens) -> Tokens:
        norm = getattr(self.model, "norm", None)
        if self.gives_prefix and isinstance(norm, nn.Module):  # a transformer
            return hidden.map_sequence(norm)
        return hidden

    def layer(self, number: int) -> nn.Module:
        return self.model.get_submodule(self.model.feature_info[number]["module"])


def _begins_with_patches(model: Any) -> bool:
    from timm.layers import PatchEmbed, PatchEmbedWithSize

    embed = getattr(model, "patch_embed", None)
    return isinstance(embed, PatchEmbed) and not isinstance(embed, PatchEmbedWithSize)


def _is_convolutional(model: Any) -> bool:
    from timm.models import ConvNeXt, ResNet

    return isinstance(model, ConvNeXt | ResNet)


def _with_prefix(output: Tensor, prefix: Tensor) -> Tokens:
    return from_map(output)._replace(prefix=prefix)


@contextmanager
def _masking(embed: nn.Module, request: Request) -> Iterator[None]:
    """Context that replaces masked patches in the output of a patch embedding."""

    def replace(module: Any, inputs: Any, output: Tensor) -> Tensor:
        last = output.ndim == 3 or str(module.output_fmt).endswith("NHWC")
        return request.replace_masked(output, channels_last=last)

    handle = embed.register_forward_hook(replace)
    try:
        yield
    finally:
        handle.remove()
