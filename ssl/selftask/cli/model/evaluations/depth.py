"""``selftask eval depth``: predict depth from frozen patch features."""

from __future__ import annotations

from selftask.cli.model.checkpoint_model import open_named
from selftask.cli.model.evaluate_words import take_model, take_options
from selftask.cli.model.evaluations.folders import take_folders
from selftask.cli.model.evaluations.measured import is_first_rank, on_all_ranks
from selftask.cli.model.kept_results import keep
from selftask.cli.model.load_model import FROZEN, WEIGHTS
from selftask.cli.verbosity import USAGE as VERBOSITY
from selftask.logs import json_row

USAGE = f"""\
usage: selftask eval depth RUN_OR_MODEL data=DIR data.val=DIR [key=value ...]

Predicts the depth of the images of data.val from the patches of data, and prints root mean square
error, mean relative error and the share within a factor of 1.25, as one JSON line last.
{FROZEN}
data=DIR      training images and depth maps: DIR/images/NAME.jpg with DIR/depths/NAME.npy (depths)
              or NAME.png (16 bits); depths that are 0 or not finite are unknown
data.val=DIR  test images and depth maps, likewise
size=448      height and width to which images and depth maps are resized
layer=-1      a hidden layer instead of the output
min_depth=0.001 max_depth=10 bins=256   range of the depths that count, and their classes
unit=0.001    depth of 1 in a PNG
heads=[knn,linear] memory=102400 k=30 temperature=0.02 lr=[0.0001,0.001,0.01,0.1] steps=1000
weight_decay=0.0001 held_out=0.2 images=200 seed=0     as in `selftask eval segmentation`
{WEIGHTS}
{VERBOSITY}"""


def main(argv: list[str]) -> int:
    """Evaluate a model, print the metrics, and append those of a run to ``evaluations.jsonl``."""
    address, overrides = take_model("depth", argv, USAGE)
    from selftask.evaluate.dense.depth_maps import DEPTHS
    from selftask.evaluate.depth import DepthOptions, evaluate_depth

    options, words = take_options("depth", overrides, DepthOptions)
    roots, words = take_folders(words, DEPTHS, "NAME.npy")
    frozen, address = open_named(address, words)
    row = on_all_ranks(frozen, evaluate_depth, roots, frozen.sources, options)
    if is_first_rank():
        print(json_row(row))
        keep(address, "depth", overrides, frozen, options, row)
    return 0
