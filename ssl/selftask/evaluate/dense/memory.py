"""Sample of labeled patches of limited size, and votes of the nearest patches in it.

B images of S x S pixels, N patches of each in a grid of h x w, M patches in memory, E features,
C classes.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from selftask.distributed.collectives import gather_objects
from selftask.evaluate.dense.masks import IGNORED
from selftask.evaluate.nearest import QUERIES, Bank
from selftask.models.features.tokens import Grid
from selftask.random.views import draw_rng


class PatchMemory:
    """Random sample of the labeled patches of a sequence of images.

    Each image adds at most ``capacity / num_images`` patches, plus the number that earlier images
    left unused. The sample depends on the seed and the images only. With several ranks, each rank
    offers the patches of its own images, and every rank adds all images in the same order.

    Args:
        capacity: Maximum number of patches.
        num_images: Number of images that will be added.
        seed: Seed of the sample.
    """

    def __init__(self, capacity: int, num_images: int, seed: int) -> None:
        self.capacity, self.num_images, self.seed = capacity, num_images, seed
        self._added = self._filled = 0
        self._offered: dict[int, tuple[Tensor, Tensor, np.ndarray]] = {}
        self._parts: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def offer(self, maps: Tensor, shares: Tensor, indices: Tensor) -> dict[int, int]:
        """Keep the patches of images for ``add``; return image number -> number of labeled patches.

        Args:
            maps: Patch features (B, E, h, w).
            shares: Share of each class in the patches (B, N, C), all 0 for patches without a label.
            indices: Number of each image (B,), which selects the random stream of its draw.
        """
        patches = maps.flatten(2).transpose(1, 2)  # (B, N, E)
        counts = {}
        is_labeled = shares.sum(dim=2).gt(0).cpu().numpy()
        for number, index in enumerate(indices.tolist()):
            labeled = np.flatnonzero(is_labeled[number])
            self._offered[index] = patches[number], shares[number], labeled
            counts[index] = len(labeled)
        return counts

    def add(self, counts: dict[int, int]) -> None:
        """Add images whose patches this rank or another one has offered.

        Args:
            counts: Result of ``offer``.
        """
        for index, count in counts.items():
            self._added += 1
            room = self.capacity * self._added // self.num_images - self._filled
            self._filled += min(room, count)
            if index in self._offered:
                patches, shares, labeled = self._offered.pop(index)
                order = draw_rng(self.seed, 0, index, 0).permutation(labeled)
                rows = torch.from_numpy(np.sort(order[:room])).to(patches.device)
                images = torch.full((len(rows),), index)
                self._parts[self._added] = patches[rows].cpu(), shares[rows].cpu(), images

    def finish(self, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
        """Return features (M, E), shares of classes (M, C) and image numbers (M,) of the sample.

        Every rank must call this method; all ranks get the same sample.
        """
        parts = {n: part for of_rank in gather_objects(self._parts) for n, part in of_rank.items()}
        columns = zip(*(parts[number] for number in sorted(parts)), strict=True)
        features, shares, images = (torch.cat(column).to(device) for column in columns)
        self._parts.clear()
        return features, shares, images


def class_shares(masks: Tensor, grid: Grid, num_classes: int) -> Tensor:
    """Return the share of each class in each patch's labeled pixels, (B, N, C) float32.

    Balazevic et al., Towards In-Context Scene Understanding, arXiv:2306.01667, section 3.1. Patches
    without labeled pixels have zeros.

    Args:
        masks: Class numbers (B, S, S), IGNORED for pixels that do not count.
        grid: Rows and columns of patches.
        num_classes: Number of classes, C.
    """
    count, height, width = masks.shape
    rows, columns = (
        torch.arange(side, device=masks.device) * cells // side
        for side, cells in zip((height, width), grid, strict=True)
    )
    num_patches = grid[0] * grid[1]
    patch = rows[:, None] * grid[1] + columns  # (S, S)
    image = torch.arange(count, device=masks.device)[:, None, None]
    slots = num_classes + 1  # the first one is that of IGNORED
    key = (image * num_patches + patch) * slots + (masks.long() - IGNORED)
    counts = torch.bincount(key.flatten(), minlength=count * num_patches * slots)
    counts = counts.view(count, num_patches, slots)[..., 1:].float()
    return counts / counts.sum(dim=2, keepdim=True).clamp(min=1)


def vote(bank: Bank, shares: Tensor, queries: Tensor, k: int, temperature: float) -> Tensor:
    """Return the weighted mean of the class shares of the k nearest patches, (Q, C).

    The weights are the softmax of cosine / temperature, as in arXiv:2306.01667, section 3.1.

    Args:
        bank: Features of the M patches in memory.
        shares: Class shares of these patches (M, C).
        queries: Patch features (Q, E).
        k: Number of neighbors.
        temperature: Temperature of the weights; a large temperature gives all neighbors nearly
            equal weight.
    """
    votes = []
    for rows in F.normalize(queries, dim=1).split(QUERIES):
        cosine, row = bank.nearest(rows, k, torch.full((len(rows),), -1, device=rows.device))
        weights = (cosine / temperature).softmax(dim=1)  # (q, k)
        votes.append((weights[:, None] @ shares[row])[:, 0])
    return torch.cat(votes)
