"""The ``views`` section."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from selftask.config.fields import setting
from selftask.config.schema.component import Component, own


@dataclass(frozen=True, kw_only=True)
class ViewConfig:
    """A group of views made by one pipeline."""

    count: int = setting(1, min=0, also=["num", "crops", "num_crops", "number"])
    """Views of each image, or with ``of`` of each view of that group; 0: only for groups made from
    it.
    """
    image: str | None = None
    """Further image of the sample, by its name in the data; null: the image itself."""
    of: str | None = None
    """Group whose views are transformed; null: the image."""
    draws: bool = False
    """Whether ``batch.draws`` has the parameters of this group's transforms."""
    transforms: list[Component] = setting([], of="transforms")
    """Transforms of a view, in order."""

    def to_dict(self) -> dict[str, Any]:
        """Return the section as in the yaml."""
        transforms = [t.to_dict() for t in self.transforms]
        return {**own(self, without=["transforms"]), "transforms": transforms}


def num_views(views: Mapping[str, ViewConfig]) -> dict[str, int]:
    """Return how many views of an image each group adds to a batch."""
    made: dict[str, int] = {}
    for name, group in views.items():
        made[name] = max(1, group.count) * made.get(group.of or "", 1)
    return {name: made[name] if group.count else 0 for name, group in views.items()}


def total_views(section: Mapping[str, Any]) -> int:
    """Return how many views of an image a ``views`` section in the form of ``to_dict`` makes."""
    groups = {n: ViewConfig(count=group["count"], of=group["of"]) for n, group in section.items()}
    return sum(num_views(groups).values())
