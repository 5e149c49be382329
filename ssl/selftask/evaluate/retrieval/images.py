"""Images of any size, one at a time, prefetched by a thread.

C channels.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from selftask.config.schema import Config
from selftask.data.loading.bad_files import BadFiles
from selftask.data.loading.dataset import read
from selftask.data.source import Source, channels_of
from selftask.data.transforms.pipeline import build_pipeline
from selftask.data.transforms.resampling import resize
from selftask.errors import BadImage, UserError
from selftask.evaluate.retrieval.benchmark import Query

_AHEAD = 4  # images

S = TypeVar("S")
T = TypeVar("T")


class SizedImages:
    """Images of a source, limited to a longest side and normalized as in ``eval.transforms``.

    Args:
        source: The images.
        config: Config with ``eval.transforms``, of which only ``normalize`` is used, and
            ``data.on_error``.
        side: Longest side in pixels; smaller images are not enlarged to it.
        multiple: Height and width are rounded to multiples of these.
    """

    def __init__(
        self, source: Source, config: Config, side: int, multiple: tuple[int, int]
    ) -> None:
        last = [t for t in config.eval.transforms if t.name == "normalize"]
        self._normalize = build_pipeline(last, "eval.transforms", channels_of(source)).to_float
        self._source, self._side, self._multiple = source, side, multiple
        self._bad = BadFiles.of(source, config.data, None)

    def each(self, queries: Iterable[Query]) -> Iterator[Tensor | None]:
        """Yield the images (1, C, H, W), cropped to their boxes; None for unreadable ones.

        Raises:
            UserError: If unreadable images exceed what ``data`` allows, or a box lies outside of
                its image.
        """
        for pixels in _ahead(self._read, queries):
            if isinstance(pixels, BadImage):
                self._bad.add([pixels])
                yield None
            else:
                yield self._normalize(torch.from_numpy(pixels)[None])

    def _read(self, query: Query) -> np.ndarray | BadImage:
        """Return pixels (H, W, C) or a BadImage; a box is scaled by the factor of the image."""
        try:
            image, _ = read(self._source, query.image)
        except BadImage as error:
            return error
        scale = min(1.0, self._side / max(image.shape[:2]))
        if query.box is not None:
            image = _cut(image, query.box, self._source.path(query.image))
        height, width = (
            max(1, round(length * scale / by)) * by
            for length, by in zip(image.shape[:2], self._multiple, strict=True)
        )
        return np.require(resize(image, height, width, "bilinear"), requirements="W")


def _cut(image: np.ndarray, box: tuple[float, float, float, float], path: str) -> np.ndarray:
    height, width = image.shape[:2]
    left, top, right, bottom = (round(number) for number in box)
    cut = image[max(0, top) : min(height, bottom), max(0, left) : min(width, right)]
    if not cut.size:
        raise UserError(f"{path}: the box {box} lies outside of its {width}x{height} pixels")
    return cut


def _ahead(function: Callable[[S], T], items: Iterable[S]) -> Iterator[T]:
    """Yield ``function(item)`` in order, computed in a thread a few items ahead."""
    waiting: deque[Future[T]] = deque()
    with ThreadPoolExecutor(max_workers=1) as thread:
        for item in items:
            waiting.append(thread.submit(function, item))
            if len(waiting) > _AHEAD:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
