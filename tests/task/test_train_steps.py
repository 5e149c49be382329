"""The train steps beyond the standard one: equal to formulas, to the undivided batch, on ranks."""

from __future__ import annotations

import copy
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from timm.layers import DropPath
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.autograd.graph import saved_tensors_hooks

import tiny
from minitask import MiniTask, TinyBackbone, largest_difference
from ranks import run_ranks
from selftask.batch import total
from selftask.config.load import load_config
from selftask.errors import ConfigError, RunError, UserError
from selftask.models.dropout import draw_per_sample
from selftask.random.keyed import LAYER_DRAWS
from selftask.registry import METHODS
from selftask.task import Task
from selftask.task.second_pass import second_pass
from selftask.train_steps.compiled import Compiled
from selftask.train_steps.grad_cache import GradCache
from selftask.train_steps.sam import SAM, compute_gradients

PLAIN_HEAD = {"out_dim": 5, "norm": False}  # SimCLR's, without BatchNorm
RISING = {"name": "cosine", "start": 0.5, "end": 1.0}  # a step too late would show
MOCO = {"out_dim": 5, "queue_size": 32, "symmetric": True, "momentum": RISING}


class Deeper(TinyBackbone):
    """Seven convolutions, so that activations outweigh the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Sequential(*[nn.Conv2d(3, 3, 3, padding=1) for _ in range(6)])

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(self.more(images))


class WithBatchNorm(TinyBackbone):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(3)

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(self.norm(images))


class WithDropout(TinyBackbone):
    """Draws from torch's generator; keeps every output."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[Tensor] = []

    def forward(self, images: Tensor) -> Tensor:
        self.outputs.append(nn.functional.dropout(super().forward(images), 0.5))
        return self.outputs[-1]


def simclr(step: Any, **more: Any) -> MiniTask:
    return MiniTask("simclr", PLAIN_HEAD, batch_size=16, step=step, **more)


# -- standard ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "config"),
    [("simclr", PLAIN_HEAD), ("vicreg", {"out_dim": 5, "hidden_dim": 7})],
)
def test_the_standard_step_is_a_plain_loop(method: str, config: dict[str, Any]) -> None:
    """A scalar loss, and one of named terms, which are summed."""
    task = MiniTask(method, config, lr=0.1)
    network = copy.deepcopy(task.base_model)
    descent = torch.optim.SGD(network.parameters(), lr=0.1)
    losses = []
    for batch in list(task.rest_of_epoch()):
        actual = task.loss(network(batch.input), batch)
        assert isinstance(actual, dict) == (method == "vicreg")
        loss = sum(actual.values()) if isinstance(actual, dict) else actual
        descent.zero_grad()
        loss.backward()
        descent.step()
        losses.append(loss.item())
    task.run(3)
    assert task.losses == pytest.approx(losses, rel=1e-12)
    assert largest_difference(task.base_model.state_dict(), network.state_dict()) < 1e-12
    assert set(task.last_batch.terms) == (set(actual) if method == "vicreg" else set())


# -- grad_cache --------------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "config"), [("simclr", PLAIN_HEAD), ("moco", MOCO)])
def test_chunks_are_one_batch(method: str, config: dict[str, Any]) -> None:
    """Sixteen chunks of one sample, then five of three or four: also teacher and queue."""
    whole = MiniTask(method, config, batch_size=16).run(3)
    for chunks in (16, 5, 99):
        step = GradCache(chunks=chunks)
        chunked = MiniTask(method, config, batch_size=16, step=step).run(3)
        assert largest_difference(chunked.state(), whole.state()) < 1e-12
        embeddings = [task.base_model.embedding for task in (chunked, whole)]
        assert largest_difference(*embeddings) < 1e-12, "view after view"


