"""Schedules step by step beside torch's schedulers, or the formula of their paper."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from timm.scheduler import CosineLRScheduler
from torch.optim import lr_scheduler

from selftask.config.load import load_config
from selftask.config.run_length import RunLength
from selftask.config.schema.optimizer import OptimizerConfig, ScaledLR
from selftask.errors import ConfigError, UserError
from selftask.optim.build import lr_schedule
from selftask.optim.curves import Scaled
from selftask.optim.schedules import ScheduleConfig, Span, build_schedule
from selftask.registry import SCHEDULES, register_schedule

STEPS = 56
LENGTH = RunLength(num_samples=7 * 8, batch_size=8, epochs=8)  # 7 steps an epoch

Theirs = Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler]


def ours(section: dict[str, Any]) -> list[float]:
    schedule = build_schedule(section, LENGTH)
    return [schedule(step / STEPS) for step in range(STEPS)]


def torchs(lr: float, build: Theirs) -> list[float]:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=lr)
    scheduler = build(optimizer)
    values = []
    for _ in range(STEPS):
        values.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return values


def _sequential(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    rise = lr_scheduler.LinearLR(optimizer, 0.1, 1.0, total_iters=14)
    fall = lr_scheduler.CosineAnnealingLR(optimizer, STEPS - 14, 0.05)
    return lr_scheduler.SequentialLR(optimizer, [rise, fall], milestones=[14])


LIKE_TORCH: dict[str, tuple[dict[str, Any], Theirs]] = {
    "constant": ({"start": 0.8}, lambda o: lr_scheduler.ConstantLR(o, 1.0)),
    "linear": ({"end": 0.08}, lambda o: lr_scheduler.LinearLR(o, 1.0, 0.1, total_iters=STEPS)),
    "cosine": ({"end": 0.01}, lambda o: lr_scheduler.CosineAnnealingLR(o, STEPS, 0.01)),
    "cosine with restarts": (
        {"end": 0.01, "restarts": 2, "growth": 2.0},
        lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 8, 2, eta_min=0.01),
    ),
    "exponential": (
        {"end": 0.002},
        lambda o: lr_scheduler.ExponentialLR(o, (0.002 / 0.8) ** (1 / STEPS)),
    ),
    "polynomial": (
        {"end": 0.0, "power": 0.9},
        lambda o: lr_scheduler.PolynomialLR(o, STEPS, power=0.9),
    ),
    "step": ({"every": "2 epochs", "factor": 0.3}, lambda o: lr_scheduler.StepLR(o, 14, 0.3)),
    "multistep": (
        {"milestones": ["3 epochs", 50], "factor": 0.1},
        lambda o: lr_scheduler.MultiStepLR(o, [21, 50], 0.1),
    ),
    "one_cycle": (  # torch's phases end a step early: at pct * total - 1 and total - 1
        {"end": 0.8 / 25 / 1e4, "rise": "25%"},
        lambda o: lr_scheduler.OneCycleLR(o, 0.8, STEPS + 1, pct_start=15 / (STEPS + 1)),
    ),
    "composite": (
        {
            "parts": [
                {"name": "linear", "start": 0.08, "end": 0.8},
                {"name": "cosine", "start": 0.8, "end": 0.05},
            ],
            "milestones": ["2 epochs"],
        },
        _sequential,
    ),
}


@pytest.mark.parametrize("case", LIKE_TORCH)
def test_as_torchs_scheduler(case: str) -> None:
    section, theirs = LIKE_TORCH[case]
    values = ours({"name": case.partition(" ")[0], "start": 0.8, **section})
    assert values == pytest.approx(torchs(0.8, theirs), rel=1e-9)


@pytest.mark.parametrize("interval", ["rescaled", "fixed"])
def test_milestones_of_parts_are_counted_from_the_start_of_the_run(interval: str) -> None:
    """As those of multistep, also behind a warm-up."""
    more = {"start": 0.8, "warmup": "1 epoch", "warmup_interval": interval}
    parts = [{"name": "constant", "start": value} for value in (0.8, 0.08, 0.008)]
    milestones = ["3 epochs", 50]
    expected = ours({"name": "multistep", "milestones": milestones, "factor": 0.1, **more})
    values = ours({"name": "composite", "parts": parts, "milestones": milestones, **more})
    assert values == pytest.approx(expected)


def test_schedules_can_be_pickled_and_copied() -> None:
    """A Learner has those of its method."""
    sections = [
        *({"name": case.partition(" ")[0], **section} for case, (section, _) in LIKE_TORCH.items()),
        {"name": "cosine", "end": 0.1, "stretch": 1.25},
        {"name": "inverse_sqrt"},
        *({"name": "wsd", "end": 0.1, "shape": shape} for shape in ("linear", "cosine", "sqrt")),
    ]
    for shape in ("constant", "cosine", "exponential", "linear"):
        warmup = {"warmup": "1 epoch", "warmup_shape": shape, "warmup_start": 0.01}
        for more in ({}, {"zero_until": 3}, {"update": "epoch"}):
            for section in sections:
                one = {"start": 0.8, **warmup, **more, **section}
                if section["name"] == "one_cycle":
                    one["warmup"] = 0
                made = Scaled(build_schedule(one, LENGTH), 0.5)
                for copied in (pickle.loads(pickle.dumps(made)), copy.deepcopy(made)):
                    pairs = [(made(x / STEPS), copied(x / STEPS)) for x in range(STEPS)]
                    assert all(first == second for first, second in pairs), section
                    assert copied.update_interval == made.update_interval


def test_every_schedule_has_its_reference() -> None:
    by_formula = {"inverse_sqrt", "wsd"}
    assert {case.partition(" ")[0] for case in LIKE_TORCH} | by_formula == set(SCHEDULES)


def test_inverse_square_root() -> None:
    """Vaswani et al., arXiv:1706.03762, eq. 3: min(step^-0.5, step * warmup^-1.5), scaled."""
    values = ours({"name": "inverse_sqrt", "start": 0.8, "warmup": "2 epochs"})
    peak = 14**-0.5
    expected = [min(s**-0.5 if s else 1.0, s * 14**-1.5) * 0.8 / peak for s in range(STEPS)]
    assert values == pytest.approx(expected)


@pytest.mark.parametrize(
    ("shape", "remaining"),
    [
        ("linear", lambda u: 1 - u),
        ("cosine", lambda u: (1 + math.cos(math.pi * u)) / 2),
        ("sqrt", lambda u: 1 - math.sqrt(u)),  # Haegele et al., arXiv:2405.18392, section 3
    ],
)
def test_warmup_stable_decay(shape: str, remaining: Callable[[float], float]) -> None:
    section = {"warmup": 7, "cooldown": "25%", "shape": shape}
    values = ours({"name": "wsd", "start": 0.8, "end": 0.1, **section})
    expected = [0.8 * step / 7 for step in range(7)] + [0.8] * 35
    expected += [0.1 + 0.7 * remaining(step / 14) for step in range(14)]
    assert values == pytest.approx(expected)


@pytest.mark.parametrize(
    ("shape", "value"),
    [
        ("linear", lambda u: 0.1 + 0.7 * u),
        ("cosine", lambda u: 0.1 + 0.7 * (1 - math.cos(math.pi * u)) / 2),
        ("exponential", lambda u: 0.1 * 8**u),
        ("constant", lambda u: 0.1),
    ],
)
def test_shapes_of_the_warmup(shape: str, value: Callable[[float], float]) -> None:
    warmup = {"warmup": "20 steps", "warmup_start": 0.1, "warmup_shape": shape}
    values = ours({"name": "exponential", "start": 0.8, "end": 0.002, **warmup})
    expected = [value(step / 20) for step in range(20)]
    expected += [0.8 * (0.002 / 0.8) ** ((step - 20) / 36) for step in range(20, STEPS)]
    assert values == pytest.approx(expected)


@pytest.mark.parametrize(
    ("section", "value"),
    [
        ({"name": "cosine", "end": 0.1}, lambda u: 0.1 + 0.35 * (1 + math.cos(math.pi * u))),
        ({"name": "linear", "end": 0.1}, lambda u: 0.8 - 0.7 * u),
        (
            {"name": "multistep", "milestones": [10, 40]},
            lambda u: 0.8 * 0.1 ** ((u >= 10 / 56) + (u >= 40 / 56)),
        ),
    ],
)
def test_a_schedule_keeps_its_place_beside_a_warmup(
    section: dict[str, Any], value: Callable[[float], float]
) -> None:
    """As if there were none, but for a rise to what the schedule is at its end (detectron2)."""
    warmup = {"warmup": 14, "warmup_start": 0.05, "warmup_interval": "fixed"}
    values = ours({"start": 0.8, **section, **warmup})
    expected = [0.05 + (value(14 / STEPS) - 0.05) * step / 14 for step in range(14)]
    expected += [value(step / STEPS) for step in range(14, STEPS)]
    assert values == pytest.approx(expected)
    whole = ours({"start": 0.8, **section, **warmup, "warmup": "100%"})
    end = value(1.0)
    assert whole == pytest.approx([0.05 + (end - 0.05) * step / STEPS for step in range(STEPS)])


def test_a_jump_after_the_warmup_is_timms() -> None:
    """timm's schedulers, as SimMIM and Swin use them: the warm-up rises to the peak."""
    section = {"name": "cosine", "start": 0.8, "end": 0.04, "warmup": 14, "warmup_start": 0.004}
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.8)
    theirs = CosineLRScheduler(
        optimizer, STEPS, 0.04, warmup_t=14, warmup_lr_init=0.004, t_in_epochs=False
    )
    values = [theirs._get_values(step, on_epoch=False)[0] for step in range(STEPS)]
    assert ours({**section, "warmup_interval": "jump"}) == pytest.approx(values, rel=1e-12)


