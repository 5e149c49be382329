"""Weights from Caffe2 and Classy Vision, and out to other frameworks and back."""

from __future__ import annotations

import pickle
import re
import struct
import subprocess
import sys
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from classy_vision.models import build_model
from torch import Tensor, nn

import tiny
from selftask.cli.model import export
from selftask.models.weights.load import load_weights
from selftask.models.weights.read import read_state

IMAGES = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))


def trained(model: nn.Module) -> nn.Module:
    """The model with statistics and scales as after a training."""
    for part in model.modules():
        if isinstance(part, nn.BatchNorm2d):
            nn.init.uniform_(part.running_mean, -0.1, 0.1)
            nn.init.uniform_(part.running_var, 0.5, 2.0)
            nn.init.uniform_(part.weight, 0.5, 1.5)
            nn.init.uniform_(part.bias, -0.1, 0.1)
    return model.eval()


def resnet(name: str = "resnet50") -> Any:
    model = torchvision.models.get_model(name)
    model.fc = nn.Identity()
    return trained(model)


BLOBS = {  # Caffe2's SpatialBN beside torch's BatchNorm
    "weight": "bn_s",
    "bias": "bn_b",
    "running_mean": "bn_rm",
    "running_var": "bn_riv",
}


def blob_name(name: str) -> str:
    """``layer1.0.conv2`` -> ``res2_0_branch2b``, as in Detectron's model zoo."""
    match = re.fullmatch(r"layer(\d)\.(\d+)\.(conv|bn|downsample\.)(\d)", name)
    if match is None:
        return {"conv1": "conv1", "bn1": "res_conv1"}[name]
    stage, block, kind, number = match.groups()
    branch = "branch1" if kind == "downsample." else f"branch2{'_abc'[int(number)]}"
    return f"res{int(stage) + 1}_{block}_{branch}"


def blobs_of(model: nn.Module) -> dict[str, np.ndarray]:
    """A ResNet's weights as the blobs of Caffe2, written module by module."""
    blobs = {}
    for name, part in model.named_modules():
        if isinstance(part, nn.Conv2d):
            blobs[f"{blob_name(name)}_w"] = part.weight
        elif isinstance(part, nn.BatchNorm2d):
            norm = blob_name(name)
            blobs |= {f"{norm}_{blob}": getattr(part, kind) for kind, blob in BLOBS.items()}
    return {name: tensor.detach().numpy() for name, tensor in blobs.items()}


class Python2(pickle._Pickler):
    """Writes texts and bytes as the str of Python 2, in which the zoo's files were made."""

    dispatch = dict(pickle._Pickler.dispatch)  # type: ignore[misc]

    def save_str(self, value: str | bytes) -> None:
        content = value.encode("latin1") if isinstance(value, str) else value
        short = len(content) < 256
        length = bytes([len(content)]) if short else struct.pack("<i", len(content))
        self.write((pickle.SHORT_BINSTRING if short else pickle.BINSTRING) + length + content)
        self.memoize(value)

    dispatch[str] = dispatch[bytes] = save_str


def write_python2(content: Any, path: Path) -> Path:
    with path.open("wb") as file:
        Python2(file, 2).dump(content)
    return path


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
@pytest.mark.parametrize("boxed", [True, False])
def test_a_resnet_of_caffe2(name: str, boxed: bool, tmp_path: Path) -> None:
    """A detection model has ``blobs`` and momenta; one of ImageNet is a flat dict."""
    model = resnet(name)
    blobs = blobs_of(model)
    blobs |= {f"{key}_momentum": np.zeros_like(value) for key, value in blobs.items()}
    blobs |= {"fc1000_w": np.ones((4, 2), np.float32), "fc1000_b": np.ones(4, np.float32)}
    content = {"blobs": blobs, "cfg": "NUM_GPUS: 8"} if boxed else blobs
    fresh = resnet(name)
    load_weights(fresh, read_state(write_python2(content, tmp_path / "R.pkl")))
    with torch.no_grad():
        assert torch.equal(fresh(IMAGES), model(IMAGES))


