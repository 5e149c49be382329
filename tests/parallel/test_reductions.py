"""Three ways of reducing gradients against each other and against one rank, in double precision."""

from __future__ import annotations

import copy
import io
import logging
import math
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ranks import run_ranks
from selftask.config.schema import ParallelConfig
from selftask.config.values.budget import Budget
from selftask.distributed.collectives import rank, world_size
from selftask.errors import RunError
from selftask.optim.gradients import clip_adaptively, clip_norm, clip_value, gradients
from selftask.optim.optimizers.lamb import LAMB
from selftask.optim.optimizers.larc import LARC
from selftask.optim.optimizers.lars import LARS
from selftask.optim.optimizers.lion import Lion
from selftask.optim.optimizers.schedule_free import ScheduleFreeAdamW
from selftask.parallel.activation_budget import ActivationBudget
from selftask.parallel.activation_checkpointing import checkpoint_blocks
from selftask.parallel.blocks import find_blocks
from selftask.parallel.build import build_reduction, synchronize
from selftask.parallel.ddp import DDPReduction
from selftask.parallel.fsdp import FSDPReduction
from selftask.parallel.initial_weights import InitialWeights
from selftask.parallel.manual import ManualReduction
from selftask.parallel.reduction import Reduction
from selftask.task import Task

WAYS = ("manual", "ddp", "fsdp")
STEPS = 3
ON_CPU = InitialWeights(torch.device("cpu"))
BATCH = 8


