"""UNIC against the figures of its authors' code, and teachers of any kind."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import tiny
from figures import draw
from selftask.batch import Batch
from selftask.cli.model.export import export_run
from selftask.config.load import load_config, to_yaml
from selftask.config.schema import FrozenModule
from selftask.data.loading.open_data import open_data
from selftask.errors import ConfigError, UserError
from selftask.methods.unic import UNIC, LadderHead, Predictions, kept_teachers
from selftask.models.distillation.patch_targets import PatchTeacher
from selftask.models.distillation.standardize import (
    Moments,
    RunningMoments,
    moments_of,
    standardize,
)
from selftask.models.weights.model_source import open_model
from selftask.task import Task
from selftask.task.loop import train_loop

# naver/unic for seeds 0 and 500, with weights 1 and 1: without dropping, and with the teacher of
# largest loss of each image alone: loss, gradients of the first teacher's images and patches and of
# the second one's images
LOSSES = [
    [
        (1.616504416312273, 0.07638481699910984, 0.0320817882815924, 0.0636908309294316),
        (1.846160916484313, 0.11263816125455285, 0.050443764787729224, 0.075457730545575),
    ],
    [
        (1.60648197457718, 0.0892737855835755, 0.032308563660518284, 0.06522452553677212),
        (1.8076419188201551, 0.12439920031617048, 0.041516344602052, 0.08651921502340834),
    ],
]
_NONE = torch.empty(0, dtype=torch.int64)
TEACHERS = {name: FrozenModule(model="-") for name in "ab"}


@pytest.mark.parametrize("dropped", [0, 1])
@pytest.mark.parametrize("case", [0, 1])
def test_loss_is_that_of_the_authors_code(case: int, dropped: int) -> None:
    seed, shapes = 500 * case, [(5, 8), (5, 4, 8)] * 2
    method = UNIC(UNIC.Config(teachers=TEACHERS, cosine_weight=1.0, smooth_l1_weight=1.0))
    outputs = [draw(seed + n, *shape).requires_grad_() for n, shape in enumerate(shapes)]
    batch = Batch(views={}, labels=_NONE, index=_NONE, key=_NONE)
    batch["targets"] = [draw(seed + 4 + n, *shape) for n, shape in enumerate(shapes)]
    batch["dropped"] = torch.full((2, 5), bool(dropped))
    loss = sum(method(Predictions(outputs, None), batch).values())
    gradients = torch.autograd.grad(loss, outputs)
    computed = (loss.item(), *(gradient.norm().item() for gradient in gradients[:3]))
    assert computed == pytest.approx(LOSSES[case][dropped], rel=1e-9)


def test_the_teacher_of_largest_loss_is_never_dropped() -> None:
    losses = torch.tensor([[3.0, 1.0, 2.0], [1.0, 2.0, 5.0], [2.0, 1.5, 1.0]])
    dropped = torch.tensor([[True, False, True], [False, True, True], [True, True, False]])
    expected = [[True, True, False], [True, True, True], [False, False, True]]
    assert kept_teachers(losses, dropped).tolist() == expected


def test_moments_are_those_of_a_mixture() -> None:
    """Of past batches with falling weights, from sums of x and of x squared."""
    running = RunningMoments(3).double()
    batches = [draw(n, 6, 3) * (n + 1) + n for n in range(4)]
    mean, square = torch.zeros(3), torch.ones(3)
    for rows, share in zip(batches, (1.0, 0.5, 0.25, 0.1), strict=True):
        mean = (1 - share) * mean + share * rows.mean(dim=0)
        square = (1 - share) * square + share * rows.square().mean(dim=0)
        running.keep(running.moved(moments_of([rows[:, :1], rows[:, 1:]]), share))
        assert torch.allclose(running.mean, mean, rtol=1e-12)
        assert torch.allclose(running.variance, square - mean.square(), rtol=1e-9)


def test_standardized_features_have_mean_0_and_variance_1() -> None:
    parts = [3 * draw(1, 7, 2) + 5, draw(2, 7, 4, 3) - 2]
    for part in standardize(parts, moments_of(parts)):
        variance, mean = torch.var_mean(part.flatten(0, -2), dim=0, correction=0)
        assert torch.allclose(mean, torch.zeros_like(mean), atol=1e-12)
        assert torch.allclose(variance, torch.ones_like(mean), atol=1e-5)
    fixed = Moments(torch.tensor([1.0, 2.0]), torch.tensor([4.0, 9.0]))
    (row,) = standardize([torch.tensor([[3.0, 8.0]])], fixed)
    assert row.tolist() == [pytest.approx([1.0, 2.0])]


def test_heads_add_the_layers_of_the_ladder() -> None:
    head, layers = LadderHead(4, 2, 6, 3), [draw(n, 5, 4).float() for n in range(3)]
    expected = head.last(layers[0])
    for number, layer in enumerate(layers[1:]):
        expected = expected + head.ladder[number](layer)
    assert torch.allclose(head(*layers), expected)
    assert not torch.allclose(head(*layers), head.last(layers[0]))


# -- in a run --------------------------------------------------------------------------------------

NO_OTHERS = "first: null, second: null"  # teachers of the recipe
OWN = f"method.teachers={{{NO_OTHERS}, own: 'minitask:TinyBackbone'}}"


def _task(folder: Path, backbone: str, *words: str) -> Task:
    """The tiny task with another backbone."""
    options = [word for word in tiny.overrides("unic", folder) if not word.startswith("backbone")]
    every = [*options, "backbone=null", f"backbone={backbone}", *words]
    config = load_config("unic/digits", every)
    return Task(config, sources=open_data(config.data))


def test_a_student_of_any_network_learns_from_your_own_teacher(tmp_path: Path) -> None:
    """Without patches: pooled features of a class of your own, for teacher and student."""
    words = ["method.patch_weight=0", OWN, "optimizer.lr=0.03", "train.epochs=8"]
    task = _task(tmp_path, "minitask:TinyBackbone", *words)
    train_loop(task)
    batch = task.last_batch
    assert [target.shape for target in batch["targets"]] == [(16, 6)]
    assert list(batch.terms) == ["pooled"]
    losses = [row["loss"] for row in tiny.rows(tmp_path / "run") if "loss" in row]
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    task.close()


def test_the_first_targets_are_standardized_by_their_own_batch(tmp_path: Path) -> None:
    """The share of a step is 1 at first, and moments include the step's batch."""
    task = _task(tmp_path, "minitask:TinyBackbone", "method.patch_weight=0", OWN)
    task.prepare()
    task.on_start(), task.on_phase_start()
    task.step()
    (target,) = task.last_batch["targets"]
    variance, mean = torch.var_mean(target, dim=0, correction=0)
    torch.testing.assert_close(mean, torch.zeros(6), rtol=0, atol=1e-4)
    assert ((variance > 0.9) & (variance <= 1.001)).all()  # less than 1 by an epsilon
    task.close()


