"""``selftask eval correspondence``: match the patches of two views related by a known warp."""

from __future__ import annotations

from selftask.cli.model.evaluations.measured import print_measured
from selftask.cli.model.load_model import FROZEN, WEIGHTS
from selftask.cli.verbosity import USAGE as VERBOSITY

USAGE = f"""\
usage: selftask eval correspondence RUN_OR_MODEL data=DIR [key=value ...]

Shows each image twice, whole and after a random crop, rotation and flip, matches each patch of the
second view to the most similar one of the first, and prints the share of matches within a distance
(PCK), as one JSON line last. Needs no labels.
{FROZEN}
data=DIR      any images; default: the validation images of the run, or its training images
size=448      height and width to which images are resized
layer=-1      a hidden layer instead of the output
images=500    largest number of images
scale=[0.5,1] degrees=30 flip=0.5    of the second view
thresholds=[0.05,0.1,0.2]            distances, as shares of the side of the image
seed=0        of the choice of images and of the warps
{WEIGHTS}
{VERBOSITY}"""


def main(argv: list[str]) -> int:
    """Evaluate a model, print the metrics, and append those of a run to ``evaluations.jsonl``."""
    from selftask.evaluate.correspondence import Correspondence, evaluate_correspondence

    return print_measured("correspondence", argv, USAGE, Correspondence, evaluate_correspondence)
