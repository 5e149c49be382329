"""Networks compiled by torch: the same runs as eager ones, whole, in blocks, and on two ranks."""

from __future__ import annotations

import os
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo import register_backend
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters

import tiny
from ranks import run_ranks
from selftask.config.load import load_config
from selftask.config.schema import CompileConfig
from selftask.errors import ConfigError, UserError
from selftask.parallel.compiled import compile_blocks, compile_function
from selftask.task.compile_report import CompileReport
from selftask.train_steps import compiled as compiled_step

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

    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(width, width), nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.norm(self.linear(x))
        return result


def report_of(network: nn.Module) -> None:
    report = CompileReport()
    compiled = compile_function(network, CompileConfig(backend="eager"))
    for _ in range(3):
        compiled(torch.ones(2, 3))
        report.on_step(None)  # type: ignore[arg-type]  # does not look at the task


def texts(caplog: pytest.LogCaptureFixture) -> list[str]:
    ours = [record for record in caplog.records if record.name.startswith("selftask")]
    caplog.clear()
    return [record.getMessage() for record in ours]


def test_graphs_and_fallbacks_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "selftask")
    report_of(nn.Linear(3, 3))
    assert texts(caplog) == ["compile: 1 graph"]
    report_of(Disabled())
    assert texts(caplog) == ["compile: no graph was made, the network runs eagerly"]


@pytest.mark.skipif(torch.__version__ < "2.11", reason="torch 2.10 counts no breaks at an `if`")
def test_graph_breaks_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "selftask")
    report_of(Breaking())
    graphs, breaks = texts(caplog)
    assert graphs == "compile: 2 graphs"
    assert "1 graph break" in breaks
    assert "test_compile.py" in breaks


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
def test_contradictory_compile_options_are_refused(options: list[str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        load_config("simclr/digits", options)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["backend: inductor, mode: reduce-overhed"], "did you mean 'reduce-overhead'"),
        (["backend: aot_eager, mode: max-autotune"], "not of aot_eager"),
        (["mode: reduce-overhead", "parallel.reduce=fsdp"], "gathers them anew"),
        (["mode: max-autotune", "parallel.activation_checkpointing=blocks"], "single blocks"),
    ],
)
@pytest.mark.parametrize("way", ["train.compile=model", "train.step=compiled"])
def test_modes_that_cannot_work_are_refused(options: list[str], text: str, way: str) -> None:
    words = [f"train.compile_options={{{options[0]}}}", *options[1:], way]
    with pytest.raises(ConfigError, match=text) as caught:
        load_config("mae/digits", words)
    assert all("\n" not in line for line in caught.value.problems)


def test_an_unknown_backend_is_refused_when_the_network_is_built() -> None:
    with pytest.raises(UserError, match=r"backend='aot_eagr': .* did you mean 'aot_eager'"):
        compile_function(nn.Linear(3, 3), CompileConfig(backend="aot_eagr"))


def test_blocks_of_other_layers_and_of_teachers_have_graphs_of_their_own() -> None:
    """torch compiles the same code at most 8 times."""
    networks = [nn.Sequential(*(Pair(width) for width in (3, 3, 4))) for _ in range(2)]
    networks[1].requires_grad_(False)
    for network in networks:
        assert compile_blocks(network, CompileConfig(backend="eager"))
    kinds = [[type(block) for block in network] for network in networks]
    assert kinds[0][0] is kinds[0][1] is not kinds[0][2]
    assert not set(kinds[0]) & set(kinds[1])
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=1, fail_on_recompile_limit_hit=True):
        for network in networks:
            for block in network:
                assert block(torch.ones(2, block.linear.in_features)).shape[0] == 2
    assert not compile_blocks(nn.Linear(3, 3), CompileConfig(backend="eager"))


# -- CUDA graphs, imagined -------------------------------------------------------------------------


class Overwriting:
    """Backend whose outputs are overwritten when the first graph of the next step runs.

    CUDA graphs do so: outputs lie in memory that a replay uses again. ``mark`` begins a step.
    """

    def __init__(self) -> None:
        self.step = self.step_of_outputs = self.overwritten = 0
        self.outputs: list[torch.Tensor] = []  # of the graphs of a step

    def mark(self) -> None:
        self.step += 1

    def __call__(self, graph: Any, inputs: Any, **options: Any) -> Any:
        return aot_autograd(fw_compiler=self.compile)(graph, inputs)

    def compile(self, graph: Any, inputs: Any) -> Any:
        @torch.no_grad()
        def run(*args: Any) -> Any:
            if self.step_of_outputs != self.step:
                self.overwrite()
            outputs = graph(*args)
            theirs = {arg.untyped_storage()._cdata for arg in args if isinstance(arg, torch.Tensor)}
            self.outputs += [
                output.detach()
                for output in outputs
                if isinstance(output, torch.Tensor)
                and output.untyped_storage()._cdata not in theirs
            ]
            return outputs

        return make_boxed_func(run)

    def overwrite(self) -> None:
        for output in self.outputs:
            output.fill_(float("nan") if output.is_floating_point() else 1)
        self.overwritten += len(self.outputs)
        self.outputs, self.step_of_outputs = [], self.step


def state_of(method: str, folder: Path, out: str, *more: str) -> dict[str, Any]:
    torch._dynamo.reset()
    compiled_step._compiled.cache_clear()
    task = tiny.train(method, folder, out, "train.max_steps=4", *more)
    kept = tiny.last_state(folder / out) | {"rows": tiny.rows(folder / out)}
    kept["losses"] = torch.stack(task.losses)
    kept["hooks"].pop("recorded_graphs", None)  # it has no state
    return kept


# a queue, an average of scores, a memory of clusters; several batches and passes a step; a meter
GRAPHS = {
    "moco": ["train.log_every=2"],
    "dino": ["train.log_every=3", "hooks.ema={}"],
    "data2vec": ["train.step=accumulate", "train.accumulate=2", "backbone.drop_path=0.2"],
    "supervised": [
        *("train.log_every=4", "meters.precision={name: mean_average_precision}"),
        *("data.val={data}", "eval.test_every=1", "hooks.train_meters={}"),
    ],
    "simclr": ["train.step=compiled", "train.log_every=4"],
}


@pytest.mark.slow
@pytest.mark.parametrize("method", GRAPHS)
def test_what_is_kept_across_steps_is_no_output_of_a_cuda_graph(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses between two log points, queues, centers, memories, meters, pending teacher outputs."""
    options = [word.replace("{data}", str(tiny.digits_file(tmp_path))) for word in GRAPHS[method]]
    is_step = any("compiled" in word for word in options)
    options += [EAGER] if is_step else [EAGER, "train.compile=model"]
    expected = state_of(method, tmp_path, "expected", *options)
    backend = Overwriting()
    monkeypatch.setattr(torch, "compile", partial(compiled_by, torch.compile, backend))
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", backend.mark)
    monkeypatch.setattr(CompileConfig, "records_graphs", True)
    actual = state_of(method, tmp_path, "actual", *options)
    assert backend.overwritten > 10
    assert tiny.differences(actual, expected) == []
    assert actual["losses"].isfinite().all()


def compiled_by(compiler: Any, ours: Any, function: Any, **options: Any) -> Any:
    return compiler(function, **options | {"backend": ours})


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