def test_runs_files_and_models_by_name_with_a_ladder(tmp_path: Path) -> None:
    """A run and a model of timm, whose patches are interpolated to the student's grid."""
    tiny.train("dino", tmp_path, "dino", "train.epochs=1").close()
    vit = "vit: {model: timm:test_vit, weights: none}"
    teachers = f"method.teachers={{{NO_OTHERS}, run: {tmp_path / 'dino'}, {vit}}}"
    words = ["method.ladder=[0]", "method.drop_probability=1.0", "train.epochs=1"]
    task = tiny.train("unic", tmp_path, "run", teachers, *words)
    batch, student = task.last_batch, task.base_model
    widths = [target.shape[-1] for target in batch["targets"]]
    assert widths == [w for w in task.loss.widths for _ in range(2)] and widths[2:] == [64, 64]
    rows, columns = batch.output.grid
    assert batch["targets"][3].shape == (16, rows * columns, 64)
    assert all(len(head.ladder) == 1 for head in student.head)
    losses = task.loss.distances(batch.output.of_heads, batch["targets"]).sum(dim=1)
    assert kept_teachers(losses, batch["dropped"]).sum(dim=0).tolist() == [1] * 16
    task.close()


STUDENTS = "method.students={shallow: {name: vit_micro, depth: 1}, vit_micro: {depth: 3}}"


def test_students_learn_as_in_runs_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From one pass of each teacher; the run is stopped once and resumed."""
    alone = tiny.train("unic", tmp_path, "alone")
    state = alone.export_backbone().state_dict()
    alone.close()
    tiny.train("unic", tmp_path, "run", STUDENTS, "train.stop_at=7").close()
    with monkeypatch.context() as patched:
        on_grid, passes = PatchTeacher.on_grid, list[int]()
        patched.setattr(PatchTeacher, "on_grid", lambda *a: passes.append(1) or on_grid(*a))
        together = tiny.train("unic", tmp_path, "run", STUDENTS)
    assert len(passes) == 2 * (tiny.STEPS - 7)
    assert not tiny.differences(together.export_backbone().state_dict(), state)
    together.close()
    tiny.train("unic", tmp_path, "whole", STUDENTS).close()
    assert not tiny.differences(*(tiny.last_state(tmp_path / out) for out in ("run", "whole")))

    written = tmp_path / "run" / "export"
    (tmp_path / "run" / "config.yaml").write_text(to_yaml(together.config))
    export_run(tmp_path / "run", tmp_path / "again")
    for name, depth in (("shallow", 1), ("vit_micro", 3)):
        backbone, facts = open_model(str(written / name))
        assert len(backbone.blocks) == facts["architecture"]["args"]["depth"] == depth
        trained = together.base_model.further[name].backbone.state_dict()
        assert not tiny.differences(backbone.state_dict(), trained)
        again, _ = open_model(str(tmp_path / "again" / name))
        assert not tiny.differences(again.state_dict(), trained)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["vit_micro", "method.students={coarse: {name: vit_micro, patch_size: 8}}"],
            r"method\.students\.coarse: its patches are 8 pixels apart",
        ),
        (["vit_micro", OWN], r"method\.teachers\.own: a TinyBackbone gives one vector"),
        (["vit_micro", "method.ladder=[9]"], r"method\.ladder=\[9\]: the student has \d+ hidden"),
        (["small_resnet", "method.ladder=[0]"], r"method\.ladder: its layers must have the width"),
        (["minitask:TinyBackbone"], r"method\.patch_weight: a TinyBackbone gives one vector"),
    ],
)
def test_what_does_not_fit_is_refused(words: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        _task(tmp_path, *words).prepare()


def test_teachers_are_needed() -> None:
    with pytest.raises(ConfigError, match=r"teachers: give at least one, such as"):
        load_config("unic/digits", [f"method.teachers={{{NO_OTHERS}}}"])
