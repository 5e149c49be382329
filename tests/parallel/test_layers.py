"""Blocks, activation checkpointing and BatchNorm over ranks, against torch's own BatchNorm."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from small_student import whole
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.modules._functions import SyncBatchNorm as SyncBatchNormFunction

import selftask.parallel.build as parallel_build
import selftask.task.build as task_build
import tiny
from ranks import run_ranks
from selftask.config.schema import Component, ParallelConfig
from selftask.distributed.collectives import world_size
from selftask.errors import UserError
from selftask.models.build import build_backbone
from selftask.models.network import Network
from selftask.parallel import rank_groups as groups_module
from selftask.parallel import sync_batch_norm
from selftask.parallel.activation_checkpointing import checkpoint_blocks
from selftask.parallel.blocks import find_blocks
from selftask.parallel.build import build_reduction, save_activations, synchronize
from selftask.parallel.initial_weights import InitialWeights
from selftask.parallel.rank_groups import rank_groups
from selftask.parallel.reduction import Reduction
from selftask.parallel.sync_batch_norm import (
    Ranks,
    SyncBatchNorm,
    form_groups,
    synchronize_batch_norm,
)
from selftask.registry import BACKBONES


@pytest.mark.parametrize(
    ("name", "args", "names"),
    [
        ("vit_micro", {"depth": 2}, ["blocks.0", "blocks.1"]),
        ("small_resnet", {"width": 4, "blocks": 2}, [f"stages.{i}" for i in range(6)]),
        ("resnet18", {}, [f"layer{i}.{j}" for i in (1, 2, 3, 4) for j in (0, 1)]),
        ("torchvision", {"model": "efficientnet_b0"}, None),
        ("torchvision", {"model": "swin_t"}, None),
        ("torchvision", {"model": "regnet_y_400mf"}, None),
        ("timm", {"model": "convnext_atto"}, None),
        ("timm", {"model": "swin_tiny_patch4_window7_224"}, None),
    ],
)
def test_what_a_block_is(name: str, args: dict[str, Any], names: list[str] | None) -> None:
    on_meta = names is None and "regnet" not in args["model"]  # it computes its widths by tensors
    with torch.device("meta" if on_meta else "cpu"):
        component = Component(name=name, args=args)
        backbone = BACKBONES[name](**component.args).build()
    blocks = find_blocks(backbone)
    place = {module: key for key, module in backbone.named_modules()}
    if names is not None:
        assert [place[block] for block in blocks] == names
    else:  # the repeated part, as its class says, and all of it
        kinds = {"efficientnet_b0": "MBConv", "swin_t": "SwinTransformerBlock"}
        kinds |= {"regnet_y_400mf": "ResBottleneckBlock"}
        kinds |= {
            "convnext_atto": "ConvNeXtBlock",
            "swin_tiny_patch4_window7_224": "SwinTransformerBlock",
        }
        kind = kinds[args["model"]]
        every = [m for m in backbone.modules() if type(m).__name__ == kind]
        assert [b for b in blocks if type(b).__name__ == kind] == every
        assert len(blocks) <= len(every) + 4
    assert find_blocks(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))) == []


def regnet(rank: int) -> dict[str, Any]:
    """Gradients of a RegNet: of two ranks in recomputed shards, or of one with the whole batch."""
    torch.manual_seed(0)
    network = BACKBONES["torchvision"](model="regnet_y_400mf").build().double()
    images, weights = torch.randn(8, 3, 32, 32).double(), torch.randn(8, 440).double()
    parts = world_size()
    if parts > 1:
        synchronize(ParallelConfig(sync_batch_norm="all"), [network])
        save_activations(ParallelConfig(activation_checkpointing="blocks"), network)
    sharing = build_reduction(ParallelConfig(reduce="fsdp"), None)
    sharing.shard([network], InitialWeights(torch.device("cpu")))
    sharing.register(list(network.named_parameters()))
    (network(images.chunk(parts)[rank]) * weights.chunk(parts)[rank]).mean().backward()
    sharing.reduce()
    sharded = [part for part in network.modules() if isinstance(part, FSDPModule)]
    names = [type(part).__name__ for part in sharded]
    gradients = {name: whole(p.grad) for name, p in network.named_parameters()}
    return {"gradients": gradients, "shards": names.count("FSDPResBottleneckBlock")}


@pytest.mark.slow
def test_a_regnet_in_recomputed_shards_is_one_rank() -> None:
    alone = regnet(0)
    assert alone["shards"] == 0
    for of_rank in run_ranks(regnet, 2):
        assert of_rank["shards"] == 16
        assert of_rank["gradients"].keys() == alone["gradients"].keys()
        for name, expected in alone["gradients"].items():
            torch.testing.assert_close(of_rank["gradients"][name], expected, rtol=1e-7, atol=1e-9)


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)
        self.linear = nn.Linear(width, width)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.dropout(self.linear(self.norm(x)).relu())
        return y


def small() -> nn.Module:
    torch.manual_seed(0)
    blocks = nn.Sequential(*(Residual(5) for _ in range(3)))
    return nn.Sequential(nn.Linear(5, 5), blocks, nn.Linear(5, 2)).double()


def test_checkpointing_changes_nothing_but_memory() -> None:
    """Gradients, dropout's draws, running statistics; two passes, as in multi-crop."""
    plain, saving = small(), small()
    checkpoint_blocks(find_blocks(saving))
    assert plain.state_dict().keys() == saving.state_dict().keys()
    assert [type(m).__name__ for m in plain.modules()] == [
        type(m).__name__ for m in saving.modules()
    ]
    x = torch.randn(6, 5, dtype=torch.float64)
    kept: list[int] = []
    for network in (plain, saving):
        torch.manual_seed(1)
        sizes: list[int] = []

        def pack(tensor: Tensor, sizes: list[int] = sizes) -> Tensor:
            sizes.append(tensor.numel())
            return tensor

        for step in range(2):
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                loss = (network(x) + network(2 * x)).square().sum()
                kept.append(sum(sizes))
            loss.backward()
            del step
        assert network[1][0].norm.num_batches_tracked == 4
    assert kept[2] < kept[0] / 2
    for (name, a), b in zip(plain.named_parameters(), saving.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad), name  # type: ignore[arg-type]
    for (name, a), b in zip(plain.named_buffers(), saving.buffers(), strict=True):
        assert torch.equal(a, b), name
    teacher = copy.deepcopy(saving)
    assert teacher[1][0].norm is not saving[1][0].norm
    with torch.no_grad():
        assert not teacher(x).requires_grad


