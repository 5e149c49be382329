"""Arguments of ``selftask eval suite``: a run, its checkpoints, evaluations and settings."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from selftask.checkpoint.kept import named_checkpoint
from selftask.checkpoint.rotation import checkpoints, step_of
from selftask.cli.model.evaluate_words import check_words
from selftask.cli.model.load_model import without_old_val
from selftask.cli.options import take
from selftask.config.compose.overrides import import_plugins
from selftask.config.schema import Config
from selftask.config.trust import take_trust
from selftask.errors import UserError, check_known
from selftask.files.paths import exists, expand_user
from selftask.registry import EVALUATIONS

_ON_ANY_MACHINE = ("train.device", "train.threads", "data.num_workers", "launch", "trust")


@dataclass(frozen=True)
class Request:
    """Requested evaluations of the checkpoints of a run."""

    run: Path
    evaluations: list[str]
    words: list[str]  # key=value words for the config and the choice of weights
    checkpoints: str  # all, last, best, or a pattern of steps
    every: int  # only checkpoints at multiples of this step; does not apply to best

    def chosen(self) -> list[Path]:
        """Return the selected checkpoints that exist now, oldest first.

        Raises:
            UserError: If the best checkpoint is selected and there is none.
        """
        if self.checkpoints == "best":
            best = named_checkpoint(f"{self.run}@best")
            return [] if best is None else [best]
        paths = sorted(checkpoints(self.run / "checkpoints"), key=step_of)
        paths = [path for path in paths if step_of(path) % self.every == 0]
        if self.checkpoints == "last":
            return paths[-1:]
        pattern = "*" if self.checkpoints == "all" else self.checkpoints
        return [path for path in paths if fnmatch(str(step_of(path)), pattern)]

    def overrides(self, evaluations: list[str]) -> list[str]:
        """Return config overrides that select these evaluations and set their options.

        ``knn.k=10`` becomes ``eval.evaluations.knn.k=10``; other words are kept. If they name other
        images, the run's validation sets are dropped.
        """
        asked = ", ".join(f"{name}: {{}}" for name in evaluations)
        of_evaluations = [word for word in self.words if word.partition(".")[0] in self.evaluations]
        rest = [word for word in self.words if word not in of_evaluations]
        named = [f"eval.evaluations={{{asked}}}"]
        return [
            *named,
            *without_old_val(rest),
            *(f"eval.evaluations.{word}" for word in of_evaluations),
        ]

    @property
    def settings(self) -> list[str]:
        """The words that affect the results, sorted."""
        return sorted(w for w in self.words if not _key(w).startswith(_ON_ANY_MACHINE))


def read_request(words: list[str]) -> tuple[Request, Config]:
    """Return the request, and the config of the run with the overrides of the request.

    Args:
        words: The run, followed by names of evaluations and ``key=value`` words.

    Raises:
        UserError: If a word is invalid or the run does not exist.
    """
    run = expand_user(words[0])
    if not exists(run / "config.yaml"):
        raise UserError(f"{run}: there is no such run")
    names = [word for word in words[1:] if "=" not in word]
    import_plugins(words)
    for name in names:
        check_known(name, EVALUATIONS, f"no evaluation named {name!r}")
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
    check_words(
        "eval suite",
        request.words,
        ("checkpoints", "every"),
        sections=[*request.evaluations, "launch"],
    )
    overrides, _ = take_trust(take("weights", request.overrides(request.evaluations))[1])
    return request, load_config(str(run / "config.yaml"), overrides, trust=trust)


def _key(word: str) -> str:
    return word.partition("=")[0]
