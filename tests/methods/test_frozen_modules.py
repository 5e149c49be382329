"""Frozen modules of a config: tokenizers, teachers, judges."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tiny
from selftask.batch import Batch
from selftask.config.compose import recipes
from selftask.config.fields import setting
from selftask.config.load import load_config, to_yaml
from selftask.config.schema import FrozenModule
from selftask.errors import ConfigError, UserError
from selftask.methods.base import Method
from selftask.models.features.extract import extract
from selftask.registry import METHODS, register_method
from selftask.task import Task


class Tokenizer(nn.Module):
    """Images -> a token for each quarter; not features, so no ``embed_dim``."""

    def __init__(self, num_tokens: int = 5) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.project = nn.Conv2d(3, num_tokens, 16, stride=16)
        self.drop = nn.Dropout(0.5)

    def forward(self, images: Tensor) -> Tensor:
        return self.drop(self.project(images)).flatten(2).argmax(dim=1)  # (B, 4)


def register() -> None:
    """A method outside of the package with a tokenizer and an optional judge."""
    if "frozen_test" in METHODS:
        return

    @register_method("frozen_test")
    class FrozenTest(Method):
        """Predict the tokens of a frozen tokenizer, and keep the features of a frozen backbone."""

        loss_reduction = "samples"
        views = 1

        @dataclass(frozen=True, kw_only=True)
        class Config:
            tokenizer: FrozenModule = setting()
            judges: dict[str, FrozenModule] = setting({})
            other: FrozenModule | None = None

        def build_network(self, backbone: nn.Module, task: Task) -> nn.Module:
            self.tokenizer = self.open_frozen("tokenizer", task)
            return super().build_network(backbone, task)

        def build_head(self, embed_dim: int) -> nn.Module:
            return nn.Linear(embed_dim, 20)

        def on_forward(self, task: Task) -> None:
            task.last_batch["tokens"] = self.tokenizer(task.last_batch.all_views[0])

        def forward(self, output: Tensor, batch: Batch) -> Tensor:
            return F.cross_entropy(output[0].unflatten(1, (5, 4)), batch["tokens"])


ONE_VIEW = "views.main={count: 1, transforms: [normalize]}"
OWN = f"{__name__}:Tokenizer"


@pytest.fixture(autouse=True)
def _registered() -> None:
    register()


def config(*words: str) -> Any:
    return load_config(
        str(recipes.folder() / "base/digits.yaml"), ["method.name=frozen_test", ONE_VIEW, *words]
    )


# -- in a config -----------------------------------------------------------------------------------


def test_plain_text_is_short_for_a_section(tmp_path: Path) -> None:
    method = config(
        f"method.tokenizer={OWN}", "method.judges={a: runs/a, b: {model: runs/b}}"
    ).method
    assert method.args["tokenizer"] == FrozenModule(model=OWN)
    assert method.args["judges"] == {name: FrozenModule(model=f"runs/{name}") for name in "ab"}
    assert method.args["other"] is None
    later = config(f"method.tokenizer={OWN}", "method.tokenizer.args={num_tokens: 3}")
    assert later.method.args["tokenizer"] == FrozenModule(model=OWN, args={"num_tokens": 3})
    assert later.place("method.tokenizer.args").startswith("command line")
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(later))
    assert load_config(str(path), []) == later


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], r"method\.tokenizer\.model is missing: give a run"),
        (["method.tokenizer={weights: x}"], r"method\.tokenizer\.model is missing: give a run"),
        (["method.tokenizer=3"], r"method\.tokenizer=3: expected a section"),
        (["method.tokenizer={model: a, modl: b}"], r"unknown key 'method\.tokenizer\.modl'"),
    ],
)
def test_wrong_sections_are_refused(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(*words)


# -- in a run --------------------------------------------------------------------------------------


def task(folder: Path, *words: str) -> Task:
    """The tiny simclr recipe of the tests, with the method of this file."""
    options = [w for w in tiny.overrides("simclr", folder) if not w.startswith("method")]
    made = config(*options, f"method.tokenizer={OWN}", *words)
    return Task(made)


def test_own_class_is_frozen_in_eval_mode_and_saved_as_its_digest(tmp_path: Path) -> None:
    """Weights never change, dropout is off, and no optimizer or checkpoint has them."""
    run = task(tmp_path)
    run.prepare()
    weights = {name: value.clone() for name, value in Tokenizer().state_dict().items()}
    run.on_start(), run.on_phase_start(), run.step(), run.step()
    frozen = run.loss.tokenizer
    assert run.loss.training and not any(module.training for module in frozen.modules())
    assert tiny.differences(dict(frozen.network.state_dict()), weights) == []
    trained = {id(p) for group in run.optimizer.param_groups for p in group["params"]}
    assert not trained & {id(p) for p in frozen.parameters()}
    assert list(run.state_dict()["method"]) == ["tokenizer.digest"]
    images = run.last_batch.all_views[0]
    assert torch.equal(frozen(images), frozen(images))
    run.close()


def test_resume_with_other_weights_names_both_digests(tmp_path: Path) -> None:
    run = task(tmp_path)
    run.prepare()
    run.on_start()
    run.save_checkpoint()
    run.close()
    state = {name: torch.zeros_like(value) for name, value in Tokenizer().state_dict().items()}
    torch.save(state, tmp_path / "zeros.pt")
    other = task(tmp_path, f"method.tokenizer.weights={tmp_path / 'zeros.pt'}")
    digest = bytes(run.loss.tokenizer.digest.tolist()).hex()[:12]
    with pytest.raises(UserError, match=rf"method\.tokenizer: .*run began \({digest}\)"):
        other.prepare()
    assert not other.loss.tokenizer.network.project.weight.any()
    task(tmp_path).prepare()  # the same module


def test_backbone_of_a_library_gives_patches(tmp_path: Path) -> None:
    run = task(tmp_path, "method.tokenizer={model: timm:test_vit, weights: none}")
    run.prepare()
    features = extract(run.loss.tokenizer.network, torch.zeros(1, 3, 32, 32))
    assert features.tokens.patches.ndim == 3
    run.close()


def test_module_of_other_channels_or_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"method\.tokenizer=os:nothing: .*os has no 'nothing'"):
        task(tmp_path, "method.tokenizer=os:nothing").prepare()
    with pytest.raises(UserError, match=r"method\.tokenizer=nowhere: .*there is no such file"):
        task(tmp_path, "method.tokenizer=nowhere").prepare()