def test_a_checkpointed_vit_takes_keywords() -> None:
    backbone = build_backbone(Component(name="vit_micro", args={"depth": 2}))
    network = Network(backbone, nn.Identity())
    checkpoint_blocks(find_blocks(network))
    x = torch.randn(2, 16, backbone.embed_dim, requires_grad=True)  # type: ignore[call-overload]
    block = backbone.blocks[0]  # type: ignore[index]
    everyone = torch.ones(2, 1, 16, 16, dtype=torch.bool)
    block(x, attn_mask=everyone).sum().backward()
    assert x.grad is not None


def batch() -> Tensor:
    draws = torch.Generator().manual_seed(3)
    return 5 + 2 * torch.randn(12, 3, 4, dtype=torch.float64, generator=draws)


SHARES = ((0, 7), (7, 12))  # rows of two ranks: not equally many


def normalize(norm: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """A step in train mode, whose loss looks at each row differently, then one in eval mode."""
    x = x.clone().requires_grad_()
    weights = torch.arange(12 * 12, dtype=torch.float64).view(12, 3, 4).sin()
    first = {7: 0, 5: 7, 12: 0}[len(x)]
    y = norm(x)
    (y * weights[first : first + len(x)]).sum().backward()
    norm.eval()
    assert x.grad is not None
    state = {key: value.clone().double() for key, value in norm.state_dict().items()}
    return {"y": y.detach(), "dx": x.grad, "eval": norm(x).detach(), **state, **gradients(norm)}


def gradients(norm: nn.Module) -> dict[str, Tensor]:
    return {f"d{name}": p.grad.clone() for name, p in norm.named_parameters() if p.grad is not None}


KINDS: list[dict[str, Any]] = [
    {},
    {"affine": False},
    {"momentum": None},
    {"track_running_stats": False},
]


def synchronized(rank: int) -> list[dict[str, Tensor]]:
    results = []
    for more in KINDS:
        norm = nn.BatchNorm1d(3, dtype=torch.float64, **more)
        synchronize(ParallelConfig(sync_batch_norm="all"), [norm])
        assert isinstance(norm, SyncBatchNorm)
        results.append(normalize(copy.deepcopy(norm), batch()[slice(*SHARES[rank])]))
    alone = nn.BatchNorm1d(3, dtype=torch.float64)
    synchronize_batch_norm(alone, form_groups(1))
    results.append(normalize(alone, batch()[slice(*SHARES[rank])]))
    node = form_groups("node")
    assert torch.distributed.get_world_size(node.group) == 2
    with pytest.raises(UserError, match="2 processes cannot be divided into groups of 3"):
        form_groups(3)
    half = nn.BatchNorm1d(3)
    synchronize_batch_norm(half, node)
    rows, rounded = slice(*SHARES[rank]), batch().bfloat16()
    expected = nn.BatchNorm1d(3)(rounded.float())[rows].bfloat16()
    torch.testing.assert_close(half(rounded[rows]), expected, rtol=2**-7, atol=1e-3)
    return results


def assert_one_batch(parts: Sequence[dict[str, Tensor]], whole: dict[str, Tensor]) -> None:
    """Results of ranks, joined or summed, are those of one rank with all rows."""
    for key, expected in whole.items():
        if key in ("y", "dx", "eval"):
            joined = torch.cat([part[key] for part in parts])
        elif key.startswith("d"):
            joined = torch.stack([part[key] for part in parts]).sum(0)
        else:
            joined = parts[0][key]
        torch.testing.assert_close(joined, expected, rtol=1e-9, atol=1e-12, msg=key)


def reference_kernels() -> torch.library.Library:
    """Define torch's CUDA kernels of SyncBatchNorm on the CPU, by their formulas."""

    def dims(x: Tensor) -> list[int]:
        return [dim for dim in range(x.dim()) if dim != 1]

    def wide(values: Tensor, x: Tensor) -> Tensor:
        return values.view(1, -1, *[1] * (x.dim() - 2))

    def stats(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        variance, mean = torch.var_mean(x, dims(x), correction=0)
        return mean, (variance + eps).rsqrt()

    def gather(x: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
        means, inverse_stds, running_mean, running_var, momentum, eps, counts = arguments
        share = (counts / counts.sum())[:, None]
        mean = (share * means).sum(0)
        variance = (share * (inverse_stds**-2 - eps + (means - mean) ** 2)).sum(0)
        if running_mean is not None:
            running_mean.lerp_(mean, momentum)
            running_var.lerp_(variance * counts.sum() / (counts.sum() - 1), momentum)
        return mean, (variance + eps).rsqrt()

    def elements(x: Tensor, weight: Any, bias: Any, *arguments: Any) -> Tensor:
        mean, inverse_std, _ = arguments
        y = (x - wide(mean, x)) * wide(inverse_std, x)
        return y if weight is None else y * wide(weight, x) + wide(bias, x)

    def reduce(grad: Tensor, x: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
        mean, inverse_std, *_ = arguments
        sum_grad = grad.sum(dims(x))
        sum_grad_x = (grad * (x - wide(mean, x))).sum(dims(x))
        return sum_grad, sum_grad_x, sum_grad_x * inverse_std, sum_grad.clone()

    def backward(grad: Tensor, x: Tensor, *arguments: Any) -> Tensor:
        mean, inverse_std, weight, sum_grad, sum_grad_x, counts = arguments
        rows = counts.sum()
        scale = inverse_std if weight is None else inverse_std * weight
        along = wide(inverse_std**2 * sum_grad_x / rows, x) * (x - wide(mean, x))
        return (grad - wide(sum_grad / rows, x) - along) * wide(scale, x)

    library = torch.library.Library("aten", "IMPL", "CPU")
    library.impl("batch_norm_stats", stats)
    library.impl("batch_norm_gather_stats_with_counts", gather)
    library.impl("batch_norm_elemt", elements)
    library.impl("batch_norm_backward_reduce", reduce)
    library.impl("batch_norm_backward_elemt", backward)
    return library


class OfTorch(nn.BatchNorm1d):
    """What torch's SyncBatchNorm does with its kernels, on the CPU."""

    def forward(self, input: Tensor) -> Tensor:
        if not (self.training or self.running_mean is None):
            return super().forward(input)
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        buffers = self.running_mean, self.running_var
        of_ranks = torch.distributed.group.WORLD, world_size()
        y: Tensor = SyncBatchNormFunction.apply(
            input, self.weight, self.bias, *buffers, self.eps, self.momentum, *of_ranks
        )
        return y


def by_kernels(rank: int) -> list[list[dict[str, Tensor]]]:
    library = reference_kernels()
    mine = batch()[slice(*SHARES[rank])]
    results = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sync_batch_norm, "_has_kernels", lambda x: True)
        for more in KINDS:
            ours = nn.BatchNorm1d(3, dtype=torch.float64, **more)
            synchronize_batch_norm(ours, Ranks(None))
            theirs = OfTorch(3, dtype=torch.float64, **more)
            norms = [ours] if ours.momentum is None else [ours, theirs]
            results.append([normalize(norm, mine) for norm in norms])
    library._destroy()
    return results


def test_cuda_kernels_are_used_as_torch_uses_them() -> None:
    """The kernels' formulas stand in for them; `tools/gpu/acceptance.py` runs the kernels."""
    ranks = run_ranks(by_kernels, 2)
    for number, more in enumerate(KINDS):
        whole = normalize(nn.BatchNorm1d(3, dtype=torch.float64, **more), batch())
        for norms in zip(*(rank[number] for rank in ranks), strict=True):
            assert_one_batch(norms, whole)


def test_two_ranks_are_one_batch(rank_results: list[dict[str, Any]]) -> None:
    ranks = [of_rank["synchronized"] for of_rank in rank_results]
    for number, more in enumerate(KINDS):
        whole = normalize(nn.BatchNorm1d(3, dtype=torch.float64, **more), batch())
        parts = [rank[number] for rank in ranks]
        assert_one_batch(parts, whole)
    for rank, share in zip(ranks, SHARES, strict=True):
        alone = normalize(nn.BatchNorm1d(3, dtype=torch.float64), batch()[slice(*share)])
        for key, expected in alone.items():
            torch.testing.assert_close(rank[-1][key], expected, rtol=1e-9, atol=1e-12)


def test_a_teacher_has_the_layers_of_its_student(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run replaces BatchNorm in the teacher, too; one process stands for several."""
    monkeypatch.setattr(parallel_build, "world_size", lambda: 2)
    monkeypatch.setattr(parallel_build, "form_groups", lambda which: Ranks(None))
    monkeypatch.setattr(task_build, "build_reduction", lambda *args: Reduction())
    task = tiny.task("byol", tmp_path, "run", "parallel.sync_batch_norm=all")
    task.prepare()
    for network in (task.base_model, task.loss.teacher.network):
        kinds = [type(part) for part in network.modules() if "BatchNorm" in type(part).__name__]
        assert all(issubclass(kind, SyncBatchNorm) for kind in kinds)
    task.close()


def test_groups_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four ranks on two nodes, not in the order of the nodes."""
    monkeypatch.setattr(groups_module, "world_size", lambda: 4)
    monkeypatch.setattr(groups_module, "gather_objects", lambda host: ["a", "b", "a", "b"])
    assert rank_groups("all", "key") == [[0, 1, 2, 3]]
    assert rank_groups("node", "key") == [[0, 2], [1, 3]]
    assert rank_groups(2, "key") == [[0, 1], [2, 3]]


def test_another_kind_of_batch_norm_is_refused() -> None:
    class Acting(nn.BatchNorm2d):
        pass

    inner = nn.Module()
    inner.norm = Acting(3)
    with pytest.raises(UserError, match=r"0\.norm is a Acting"):
        synchronize_batch_norm(nn.Sequential(inner), Ranks(None))


ON_RANKS = (synchronized,)
