"""A small student with a teacher, trained by any way of reducing gradients; tests compare them."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from selftask.config.values.budget import Budget
from selftask.distributed.collectives import rank, world_size
from selftask.parallel.activation_budget import ActivationBudget
from selftask.parallel.activation_checkpointing import checkpoint_blocks
from selftask.parallel.blocks import find_blocks
from selftask.parallel.ddp import DDPReduction
from selftask.parallel.fsdp import FSDPReduction
from selftask.parallel.initial_weights import InitialWeights
from selftask.parallel.manual import ManualReduction
from selftask.parallel.reduction import Reduction

WAYS = ("manual", "ddp", "fsdp")
STEPS = 3
ON_CPU = InitialWeights(torch.device("cpu"))
BATCH = 8


class Block(nn.Module):
    """A residual block, which counts its forward passes."""

    passes = 0

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: Tensor, *, scale: float) -> Tensor:
        self.passes += 1
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
    early: bool = False,
    **more: Any,
) -> dict[str, Any]:
    """Some steps of a student, its teacher and a predictor that the network does not hold.

    With ``late``, the spare layer is used in the second step only; with ``early``, in the first.
    """
    torch.manual_seed(0)
    student = Student(spare=spare or late or early).double()
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
        student.use_spare = (late and step == 1) or (early and step == 0)
        for block in student.blocks:
            block.passes = 0  # type: ignore[assignment]
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
        # in the last step, a second time in the backward pass
        "recomputed": [block.passes == 4 * accumulate for block in student.blocks],
    }


def whole(x: Tensor | None) -> Tensor | None:
    if x is None:
        return None
    full: Any = x.full_tensor() if hasattr(x, "full_tensor") else x  # type: ignore[attr-defined]
    return full.detach().clone()
