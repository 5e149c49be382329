"""``selftask test``: evaluate a trained network with its classifier on labeled images."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from selftask.checkpoint.kept import named_checkpoint
from selftask.checkpoint.mirror import local_run
from selftask.cli.model.evaluate_words import check_words
from selftask.cli.model.load_model import IMAGES
from selftask.cli.options import needs_first, take
from selftask.config.schema import Config
from selftask.config.trust import TRUST, refuse_addresses, take_trust
from selftask.errors import UserError
from selftask.files.paths import exists
from selftask.registry import METHODS

if TYPE_CHECKING:
    from selftask.data.source import Source

USAGE = f"""\
usage: selftask test RUN [data=DIR] [key=value ...]

Loads the newest checkpoint of RUN (RUN@best, RUN@STEP: another one) and prints, as one JSON line,
its meters and loss on labeled images. The run stays as it is.
data=DIR      the images to test on; default: data.val of the run
predictions=FILE.csv   also write path, label, predicted class and its probability of each image
predictions=FILE.npz   also write all scores; `selftask eval predictions FILE` reads both
weights=ema   the average that hooks.ema (swa) keeps, instead of the trained weights
meters.accuracy={{topk: [1, 5]}}   other meters than those of the run
A method without a classifier has no meters: its loss is that of data=DIR in the views of training.
{TRUST}"""


def main(argv: list[str]) -> int:
    """Print step, loss and meters of a run as one JSON line."""
    needs_first(argv, "test needs a RUN", USAGE)
    words, trust = take_trust(argv[1:])
    checkpoint = named_checkpoint(argv[0])
    address = argv[0] if checkpoint is None else str(checkpoint.parent.parent)
    run = Path(local_run(address, num_checkpoints=None)).expanduser()
    if not exists(run / "config.yaml"):
        raise UserError(f"{argv[0]}: there is no such run")
    average, words = take("weights", words)
    predictions, words = take("predictions", words)
    check_words(
        "test", words, ("train.batch_size", "train.precision"), ("method", "meters", "views")
    )
    words = [f"data.val{w[4:]}" if w.partition("=")[0] in IMAGES else w for w in words]

    from selftask.checkpoint.rotation import checkpoints
    from selftask.config.load import load_config
    from selftask.logs import json_row

    config = load_config(str(run / "config.yaml"), words, trust=trust)
    if not trust:
        refuse_addresses(config, "data", "method")
    checkpoint_paths = [checkpoint] if checkpoint is not None else checkpoints(run / "checkpoints")
    if not checkpoint_paths:
        raise UserError(f"{run}: has no checkpoint yet")
    if config.data.val is None:
        raise UserError("test: the run has no data.val; give the labeled images, data=DIR")
    with tempfile.TemporaryDirectory() as folder:
        row = _scores(_beside(config, checkpoint_paths[0], Path(folder), average), predictions)
    print(json_row(row))
    return 0


def _beside(config: Config, checkpoint: Path, folder: Path, average: str | None) -> Config:
    """Return the config of a task on one process that only loads the checkpoint.

    ``average`` names the hook whose average replaces the weights, or is None. Raises UserError if
    the run has no such hook.
    """
    from selftask.task.loaded import config_to_load

    hooks = {key: hook for key, hook in config.hooks.items() if key == average}
    if average is not None and not hooks:
        raise UserError(f"test: weights={average}: the run has no hooks.{average}")
    return config_to_load(config, checkpoint, folder, hooks)


def _check_labeled(config: Config, source: Source) -> None:
    """Raise UserError if the method needs labels and an image has none.

    Training allows such images in ``data.val`` and leaves them out.
    """
    from selftask.config.checks.requirements import of_labels
    from selftask.data.labels import count_unlabeled

    for problem in of_labels(config, count_unlabeled(source), len(source), "data.val"):
        raise UserError(problem)


def _scores(config: Config, predictions: str | None) -> dict[str, float]:
    """Return step, loss and meters; write the predictions if a file is given.

    If the method has no meters, the loss is that on the views of training.
    """
    from contextlib import nullcontext

    from selftask.evaluate.predictions import prediction_file
    from selftask.evaluate.validation import validation_loss
    from selftask.task import Task

    task = Task(config)
    if predictions is not None and not METHODS.declared(
        config.method.name, "outputs_logits", False
    ):
        raise UserError(f"predictions: {config.method.name} gives no class scores to predict by")
    try:
        task.prepare()
        source = task.data_module.val_source
        assert source is not None, "main has refused a run without data.val"
        _check_labeled(config, source)
        for hook in task.named_hooks.values():
            hook.on_start(task)
        average = next(iter(task.averages.values()), None)
        if config.hooks and average is None:
            raise UserError(
                f"test: the checkpoint has no averaged weights ({', '.join(config.hooks)})"
            )
        with average.in_place(task) if average is not None else nullcontext():
            if not task.loss.has_meter_input:
                row = validation_loss(task)
            elif predictions is None:
                row = task.score()
            else:
                with prediction_file(Path(predictions).expanduser(), source) as append:
                    row = task.score(append)
    finally:
        task.close()
    return {"step": task.steps_done, **row}
