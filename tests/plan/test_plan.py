"""`selftask plan`: its arithmetic against formulas, published figures and the shell."""

from __future__ import annotations

import json
import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from selftask.cli.main import main
from selftask.config.load import load_config
from selftask.config.values.budget import show_bytes, show_count
from selftask.distributed.collectives import (
    all_gather_cat,
    all_reduce_sum,
    gather_objects,
    rank,
    reduce_scatter_sum,
    world_size,
)
from selftask.distributed.simulated import SIMULATED
from selftask.errors import UserError
from selftask.models.build import build_backbone
from selftask.models.dropout import draw_per_sample
from selftask.plan import measure
from selftask.plan.assumptions import Assumptions, take_assumptions
from selftask.plan.checkpoints import daly, lost_share
from selftask.plan.data import plan_data
from selftask.plan.fake_task import FakeTask
from selftask.plan.plan import Plan, make_plan
from selftask.plan.step_tracker import StepTracker
from selftask.plan.table import duration, lines
from selftask.random.keyed import LAYER_DRAWS


def plan(recipe: str, *overrides: str) -> Plan:
    rest, given = take_assumptions([*overrides])
    return make_plan(load_config(recipe, rest), given)


@pytest.fixture(scope="module")
def two_ranks() -> Plan:
    """SimCLR on digits with its own small ResNet, for two ranks of 128 images."""
    return plan("simclr", "launch.processes=2", "images_per_s=1000", "price_per_hour=2")


def test_arithmetic_is_that_of_the_run(two_ranks: Plan) -> None:
    values = two_ranks.to_dict()
    assert (values["samples"], values["samples_per_step"], values["steps"]) == (1347, 256, 400)
    assert values["seconds"] == pytest.approx(400 * 256 / 1000)
    assert values["price"] == pytest.approx(102.4 / 3600 * 2 * 2)


def test_gradients_travel_in_a_ring(two_ranks: Plan) -> None:
    """2 (n - 1) / n of the trained parameters in float32; n = 2."""
    trained = sum(part.trained for part in two_ranks.parts)
    assert two_ranks.traffic["gradients (all-reduce)"] == 4 * trained
    # two views of 128 x 128 float32, sent to one other rank
    gathered = two_ranks.traffic["loss and statistics (all-gather)"]
    assert gathered == 2 * 128 * 128 * 4
    # its gradient: of the gathered 2 * 256 * 128, the other rank's half
    assert two_ranks.traffic["loss and statistics (reduce-scatter)"] == 2 * 128 * 128 * 4
    assert two_ranks.traffic["loss and statistics (all-reduce)"] == 4, "the logged loss alone"


def test_fixed_memory_is_four_times_the_weights(two_ranks: Plan) -> None:
    """Weights, gradients and two moments of Adam (and its step counters)."""
    of = two_ranks.memory.of
    trained = 4 * sum(part.trained for part in two_ranks.parts)
    assert of["gradients"] == trained
    assert of["weights"] == 4 * sum(part.trained + part.frozen for part in two_ranks.parts)
    assert of["optimizer"] == pytest.approx(2 * trained, rel=1e-3)


def test_synchronized_batch_norm_keeps_as_much_as_batch_norm(two_ranks: Plan) -> None:
    """As torch's kernels; statistics and counts of C channels go to the other rank, sums return."""
    words = ("parallel.sync_batch_norm=all", "launch.processes=2")
    synced = plan("simclr", *words)
    assert synced.memory.of["activations"] == pytest.approx(
        two_ranks.memory.of["activations"], rel=1e-3
    )
    network = build_backbone(load_config("simclr", []).backbone)
    norms = [part for part in network.modules() if isinstance(part, nn.BatchNorm2d)]
    widths = [*(norm.num_features for norm in norms), 128, 128]  # the last two in the head
    sent = {key: synced.traffic[key] - two_ranks.traffic[key] for key in synced.traffic}
    assert sent["loss and statistics (all-gather)"] == 4 * sum(2 * c + 1 for c in widths)
    assert sent["loss and statistics (all-reduce)"] == 4 * 2 * sum(widths)


@pytest.mark.slow
def test_fsdp_divides_what_is_kept() -> None:
    """Each rank of 4 keeps a quarter of weights, gradients and moments, and gathers blocks."""
    words = ("launch.processes=4", "train.batch_size=64")
    whole = plan("mae/digits", *words).memory.of
    sharded = plan("mae/digits", *words, "parallel.reduce=fsdp")
    for kind in ("weights", "gradients", "optimizer"):
        assert sharded.memory.of[kind] == pytest.approx(whole[kind] / 4, rel=0.02)
    assert sharded.memory.largest_gather > 0
    passes = 2  # forward and backward
    gathered = sharded.traffic["parameters (all-gather)"]
    network = sum(p.trained + p.frozen for p in sharded.parts)
    assert gathered == pytest.approx(passes * 4 * network * 3 / 4, rel=0.02)


