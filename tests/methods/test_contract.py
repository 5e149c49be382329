"""What every method promises, tried on its tiny recipe in this process.

A pure loss, a declared number of views, resume without a trace, and on two ranks what it does on
one. A method is covered as soon as its file exists.
"""

from __future__ import annotations

import copy
import os
import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

import tiny
from ranks import run_ranks
from run_folders import describe_column
from selftask.batch import total
from selftask.checkpoint import rotation
from selftask.cli.check import load
from selftask.config.checks.requirements import requirement_problems
from selftask.config.schema import Config, ViewConfig
from selftask.data.loading.open_data import Sources
from selftask.distributed.collectives import world_size
from selftask.equivalence.compare import Record, compare, merge
from selftask.equivalence.tiny_recipe import images_for, make_tiny
from selftask.equivalence.trace import RecordedTask, batch_norm_replaced
from selftask.registry import METHODS
from selftask.task import Task

STEPS = 3  # two epochs, the second one begun
every_method = pytest.mark.parametrize("method", METHODS.names(), scope="module")


@cache
def plain(method: str) -> Config:
    """The recipe of a method for digits."""
    return load(method, [])


@cache
def small(method: str) -> Config:
    """The tiny recipe of a method."""
    return make_tiny(plain(method), batch_size=8, steps=STEPS)


# -- the loss --------------------------------------------------------------------------------------


@every_method
def test_the_loss_may_be_called_again_and_changes_nothing(method: str, tmp_path: Path) -> None:
    """After a whole step of a trained task, on the batch of the next one."""
    config = replace(small(method), out=str(tmp_path))
    task = Task(config, sources=Sources(images_for(config), None))
    task.prepare()
    task.on_start()
    task.on_phase_start()
    task.step()
    batch = task.last_batch = next(task.batches)
    batch.output = task.model(batch.input)
    task.run_hooks("on_forward")
    before = copy.deepcopy(task.loss.state_dict())
    plain = {name: item for name, item in vars(task.loss).items() if isinstance(item, int | float)}
    pending = [len(item) for item in vars(task.loss).values() if isinstance(item, list)]
    added = {name: item for name, item in batch.added.items() if isinstance(item, torch.Tensor)}
    kept = {name: item.clone() for name, item in added.items()}
    losses = [task.loss(batch.output, batch) for _ in range(3)]
    assert len({total(loss).item() for loss in losses}) == 1
    assert tiny.differences(task.loss.state_dict(), before) == []
    now = {name: item for name, item in vars(task.loss).items() if isinstance(item, int | float)}
    assert now == plain
    assert [len(item) for item in vars(task.loss).values() if isinstance(item, list)] == pending
    assert tiny.differences(added, kept) == []
    logged = {*task.last_row, *task.scalars, *(losses[0] if isinstance(losses[0], dict) else ())}
    assert [name for name in logged if describe_column(name) is None] == []
    trained = [p for p in task.base_model.parameters() if p.requires_grad]
    for loss in losses:
        actual = torch.autograd.grad(total(loss), trained, retain_graph=True, allow_unused=True)
        gradients = [gradient for gradient in actual if gradient is not None]
        assert gradients
        assert all(gradient.isfinite().all() for gradient in gradients)
    task.close()


@every_method
def test_another_number_of_views_than_declared_is_refused(method: str) -> None:
    views = METHODS[method].views
    assert METHODS.declared(method, "views", None) == views
    named = views if isinstance(views, dict) else {None: views}
    config = plain(method)
    groups = {name: view for name, view in config.views.items() if name in (*named, "main")}
    for group, number in named.items():
        least, most = number if isinstance(number, tuple) else (number, number)
        wrong = [number for number in (least - 1, most and most + 1) if number]
        assert wrong or group is not None or number == (1, None)  # any number
        for number in wrong:
            other = {group or "main": ViewConfig(count=number)}
            place = "of an image" if group is None else f"in group '{group}'"
            wanted = rf"views: {method} needs {least} view.* {place}, got {number}$"
            problems = requirement_problems(replace(config, views={**groups, **other}))
            assert [text for _, text in problems if re.match(wanted, text)]