def test_chunks_draw_what_the_batch_draws(tmp_path: Path) -> None:
    """In float32, with stochastic depth: sixteen chunks of a real task."""
    more = ("train.max_steps=1", "backbone.drop_path=0.5")
    chunked, whole = (
        tiny.train("mae", tmp_path, f"run{number}", *more, f"train.step={step}")
        for number, step in enumerate(["{name: grad_cache, chunks: 16}", "standard"])
    )
    other = tiny.train("mae", tmp_path, "none", "train.max_steps=1")
    assert _gradient_difference(chunked, whole) < 1e-6
    assert _gradient_difference(chunked, other) > 1e-3


def _gradient_difference(one: Any, other: Any) -> float:
    """Largest difference of two tasks' gradients, relative to the largest gradient."""
    first, second = ([p.grad for p in task.base_model.parameters()] for task in (one, other))
    pairs = [(a, b) for a, b in zip(first, second, strict=True) if a is not None and b is not None]
    largest = max(float(a.abs().max()) for a, _ in pairs)
    return max(float((a - b).abs().max()) for a, b in pairs) / largest


def test_second_pass_repeats_the_draws_of_torch() -> None:
    task = simclr(GradCache(chunks=4), backbone=WithDropout).run(1)
    outputs = task.base_model.backbone.outputs
    assert len(outputs) == 8
    assert all(torch.equal(*pair) for pair in zip(outputs[:4], outputs[4:], strict=True))
    assert not torch.equal(outputs[0] == 0, outputs[1] == 0)


def test_chunks_update_batch_norm_once() -> None:
    task = simclr(GradCache(chunks=4), backbone=WithBatchNorm)
    expected = nn.BatchNorm2d(3).double()
    (batch,) = task.rest_of_epoch()
    first, second = batch.all_views
    for rows in torch.arange(16).chunk(4):
        expected(torch.cat([first[rows], second[rows]]))
    task.run(1)
    norm = task.base_model.backbone.norm
    assert norm.num_batches_tracked == 4
    torch.testing.assert_close(norm.running_mean, expected.running_mean)
    torch.testing.assert_close(norm.running_var, expected.running_var)


class PeakMemory:
    """Peak bytes of tensors saved for backward passes."""

    def __enter__(self) -> PeakMemory:
        self.now = self.peak = 0
        self._hooks = saved_tensors_hooks(self._pack, lambda saved: saved.tensor)
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks.__exit__(*error)

    def _pack(self, tensor: Tensor) -> _Saved:
        size = tensor.numel() * tensor.itemsize * (not isinstance(tensor, nn.Parameter))
        self.now += size
        self.peak = max(self.peak, self.now)
        saved = _Saved(tensor)
        weakref.finalize(saved, self._free, size)
        return saved

    def _free(self, size: int) -> None:
        self.now -= size


class _Saved:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def test_sixteen_chunks_need_a_quarter_of_the_memory() -> None:
    peaks = []
    for step in (GradCache(chunks=16), "standard"):
        task = simclr(step, backbone=Deeper)
        with PeakMemory() as memory:
            task.run(1)
        peaks.append(memory.peak)
    assert peaks[0] < 0.25 * peaks[1]


