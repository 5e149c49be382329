"""TCN: frames of a clip are similar if they are close in time, and dissimilar if they are distant.

B: clips per rank, W: ranks, T: frames of a clip, D: width of the head.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selftask.batch import Batch
from selftask.config.fields import setting
from selftask.config.schema import num_views
from selftask.distributed.collectives import gather_cat_with_grad, rank
from selftask.errors import UserError
from selftask.methods.base import Method, NumViews, Task
from selftask.models.heads import mlp
from selftask.models.precision import in_full_precision
from selftask.registry import register_method


@register_method("tcn")
class TCN(Method):
    """TCN (arXiv:1704.06888): frames of a clip are similar if close in time, distant ones are not.

    This is Time-Contrastive Networks with one camera. A clip consists of the frames of the group of
    views ``clip``, at equal distances in time (``data: {name: frames, clip: T}``).

    Loss: ``max(0, |a - p|^2 - |a - n|^2 + margin)`` of unit vectors, for each frame a and each
    frame p close to it in time. n is a frame distant in time: of those whose features are farther
    from a than p, the nearest one, or if there are none, the farthest frame (semi-hard negatives).

    Use it for videos, if features should describe what happens rather than appearance.

    Differs from the authors' code:

    * Any backbone can be used; it is trained from the start, with a head of two layers. The
      authors' code trains layers on top of a frozen, supervised Inception network.
    * A frame without distant frames is skipped; the authors' code uses another frame as its
      negative.
    """

    paper = (
        "Sermanet et al., Time-Contrastive Networks: Self-Supervised Learning from Video, ICRA 2018"
    )
    loss_reduction = "gathered"  # frames of other clips may be negatives
    views: ClassVar[dict[str, NumViews]] = {"clip": (3, None)}

    @dataclass(frozen=True, kw_only=True)
    class Config:
        hidden_dim: int = setting(512, min=1, tiny=16)
        """Width of the head's hidden layer."""
        out_dim: int = setting(32, min=1, tiny=8)
        """Width of the head's output, D."""
        margin: float = setting(0.2, above=0)
        """Margin of the triplet loss, a difference of squared distances."""
        positive_radius: int = setting(1, min=1)
        """Largest distance of two close frames, in frames of the clip."""
        negative_radius: int = setting(2, min=1)
        """Frames of the same clip are distant if they are farther apart than this, in frames."""
        other_clips: bool = False
        """Whether frames of other clips of the batch also count as distant; use it only if clips do
        not overlap.
        """

        def problems(self, config: dict[str, Any]) -> Iterator[str]:
            if self.negative_radius < self.positive_radius:
                yield (
                    f"negative_radius: {self.negative_radius} is less than positive_radius="
                    f"{self.positive_radius}; a frame would be close and distant"
                )

    def build_head(self, embed_dim: int) -> nn.Module:
        return mlp(embed_dim, self.config.hidden_dim, self.config.out_dim)

    def setup(self, task: Task) -> None:
        """Raise UserError if no frames of a clip are distant, unless other clips' frames are."""
        super().setup(task)
        length, radius = num_views(task.config.views)["clip"], self.config.negative_radius
        if length <= radius + 1 and not self.config.other_clips:
            raise UserError(
                f"method.negative_radius={radius}: no two of {length} frames are farther apart; "
                "lower it, or take longer clips"
            )

    def forward(self, output: Tensor, batch: Batch) -> Tensor:
        """Return the loss of this rank's clips for ``output`` (T, B, D)."""
        config = self.config
        return triplet_loss(
            output.transpose(0, 1),
            margin=config.margin,
            radii=(config.positive_radius, config.negative_radius),
            other_clips=config.other_clips,
        )

    @property
    def chance_loss(self) -> float:
        """Loss of equal distances: ``margin``."""
        return self.config.margin


@in_full_precision
def triplet_loss(
    clips: Tensor, *, margin: float, radii: tuple[int, int], other_clips: bool
) -> Tensor:
    """Return the triplet loss with semi-hard negatives, averaged over pairs of close frames.

    A pair is skipped if no frame is distant from its first one.

    Args:
        clips: (B, T, D) features of frames, not necessarily normalized.
        margin: Margin of the triplet loss, a difference of squared distances.
        radii: Largest distance in time of close frames, and of frames that are not distant.
        other_clips: Whether the frames of all other clips, of all ranks, are distant, too.
    """
    frames = F.normalize(clips, dim=2)
    within = 2 - 2 * frames @ frames.mT  # (B, T, T)
    time = torch.arange(frames.shape[1], device=frames.device)
    gap = (time[:, None] - time).abs()  # (T, T)
    distant = within.masked_fill(gap <= radii[1], torch.inf)
    if other_clips:
        distant = torch.cat([distant, _to_other_clips(frames)], dim=2)
    ordered = distant.sort(dim=2).values  # (B, T, candidates), inf at the end
    count = ordered.isfinite().sum(dim=2, keepdim=True)  # (B, T, 1)
    farther = torch.searchsorted(ordered.detach(), within.detach(), right=True)  # (B, T, T)
    negative = ordered.gather(2, farther.minimum(count - 1).clamp(min=0))
    is_pair = (gap > 0) & (gap <= radii[0]) & (count > 0)  # (B, T, T)
    losses = (margin + within - negative).relu()
    return losses.masked_fill(~is_pair, 0.0).sum() / is_pair.sum()


def _to_other_clips(frames: Tensor) -> Tensor:
    """Return squared distances (B, T, WB * T) to the frames of all clips; inf for the same clip."""
    every = gather_cat_with_grad(frames)  # (WB, T, D)
    distances = 2 - 2 * torch.einsum("btd,cud->btcu", frames, every)
    own = torch.arange(len(frames), device=frames.device) + rank() * len(frames)
    is_own = own[:, None] == torch.arange(len(every), device=frames.device)
    return distances.masked_fill(is_own[:, None, :, None], torch.inf).flatten(2)