def test_a_stretched_cosine_is_the_beginning_of_a_longer_one() -> None:
    """MSN's and I-JEPA's `ipe_scale`: their formula, for a warm-up of 14 steps and for none."""
    for warmup in (14, 0):
        section = {"name": "cosine", "start": 0.8, "end": 0.04, "warmup": warmup, "stretch": 1.25}
        expected = []
        for step in range(STEPS):
            progress = (step - warmup) / (1.25 * STEPS - warmup)
            cosine = 0.04 + (0.8 - 0.04) * 0.5 * (1 + math.cos(math.pi * progress))
            expected.append(0.8 * step / warmup if step < warmup else cosine)
        assert ours(section) == pytest.approx(expected, rel=1e-12)
    assert expected[-1] > 0.1  # far above the end


def test_capis_truncated_cosine_is_a_stretched_one() -> None:
    """Figures of its code after the warm-up, which rises in one step less than ours."""
    figures = {10: 0.001, 50: 0.0007191855733945387, 99: 0.00010385517832240471}  # truncated at 0.8
    stretch = 0.1 + 0.9 / 0.8  # as in capi/vit_large_imagenet
    section = {"name": "cosine", "start": 1e-3, "end": 0.0, "warmup": 10, "stretch": stretch}
    schedule = build_schedule(section, RunLength(num_samples=100, batch_size=1, epochs=1))
    for step, lr in figures.items():
        assert schedule(step / 100) == pytest.approx(lr, rel=1e-12)


