"""``parallel.meta_init``: the same run bit for bit, with a whole network on the first rank only."""

from __future__ import annotations

import math
import tempfile
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import tiny
from ranks import run_ranks
from selftask.config.schema import DEFAULT_HOOKS, Config, ParallelConfig
from selftask.data.loading.open_data import open_data
from selftask.distributed.collectives import barrier, gather_objects, rank, world_size
from selftask.distributed.world import World
from selftask.errors import UserError
from selftask.models.build import build_backbone
from selftask.models.weights import model_source
from selftask.parallel.fsdp import FSDPReduction
from selftask.parallel.initial_weights import InitialWeights, MetaInit, find_strays
from selftask.random import process_state
from selftask.registry import METHODS
from selftask.task import Task, build

STEPS = 3
QUIET = [f"hooks.{name}=null" for name in DEFAULT_HOOKS]
COMPARED = ("model", "method", "optimizer", "clock", "rng")


def small_config(method: str, folder: Path, *words: str) -> Config:
    return tiny.config(method, folder, f"out{rank()}", *QUIET, *words)


def prepared(config: Config, backbone: nn.Module | None = None, **options: Any) -> Task:
    """A task of these ranks under FSDP, before its first step."""
    torch.set_num_threads(1)
    parallel = ParallelConfig(reduce="fsdp", **options)
    config = replace(config, parallel=parallel)
    task = Task(config, sources=open_data(config.data), backbone=backbone)
    task.world = World(rank(), world_size(), rank(), world_size())
    task.prepare()
    return task


def parts(task: Task) -> dict[str, Any]:
    """Every tensor of this rank, buffers outside of the state too, and the marks of parameters."""
    results: dict[str, Any] = {}
    for kind, module in (("network", task.base_model), ("method", task.loss)):
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            results[f"{kind}.{name}"] = local.detach().clone()
            results[f"of {kind}.{name}"] = (tensor.requires_grad, tensor.stride(), tensor.shape)
    return results


def run(method: str, folder: Path, *words: str, **options: Any) -> dict[str, Any]:
    """What the task begins with on this rank, generators included, and what some steps make of it.

    Generators are those just after building: later ones are seeded for each rank.
    """
    seen: dict[str, Any] = {}
    make_optimizers, shard = build.optimizers, FSDPReduction.shard

    def optimizers(task: Task) -> Any:
        seen["generators"] = process_state.rng_state()
        return make_optimizers(task)

    def watched(self: FSDPReduction, networks: Any, initial: InitialWeights) -> None:
        networks = list(networks)
        seen["on_meta"] = [p.is_meta for network in networks for p in network.parameters()]
        shard(self, networks, initial)

    with (
        mock.patch.object(build, "optimizers", optimizers),
        mock.patch.object(FSDPReduction, "shard", watched),
    ):
        task = prepared(small_config(method, folder, *words), **options)
    on_meta = seen.pop("on_meta")
    assert set(on_meta) == {bool(options["meta_init"] and rank())}
    seen["begin"] = parts(task)
    task.on_start()
    task.on_phase_start()
    seen["losses"] = []
    for _ in range(STEPS):
        task.step()
        seen["losses"].append(task.last_batch.loss)
    state = task.state_dict()
    task.close()
    return {**seen, **{key: state[key] for key in COMPARED}}


def with_and_without(method: str, folder: Path, *words: str, **options: Any) -> list[str]:
    """Where the two runs of this rank differ; nowhere."""
    plain = run(method, folder, *words, meta_init=False, **options)
    meta = run(method, folder, *words, meta_init=True, **options)
    assert all(math.isfinite(float(loss)) for loss in meta["losses"])
    return tiny.differences(plain, meta)


def in_turn(_: int, folder: Path, cases: list[Any]) -> list[Any]:
    """For each case (method, words, options) the differences, or the traceback."""
    results: list[Any] = []
    for method, words, options in cases:
        try:
            results.append(with_and_without(method, folder, *words, **options))
        except Exception:  # noqa: BLE001 - told by the parent, beside the other cases
            results.append(traceback.format_exc())
    return results


def starts(_: int) -> tuple[list[str], int]:
    """With a teacher, BatchNorm, a queue, and weights from a file: differences, and reads of it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(gather_objects(name)[0])
        config = small_config("moco", folder)
        torch.manual_seed(5)
        file = folder / "weights.pt"
        if rank() == 0:
            torch.save(build_backbone(config.backbone).state_dict(), file)
        barrier()
        read = mock.Mock(wraps=model_source.read_weights)
        with mock.patch.object(model_source, "read_weights", read):
            actual = with_and_without("moco", folder, f"init.backbone={file}")
        barrier()  # before the folder goes
        return actual, read.call_count


def test_a_run_begins_and_goes_on_with_the_same_bits(rank_results: list[dict[str, Any]]) -> None:
    (first, reads), (second, reads_of_other) = (report["starts"] for report in rank_results)
    assert (first, second) == ([], [])
    assert (reads, reads_of_other) == (2, 1), "without meta_init both ranks read the file"


class Tied(nn.Module):
    """Shares a parameter between two layers, and has a mark on it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.first.weight.mark = "kept"  # type: ignore[attr-defined]
        self.first.bias.requires_grad_(False)
        self.register_buffer("positions", torch.randn(4), persistent=False)
        self.register_buffer("nothing", None)


