"""What a train step promises: what is reduced, scaled, counted, put back and left alone."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from spy import labeled, points
from torch import Tensor, nn

import tiny
from ranks import run_ranks
from selftask.batch import Batch, total
from selftask.classy import schedulers
from selftask.config.load import load_config
from selftask.config.run_length import RunLength
from selftask.config.schema import OptimizerConfig
from selftask.data.loading.open_data import open_data
from selftask.distributed.collectives import all_reduce_mean
from selftask.errors import UserError
from selftask.optim.build import build_optimizer
from selftask.parallel.manual import ManualReduction
from selftask.registry import METHODS
from selftask.task import Task
from selftask.task.loop import train_loop


def test_gradients_may_be_cleared_before_the_forward_pass(tmp_path: Path) -> None:
    """detectron2's ``zero_grad_before_forward``, in a step of one's own: the same bits."""

    def cleared_first(task: Task) -> None:
        if task.train:
            task.optimizer.zero_grad()
        batch = task.last_batch = next(task.batches)
        batch.output = task.model(batch.input)
        task.run_hooks("on_forward")
        batch.local_loss = task.loss(batch.output, batch)
        batch.loss = all_reduce_mean(batch.local_loss.detach())
        task.run_hooks("on_loss_and_meter")
        batch.local_loss.backward()
        task.reduce_gradients()
        task.run_hooks("on_backward")
        task.optimizer.step(where=task.where)
        task.run_hooks("on_update")
        task.advance()

    standard = tiny.train("moco", tmp_path, "standard", "train.max_steps=4")
    task = tiny.task("moco", tmp_path, "first", "train.max_steps=4")
    task.train_step_function = cleared_first
    train_loop(task)
    states = [tiny.last_state(out) for out in (standard.out, task.out)]
    assert tiny.differences(*states) == []


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (None, "the loss is None; the method must return a scalar tensor"),
        (0.5, "the loss is 0.5; "),
        ({}, "the loss is {}; "),
        (torch.ones(3, requires_grad=True), r"the loss is a tensor \(3,\); "),
        ({"near": torch.ones((), requires_grad=True), "far": 0.5}, "the loss term 'far' is 0.5; "),
        ({"loss": torch.ones((), requires_grad=True)}, "'loss' has the name of a column of train"),
    ],
)
def test_what_is_no_loss_is_named(loss: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        total(loss)


def test_a_missing_result_of_a_hook_is_named() -> None:
    none = torch.zeros(0)
    batch = Batch(views={}, labels=none, index=none, key=none, added={"teacher": none})
    assert batch["teacher"] is none
    with pytest.raises(KeyError, match=r"'techer' in the batch.*did you mean 'teacher'"):
        batch["techer"]


def test_grad_mode_and_train_mode_are_put_back(tmp_path: Path) -> None:
    task = tiny.task("supervised", tmp_path, "run", *labeled(tmp_path))
    task.prepare()
    task.on_start()
    read: list[list[int]] = []  # images by phase
    for train in (True, False, True):
        read.append([])
        task.on_phase_start()
        assert task.base_model.training is task.loss.training is task.train is train
        assert task.losses == [] and task.meters[0].value == {"top_1": 0.0}
        before = [p.clone() for p in task.base_model.state_dict().values()]
        task.step()
        assert torch.is_grad_enabled()
        assert task.last_batch.local_loss.requires_grad is train
        assert not task.last_batch.loss.requires_grad
        assert torch.equal(task.losses[0], task.last_batch.loss)
        sample = task.last_batch.sample
        assert sample["input"] is task.last_batch.input
        assert sample["target"] is task.last_batch.target is task.last_batch.labels
        loss = nn.functional.cross_entropy(task.last_batch.output, task.last_batch.labels)
        assert task.last_batch.loss.item() == pytest.approx(loss.item(), rel=1e-6)
        after = task.base_model.state_dict().values()
        moved = any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
        assert moved is train, "a test step must leave weights and statistics alone"
        while True:
            read[-1] += task.last_batch.index.tolist()
            try:
                task.step()
            except StopIteration:
                break
        assert (task.meters[0].value["top_1"] > 0) is not train
        task.on_phase_end()
    assert sorted(read[0]) == sorted(read[2]) == list(range(80)), "each phase reads from its start"
    assert read[0] != read[2] and read[1] == list(range(30))
    assert not task.done_training() and (task.clock.epoch, task.clock.phase) == (2, 3)
    task.close()


def test_a_step_by_hand(tmp_path: Path) -> None:
    """A train and a test step, with what a task holds, beside a plain loop."""
    words = ["optimizer={name: sgd, lr: 0.4, schedule: linear, warmup: 0, weight_decay: 0}"]
    task = tiny.task("supervised", tmp_path, "run", *words, *labeled(tmp_path))
    task.prepare()
    network = copy.deepcopy(task.base_model)
    assert task.model is task.base_model and isinstance(task.loss, METHODS["supervised"])
    assert task.trained == [("network", task.base_model), ("loss", task.loss)]
    task.on_start()
    task.on_phase_start()
    velocity = [torch.zeros_like(p) for p in network.parameters()]
    for step in range(2):
        task.step()
        batch, lr = task.last_batch, 0.4 * (1 - step / 15)
        sources = [task.sources.train[i][1] for i in batch.index.tolist()]
        assert batch.labels.tolist() == sources
        output = network(batch.input)
        assert torch.allclose(batch.output, output, atol=1e-6)
        loss = nn.functional.cross_entropy(output, batch.labels)
        assert float(batch.loss) == float(task.losses[step]) == pytest.approx(float(loss.detach()))
        network.zero_grad()
        loss.backward()
        with torch.no_grad():
            for p, v in zip(network.parameters(), velocity, strict=True):
                v.mul_(0.9).add_(p.grad)
                p.sub_(lr * v)
        assert [group["lr"] for group in task.optimizer.param_groups] == pytest.approx([lr])
    for ours, p in zip(task.base_model.parameters(), network.parameters(), strict=True):
        assert torch.allclose(ours, p, atol=1e-5)
    for _ in range(3):
        task.step()
    task.on_phase_end()
    task.on_phase_start()
    task.step()
    right = task.last_batch.output.argmax(dim=1) == task.last_batch.labels
    (meter,) = task.meters
    assert meter.value == {"top_1": pytest.approx(float(right.double().mean()))}
    task.close()


def counting(original: Any, seen: Counter[str], label: str) -> Any:
    """``original`` that also counts its calls."""

    def counted(*args: Any, **kwargs: Any) -> Any:
        seen[label] += 1
        return original(*args, **kwargs)

    return counted


def test_no_host_sync_between_log_points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU each of these would wait for the device."""
    seen: Counter[str] = Counter()
    hooks = ("hooks.clip_gradients={}", "train.log_every=4", "train.epochs=1")
    for method in ("simclr", "moco", "byol", "barlow", "supervised"):
        task = tiny.task(method, tmp_path, method, *hooks)
        task.prepare()
        task.on_start()
        task.on_phase_start()
        task.step()  # optimizers build their state in the first step
        for name in ("item", "tolist", "numpy", "__bool__", "__float__", "__int__", "cpu"):
            original = getattr(Tensor, name)

            label = f"{method}: {name}"
            monkeypatch.setattr(Tensor, name, counting(original, seen, label))
        batches = [next(task.batches) for _ in range(2)]  # reading is the loader's affair
        task.batches = iter(batches)
        seen.clear()
        task.step()
        task.step()
        assert seen == {}
        monkeypatch.undo()
        task.close()


