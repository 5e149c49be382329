"""``selftask eval views``: label-free measures of several views of each image."""

from __future__ import annotations

from selftask.cli.model.evaluations.measured import print_measured
from selftask.cli.model.load_model import WEIGHTS
from selftask.cli.verbosity import USAGE as VERBOSITY

USAGE = f"""\
usage: selftask eval views RUN [data=DIR] [key=value ...]

Makes several views of each image with the run's transforms of training, and prints LiDAR, the
effective rank of differences between images, and the alignment of views, as one JSON line. No
labels are needed. Compare checkpoints of one method on the same images only.
RUN           a run's folder, RUN@STEP or RUN@best (weights=ema: its average)
data=DIR      the images; default: the validation images of the run, or its training images
images=1000   largest number of images
views=10      number of views of each image (50 in the paper)
{WEIGHTS}
{VERBOSITY}"""


def main(argv: list[str]) -> int:
    """Measure views of images, print the measures, and append them to ``evaluations.jsonl``."""
    from selftask.evaluate.view_measures import ViewMeasures, measure_views

    return print_measured("views", argv, USAGE, ViewMeasures, measure_views)
