"""``selftask eval``: evaluate features of a run, a file, or a model of timm or torchvision."""

from __future__ import annotations

import importlib
from dataclasses import fields, replace
from itertools import takewhile

from selftask.cli.model.checkpoint_model import open_named
from selftask.cli.model.evaluate_words import check_words
from selftask.cli.model.kept_results import keep
from selftask.cli.model.load_model import MODEL, WEIGHTS
from selftask.cli.options import asks_for_help, refuse_ranks
from selftask.cli.verbosity import USAGE as VERBOSITY
from selftask.config.config_class import config_class
from selftask.config.schema import Config
from selftask.distributed.world import read_world
from selftask.errors import UserError, nearest
from selftask.logs import announce, json_row
from selftask.registry import EVALUATIONS

COMMANDS = {
    "retrieval": ("selftask.cli.model.retrieval", "find images of the same object"),
    "segmentation": ("selftask.cli.model.dense.segmentation", "classes of pixels"),
    "depth": ("selftask.cli.model.dense.depth", "depth of pixels"),
    "correspondence": ("selftask.cli.model.dense.correspondence", "find places again, no labels"),
    "suite": ("selftask.cli.model.suite", "all checkpoints of a run"),
    "predictions": ("selftask.cli.model.predictions", "metrics of what `selftask test` wrote"),
}  # name -> module with USAGE and main(argv) -> exit code, description in one line

USAGE = f"""\
usage: selftask eval knn|linear|svm|spectrum RUN_OR_MODEL [RUN_OR_MODEL ...] [key=value ...]
       selftask eval retrieval RUN_OR_MODEL [truth=FILE] [key=value ...]
       selftask eval segmentation|depth RUN_OR_MODEL data=DIR data.val=DIR [key=value ...]
       selftask eval correspondence RUN_OR_MODEL data=DIR [key=value ...]
       selftask eval suite RUN [EVALUATION ...] [key=value ...]
       selftask eval predictions FILE [FILE ...]

{MODEL},
              or RUN@STEP or RUN@best: a checkpoint of a run (weights=ema: its average)
data=DIR      the labeled images to learn from; default: those of the run
data.val=DIR  those to test on; without it, k-NN leaves each image out of its own neighbors;
              spectrum needs no labels
{WEIGHTS}
Fields of the evaluation need no prefix: k=[5,20], few_labels=[10]. Prints one JSON line last;
with several models, one after each, which names the model.
`selftask eval retrieval --help` says more of that one, likewise of those below it.
{VERBOSITY}"""


def main(argv: list[str]) -> int:
    """Evaluate, print the metrics, and append them to the run's ``evaluations.jsonl``."""
    if argv and argv[0] in COMMANDS:
        command = importlib.import_module(COMMANDS[argv[0]][0])
        if asks_for_help(argv):
            print(command.USAGE)
            return 0
        refuse_ranks(f"eval {argv[0]}")
        return int(command.main(argv[1:]))
    if not argv or asks_for_help(argv):
        print(USAGE)
        return 0
    name, models = argv[0], list(takewhile(lambda word: "=" not in word, argv[1:]))
    if not models:
        raise UserError(f"eval needs an evaluation and a run or model\n{USAGE}")
    _check_name(name)
    for address in models:
        row = _evaluate(name, address, argv[1 + len(models) :])
        if read_world().rank == 0:  # which has the results
            print(json_row({"model": address, **row} if len(models) > 1 else row), flush=True)
    return 0


def _evaluate(name: str, address: str, overrides: list[str]) -> dict[str, float]:
    """Return the metrics of a model, which ranks other than 0 lack; keep those of a run."""
    asked = [f"eval.evaluations={{{name}: {{}}}}", *_spelt_out(name, overrides)]
    frozen, address = open_named(address, asked)
    config = _only(frozen.config, name)

    from selftask.evaluate.offline import evaluate_backbone

    world = read_world()
    row = evaluate_backbone(
        frozen.backbone, config, frozen.sources, device=frozen.device, world=world, tell=announce
    )
    if world.rank == 0:
        keep(address, name, overrides, frozen.facts.get("step"), row)
    return row


def _check_name(name: str) -> None:
    if name not in EVALUATIONS:
        names = [*EVALUATIONS.names(), *COMMANDS]
        raise UserError(f"no evaluation named {name!r}; {nearest(name, names)}")


def _only(config: Config, name: str) -> Config:
    """Return the config with no other evaluation."""
    chosen = {name: config.eval.evaluations[name]}
    return replace(config, eval=replace(config.eval, evaluations=chosen))


def _spelt_out(name: str, overrides: list[str]) -> list[str]:
    """Expand ``k=[5]`` to ``eval.evaluations.knn.k=[5]``; raise UserError for unknown fields."""
    config = config_class(EVALUATIONS, name)
    names = {field.name for field in fields(config)} if config is not None else set()
    check_words(name, overrides, names)
    prefix = f"eval.evaluations.{name}."
    return [prefix + text if text.partition("=")[0] in names else text for text in overrides]
