"""Reading weights that others made runs none of their code; each payload would create a file."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tiny
from received_runs import IN_CONFIG, Payload, words_of
from selftask.cli.main import main
from selftask.models.weights.foreign_pickle import read_tensors


def test_the_facts_beside_exported_weights(
    pwned: Path, received: Callable[[dict[str, Any]], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    export = received({}) / "export"
    meta = json.loads((export / "backbone.json").read_text())
    meta["architecture"] = {
        "name": "custom",
        "args": {"model": "os:mkdir", "args": {"path": "pwned"}},
    }
    (export / "backbone.json").write_text(json.dumps(meta))
    words = ["eval", "knn", str(export / "backbone.pt"), f"data={pwned.parent / 'digits.npz'}"]
    assert main(words) == 2
    assert not pwned.exists()
    error = capsys.readouterr().err
    assert "backbone.json: names code of its own" in error
    assert "architecture.model: os:mkdir" in error
    main([*words, "trust=true"])
    assert pwned.exists()


def test_the_transforms_beside_exported_weights(
    pwned: Path, received: Callable[[dict[str, Any]], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """``selftask.load`` makes them when it opens a model."""
    export = received({}) / "export"
    meta = json.loads((export / "backbone.json").read_text())
    made = {"name": "custom", "transform": "os:mkdir", "args": {"path": "pwned"}}
    (export / "backbone.json").write_text(json.dumps({**meta, "transforms": [made]}))
    words = ["eval", "knn", str(export / "backbone.pt"), f"data={pwned.parent / 'digits.npz'}"]
    assert main(words) == 2
    assert "transforms.0.transform: os:mkdir" in capsys.readouterr().err
    assert not pwned.exists()


@pytest.mark.parametrize("args", [{"checkpoint_path": "weights.pt"}, {"pretrained": True}])
def test_the_library_opens_no_file_of_weights(
    args: dict[str, Any],
    pwned: Path,
    received: Callable[[dict[str, Any]], Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    torch.save({"state_dict": Payload(pwned)}, "weights.pt")
    timm = {"name": "timm", "model": "resnet18", "args": args}
    assert main(words_of("export", received({"backbone": timm}))) == 2
    assert "init.backbone" in capsys.readouterr().err
    assert not pwned.exists()


@pytest.mark.parametrize("words", ["eval", "init.backbone"])
def test_pickled_weights(words: str, pwned: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"state_dict": {"conv1.weight": torch.zeros(1)}, "more": Payload(pwned)}, "w.pt")
    if words == "eval":
        argv = ["eval", "knn", "torchvision:resnet18", "weights=w.pt", "data=digits.npz"]
    else:
        argv = ["train", "simclr/digits", *tiny.overrides("simclr", pwned.parent)]
        argv.append("init.backbone=w.pt")
    assert main(argv) == 2
    assert not pwned.exists()
    printed = capsys.readouterr()
    assert "python objects (posix.mkdir)" in printed.out + printed.err
    torch.load("w.pt", weights_only=False)
    assert pwned.exists()


def test_pickled_arrays_hold_numbers_only(pwned: Path) -> None:
    """A forged dtype would make numpy take the bytes of a file for addresses of objects."""
    array = np.arange(6, dtype=">f4").reshape(2, 3, order="F")
    tensors = {"a": array, "b": np.array([True, False]), "c": np.int64(3), "more": Payload(pwned)}
    Path("w.pkl").write_bytes(pickle.dumps(tensors))
    content, skipped = read_tensors(Path("w.pkl"))
    assert np.array_equal(content["a"], array)
    assert content["b"].tolist() == [True, False]
    assert "posix.mkdir" in skipped
    assert not pwned.exists()

    class Forged:
        def __reduce__(self) -> Any:
            rebuild, args, (version, shape, _, order, _) = np.zeros(1, object).__reduce__()
            return rebuild, args, (version, shape, ForgedDtype(), order, b"A" * 8)

    class ForgedDtype:
        def __reduce__(self) -> Any:
            return np.dtype, ("O8", False, True), (3, "|", None, None, None, -1, -1, 0)

    Path("w.pkl").write_bytes(pickle.dumps({"a": Forged()}))
    left_out = read_tensors(Path("w.pkl"))[0]["a"]
    assert left_out.size == 0
    assert left_out.dtype == bool


def test_a_run_to_start_from(pwned: Path, received: Callable[[dict[str, Any]], Path]) -> None:
    """``init.backbone=RUN`` reads tensors alone, whatever config and facts say."""
    run = received(IN_CONFIG["import"] | IN_CONFIG["backbone"])
    meta = json.loads((run / "export/backbone.json").read_text())
    meta["architecture"] = {"name": "custom", "args": {"model": "evil:run"}}
    (run / "export/backbone.json").write_text(json.dumps(meta))
    words = tiny.overrides("simclr", pwned.parent, "run", "train.max_steps=1")
    assert main(["train", "simclr/digits", *words, f"init.backbone={run}"]) == 0
    assert not pwned.exists()
