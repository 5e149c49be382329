"""``selftask check``: W ranks do what one does; what it makes of methods that do not."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import tiny
from selftask.cli.check import load, main
from selftask.equivalence.compare import compare, merge, relative_difference
from selftask.equivalence.tiny_recipe import images_for, make_tiny
from selftask.equivalence.trace import batch_norm_replaced
from selftask.errors import ConfigError, UserError
from selftask.models.heads import mlp
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

    def forward(self, output, batch):
        if self.config.raises:
            raise ValueError("no distance today")
        if self.config.dies and rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        distance = (output[0] - output[1]).square().sum(dim=1)
        scale = output.std() if self.config.local else 1.0
        return (distance / scale).mean()
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
        self.pending[-1] = self.pending[-1].flip(1)  # in another order than the global batch's
        super().on_update(task)
""",
        "method with 2 ranks, queue",
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
        "method with 2 ranks, mean",
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

        @register_method("misspelt")
        class Misspelt:
            loss_reduction = "sample"

    assert "misspelt" not in METHODS


def test_every_shipped_method_declares() -> None:
    for name in METHODS.names():
        assert METHODS[name].loss_reduction in REDUCTIONS, name


# -- the small version -------------------------------------------------------------------------


def small(recipe: str, *settings: str, steps: int = 3) -> Any:
    return make_tiny(load(recipe, list(settings)), batch_size=8, steps=steps)


def test_a_large_recipe_becomes_small() -> None:
    config = small("dino/vit_small_imagenet")
    assert config.backbone.name == "vit_micro"
    assert config.backbone.args["dynamic_img_size"], "what multi-crop needs stays"
    assert config.backbone.args["drop_path"] == 0.1
    assert (config.train.batch_size, config.train.epochs, config.train.max_steps) == (8, 2, None)
    assert config.train.precision == "float32"
    sizes = {
        t.args["size"] for v in config.views.values() for t in v.transforms if "size" in t.args
    }
    assert sizes == {32, 12}, "224 and 96 pixels, whole patches"
    assert [view.count for view in config.views.values()] == [
        view.count for view in load("dino/vit_small_imagenet", []).views.values()
    ]
    assert config.hooks.keys() == {"clip_gradients"}, "only those that the recipe itself names"
    assert small("moco/resnet50_imagenet").method.args["queue_size"] == 16
    assert small("byol/resnet50_imagenet").optimizer.name == "lars"


def test_what_the_command_line_says_stays() -> None:
    config = small("simclr", "method.out_dim=24", "train.batch_size=12", "backbone.width=4")
    assert (config.method.args["out_dim"], config.method.args["hidden_dim"]) == (24, 32)
    assert (config.train.batch_size, config.backbone.args["width"]) == (12, 4)
    assert len(images_for(config)) == 25
    assert small("simclr", "backbone=resnet34").backbone.name == "resnet34"
    assert small("dino", "optimizer.eps=1e-7").optimizer.args["eps"] == 1e-7


def test_a_small_version_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match=r"(?s)key=value.*decoder_dim: 16 must be divisible"):
        small("mae", "method.decoder_heads=32")


def test_images_are_functions_of_their_number() -> None:
    config = small("simclr")
    one, other = images_for(config), images_for(config)
    assert len(one) == 2 * 8 + 1
    for index in (0, 5, 16):
        assert np.array_equal(np.asarray(one[index][0]), np.asarray(other[index][0]))
        assert one[index][1] == index % 4
    assert not np.array_equal(np.asarray(one[0][0]), np.asarray(one[4][0]))


def test_batch_norm_gives_way_to_a_norm_of_one_sample() -> None:
    with batch_norm_replaced() as replaced:
        head = mlp(6, 8, 4, last_norm=True, last_affine=False)
        conv = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4, eps=0.1))
    assert len(replaced) == 3
    assert not [m for m in (*head, *conv) if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    assert head[-1].weight is None and conv[1].eps == 0.1
    x = torch.randn(5, 6)
    assert torch.allclose(head(x)[:2], head(x[:2]), atol=1e-6), "no sample knows the others"
    assert isinstance(mlp(6, 8, 4)[1], nn.BatchNorm1d), "only inside"


# -- the comparison ----------------------------------------------------------------------------


def test_relative_difference() -> None:
    one = torch.tensor([1.0, -4.0]).double()
    assert relative_difference(one, one.clone()) == 0.0
    assert relative_difference(one, one + torch.tensor([0.0, 4e-9])) == pytest.approx(1e-9, 1e-5)
    tiny_one = torch.full((2,), 1e-18).double()
    assert relative_difference(tiny_one, -tiny_one) == 2.0
    assert relative_difference(tiny_one, -tiny_one, largest=1.0) == pytest.approx(2e-15)
    assert relative_difference(None, torch.zeros(2)) == 0.0, "no gradient is one of zero"
    assert relative_difference(None, torch.ones(2)) == 1.0
    for wrong in (one.float(), one[:1], one * math.nan, torch.tensor([1.0, math.inf]).double()):
        assert relative_difference(one, wrong) == math.inf
    assert relative_difference(torch.tensor([3]), torch.tensor([3])) == 0.0
    assert relative_difference(torch.tensor([3]), torch.tensor([4])) == math.inf


def record(index: list[int], term: float, grad: Tensor, queue: Tensor) -> dict[str, Any]:
    """What one rank could have written down in one step."""
    return {
        "samples": [torch.tensor(index)],
        "inputs": [{"input": torch.tensor(index).double()}],
        "loss": [torch.tensor(2.0)],
        "terms": [{"kl": torch.tensor(term)}],
        "gradients": [{"w": grad}],
        "network": {},
        "method": {"queue": queue},
        "optimizer": {},
    }


def test_ranks_are_put_together_and_each_is_looked_at() -> None:
    grad, queue = torch.ones(2), torch.arange(3.0)
    one = merge([record([5, 6, 7, 8], 0.5, grad, queue)])
    two = [record([5, 6], 0.2, grad, queue), record([7, 8], 0.8, grad, queue)]
    assert all(row.ok for row in compare(one, two, "2"))
    two[1] = record([8, 7], 0.8, grad, queue + torch.tensor([0.0, 0.0, 0.5]))
    rows = {row.quantity: row for row in compare(one, two, "2")}
    assert {name for name, row in rows.items() if not row.ok} == {"samples", "inputs", "method"}
    assert rows["method"].place == "queue (rank 1)"
    assert rows["method"].difference == pytest.approx(0.5 / 2.5)
    assert rows["inputs"].place == "step 1: input"


# -- the command -------------------------------------------------------------------------------


def check(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    """Exit code and output of ``selftask check`` in this process."""
    code = main(list(words))
    return code, capsys.readouterr().out


def rows_of(output: str, ranks: str) -> dict[str, str]:
    """quantity -> verdict, of the rows for so many ranks."""
    found = re.findall(
        rf"^  (\w+) +{re.escape(ranks)}  +\S+  +(ok|DIFFERENT)", output, re.MULTILINE
    )
    return dict(found)


QUANTITIES = ["samples", "inputs", "loss", "terms", "gradients", "network", "method", "optimizer"]


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
    assert 'mine.py:28 in forward: raise ValueError("no distance today")' in output
    assert "Traceback" not in output


def test_a_killed_rank_is_named(mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, output = check(capsys, "pull", "import=[mine]", "method.dies=true", "--ranks", "1,2")
    assert code == 1
    assert "FAILED: rank 1: was killed by SIGKILL" in output


def test_wrong_words() -> None:
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
def test_more_recipes(
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
