"""Networks compiled by torch: the same runs as eager ones, whole, in blocks, and on two ranks."""

from __future__ import annotations

import os
import shutil
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo import register_backend
from torch._dynamo.utils import counters

import tiny
from ranks import run_ranks
from selftask.batch import Batch
from selftask.config.load import load_config
from selftask.config.schema import CompileConfig
from selftask.errors import ConfigError
from selftask.parallel.compiled import compile_blocks, compile_whole
from selftask.task.compile_report import CompileReport
from selftask.train_steps import compiled as compiled_step

LABELS = torch.zeros(2, dtype=torch.int64)
EAGER = "train.compile_options.backend=aot_eager"  # traced and differentiated as by inductor
SMOOTH = ["optimizer={name: sgd, lr: 0.05, warmup: 0}", "train.epochs=1"]  # Adam amplifies rounding
NEEDS_COMPILER = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs g++")


class Breaking(nn.Module):
    """A network that asks for a value in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x)
        if x.sum() > 0:
            x = x + 1
        result: torch.Tensor = self.layers[1](x)
        return result


class Disabled(nn.Module):
    """A network that torch must not compile."""

    @torch.compiler.disable
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1


class Pair(nn.Module):
    """A block: two layers that are no Sequential."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(3, 3), nn.LayerNorm(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.norm(self.linear(x))
        return result


def report_of(network: nn.Module) -> None:
    report = CompileReport()
    compiled = compile_whole(network, CompileConfig(backend="eager"))
    for _ in range(3):
        compiled(torch.ones(2, 3))
        report.on_step(None)  # type: ignore[arg-type]  # does not look at the task


def texts(caplog: pytest.LogCaptureFixture) -> list[str]:
    ours = [record for record in caplog.records if record.name.startswith("selftask")]
    caplog.clear()
    return [record.getMessage() for record in ours]


def test_graph_breaks_and_fallbacks_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "selftask")
    report_of(nn.Linear(3, 3))
    assert texts(caplog) == ["compile: 1 graph"]
    report_of(Breaking())
    graphs, breaks = texts(caplog)
    assert graphs == "compile: 2 graphs"
    assert "1 graph break" in breaks
    assert "test_compile.py" in breaks
    report_of(Disabled())
    assert texts(caplog) == ["compile: no graph was made, the network runs eagerly"]


def test_blocks_keep_their_names() -> None:
    network = nn.Sequential(Pair(), Pair())
    names, x = list(network.state_dict()), torch.ones(2, 3)
    before = network(x)
    graphs: list[Any] = []

    def counting(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    register_backend(counting, name="counting")
    compile_blocks(network, CompileConfig(backend="counting"))
    assert list(network.state_dict()) == names
    assert torch.equal(network(x), before) and graphs


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["train.compile=model", "parallel.activation_checkpointing=0.5"], "none or blocks"),
        (["train.compile=step"], r"train\.step=compiled"),
    ],
)
def test_refused(options: list[str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        load_config("simclr/digits", options)


@pytest.mark.parametrize("has_teacher", [False, True])
def test_a_kept_loss_is_not_that_of_a_later_replay(
    has_teacher: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CUDA graph returns the same memory in each step, here by hand."""
    memory = {"term": torch.zeros(())}
    result = lambda *args: memory if has_teacher else (None, memory)  # noqa: E731
    monkeypatch.setattr(compiled_step, "_compiled", lambda function, options: result)
    monkeypatch.setattr(compiled_step, "update_weights", lambda task, loss: None)
    batches = [Batch(views={}, labels=LABELS, index=LABELS, key=LABELS) for _ in range(2)]
    task: Any = SimpleNamespace(
        batches=iter(batches),
        autocast=nullcontext,
        config=SimpleNamespace(train=SimpleNamespace(compile_options=None)),
        calls={"on_forward": [1] if has_teacher else []},
        run_hooks=lambda point: None,
        update_meters=lambda batch: None,
        model=None,
        loss=None,
    )
    for step, _ in enumerate(batches):
        memory["term"].fill_(step + 1.0)
        compiled_step.Compiled()(task)
    assert [batch.loss.item() for batch in batches] == [1.0, 2.0]
    assert [batch.terms["term"].item() for batch in batches] == [1.0, 2.0]


# -- runs ------------------------------------------------------------------------------------------


def losses(method: str, folder: Path, out: str, *more: str) -> list[float]:
    tiny.train(method, folder, out, *SMOOTH, *more)
    return [row["loss"] for row in tiny.rows(folder / out) if "loss" in row]


@pytest.mark.slow
@NEEDS_COMPILER
def test_inductor_trains_as_eager_and_resumes(tmp_path: Path) -> None:
    """Sums are in another order than in eager mode, hence not bit for bit."""
    eager = losses("mae", tmp_path, "eager")
    compiled = losses("mae", tmp_path, "compiled", "train.compile=model")
    assert compiled == pytest.approx(eager, rel=1e-5)
    losses("mae", tmp_path, "parts", "train.compile=model", "train.stop_at=2")
    torch.compiler.reset()
    resumed = losses("mae", tmp_path, "parts", "train.compile=model", "train.stop_at=null")
    assert resumed == pytest.approx(compiled, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["mae", "simclr"])  # a transformer, and BatchNorm
@pytest.mark.parametrize("checkpointing", ["none", "blocks"])
def test_compiled_with_checkpointing(method: str, checkpointing: str, tmp_path: Path) -> None:
    more = f"parallel.activation_checkpointing={checkpointing}"
    torch._dynamo.reset()
    counters.clear()
    expected = losses(method, tmp_path, "eager", more)
    assert not counters["stats"]["unique_graphs"]
    actual = losses(method, tmp_path, "compiled", more, "train.compile=model", EAGER)
    assert counters["stats"]["unique_graphs"] > 0
    assert actual == pytest.approx(expected, rel=1e-5)


def on_rank(rank: int, folder: Path, out: str, *more: str) -> list[float]:
    numbers = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 2}
    os.environ.update({name: str(number) for name, number in numbers.items()})
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"})
    task: Any = tiny.task("mae", folder, out, *SMOOTH, *more)
    task.prepare()
    task.on_start()
    task.on_phase_start()
    results = []
    for _ in range(4):
        task.step()
        results.append(float(task.last_batch.loss))
    task.close()
    return results


@pytest.mark.slow
@pytest.mark.parametrize(
    "reduce",
    ["manual", "ddp", "fsdp", "{reduce: fsdp, activation_checkpointing: blocks}"],
)
def test_compiled_on_two_ranks(reduce: str, tmp_path: Path) -> None:
    tiny.digits_file(tmp_path)
    parallel = f"parallel={reduce}"
    expected = run_ranks(on_rank, 2, tmp_path, "eager", parallel)
    options = ("train.compile=model", EAGER)
    results = run_ranks(on_rank, 2, tmp_path, "compiled", parallel, *options)
    assert results[0] == pytest.approx(expected[0], rel=1e-5)
    assert results[0] == results[1]
