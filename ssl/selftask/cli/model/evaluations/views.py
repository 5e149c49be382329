"""``selftask eval views``: label-free measures of several views of each image."""

from __future__ import annotations

from selftask.cli.model.checkpoint_model import open_named
from selftask.cli.model.evaluate_words import take_model, take_options
from selftask.cli.model.kept_results import keep
from selftask.cli.model.load_model import WEIGHTS
from selftask.cli.verbosity import USAGE as VERBOSITY
from selftask.logs import json_row

USAGE = f"""\
usage: selftask eval views RUN [data=DIR] [key=value ...]

Makes several views of each image with the run's transforms of training, and prints LiDAR, the
effective rank of differences between images, and the alignment of views, as one JSON line. No
labels are needed. Compare checkpoints of one method on the same images only.
RUN           a run's folder, RUN@STEP or RUN@best (weights=ema: its average)
data=DIR      the images; default: those of the run
images=1000   number of images, drawn at random if there are more
views=10      number of views of each image (50 in the paper)
{WEIGHTS}
{VERBOSITY}"""


def main(argv: list[str]) -> int:
    """Measure, print the measures, and append them to the run's ``evaluations.jsonl``."""
    address, overrides = take_model("views", argv, USAGE)
    from selftask.evaluate.view_measures import ViewOptions, measure_views

    options, words = take_options("views", overrides, ViewOptions)
    words = ["data.val=null", "data.val_sets=null", *words]
    frozen, run = open_named(address, words)
    row = measure_views(
        frozen.backbone, frozen.config, frozen.sources.train, options, device=frozen.device
    )
    print(json_row(row))
    keep(run, "views", overrides, frozen.facts.get("step"), row)
    return 0
