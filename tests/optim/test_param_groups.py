"""Parameter groups: who decays, and which groups are one."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from selftask.config.run_length import RunLength
from selftask.config.schema.optimizer import GroupRule, OptimizerConfig, ScaledLR
from selftask.errors import UserError
from selftask.optim.build import build_optimizer, lr_schedule
from selftask.optim.group_table import group_table
from selftask.optim.param_groups import assign_settings, freeze_for_good, merge_alike

LENGTH = RunLength(num_samples=80, batch_size=8, epochs=2)  # 20 updates


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))


def build(**settings: object) -> torch.optim.Optimizer:
    config = OptimizerConfig(**{"lr": 0.1, **settings})  # type: ignore[arg-type]
    return build_optimizer(config, [("network", network())], LENGTH, batch=8)


def decayed_and_plain(module: nn.Module, **settings: object) -> tuple[list[int], list[int]]:
    """The dimensions of parameters with and without weight decay."""
    config = OptimizerConfig(name="sgd", lr=0.1, weight_decay=0.1, **settings)  # type: ignore
    made = assign_settings([("network", module)], config, LENGTH, {})
    values = [[o.parameter.value.ndim for o in made if o.weight_decay == d] for d in (0.1, 0.0)]
    return values[0], values[1]


def test_weights_decay_and_small_parameters_do_not() -> None:
    assert decayed_and_plain(network()) == ([2], [1, 1, 1])


def test_groups_with_the_same_settings_become_one() -> None:
    groups = [{"params": [1], "x": 0.0}, {"params": [2], "x": 1.0}, {"params": [3], "x": 0.0}]
    assert merge_alike(groups) == [{"params": [1, 3], "x": 0.0}, {"params": [2], "x": 1.0}]


def test_a_shared_parameter_is_in_one_group() -> None:
    """Tied within a module and between modules: stepped once, by the first name's rules."""
    tied = nn.ModuleDict({"embed": nn.Linear(4, 4), "out": nn.Linear(4, 4)})
    tied["out"].weight = tied["embed"].weight
    head = nn.Linear(4, 4)
    head.weight = tied["embed"].weight
    rules = [GroupRule(match="*.embed", lr=0.5), GroupRule(match="loss.*", lr=3.0)]
    config = OptimizerConfig(name="sgd", lr=0.1, weight_decay=0.1, groups=rules)
    modules = [("network", tied), ("loss", head)]
    made = build_optimizer(config, modules, LENGTH, batch=8)
    listed = [id(p) for group in made.param_groups for p in group["params"]]
    assert len(listed) == len(set(listed)) == 4  # the weight and three biases
    rates = {one.parameter.name: one.lr for one in assign_settings(modules, config, LENGTH, {})}
    assert rates["network.embed.weight"] == 0.5
    assert "loss.weight" not in rates and "network.out.weight" not in rates


@pytest.mark.parametrize(
    ("settings", "num_groups"),
    [
        ({"name": "sgd"}, 1),
        ({"name": "sgd", "weight_decay": 0.1}, 2),
        ({"name": "sgd", "weight_decay": 0.1, "decay_1d": True}, 1),
        ({"name": "lars"}, 2),  # adapts weights layer by layer, and only them
    ],
)
def test_number_of_groups(settings: dict[str, object], num_groups: int) -> None:
    assert len(build(**settings).param_groups) == num_groups


def test_step_sets_what_classys_own_step_sets() -> None:
    """lr and a moving weight decay at every ``where``, against Classy's ``step``."""
    from selftask.classy import ClassyOptimizer

    ours = build(name="sgd", weight_decay={"name": "cosine", "start": 0.1, "end": 0.4})
    theirs = build(name="sgd", weight_decay={"name": "cosine", "start": 0.1, "end": 0.4})
    both = [[p for g in made.param_groups for p in g["params"]] for made in (ours, theirs)]
    for parameter in (*both[0], *both[1]):
        parameter.data.fill_(1.0)
        parameter.grad = torch.ones_like(parameter)
    for where in (0.0, 0.3, 0.95):
        ours.step(where=where)
        ClassyOptimizer.step(theirs, where=where)
        assert all(torch.equal(a, b) for a, b in zip(*both, strict=True)), "set, then stepped"
        for a, b in zip(ours.param_groups, theirs.param_groups, strict=True):
            assert (a["lr"], a["weight_decay"]) == (b["lr"], b["weight_decay"])
        decay = 0.1 + 0.15 * (1 - math.cos(math.pi * where))
        assert ours.options_view.weight_decay == pytest.approx([decay, 0.0])  # of two groups
        assert ours.options_view.lr == ours.param_groups[0]["lr"]  # one value that both have


