"""Section with views of some training images, as the network received them."""

from __future__ import annotations

from collections.abc import Sequence

from selftask.config.schema import Config
from selftask.data.inspect.contact_sheet import Row, printable, rows_of, view_names
from selftask.data.loading.open_data import Sources
from selftask.data.source import Source, channels_of, extras_of
from selftask.report.images.sprite import Sprite, image_section, short_names
from selftask.report.page import Section, render

BUDGET = 600_000  # largest size of the images, in characters
NUM_IMAGES = 6
_SIDE = 112
_LONGEST_TEXT = 160  # largest number of characters of a caption


def views_of(config: Config, sources: Sources) -> Section:
    """Return the section with the views of the first images of epoch 0."""
    rows = rows_of(config, sources, NUM_IMAGES)
    texts = [caption(sources.train, row.index) for row in rows]
    note = (
        f"The first images of epoch 0, with the random draws of training (seed "
        f"{config.train.seed}), from the batch of floats, un-normalized."
    )
    channels = channels_of(sources.train)
    if channels != 3:
        seen = "channels 0 to 2 as red, green and blue" if channels > 3 else "channel 0 in gray"
        note += f" Of {channels} channels: {seen}."
    return views_section(rows, view_names(config.views), texts, note)


def views_section(
    rows: Sequence[Row], names: Sequence[str], captions: Sequence[str], note: str
) -> Section:
    """Return the section with a table: a row for each image, and a column for each view.

    Args:
        rows: Images with their views.
        names: Names of the views.
        captions: Text of each image, which may be empty.
        note: Paragraph above the table, plain text.
    """
    sprite = Sprite("view", _SIDE, BUDGET)
    named = zip(rows, short_names([row.name for row in rows]), captions, strict=True)
    table = [([row.original, *row.views], name, text) for row, name, text in named]
    html = render("images.rows", note, sprite, ["original", *names], table)
    return image_section("Views that the network saw", html, "views", sprite)


def caption(source: Source, index: int) -> str:
    """Return the texts of an image, shortened; an empty string if the data has none."""
    named = [name for name, kind in extras_of(source).items() if kind == "text"]
    return printable(" / ".join(str(source.extra(index, name)) for name in named))[:_LONGEST_TEXT]
