"""Run the expensive proofs of methods, and keep the figures in ``proofs/METHOD.json``.

    python tools/prove.py [METHOD ...] [--proof NAME ...]    run all of them and write the ledger
    python tools/prove.py --budget MINUTES [--slow-tests]    run what is not proved, write nothing
    python tools/prove.py --list                             list what is proved

Within a budget, methods that changed come first, the latest changes before others. Then come proofs
that are invalid because of changes of the engine, in an order drawn from the commit's hash, and a
few valid ones. ``--slow-tests`` first runs the slow tests that do not concern single methods: those
on the SLURM cluster, then the others, file by file in an order drawn from the commit's hash, until
three quarters of the budget are used. Tests and proofs that did not fit are printed.

The proofs of a method, and what they show, are in tools/ledger.py. The exit code is 1 if one fails.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import gates
import ledger
from import_graph import ROOT
from selftask.registry import METHODS

LIMIT_S = 1800  # per proof, on a busy machine
USUAL_S = 120.0  # assumed for a proof that was never run
PICKS = 3  # number of valid proofs that are run again
SLOW_TESTS = 0.75  # share of the budget for slow tests
DIFFERENCE = re.compile(r"^  \w+ +[\d >]+  +(\d\.\de[+-]\d+)", re.MULTILINE)


class Pair(NamedTuple):
    """One proof of one method."""

    method: str
    proof: str


@dataclass(frozen=True)
class Result:
    """Result of a proof."""

    pair: Pair
    passed: bool
    figures: dict[str, Any]
    seconds: float
    output: str


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("methods", nargs="*", metavar="METHOD")
    parser.add_argument("--proof", action="append", choices=[*ledger.PROOFS], help="only this kind")
    parser.add_argument("--budget", type=float, metavar="MINUTES")
    parser.add_argument("--slow-tests", action="store_true")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--parallel", type=int, default=max(1, os.cpu_count() or 1))
    options = parser.parse_args()
    budget = float("inf") if options.budget is None else options.budget
    end = time.monotonic() + 60 * budget
    pairs = list(all_pairs(options.methods or METHODS.names(), options.proof or ledger.PROOFS))
    if options.list:
        print("\n".join(f"{p.method:<20}{p.proof:<12}{ledger.state(*p)}" for p in pairs))
        return 0
    passed = not options.slow_tests or run_slow_tests(budget)
    chosen = pairs if options.budget is None else select(pairs, commit())
    results = run_all(chosen, end, options.parallel, record=options.budget is None)
    print_summary(pairs, chosen, results)
    return 0 if passed and all(result.passed for result in results) else 1


# -- which ---------------------------------------------------------------------------------------


def all_pairs(methods: Iterable[str], proofs: Iterable[str]) -> Iterable[Pair]:
    """Yield every proof of every method; a gate only if the recipe defines one."""
    for method in methods:
        for proof in proofs:
            if proof != "gate" or gates.has_gate(method):
                yield Pair(method, proof)


def select(pairs: list[Pair], seed: str) -> list[Pair]:
    """Return the pairs to run within a budget, the most urgent first."""
    states = {pair: ledger.state(*pair) for pair in pairs}
    changed = [p for p in pairs if states[p] in ("never proved", "method changed")]
    ages = {
        method: newest_change(ledger.own_files(method)) for method in {p.method for p in changed}
    }

    def drawn(pair: Pair) -> str:
        return hashlib.sha256(f"{seed} {pair.method} {pair.proof}".encode()).hexdigest()

    changed.sort(key=lambda pair: (-ages[pair.method], drawn(pair)))
    engine = sorted((p for p in pairs if states[p] == "engine changed"), key=drawn)
    proved = sorted((p for p in pairs if states[p] == "proved"), key=drawn)
    return [*changed, *engine, *proved[:PICKS]]


def newest_change(paths: Iterable[Path]) -> float:
    """Return the time, in seconds since 1970, of the last change of any of these files."""
    names = sorted(str(path) for path in paths)
    changed = git("diff", "--name-only", "HEAD", "--", *names).split()
    edited = [(ROOT / name).stat().st_mtime for name in changed if (ROOT / name).exists()]
    committed = git("log", "-1", "--format=%ct", "--", *names).strip()
    return max([float(committed or 0), *edited])


def commit() -> str:
    """Return the hash of the checked out commit."""
    return git("rev-parse", "HEAD").strip()


def git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout  # empty without a checkout: then any order is fine


# -- running -------------------------------------------------------------------------------------


def run_all(pairs: list[Pair], end: float, parallel: int, *, record: bool) -> list[Result]:
    """Run proofs until ``end``; skip those that would not finish, judged by their last duration."""

    def run_one(pair: Pair) -> Result | None:
        known = ledger.read(pair.method).get(pair.proof)
        if time.monotonic() + (known.seconds if known else USUAL_S) > end:
            return None
        result = run(pair)
        words = " ".join(f"{name}={value}" for name, value in result.figures.items())
        verdict = "passed" if result.passed else "FAILED"
        print(
            f"{pair.method} {pair.proof}: {verdict} in {result.seconds:.0f} s {words}", flush=True
        )
        if not result.passed:
            print(result.output[-3000:], flush=True)
        return result

    results: list[Result] = []
    with ThreadPoolExecutor(parallel) as pool:
        for result in pool.map(run_one, pairs):
            if result is not None:
                results.append(result)
                if record:
                    ledger.write(*result.pair, entry_of(result))
    return results


def run(pair: Pair) -> Result:
    """Run one proof in separate processes."""
    start = time.monotonic()
    try:
        passed, figures, output = _gate(pair) if pair.proof == "gate" else _command(pair)
    except (gates.Failed, subprocess.TimeoutExpired) as error:
        passed, figures, output = False, {}, str(error)
    return Result(pair, passed, figures, time.monotonic() - start, output)


def _gate(pair: Pair) -> tuple[bool, dict[str, Any], str]:
    gate = gates.run_in_scratch(pair.method)
    figures = {"metric": gate.metric, "untrained": gate.untrained, "trained": gate.trained}
    return gate.passed, {**figures, "margin": gate.margin}, ""


def _command(pair: Pair) -> tuple[bool, dict[str, Any], str]:
    proof = ledger.PROOFS[pair.proof]
    words = ["selftask", "check", pair.method, "--ranks", "1,2,4"]
    if proof.test is not None:
        words = [
            "pytest",
            "-n",
            "0",
            "-m",
            "proof",
            f"{proof.files[0]}::{proof.test}[{pair.method}]",
        ]
    output, code = _run(["-m", *words], LIMIT_S)
    if proof.test is not None:  # pytest returns 5 if there is no such test
        return code == 0, {}, output
    differences = [float(text) for text in DIFFERENCE.findall(output)]
    figures = {"largest_difference": max(differences)} if differences else {}
    return code == 0 and bool(differences), figures, output


def run_slow_tests(minutes: float) -> bool:
    """Run the slow tests that do not concern single methods; those on the SLURM cluster alone.

    Args:
        minutes: The budget, of which they may use ``SLOW_TESTS``. All of it is the limit for a test
            that hangs.
    """
    start = time.monotonic()
    limit = None if minutes == float("inf") else 60 * minutes
    words = ["-m", "pytest", "-rsR", "--shuffle", commit()]
    if limit is not None:
        words += ["--until", str(time.time() + SLOW_TESTS * limit)]
    passed = True
    for chosen, workers in (("slurm", "0"), ("not slurm", "2")):
        left = None if limit is None else limit - (time.monotonic() - start)
        chosen_words = [*words, "-m", f"slow and not proof and {chosen}", "-n", workers]
        try:
            done = subprocess.run(
                [sys.executable, *chosen_words], cwd=ROOT, check=False, timeout=left
            )
        except subprocess.TimeoutExpired:
            print("slow tests: FAILED: they did not end within the budget", flush=True)
            return False
        passed = passed and done.returncode == 0
    print(f"slow tests: {time.monotonic() - start:.0f} s", flush=True)
    return passed


def _run(words: list[str], limit_s: float) -> tuple[str, int]:
    done = subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=limit_s,
        check=False,
    )
    return done.stdout, done.returncode


def entry_of(result: Result) -> ledger.Entry | None:
    """Return the entry of a result, or None for a failure."""
    if not result.passed:
        return None
    import torch

    python, torch_version = platform.python_version(), torch.__version__
    return ledger.Entry(
        digest=ledger.digest(*result.pair),
        own=ledger.own_digest(result.pair.method),
        figures=result.figures,
        seconds=round(result.seconds, 1),
        date=datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        machine=f"{platform.machine()}, {os.cpu_count()} cores, "
        f"Python {python}, torch {torch_version}",
    )


def print_summary(pairs: list[Pair], chosen: list[Pair], results: list[Result]) -> None:
    """Print what passed, failed and was not run."""
    tried = {result.pair: result for result in results}
    failed = [result for result in results if not result.passed]
    left = [pair for pair in chosen if pair not in tried and ledger.state(*pair) != "proved"]
    proved = sum(
        tried[pair].passed if pair in tried else ledger.state(*pair) == "proved" for pair in pairs
    )
    seconds = sum(result.seconds for result in results)
    print(f"{len(results)} proofs run ({seconds:.0f} s of work), {len(failed)} failed")
    print(f"{proved} of {len(pairs)} proofs hold for this code")
    if left:
        print("left by the budget, NOT proved: " + ", ".join(" ".join(pair) for pair in left))


if __name__ == "__main__":
    sys.exit(main())