def test_tokens_and_positions_decay_if_asked() -> None:
    """Of a ViT with a decoder: all that is not one-dimensional, and the decoder's mask token."""
    network = nn.Module()
    network.cls_token = nn.Parameter(torch.zeros(1, 1, 4))
    network.pos_embed = nn.Parameter(torch.zeros(1, 5, 4))
    network.mask_token = nn.Parameter(torch.zeros(4))
    network.norm = nn.LayerNorm(4)
    network.linear = nn.Linear(4, 4)
    for tokens, small, num_decayed in ((0, 0, 1), (1, 0, 4), (0, 1, 4), (1, 1, 7)):
        settings = {"decay_tokens": bool(tokens), "decay_1d": bool(small)}
        decayed, plain = decayed_and_plain(network, **settings)
        assert len(decayed) == num_decayed
        assert len(plain) == 7 - num_decayed


def test_the_first_rule_with_freeze_decides_also_for_the_whole_run() -> None:
    head, whole = GroupRule(match="1", freeze=False), GroupRule(match="*", freeze=True)
    for rules, trained in (
        ([head, whole], [False, False, True, True]),
        ([whole, head], [False] * 4),
    ):
        made = network()
        freeze_for_good([("network", made)], rules)
        assert [p.requires_grad for p in made.parameters()] == trained
        made = network()  # rules of the method come after those of the config
        freeze_for_good([("network", made)], rules[:1], rules[1:])
        assert [p.requires_grad for p in made.parameters()] == trained


def test_warmup_starts_at_start_lr() -> None:
    """0.3 to 4.8 over the first half, as a line; scaled by 2 with the batch."""
    config = OptimizerConfig(
        name="sgd",
        lr=ScaledLR(base=2.4, per=256),
        start_lr=0.15,
        warmup="50%",
        schedule="constant",
    )
    lr = lr_schedule(config, LENGTH, batch=512)
    for step in range(10):
        assert lr(step / 20) == pytest.approx(0.3 + 4.5 * step / 10)
    assert lr(0.75) == pytest.approx(4.8)


RULES = [
    GroupRule(match="backbone.layer1", lr=0.1, freeze="1 epoch"),
    GroupRule(type="BatchNorm2d", weight_decay=0.02, lr=0.5),
    GroupRule(match=["network.head", "loss.*"], lr=10.0, schedule="constant"),
]


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Module()
        for name in ("layer1", "layer2"):
            layer = nn.Sequential(nn.Conv2d(3, 3, 1, bias=False), nn.BatchNorm2d(3))
            self.backbone.add_module(name, layer)
        self.head = nn.Linear(3, 2)


def test_first_rule_that_matches_gives_each_setting() -> None:
    config = OptimizerConfig(name="sgd", lr=0.1, weight_decay=0.3, groups=RULES)
    made = assign_settings([("network", Small())], config, LENGTH, {})
    settings = {
        one.parameter.name.removeprefix("network."): (
            one.lr,
            one.weight_decay,
            one.frozen_steps,
            one.schedule,
        )
        for one in made
    }
    constant = {"name": "constant"}
    assert settings == {
        "backbone.layer1.0.weight": (0.1, 0.3, 10, {}),
        "backbone.layer1.1.weight": (
            0.1,
            0.02,
            10,
            {},
        ),  # lr of the first rule, decay of the second
        "backbone.layer1.1.bias": (0.1, 0.02, 10, {}),
        "backbone.layer2.0.weight": (1.0, 0.3, 0, {}),
        "backbone.layer2.1.weight": (0.5, 0.02, 0, {}),
        "backbone.layer2.1.bias": (0.5, 0.02, 0, {}),
        "head.weight": (10.0, 0.3, 0, constant),
        "head.bias": (10.0, 0.0, 0, constant),
    }


