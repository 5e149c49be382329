"""Graphs on a CPU: the same results; no copied bias, no sum by columns, one copy of a stack."""

from __future__ import annotations

import shutil
from collections import Counter
from typing import Any

import pytest
import torch
from timm.models.vision_transformer import Block
from torch import Tensor, nn
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.utils import run_and_get_code
from torch.fx.experimental.proxy_tensor import make_fx

from selftask.config.schema import CompileConfig
from selftask.parallel.compiled import compile_function
from selftask.parallel.cpu_graph_pass import CPUGraphPass

aten = torch.ops.aten


def _targets(graph: torch.fx.Graph) -> Counter[object]:
    return Counter(node.target for node in graph.nodes if node.op == "call_function")


def _rewritten(function: object, *inputs: Tensor) -> tuple[Counter[object], Counter[object]]:
    """Rewrite the traced function; compare results; return operations before and after."""
    traced = make_fx(function, select_decomp_table(), "fake")(*inputs)  # type: ignore[arg-type]
    before, expected = _targets(traced.graph), traced(*inputs)
    CPUGraphPass()(traced.graph)
    traced.graph.lint()
    traced.recompile()
    for ours, eager in zip(traced(*inputs), expected, strict=True):
        assert ours.shape == eager.shape
        torch.testing.assert_close(ours, eager, rtol=1e-5, atol=1e-5)
    return before, _targets(traced.graph)


def test_a_layer_and_its_gradients() -> None:
    """Forward with a view behind the layer, backward with the bias's gradient over 300 rows."""
    layer = nn.Linear(8, 6)

    def step(images: Tensor, weight: Tensor, bias: Tensor) -> list[Tensor]:
        hidden = aten.addmm(bias, images.reshape(-1, 8), weight.t())
        output = nn.functional.relu(hidden.view(4, 75, 6))
        return [output, output.sum(dim=(0, 1)), hidden.sum(dim=0, keepdim=True), hidden]

    images = torch.randn(4, 75, 8, generator=torch.Generator().manual_seed(0))
    before, after = _rewritten(step, images, layer.weight.detach(), layer.bias.detach())
    assert before[aten.addmm.default] == 1 and before[aten.sum.dim_IntList] == 2
    assert after[aten.addmm.default] == 0 and after[aten.sum.dim_IntList] == 0
    assert after[aten.mm.default] == 3 and after[aten.add.Tensor] == 1


def test_other_sums_and_products_are_left() -> None:
    """Of products, of few rows, over columns; scaled products; other precisions."""

    def sums(x: Tensor, few: Tensor) -> list[Tensor]:
        scaled = torch.addmm(x[0, :3], x, few.t(), beta=0.5)
        half = x.bfloat16()
        return [(x * 2).sum(0), few.sum(0), x.sum(1), half.sum(0).float(), scaled]

    draws = torch.Generator().manual_seed(0)
    before, after = _rewritten(sums, *(torch.randn(n, 4, generator=draws) for n in (300, 3)))
    assert before == after and before[aten.sum.dim_IntList] == 4


def test_a_stack_is_copied_in_the_order_that_is_read() -> None:
    """As in the backward pass of attention: three gradients (B, H, N, D) become (B, N, 3HD)."""

    def stacks(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        stack = torch.cat([q, k, v]).view(3, 2, 3, 5, 4).permute(1, 3, -5, 2, -1)
        read = torch.cat([q, k]).view(2, 2, 3, 5, 4)
        kept = read.permute(1, 0, 2, 3, 4).clone(memory_format=torch.contiguous_format)
        side = torch.cat([q, k], dim=1).view(2, 2, 3, 5, 4).permute(1, 0, 2, 3, 4).contiguous()
        return [stack.reshape(2, 5, 36), read, kept, side]

    def uneven(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        """Parts of 2, 1 and 3 rows, seen as three of two."""
        rows = torch.cat([q, k[:1], torch.cat([v, v[:1]])]).view(3, 2, 3, 5, 4)
        return [rows.permute(1, 0, 2, 3, 4).clone(memory_format=torch.contiguous_format)]

    draws = torch.Generator().manual_seed(0)
    parts = [torch.randn(2, 3, 5, 4, generator=draws) for _ in range(3)]
    before, after = _rewritten(stacks, *parts)
    assert before[aten.clone.default] == 3, "one of them of a stack that others read"
    assert after[aten.clone.default] == 2
    before, after = _rewritten(uneven, *parts)
    assert before == after


def test_gelus_derivative_is_the_librarys() -> None:
    """Not that of the formula with tanh, of other numbers, or in another precision."""

    def backward(grad: Tensor, x: Tensor) -> list[Tensor]:
        other = 0.5 * (1 + torch.erf(x * 0.7)) + x * torch.exp(x * x * -0.5) * 0.4
        tanh = aten.gelu_backward(grad, x, approximate="tanh")
        return [
            aten.gelu_backward(grad, x),
            tanh,
            grad * other,
            aten.gelu_backward(grad.double(), x.double()),
        ]

    draws = torch.Generator().manual_seed(0)
    before, after = _rewritten(backward, *(torch.randn(7, 5, generator=draws) for _ in range(2)))
    assert before[aten.erf.default] == 3 and after[aten.erf.default] == 2
    assert before[aten.gelu_backward.default] == 0 and after[aten.gelu_backward.default] == 1


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs g++")
def test_a_compiled_block_of_a_vit_is_the_eager_one() -> None:
    """By inductor as it is called for a CPU; its code holds what was written for it."""
    block: Any = Block(dim=32, num_heads=2, qkv_bias=True)
    tokens = torch.randn(4, 75, 32, generator=torch.Generator().manual_seed(0))
    weights = [tokens.requires_grad_(), *block.parameters()]
    expected = torch.autograd.grad(block(tokens).square().sum(), weights)
    options = CompileConfig()
    compiled = compile_function(lambda x: block(x).square().sum(), options, tokens.device)

    def step() -> Any:
        return torch.autograd.grad(compiled(tokens), weights)

    found, code = run_and_get_code(step)
    for ours, eager in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-4)
    assert "aten.gelu_backward" in code[-1] and "aten.addmm" not in "".join(code)
