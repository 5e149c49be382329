"""Several named optimizers: the adversarial method of docs/method-examples.md."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tiny
from page_blocks import write_files
from ranks import run_ranks
from selftask.checkpoint import rotation, store
from selftask.config.load import load_config
from selftask.config.schema import Config
from selftask.data.loading.open_data import open_data
from selftask.errors import ConfigError, UserError
from selftask.hooks.base import function_hook
from selftask.parallel.reduction import Reduction
from selftask.random.keyed import uniform
from selftask.registry import METHODS
from selftask.task import Task
from selftask.task.loop import train_loop

LAYERS = "backbone={name: vit_micro, depth: 1, patch_size: 8}"  # without BatchNorm
CRITIC = "optimizers.critic={name: adam, lr: 0.01, schedule: linear, match: loss.critic}"
SGD = "optimizer={name: sgd, lr: 0.1, schedule: linear, warmup: 0, weight_decay: 0}"
HEAD = "method={name: uniform_critic, out_dim: 6}"


def settings(folder: Path, *more: str, out: str = "run") -> Config:
    """The config of a small run; the files of the page are in ``folder``."""
    if not (folder / "uniform_critic.py").exists():
        write_files("method-examples", folder)
    words = [
        f"data={tiny.digits_file(folder)}",
        "data.val=null",
        "data.num_workers=0",
        "train={batch_size: 16, epochs: 3, log_every: 1, threads: 1, device: cpu}",
        "eval.evaluations={knn: null, linear: null}",
        *(LAYERS, SGD, CRITIC, HEAD, f"out={folder / out}"),
    ]
    return load_config(str(folder / "uniform_critic.yaml"), [*words, *more])


def small(folder: Path, *more: str, out: str = "run") -> Task:
    config = settings(folder, *more, out=out)
    return Task(config, sources=open_data(config.data))


def train(folder: Path, *more: str, out: str = "run") -> Task:
    task = small(folder, *more, out=out)
    return tiny.loop(task)


def by_hand(
    network: nn.Module, critic: nn.Module, batches: list[Any], lr: list[float]
) -> list[Tensor]:
    """The weights that a plain loop over the batches, with two optimizers of torch, ends with."""
    of_network = torch.optim.SGD(network.parameters(), lr=1.0, momentum=0.9)
    of_critic = torch.optim.Adam(critic.parameters(), lr=1.0)
    for step, batch in enumerate(batches):
        of_network.param_groups[0]["lr"] = lr[0] * (1 - step / 15)
        of_critic.param_groups[0]["lr"] = lr[1] * (1 - step / 15)
        output = network(batch.input)
        real, made = 2 * uniform(0, batch.key, 6) - 1, output.detach().tanh()
        logits = torch.cat([critic(real), critic(made[0]), critic(made[1])])
        labels = torch.cat([torch.ones(16, 1), torch.zeros(32, 1)]).to(logits)
        weight = torch.cat([torch.ones(16, 1), torch.full((32, 1), 0.5)]) / 16
        of_critic.zero_grad()
        F.binary_cross_entropy_with_logits(logits, labels, weight, reduction="sum").backward()
        of_critic.step()
        scores = critic(output.tanh())
        fooled = F.binary_cross_entropy_with_logits(scores, torch.ones_like(scores))
        agree = (output[0].tanh() - output[1].tanh()).square().mean()
        of_network.zero_grad()
        (agree + 0.1 * fooled).backward()
        of_network.step()
    return [p.detach() for module in (network, critic) for p in module.parameters()]


@pytest.fixture
def in_double() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def compute_in_double(task: Task) -> None:
    """Convert the inputs of network and critic: errors of float32 grow in adversarial steps."""
    for module in (task.base_model, task.loss.critic):
        module.register_forward_pre_hook(_to_double)


def _to_double(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    (values,) = inputs
    return ([x.double() for x in values],) if isinstance(values, list) else (values.double(),)


def test_each_is_stepped_as_by_a_plain_loop(
    tmp_path: Path, forget_names: None, in_double: None
) -> None:
    batches: list[Any] = []
    parts: list[nn.Module] = []
    task = small(tmp_path)

    def prepare(task: Task) -> None:
        compute_in_double(task)
        parts.extend(copy.deepcopy([task.base_model, task.loss.critic]))

    remember = function_hook(
        on_start=prepare,
        on_step=lambda task: batches.append(task.last_batch),
    )
    task.add_hook(remember)
    train_loop(task)
    expected = by_hand(parts[0], parts[1], batches, [0.1, 0.01])
    ours = [*task.base_model.parameters(), *task.loss.critic.parameters()]
    assert len(batches) == 15
    for mine, theirs in zip(ours, expected, strict=True):
        torch.testing.assert_close(mine.detach(), theirs, rtol=1e-6, atol=1e-6)
    moved = zip(task.loss.critic.parameters(), parts[1].parameters(), strict=True)
    assert not any(torch.equal(now, first) for now, first in moved)
    rows = [row for row in tiny.rows(task.out) if "loss" in row]
    assert rows[3]["lr"] == pytest.approx(0.1 * (1 - 3 / 15))
    assert rows[3]["lr/critic"] == pytest.approx(0.01 * (1 - 3 / 15))


@pytest.mark.parametrize("kind", [CRITIC, CRITIC.replace("adam", "schedule_free_adamw")])
def test_resume_is_exact(tmp_path: Path, forget_names: None, kind: str) -> None:
    kinds = [kind.replace("linear", "constant"), SGD.replace("linear", "constant")]
    train(tmp_path, *kinds, out="whole")
    for stop in ("3", "8", "null"):
        train(tmp_path, *kinds, f"train.stop_at={stop}", out="parts")
    whole, parts = (tiny.last_state(tmp_path / out) for out in ("whole", "parts"))
    assert tiny.differences(whole, parts) == []
    assert tiny.rows(tmp_path / "whole") == tiny.rows(tmp_path / "parts")
    kept = whole["optimizers"]["critic"]["optim"]["state"]
    assert [int(state["step"]) for state in kept.values()] == [15] * 4  # of torch.optim.Adam


def test_a_checkpoint_without_one_does_not_fit(tmp_path: Path, forget_names: None) -> None:
    train(tmp_path, "train.stop_at=3")
    path = rotation.checkpoints(tmp_path / "run" / "checkpoints")[0]
    state = store.load(path)
    state["optimizers"] = {}
    task = small(tmp_path)
    task.prepare()
    with pytest.raises(ValueError, match=r"critic.* now, \[\] in the checkpoint"):
        task.load_state_dict(state)
    task.close()


def weights(rank: int, folder: Path, ranks: int) -> dict[str, Tensor]:
    """Of a run on as many ranks as there are."""
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_PORT": 0}
    if ranks > 1:  # the process group is there
        os.environ.update({name: str(number) for name, number in names.items()})
        os.environ["MASTER_ADDR"] = "localhost"
    torch.set_default_dtype(torch.float64)
    task = small(folder, "train.max_steps=4", "parallel.sync_batch_norm=all")
    task.add_hook(function_hook(on_start=compute_in_double))
    train_loop(task)
    assert len(task.last_batch.index) == 16 // ranks
    return {**task.base_model.state_dict(), **task.loss.state_dict()}


def test_two_ranks_are_one(tmp_path: Path, forget_names: None, in_double: None) -> None:
    tiny.digits_file(tmp_path)
    write_files("method-examples", tmp_path)
    first, second = run_ranks(weights, 2, tmp_path, 2)
    assert tiny.differences(first, second) == []
    (tmp_path / "alone").mkdir()
    alone = weights(0, tmp_path / "alone", 1)
    for name, value in alone.items():
        torch.testing.assert_close(first[name], value, rtol=1e-9, atol=1e-9)


def test_a_schedule_by_epochs_moves_the_second_one_too(tmp_path: Path, forget_names: None) -> None:
    critic = CRITIC.replace("linear", "{name: linear, update: epoch}, warmup: 0")
    task = small(tmp_path, critic)
    rates: list[float] = []
    task.add_hook(
        function_hook(
            on_step=lambda task: rates.append(task.optimizers["critic"].param_groups[0]["lr"])
        )
    )
    train_loop(task)
    expected = [0.01 * (1 - epoch / 3) for epoch in range(3) for _ in range(5)]
    assert rates == pytest.approx(expected)


def test_an_overflow_of_either_abandons_the_step(tmp_path: Path, forget_names: None) -> None:
    """One scaler for both: an inf in the critic's gradients leaves everything as it was."""
    task = small(tmp_path, "train.grad_scaler={enabled: true, init_scale: 1024}")
    task.prepare()
    task.on_start()
    task.on_phase_start()
    task.step()
    before = copy.deepcopy([*task.base_model.parameters(), *task.loss.critic.parameters()])
    critic_loss = task.loss.critic_loss
    task.loss.critic_loss = lambda *args: critic_loss(*args) * torch.inf
    task.step()
    after = [*task.base_model.parameters(), *task.loss.critic.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert (task.clock.skipped, task.grad_scaler.get_scale()) == (1, 512.0)
    assert all(parameter.grad is None for parameter in after)
    task.loss.critic_loss = critic_loss
    task.step()
    assert not any(torch.equal(a, b) for a, b in zip(before, after, strict=True) if a.ndim > 1)
    task.close()


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("train.step=standard", "optimizers.critic: train.step='standard' steps only optimizer"),
        ("optimizers=null", "train.step='adversarial' steps optimizers.critic, which is missing"),
        ("parallel=fsdp", "parallel.reduce='fsdp' reduces all gradients together"),
        ("optimizers.critic.beta=1", "unknown key 'optimizers.critic.beta'"),
        ("optimizers.critic.match=null", "give the names of the modules"),
        ("optimizers.critic.groups=[{match: x}]", "optimizers.critic.groups.0: sets nothing"),
        ("optimizers.critic.lr={name: cosine}", "optimizers.critic.lr"),
        (
            CRITIC.replace("adam", "schedule_free_sgd"),
            "optimizers.critic.schedule='linear': schedule_free_sgd averages weights",
        ),
    ],
)
def test_mistakes_in_the_config(
    tmp_path: Path, forget_names: None, word: str, message: str
) -> None:
    with pytest.raises(ConfigError) as error:
        settings(tmp_path, word)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("match: loss.critik", r"optimizers.critic.match='loss.critik': .*did you mean 'loss.crit"),
        ("match: '*'", "every parameter is matched; leave some to `optimizer`"),
        (
            "match: loss, groups: [{match: head, lr: 2}]",
            r"optimizers.critic.groups.0.match='head': matches no trained parameter",
        ),
    ],
)
def test_matches_that_fit_no_network(
    tmp_path: Path, forget_names: None, word: str, message: str
) -> None:
    task = small(tmp_path, CRITIC.replace("match: loss.critic", word))
    with pytest.raises(UserError, match=message):
        task.prepare()


