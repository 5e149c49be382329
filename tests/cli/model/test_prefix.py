"""Files with several networks: `prefix=` selects one wherever weights are read."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.models import resnet18

import selftask
from selftask.cli.main import main
from selftask.cli.model.finetune import recipe_words
from selftask.errors import UserError

MODEL = "torchvision:resnet18"
QUICK = ("image_size=32", "data.num_workers=0", "train.device=cpu")
ADVICE = "('left.', 'right.'); choose one by prefix, or keep one of them in a file"


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two ResNets, of which one gives zeros; and a few labeled images."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    state = resnet18().state_dict()
    zeros = {key: torch.zeros_like(value) for key, value in state.items()}
    torch.save({"left": state, "right": zeros}, tmp_path / "two.pth")
    draws = np.random.default_rng(0)
    for number in range(4):
        pixels = draws.integers(0, 256, (32, 32, 3), dtype=np.uint8)
        path = tmp_path / f"images/{'ab'[number % 2]}/{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path)
    return tmp_path / "two.pth"


def failure(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(list(words)) == 2
    return capsys.readouterr().err


def test_prefix_selects_a_network_in_every_command(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = f"weights={file}"
    eval_words = ("eval", "knn", MODEL, weights, "data=images", "k=[1]", *QUICK)
    assert ADVICE in failure(capsys, *eval_words)
    assert main([*eval_words, "prefix=left."]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["train_images"] == 4

    features = ("features", MODEL, weights, "data=images", *QUICK)
    assert ADVICE in failure(capsys, *features, "out=f")
    for prefix, same in ("left.", False), ("right.", True):
        assert main([*features, f"prefix={prefix}", f"out={prefix}rows"]) == 0
        rows = np.load(f"{prefix}rows/features.npy")
        assert (rows == rows[0]).all() == same

    export = ("export", MODEL, weights, "--out", "exported")
    assert ADVICE in failure(capsys, *export)
    assert main([*export, "prefix=right."]) == 0
    exported = torch.load("exported/backbone.pt", weights_only=True)
    assert not any(value.any() for value in exported.values())
    assert "no tensor has the prefix 'rihgt.'; the nearest is 'right.'" in failure(
        capsys, *export, "prefix=rihgt."
    )


def test_prefix_of_load_and_finetune(file: Path) -> None:
    with pytest.raises(UserError, match=r"several networks that fit .*choose one by prefix"):
        selftask.load(MODEL, weights=str(file))
    model = selftask.load(MODEL, weights=str(file), prefix="right.")
    assert not any(value.any() for value in model.backbone.state_dict().values())
    words = recipe_words(MODEL, [f"weights={file}", "prefix=right.", "data=images"])
    assert 'init.prefix="right."' in words


def test_prefix_of_a_run_is_refused(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("run").mkdir()
    Path("run/config.yaml").write_text("{}")
    message = failure(capsys, "export", "run", "prefix=left.")
    assert "prefix=left.: run is a run, and has one backbone" in message
    message = failure(capsys, "export", "run", "weights=two.pth", "--weights", "ema")
    assert "weights=two.pth: run is a run, and has its own" in message
