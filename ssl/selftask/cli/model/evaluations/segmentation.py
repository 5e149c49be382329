"""``selftask eval segmentation``: segment images with frozen patch features."""

from __future__ import annotations

from typing import TYPE_CHECKING

from selftask.cli.model.checkpoint_model import open_named
from selftask.cli.model.evaluate_words import take_model, take_options
from selftask.cli.model.evaluations.folders import take_folders
from selftask.cli.model.evaluations.measured import is_first_rank, on_all_ranks
from selftask.cli.model.kept_results import keep
from selftask.cli.model.load_model import FROZEN, WEIGHTS
from selftask.cli.verbosity import USAGE as VERBOSITY
from selftask.errors import aligned
from selftask.logs import announce, json_row

if TYPE_CHECKING:
    from selftask.evaluate.segmentation import SegmentationResult

USAGE = f"""\
usage: selftask eval segmentation RUN_OR_MODEL data=DIR data.val=DIR [key=value ...]

Segments the images of data.val by the labeled patches of data, and prints mean IoU and accuracy of
pixels, as one JSON line last.
{FROZEN}
data=DIR      training images and masks: DIR/images/NAME.jpg with DIR/masks/NAME.png, the index of
              the class of each pixel; DIR/classes.csv (index,name) may name the classes
data.val=DIR  test images and masks, likewise
size=448      height and width to which images and masks are resized
layer=-1      a hidden layer instead of the output
heads=[knn,linear]   votes of the nearest patches, a linear classifier of patches
memory=102400        largest number of training patches that are kept
k=30 temperature=0.02                            of the votes
lr=[0.0001,0.001,0.01,0.1] steps=1000 weight_decay=0.0001 held_out=0.2   of the classifier
ignore=[255]         indices of pixels that do not count
images=200 seed=0    a random choice of images of each set; default: all
{WEIGHTS}
{VERBOSITY}"""


def main(argv: list[str]) -> int:
    """Evaluate a model, print the metrics, and append those of a run to ``evaluations.jsonl``."""
    address, overrides = take_model("segmentation", argv, USAGE)
    from selftask.evaluate.dense.masks import MASKS, read_table
    from selftask.evaluate.segmentation import (
        SegmentationOptions,
        evaluate_segmentation,
        open_folders,
    )

    options, words = take_options("segmentation", overrides, SegmentationOptions)
    roots, words = take_folders(words, MASKS, "NAME.png")
    table = read_table(roots["data"])
    frozen, address = open_named(address, words)
    assert frozen.sources.val is not None
    sources = (frozen.sources.train, frozen.sources.val)
    train, test, classes = open_folders(roots, sources, options, table)
    result = on_all_ranks(frozen, evaluate_segmentation, train, test, classes, options)
    if is_first_rank():
        row = {**result.row(), **result.facts, **result.by_class()}
        announce(_table(result))
        print(json_row(row))
        keep(address, "segmentation", overrides, frozen, options, row)
    return 0


def _table(result: SegmentationResult) -> str:
    """Format a line for each class: share of the pixels, IoU and accuracy by head."""
    titles = (f"{head} {name}" for head in result.confusions for name in ("IoU", "accuracy"))
    rows = [("class", "pixels", *titles)]
    pixels = next(iter(result.confusions.values())).counts.sum(dim=1)
    shares = (pixels / pixels.sum()).tolist()
    columns = [
        values.tolist()
        for confusion in result.confusions.values()
        for values in (confusion.iou(), confusion.recall())
    ]
    for name, share, *cells in zip(result.classes.names, shares, *columns, strict=True):
        shown = ("-" if cell != cell else f"{cell:.4f}" for cell in cells)
        rows.append((name, f"{share:.2%}", *shown))
    return "\n".join(aligned(rows, right=range(1, len(rows[0]))))
