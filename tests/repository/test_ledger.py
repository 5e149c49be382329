"""The ledger of proofs: what counts as proof, what a digest covers, what runs first."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import ledger
import prove
import tiny
from ledger import PROOFS, Entry, digest, files, own_digest, own_files, state, write
from prove import DIFFERENCE, Pair, Result, all_pairs, run_all, select
from selftask.registry import METHODS


def entry(method: str, proof: str, **changes: Any) -> Entry:
    """An entry that is proof of the code as it is, but for ``changes``."""
    now = {"digest": digest(method, proof), "own": own_digest(method)}
    rest = {"figures": {}, "seconds": 1.0, "date": "2026-01-01", "machine": "this"}
    return Entry(**{**now, **rest, **changes})


def test_only_an_entry_of_this_code_is_proof(tmp_path: Path) -> None:
    assert state("moco", "kills", tmp_path) == "never proved"
    write("moco", "kills", entry("moco", "kills"), tmp_path)
    assert state("moco", "kills", tmp_path) == "proved"
    assert state("moco", "gate", tmp_path) == "never proved", "a proof of another kind"
    write("moco", "kills", entry("moco", "kills", digest="0" * 16), tmp_path)
    assert state("moco", "kills", tmp_path) == "engine changed"
    write("moco", "kills", entry("moco", "kills", digest="0" * 16, own="0" * 16), tmp_path)
    assert state("moco", "kills", tmp_path) == "method changed"
    write("moco", "kills", entry("byol", "kills"), tmp_path)
    assert state("moco", "kills", tmp_path) == "method changed", "a proof of another method"
    write("moco", "kills", None, tmp_path)
    assert state("moco", "kills", tmp_path) == "never proved"


def test_a_digest_covers_the_method_its_recipe_and_the_engine() -> None:
    own = {str(path.relative_to(tiny.ROOT)) for path in own_files("moco")}
    package = "ssl/selftask"
    assert {f"{package}/methods/moco.py", "configs/moco/digits.yaml"} <= own
    assert f"{package}/models/heads.py" in own
    named = {"models/backbones/small_resnet", "data/transforms/geometry", "optim/optimizers/adamw"}
    assert {f"{package}/{name}.py" for name in named} <= own
    other = {"methods/byol", "methods/clip", "task/task", "methods/base", "distributed/collectives"}
    assert not {f"{package}/{name}.py" for name in other} & own
    assert tiny.ROOT / package / "methods/dino.py" in own_files("distill_features"), (
        "its gate's teacher"
    )
    every = {str(path.relative_to(tiny.ROOT)) for path in files("moco", "kills")}
    assert own < every
    assert {f"{package}/task/task.py", "tests/run/test_kill_matrix.py"} <= every
    assert {f"{package}/distributed/collectives.py", "configs/base/digits.yaml"} <= every
    assert {f"{package}/checkpoint/writer.py", f"{package}/train_steps/standard.py"} <= every
    assert f"{package}/methods/byol.py" not in every
    assert any(name.endswith(".c") for name in every), "the compiled kernel"


def test_a_change_of_code_changes_the_digest(tmp_path: Path, monkeypatch: Any) -> None:
    path = tmp_path / "some.py"
    monkeypatch.setattr(ledger, "ROOT", tmp_path)
    digests = []
    for text in (
        '"""One."""\nx = 1  # one\n',
        '"""Another\n\ndocstring."""\n\n\nx = 1\n',
        'x = 1\n\n\n"""Of an attribute."""\n',
        "x = 2\n",
        'x = "# 1"\n',
        'x = "# 2"\n',
    ):
        path.write_text(text)
        ledger._hash_of.cache_clear()
        digests.append(ledger._digest([path]))
    assert digests[0] == digests[1] == digests[2]
    assert len(set(digests[2:])) == 4


def test_every_entry_is_of_a_method() -> None:
    assert {path.stem for path in ledger.LEDGER.glob("*.json")} <= {*METHODS.names()}


def test_every_method_has_every_proof() -> None:
    pairs = list(all_pairs(METHODS.names(), PROOFS))
    for method in METHODS.names():
        assert {pair.proof for pair in pairs if pair.method == method} >= {*PROOFS} - {"gate"}
    for proof in PROOFS.values():
        if proof.test is not None:
            text = (tiny.ROOT / proof.files[0]).read_text(encoding="utf-8")
            marked = r'@pytest\.mark\.proof\n(@.*\n)*@.*"method", METHODS\.names\(\)\)\ndef '
            marked += rf"{proof.test}\("
            assert re.search(marked, text), proof.name
        assert all((tiny.ROOT / name).exists() for name in proof.files)


def test_changed_methods_come_first_then_the_engine_then_picks(monkeypatch: Any) -> None:
    states = {f"m{number}": "proved" for number in range(9)}
    states |= {"old": "method changed", "new": "never proved", "e1": "engine changed"}
    states["e2"] = "engine changed"
    monkeypatch.setattr(ledger, "state", lambda method, proof: states[method])
    monkeypatch.setattr(ledger, "own_files", lambda method: [method])
    monkeypatch.setattr(prove, "newest_change", lambda names: {"old": 1.0, "new": 2.0}[names[0]])
    pairs = [Pair(method, "kills") for method in states]
    orders = [[pair.method for pair in select(pairs, seed)] for seed in "abcdefgh"]
    for order in orders:
        assert order[:2] == ["new", "old"] and {*order[2:4]} == {"e1", "e2"}
        assert len(order) == 4 + prove.PICKS
    assert len({tuple(order) for order in orders}) > 4, "another commit, other picks"
    assert orders[0] == [pair.method for pair in select(pairs, "a")]


def test_a_budget_is_kept_and_what_it_left_is_named(
    monkeypatch: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ledger, "LEDGER", tmp_path)
    monkeypatch.setattr(ledger, "read", lambda method: {"ranks": entry("moco", "ranks")})
    monkeypatch.setattr(ledger, "state", lambda *pair: "engine changed")
    monkeypatch.setattr(prove, "run", lambda pair: Result(pair, True, {"kept": 1}, 1.0, ""))
    monkeypatch.setattr(prove.time, "monotonic", lambda: 0.0)
    pairs = [Pair("moco", "ranks"), Pair("moco", "kills")]  # 1 s last time; never run, 120 s
    results = run_all(pairs, 100.0, 1, record=False)
    assert [result.pair for result in results] == pairs[:1]
    prove.print_summary(pairs, pairs, results)
    printed = capsys.readouterr().out
    assert "moco ranks: passed in 1 s kept=1" in printed
    assert "1 of 2 proofs hold for this code" in printed
    assert "left by the budget, NOT proved: moco kills" in printed
    assert list(tmp_path.iterdir()) == [], "a budget writes nothing"


def test_the_difference_of_a_check_is_read_from_its_table() -> None:
    table = (
        "  quantity   ranks      difference            where it is largest\n"
        "  loss       2          4.1e-16     ok         step 1\n"
        "  network    2 > 1 > 2  0.0e+00     ok         \n"
    )
    assert DIFFERENCE.findall(table) == ["4.1e-16", "0.0e+00"]


def test_tests_that_a_budget_leaves_are_named() -> None:
    file = "tests/meters/test_pretext_meters.py"
    words = ["-m", "pytest", "-rs", "-n", "0", "--until", "0", "--shuffle", "seed", file]
    done = subprocess.run(
        [sys.executable, *words], cwd=tiny.ROOT, capture_output=True, text=True, check=False
    )
    left = re.findall(rf"left by the budget, NOT run: {file}::(\w+)", done.stdout)
    assert left == re.findall(r"^def (test_\w+)", (tiny.ROOT / file).read_text("utf-8"), re.M)
    assert "passed" not in done.stdout and done.returncode == 0, done.stdout