class Block(nn.Module):
    """Residual, with dropout: what is computed again must draw again what was drawn."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: Tensor, *, scale: float) -> Tensor:
        y: Tensor = x + scale * self.mlp(self.norm(x))
        return y


class Student(nn.Module):
    """Two passes through the same blocks, as in multi-crop; the spare layer is used on demand."""

    use_spare = False

    def __init__(self, *, spare: bool = False) -> None:
        super().__init__()
        self.stem = nn.Linear(5, 6)
        self.blocks = nn.ModuleList(Block(6) for _ in range(2))
        self.head = nn.Linear(6, 4)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        if spare:
            self.spare = nn.Linear(6, 4)

    def forward(self, views: list[Tensor]) -> Tensor:
        features = torch.stack([self.encode(view) for view in views])
        output: Tensor = self.head(features)
        return output + self.spare(features) if self.use_spare else output

    def encode(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x, scale=0.7)
        return x


def reduction(way: str, **more: Any) -> Reduction:
    """The one for two ranks; small buckets, so that there are several."""
    if world_size() == 1:
        return Reduction()
    if way == "ddp":
        return DDPReduction(bucket_mb=0.0005, **more)
    if way == "fsdp":
        return FSDPReduction(bucket_mb=0.0005, low_precision=None, **more)
    return ManualReduction(bucket_mb=0.0005, **more)


def data() -> Tensor:
    draws = torch.Generator().manual_seed(1)
    return torch.randn(STEPS, 2, BATCH, 5, dtype=torch.float64, generator=draws)


def train(
    way: str,
    *,
    checkpointing: bool | float = False,
    accumulate: int = 1,
    spare: bool = False,
    late: bool = False,
    **more: Any,
) -> dict[str, Any]:
    """Some steps of a student, its teacher and a predictor that the network does not hold.

    With ``late``, the spare layer is used in the second step only.
    """
    torch.manual_seed(0)
    student = Student(spare=spare or late).double()
    predictor = nn.Linear(4, 4).double()
    teacher = copy.deepcopy(student).requires_grad_(False)
    blocks = find_blocks(student)
    if checkpointing is True:
        checkpoint_blocks(blocks)
    has_budget = isinstance(checkpointing, float)
    budget = ActivationBudget(blocks if has_budget else [], Budget(checkpointing, "share"))
    sharing = reduction(way, **more)
    sharing.shard([student, teacher], ON_CPU)
    called = sharing.wrap(student)
    named = [(f"network.{name}", p) for name, p in student.named_parameters() if p.requires_grad]
    named += [(f"loss.{name}", p) for name, p in predictor.named_parameters()]
    groups = sharing.regroup([{"params": [p for _, p in named]}])
    optimizer = torch.optim.AdamW(groups, lr=0.05, foreach=True)
    sharing.register(named)
    losses, gradients = [], []
    mine = BATCH // world_size() // accumulate
    for step, views in enumerate(data()):
        student.use_spare = late and step == 1
        optimizer.zero_grad()
        loss = torch.zeros((), dtype=torch.float64)
        for part in range(accumulate):
            first = part * (BATCH // accumulate) + rank() * mine
            batch = [view[first : first + mine] for view in views]
            with nullcontext() if part == accumulate - 1 else sharing.no_sync():
                output = called(batch)
                target = teacher(batch)
                share = (predictor(output) - target.flip(0) - 1).square().mean() / accumulate
                share.backward()
            loss += share.detach()
        sharing.reduce()
        budget.finalize()
        gradients.append({name: whole(p.grad) for name, p in named})
        optimizer.step()
        with torch.no_grad():
            torch._foreach_lerp_(list(teacher.parameters()), list(student.parameters()), 0.1)
        losses.append(loss)
    optim = sharing.full_state(sharing.rearrange({"optim": optimizer.state_dict()}))["optim"]
    return {
        "losses": losses,
        "gradients": gradients,
        "student": {name: whole(p) for name, p in student.named_parameters()},
        "teacher": {name: whole(p) for name, p in teacher.named_parameters()},
        "predictor": predictor.state_dict(),
        "optimizer": optim if rank() == 0 else None,
        "recomputed": [getattr(block, "_is_recomputed", False) for block in blocks],
    }


def whole(x: Tensor | None) -> Tensor | None:
    if x is None:
        return None
    full: Any = x.full_tensor() if hasattr(x, "full_tensor") else x  # type: ignore[attr-defined]
    return full.detach().clone()


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
    *((way, {"late": True}) for way in ("manual", "fsdp")),
    ("ddp", {"late": True, "find_unused": True}),
]
RECOMPUTED = {False: [False, False], True: [True, True], 0.7: [True, False]}


def every_case(rank: int) -> list[dict[str, Any]]:
    return [train(way, **more) for way, more in CASES]


def test_all_ways_are_one_rank(told: list[dict[str, Any]]) -> None:
    """Losses, gradients, weights, teacher and optimizer state, at 1e-9 and in plain order."""
    ranks = [of_rank["every_case"] for of_rank in told]
    expected, late = train("manual"), train("manual", late=True)
    for result in (expected, late):
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
            assert_alike(late if "late" in more else expected, result, f"{way} {more}")


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
    told: dict[str, Any] = {}
    lines = io.StringIO()
    logging.getLogger("selftask").addHandler(logging.StreamHandler(lines))
    for way in WAYS:
        lines.truncate(0)
        try:
            told[way] = train(way, spare=True)["gradients"][0]["network.spare.weight"]
        except RunError as error:
            told[way] = str(error)
        told[f"{way} log"] = lines.getvalue()
    return told


def test_unused_parameters_have_names(told: list[dict[str, Any]]) -> None:
    for ways in (of_rank["unused"] for of_rank in told):
        assert "2 parameters without a gradient in the first step" in ways["ddp"]
        assert "network.spare.weight\n  network.spare.bias\n" in ways["ddp"]
        assert "parallel.reduce=manual" in ways["ddp"]
        for way in ("manual", "fsdp"):
            assert ways[way] is None, "as on one rank"
            assert "network.spare.weight\n  network.spare.bias\n" in ways[f"{way} log"]
    assert train("manual", spare=True)["gradients"][0]["network.spare.weight"] is None


def one_sided(rank: int) -> tuple[list[list[Tensor | None]], list[str]]:
    """Each step another parameter has a gradient on one rank only; one has none anywhere, once."""
    a, b, c = (nn.Parameter(torch.ones(3, dtype=torch.float64)) for _ in range(3))
    d = nn.Parameter(torch.ones(2))
    parameters = [a, b, c, d]
    sharing = ManualReduction(bucket_mb=1e-6)
    sharing.register([(name, p) for name, p in zip("abcd", parameters, strict=True)])
    seen = []
    for step in range(4):
        for p in parameters:
            p.grad = None
        loss = (a * (rank + 1.0)).sum() + (d.double() * 4 * rank).sum()
        if step % 2 == rank:
            loss = loss + (b * 6.0).sum()
        if step == 3 and rank == 1:
            loss = loss + (c * 2.0).sum()
        loss.backward()
        sharing.reduce()
        seen.append([None if p.grad is None else p.grad.clone() for p in parameters])
    strict = DDPReduction()
    strict.wrap(nn.ParameterList([a, b]))
    strict.register([("network.a", a), ("network.b", b)])
    a.grad, b.grad = torch.ones_like(a), torch.ones_like(b) if rank else None
    try:
        strict.reduce()
    except RunError as error:
        return seen, str(error).splitlines()
    return seen, []


def test_a_gradient_on_one_rank_only(told: list[dict[str, Any]]) -> None:
    for seen, message in (of_rank["one_sided"] for of_rank in told):
        for step, (a, b, c, d) in enumerate(seen):
            assert a.tolist() == [1.5] * 3
            assert b.tolist() == [3.0] * 3, "zero on the other rank"
            assert d.tolist() == [2.0] * 2
            assert c is None if step < 3 else c.tolist() == [1.0] * 3
        assert message[:2] == [
            "parameter without a gradient in the first step:",
            "  network.b (has one on 1 of 2 ranks)",
        ]


def second_backward(rank: int) -> str:
    weight = nn.Parameter(torch.ones(3))
    sharing = ManualReduction()
    sharing.register([("network.weight", weight)])
    (weight * 2).sum().backward()
    sharing.reduce()
    (weight * 2).sum().backward()
    try:
        (weight * 2).sum().backward()
    except RunError as error:
        return str(error)
    return ""


def compressed(rank: int) -> dict[str, Tensor]:
    """Sums in half the bytes; a gradient that is scaled for float16 stays in its range."""
    gradients = {}
    for compression in ("none", "fp16", "bf16"):
        weight = nn.Parameter(torch.ones(1000))
        sharing = ManualReduction(compression=compression)
        sharing.register([("weight", weight)])
        draws = torch.Generator().manual_seed(rank)
        weight.grad = torch.randn(1000, generator=draws) * 1e4
        sharing.reduce()
        gradients[compression] = weight.grad.clone()
    return gradients


def memory_format(rank: int) -> bool:
    """Gradients keep the strides of their parameters: optimizers are slow without."""
    conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    sharing = ManualReduction()
    sharing.register(list(conv.named_parameters()))
    conv(torch.ones(2, 3, 8, 8)).sum().backward()
    before = conv.weight.grad.clone()
    sharing.reduce()
    assert torch.allclose(conv.weight.grad, before)
    return conv.weight.grad.stride() == conv.weight.stride() != before.contiguous().stride()


def overlap(rank: int) -> list[int]:
    """How many buckets are on their way when the backward pass ends."""
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    sharing = ManualReduction(bucket_mb=1e-5)
    sharing.register(list(layers.named_parameters()))
    counts = []
    for step in range(3):
        layers.zero_grad()
        with sharing.no_sync() if step == 2 else nullcontext():
            layers(torch.ones(2, 4)).sum().backward()
        counts.append(sharing._next)
        sharing.reduce()
    return counts


def options_of_ddp(rank: int) -> dict[str, Any]:
    """What torch's DistributedDataParallel was given by a config."""
    config = ParallelConfig(reduce="ddp", find_unused=True, bucket_mb=0.125, static_graph=False)
    sharing = build_reduction(config, None)
    layer = nn.Linear(3, 2)
    network: Any = sharing.wrap(layer)
    sharing.register([(f"network.{name}", p) for name, p in layer.named_parameters()])
    network(torch.ones(1, 3)).sum().backward()
    sharing.reduce()
    ddp = network.network
    return {
        "type": type(ddp).__name__,
        "find_unused": ddp.find_unused_parameters,
        "bucket_bytes": ddp.bucket_bytes_cap,
        "broadcast_buffers": ddp.broadcast_buffers,
    }


