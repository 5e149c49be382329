"""Three ways of reducing gradients against each other and against one rank, in double precision."""

from __future__ import annotations

import io
import logging
from typing import Any

import pytest
import torch
from small_student import ON_CPU, WAYS, Student, train
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from ranks import run_ranks
from selftask.config.schema import ParallelConfig
from selftask.errors import RunError
from selftask.parallel.build import build_reduction, synchronize
from selftask.parallel.reduction import Reduction

CASES: list[tuple[str, dict[str, Any]]] = [
    ("manual", {}),
    ("ddp", {}),
    ("ddp", {"static_graph": True}),
    ("ddp", {"find_unused": True}),
    ("fsdp", {}),
    ("fsdp", {"shard_over": 1}),
    ("fsdp", {"cpu_offload": True, "accumulate": 2}),
    ("fsdp", {"prefetch": 2, "checkpointing": True}),
    *((way, {"checkpointing": True}) for way in WAYS),
    *((way, {"checkpointing": 0.7}) for way in WAYS),
    *((way, {"accumulate": 2}) for way in WAYS),
    *((way, {when: True}) for way in ("manual", "fsdp") for when in ("late", "early")),
    *(("ddp", {when: True, "find_unused": True}) for when in ("late", "early")),
]
RECOMPUTED = {False: [False, False], True: [True, True], 0.7: [True, False]}


def every_case(rank: int) -> list[dict[str, Any]]:
    return [train(way, **more) for way, more in CASES]


def test_all_ways_are_one_rank(rank_results: list[dict[str, Any]]) -> None:
    """Losses, gradients, weights, teacher and optimizer state, at 1e-9 and in plain order."""
    ranks = [of_rank["every_case"] for of_rank in rank_results]
    expected, late, early = train("manual"), train("manual", late=True), train("manual", early=True)
    for result in (expected, late, early):
        del result["recomputed"]
    alone = train("manual", checkpointing=True)
    assert alone.pop("recomputed") == RECOMPUTED[True]
    assert_alike(expected, alone)
    for (way, more), first, second in zip(CASES, *ranks, strict=True):
        first["losses"] = [
            (a + b) / 2 for a, b in zip(first["losses"], second["losses"], strict=True)
        ]
        second.update(losses=first["losses"], optimizer=first["optimizer"])
        for result in (first, second):
            assert result.pop("recomputed") == RECOMPUTED[more.get("checkpointing", False)]
            same = late if "late" in more else early if "early" in more else expected
            assert_alike(same, result, f"{way} {more}")


def two_copies(rank: int) -> list[dict[str, Any]]:
    return [train("fsdp", shard_over=n, cpu_offload=n == 2) for n in (2, 4)]


@pytest.mark.slow
def test_two_copies_of_two_shards_are_one_rank() -> None:
    expected = train("manual")
    for of_run in zip(*run_ranks(two_copies, 4), strict=True):
        for result in of_run:
            for key in ("gradients", "student", "teacher", "predictor"):
                assert_alike(expected[key], result[key], key)