def test_another_optimizer_keeps_the_keys_of_all(tmp_path: Path, forget_names: None) -> None:
    """As of ``optimizer``: the betas of Adam go, lr and match stay."""
    write_files("method-examples", tmp_path)
    recipe = tmp_path / "uniform_critic.yaml"
    recipe.write_text(recipe.read_text().replace("lr: 1.0e-3", "lr: 0.01, betas: [0.5, 0.9]"))
    config = load_config(str(recipe), ["optimizers.critic.name=sgd", f"out={tmp_path / 'run'}"])
    section = config.optimizers["critic"]
    assert (section.name, section.lr, section.match) == ("sgd", 0.01, "loss.critic")
    assert "betas" not in section.args


def test_shared_parameters_are_reduced_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A method that keeps a module of the network names its parameters a second time."""
    registered: list[nn.Parameter] = []

    def setup(self: Any, task: Any) -> None:
        self.encoder = task.base_model.backbone

    monkeypatch.setattr(METHODS["simclr"], "setup", setup)
    monkeypatch.setattr(
        Reduction, "register", lambda self, named: registered.extend(p for _, p in named)
    )
    task = tiny.task("simclr", tmp_path, "run")
    task.prepare()
    task.close()
    updated = [p for group in task.optimizer.param_groups for p in group["params"]]
    assert len(registered) == len(updated)
    assert set(registered) == set(updated)
