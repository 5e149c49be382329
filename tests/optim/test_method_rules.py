"""Parameter groups that a method declares, and freezing in every train step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from minitask import MiniTask
from selftask.config.run_length import RunLength
from selftask.config.schema import OptimizerConfig
from selftask.config.schema.optimizer import GroupRule
from selftask.errors import UserError
from selftask.methods.base import Method
from selftask.optim.build import build_optimizer
from selftask.optim.param_groups import assign_settings, freeze_for_good, frozen_until

LENGTH = RunLength(num_samples=64, batch_size=8, epochs=5)
RULES = [
    GroupRule(match="loss.prototypes", weight_decay=0.0, freeze=2),
    GroupRule(match="head", schedule="constant", lr=2.0),
]


def modules() -> list[tuple[str, nn.Module]]:
    network, loss = nn.Module(), nn.Module()
    network.backbone, network.head = nn.Linear(3, 3), nn.Linear(3, 2)
    loss.prototypes = nn.Linear(2, 4, bias=False)
    return [("network", network), ("loss", loss)]


def test_rules_of_a_method_hold_under_a_users_own_recipe() -> None:
    """The recipe has a rule for one setting of the same parameters; the others stay."""
    config = OptimizerConfig(
        name="sgd", lr=0.1, weight_decay=0.3, groups=[GroupRule(match="head", lr=5.0)]
    )
    made = assign_settings(modules(), config, LENGTH, {}, RULES)
    settings = {one.parameter.name: one for one in made}
    prototypes, head = settings["loss.prototypes.weight"], settings["network.head.weight"]
    assert (prototypes.weight_decay, prototypes.frozen_steps, prototypes.lr) == (0.0, 2, 1.0)
    assert (head.lr, head.schedule, head.weight_decay) == (5.0, {"name": "constant"}, 0.3)
    assert settings["network.backbone.weight"].weight_decay == 0.3


def test_rate_of_a_declared_predictor_is_constant() -> None:
    config = OptimizerConfig(name="sgd", lr=0.1, schedule="linear")
    optimizer = build_optimizer(config, (named := modules()), LENGTH, batch=8, of_method=RULES)
    optimizer.step(where=0.5)
    rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    assert rates[id(named[0][1].head.weight)] == pytest.approx(0.2)
    assert rates[id(named[0][1].backbone.weight)] == pytest.approx(0.05)


def test_rule_of_a_method_that_matches_nothing_is_an_error() -> None:
    rules = [GroupRule(match="loss.prototype", weight_decay=0.0)]
    with pytest.raises(UserError, match=r"group_rules\.0\.match='loss\.prototype': .*prototypes'"):
        freeze_for_good(modules(), [], rules)
    freeze_for_good(named := modules(), [], [GroupRule(match="head", freeze=True)])
    assert not any(p.requires_grad for p in named[0][1].head.parameters())


def test_freezing_of_the_first_rule_counts() -> None:
    named = modules()
    rules = [GroupRule(match="head", freeze="1 epoch"), GroupRule(match="head.weight", freeze=3)]
    steps = {id(p): steps for steps, p in frozen_until(named, rules, LENGTH)}
    assert steps == {id(named[0][1].head.weight): 8, id(named[0][1].head.bias): 8}
    rules = [GroupRule(match="head.bias", freeze=False), *rules]
    steps = {id(p): steps for steps, p in frozen_until(named, rules, LENGTH)}
    assert steps == {id(named[0][1].head.weight): 8, id(named[0][1].head.bias): 0}


class Layer(Method):
    """A loss of a head that is frozen for two steps."""

    loss_reduction = "samples"

    def build_head(self, embed_dim: int) -> nn.Module:
        return nn.Linear(embed_dim, 3)

    def group_rules(self) -> list[GroupRule]:
        return [GroupRule(match="network.head", freeze=2)]

    def forward(self, output: Tensor, batch: Any) -> Tensor:
        return (output[0] - 1).square().mean() + (output[1] + 1).square().mean()


@pytest.mark.parametrize("step", ["standard", "sam", "accumulate", "manual"])
def test_frozen_parameters_stay_exactly_the_same_in_every_step(step: str) -> None:
    """Momentum and weight decay must not move them, nor SAM's climb be affected by them."""
    task = MiniTask(Layer, {}, step=_step(step))
    decaying = torch.optim.SGD(task.parameters, lr=0.1, momentum=0.9, weight_decay=0.1)
    task.optimizer.step = lambda *args, where: decaying.step()  # type: ignore[method-assign]
    head = task.base_model.head
    before = [p.clone() for p in head.parameters()]
    task.run(2)
    assert all(torch.equal(p, old) for p, old in zip(head.parameters(), before, strict=True))
    assert not any(p in decaying.state for p in head.parameters())
    task.run(1)
    assert not any(torch.equal(p, old) for p, old in zip(head.parameters(), before, strict=True))


def test_climb_of_sam_is_along_trained_parameters_only() -> None:
    """A frozen head has the weights of the first pass in the second one."""
    task = MiniTask(Layer, {}, step=_step("sam"))
    seen: list[Tensor] = []
    task.base_model.head.register_forward_hook(
        lambda *_: seen.append(task.base_model.head.weight.clone())
    )
    task.run(1)
    assert len(seen) == 2 and torch.equal(*seen)


def _step(name: str) -> Any:
    from selftask.registry import TRAIN_STEPS

    step = TRAIN_STEPS[name]
    return step(rho=0.5) if name == "sam" else step
