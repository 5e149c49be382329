"""Views of an image; their draws depend only on (seed, epoch, sample, view)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from selftask.config.schema import ViewConfig
from selftask.data.transforms.channels import RGB
from selftask.data.transforms.pipeline import Compose, Normalizer, build_pipeline
from selftask.data.transforms.transform import Drawn, Trace
from selftask.errors import ConfigError
from selftask.random.views import ViewDraws


@dataclass(frozen=True)
class View:
    """Definition of a view: its input and its pipeline of transforms."""

    group: str
    pipeline: Compose
    of: int | None  # number of the view that it is made from; None: from the image
    shown: bool  # False: it is only used to make other views
    image: int = 0  # 0: the main image of the sample; n: ``Views.images[n - 1]``


class Views:
    """Callable that makes all views of a sample, in the order of the config.

    ``made`` lists them, including those that are only used to make others. The draws of a view
    depend on its position in this list.

    Args:
        views: Config of each group of views, by name.
        channels: Number of channels of the images, C.

    Raises:
        ConfigError: If there are no views, or their transforms are invalid.
    """

    def __init__(self, views: Mapping[str, ViewConfig], channels: int = RGB) -> None:
        named = dict.fromkeys(image for group in views.values() for image in group.images)
        # names of a sample's extra images that views are made from
        self.images = tuple(filter(None, named))
        numbers: dict[str | None, int] = {None: 0}
        numbers |= {image: number for number, image in enumerate(self.images, 1)}
        self.made: list[View] = []
        for name, group in views.items():
            pipeline = build_pipeline(group.transforms, f"views.{name}.transforms", channels)
            sources: Iterable[tuple[int | None, int]]  # a view, or an image of the sample
            if group.of is not None:
                sources = [
                    (index, 0) for index, view in enumerate(self.made) if view.group == group.of
                ]
            else:
                sources = [(None, numbers[image]) for image in group.images]
            self.made += [
                View(name, pipeline.for_view(number), parent, group.count > 0, image)
                for parent, image in sources
                for number in range(max(1, group.count))
            ]
        self.shown = [number for number, view in enumerate(self.made) if view.shown]
        if not self.shown:
            raise ConfigError(["views: there is none; at least one group of views is needed"])
        self.groups = Counter(self.made[number].group for number in self.shown)
        self._draws: ViewDraws | None = None
        self._seed: int | None = None

    def __len__(self) -> int:
        return len(self.shown)

    @property
    def to_float(self) -> list[Normalizer]:
        """Normalizer of each shown view, which converts its batch to the input of a network."""
        return [self.made[number].pipeline.to_float for number in self.shown]

    def __call__(
        self,
        image: np.ndarray,
        seed: int,
        epoch: int,
        index: int,
        out: Sequence[np.ndarray] = (),
        extra_images: Sequence[np.ndarray] = (),
        traces: list[Trace] | None = None,
    ) -> list[np.ndarray]:
        """Return the views of a sample, except those that are only used to make others.

        Args:
            image: Main image of the sample, uint8 (H, W, C).
            seed: Seed of the draws.
            epoch: First number of the sample's key.
            index: Second number of the sample's key.
            out: Arrays that the views are written to if possible, in order.
            extra_images: Other images of the sample, in the order of ``images``.
            traces: List that the draws of each view of ``made`` are appended to.

        Returns:
            V arrays, uint8 (H', W', C); views may differ in size.
        """
        if self._draws is None or self._seed != seed:
            self._draws, self._seed = ViewDraws(seed), seed
        images = (image, *extra_images)
        outputs = iter(out)
        made: list[np.ndarray] = []
        for number, view in enumerate(self.made):
            source = images[view.image] if view.of is None else made[view.of]
            output = next(outputs, None) if view.shown else None
            steps: list[Drawn] | None = None if traces is None else []
            made.append(view.pipeline(source, self._draws.at(epoch, index, number), output, steps))
            if traces is not None and steps is not None:
                height, width = made[-1].shape[:2]
                traces.append(Trace(steps, (height, width)))
        return [made[number] for number in self.shown]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_draws": None}