# -- runs ------------------------------------------------------------------------------------------


def recorded(config: Config, stop: int = STEPS) -> Record:
    """Train a tiny recipe in double precision up to ``stop`` steps and save; what happened."""
    torch.set_default_dtype(torch.float64)
    try:
        with batch_norm_replaced():
            task = RecordedTask(config)
            task.prepare()
        task.train_until(stop)
        task.save_checkpoint()
        record = task.record()
        task.close()
        return record
    finally:
        torch.set_default_dtype(torch.float32)


def on_rank(rank: int, config: Config) -> Record:
    """The same on one rank, whose processes have met."""
    size = world_size()
    numbers = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size}
    os.environ.update({name: str(number) for name, number in numbers.items()})
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"})  # asked for, never used
    return recorded(config)


@pytest.fixture(scope="module")
def whole(method: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Config, Record]:
    """A run of one process that was never stopped, and what happened in it."""
    torch.set_num_threads(1)
    config = replace(small(method), out=str(tmp_path_factory.mktemp(method)))
    return config, recorded(config)


@every_method
def test_a_stopped_run_goes_on_as_if_never_stopped(
    method: str, whole: tuple[Config, Record], tmp_path: Path
) -> None:
    """Everything in the last checkpoint, bit for bit; stopped within an epoch and at its end."""
    compare_stopped(whole[0], replace(whole[0], out=str(tmp_path)))


def compare_stopped(whole: Config, parts: Config) -> None:
    """Compare the last checkpoint of a finished run with that of a run stopped at each step."""
    for stop in range(1, STEPS + 1):
        recorded(parts, stop)
    folders = [Path(config.out, "checkpoints") for config in (whole, parts)]
    paths = [rotation.checkpoints(folder)[0] for folder in folders]
    states = [torch.load(path, weights_only=True) for path in paths]
    assert states[0]["clock"]["steps_done"] == STEPS
    for state in states:
        del state["config"], state["metrics_bytes"]
    assert tiny.differences(*states) == []


@every_method
def test_two_ranks_do_what_one_does(
    method: str, whole: tuple[Config, Record], tmp_path: Path
) -> None:
    """Samples, inputs, loss and terms, gradients, all state; by a network without BatchNorm."""
    one = merge([whole[1]])
    two = run_ranks(on_rank, 2, replace(whole[0], out=str(tmp_path)))
    wrong = [row for row in compare(one, two, "2") if not row.ok]
    assert wrong == []
    first = one["loss"][0][""][0]
    assert one["loss"][1][""][0] != first, "nothing was trained"


@pytest.mark.slow
def test_random_coordinates_of_rope_resume_and_do_not_depend_on_ranks(tmp_path: Path) -> None:
    """Shift, jitter and rescale of a ViT's positions, with views of two sizes and a teacher."""
    random = "rope_shift: 0.2, rope_jitter: 1.5, rope_rescale: 2.0"

    def with_rope(drawn: str, out: str) -> Config:
        rope = f"{{name: vit_micro, img_size: 32, patch_size: 8, positions: rope, {drawn}}}"
        config = make_tiny(load("dino", [f"backbone={rope}"]), batch_size=8, steps=STEPS)
        return replace(config, out=str(tmp_path / out))

    config = with_rope(random, "one")
    one = merge([recorded(config)])
    compare_stopped(config, with_rope(random, "parts"))
    for ranks in (2, 4):
        many = run_ranks(on_rank, ranks, with_rope(random, f"ranks{ranks}"))
        assert [row for row in compare(one, many, str(ranks)) if not row.ok] == []
    fixed = merge([recorded(with_rope("rope_shift: 0.0", "fixed"))])
    assert fixed["loss"][0][""][0] != one["loss"][0][""][0], "no coordinates were drawn"
