"""Mistakes in a user's own method end in one line with file and line."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from selftask.config.schema import Component
from selftask.errors import UserError
from selftask.methods.base import Method
from selftask.registry import register_method
from selftask.task.own_method import build_method, build_network

pytestmark = pytest.mark.usefixtures("forget_names")


class Base(Method):
    loss_reduction = "samples"

    def forward(self, output: Any, batch: Any) -> Any:
        return output.mean()


class AssignsFirst(Base):
    def __init__(self, config: Any) -> None:
        self.layer = nn.Linear(2, 2)


class BufferFirst(Base):
    def __init__(self, config: Any) -> None:
        self.register_buffer("center", torch.zeros(2))


class NoInit(Base):
    def __init__(self, config: Any) -> None:
        self.size = 3


class NoConfig(Base):
    def __init__(self) -> None:
        super().__init__(None)


class OtherArguments(Base):
    def prepare_batch(self, batch: Any) -> None: ...  # type: ignore[override]


class NoHead(Base):
    def meter_input(self, output: Any, batch: Any) -> Any:  # type: ignore[override]
        return output, batch.labels


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (AssignsFirst, r"call super\(\).__init__\(config\) first: cannot assign module before"),
        (BufferFirst, r"call super\(\).__init__\(config\) first: cannot assign buffer before"),
        (NoInit, r"NoInit.__init__ must call super\(\).__init__\(config\)"),
        (NoConfig, r"the method NoConfig is called with \(config\), and takes \(\)"),
        (
            OtherArguments,
            r"OtherArguments.prepare_batch is called with \(batch, task\), and takes \(batch:",
        ),
        (NoHead, r"NoHead.meter_input is called with \(output, batch, head\), and takes \(outp"),
    ],
)
def test_a_wrong_definition_is_named(kind: type[Method], message: str) -> None:
    register_method("own_method")(kind)
    with pytest.raises(UserError, match=rf"test_method_mistakes.py:\d+: {message}"):
        build_method(Component(name="own_method"))


def test_a_method_without_a_loss_is_named() -> None:
    class NoLoss(Method):
        loss_reduction = "samples"

    method = NoLoss(NoLoss.Config())
    with pytest.raises(UserError, match=r"_mistakes.py:\d+: NoLoss has no method forward\("):
        method(torch.zeros(2), None)


@pytest.mark.parametrize(
    ("network", "found"), [(None, "NoneType"), (nn.Sequential(nn.Linear(2, 2)), "Sequential")]
)
def test_what_is_no_network_is_named(network: Any, found: str) -> None:
    class Builds(Base):
        def build_network(self, backbone: nn.Module, task: Any) -> Any:
            return network

    with pytest.raises(UserError, match=rf"_mistakes.py:\d+: build_network .* a {found}; "):
        build_network(Builds(Builds.Config()), nn.Identity(), SimpleNamespace())  # type: ignore[arg-type]


def test_a_misspelled_method_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    class Misspelled(Base):
        def buildhead(self, embed_dim: int) -> nn.Module:
            return nn.Identity()

        def build_heads(self, embed_dim: int) -> nn.Module:
            return nn.Identity()

        def group_rules(self) -> Any:
            return self.group_rule()

        def group_rule(self) -> Any:  # group_rules is there
            return []

        def draw_circle(self) -> None: ...

    register_method("own_method")(Misspelled)
    with caplog.at_level(logging.WARNING):
        build_method(Component(name="own_method"))
    assert [text.partition(": ")[2] for text in caplog.messages] == [
        "nothing calls Misspelled.buildhead; did you mean build_head?",
        "nothing calls Misspelled.build_heads; did you mean build_head?",
    ]