def test_decays_and_rates_of_the_usual_kinds() -> None:
    """Biases, norms, heads and depth-wise convolutions; shared ones once, frozen ones not."""
    network = nn.Module()
    network.depthwise = nn.Conv2d(3, 3, 3, groups=3)
    network.norm = nn.BatchNorm2d(3)
    network.head = network.again = nn.Linear(3, 2)
    network.frozen = nn.Linear(2, 2).requires_grad_(False)
    network.gain = nn.Parameter(torch.ones(3))
    rules = [
        GroupRule(type="BatchNorm2d", weight_decay=0.02),
        GroupRule(match="*.bias", lr=2.0, weight_decay=0.01),
        GroupRule(match="head", lr=10.0),
        GroupRule(match="depthwise", weight_decay=0.0),
    ]
    config = OptimizerConfig(name="sgd", lr=0.1, weight_decay=0.3, schedule="linear", groups=rules)
    optimizer = build_optimizer(config, [("network", network)], LENGTH, batch=8)
    optimizer.step(where=0.5)
    actual = [
        (id(parameter), group["lr"], group["weight_decay"])
        for group in optimizer.param_groups
        for parameter in group["params"]
    ]
    expected = [
        (network.depthwise.weight, 0.05, 0.0),
        (network.depthwise.bias, 0.1, 0.01),
        (network.norm.weight, 0.05, 0.02),
        (network.norm.bias, 0.1, 0.02),
        (network.head.weight, 0.5, 0.3),
        (network.head.bias, 0.1, 0.01),
        (network.gain, 0.05, 0.0),
    ]
    assert sorted(actual) == sorted((id(p), lr, decay) for p, lr, decay in expected)
    assert len(optimizer.param_groups) == 5  # equal ones are one


def test_the_rate_of_the_first_group_is_that_of_the_config() -> None:
    """It is the one that is logged."""
    rules = [GroupRule(type=["Conv2d", "Linear"], lr=0.5)]
    config = OptimizerConfig(name="sgd", lr=0.1, weight_decay=0.3, groups=rules)
    made = assign_settings([("network", Small())], config, LENGTH, {})
    assert made[0].lr == 1.0 and not made[0].decays


def test_the_factor_of_a_rule_multiplies_that_of_the_layer() -> None:
    rules = [GroupRule(match="backbone.layer1", lr=3.0), GroupRule(match="head", lr=10.0)]
    config = OptimizerConfig(name="sgd", lr=0.1, layer_decay=0.5, groups=rules)
    depths = {"network.backbone.layer1.0.weight": 0, "network.backbone.layer2.0.weight": 1}
    made = assign_settings([("network", Small())], config, LENGTH, depths)
    factors = {one.parameter.name.removeprefix("network."): one.lr for one in made}
    assert factors["backbone.layer1.0.weight"] == 3.0 * 0.25
    assert factors["backbone.layer2.0.weight"] == 0.5
    assert factors["head.weight"] == 10.0  # of the layer after the last


def test_groups_follow_their_own_schedules() -> None:
    falling = {"name": "linear", "start": 0.2, "end": 0.0}
    rules = [*RULES, GroupRule(match="head.weight", weight_decay=falling)]
    config = OptimizerConfig(name="sgd", lr=0.1, weight_decay=0.3, schedule="linear", groups=rules)
    optimizer = build_optimizer(config, [("network", Small())], LENGTH, batch=8)
    optimizer.step(where=0.25)
    by_parameter = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    for one in optimizer.settings:
        lr = 1.0 if "head" in one.parameter.name else one.lr * 0.1 * 0.75
        decay = 0.15 if "head.weight" in one.parameter.name else one.weight_decay
        group = by_parameter[id(one.parameter.value)]
        assert (group["lr"], group["weight_decay"]) == pytest.approx((lr, decay))
    assert len(optimizer.param_groups) == 6  # lr and weight decay: one group for equal ones


