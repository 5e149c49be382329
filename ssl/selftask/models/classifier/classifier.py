"""Classifier: a backbone, which may be frozen, and its heads.

N images, E features of the backbone, C classes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from selftask.config.extensions.user_code import check_takes, source_of
from selftask.errors import UserError
from selftask.models.build import embed_dim
from selftask.models.features.extract import extract
from selftask.models.features.tokens import Features
from selftask.models.network import forward_by_size
from selftask.registry import HEAD_BLOCKS


class Classifier(nn.Module):
    """``head(backbone(images))``; a frozen backbone stays in eval mode.

    Args:
        backbone: Images (N, channels, H, W) -> features (N, E).
        num_classes: Number of classes, C.
        frozen: Whether the backbone stays in eval mode. Its parameters are not frozen here, but by
            a group rule of the method.
        head: Result of ``build_chain`` or a ``Heads``; None: one linear layer.
    """

    def __init__(
        self, backbone: nn.Module, num_classes: int, *, frozen: bool, head: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.frozen = frozen
        self.backbone = backbone
        self.head = nn.Linear(embed_dim(backbone), num_classes) if head is None else head
        self.takes_tokens = takes_tokens(self.head)
        if frozen and head is None:  # as in MoCo's linear probe
            nn.init.normal_(self.head.weight, std=0.01)  # type: ignore[arg-type]
            nn.init.zeros_(self.head.bias)  # type: ignore[arg-type]

    def forward(self, images: Tensor | list[Tensor]) -> Any:
        """Return the scores (N, C) of images, or a dict of scores by head name.

        For a list of V views, the head takes features (V, N, E), see ``concat_views``.
        """
        if isinstance(images, list):
            features = forward_by_size(self.backbone, images)  # (V * N, E)
            return self.head(features.unflatten(0, (len(images), -1)))
        if self.takes_tokens:
            return self.head(extract(self.backbone, images))
        return self.head(self.backbone(images))

    def train(self, mode: bool = True) -> Classifier:
        """Set the mode of all modules except a frozen backbone, which stays in eval mode."""
        super().train(mode)
        self.backbone.train(mode and not self.frozen)
        return self


class Chain(nn.Sequential):
    """Blocks applied in order; takes features (N, E), or all ``Features`` of a backbone.

    Args:
        modules: The blocks.
        takes_tokens: Whether the first block takes ``Features`` instead of pooled features.
    """

    def __init__(self, modules: Sequence[nn.Module], *, takes_tokens: bool) -> None:
        super().__init__(*modules)
        self.takes_tokens = takes_tokens

    def forward(self, features: Tensor | Features) -> Tensor:
        if isinstance(features, Features) and not self.takes_tokens:
            features = features.pooled
        return super().forward(features)


class Heads(nn.ModuleDict):
    """Several heads by name, applied to the same features."""

    def forward(self, features: Tensor | Features) -> dict[str, Tensor]:
        return {name: head(features) for name, head in self.items()}


def takes_tokens(head: nn.Module) -> bool:
    """Return True if a head, or one of several, takes patch tokens."""
    return any(getattr(module, "takes_tokens", False) for module in head.modules())


def build_chain(
    blocks: Sequence[Mapping[str, Any]], width: int, num_classes: int, key: str
) -> Chain:
    """Build a head from a list of blocks.

    Args:
        blocks: Names and arguments of blocks.
        width: Number of features of the backbone, E.
        num_classes: Number of outputs that the last block must have, C.
        key: Key of the list in the config, for messages.

    Raises:
        UserError: If a block that must be first is not, if the last does not have C outputs, or if
            a ``build`` takes other arguments or returns something else.
    """
    modules: list[nn.Module] = []
    has_tokens = False
    for number, options in enumerate(blocks):
        args = {name: value for name, value in options.items() if name != "name"}
        block = HEAD_BLOCKS[options["name"]](**args)
        reads_tokens = getattr(block, "takes_tokens", False)
        if number and (reads_tokens or "num_views" in args):
            raise UserError(
                f"{key}.{number}: {options['name']} takes what the backbone gives; it has to be "
                "the first block"
            )
        has_tokens = has_tokens or reads_tokens
        check_takes(block.build, ["width", "num_classes"], f"build of {key}.{number}")
        match block.build(width, num_classes):
            case nn.Module() as module, int(width):
                modules.append(module)
            case other:
                raise UserError(
                    f"{source_of(block.build)}: build of {key}.{number} returned "
                    f"{type(other).__name__}; the module and its number of outputs are expected: "
                    "return module, width"
                )
    if width != num_classes:
        raise UserError(
            f"{key}: ends with {width} outputs, and there are {num_classes} classes; end with "
            "linear, bn_linear or mlp, whose out_dim is the number of classes by default"
        )
    return Chain(modules, takes_tokens=has_tokens)
