"""``selftask eval robustness``: errors on corrupted test images."""

from __future__ import annotations

from selftask.cli.model.evaluations.measured import print_measured
from selftask.cli.model.load_model import FROZEN, WEIGHTS
from selftask.cli.verbosity import USAGE as VERBOSITY

USAGE = f"""\
usage: selftask eval robustness RUN_OR_MODEL [data=DIR] [data.val=DIR] [key=value ...]

Classifies corrupted test images by k-NN on the features of clean training images, and prints the
error of each corruption at five strengths, and their means as one JSON line last.
{FROZEN}
data=DIR      the labeled images to learn from; default: those of the run
data.val=DIR  those to test on
corruptions=[gaussian_noise,shot_noise,impulse_noise,gaussian_blur,defocus_blur,motion_blur,
              zoom_blur,fog,contrast,brightness,pixelate,jpeg]
folder=DIR    corrupted images instead: DIR/CORRUPTION/STRENGTH/CLASS/IMAGE, as ImageNet-C has them
images=1000   number of test images, drawn at random; default: all
alexnet=true  also divides the errors by AlexNet's; for the 1000 classes of ImageNet only
k=20          number of neighbors that vote
{WEIGHTS}
{VERBOSITY}"""


def main(argv: list[str]) -> int:
    """Evaluate a model, print the errors, and append those of a run to ``evaluations.jsonl``."""
    from selftask.evaluate.robustness import RobustnessOptions, measure_robustness

    return print_measured("robustness", argv, USAGE, RobustnessOptions, measure_robustness)
