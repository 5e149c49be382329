"""The decorator that keeps losses in float32 under autocast."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from selftask.batch import Batch
from selftask.methods.base import Method
from selftask.models.precision import in_full_precision

NONE = torch.empty(0, dtype=torch.int64)


class Output(NamedTuple):
    views: list[Tensor]
    scores: dict[str, Tensor]


class Product(Method):
    """A loss with a matrix product, of a nested output and of values in the batch."""

    loss_reduction = "samples"

    @in_full_precision
    def forward(self, output: Output, batch: Batch) -> Tensor:
        first, second = output.views
        product = first @ batch["teacher"]["targets"].T + second @ output.scores["head"].T
        assert product.dtype == first.dtype
        return product.square().mean()


def inputs(dtype: torch.dtype) -> tuple[Output, Batch]:
    draws = torch.Generator().manual_seed(0)
    a, b, c, d = (torch.randn(4, 8, generator=draws).bfloat16().to(dtype) for _ in range(4))
    batch = Batch(views={"main": [a]}, labels=NONE, index=NONE, key=NONE)
    batch["teacher"] = {"targets": c, "names": "any"}
    return Output([a, b], {"head": d}), batch


def test_a_methods_forward_is_in_full_precision() -> None:
    """Under autocast with bfloat16 everywhere it is what float64 gives, to float32's digits."""
    method = Product(Product.Config())
    expected = method(*inputs(torch.float64))
    output, batch = inputs(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        loss = method(output, batch)
        assert torch.get_autocast_dtype("cpu") == torch.bfloat16
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert expected.dtype == torch.float64
    assert batch["teacher"]["targets"].dtype == torch.bfloat16, "the batch itself is unchanged"
    assert method(output, batch).item() == loss.item()  # half precision without autocast


def test_gradients_reach_tensors_in_half_precision() -> None:
    output, batch = inputs(torch.bfloat16)
    output.views[0].requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        Product(Product.Config())(output, batch).backward()
    assert output.views[0].grad is not None and output.views[0].grad.any()


def test_arguments_without_a_tensor_are_a_clear_error() -> None:
    @in_full_precision
    def loss(*args: Any, **kwargs: Any) -> None: ...

    with pytest.raises(TypeError, match=r"no argument of .*loss is a tensor .* by position"):
        loss({"a": [None]}, x=torch.zeros(1))