@pytest.mark.parametrize(
    ("recipe", "words", "macs"),
    [
        pytest.param(  # torchvision's page: 4.09
            "supervised/resnet50_imagenet", (), 4.09e9, marks=pytest.mark.slow
        ),
        ("supervised/images", ("data=none", "image_size=224", "backbone=vit_base"), 17.56e9),
    ],
)
def test_flops_of_published_models(recipe: str, words: tuple[str, ...], macs: float) -> None:
    flops = plan(recipe, *words, "samples=1.28M", "classes=1000").step.flops
    assert flops["forward"] / 2 == pytest.approx(macs, rel=0.01)
    # two products for each in the forward pass, but none for the gradient of the images
    assert flops["backward"] == pytest.approx(2 * flops["forward"], rel=0.03)


def test_a_model_that_the_meta_device_cannot_build() -> None:
    """torchvision computes the widths of a RegNet by tensors; its table says 0.414."""
    words = ("data=none", "image_size=224", "backbone=torchvision:regnet_x_400mf")
    flops = plan("supervised/images", *words, "samples=1.28M", "classes=1000").step.flops
    assert flops["forward"] / 2 == pytest.approx(0.414e9, rel=0.01)


def test_a_teacher_counts_that_runs_as_batches_are_prepared() -> None:
    """MILAN's teacher chooses the patches that the student sees; its FLOPs are those of timm's."""
    words = ("data=none", "method.teacher={model: 'timm:vit_tiny_patch16_224', weights: none}")
    cost = plan("milan/images", *words, "image_size=224", "samples=1.28M").step
    teacher = timm.create_model("vit_tiny_patch16_224", num_classes=0).eval()
    for block in teacher.blocks:
        block.attn.fused_attn = False  # torch counts nothing of a CPU's fused attention before 2.15
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        teacher(torch.rand(1, 3, 224, 224))
    assert cost.flops["teacher"] == pytest.approx(counter.get_total_flops(), rel=0.01)
    assert cost.teacher_passes == 1


def test_stochastic_depth_costs_what_runs() -> None:
    """A step computes each branch of every sample before it drops some: the rate saves nothing."""
    small = "name: vit_micro, img_size: 32, patch_size: 8, depth: 2"
    planned, counted = [], []
    for rate in (0.0, 0.9):
        words = (f"backbone={{{small}, drop_path: {rate}}}", "image_size=32", "train.batch_size=8")
        planned.append(plan("supervised/digits", *words).step.flops)
        backbone = load_config("supervised/digits", [*words]).backbone
        network = build_backbone(backbone).train()
        assert draw_per_sample([network], seed=0) == []
        assert bool(LAYER_DRAWS.num_layers) == bool(rate), "the layers of a run, on real tensors"
        LAYER_DRAWS.start(torch.tensor([[0, index] for index in range(8)]), torch.device("cpu"))
        with FlopCounterMode(display=False) as counter:
            network(torch.rand(8, 3, 32, 32)).sum().backward()
        LAYER_DRAWS.stop()
        counted.append(counter.get_total_flops())
    assert planned[0] == planned[1] and min(planned[0].values()) > 0
    assert counted[0] == counted[1] > 0


def test_dalys_interval_loses_the_least_time() -> None:
    write, mtbf = 60.0, 4 * 3600.0
    best = daly(write, mtbf)
    assert best == pytest.approx(math.sqrt(2 * write * mtbf), rel=0.06)  # Young's
    losses = {factor: lost_share(factor * best, write, mtbf) for factor in (0.8, 1.0, 1.25)}
    assert min(losses, key=losses.__getitem__) == 1.0
    assert daly(write=100.0, mtbf=20.0) == 20.0


def test_simulated_ranks_communicate_with_nobody() -> None:
    import torch

    with SIMULATED.of(3):
        assert (world_size(), rank()) == (3, 0)
        assert all_gather_cat(torch.ones(2, 5)).shape == (6, 5)
        assert all_reduce_sum(torch.ones(6)).shape == (6,)
        assert reduce_scatter_sum(torch.ones(6, 4)).shape == (2, 4)
        assert gather_objects("x") == ["x"] * 3
        sent = {"all_gather": 2 * 40, "all_reduce": 2 * 2 * 24 // 3, "reduce_scatter": 2 * 96 // 3}
        assert sent == SIMULATED.bytes_of
    assert world_size() == 1


def test_words_of_the_plan() -> None:
    words = ["samples=1.28M", "train.epochs=3", "memory=80GB", "mtbf=24h", "price_per_hour=2.5"]
    rest, given = take_assumptions(words)
    assert rest == ["train.epochs=3"]
    assert given == Assumptions(samples=1_280_000, memory=80e9, mtbf=86_400.0, price_per_hour=2.5)
    assert take_assumptions(["images_per_s=0.4"])[1].images_per_s == 0.4, "of a slow machine"
    wrongs = ("samples=many", "memory=0.5", "mtbf=24", "images_per_s=0", "price_per_hour=nan")
    for wrong in (*wrongs, "classes=0.4"):
        with pytest.raises(UserError, match=f"{wrong}: expected .* such as"):
            take_assumptions([wrong])


def test_numbers_are_short() -> None:
    counts = [0, 12, 999.6, 999.96, 1536, 23.5e6, 4.1e9, 2.3e21]
    shown = ["0", "12", "999.6", "1 k", "1.536 k", "23.5 M", "4.1 G", "2.30e+21"]
    assert [show_count(n) for n in counts] == shown
    assert [show_count(n, 3) for n in (12, 342_123, 999_600)] == ["12", "342 k", "1 M"]
    assert [duration(s) for s in (0.02, 35, 600, 7200, 500_000)] == [
        *("0.02 s", "35 s", "10.0 min", "2.0 h", "5.8 days")
    ]
    assert [show_bytes(n) for n in (640, 3100, 1.5e9)] == ["640 B", "3.1 kB", "1.5 GB"]


def test_table_says_what_is_an_estimate(two_ranks: Plan) -> None:
    text = "\n".join(lines(two_ranks))
    assert "plan of simclr on 2 ranks" in text
    assert "memory of a rank at the peak of a step (estimate): manual, float32" in text
    assert "128 a rank x 2 ranks = 256 samples a step" in text
    slow = replace(two_ranks.assumptions, images_per_s=0.4)
    assert "0.4 images a second" in "\n".join(lines(replace(two_ranks, assumptions=slow)))
    train = replace(two_ranks.config.train, checkpoint_every="0.1%")  # of 400 steps
    often = replace(two_ranks, config=replace(two_ranks.config, train=train))
    assert "0.1% = 0.256 s, " in "\n".join(lines(often)), "each step, as the run does"


def test_data_that_are_not_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "simclr/resnet50_imagenet"]) == 2
    error = capsys.readouterr().err
    assert "to plan without the data, give samples=1.28M" in error
    assert "Traceback" not in error