def test_unsuitable_methods_and_sizes_are_refused(tmp_path: Path) -> None:
    for method, more, message in (
        ("dinov2", [], "train.step: 'grad_cache' divides the network's output.*dinov2"),
        ("nepa", [], "train.step: 'grad_cache' divides the network's output.*nepa"),
        ("simclr", ["train.batch_size=8"], r"train\.step\.chunks: 16; train\.batch_size=8 has"),
        (
            "simclr",
            ["train.accumulate=2"],
            r"train\.accumulate=2 has no effect with train\.step='grad_cache'",
        ),
        ("simclr", ["train.step.chnks=2"], "did you mean 'train.step.chunks'"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_config(f"{method}/digits", ["train.step=grad_cache", *more])
    with pytest.raises(ConfigError, match=r"train\.step='manual' has no mixed precision"):
        load_config("simclr/digits", ["train.step=manual", "train.precision=bfloat16"])
    with pytest.raises(ConfigError, match=r"train\.grad_scaler\.enabled=true has no effect"):
        load_config("simclr/digits", ["train.step=manual", "train.grad_scaler.enabled=true"])
    with pytest.raises(ConfigError, match=r"train\.accumulate=2 has no effect"):
        load_config("simclr/digits", ["train.step=manual", "train.accumulate=2"])


def test_wrong_sample_dim_is_an_error() -> None:
    task = simclr(GradCache(chunks=4))
    task.loss.sample_dim = 2
    with pytest.raises(UserError, match="16 samples in dimension 2, the sample_dim of SimCLR"):
        task.run(1)


# -- sam ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("adaptive", [False, True])
def test_sam_is_the_formula(adaptive: bool) -> None:
    """Eq. 2 and 3 of the paper, or of ASAM with its T_w = |w|; the weights then descend."""
    task = simclr(SAM(rho=0.3, adaptive=adaptive), lr=0.1)
    network = copy.deepcopy(task.base_model)
    weights = [*network.parameters()]

    def gradient() -> list[Tensor]:
        loss = total(task.loss(network(batch.input), batch))
        return list(torch.autograd.grad(loss, weights))

    (batch,) = task.rest_of_epoch()
    start = [w.detach().clone() for w in weights]
    scale = [w.abs() if adaptive else torch.ones_like(w) for w in start]
    ascent = [s * g for s, g in zip(scale, gradient(), strict=True)]
    norm = sum(float(a.square().sum()) for a in ascent) ** 0.5
    with torch.no_grad():
        for w, s, a in zip(weights, scale, ascent, strict=True):
            w += 0.3 * s * a / norm
    expected = gradient()

    task.run(1)
    assert largest_difference(task.grads[0], expected) < 1e-12
    updated = [w - 0.1 * g for w, g in zip(start, expected, strict=True)]
    assert largest_difference([p.detach() for p in task.base_model.parameters()], updated) < 1e-12
    plain = simclr("standard").run(1).grads[0]
    assert largest_difference(plain, expected) > 1e-3


def test_sam_restores_the_weights_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    task = simclr(SAM(rho=0.3), lr=0.1)
    weights = [*task.base_model.parameters()]
    start = [w.detach().clone() for w in weights]
    distances: list[float] = []

    def fails(task: Task, loss: Tensor) -> None:
        distances.append(largest_difference([w.detach() for w in weights], start))
        if len(distances) == 2:
            raise RunError("in the second pass")
        compute_gradients(task, loss)

    monkeypatch.setattr("selftask.train_steps.sam.compute_gradients", fails)
    with pytest.raises(RunError, match="in the second pass"):
        task.run(1)
    assert distances[0] == 0 < distances[1]
    assert largest_difference([w.detach() for w in weights], start) == 0


def test_sam_moves_statistics_and_memories_once() -> None:
    """As the standard step does, whose first forward pass is the same; its features are logged."""
    norms, queues, embeddings = [], [], []
    for step in (SAM(), "standard"):
        network = simclr(step, backbone=WithBatchNorm).run(1).base_model
        norms.append(network.backbone.norm)
        embeddings.append(network.embedding)
        queues.append(MiniTask("moco", MOCO, step=step).run(1).loss.queue)
    assert norms[0].num_batches_tracked == 1
    assert torch.equal(norms[0].running_mean, norms[1].running_mean)
    assert torch.equal(*embeddings)
    assert largest_difference(queues[0].state_dict(), queues[1].state_dict()) == 0.0


def test_second_pass_draws_as_the_first_did() -> None:
    """Also if a network of the user calls its backbone with two views, then with a third one."""
    backbone, images = nn.Sequential(DropPath(0.5)).train(), torch.ones(24, 3)
    draw_per_sample([backbone], seed=0)
    index = torch.arange(8)
    LAYER_DRAWS.start(torch.stack([index, index], dim=1), torch.device("cpu"))
    first = [backbone(views) for views in images.split(16)]
    with second_pass(backbone):
        assert all(map(torch.equal, first, map(backbone, images.split(16))))
    LAYER_DRAWS.stop()


# -- compiled ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "config"), [("simclr", PLAIN_HEAD), ("moco", MOCO)])
def test_one_graph_or_two(
    method: str, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Traced by dynamo and run eagerly, so that results are those of the standard step.

    Gradients are halved where they are reduced, as if another rank had none.
    """

    def halve(task: MiniTask) -> None:
        for parameter in task.parameters:
            if parameter.grad is not None:
                parameter.grad /= 2

    monkeypatch.setattr(MiniTask, "reduce_gradients", halve)
    torch._dynamo.reset()
    counters.clear()
    compiled = MiniTask(method, config, step=Compiled()).run(3).state()
    assert counters["stats"]["unique_graphs"] == (1 if method == "simclr" else 2)
    assert not counters["graph_break"]
    assert largest_difference(compiled, MiniTask(method, config).run(3).state()) == 0.0


@pytest.mark.slow
@pytest.mark.proof
@pytest.mark.parametrize("method", METHODS.names())
def test_every_method_is_traced_whole(method: str, tmp_path: Path) -> None:
    torch._dynamo.reset()
    counters.clear()
    step = ("train.step=compiled", "train.compile_options.backend=eager", "train.max_steps=2")
    tiny.train(method, tmp_path, "compiled", *step)
    assert counters["stats"]["unique_graphs"]
    assert not counters["graph_break"]
    tiny.train(method, tmp_path, "plain", "train.max_steps=2")
    losses = [
        [row["loss"] for row in tiny.rows(tmp_path / out)[:2]] for out in ("compiled", "plain")
    ]
    assert losses[0] == losses[1]


@pytest.mark.slow
def test_compiled_run_resumes_within_rounding(tmp_path: Path) -> None:
    """Not bit for bit with other graphs: a resumed process may compile with other shapes."""
    step = ("train.step=compiled", "train.max_steps=4")
    plain = tiny.train("simclr", tmp_path, "plain", "train.max_steps=4")
    whole = tiny.train("simclr", tmp_path, "whole", *step)
    tiny.train("simclr", tmp_path, "parts", *step, "train.stop_at=2")
    torch._dynamo.reset()
    parts = tiny.train("simclr", tmp_path, "parts", *step)
    states = [task.base_model.state_dict() for task in (plain, whole, parts)]
    assert largest_difference(states[1], states[2]) < 1e-6
    assert 0 < largest_difference(states[0], states[1]) < 1e-2  # Adam's first steps are signs
    losses = [[row["loss"] for row in tiny.rows(tmp_path / out)] for out in ("plain", "whole")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)
    assert losses[0][0] == pytest.approx(losses[1][0], rel=1e-5)


def test_compiled_refuses_what_it_cannot_compile() -> None:
    for more, message in (
        ("parallel.reduce=fsdp", "parallel.reduce: train.step=compiled needs manual"),
        ("train.accumulate=2", r"train\.accumulate=2 has no effect with train\.step='compiled'"),
        ("train.compile=model", "train.compile: train.step=compiled compiles the network already"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_config("simclr/digits", ["train.step=compiled", more])


# -- all ---------------------------------------------------------------------------------------


STEPS: dict[str, Any] = {
    "standard": "standard",
    "sam": SAM(),
    "adaptive": SAM(rho=1.0, adaptive=True),
    "chunks": GradCache(chunks=3),
}


def _three_steps(rank: int = 0) -> dict[str, Any]:
    tasks = {name: MiniTask("simclr", PLAIN_HEAD, step=step) for name, step in STEPS.items()}
    return {name: task.run(3).state() for name, task in tasks.items()}


def test_two_ranks_are_one() -> None:
    """Weights, gradients, and the loss, which is the mean over ranks."""
    one = _three_steps()
    for rank in run_ranks(_three_steps, 2):
        assert largest_difference(rank, one) < 1e-12


def test_manual_is_standard() -> None:
    manual, standard = (simclr(step).run(3).state() for step in ("manual", "standard"))
    assert largest_difference(manual, standard) == 0.0
