"""Notes about views that are copies of one another, because no transform of them is random."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from selftask.config.checks.components import inner_components
from selftask.config.keys import Key
from selftask.config.schema import Component, Config
from selftask.registry import TRANSFORMS


def notes(config: Config) -> Iterator[str]:
    """Yield a note for the groups whose views of an image are identical in every bit."""
    origins: dict[str, list[Any]] = {}  # for each group, what each of its views is made of
    shown: list[tuple[Any, str]] = []
    for name, group in config.views.items():
        key: Key = ("views", name, "transforms")
        random = any(_is_random(part, (*key, str(at))) for at, part in enumerate(group.transforms))
        recipe = repr([part.to_dict() for part in group.transforms])
        sources = origins.get(group.of, []) if group.of else list(group.images)
        made = [
            (source, recipe, (name, number) if random else None)
            for source in sources
            for number in range(max(1, group.count))
        ]
        origins[name] = made
        shown += [(view, name) for view in made] if group.count else []
    numbers = Counter(view for view, _ in shown)
    for view, number in numbers.items():
        groups = dict.fromkeys(f"views.{name}" for other, name in shown if other == view)
        if number > 1:
            yield (
                f"{', '.join(groups)}: {number} views of an image are identical, "
                "since none of their transforms is random; add one, such as random_resized_crop"
            )


def _is_random(transform: Component, key: Key) -> bool:
    """Return whether a transform may give different results for one image."""
    declared = TRANSFORMS.declared(transform.name, "is_random", True)
    probability = transform.args.get("p")
    if probability == 0:
        return False
    if declared == "p" and probability != 1:
        return True
    inner = inner_components(transform, TRANSFORMS, key)
    return declared is True or any(_is_random(part, place) for part, _, place in inner)
