"""What tests of ``selftask submit`` share."""

from __future__ import annotations

from pathlib import Path

import pytest
from submit_words import SMALL

import tiny


@pytest.fixture
def no_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without sbatch, srun and the rest."""
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.setenv("PATH", str(empty))


@pytest.fixture(scope="session")
def small_words(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Fills in what ``submit_words.words`` gives."""
    SMALL[:] = tiny.overrides("simclr", tmp_path_factory.mktemp("data"))[:-1]