def materialized(_: int) -> dict[str, Any]:
    """A module received from the first rank."""
    initial = MetaInit(torch.device("cpu"))
    torch.manual_seed(rank())
    with initial.building():
        module = Tied()
    assert module.first.weight.is_meta == bool(rank())
    initial.materialize(module)
    again = dict(module.named_parameters())
    initial.materialize(module)  # nothing is received twice
    assert all(again[name] is p for name, p in module.named_parameters())
    weight: Any = module.first.weight
    return {
        "tied": weight is module.second.weight,
        "mark": weight.mark,
        "trained": [p.requires_grad for p in module.parameters()],
        "values": {name: t.detach().clone() for name, t in module.named_parameters()},
        "positions": module.positions,
    }


def test_ties_marks_and_buffers_survive(rank_results: list[dict[str, Any]]) -> None:
    first, second = (report["materialized"] for report in rank_results)
    torch.manual_seed(0)
    expected = Tied()
    assert first["tied"] and second["tied"]
    assert (first["mark"], second["mark"]) == ("kept", "kept")
    assert first["trained"] == second["trained"] == [True, False, True]
    assert tiny.differences(first, second) == []
    assert torch.equal(second["positions"], expected.positions)  # type: ignore[arg-type]
    assert torch.equal(second["values"]["second.bias"], expected.second.bias)


def errors(_: int) -> dict[str, str]:
    """What a user reads if something cannot be built."""
    results: dict[str, str] = {}

    def value() -> None:
        nn.Parameter(torch.zeros(3)).sum().item()

    def first_only() -> None:
        if rank() == 0:
            raise UserError("init.backbone: no such file")

    def bug() -> None:
        raise ZeroDivisionError("of the method")

    for act in (value, first_only, bug):
        try:
            with MetaInit(torch.device("cpu")).building():
                act()
        except Exception as error:  # noqa: BLE001 - compared below
            results[act.__name__] = f"{type(error).__name__}: {error}"
    initial = MetaInit(torch.device("cpu"))
    with initial.building():
        module = nn.Sequential(nn.Linear(2, 2))
        module[0].tables = {"rows": [torch.zeros(2)]}  # type: ignore[assignment]
    try:
        initial.broadcast([module])
    except UserError as error:
        results["strays"] = str(error)
    return results


def test_what_cannot_be_built_is_said_on_every_rank(rank_results: list[dict[str, Any]]) -> None:
    first, second = (report["errors"] for report in rank_results)
    for texts in (first, second):
        assert "parallel.meta_init=true: backbone or method cannot be built" in texts["value"]
        assert texts["value"].endswith("use parallel.meta_init=false")
        assert "0.tables" in texts["strays"] and "register_buffer" in texts["strays"]
    assert first["first_only"] == "UserError: init.backbone: no such file"
    assert second["first_only"] == "UserError: rank 0: init.backbone: no such file"
    assert first["bug"] == "ZeroDivisionError: of the method"
    assert second["bug"] == "RunError: rank 0: ZeroDivisionError: of the method"


def test_strays_are_tensors_without_memory_in_plain_attributes() -> None:
    module = nn.Sequential(nn.Linear(2, 2, device="meta"))
    assert find_strays(module) == []
    module.grid = torch.zeros(2)  # type: ignore[assignment]
    assert find_strays(module) == []
    module[0].grid = (1, torch.zeros(2, device="meta"))  # type: ignore[assignment]
    assert find_strays(module) == ["0.grid"]


ON_RANKS = (starts, materialized, errors)


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("shard_over=1",), ("cpu_offload", "prefetch=1")])
def test_every_method_begins_with_the_same_bits(more: tuple[str, ...], tmp_path: Path) -> None:
    """All methods plainly; one with hybrid sharding and one with offloading."""
    tiny.digits_file(tmp_path)
    options: dict[str, Any] = {}
    for word in more:
        key, _, number = word.partition("=")
        options[key] = int(number) if number else True
    names = ["dinov2", "moco"] if more else METHODS.names()
    cases = [(name, (), {"sync_batch_norm": "all", **options}) for name in names]
    for results in run_ranks(in_turn, 2, tmp_path, cases):
        assert dict(zip(names, results, strict=True)) == {name: [] for name in names}


class Shy(nn.Module):
    """A user's backbone, given as an object: with memory on every rank, and no ``embed_dim``."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, images: Tensor) -> Tensor:
        return self.conv(images).mean((2, 3))


def of_an_object(_: int, folder: Path) -> Tensor:
    torch.manual_seed(7 + rank())
    task = prepared(small_config("simclr", folder), Shy(), meta_init=True)
    weight: Any = task.base_model.backbone.conv.weight
    task.close()
    whole: Tensor = weight.full_tensor()
    return whole


@pytest.mark.slow
def test_a_given_module_starts_from_the_weights_of_the_first_rank(tmp_path: Path) -> None:
    tiny.digits_file(tmp_path)
    torch.manual_seed(7)
    expected = Shy().conv.weight.detach()
    for weight in run_ranks(of_an_object, 2, tmp_path):
        assert torch.equal(weight.detach(), expected)
