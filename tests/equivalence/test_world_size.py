"""``selftask check``: W ranks do what one does; what it makes of methods that do not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import tiny
from selftask.cli.check import main
from selftask.equivalence.worker import _describe
from selftask.errors import UserError
from selftask.registry import METHODS, REDUCTIONS, register_method

PROJECT = tiny.ROOT / "projects" / "simsiam"
HEAD = """
import os, signal
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from selftask.distributed.collectives import all_gather_cat, gather_cat_with_grad, rank, world_size
from selftask.methods.base import Method
from selftask.methods.moco import MoCo
from selftask.methods.simclr import SimCLR
from selftask.registry import register_method
"""
MINE = (
    HEAD
    + '''
@register_method("pull")
class Pull(Method):
    """Pulls two views together, by a distance in units of how spread the batch is."""

    loss_reduction = "samples"

    @dataclass(frozen=True, kw_only=True)
    class Config:
        local: bool = False  # the spread of this rank's batch
        raises: bool = False
        dies: bool = False
        divisor: float = 1.0

    def forward(self, output, batch):
        if self.config.raises:
            raise ValueError("no distance today")
        if self.config.dies and rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        distance = (output[0] - output[1]).square().sum(dim=1)
        scale = output.std() if self.config.local else 1.0
        return (distance / scale).mean() / self.config.divisor
'''
)
MUTANTS = {
    "spread": (
        """
@register_method("spread")
class Spread(Method):
    loss_reduction = "statistics"

    @dataclass(frozen=True, kw_only=True)
    class Config:
        dim: int = 8

    def forward(self, output, batch):
        return (output[0] - output[1]).square().mean()
""",
        "exchanges nothing between ranks",
    ),
    "no_gradient": (
        """
@register_method("no_gradient")
class NoGradient(SimCLR):
    loss_reduction = "gathered"
    class Config(SimCLR.Config): ...

    def forward(self, output, batch):
        first, second = F.normalize(output, dim=2)
        everyone = torch.cat([all_gather_cat(first), all_gather_cat(second)])
        mine = rank() * len(first)
        everyone = torch.cat([everyone[:mine], first, everyone[mine + len(first):]])
        logits = second @ everyone.T
        return F.cross_entropy(logits, torch.arange(len(first)) + mine)
""",
        "gradients with 2 ranks, step 1: network.",
    ),
    "queue_order": (
        """
@register_method("queue_order")
class QueueOrder(MoCo):
    loss_reduction = "samples"
    class Config(MoCo.Config): ...

    def on_update(self, task):
        self.pending[-1] = tuple(rows.flip(0) for rows in self.pending[-1])  # another order
        super().on_update(task)
""",
        "method with 2 ranks, step 1: queue",
    ),
    "own_memory": (
        """
@register_method("own_memory")
class OwnMemory(MoCo):
    loss_reduction = "samples"
    class Config(MoCo.Config): ...

    def setup(self, task):
        super().setup(task)
        self.register_buffer("mean", torch.zeros(()))

    def on_update(self, task):
        super().on_update(task)
        self.mean.lerp_(task.last_batch.output.mean(), 0.1)  # of this rank
""",
        "method with 2 ranks, step 1: mean",
    ),
    "drawn": (
        """
@register_method("drawn")
class Drawn(SimCLR):
    loss_reduction = "gathered"
    class Config(SimCLR.Config): ...

    def prepare_batch(self, batch, task):
        batch.input = [view + torch.randn_like(view) for view in batch.all_views]
""",
        "inputs with 2 ranks, step 1: input[",
    ),
}  # name -> source, and what is said of it


@pytest.fixture
def mine(tmp_path: Path, forget_names: None, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


# -- the declaration ---------------------------------------------------------------------------


def test_a_method_without_declaration_does_not_register() -> None:
    with pytest.raises(UserError) as error:

        @register_method("undeclared")
        class Undeclared: ...

    message = str(error.value)
    assert "'undeclared'" in message and "Undeclared at " in message
    assert f"{__file__}:" in message and "does not declare `loss_reduction`" in message
    assert all(f'"{word}"' in message for word in ("samples", "gathered", "statistics"))
    assert "undeclared" not in METHODS


def test_a_wrong_word_is_no_declaration() -> None:
    with pytest.raises(UserError, match=r"says 'sample' for `loss_reduction`; .*\"samples\""):

        @register_method("misspelled")
        class Misspelled:
            loss_reduction = "sample"

    assert "misspelled" not in METHODS


def test_every_shipped_method_declares() -> None:
    for name in METHODS.names():
        assert METHODS[name].loss_reduction in REDUCTIONS, name


# -- the command -------------------------------------------------------------------------------


def check(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    """Exit code and output of ``selftask check`` in this process."""
    code = main(list(words))
    return code, capsys.readouterr().out


def rows_of(output: str, ranks: str) -> dict[str, str]:
    """quantity -> verdict, of the rows for so many ranks."""
    matches = re.findall(
        rf"^  (\w+) +{re.escape(ranks)}  +\S+  +(ok|DIFFERENT)", output, re.MULTILINE
    )
    return dict(matches)


QUANTITIES = ["samples", "inputs", "loss", "terms", "gradients", "method", "network", "optimizer"]


@pytest.mark.parametrize("method", ["moco", "barlow"])
def test_two_shipped_methods(method: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, output = check(capsys, method, "--ranks", "1,2")
    assert code == 0, output
    assert rows_of(output, "2") == dict.fromkeys(QUANTITIES, "ok")
    resumed = dict.fromkeys(["samples", "network", "method", "optimizer"], "ok")
    assert rows_of(output, "2 > 1 > 2") == resumed
    assert f"SAME: {method} on 2 ranks" in output


def test_stochastic_depth(capsys: pytest.CaptureFixture[str]) -> None:
    """MoCo's teacher has it too, on images that other ranks have drawn for."""
    vit = "backbone={name: vit_micro, depth: 2, drop_path: 0.5}"
    code, output = check(capsys, "moco", vit, "--ranks=1,2", "--steps=2")
    assert code == 0, output
    assert "'drop_path': 0.5" in output


