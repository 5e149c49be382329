"""Device engine: makes all views of a batch on the device, from given parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from selftask.config.checks.contradictions import unbatched
from selftask.data.device.compose import Chain, differ, listed
from selftask.data.device.operation import Images, find_batched_transform
from selftask.data.device.packing import Packed, Steps, pack
from selftask.data.views import Views
from selftask.errors import ConfigError, UserError
from selftask.random.views import Streams, ViewDraws

if TYPE_CHECKING:
    from selftask.config.schema import ViewConfig

_CHUNK_BYTES = 1 << 24  # of images processed together on a CPU, so that they stay in its cache

Draws = list[list[Any]]  # of one sample: for each view, the parameters of each transform
Sizes = Sequence[tuple[int, int]]  # height and width of each image of a sample


class Engine:
    """Makes all views of a batch with the batched versions of their transforms.

    Workers call ``draw`` and ``pack``; ``__call__`` runs on the device.

    Raises:
        ConfigError: A transform has no batched version.
    """

    def __init__(
        self, views: Views, config: Mapping[str, ViewConfig], dense: bool | None = None
    ) -> None:
        """``dense`` is described at ``Images.dense``; None: dense, except on a CPU."""
        self.made = views.made
        self.num_images = 1 + len(views.images)  # I, per sample
        self.chains = _chains(views, config)
        self.to_float = views.to_float
        self.dense = dense
        self._draws: ViewDraws | None = None

    def draw(
        self, height: int, width: int, seed: int, epoch: int, index: int, further: Sizes = ()
    ) -> Draws:
        """Draw parameters for one sample, the same as the CPU engine draws.

        Args:
            height: Height of the first image, in pixels.
            width: Width of the first image, in pixels.
            seed: Seed of the run.
            epoch: First number of the sample's key.
            index: Index of the sample.
            further: Height and width of the sample's further images.
        """
        if self._draws is None or self._draws.seed != seed:
            self._draws = ViewDraws(seed)
        return self._draw(self._draws, [(height, width), *further], epoch, index)

    def _draw(self, draws: ViewDraws, given: Sizes, epoch: int, index: int) -> Draws:
        drawn: Draws = []
        sizes: list[tuple[int, int]] = []  # of the views
        for number, (view, chain) in enumerate(zip(self.made, self.chains, strict=True)):
            before = given[view.image] if view.of is None else sizes[view.of]
            drawn.append(chain.draw_for(draws.at(epoch, index, number), *before))
            if self._parents:
                sizes.append(chain.size_after(*before, drawn[-1]))
        return drawn

    @cached_property
    def _parents(self) -> set[int | None]:
        """Numbers of the views from which other views are made."""
        return {view.of for view in self.made} - {None}

    def pack(self, params: Sequence[Draws], sizes: np.ndarray) -> Packed:
        """Turn the parameters of a batch into arrays.

        Args:
            params: Parameters of each sample, from ``draw``.
            sizes: Height and width of the images, int64 (I*B, 2). If samples have I > 1 images, the
                first images of all samples come first.

        Raises:
            UserError: An operation needs images of equal size, and sizes differ.
        """
        return self._pack(
            lambda view, chain, sizes: chain.pack([one[view] for one in params], sizes), sizes
        )

    def draw_batch(
        self, seed: int, epochs: np.ndarray, indices: np.ndarray, sizes: np.ndarray
    ) -> Packed:
        """Do ``draw`` and ``pack`` for a batch, vectorized if all transforms support it.

        Args:
            seed: Seed of the run.
            epochs: First numbers of the keys, int64 (B,).
            indices: Indices of the samples, int64 (B,).
            sizes: As for ``pack``.
        """
        if not all(chain.vectorised for chain in self.chains):
            draws = ViewDraws(seed)  # not shared: other calls may draw at the same time
            given: Any = (
                sizes.reshape(self.num_images, -1, 2).swapaxes(0, 1).tolist()
            )  # [sample][image]: height and width
            keys = zip(given, epochs.tolist(), indices.tolist(), strict=True)
            return self.pack([self._draw(draws, g, e, i) for g, e, i in keys], sizes)
        streams = [Streams(seed, epochs, indices, view) for view in range(len(self.chains))]
        return self._pack(lambda view, chain, sizes: chain.draw(streams[view], sizes), sizes)

    def _pack(
        self,
        lay_out: Callable[[int, Chain, np.ndarray], tuple[Steps, np.ndarray]],
        sizes: np.ndarray,
    ) -> Packed:
        """Call ``lay_out(view, chain, sizes before)`` for each view, and pack the results."""
        views: list[Steps] = []
        given = np.split(sizes, self.num_images)
        sizes_after: list[np.ndarray] = []
        for view, chain in enumerate(self.chains):
            of, image = self.made[view].of, self.made[view].image
            try:
                before = given[image] if of is None else sizes_after[of]
                steps, after = lay_out(view, chain, before)
            except UserError as error:
                raise UserError(f"view {view}: {error}") from error
            if differ(after):
                raise UserError(
                    f"view {view}: its images have different sizes ({listed(after)}) and make no "
                    "batch; its transforms need a crop (random_resized_crop or center_crop)"
                )
            views.append(steps)
            sizes_after.append(after)
        return pack(views)

    def __call__(self, pixels: Tensor, sizes: Tensor | None, packed: Packed) -> list[Tensor]:
        """Make all views without waiting for the device.

        Args:
            pixels: uint8 (I*B, H, W, C).
            sizes: Height and width of the images in their canvas, float32 (I*B, 2); None: all
                images fill it.
            packed: The parameters, on the same device.

        Returns:
            V views, normalized float32 (B, C, S, S).
        """
        on_host = pixels.device.type == "cpu"
        dense = (not on_host) if self.dense is None else self.dense
        samples = len(pixels) // self.num_images
        rows = _rows_at_once(pixels, packed) if on_host else samples
        pieces = [
            self._views(pixels, sizes, packed, slice(first, min(first + rows, samples)), dense)
            for first in range(0, samples, rows)
        ]
        if len(pieces) == 1:
            return pieces[0]
        return [torch.cat(parts) for parts in zip(*pieces, strict=True)]

    def _views(
        self, pixels: Tensor, sizes: Tensor | None, packed: Packed, rows: slice, dense: bool
    ) -> list[Tensor]:
        """Make all views of some of the samples."""
        given = []
        for first in range(0, len(pixels), len(pixels) // self.num_images):
            of_image = slice(first + rows.start, first + rows.stop)
            planes = pixels[of_image].permute(0, 3, 1, 2)
            values = planes.to(torch.float32, memory_format=torch.contiguous_format)
            given.append(Images(values, None if sizes is None else sizes[of_image], dense))
        parents: dict[int, Images] = {}
        to_float, views = iter(self.to_float), []
        for number, (view, chain) in enumerate(zip(self.made, self.chains, strict=True)):
            before = given[view.image] if view.of is None else parents[view.of]
            made = chain.apply(before, packed.steps(number, rows))
            if number in self._parents:
                parents[number] = made
            if view.shown:
                views.append(next(to_float).of_planes(made.values))
        return views


def _chains(views: Views, config: Mapping[str, ViewConfig]) -> list[Chain]:
    """Return the batched transforms of each view; raises ConfigError if a transform has none."""
    problems = [text for _, text in unbatched(config)]
    if problems:
        raise ConfigError(problems)
    chains: list[Chain] = []
    for view in views.made:
        built = zip(config[view.group].transforms, view.pipeline.transforms, strict=False)
        forms = [
            find_batched_transform(component.name, transform) for component, transform in built
        ]
        chains.append(Chain(forms))
    return chains


def _rows_at_once(pixels: Tensor, packed: Packed) -> int:
    """Return how many samples fit into ``_CHUNK_BYTES``, at least 1."""
    canvases = [(pixels.shape[1], pixels.shape[2])]
    for view in packed.views:
        canvases += [step.canvas for step in view.steps]
    largest = max(height * width for height, width in canvases)
    return max(1, _CHUNK_BYTES // (4 * pixels.shape[3] * largest))
