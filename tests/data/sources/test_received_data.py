"""Reading data that others made runs none of their code; each payload would create a file."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import yaml

from received_runs import Payload
from selftask.cli.main import main


@pytest.mark.parametrize("command", ["check", "stats"])
def test_a_catalog_in_the_folder(
    command: str, pwned: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``cd received; selftask data check flowers``: the catalog there would name the code."""
    section = {"name": "custom", "dataset": "os:mkdir", "args": {"path": "pwned"}}
    Path("catalog.yaml").write_text(yaml.safe_dump({"flowers": section}))
    assert main(["data", command, "flowers"]) == 2
    assert not pwned.exists()
    assert "data.dataset: os:mkdir" in capsys.readouterr().err
    main(["data", command, "flowers", "trust=true"])
    assert pwned.exists()


def test_pickled_arrays(pwned: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pickled = np.empty(2, dtype=object)
    pickled[:] = [Payload(pwned), 1]
    np.save("images.npy", pickled, allow_pickle=True)
    np.savez("images.npz", images=pickled, labels=[0, 1])
    for name in ("images.npy", "images.npz"):
        assert main(["data", "check", name]) == 2
    assert not pwned.exists()
    np.load("images.npy", allow_pickle=True)
    assert pwned.exists()


def test_a_cache_that_torchvision_unpickles(
    pwned: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lmdb = pytest.importorskip("lmdb")
    lmdb.open("lsun").close()
    Path("_cache_lsun").write_bytes(pickle.dumps(Payload(pwned)))
    source = "{name: torchvision, dataset: LSUNClass, root: lsun}"
    assert main(["data", "check", source]) == 2
    assert "unpickles" in capsys.readouterr().err
    assert not pwned.exists()
    import torchvision

    torchvision.datasets.LSUNClass("lsun")
    assert pwned.exists()
