"""The ledger of proofs: proofs of each method, with the version of the code and the figures.

``proofs/METHOD.json`` contains the newest entry of each proof. An entry is valid only while its
digest equals that of the files on which it depends. These are the recipe and code of the method, of
everything that its recipe names and of their imports (``own``), and the code of the proof and the
engine. The engine includes what every method imports. Comments and docstrings do not count.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import gates
from import_graph import PACKAGE, ROOT, Graph
from selftask.config.load import load_config
from selftask.registry import METHODS, REGISTRIES, Registry
from weight import code

LEDGER = ROOT / "proofs"
State = Literal["proved", "engine changed", "method changed", "never proved"]


@dataclass(frozen=True)
class Proof:
    """A kind of proof: what it shows, its command, and the modules of its engine."""

    name: str
    shows: str
    """Half a sentence for the page of a method."""
    roots: tuple[str, ...]
    """Modules of the engine; modules that they import belong to it, too."""
    files: tuple[str, ...]
    """The proof's own files, relative to the root of the repository."""
    test: str | None = None
    """The test in ``files[0]`` with a parameter ``method``; None for a tool."""


TRAIN = ("selftask.cli.train",)
PROOFS = {
    proof.name: proof
    for proof in (
        Proof("gate", "the digits recipe learns as its header says", TRAIN, ("tools/gates.py",)),
        Proof("ranks", "2 and 4 ranks give the result of one", ("selftask.cli.check",), ()),
        Proof(
            "kills",
            "ten SIGKILLs do not change the result",
            TRAIN,
            ("tests/run/test_kill_matrix.py", "tests/tiny.py"),
            "test_five_kills_leave_no_trace",
        ),
        Proof(
            "reductions",
            "two ranks give the result of one with every gradient reduction",
            ("selftask.task",),
            ("tests/parallel/test_matrix.py", "tests/tiny.py", "tests/ranks.py"),
            "test_two_ranks_are_one_under_every_reduction",
        ),
        Proof(
            "devices",
            "steps on a simulated GPU do not wait for it, race or launch too many kernels",
            ("selftask.task",),
            (
                "tests/task/test_imagined_device.py",
                *("tests/imagined_device.py", "tests/imagined_streams.py"),
                *("tests/imagined_autocast.py", "tests/tiny.py"),
            ),
            "test_a_method_on_the_device",
        ),
        Proof(
            "compiled",
            "the compiled step is one graph and computes the same",
            ("selftask.task",),
            ("tests/task/test_train_steps.py", "tests/tiny.py"),
            "test_every_method_is_traced_whole",
        ),
    )
}


@dataclass(frozen=True)
class Entry:
    """A passed proof."""

    digest: str
    """Digest of all files on which the proof depends."""
    own: str
    """Digest of the files of the method alone."""
    figures: dict[str, Any]
    seconds: float
    date: str
    machine: str


def read(method: str, folder: Path = LEDGER) -> dict[str, Entry]:
    """Return the entries of a method by name of the proof."""
    path = folder / f"{method}.json"
    if not path.exists():
        return {}
    return {name: Entry(**entry) for name, entry in json.loads(path.read_text("utf-8")).items()}


def write(method: str, proof: str, entry: Entry | None, folder: Path = LEDGER) -> None:
    """Set an entry; None removes it, after a failure."""
    entries = {name: asdict(old) for name, old in read(method, folder).items() if name != proof}
    if entry is not None:
        entries[proof] = asdict(entry)
    folder.mkdir(exist_ok=True)
    text = json.dumps(dict(sorted(entries.items())), indent=1, sort_keys=True)
    (folder / f"{method}.json").write_text(text + "\n", encoding="utf-8")


def state(method: str, proof: str, folder: Path = LEDGER) -> State:
    """Return whether an entry proves the current code, and if not, the reason."""
    entry = read(method, folder).get(proof)
    if entry is None:
        return "never proved"
    if entry.digest == digest(method, proof):
        return "proved"
    return "engine changed" if entry.own == own_digest(method) else "method changed"


# -- what a proof depends on ---------------------------------------------------------------------


@cache
def graph() -> Graph:
    return Graph()


OWN = ("methods", "backbones", "sources", "samplers", "transforms", "optimizers", "schedules")
EVERY_METHOD = ("selftask.methods.base",)
"""What every method imports."""


@cache
def own_files(method: str) -> frozenset[Path]:
    """Return the digits recipe, the files of the method and of what the recipe names, and imports.

    Files that every method imports are left out. The files of the teacher's run are included if its
    gate has one.
    """
    recipe = ROOT / "configs" / method / "digits.yaml"
    taught_by = gates.TEACHER.search(recipe.read_text(encoding="utf-8"))
    teacher = own_files(taught_by[1].partition("/")[0]) if taught_by else frozenset()
    own = _with_imports(method, [REGISTRIES[kind] for kind in OWN])
    return (own - _imported(EVERY_METHOD)).union([recipe], teacher)


@cache
def files(method: str, proof: str) -> frozenset[Path]:
    """Return all files on which a proof depends, with hooks, evaluations and train step."""
    engine = _imported((*EVERY_METHOD, *PROOFS[proof].roots))
    kernel = [*PACKAGE.rglob("*.c"), *PACKAGE.rglob("*.h")]
    tests = [ROOT / name for name in PROOFS[proof].files]
    recipes = (ROOT / "configs/base").glob("*.yaml")
    named = _with_imports(method, REGISTRIES.values())
    return own_files(method).union(named, engine, kernel, tests, recipes)


def _with_imports(method: str, registries: Iterable[Registry]) -> frozenset[Path]:
    """Return the files of the method and of all names in its recipe, and of their imports."""
    words = {method, *_strings(load_config(f"{method}/digits", []).to_dict())}
    words -= {*METHODS.names()} - {method}  # keys such as `train.seed` and `optimizer.clip`
    named = {r.address(word).path for r in registries for word in words if word in r}
    return _imported(graph().module_of(path) for path in named)


def _imported(modules: Iterable[str]) -> frozenset[Path]:
    """Return the files of modules and of all that they import."""
    return frozenset(graph().files[module] for module in graph().closure(modules))


def digest(method: str, proof: str) -> str:
    """Return the digest of the files on which a proof depends."""
    return _digest(files(method, proof))


def own_digest(method: str) -> str:
    """Return the digest of the files of the method alone."""
    return _digest(own_files(method))


def _digest(paths: Iterable[Path]) -> str:
    whole = hashlib.sha256()
    for path in sorted(paths):
        whole.update(f"{path.relative_to(ROOT).as_posix()} {_hash_of(path)}\n".encode())
    return whole.hexdigest()[:16]


@cache
def _hash_of(path: Path) -> str:
    text = path.read_text(encoding="utf-8")
    return hashlib.sha256((code(text) if path.suffix == ".py" else text).encode()).hexdigest()


def _strings(value: Any) -> Iterator[str]:
    """Yield every string in a config, including keys, some of which are registered names."""
    if isinstance(value, dict):
        yield from (key for key in value if isinstance(key, str))
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from _strings(item)
    elif isinstance(value, str):
        yield value