def assert_alike(a: Any, b: Any, place: str = "") -> None:
    if isinstance(a, Tensor):
        torch.testing.assert_close(b, a, rtol=1e-9, atol=1e-12, msg=lambda m: f"{place}: {m}")
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), place
        for key in a:
            assert_alike(a[key], b[key], f"{place} {key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), place
        for number, pair in enumerate(zip(a, b, strict=True)):
            assert_alike(*pair, f"{place} {number}")
    else:
        assert a == b, place


def unused(rank: int) -> dict[str, Any]:
    results: dict[str, Any] = {}
    lines = io.StringIO()
    logging.getLogger("selftask").addHandler(logging.StreamHandler(lines))
    for way in WAYS:
        lines.truncate(0)
        try:
            results[way] = train(way, spare=True)["gradients"][0]["network.spare.weight"]
        except RunError as error:
            results[way] = str(error)
        results[f"{way} log"] = lines.getvalue()
    return results


def test_unused_parameters_have_names(rank_results: list[dict[str, Any]]) -> None:
    for ways in (of_rank["unused"] for of_rank in rank_results):
        assert "2 parameters without a gradient in the first step" in ways["ddp"]
        assert "network.spare.weight\n  network.spare.bias\n" in ways["ddp"]
        assert "parallel.reduce=manual" in ways["ddp"]
        for way in ("manual", "fsdp"):
            assert ways[way] is None, "as on one rank"
            assert "network.spare.weight\n  network.spare.bias\n" in ways[f"{way} log"]
    assert train("manual", spare=True)["gradients"][0]["network.spare.weight"] is None


class OptionalPart(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.spare = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x: Tensor, *, whole: bool) -> Tensor:
        return self.used(x) + self.spare(x) if whole else self.used(x)


def unused_later(rank: int) -> list[str]:
    """The errors of DDP in three steps, in the last of which a layer is not used."""
    sharing, layers, errors = (
        build_reduction(ParallelConfig(reduce="ddp"), None),
        OptionalPart(),
        [],
    )
    network: Any = sharing.wrap(layers)
    sharing.register([(f"network.{name}", p) for name, p in layers.named_parameters()])
    for whole in (True, True, False):
        for parameter in layers.parameters():
            parameter.grad = None
        network(torch.ones(1, 3), whole=whole).sum().backward()
        try:
            sharing.reduce()
        except RunError as error:
            errors.append(str(error))
    return errors


def test_parameters_that_a_later_step_does_not_use_have_names(
    rank_results: list[dict[str, Any]],
) -> None:
    for (error,) in (of_rank["unused_later"] for of_rank in rank_results):
        names = "network.spare.weight, network.spare.bias"
        assert error.startswith(f"no gradient in this step: {names}\nparallel.reduce=ddp waits")


def options_of_ddp(rank: int) -> dict[str, Any]:
    """What torch's DistributedDataParallel was given by a config."""
    return {
        "unused": _options_of_ddp(find_unused=True, bucket_mb=0.125),
        "static": _options_of_ddp(static_graph=True, bucket_mb=0.25),
    }


def _options_of_ddp(**options: Any) -> dict[str, Any]:
    sharing = build_reduction(ParallelConfig(reduce="ddp", **options), None)
    layer = nn.Linear(3, 2)
    network: Any = sharing.wrap(layer)
    sharing.register([(f"network.{name}", p) for name, p in layer.named_parameters()])
    network(torch.ones(1, 3)).sum().backward()
    sharing.reduce()
    ddp = network.network
    return {
        "type": type(ddp).__name__,
        "find_unused": ddp.find_unused_parameters,
        "static_graph": ddp.static_graph,
        "bucket_bytes": ddp.bucket_bytes_cap,
        "broadcast_buffers": ddp.broadcast_buffers,
    }


def test_options_reach_ddp(rank_results: list[dict[str, Any]]) -> None:
    for options in (of_rank["options_of_ddp"] for of_rank in rank_results):
        common = {"type": "DistributedDataParallel", "broadcast_buffers": False}
        unused = {"find_unused": True, "static_graph": False, "bucket_bytes": 2**17}
        static = {"find_unused": False, "static_graph": True, "bucket_bytes": 2**18}
        assert options == {"unused": common | unused, "static": common | static}


def options_of_fsdp(rank: int) -> dict[str, Any]:
    """What torch's FSDP was given by a config, for a network and its teacher."""
    results: dict[str, Any] = {}
    cases: dict[str, dict[str, Any]] = {
        "plain": {},
        "copies": {"shard_over": 1, "cpu_offload": True, "prefetch": 1},
    }
    for name, options in cases.items():
        sharing = build_reduction(ParallelConfig(reduce="fsdp", **options), torch.bfloat16)
        networks = [Student(), Student()]
        sharing.shard(networks, ON_CPU)
        states = [part._get_fsdp_state() for part in networks[0].modules() if _is_sharded(part)]
        groups = [state._fsdp_param_group for state in states]
        results[name] = {
            "parts": [
                [n for n, part in net.named_modules() if _is_sharded(part)] for net in networks
            ],
            "mesh": tuple(networks[0].head.weight.device_mesh.shape),
            "rows here": [len(net.head.weight.to_local()) for net in networks],
            "offload": {type(group.offload_policy).__name__ for group in groups},
            "forward": {state._mp_policy.param_dtype for state in states},
            "reduced": {state._mp_policy.reduce_dtype for state in states},
            "ahead": [len(state._states_to_forward_prefetch) for state in states],
        }
    return results


def _is_sharded(part: nn.Module) -> bool:
    return isinstance(part, FSDPModule)


def test_options_reach_fsdp(rank_results: list[dict[str, Any]]) -> None:
    for options in (of_rank["options_of_fsdp"] for of_rank in rank_results):
        common = {
            "parts": [["", "blocks.0", "blocks.1"]] * 2,
            "forward": {torch.bfloat16},
            "reduced": {torch.float32},
        }
        halves = {"mesh": (2,), "rows here": [2, 2], "offload": {"OffloadPolicy"}}
        copies = {"mesh": (2, 1), "rows here": [4, 4], "offload": {"CPUOffloadPolicy"}}
        assert options["plain"] == common | halves | {"ahead": [0, 0, 0]}
        assert options["copies"] == common | copies | {"ahead": [1, 1, 0]}


def test_nothing_on_one_rank() -> None:
    """No hook, no copy, no wrapper."""
    for way in WAYS:
        sharing = build_reduction(ParallelConfig(reduce=way), None)  # type: ignore[arg-type]
        assert type(sharing) is Reduction
        network = Student()
        assert sharing.wrap(network) is network
        sharing.register(list(network.named_parameters()))
        assert all(p._post_accumulate_grad_hooks is None for p in network.parameters())
        state = network.state_dict()
        assert sharing.full_state(state) is state
    norm = nn.Sequential(nn.BatchNorm1d(3))
    synchronize(ParallelConfig(sync_batch_norm="all"), [norm])
    assert type(norm[0]) is nn.BatchNorm1d


ON_RANKS = (every_case, unused, unused_later, options_of_ddp, options_of_fsdp)