def test_a_rule_with_only_a_schedule_makes_a_group() -> None:
    rules = [
        GroupRule(match="head.weight", schedule="constant"),
        GroupRule(match="backbone.layer1.0", schedule="constant", lr=0.5),
        GroupRule(match="backbone.layer2.0", lr=0.5),
    ]
    config = OptimizerConfig(name="sgd", lr=0.1, schedule="linear", groups=rules)
    optimizer = build_optimizer(config, [("network", Small())], LENGTH, batch=8)
    optimizer.step(where=0.5)
    names = {id(one.parameter.value): one.parameter.name for one in optimizer.settings}
    rates = {
        names[id(parameter)]: group["lr"]
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    assert rates.pop("network.head.weight") == 0.1
    assert rates.pop("network.backbone.layer1.0.weight") == 0.05
    assert rates.pop("network.backbone.layer2.0.weight") == 0.025
    assert len(rates) == 5 and set(rates.values()) == {0.05}


def test_a_factor_of_a_schedule_by_epochs_moves_by_epochs() -> None:
    rules = [GroupRule(match="head", lr=0.5)]
    by_epoch = {"name": "linear", "update": "epoch"}
    config = OptimizerConfig(name="sgd", lr=0.1, schedule=by_epoch, warmup=0, groups=rules)
    optimizer = build_optimizer(config, [("network", Small())], LENGTH, batch=8)
    optimizer.on_epoch(0.5)
    optimizer.step(where=0.75)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.05, 0.025])


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (
            {"match": "backbone.layer3"},
            r"groups\.1\.match='backbone\.layer3': .*backbone\.layer[12]'",
        ),
        ({"type": "BatchNorm1d"}, r"groups\.1\.type='BatchNorm1d': .*did you mean 'BatchNorm2d'"),
        ({"match": "head", "type": "Conv2d"}, r"groups\.1\.type='Conv2d': matches no trained"),
    ],
)
@pytest.mark.parametrize("freeze", [True, 3])
def test_a_rule_that_matches_nothing(rule: dict[str, str], message: str, freeze: bool) -> None:
    rules = [GroupRule(match="head", lr=2.0), GroupRule(**rule, freeze=freeze)]  # type: ignore
    config = OptimizerConfig(name="sgd", lr=0.1, groups=rules)
    modules = [("network", Small())]
    with pytest.raises(UserError, match=message):
        freeze_for_good(modules, rules) if freeze is True else assign_settings(
            modules, config, LENGTH, {}
        )


@pytest.mark.parametrize("name", ["sgd", "lars"])
def test_a_closure_is_called_with_the_lr_of_the_step(name: str) -> None:
    optimizer = build(name=name, schedule="linear", warmup=0)
    rates: list[float] = []
    optimizer.step(closure=lambda: rates.append(optimizer.param_groups[0]["lr"]), where=0.5)  # type: ignore[call-arg, func-returns-value]
    assert rates == [0.05]


def test_scheduled_momentum_reaches_torch() -> None:
    cycle = {"name": "one_cycle", "first": 0.95, "start": 0.85, "end": 0.95}
    for name, args, key in (
        ("sgd", {"sgd_momentum": cycle}, "momentum"),
        ("adamw", {"betas": (cycle, 0.99)}, "betas"),
    ):
        optimizer = build(name=name, args=args)
        optimizer.step(where=0.3)  # type: ignore[call-arg]
        group = optimizer.param_groups[0]
        assert group[key] == pytest.approx(0.85 if key == "momentum" else (0.85, 0.99))


def test_table_of_groups() -> None:
    config = OptimizerConfig(name="sgd", lr=0.1, weight_decay=0.3, groups=RULES)
    made = assign_settings([("network", Small())], config, LENGTH, {})
    table = group_table(made, config, batch=8)
    assert [" ".join(line.split()) for line in table[:3]] == [
        "tensors parameters lr weight decay frozen until schedule names",
        "1 9 0.1 0.3 - cosine network.backbone.layer2.0.weight",  # the full rate comes first
        "1 9 0.01 0.3 step 10 cosine network.backbone.layer1.0.weight",
    ]
    assert sum(int(line.split()[0]) for line in table[1:]) == 8
