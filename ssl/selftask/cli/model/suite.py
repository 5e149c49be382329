"""``selftask eval suite``: the same evaluations of all checkpoints of a run."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING

from selftask.checkpoint.kept import named_checkpoint
from selftask.checkpoint.rotation import checkpoints, step_of
from selftask.cli.model.evaluate_words import OTHERS, SECTIONS
from selftask.cli.model.load_model import take
from selftask.cli.options import take_options
from selftask.cli.verbosity import USAGE as VERBOSITY
from selftask.config.trust import TRUST, take_trust
from selftask.errors import UserError, nearest
from selftask.files.paths import exists, expand_user
from selftask.logs import announce
from selftask.registry import EVALUATIONS

if TYPE_CHECKING:
    from selftask.config.schema import Config
    from selftask.logs.checkpoint_results import CheckpointResults

USAGE = f"""\
usage: selftask eval suite RUN [EVALUATION ...] [key=value ...]
                           [--follow | --slurm | --slurm-each]

Evaluates the checkpoints of a run and prints a table of their metrics. Results are kept in
RUN/evaluations; what is there already is not computed again.
EVALUATION    knn, linear, svm or one of your own; default: those of the run. Their fields have
              the name in front: knn.k=[5,20]
data=DIR data.val=DIR   the labelled images; default: those of the run
checkpoints=all         or last, best (by train.keep_best), or a pattern of steps: 1?00
every=N       only those of steps that N divides
weights=ema   the average that hooks.ema (swa) keeps, instead of the trained weights
--follow      goes on with new checkpoints as they come, until the run has ended
--slurm       as one job, by launch.slurm.* of the run or the command line; the same command without
              it prints the table. --slurm-each: one job for each checkpoint, as an array.
              `selftask cancel JOBID` takes it out of the queue
{TRUST}
{VERBOSITY}"""

OPTIONS = {"--follow": bool, "--slurm": bool, "--slurm-each": bool}
_POLL_S = 10.0  # between two looks at a run that is followed
_ON_ANY_MACHINE = ("train.device", "train.threads", "data.num_workers", "launch", "trust")


@dataclass(frozen=True)
class Request:
    """What is asked for."""

    run: Path
    evaluations: list[str]
    words: list[str]  # key=value for the config and the choice of weights
    checkpoints: str
    every: int

    def chosen(self) -> list[Path]:
        """Return the checkpoints that are there now, oldest first.

        Raises:
            UserError: If there is no best one.
        """
        if self.checkpoints == "best":
            best = named_checkpoint(f"{self.run}@best")
            return [] if best is None else [best]
        found = sorted(checkpoints(self.run / "checkpoints"), key=step_of)
        found = [path for path in found if step_of(path) % self.every == 0]
        if self.checkpoints == "last":
            return found[-1:]
        pattern = "*" if self.checkpoints == "all" else self.checkpoints
        return [path for path in found if fnmatch(str(step_of(path)), pattern)]

    def overrides(self, evaluations: list[str]) -> list[str]:
        """Return the words with the fields of evaluations spelt out."""
        asked = ", ".join(f"{name}: {{}}" for name in evaluations)
        own = {word for word in self.words if word.partition(".")[0] in self.evaluations}
        rest = [word for word in self.words if word not in own]
        named = [f"eval.evaluations={{{asked}}}"]
        return [*named, *rest, *(f"eval.evaluations.{word}" for word in sorted(own))]

    @property
    def settings(self) -> list[str]:
        """The words that change the figures."""
        return sorted(w for w in self.words if not _key(w).startswith(_ON_ANY_MACHINE))


def main(argv: list[str]) -> int:
    """Evaluate or submit; print the table."""
    words, options = take_options(argv, OPTIONS)
    if len(options) > 1:
        raise UserError(f"eval suite: {' and '.join(options)}: only one can be meant")
    request, config = _read(words)
    if "--slurm" in options or "--slurm-each" in options:
        from selftask.cli.model.suite_job import submit_suite

        job = submit_suite(request, config, each="--slurm-each" in options)
        print(f"submitted as job {job}; the same command without --slurm prints the table")
        return 0
    _evaluate(request, follow="--follow" in options)
    return 0


def _read(words: list[str]) -> tuple[Request, Config]:
    """Return the request and the config of the run with its words; all mistakes are found here."""
    if not words or "=" in words[0]:
        raise UserError(f"eval suite needs a RUN before any key=value\n{USAGE}")
    run = expand_user(words[0])
    if not exists(run / "config.yaml"):
        raise UserError(f"{run}: there is no such run")
    names = [word for word in words[1:] if "=" not in word]
    for name in names:
        if name not in EVALUATIONS:
            raise UserError(f"no evaluation named {name!r}; {nearest(name, EVALUATIONS)}")
    which, rest = take("checkpoints", [word for word in words[1:] if "=" in word])
    every, rest = take("every", rest)
    if every is not None and not (every.isdecimal() and int(every)):
        raise UserError(f"every={every}: expected a number of steps, such as 1000")
    _, trust = take_trust(rest)
    from selftask.config.load import load_config

    config = load_config(str(run / "config.yaml"), [], trust=trust)
    request = Request(
        run, names or list(config.eval.evaluations), rest, which or "all", int(every or 1)
    )
    if not request.evaluations:
        raise UserError(f"{run}: has no evaluations of its own; name some, such as knn")
    _check_words(request)
    overrides, _ = take_trust(take("weights", request.overrides(request.evaluations))[1])
    return request, load_config(str(run / "config.yaml"), overrides, trust=trust)


def _check_words(request: Request) -> None:
    known = {*SECTIONS, *OTHERS, *request.evaluations, "launch", "checkpoints", "every"}
    for word in request.words:
        first = _key(word).partition(".")[0]
        if first not in known:
            raise UserError(f"eval suite: there is no {first!r}; {nearest(first, known)}")


def _key(word: str) -> str:
    return word.partition("=")[0]


def _evaluate(request: Request, *, follow: bool) -> None:
    """Evaluate what has no result yet, and print the table."""
    from selftask.logs.checkpoint_results import CheckpointResults, format_table
    from selftask.report.overview.run_line import read_line

    results = CheckpointResults(request.run, request.settings)
    while True:
        goes_on = follow and read_line(request.run).state in ("running", "requeued")
        paths = request.chosen()
        for path in paths:
            missing = results.missing(step_of(path), request.evaluations)
            if missing:
                _evaluate_one(request, path, missing, results)
        if not goes_on:
            break
        time.sleep(_POLL_S)
    table = results.table()
    if not table:
        there = ", ".join(str(step_of(p)) for p in checkpoints(request.run / "checkpoints"))
        raise UserError(
            f"checkpoints={request.checkpoints}: {request.run} has no such checkpoint; there are: "
            f"{there or 'none'}"
        )
    print(format_table(table))


def _evaluate_one(
    request: Request, path: Path, evaluations: list[str], results: CheckpointResults
) -> None:
    """Evaluate one checkpoint and keep its metrics."""
    from selftask.cli.model.checkpoint_model import open_checkpoint
    from selftask.evaluate.offline import evaluate_backbone

    announce(f"step {step_of(path)}: {', '.join(evaluations)}")
    try:
        frozen = open_checkpoint(path, request.overrides(evaluations))
    except (OSError, UserError):
        if path.exists():
            raise
        announce(f"step {step_of(path)}: the run has removed this checkpoint meanwhile")
        return
    chosen = {name: frozen.config.eval.evaluations[name] for name in evaluations}
    config = replace(frozen.config, eval=replace(frozen.config.eval, evaluations=chosen))
    row = evaluate_backbone(
        frozen.backbone, config, frozen.sources, device=frozen.device, tell=announce
    )
    results.add(step_of(path), evaluations, row)
