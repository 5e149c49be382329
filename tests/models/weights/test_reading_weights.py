"""Files of weights are read from where they lie, and nothing in them is called."""

from __future__ import annotations

from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from written_files import resnet, write

from selftask.errors import UserError
from selftask.models.weights.model_source import read_weights
from selftask.models.weights.read import read_state


def test_weights_from_a_web_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("aiohttp")
    monkeypatch.setenv("SELFTASK_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    state = resnet().state_dict()
    torch.save(state, "w.pth")
    with ThreadingHTTPServer(("127.0.0.1", 0), SimpleHTTPRequestHandler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        actual = read_weights(f"http://127.0.0.1:{server.server_port}/w.pth")
        server.shutdown()
    assert actual.keys() == state.keys()
    assert all(torch.equal(actual[key], state[key]) for key in state)


class _Evil:
    """Creates a file when it is unpickled by ``pickle`` itself."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return exec, (f"open({str(self.path)!r}, 'w')",)


@pytest.mark.parametrize("suffix", [".pth", ".torch", ".pkl"])
def test_nothing_in_a_file_is_called(suffix: str, tmp_path: Path) -> None:
    mark = tmp_path / "called"
    state = {"conv1.weight": np.ones((2, 2))} if suffix == ".pkl" else dict(resnet().state_dict())
    write(
        {"state_dict": state, "evil": _Evil(mark), "list": [_Evil(mark)]}, tmp_path / f"w{suffix}"
    )
    read = read_state(tmp_path / f"w{suffix}")
    assert "state_dict.conv1.weight" in read
    assert not mark.exists()


def test_a_pickled_model_is_no_file_of_weights(tmp_path: Path) -> None:
    torch.save(nn.Linear(2, 2), tmp_path / "w.pth")
    with pytest.raises(UserError, match=r"torch\.nn\.modules\.linear\.Linear.*not loaded"):
        read_state(tmp_path / "w.pth")
