"""What a checkpoint lacks, or has of another version or with a flipped bit: one line each."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
from selftask.checkpoint import manifest, rotation, store
from selftask.cli.main import main


def words(folder: Path, *more: str) -> list[str]:
    return ["train", "simclr/digits", *tiny.overrides("simclr", folder), *more]


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that stopped at step 2 of 15; no test goes on with it."""
    folder = tmp_path_factory.mktemp("stopped")
    assert main(words(folder, "train.stop_at=2")) == 75
    return folder


@pytest.fixture
def checkpoint(stopped: Path) -> Iterator[Path]:
    """The newest checkpoint of the run, as it was again after the test."""
    (path,) = rotation.checkpoints(stopped / "run/checkpoints")
    files = {file: file.read_bytes() for file in (path, path.with_suffix(".json"))}
    yield path
    for file, content in files.items():
        file.write_bytes(content)


def rewrite(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a checkpoint, and write a seal that fits."""
    state = torch.load(path, weights_only=True)
    change(state)
    torch.save(state, path)
    seal = {"step": 2, "bytes": path.stat().st_size, manifest.CHECKSUM: manifest.checksum(path)}
    path.with_suffix(".json").write_text(json.dumps(seal))


@pytest.mark.parametrize("entry", ["metrics_bytes", "optimizer", "clock", "rng", "scaler", "hooks"])
@pytest.mark.parametrize("value", ["missing", None])
def test_missing_entries_are_one_line(
    entry: str,
    value: str | None,
    stopped: Path,
    checkpoint: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def change(state: dict[str, Any]) -> None:
        if value is None:
            state[entry] = None
        else:
            del state[entry]

    rewrite(checkpoint, change)
    capsys.readouterr()
    assert main(words(stopped)) == 2
    printed = capsys.readouterr()
    assert "Traceback" not in printed.out + printed.err
    assert f"'{entry}'" in printed.out
    assert main(words(stopped, f"out={tmp_path / 'new'}", f"resume={checkpoint}")) == 2
    printed = capsys.readouterr()
    assert "Traceback" not in printed.out + printed.err
    assert "RUN FAILED at step 0" in printed.out
    inside = {"optimizer": {"optim": None}, "clock": {}, "hooks": {"metrics": None}}
    if value is None and entry in inside:
        rewrite(checkpoint, lambda state: state.update({entry: inside[entry]}))
        assert main(words(stopped)) == 2
        assert "Traceback" not in capsys.readouterr().out


def test_the_format_of_a_newer_version_is_named(
    stopped: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rewrite(checkpoint, lambda state: state.update(format=2))
    assert main(words(stopped)) == 2
    assert "is of format 2, made by a newer selftask" in capsys.readouterr().out
    assert main(["export", str(stopped / "run")]) == 2
    assert "is of format 2" in capsys.readouterr().err
    rewrite(checkpoint, lambda state: state.pop("clock"))
    assert main(["export", str(stopped / "run")]) == 2
    rewrite(checkpoint, lambda state: state.update(clock={"steps_done": 2}, format=1, model=None))
    assert main(["export", str(stopped / "run")]) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_a_flipped_bit_shows_without_the_seal(tmp_path: Path) -> None:
    state = {"weight": torch.arange(1000.0), "n": 1}
    path = store.save(state, tmp_path, 1, keep=1)
    path.with_suffix(".json").unlink()
    assert store.load(path)["n"] == 1
    content = bytearray(path.read_bytes())
    content[content.index(torch.tensor(500.0).numpy().tobytes())] ^= 1
    path.write_bytes(content)
    assert torch.load(path, weights_only=True)["n"] == 1  # torch does not look
    with pytest.raises(manifest.DamagedCheckpoint, match="checksum of"):
        store.load(path)