def test_a_broken_method_of_ones_own(mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("pull", "import=[mine]", "--ranks=1,2")
    code, output = check(capsys, *words, "method.local=true")
    verdicts = rows_of(output, "2")
    assert code == 1
    assert verdicts["inputs"] == "ok", "it is not the data"
    assert {verdicts[name] for name in ("loss", "gradients", "network")} == {"DIFFERENT"}
    assert re.search(r"gradients  2 .* DIFFERENT  step 1: network\.backbone\.\S+", output), output
    assert "DIFFERENT: pull depends on the number of ranks: loss with 2 ranks, step 1" in output
    code, output = check(capsys, *words)
    assert code == 0, output


def test_ones_own_error_is_shown(mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, output = check(capsys, "pull", "import=[mine]", "method.raises=true", "--ranks", "2")
    assert code == 1
    assert "FAILED: rank 0 of 1: ValueError: no distance today" in output
    assert 'mine.py:29 in forward: raise ValueError("no distance today")' in output
    assert "Traceback" not in output


def test_a_loss_that_is_not_finite_is_no_matter_of_ranks(mine: Path) -> None:
    words = ("pull", "import=[mine]", "method.divisor=0", "--ranks", "1,2")
    with pytest.raises(UserError, match="the loss is inf in step 1 of the check"):
        main([*words])


def test_a_loss_without_gradient_has_advice() -> None:
    with pytest.raises(RuntimeError) as raised:
        torch.zeros(()).backward()
    message = _describe(raised.value)["message"]
    assert message.startswith("the loss has no gradient; compute it from the output")


def test_a_change_in_place_has_advice() -> None:
    weight = torch.ones(2, requires_grad=True)
    outputs = weight.exp()
    loss = outputs.square().sum()
    outputs *= 2
    with pytest.raises(RuntimeError) as raised:
        loss.backward()
    message = _describe(raised.value)["message"]
    assert message.startswith("a tensor that the backward pass needs was changed in place")


def test_a_killed_rank_is_named(mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, output = check(capsys, "pull", "import=[mine]", "method.dies=true", "--ranks", "1,2")
    assert code == 1
    assert "FAILED: rank 1: was killed by SIGKILL" in output


def test_bad_arguments_of_check_are_refused() -> None:
    for words, message in (
        (["simclrr"], "no method named 'simclrr'; did you mean 'simclr'"),
        (["simclr", "--ranks", "1,x"], "--ranks '1,x': expected numbers above 0"),
        (["simclr", "--ranks", "1"], "nothing to compare one rank with"),
        (["simclr", "--ranks", "3", "train.batch_size=8"], "8 cannot be divided among 3 ranks"),
        (["simclr", "byol"], "one METHOD or recipe"),
        (["simclr", "method.temprature=1"], "did you mean 'method.temperature'"),
    ):
        with pytest.raises(UserError, match=re.escape(message)):
            main(words)


def test_all_are_those_of_ones_own_too(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, list[str]]] = []
    monkeypatch.setattr(
        "selftask.cli.check._check", lambda name, settings, *_: asked.append((name, settings)) or 0
    )
    assert main(["--all", "import=[mine]"]) == 0
    names = [name for name, _ in asked]
    assert {"pull", "simclr", "ijepa"} < set(names) and names == METHODS.names()
    assert all(settings == ["import=[mine]"] for _, settings in asked)


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ["swav/images"],
        ["dino/images"],
        ["deepcluster/images"],
        ["dino/vit_small_imagenet"],
        ["byol/resnet50_imagenet"],
        ["moco", "train.accumulate=2", "train.step=accumulate"],
        ["moco", "train.step={name: grad_cache, chunks: 3}", "parallel.reduce=ddp"],
        ["simclr", "train.step={name: grad_cache, chunks: 3}", "parallel.reduce=fsdp"],
        ["swav", "train.step={name: sam, adaptive: true, rho: 1}"],
        ["byol", "train.step=sam", "parallel.reduce=fsdp"],
        ["simclr", "train.step=manual"],
        ["byol", "parallel.reduce=ddp"],
        ["byol", "parallel.reduce=fsdp", "parallel.sync_batch_norm=all"],
        ["moco", "parallel.sync_batch_norm=all"],
        ["swav", "parallel.sync_batch_norm=all"],
        [str(PROJECT / "recipe.yaml")],
    ],
    ids=lambda words: " ".join(words).rpartition("projects/")[2],
)
def test_more_recipes_are_the_same_at_any_world_size(
    words: list[str], forget_names: None, capsys: pytest.CaptureFixture[str]
) -> None:
    code, output = check(capsys, *words)
    assert code == 0, output


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_mistakes_are_found(name: str, mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, said = MUTANTS[name]
    (mine / "mine.py").write_text(HEAD + source)
    code, output = check(capsys, name, "import=[mine]", "--ranks", "1,2")
    assert code == 1
    assert said in output, output
