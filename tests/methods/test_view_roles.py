"""Which views network and teacher get, in each method in which these are not the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from selftask.cli.check import load
from selftask.data.loading.open_data import Sources
from selftask.equivalence.tiny_recipe import images_for, make_tiny
from selftask.task import Task

ROLES: dict[str, tuple[list[str], list[int], list[int]]] = {
    # settings, and the numbers of the views of network and teacher, as in the papers
    "adco": (["method.symmetric=true"], [0, 1], [1, 0]),  # view v is query v, the other its key
    "clsa": ([], [0, 2], [1]),  # a weak query and strong views; the other weak view is the key
    "cmae": ([], [0], [1]),  # the teacher sees the shifted view
    "densecl": ([], [0], [1]),
    "moco": (["method.symmetric=true"], [0, 1], [1, 0]),
    "msf": ([], [1], [0]),  # the teacher sees the weak view
    "msn": ([], [1], [0]),
    "obow": ([], [1], [0]),  # the teacher describes the first view by words
    "pcl": ([], [0], [1]),
    "ressl": ([], [1], [0]),  # the teacher sees the weak view
    "tico": ([], [0], [1]),
}


@pytest.mark.parametrize("method", ROLES)
def test_network_and_teacher_get_their_views(method: str, tmp_path: Path) -> None:
    settings, *expected = ROLES[method]
    config = make_tiny(load(method, settings), batch_size=8, steps=3)
    task = Task(replace(config, out=str(tmp_path)), sources=Sources(images_for(config), None))
    task.prepare()
    task.on_start()
    task.on_phase_start()
    shown: list[list[Tensor]] = [[], []]
    for inputs, module in zip(shown, (task.base_model, task.loss.teacher), strict=True):

        def note(_: Any, args: Any, inputs: list[Tensor] = inputs) -> None:
            inputs += [x.clone() for x in tree_leaves(args) if isinstance(x, Tensor)]

        module.register_forward_pre_hook(note)
    task.step()
    views = task.last_batch.all_views
    actual = [
        [number for x in inputs for number, view in enumerate(views) if torch.equal(x, view)]
        for inputs in shown
    ]
    task.close()
    assert actual == expected


@pytest.mark.parametrize("method", ["byol", "mec", "mocov3", "msf", "nnclr", "simsiam", "smog"])
def test_gradients_enter_by_predictions(method: str, tmp_path: Path) -> None:
    """Heads return projection and prediction; only SMoG's groups move with gradient."""
    config = make_tiny(load(method, []), batch_size=8, steps=3)
    task = Task(replace(config, out=str(tmp_path)), sources=Sources(images_for(config), None))
    task.prepare()
    task.on_start()
    task.on_phase_start()
    outputs: list[Tensor] = []

    def keep(_: Any, __: Any, output: Tensor) -> None:
        output.retain_grad()
        outputs.append(output)

    task.base_model.register_forward_hook(keep)
    task.step()
    task.close()
    (output,) = outputs
    assert output.grad is not None
    projection, prediction = output.grad.unbind(2)
    assert prediction.any() and bool(projection.any()) == (method == "smog")
