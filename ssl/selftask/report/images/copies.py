"""Pages with images of a data set: copies of one another, and images unlike all others."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from selftask.data.source import Source
from selftask.report.images.sprite import Sprite, image_section, short_names
from selftask.report.page import Section, render, write_page

NUM_IMAGES = 100  # images of which groups are shown
_MOST = 12  # images that are shown of a group
_SIDE = 96
_BUDGET = 900_000  # largest size of the images of a section, in characters


class Group(NamedTuple):
    """Images that are shown together, by index, with a text below them."""

    text: str
    indices: Sequence[int]


def write_copies(path: Path, title: str, source: Source, copies: Sequence[Sequence[int]]) -> None:
    """Write a page with at most 100 groups of equal images, and 12 images of each.

    Args:
        path: The file to write.
        title: Title of the page.
        source: The images.
        copies: Indices of the images of each group.
    """
    groups = [Group(f"{len(group)} equal images", group) for group in copies[:NUM_IMAGES]]
    note = f"{len(copies):,} groups of images with the same content; {len(groups)} are shown."
    write_page(path, title, [_section("Copies", note, "copies", groups, source)])


def write_ranked(
    path: Path,
    title: str,
    source: Source,
    indices: Sequence[int],
    cosines: Sequence[float],
    nearest: Sequence[int],
) -> None:
    """Write a page with the most similar and the most dissimilar of N images.

    Args:
        path: The file to write.
        title: Title of the page.
        source: The images.
        indices: Index of each image in the source, (N,).
        cosines: Cosine of each image to the nearest other one, (N,).
        nearest: Number of the nearest other image, from 0 to N - 1, (N,).
    """
    order = sorted(range(len(cosines)), key=lambda row: -cosines[row])
    rare = [
        Group(f"cosine {cosines[row]:.4f}", [indices[row], indices[nearest[row]]])
        for row in reversed(order[-NUM_IMAGES:])
    ]
    similar = [
        Group(group.text, [indices[row] for row in group.indices])
        for group in joined(order[:NUM_IMAGES], cosines, nearest)
    ]
    most = min(NUM_IMAGES, len(order))
    first = f"The {most} images with the highest cosine to another image, joined to groups."
    second = (
        f"The {most} images with the lowest cosine to the nearest other image, shown next "
        "to them: outliers and damaged images."
    )
    sections = [
        _section("Most similar", first, "copies", similar, source),
        _section("Rarest", second, "rare", rare, source),
    ]
    write_page(path, title, sections)


def joined(rows: Sequence[int], cosines: Sequence[float], nearest: Sequence[int]) -> list[Group]:
    """Group images that are linked by nearest neighbors; groups are in the order of ``rows``.

    Args:
        rows: Numbers of the images to link to their nearest neighbors, the most similar first.
        cosines: As in ``write_ranked``.
        nearest: As in ``write_ranked``.
    """
    group_of: dict[int, dict[int, None]] = {}  # image -> its group, an ordered set
    for row in rows:
        pair = [group_of.get(number, {number: None}) for number in (row, nearest[row])]
        union = pair[0] | pair[1]
        group_of |= dict.fromkeys(union, union)
    groups: dict[tuple[int, ...], float] = {}  # with the highest cosine
    for row in rows:
        groups.setdefault((*group_of[row],), cosines[row])
    return [Group(f"cosine {cosine:.4f}", members) for members, cosine in groups.items()]


def _counted(group: Group) -> str:
    """Return the text of a group, and how many of its images are shown if not all are."""
    number = len(group.indices)
    return group.text if number <= _MOST else f"{group.text}, {_MOST} of {number} images shown"


def _section(title: str, note: str, id: str, groups: Sequence[Group], source: Source) -> Section:
    sprite = Sprite(id, _SIDE, _BUDGET)
    shown = [index for group in groups for index in group.indices[:_MOST]]
    names = iter(short_names([source.path(index) for index in shown]))
    rows = [
        (_counted(group), [(source[index][0], next(names)) for index in group.indices[:_MOST]])
        for group in groups
    ]
    return image_section(title, render("images.groups", note, sprite, rows), id, sprite)
