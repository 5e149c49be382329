"""Precision, loss scale and synchronization of each pass of the train steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from minitask import MiniTask, TinyBackbone, largest_difference
from selftask.config.schema import GradScalerConfig
from selftask.errors import StepSkipped
from selftask.optim.loss_scaler import LossScaler
from selftask.train_steps.grad_cache import GradCache
from selftask.train_steps.sam import SAM

CONFIG = {"out_dim": 5, "norm": False}
CASES: dict[str, tuple[dict[str, Any], int, list[bool]]] = {
    # arguments, forward passes, and for each backward pass of the network: is it in no_sync?
    "standard": ({"step": "standard"}, 1, [False]),
    "accumulate": ({"accumulate": 3}, 3, [True, True, False]),
    "grad_cache": ({"step": GradCache(chunks=4)}, 8, [True, True, True, False]),
    "sam": ({"step": SAM(rho=0.3)}, 2, [False, False]),
}


class Scaled(MiniTask):
    """A task with autocast and a loss scale of 8, which notes the contexts of its passes."""

    def __init__(self, **more: Any) -> None:
        super().__init__("simclr", CONFIG, batch_size=8, **more)
        self.grad_scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        self.is_unsynchronized = False
        self.autocasts: dict[str, list[bool]] = {"network": [], "loss": []}
        self.unsynchronized: list[bool] = []
        for name, module in (("network", self.base_model), ("loss", self.loss)):
            module.register_forward_pre_hook(self._note(self.autocasts[name]))
        weight = self.base_model.backbone.conv.weight
        weight.register_post_accumulate_grad_hook(
            lambda _: self.unsynchronized.append(self.is_unsynchronized)
        )

    def _note(self, seen: list[bool]) -> Any:
        def note(module: nn.Module, inputs: Any) -> None:
            seen.append(torch.is_autocast_enabled("cpu"))

        return note

    def autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast("cpu", torch.bfloat16)  # leaves float64 as it is

    @contextmanager
    def no_sync(self) -> Iterator[None]:  # type: ignore[override]
        self.is_unsynchronized = True
        yield
        self.is_unsynchronized = False


@pytest.mark.parametrize("case", CASES)
def test_every_pass_is_in_its_contexts(case: str) -> None:
    """Gradients are those without a scale; only the last backward pass of a step is reduced."""
    arguments, num_passes, unsynchronized = CASES[case]
    task = Scaled(**arguments)
    task.run(2)
    assert task.autocasts["network"] == [True] * (2 * num_passes)
    assert task.autocasts["loss"] and all(task.autocasts["loss"])
    assert task.unsynchronized == 2 * unsynchronized
    plain = MiniTask("simclr", CONFIG, batch_size=8, **arguments).run(2)
    assert largest_difference(task.grads, plain.grads) < 1e-12


class Drawing(TinyBackbone):
    def forward(self, images: Tensor) -> Tensor:
        return nn.functional.dropout(super().forward(images), 0.5)


@pytest.mark.parametrize("step", ["standard", GradCache(chunks=4)])
def test_the_generator_goes_on_after_the_draws_of_the_loss(step: Any) -> None:
    """Otherwise the next step would repeat draws of this one."""
    task = MiniTask("simclr", CONFIG, batch_size=8, step=step, backbone=Drawing)
    states = []

    def draw(module: nn.Module, inputs: Any) -> None:
        torch.rand(3)
        states.append(torch.get_rng_state())

    task.loss.register_forward_pre_hook(draw)
    task.run(1)
    assert len(states) == 1 and torch.equal(torch.get_rng_state(), states[0])


def test_a_scale_grows_after_the_steps_before_and_after_a_resume() -> None:
    scalers = [
        LossScaler(GradScalerConfig(init_scale=4.0, growth_interval=3), lambda name, value: None)
        for _ in range(2)
    ]
    scalers[0].update()
    scalers[0].update()
    scalers[1].load_state_dict(scalers[0].state_dict())
    assert scalers[1].get_scale() == 4.0
    scalers[1].update()
    assert scalers[1].get_scale() == 8.0


def test_an_overflow_of_another_rank_abandons_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """With sharded parameters, a rank does not have the gradients of the others."""
    monkeypatch.setattr("selftask.optim.loss_scaler.all_reduce_sum", lambda overflow: overflow + 1)
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    scaler = LossScaler(GradScalerConfig(init_scale=4.0), lambda name, value: None)
    with pytest.raises(StepSkipped):
        scaler.unscale_(torch.optim.SGD([weight], lr=1.0))
    assert scaler.get_scale() == 2.0