def test_fewer_samples_than_a_batch(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "simclr", "samples=100", "train.batch_size=128"]) == 2
    assert "train.batch_size: 128 is more than the 100 images" in capsys.readouterr().err


@pytest.mark.parametrize("data", ["data=digits", "samples=1000"])
def test_channels_of_the_plan_are_those_given(data: str) -> None:
    words, assumptions = take_assumptions([data, "side=28", "channels=4"])
    assert plan_data(load_config("simclr", words), assumptions).channels == 4


def test_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["plan", "simclr", "--json", "memory=1GB", f"out={tmp_path / 'run'}"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["fits"] is True
    assert printed["memory"]["total"] == sum(
        size for kind, size in printed["memory"].items() if kind != "total"
    )
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("groups", [1, 4, 8])
def test_a_backward_pass_costs_two_forward_passes_with_groups_too(groups: int) -> None:
    """Of 8 channels to 8, 3 x 3, on 6 x 6 pixels of 2 images; a multiply-add is two FLOPs."""
    convolution = nn.Conv2d(8, 8, 3, padding=1, groups=groups)
    images = torch.zeros(2, 8, 6, 6, requires_grad=True)
    with StepTracker() as tracker:
        convolution(images).sum().backward()
    once = 2 * 2 * 8 * (8 // groups) * 9 * 36
    assert tracker.flops == {"forward": once, "backward": 2 * once}


class Sleeping(FakeTask):
    """A task whose steps take a known time."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.train_step_function = lambda task: time.sleep(0.05)


def test_measure_applies_the_arithmetic_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, bool]] = []

    class Noting(Sleeping):
        def read(self, count: int, steps: int = 1) -> list[int]:
            deterministic = torch.are_deterministic_algorithms_enabled()
            seen.append((torch.get_float32_matmul_precision(), deterministic))
            return super().read(count, steps)

    monkeypatch.setattr(measure, "_SECONDS", 0.1)
    monkeypatch.setattr(measure, "FakeTask", Noting)
    words = ["train.matmul_precision=high", "train.deterministic=true"]
    make_plan(load_config("simclr/digits", words), Assumptions(), measured=True)
    assert set(seen) == {("high", True)}
    assert torch.get_float32_matmul_precision() == "highest"


def test_measure_times_the_steps_of_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "_SECONDS", 0.8)
    monkeypatch.setattr(measure, "FakeTask", Sleeping)
    config = load_config("simclr/digits", ["launch.processes=2", "train.batch_size=64"])
    rate = make_plan(config, Assumptions(), measured=True).assumptions.images_per_s
    assert rate is not None
    assert 0.5 * 64 / 0.05 < rate <= 64 / 0.05, "both ranks, with 32 images a step each"


def test_measure_waits_for_the_device_after_blocks_of_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events: list[str] = []

    def step(task: FakeTask) -> None:
        events.append("step")
        time.sleep(0.05)

    class Noting(Sleeping):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.train_step_function = step

    monkeypatch.setattr(measure, "_SECONDS", 0.8)
    monkeypatch.setattr(measure, "FakeTask", Noting)
    monkeypatch.setattr(measure, "wait_for", lambda device: events.append("wait"))
    make_plan(load_config("simclr/digits", []), Assumptions(), measured=True)
    blocks = [part.split() for part in " ".join(events).split("wait") if part.strip()]
    assert len(blocks[0]) == 1, "the first step, which is not timed"
    assert all(1 < len(block) <= 10 for block in blocks[1:]), "of half a second"