def test_zero_until_a_time() -> None:
    section = {"name": "cosine", "start": 0.8, "end": 0.0, "warmup": 14}
    expected = [0.0] * 7 + ours(section)[7:]
    assert ours({**section, "zero_until": "1 epoch"}) == expected
    assert expected[7] == pytest.approx(0.4)


def test_durations_count_from_the_start_of_the_run() -> None:
    values = ours({"name": "multistep", "start": 0.8, "milestones": [20], "warmup": 10})
    assert values[10:] == pytest.approx([0.8] * 10 + [0.08] * 36)


@pytest.mark.parametrize("every", [2, 3, 5, 7, 11])
def test_steps_count_exactly_from_the_start_of_the_run(every: int) -> None:
    """Behind a warm-up, progress is computed twice and may be just below a whole number."""
    for warmup in range(20):
        values = ours({"name": "step", "start": 0.8, "every": every, "warmup": warmup})
        assert values[warmup:] == pytest.approx(
            [0.8 * 0.1 ** (s // every) for s in range(56)][warmup:]
        )


def test_durations_in_a_part_are_those_of_the_part() -> None:
    """Half of the second part, which has 42 of 56 steps; an epoch has 7 steps."""
    second = {"name": "linear", "start": 0.8, "end": 0.0, "warmup": "50%"}
    third = {"name": "multistep", "start": 0.5, "milestones": ["1 epoch"], "factor": 0.1}
    section = {"name": "composite", "milestones": ["2 epochs", 42]}
    values = ours({**section, "parts": [{"name": "constant", "start": 0.1}, second, third]})
    rise = [0.8 * step / 14 for step in range(14)]
    fall = [0.8 * (1 - step / 14) for step in range(14)]
    assert values == pytest.approx([0.1] * 14 + rise + fall + [0.5] * 7 + [0.05] * 7)


def test_a_warmup_longer_than_the_run_rises_to_its_end() -> None:
    """As in a short trial of a recipe."""
    values = ours({"name": "cosine", "start": 0.8, "end": 0.0, "warmup": "10 epochs"})
    assert values == pytest.approx([0.8 * step / STEPS for step in range(STEPS)])


def test_defaults_are_those_of_torch_and_the_paper() -> None:
    """StepLR and OneCycleLR; a cooldown of 20 % in arXiv:2405.18392."""
    for name, defaults in {
        "step": {"factor": 0.1},
        "multistep": {"factor": 0.1},
        "one_cycle": {"rise": "30%"},
        "wsd": {"cooldown": "20%", "shape": "linear"},
    }.items():
        required = {"step": {"every": 1}, "multistep": {"milestones": []}}.get(name, {})
        schedule = SCHEDULES[name](**required)
        assert {key: getattr(schedule, key) for key in defaults} == defaults


def test_once_an_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    from selftask.classy import UpdateInterval

    schedule = build_schedule({"name": "linear", "start": 1, "end": 0, "update": "epoch"}, LENGTH)
    assert schedule.update_interval == UpdateInterval.EPOCH


@pytest.mark.parametrize(
    ("lr", "batch", "peak"),
    [
        (0.3, 1024, 0.3),
        (ScaledLR(base=0.3), 1024, 1.2),  # SimCLR: 0.3 x batch / 256
        (ScaledLR(base=0.3, per=512), 1024, 0.6),
        (ScaledLR(base=0.075, per=1, rule="sqrt"), 4096, 4.8),  # SimCLR: 0.075 x sqrt(batch)
    ],
)
def test_scaled_with_the_batch(lr: Any, batch: int, peak: float) -> None:
    config = OptimizerConfig(name="sgd", lr=lr, end_lr=0.03, start_lr=0.015, warmup="50%")
    schedule = lr_schedule(config, LENGTH, batch=batch)
    factor = peak / 0.3 if isinstance(lr, float) or lr.rule == "linear" else 64
    middle = [schedule(where) for where in (0.0, 0.5, 1 - 1e-9)]
    assert middle == pytest.approx([0.015 * factor, peak, 0.03 * factor])


BROKEN = {
    r"optimizer\.schedule: exponential: from 0\.003 it cannot end at 0": "schedule=exponential",
    r"optimizer\.schedule\.warmup: 5%; one_cycle has its own": "schedule=one_cycle",
    r"schedule\.warmup_interval: 'fixed'; inverse_sqrt begins after": (
        "schedule={name: inverse_sqrt, warmup_interval: fixed}"
    ),
    r"optimizer\.schedule\.start: set by optimizer\.lr": "schedule={name: linear, start: 1.0}",
    r"no schedule named 'cosin'; did you mean 'cosine'": "schedule={name: cosin}",
    r"unknown key 'optimizer\.schedule\.restart' of cosine.*restarts": (
        "schedule={name: cosine, restart: 1}"
    ),
    r"unknown key 'optimizer\.lr\.start_value'.* did you mean 'optimizer\.lr\.start'": (
        "lr={name: linear, start_value: 0.1, end: 0.0}"
    ),
    r"optimizer\.lr: end is missing": "lr={name: linear, start: 0.1}",
    r"optimizer\.lr\.base is missing": "lr={per: 512}",
    r"optimizer\.schedule\.milestones: 'soon' is not a duration": (
        "schedule={name: multistep, milestones: [soon]}"
    ),
    r"optimizer\.betas=.*: end is missing": "betas=[{name: linear, start: 0.9}, 0.99]",
    r"optimizer\.weight_decay\.end=-1\.0: must be at least 0": (
        "weight_decay={name: cosine, start: 0.1, end: -1.0}"
    ),
    r"unknown key 'optimizer\.lr_scale'": "lr_scale=linear",
    r"write optimizer\.lr=\{name: classy:step": "schedule={name: 'classy:step', values: [1.0]}",
}


@pytest.mark.parametrize("message", BROKEN)
def test_broken_schedules_are_told_before_training(message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config("simclr/digits", [f"optimizer.{BROKEN[message]}"])


def test_what_depends_on_the_length_is_told_when_it_is_known() -> None:
    with pytest.raises(UserError, match="warm-up of 25% and a cooldown of 89%"):
        ours({"name": "wsd", "start": 1, "end": 0, "warmup": "2 epochs", "cooldown": "89.3%"})
    parts = [{"name": "constant", "start": 1.0}] * 2
    with pytest.raises(UserError, match=r"milestones \['9 epochs'\] are steps \[63\] of 56"):
        ours({"name": "composite", "parts": parts, "milestones": ["9 epochs"]})
    with pytest.raises(UserError, match=r"milestones \[20, 20\] are steps .* they must rise"):
        ours({"name": "composite", "parts": [*parts, parts[0]], "milestones": [20, 20]})


@dataclass(frozen=True, kw_only=True)
class Square(ScheduleConfig):
    def curve(self, start: float, end: float, span: Span) -> Any:
        return lambda where: start + (end - start) * where**2


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (0.5, r"test_schedules\.py:\d+: the curve of a schedule returned 0\.5; expected a f"),
        (lambda where: None, "returned a function with the value None at 0; expected"),
    ],
)
def test_a_curve_that_is_no_function_to_numbers(
    returned: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Wrong(Square):
        def curve(self, start: float, end: float, span: Span) -> Any:
            return returned

    monkeypatch.setitem(SCHEDULES._registered, "square", Wrong)
    with pytest.raises(UserError, match=message):
        ours({"name": "square", "start": 2.0, "end": 1.0, "warmup": 7})


def test_a_schedule_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SCHEDULES._registered, "square", Square)
    values = ours({"name": "square", "start": 2.0, "end": 1.0, "warmup": 7})
    assert values[:7] == pytest.approx([2 * step / 7 for step in range(7)])
    assert values[7:] == pytest.approx([2 - (step / 49) ** 2 for step in range(49)])


def test_a_schedule_without_a_curve_is_refused(forget_names: None) -> None:
    match = r"is a class without a method `curve`; .* class selftask.optim.schedules.ScheduleConfig"
    with pytest.raises(UserError, match=match):
        register_schedule("plain")(type("Plain", (), {"build": lambda self, length: None}))


def test_one_cycle_may_rise_to_the_end() -> None:
    config = {"name": "one_cycle", "first": 0.1, "start": 1.0, "end": 0.0, "rise": "100%"}
    schedule = build_schedule(config, LENGTH)
    assert [schedule(where) for where in (0.0, 0.5, 1.0)] == pytest.approx([0.1, 0.55, 1.0])
