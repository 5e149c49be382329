"""Features of a backbone: ``extract(backbone, images)``, with options listed by ``offers``.

A custom module is supported if it has a method ``extract(images, **options) -> Features`` and an
attribute ``offers`` (see ``Adapter``). The method is called with the options that are set. Other
modules have pooled features only.

B images, N patches, K of them kept, E width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

from torch import Tensor, nn

from selftask.config.extensions.user_code import source_of
from selftask.errors import UserError
from selftask.models.features.adapter import Adapter
from selftask.models.features.sparse import VISIBLE, see_visible_patches
from selftask.models.features.timm_eva import TimmEva
from selftask.models.features.timm_models import TimmModel
from selftask.models.features.timm_swin import TimmSwin
from selftask.models.features.timm_vit import TimmViT
from selftask.models.features.tokens import Features, Request
from selftask.models.features.torchvision_models import TorchvisionStages, TorchvisionViT
from selftask.random.keyed import LAYER_DRAWS

_ADAPTERS: tuple[Any, ...] = (
    TimmViT,
    TimmEva,
    TimmSwin,
    TimmModel,
    TorchvisionViT,
    TorchvisionStages,
)
_NEEDED = {
    "mask": "tokens",
    "mask_token": "tokens",
    "keep": "subset",
    "padding": "subset",
    "attend": "attention",
    "groups": "groups",
    "visible": "sparse",
    "layers": "hidden",
}


def extract(
    backbone: nn.Module,
    images: Tensor,
    *,
    mask: Tensor | None = None,
    mask_token: Tensor | None = None,
    keep: Tensor | None = None,
    padding: Tensor | None = None,
    attend: Tensor | None = None,
    groups: Tensor | None = None,
    visible: Tensor | None = None,
    layers: Sequence[int] = (),
) -> Features:
    """Run ``backbone`` and return its features in a common form.

    Pass images of several views as ``torch.cat(views)``, view after view. Draws of dropout and
    stochastic depth depend on the sample and the view, so they are the same on any number of ranks.

    Under FSDP, call it inside the forward pass of the sharded module: a ``Network`` of the method,
    or ``FeatureExtractor``. Options that are None have no effect.

    Args:
        backbone: A model of timm, torchvision or selftask, or one with a method ``extract``.
        images: (B, C, H, W). If ``interpolates(backbone)``, any size that can be divided into
            patches is accepted; learned positions are interpolated.
        mask: (B, N) bool, True for patches to replace by ``mask_token`` after the patch embedding,
            before positions are added. Needs ``"tokens"`` in ``offers(backbone)``.
        mask_token: (``adapter_of(backbone).mask_dim``,); without it, ``mask`` has no effect.
        keep: int64 (B, K), indices of the patches to encode; others are dropped. Needs
            ``"subset"``.
        padding: (B, K) bool, True for padding in ``keep``. No token attends to padding, and pooling
            ignores it; its own output is undefined.
        attend: (B, N, N) bool, True for patches (last dimension) that a patch attends to. Prefix
            tokens attend to all tokens; no patch attends to prefix tokens. Needs ``"attention"``.
        groups: (B, N) bool or int64, the group of each square whose side is the total stride.
            Patches attend only to patches of the same group; prefix tokens behave as with
            ``attend``. Needs ``"groups"``.
        visible: int64 (B, K), indices of the patches that convolutions see. Feature maps keep their
            full size; their values at other patches are undefined. Needs ``"sparse"``.
        layers: Numbers of the hidden layers to return; negative ones count from the last. Needs
            ``"hidden"``.

    Raises:
        UserError: If the backbone does not support a request, has no such layer, or cannot divide
            the images into patches.
    """
    LAYER_DRAWS.enter_next(len(images))
    adapter = adapter_of(backbone)
    request = Request(
        mask=mask,
        mask_token=mask_token,
        keep=keep,
        padding=padding,
        attend=attend,
        groups=groups,
        visible=visible,
        layers=tuple(layers),
    )
    for option in request.given():
        if _NEEDED[option] not in adapter.offers:
            raise UserError(f"backbone: a {type(backbone).__name__} takes no {option}")
    numbers = tuple(adapter.layer_numbers(layers, "layers"))
    request = replace(request, visible=None, layers=numbers)
    if visible is None:
        return adapter.extract(images, request)
    see_visible_patches(backbone)
    with VISIBLE.only(visible, adapter.grid(*images.shape[-2:])):
        return adapter.extract(images, request)


def pooled(backbone: nn.Module, images: Tensor) -> Tensor:
    """Return pooled features (B, E) of images (B, C, H, W) of any size that ``extract`` accepts.

    The result equals ``backbone(images)``, unless the backbone is a transformer with positions for
    another image size. The last block of timm's ViT with a class token is computed only for this
    token, unless it has hooks or is sharded, compiled or recomputed. timm's own interpolation of
    positions is not used: its backward pass is not deterministic.

    Raises:
        UserError: If the backbone does not return one vector per image.
    """
    size = _built_size(backbone)
    if TimmViT.fits(backbone) and (vit := TimmViT(cast(Any, backbone))).reads_class_token:
        return vit.pooled(images)
    if size is None or tuple(images.shape[-2:]) == size or not interpolates(backbone):
        features = backbone(images)
        _check_features(features, images, backbone)
        return features
    return adapter_of(backbone).pooled(images)


def _check_features(features: Any, images: Tensor, backbone: nn.Module) -> None:
    """Raise UserError unless a backbone has returned one vector for each image."""
    if isinstance(features, Tensor) and features.ndim == 2 and len(features) == len(images):
        return
    returned = (
        tuple(features.shape) if isinstance(features, Tensor) else f"a {type(features).__name__}"
    )
    kind = type(backbone)
    place = "" if kind.__module__.startswith("torch.") else f"{source_of(kind)}: "
    raise UserError(
        f"{place}the backbone {kind.__name__} must map images "
        f"(B, C, H, W) to features (B, E), and returned {returned} for {tuple(images.shape)}"
    )


def fixed_size(backbone: nn.Module) -> tuple[int, int] | None:
    """Return the only image size that a transformer's own forward pass accepts, or None.

    The size is (height, width) in pixels.
    """
    patches: Any = getattr(backbone, "patch_embed", None)
    is_strict = getattr(patches, "strict_img_size", patches is None)
    return _built_size(backbone) if is_strict else None


def _built_size(backbone: nn.Module) -> tuple[int, int] | None:
    """Return (height, width) in pixels of a transformer's grid of positions, or None."""
    size: Any = getattr(getattr(backbone, "patch_embed", None), "img_size", None)  # timm
    size = size or getattr(backbone, "image_size", None)  # torchvision
    return (size, size) if isinstance(size, int) else size and tuple(size)