def reduce_with_missing_gradients(rank: int) -> list[Tensor]:
    """Two parameters and dtypes; one has a gradient on rank 1 only, another on none."""
    a, b, c = (nn.Parameter(torch.ones(3)) for _ in range(3))
    d = nn.Parameter(torch.ones(2, dtype=torch.float64))
    (a * (rank + 1.0)).sum().backward()
    (d * (4.0 * rank)).sum().backward()
    if rank == 1:
        (b * 6.0).sum().backward()
    reduction = ManualReduction()
    reduction.register(list(zip("abcd", (a, b, c, d), strict=True)))
    reduction.reduce()
    assert c.grad is None
    return [p.grad for p in (a, b, c, d) if p.grad is not None]


def step_with_inf(rank: int) -> tuple[list[Tensor], list[float]]:
    """Three scaled steps; in the second, rank 1 alone meets an inf."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.ones(2))
    config = OptimizerConfig(name="sgd", args={"sgd_momentum": 0.0}, lr=0.5, schedule="constant")
    module = nn.Module()
    module.weight = weight
    length = RunLength(num_samples=3, batch_size=1, epochs=1)
    optimizer = build_optimizer(config, [("m", module)], length, batch=1)
    with pytest.raises(TypeError, match="is not an Optimizer"):
        torch.optim.lr_scheduler.LambdaLR(optimizer, float)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=100)
    reduction = ManualReduction()
    reduction.register([("weight", weight)])
    weights, scales = [], []
    for step in range(3):
        loss = (weight * (rank + 1.0)).sum()
        if step == 1 and rank == 1:
            loss = loss * torch.inf
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        reduction.reduce()
        scaler.unscale_(optimizer)
        scaler.step(optimizer, where=step / 3)
        scaler.update()
        weights.append(weight.detach().clone())
        scales.append(scaler.get_scale())
    return weights, scales


def both(rank: int) -> tuple[Any, Any]:
    return reduce_with_missing_gradients(rank), step_with_inf(rank)


def test_two_ranks_reduce_and_skip_together() -> None:
    (grads_0, steps_0), (grads_1, steps_1) = run_ranks(both, 2)
    expected = [[1.5] * 3, [3.0] * 3, [2.0] * 2]
    assert [g.tolist() for g in grads_0] == [g.tolist() for g in grads_1] == expected
    for weights, scales in (steps_0, steps_1):
        assert scales == [1024.0, 512.0, 512.0]
        # mean gradient 1.5, lr 0.5; the second step is left out on both
        assert [w.tolist() for w in weights] == [[0.25] * 2, [0.25] * 2, [-0.5] * 2]


def test_schedule_reaches_the_groups_of_a_loaded_state() -> None:
    """``load_state_dict`` replaces the list of groups; a cached one would be dead (style.md)."""
    module = nn.Linear(2, 2)
    config = OptimizerConfig(
        name="sgd",
        lr=1.0,
        schedule="linear",
        weight_decay={"name": "linear", "start": 0.4, "end": 0.0},
    )
    length = RunLength(num_samples=10, batch_size=1, epochs=1)
    optimizer = build_optimizer(config, [("m", module)], length, batch=1)
    optimizer.set_classy_state(optimizer.get_classy_state())
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    before = optimizer.param_groups
    optimizer.step(where=0.5)
    assert [group["lr"] for group in optimizer.optimizer.param_groups] == [0.5, 0.5]
    assert optimizer.param_groups is before is optimizer.optimizer.param_groups
    decays = [group["weight_decay"] for group in optimizer.param_groups]
    assert decays == pytest.approx([0.2, 0.0])  # biases do not decay
    assert isinstance(optimizer._param_group_schedulers[0]["lr"], schedulers.LinearParamScheduler)


def test_accumulated_batches_are_one_big_batch(tmp_path: Path, spy: str) -> None:
    """For a mean over samples and a network without BatchNorm: as a plain loop over the images.

    Five batches, two at a time: the last update of the epoch has one.
    """
    vit = "backbone={name: vit_micro, depth: 1, patch_size: 8}"
    sgd = "optimizer={name: sgd, lr: 0.1, schedule: linear, warmup: 0, weight_decay: 0}"
    step = ("train.step=accumulate", "train.accumulate=2", "train.epochs=1")
    recipe = [
        word
        for word in tiny.overrides("supervised", tmp_path)
        if not word.startswith(("backbone=", "method="))
    ]
    config = load_config("supervised/digits", [*recipe, vit, sgd, *step, spy])
    task = Task(config, sources=open_data(config.data))
    task.prepare()
    task.base_model.double()
    for state in task.optimizer.optimizer.state.values():
        state["momentum_buffer"] = state["momentum_buffer"].double()
    prepare = task.loss.prepare_batch

    def prepare_double(batch: Batch, task: Task) -> None:
        batch.views = {n: [view.double() for view in group] for n, group in batch.views.items()}
        prepare(batch, task)

    task.loss.prepare_batch = prepare_double  # type: ignore[method-assign]
    network = copy.deepcopy(task.base_model)
    places, unsynchronized = [], []

    @contextmanager
    def no_sync() -> Iterator[None]:
        yield
        unsynchronized.append(task.last_batch.number)

    task.no_sync = no_sync  # type: ignore[method-assign]
    task.on_start()
    task.on_phase_start()
    while task.clock.batch < 5:
        places.append(task.where)
        task.step()
    task.on_phase_end()
    assert (task.steps_done, task.clock.batch, task.clock.epoch) == (3, 5, 1)
    assert places == pytest.approx([0.0, 0.4, 0.8])
    assert unsynchronized == [0, 2]  # all batches of an update but the last
    assert task.clock.done
    forwards = [point for point in points(train=True) if point in ("on_forward", "on_update")]
    assert forwards == ["on_forward", "on_forward", "on_update"] * 2 + ["on_forward", "on_update"]

    batches = task.data_module.train_batches(0)
    for where, number in zip(places, (2, 2, 1), strict=True):
        group = [next(batches) for _ in range(number)]
        images = torch.cat([batch.all_views[0] for batch in group]).double()
        target = torch.cat([batch.labels for batch in group])
        network.zero_grad()
        nn.functional.cross_entropy(network(images), target).backward()
        with torch.no_grad():
            for parameter in network.parameters():
                old = getattr(parameter, "velocity", torch.zeros_like(parameter))
                parameter.velocity = 0.9 * old + parameter.grad  # type: ignore[attr-defined]
                parameter -= 0.1 * (1 - where) * parameter.velocity
    ours = dict(task.base_model.named_parameters())
    for name, parameter in network.named_parameters():
        assert torch.allclose(ours[name], parameter, rtol=0, atol=1e-12), name
    task.close()