def test_options_reach_ddp(told: list[dict[str, Any]]) -> None:
    for options in (of_rank["options_of_ddp"] for of_rank in told):
        assert options == {
            "type": "DistributedDataParallel",
            "find_unused": True,
            "bucket_bytes": 2**17,
            "broadcast_buffers": False,
        }


def synced_buffers(rank: int) -> dict[str, list[float]]:
    """A BatchNorm that saw other numbers on each rank, after ``parallel.buffers`` of each kind."""
    found = {}
    kinds: tuple[Any, ...] = ("broadcast", "mean")
    for kind in kinds:
        norm = nn.BatchNorm1d(2).double()
        for step in range(2 + rank):
            norm(torch.arange(8.0, dtype=torch.float64).reshape(4, 2) * (rank + 1) + step)
        parallel = ParallelConfig(buffers=kind)
        task: Any = SimpleNamespace(
            config=SimpleNamespace(parallel=parallel), networks=[norm.eval()]
        )
        own = norm.running_mean.tolist(), norm.running_var.tolist()
        Task.sync_buffers(task)
        seen = float(norm.num_batches_tracked)
        found[kind] = [*norm.running_mean.tolist(), *norm.running_var.tolist(), seen]
        found[f"{kind} own"] = [*own[0], *own[1], 2.0 + rank]
    return found


def test_buffers_are_those_of_the_first_rank_or_the_mean(told: list[dict[str, Any]]) -> None:
    first, second = (of_rank["synced_buffers"] for of_rank in told)
    assert first["mean own"][0] != second["mean own"][0], "the ranks differ before"
    own = [first["mean own"], second["mean own"]]
    mean = [(a + b) / 2 for a, b in zip(*own, strict=True)]
    for result in (first, second):
        assert result["broadcast"] == own[0]
        assert result["mean"][:4] == pytest.approx(mean[:4], rel=1e-12)
        assert result["mean"][4] == own[0][4], "a count is that of the first rank"


