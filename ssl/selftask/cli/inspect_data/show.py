"""``selftask data show``: draw the views that the network receives."""

from __future__ import annotations

from dataclasses import replace

from selftask.cli.options import needs_first, take, take_options
from selftask.errors import UserError, with_noun
from selftask.files.paths import expand_user, is_folder

USAGE = """\
usage: selftask data show RECIPE [--images 8] [--out views.png] [key=value ...]

Writes a PNG: a row for each image with the image itself and every view of it, named by its group in
`views:`. They are the first images of epoch 0, with the very draws that training would make for
them (seed, epoch, sample, view), taken from the batch of floats and un-normalized. Of more
than three channels the first three are drawn, of one or two the first in gray."""

OPTIONS = {"--images": int, "--out": str}


def main(argv: list[str]) -> int:
    """Check the config, make the views and write them as one image."""
    words, options = take_options(argv, OPTIONS)
    named, words = take("out", words)
    number = options.get("--images", 8)
    out = expand_user(options.get("--out", named or "views.png"))
    needs_first(words, "data show needs a RECIPE", USAGE)
    if number == 0:
        raise UserError("--images 0: must be at least 1")
    if out.suffix.lower() != ".png":
        raise UserError(f"--out {out}: the sheet is a PNG; its name must end with .png")
    if not is_folder(out.absolute().parent):
        raise UserError(f"--out {out}: there is no folder {out.absolute().parent}")

    from selftask.config.load import load_config
    from selftask.data.loading.open_data import open_data

    config = load_config(words[0], words[1:])
    sources = open_data(replace(config.data, val=None))

    from selftask.data.inspect.contact_sheet import draw, rows_of, view_names

    rows = rows_of(config, sources, number)
    draw(rows, view_names(config.views)).save(out)
    sizes = {f"{view.shape[1]}x{view.shape[0]}": None for view in rows[0].views}
    shown = with_noun(len(rows), "image")
    print(
        f"SHOW wrote {out}: {shown} with {len(rows[0].views)} views of {', '.join(sizes)} "
        f"(seed {config.train.seed}, epoch 0){_drawn(rows[0].original.shape[2])}"
    )
    return 0


def _drawn(channels: int) -> str:
    """Return a note on how images without exactly three channels are drawn."""
    if channels == 3:
        return ""
    drawn = "channels 0 to 2 as red, green and blue" if channels > 3 else "channel 0 in gray"
    number = f"{channels} channels" if channels > 1 else "1 channel"
    return f"; of {number} it shows {drawn}"
