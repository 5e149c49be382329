"""What we rely on in Classy Vision 0.7.0, as measured on torch 2.15 (research/trainers.md, 7).

Not tests of ours: when one of these fails, a release of torch or Classy broke what we stand on.
"""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

import tiny
from ranks import run_ranks
from selftask import classy
from selftask.classy import ClassyHook, ClassyMeter, ClassyOptimizer, ClassyTask, schedulers

WEIGHT = [1.0, 2.0]


class SGD(ClassyOptimizer):
    """The smallest optimizer under Classy's contract."""

    def prepare(self, param_groups: Any) -> None:
        self.optimizer = torch.optim.SGD(param_groups)


def optimizer(**options: Any) -> tuple[nn.Parameter, ClassyOptimizer]:
    weight = nn.Parameter(torch.tensor(WEIGHT))
    built = SGD()
    built.set_param_groups([{"params": [weight], **options}])
    return weight, built


def test_step_needs_where() -> None:
    _, sgd = optimizer(lr=0.1)
    with pytest.raises(RuntimeError, match=r"ClassyOptimizer\.step requires `where` argument"):
        sgd.step()
    for wrong in (1.0, -0.1):
        with pytest.raises(AssertionError, match=rf"Invalid where: {wrong}"):
            sgd.step(where=wrong)
    with pytest.raises(RuntimeError, match="set_param_groups must be called before step"):
        SGD().step(where=0.5)


def test_every_option_follows_where() -> None:
    weight, sgd = optimizer(
        lr=schedulers.LinearParamScheduler(1.0, 0.0),
        weight_decay=schedulers.CosineParamScheduler(0.5, 0.1),
        momentum=0.0,
    )
    weight.grad = torch.zeros(2)
    sgd.step(where=0.5)
    group = sgd.param_groups[0]
    assert (group["lr"], group["weight_decay"]) == (0.5, pytest.approx(0.3))
    assert weight.tolist() == pytest.approx([w * (1 - 0.5 * 0.3) for w in WEIGHT])
    assert sgd.options_view.lr == 0.5
    assert sgd.param_groups is sgd.optimizer.param_groups


def test_epoch_schedulers_move_on_epoch_only() -> None:
    lr = schedulers.LinearParamScheduler(1.0, 0.0)
    lr.update_interval = schedulers.UpdateInterval.EPOCH
    weight, sgd = optimizer(lr=lr)
    weight.grad = torch.zeros(2)
    sgd.step(where=0.5)
    assert sgd.options_view.lr == 1.0
    sgd.on_epoch(0.5)
    assert sgd.options_view.lr == 0.5


def test_schedulers_are_functions_of_where() -> None:
    for scheduler, expected in [
        (schedulers.ConstantParamScheduler(0.3), lambda w: 0.3),
        (schedulers.LinearParamScheduler(1.0, 3.0), lambda w: 1.0 + 2.0 * w),
        (
            schedulers.CosineParamScheduler(1.0, 0.2),
            lambda w: 0.2 + 0.4 * (1 + math.cos(math.pi * w)),
        ),
        (schedulers.StepParamScheduler(3, [1.0, 0.1, 0.01]), lambda w: 0.1 ** int(3 * w)),
    ]:
        for where in (0.9, 0.0, 0.1, 0.5, 0.5):  # in any order: nothing is stepped
            assert scheduler(where) == pytest.approx(expected(where)), (scheduler, where)


def test_composite_scheduler_as_measured() -> None:
    rise = schedulers.LinearParamScheduler(0.3, 4.8)
    fall = schedulers.CosineParamScheduler(4.8, 0.0048)
    both = schedulers.CompositeParamScheduler([rise, fall], [0.1, 0.9], ["rescaled", "fixed"])
    measured = {0: 0.3, 0.05: 2.55, 0.1: 4.682653, 0.5: 2.4024, 0.99: 0.005983}
    assert [both(where) for where in measured] == pytest.approx(list(measured.values()), rel=1e-4)