def interpolates(backbone: nn.Module) -> bool:
    """Return True if ``extract`` interpolates positions for other image sizes."""
    try:
        return adapter_of(backbone).interpolates
    except UserError:
        return False


def offers(backbone: nn.Module) -> frozenset[str]:
    """Return the requests that ``extract`` supports for a backbone; see ``Adapter``."""
    try:
        return adapter_of(backbone).offers
    except UserError:
        return frozenset()


def adapter_of(backbone: nn.Module) -> Adapter:
    """Return the adapter of a backbone; raise UserError if it has pooled features only."""
    if hasattr(backbone, "extract") and hasattr(backbone, "offers"):
        return Own(backbone)
    for kind in _ADAPTERS:
        if kind.fits(backbone):
            return kind(backbone)
    raise UserError(
        f"backbone: a {type(backbone).__name__} gives one vector an image and no patches; give it "
        "a method extract (docs/methods.md), or take a model of timm or torchvision"
    )


class Own(Adapter):
    """Adapter of a module with a method ``extract`` and some of the attributes of ``Adapter``."""

    def __init__(self, backbone: Any) -> None:
        self.backbone = backbone
        self.offers = frozenset(backbone.offers)
        for name in (
            "num_layers",
            "patch_size",
            "stride",
            "built_grid",
            "mask_dim",
            "interpolates",
        ):
            if hasattr(backbone, name):
                setattr(self, name, getattr(backbone, name))

    def extract(self, images: Tensor, request: Request) -> Features:
        return self.backbone.extract(images, **request.given())

    def layer(self, number: int) -> nn.Module:
        if not hasattr(self.backbone, "layer_modules"):
            raise UserError(
                f"backbone: a {type(self.backbone).__name__} does not name its layers; give it an "
                "attribute layer_modules, the modules whose outputs are the hidden layers"
            )
        return self.backbone.layer_modules[number]


class FeatureExtractor(nn.Module):
    """``extract`` as a module, so that a ``Teacher`` can copy a backbone alone."""

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone

    def forward(self, images: Tensor, **options: Any) -> Features:
        """Return the features of images (B, C, H, W); see ``extract`` for the options."""
        return extract(self.backbone, images, **options)