def test_norms_of_caffe2_without_statistics(tmp_path: Path) -> None:
    """Of a detection model: its statistics are folded into the scale and the shift."""
    model, folded = resnet("resnet18"), {}
    blobs = blobs_of(model)
    for key in [key for key in blobs if key.endswith("_bn_s")]:
        norm = key.removesuffix("s")
        mean, variance = (blobs.pop(norm + name).astype(np.float64) for name in ("rm", "riv"))
        scale = blobs[key] / np.sqrt(variance + 1e-5)
        folded[key] = scale.astype(np.float32)
        folded[norm + "b"] = (blobs[norm + "b"] - mean * scale).astype(np.float32)
    fresh = resnet("resnet18")
    path = write_python2({"blobs": {**blobs, **folded}}, tmp_path / "R.pkl")
    load_weights(fresh, read_state(path))
    with torch.no_grad():
        torch.testing.assert_close(fresh(IMAGES), model(IMAGES), rtol=1e-4, atol=1e-4)


CLASSY = {
    "resnet18": {"name": "resnext", "num_blocks": [2, 2, 2, 2], "basic_layer": True},
    "resnet50": {"name": "resnext", "num_blocks": [3, 4, 6, 3]},
    "resnext50_32x4d": {"name": "resnext50_32x4d"},
    "regnet_y_400mf": {"name": "regnet_y_400mf"},
}


@pytest.mark.parametrize("name", CLASSY)
def test_a_checkpoint_of_classy_vision(name: str, tmp_path: Path) -> None:
    """Classy Vision's own models, as its task writes them, give torchvision's features."""
    theirs = trained(build_model({**CLASSY[name], "heads": []}))
    state = {"base_model": theirs.get_classy_state(), "meters": [], "optimizer": {"lr": 0.1}}
    torch.save({"classy_state_dict": state, "input_args": None}, tmp_path / "checkpoint.torch")
    ours = resnet(name)
    load_weights(ours, read_state(tmp_path / "checkpoint.torch"))
    with torch.no_grad():
        expected = theirs(IMAGES).mean(dim=(2, 3))
        torch.testing.assert_close(ours(IMAGES), expected, rtol=1e-5, atol=1e-5)


OUT = {"torchvision": "backbone.pt", "detectron2": "detectron2.pkl", "vissl": "vissl.torch"}


@pytest.mark.slow
@pytest.mark.parametrize("layout", OUT)
def test_out_and_back_the_network_is_the_same(layout: str, tmp_path: Path) -> None:
    model = resnet()
    torch.save(model.state_dict(), tmp_path / "w.pth")
    words = ["torchvision:resnet50", f"weights={tmp_path / 'w.pth'}", "--to", layout]
    assert export.main([*words, "--out", str(tmp_path)]) == 0
    fresh = resnet()
    load_weights(fresh, read_state(tmp_path / OUT[layout]))
    with torch.no_grad():
        assert torch.equal(fresh(IMAGES), model(IMAGES))


class Counting(SimpleHTTPRequestHandler):
    """Serves a folder slowly enough for two to meet, and notes what is fetched."""

    fetched: list[str]

    def do_GET(self) -> None:
        self.fetched.append(re.sub(r"\?.*", "", self.path))
        super().do_GET()

    def log_message(self, format: str, *args: Any) -> None: ...


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, list[str]]]:
    pytest.importorskip("aiohttp")
    monkeypatch.chdir(tmp_path)
    fetched: list[str] = []
    handler = type("Handler", (Counting,), {"fetched": fetched})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as made:
        Thread(target=made.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{made.server_port}", fetched
        made.shutdown()


@pytest.mark.slow
def test_ranks_of_a_host_download_weights_once(
    server: tuple[str, list[str]], tmp_path: Path
) -> None:
    address, fetched = server
    torch.save({"w": torch.ones(1 << 20)}, tmp_path / "w.pth")
    code = f"from selftask.files.addresses import fetch; print(fetch('{address}/w.pth'))"
    environment = tiny.environment(SELFTASK_CACHE=str(tmp_path / "cache"))
    words = [sys.executable, "-c", code]
    ranks = [
        subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    paths = {rank.communicate()[0] for rank in ranks}
    assert [rank.returncode for rank in ranks] == [0, 0, 0]
    (path,) = paths
    tensor: Tensor = torch.load(path.strip(), weights_only=True)["w"]
    assert tensor.sum() == 1 << 20
    assert fetched.count("/w.pth") == 1