def test_grad_scaler_steps_a_classy_optimizer() -> None:
    weight, sgd = optimizer(lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale((weight * 0.5).sum()).backward()
    scaler.unscale_(sgd)
    assert weight.grad is not None
    assert weight.grad.tolist() == [0.5, 0.5]
    scaler.step(sgd, where=0.0)
    scaler.update()
    assert weight.tolist() == [0.5, 1.5]
    sgd.zero_grad()
    scaler.scale((weight * torch.inf).sum()).backward()
    scaler.unscale_(sgd)
    scaler.step(sgd, where=0.0)
    scaler.update()
    assert weight.tolist() == [0.5, 1.5]
    assert scaler.get_scale() == 4.0


def test_torchs_own_schedulers_do_not_take_it() -> None:
    _, sgd = optimizer(lr=1.0)
    with pytest.raises(TypeError, match="is not an Optimizer"):
        torch.optim.lr_scheduler.StepLR(sgd, 1)  # type: ignore[arg-type]


def test_hooks_are_abstract_and_keep_state() -> None:
    class Half(ClassyHook):  # type: ignore[misc, valid-type]
        def on_start(self, task: Any) -> None: ...

    with pytest.raises(TypeError, match="Can't instantiate abstract class"):
        Half()

    class Counter(Half):
        on_phase_start = on_step = on_phase_end = on_end = ClassyHook._noop

        def __init__(self, start: int) -> None:
            super().__init__()
            self.state.count = start

    saved = Counter.from_config({"start": 3}).get_classy_state()
    other = Counter(0)
    other.set_classy_state(saved)
    assert saved == {"count": 3}
    assert other.state.count == 3


def test_one_set_of_classes() -> None:
    """Ours are loaded without the packages around them; the packages must find and use the same."""
    import classy_vision.hooks
    import classy_vision.meters
    import classy_vision.tasks
    import classy_vision.tasks.classy_task as classy_task

    assert classy_vision.tasks.ClassyTask is ClassyTask
    assert classy_task.ClassyTask is ClassyTask
    assert classy_vision.hooks.ClassyHook is ClassyHook
    assert classy_vision.meters.ClassyMeter is ClassyMeter
    assert issubclass(classy_vision.tasks.ClassificationTask, ClassyTask)
    assert issubclass(classy_vision.hooks.LossLrMeterLoggingHook, ClassyHook)


@pytest.mark.parametrize("first", ["import classy_vision.tasks", "import selftask.classy"])
def test_whoever_is_first(first: str) -> None:
    code = (
        f"{first}\nimport selftask.classy as ours\n"
        "from classy_vision.tasks.classy_task import ClassyTask\n"
        "import classy_vision.hooks.classy_hook as hook\n"
        "from classy_vision.meters import ClassyMeter\n"
        "assert ClassyTask is ours.ClassyTask and hook.ClassyHook is ours.ClassyHook\n"
        "assert ClassyMeter is ours.ClassyMeter\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env=tiny.environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_meters_hold_totals_and_the_rest_since() -> None:
    meter = classy.build("meter", "classy:accuracy", {"topk": [1, 2]})
    scores = torch.eye(4)
    meter.update(scores, torch.tensor([0, 1, 2, 0]))
    meter.sync_state()
    assert meter.value["top_1"] == 0.75
    meter.update(scores[:1], torch.tensor([3]))
    meter.sync_state()
    assert meter.value["top_1"] == pytest.approx(0.6)
    other = classy.build("meter", "classy:accuracy", {"topk": [1, 2]})
    other.set_classy_state(meter.get_classy_state())
    assert other.value["top_1"] == pytest.approx(0.6)
    meter.reset()
    meter.update(scores, torch.tensor([1, 1, 1, 1]))
    meter.sync_state()
    assert meter.value["top_1"] == 0.25


def test_losses_by_name() -> None:
    scores, target = torch.randn(5, 3), torch.tensor([0, 1, 2, 0, 1])
    smoothed = classy.build(
        "loss",
        "classy:label_smoothing_cross_entropy",
        {"ignore_index": -1, "reduction": "mean", "smoothing_param": 0.1},
    )
    # Classy spreads smoothing over the classes and divides by 1 + smoothing: torch's eps
    expected = nn.functional.cross_entropy(scores, target, label_smoothing=0.1 / 1.1)
    assert float(smoothed(scores, target)) == pytest.approx(float(expected), rel=0.02)
    assert {"label_smoothing_cross_entropy", "soft_target_cross_entropy"} <= set(
        classy.names("loss")
    )


def test_names_that_others_use() -> None:
    assert {"sgd", "adam", "adamw", "rmsprop", "rmsprop_tf"} <= set(classy.names("optimizer"))
    assert {"accuracy", "precision_at_k", "recall_at_k"} <= set(classy.names("meter"))
    assert {"loss_lr_meter_logging", "output_csv"} <= set(classy.names("hook"))
    assert {"cosine", "linear", "multistep", "step", "composite"} <= set(classy.names("schedule"))


def overwritten(rank: int) -> tuple[float, float, float]:
    """Classy's mean over ranks of 1 and 3; what it left in its input; ours."""
    from classy_vision.generic.distributed_util import all_reduce_mean as classys

    from selftask.distributed.collectives import all_reduce_mean as ours

    theirs, kept = torch.tensor(2.0 * rank + 1), torch.tensor(2.0 * rank + 1)
    mean = classys(theirs)
    assert float(ours(kept)) == float(mean)
    assert float(kept) == 2.0 * rank + 1
    return float(mean), float(theirs), float(ours(kept))


@pytest.mark.slow
def test_why_we_have_our_own_mean() -> None:
    """Theirs leaves the sum in its input; the day it does not, ours may go."""
    assert run_ranks(overwritten, 2) == [(2.0, 4.0, 2.0)] * 2
