"""CLIP: match images with their captions among those of the batch.

B: images per rank, W: ranks, L: tokens of a caption, E: features of the backbone, D: width of the
shared space.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selftask.batch import Batch
from selftask.config.fields import setting
from selftask.methods.base import Method, Task
from selftask.models.build import embed_dim
from selftask.models.losses.contrast import gathered_cross_entropy
from selftask.models.network import Network
from selftask.models.precision import in_full_precision
from selftask.models.text import TextTransformer
from selftask.models.weights.load import load_part
from selftask.registry import register_method

if TYPE_CHECKING:
    from selftask.data.tokenizers.base import Tokenizer

MAX_SCALE = 100.0  # maximum scale of the logits: section 2.5


@register_method("clip")
class CLIP(Method):
    """CLIP (arXiv:2103.00020): finds the caption of each image among those of the batch.

    Loss: ``CE(x.y/tau)`` of images x with captions y and of captions with images, halved (figure
    3), with a learned temperature tau.

    Use it if each image has a caption and batches are large.

    Differs from the authors' code:

    * The towers use GELU, not QuickGELU. The image tower has no norm before its first block.
    * Position embeddings have no weight decay.
    * Tokens are bytes unless the config names a vocabulary.
    """

    paper = (
        "Radford et al., Learning Transferable Visual Models From Natural Language Supervision, "
        "ICML 2021"
    )
    columns = {"temperature": "Learned temperature."}
    loss_reduction = "gathered"  # captions are negatives to the images of all ranks
    views = 1
    min_batch_size = 2
    requires = ("captions",)

    @dataclass(frozen=True, kw_only=True)
    class Config:
        out_dim: int = setting(512, min=1, tiny=16)
        """Width of the embeddings, D."""
        text_dim: int = setting(512, min=1, tiny=16)
        """Width of the text transformer."""
        text_depth: int = setting(12, min=1, tiny=1)
        """Number of blocks of the text transformer."""
        text_heads: int = setting(8, min=1, tiny=2)
        """Number of attention heads of the text transformer; in the paper text_dim / 64."""
        temperature: float = setting(0.07, above=0)
        """Initial temperature tau; it is learned."""

        def problems(self, config: dict[str, Any]) -> Iterator[str]:
            if self.text_dim % self.text_heads:
                yield f"text_heads: {self.text_heads} does not divide text_dim={self.text_dim}"
            if self.temperature < 1 / MAX_SCALE:
                yield f"temperature: {self.temperature} is below {1 / MAX_SCALE}, its least value"

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.log_scale = nn.Parameter(torch.tensor(-math.log(config.temperature)))  # -log tau

    def build_network(self, backbone: nn.Module, task: Task) -> nn.Module:
        """Build the image tower, and the text tower for the tokens of the data."""
        text, projection = self.build_text(task.data_module.tokenizer)
        return TwoTowers(backbone, self.build_head(embed_dim(backbone)), text, projection)

    def build_text(self, tokenizer: Tokenizer) -> tuple[nn.Module, nn.Module]:
        """Build the text transformer and its projection."""
        config = self.config
        text = TextTransformer(
            tokenizer.vocab_size,
            tokenizer.length,
            dim=config.text_dim,
            depth=config.text_depth,
            heads=config.text_heads,
        )
        return text, _projection(config.text_dim, config.out_dim)

    def build_head(self, embed_dim: int) -> nn.Module:
        """Build the linear projection of section 2.3."""
        return _projection(embed_dim, self.config.out_dim)

    def load_text(
        self, embed_dim: int, checkpoint: Mapping[str, Any], tokenizer: Tokenizer
    ) -> tuple[nn.Module, nn.Module]:
        """Return the trained head for images, and the text tower with its projection."""
        head, (text, projection) = self.build_head(embed_dim), self.build_text(tokenizer)
        for name, part in {"head": head, "text": text, "text_head": projection}.items():
            load_part(part, checkpoint, f"model.{name}")
        return head, nn.Sequential(text, projection)

    def prepare_batch(self, batch: Batch, task: Task) -> None:
        batch.input = (batch.all_views, batch.extras["caption"])

    def on_forward(self, task: Task) -> None:
        """Log the temperature."""
        if task.should_log:
            task.log("temperature", (-self.log_scale.detach()).exp())

    def forward(self, output: Tensor, batch: Batch) -> Tensor:
        """Return the loss of figure 3 for ``output`` (2, B, D): images, then captions."""
        return match_pairs(output[0], output[1], self.log_scale)

    @torch.no_grad()
    def on_update(self, task: Task) -> None:
        """Clamp the scale of the logits to at most 100."""
        self.log_scale.clamp_(max=math.log(MAX_SCALE))

    @property
    def chance_loss(self) -> float:
        """Loss of equal similarities: ln(batch)."""
        return math.log(self.batch_size)


class TwoTowers(Network):
    """Network that embeds images and the tokens of their captions."""

    def __init__(
        self, backbone: nn.Module, head: nn.Module, text: nn.Module, text_head: nn.Module
    ) -> None:
        super().__init__(backbone, head)
        self.text = text
        self.text_head = text_head

    def forward(self, pairs: tuple[Sequence[Tensor], Tensor]) -> Tensor:  # type: ignore[override]
        """Return the embeddings of images and captions, (2, B, D).

        Args:
            pairs: A list of one view (B, C, height, width), and tokens (B, L).
        """
        views, tokens = pairs
        return torch.cat([super().forward(views), self.text_head(self.text(tokens))[None]])


def _projection(in_dim: int, out_dim: int) -> nn.Linear:
    linear = nn.Linear(in_dim, out_dim, bias=False)
    nn.init.normal_(linear.weight, std=in_dim**-0.5)
    return linear


@in_full_precision
def match_pairs(images: Tensor, captions: Tensor, log_scale: Tensor) -> Tensor:
    """Return the symmetric cross-entropy of this rank's B pairs among the BW of all ranks.

    Args:
        images: (B, D), not necessarily normalized.
        captions: (B, D); row b belongs to image b.
        log_scale: Logarithm of the scale of the logits, a scalar.
    """
    images, captions = F.normalize(images, dim=1), F.normalize(captions, dim=1)
    scale = log_scale.exp()
    by_image = gathered_cross_entropy(images, captions, scale=scale)
    by_caption = gathered_cross_entropy(captions, images, scale=scale)
    return (by_image + by_caption) / 2
