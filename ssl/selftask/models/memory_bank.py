"""Memory bank: one feature vector for each image of the data set.

Wu et al., Unsupervised Feature Learning via Non-Parametric Instance Discrimination, CVPR 2018,
arXiv:1805.01978, section 3.2; PIRL (arXiv:1912.01991) and DeepCluster v2 use it too.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selftask.distributed.collectives import all_gather_cat
from selftask.models.precision import to_float32


class MemoryBank(nn.Module):
    """Unit vectors by image index, equal on every rank, saved and resumed as a buffer.

    Methods read it in ``forward`` and call ``update`` in ``on_update``. The initial entries are
    random unit vectors.

    Args:
        num_images: Number of images in the data set, ``task.data_module.num_images``.
        shape: Shape of an image's entry: ``dim``, or several sizes of which the last is ``dim``.
    """

    rows: Tensor
    """``(num_images, *shape)``."""

    def __init__(self, num_images: int, *shape: int) -> None:
        super().__init__()
        self.register_buffer("rows", F.normalize(torch.randn(num_images, *shape), dim=-1))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Tensor) -> Tensor:
        """Return the entries ``(..., *shape)`` of the images ``index``, int64 (...)."""
        return self.rows[index]

    @torch.no_grad()
    def update(self, index: Tensor, features: Tensor, momentum: float = 0.0) -> None:
        """Update the entries of a batch with its features. Every rank must call this method.

        The new entry is ``normalize(momentum * entry + (1 - momentum) * normalize(features))``. If
        an image occurs more than once in the global batch, its last features are used.

        Args:
            index: Indices of this rank's images, int64 (B,).
            features: Their features, ``(B, *shape)``, not necessarily normalized.
            momentum: Weight of the old entry, in [0, 1]; 0 replaces it.
        """
        index = all_gather_cat(index)  # (W * B,)
        rows = F.normalize(to_float32(all_gather_cat(features)), dim=-1).to(self.rows.dtype)
        if momentum > 0.0:
            rows = F.normalize(rows.lerp(self.rows[index], momentum), dim=-1)
        self.rows[index] = rows[_last_occurrence(index, len(self))]


def _last_occurrence(index: Tensor, size: int) -> Tensor:
    """Return, for each value in ``index`` (n,), its last position; values are below ``size``.

    On a GPU, indexed writes of duplicates keep an arbitrary one, which may differ between ranks.
    """
    positions = torch.arange(len(index), device=index.device)
    return torch.zeros(size, dtype=torch.long, device=index.device).scatter_reduce(
        0, index, positions, "amax"
    )[index]