def details(rank: int) -> tuple[Any, ...]:
    return second_backward(rank), compressed(rank), memory_format(rank), overlap(rank)


def test_details_of_manual_reduction(told: list[dict[str, Any]]) -> None:
    for message, reduced, kept, counts in (of_rank["details"] for of_rank in told):
        assert "a second backward pass" in message
        assert "network.weight" in message
        assert "task.no_sync()" in message
        exact = reduced["none"]
        for compression, error in (("fp16", 1.5e-3), ("bf16", 1.2e-2)):
            assert not torch.equal(reduced[compression], exact)
            assert torch.allclose(reduced[compression], exact, rtol=0, atol=error * 4e4)
        assert kept
        assert counts == [0, 8, 0]


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


def optimizers(rank: int) -> dict[str, list[Tensor]]:
    """Norms of sharded parameters are those of whole ones, in clipping and in optimizers."""
    copies: dict[str, Any] = {"shard_over": 1}
    ways: list[tuple[str, dict[str, Any]]] = [("manual", {}), ("fsdp", {}), ("fsdp", copies)]
    return {name: [_one_update(name, way, **more) for way, more in ways] for name in KINDS}


KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "lars": (LARS, {"trust_coefficient": 0.1}),
    "larc": (LARC, {"trust_coefficient": 0.1}),
    "lamb": (LAMB, {}),
    "lion": (Lion, {}),
    "schedule_free": (ScheduleFreeAdamW, {"interpolation": 0.5, "beta2": 0.9, "eps": 1e-8}),
}


def _one_update(name: str, way: str, **more: Any) -> Tensor:
    torch.manual_seed(0)
    student = Student().double()
    sharing = reduction(way, **more)
    sharing.shard([student], ON_CPU)
    named = [(n, p) for n, p in student.named_parameters() if p.requires_grad]
    sharing.register(named)
    groups = sharing.regroup([{"params": [p for _, p in named], "lr": 1.0, "weight_decay": 0.1}])
    kind, options = KINDS[name]
    optimizer = kind(groups, **options)
    sharing.wrap(student)(list(data()[0])).square().mean().backward()
    sharing.reduce()
    parameters = [p for _, p in named]
    for order in (1.0, math.inf):
        clip_norm(gradients(parameters), 0.05, p=order, each=order == 1.0)
    clip_adaptively(parameters, 0.05)
    clip_value(gradients(parameters), 0.01)
    optimizer.step()
    if hasattr(optimizer, "eval"):
        optimizer.eval()
    return torch.cat([whole(p).flatten() for _, p in named])


@pytest.mark.parametrize("name", KINDS)
def test_optimizers_of_sharded_parameters(name: str, told: list[dict[str, Any]]) -> None:
    for manual, *sharded in (of_rank["optimizers"][name] for of_rank in told):
        for fsdp in sharded:
            torch.testing.assert_close(manual, fsdp, rtol=1e-9, atol=1e-12)


class Narrow(nn.Module):
    """A linear layer, with BatchNorm or without; keeps the type of the weights in use."""

    def __init__(self, *, norm: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6) if norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.linear.weight.dtype
        y: Tensor = self.norm(self.linear(x.to(self.seen)))
        return y


def low_precision(rank: int) -> dict[str, Any]:
    """Types of the weights of two blocks and of the head in the forward pass, and of gradients."""
    network = nn.Module()
    network.blocks = nn.ModuleList([Narrow(norm=False), Narrow(norm=True)])
    sharing = FSDPReduction(low_precision=torch.bfloat16)
    sharing.shard([network], ON_CPU)
    x = torch.randn(4, 6)
    for block in network.blocks:
        x = block(x)
    x.square().sum().backward()
    grads = [p.grad for p in network.parameters()]
    return {
        "seen": [block.seen for block in network.blocks],
        "statistics": network.blocks[1].norm.running_mean.dtype,
        "gradients": {grad.dtype for grad in grads if grad is not None},
        "kept": {p.dtype for p in network.parameters()},
    }


def test_blocks_with_batch_norm_stay_in_float32(told: list[dict[str, Any]]) -> None:
    for found in (of_rank["low_precision"] for of_rank in told):
        assert found["seen"] == [torch.bfloat16, torch.float32]
        assert found["statistics"] == torch.float32
        assert found["gradients"] == found["kept"] == {torch.float32}


ON_RANKS = (
    *(every_case, unused, one_sided, details, optimizers),
    *(options_of_ddp, synced_buffers, low_precision),
)
