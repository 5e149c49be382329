"""The ``views`` section."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from selftask.config.fields import setting
from selftask.config.schema.component import Component, Section


@dataclass(frozen=True, kw_only=True)
class ViewConfig(Section):
    """Group of views made by one list of transforms."""

    count: int = setting(1, min=0, also=["num", "crops", "num_crops", "number"])
    """Number of views of each image, or of each view in the group ``of``. 0: one, which is only the
    input of other groups and not part of the batch.
    """
    image: str | list[str | None] | None = None
    """Name of an extra image of the sample from which views are made; null: its main image. A list
    makes ``count`` views of each: ``[null, frame_1, frame_2]``.
    """
    of: str | None = None
    """Group, listed before this one, whose views are the input of the transforms; null: the image.
    """
    draws: bool = False
    """Whether ``batch.draws`` contains the parameters of this group's transforms."""
    transforms: list[Component] = setting([], of="transforms")
    """Transforms that make a view, in order."""

    @property
    def images(self) -> list[str | None]:
        """Names of the images from which views are made; None is the main image."""
        return list(self.image) if isinstance(self.image, list) else [self.image]


def num_views(views: Mapping[str, ViewConfig]) -> dict[str, int]:
    """Return the number of views per sample that each group adds to a batch, by group."""
    made: dict[str, int] = {}
    for name, group in views.items():
        sources = made.get(group.of, 1) if group.of else len(group.images)
        made[name] = max(1, group.count) * sources
    return {name: made[name] if group.count else 0 for name, group in views.items()}


def total_views(section: Mapping[str, Any]) -> int:
    """Return the number of views per image of a ``views`` section given as plain values."""
    keys = ("count", "of", "image")
    groups = {name: ViewConfig(**{k: group[k] for k in keys}) for name, group in section.items()}
    return sum(num_views(groups).values())
