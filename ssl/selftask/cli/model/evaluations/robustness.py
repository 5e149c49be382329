"""``selftask eval robustness``: errors on corrupted test images."""

from __future__ import annotations

from selftask.cli.model.checkpoint_model import open_named
from selftask.cli.model.evaluate_words import take_model, take_options
from selftask.cli.model.kept_results import keep
from selftask.cli.model.load_model import MODEL, WEIGHTS
from selftask.cli.verbosity import USAGE as VERBOSITY
from selftask.logs import announce, json_row

USAGE = f"""\
usage: selftask eval robustness RUN_OR_MODEL [data=DIR] [data.val=DIR] [key=value ...]

Classifies corrupted test images by k-NN on the features of clean training images, and prints the
error of each corruption at five strengths, and their means as one JSON line last.
{MODEL},
              or RUN@STEP or RUN@best: a checkpoint of a run
data=DIR      the labeled images to learn from; default: those of the run
data.val=DIR  those to test on
corruptions=[gaussian_noise,impulse_noise,gaussian_blur,contrast,brightness,pixelate]
images=1000   number of test images, drawn at random; default: all
k=20          number of neighbors that vote
{WEIGHTS}
{VERBOSITY}"""


def main(argv: list[str]) -> int:
    """Evaluate, print the errors, and append them to the run's ``evaluations.jsonl``."""
    address, overrides = take_model("robustness", argv, USAGE)
    from selftask.evaluate.robustness import RobustnessOptions, measure_robustness

    options, words = take_options("robustness", overrides, RobustnessOptions)
    frozen, address = open_named(address, words)
    row = measure_robustness(
        frozen.backbone,
        frozen.config,
        frozen.sources,
        options,
        device=frozen.device,
        tell=announce,
    )
    print(json_row(row))
    keep(address, "robustness", overrides, frozen.facts.get("step"), row)
    return 0
