"""What all tests share: a world that the tests before have left as it was."""

from __future__ import annotations

import faulthandler
import gc
import hashlib
import os
import random
import sys
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import selftask
from received_runs import asked, pwned, received  # noqa: F401 - fixtures
from selftask.registry import REGISTRIES

PACKAGE = Path(selftask.__file__).resolve().parent
TESTS = Path(__file__).resolve().parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--until", type=float, help="seconds since 1970; no test starts after it")
    parser.addoption("--shuffle", metavar="SEED", help="run the files in an order drawn from SEED")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if (seed := config.getoption("--shuffle")) is not None:
        files = {item: item.nodeid.partition("::")[0] for item in items}  # below the root
        items.sort(key=lambda item: hashlib.sha256(f"{seed} {files[item]}".encode()).digest())


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Garbage is looked for neither while tests are imported nor, later, among what they import."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)  # before the fixtures
def pytest_runtest_setup(item: pytest.Item) -> None:
    until = item.config.getoption("--until")
    if until is not None and time.time() > until:
        pytest.skip(f"left by the budget, NOT run: {item.nodeid}")


def pytest_unconfigure(config: pytest.Config) -> None:
    """If python then does not end, what it waits for is printed, and the tests have failed."""
    if not hasattr(config, "workerinput"):  # one of several workers waits for the tests of others
        faulthandler.dump_traceback_later(120, exit=True)


@pytest.fixture(autouse=True, scope="session")
def _files_need_not_outlive_the_machine() -> Iterator[None]:
    """A small run waits for the disk eight times, each as long as for a step of training."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda file: None)
        yield


@pytest.fixture(autouse=True)
def _one_thread_and_seeded() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)


@pytest.fixture(autouse=True)
def _names_registered_inside_a_test_are_forgotten() -> Iterator[None]:
    before = {kind: set(registry._addresses) for kind, registry in REGISTRIES.items()}
    yield
    for kind, registry in REGISTRIES.items():
        for name in set(registry._addresses) - before[kind]:
            if TESTS in registry._addresses[name].path.resolve().parents:
                del registry._addresses[name], registry._registered[name]


@pytest.fixture
def forget_names(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What the test registers from elsewhere than the package is forgotten after it."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    modules = set(sys.modules)
    yield
    for registry in REGISTRIES.values():
        for name, address in list(registry._addresses.items()):
            given_as_object = address.module == "selftask.api.objects"
            if given_as_object or PACKAGE not in address.path.resolve().parents:
                del registry._addresses[name], registry._registered[name]
    for name in set(sys.modules) - modules:
        if "/pytest-" in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Put programs of SLURM's names first on the PATH, made of shell lines."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")

    def make(name: str, lines: str) -> None:
        (folder / name).write_text(f"#!/bin/sh\n{lines}\n")
        (folder / name).chmod(0o755)

    return make
