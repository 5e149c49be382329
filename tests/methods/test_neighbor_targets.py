"""NNBYOL and NNSiam: neighbors in a queue as the targets of BYOL and SimSiam."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import tiny
from figures import draw
from minitask import MiniTask
from selftask.cli.main import main
from selftask.methods.byol import regression_loss
from selftask.methods.simsiam import similarity_loss

# solo-learn, for seeds 0 and 500, two steps each: loss, gradients of both predictions, sum of the
# indices of the first view's neighbors, sum of the queue afterwards
FIGURES = {
    ("byol", 0): [
        (3.8972151948487186, 0.19707930206078741, 0.1884486822550886, 78, 3.817882861625724),
        (4.221265928122877, 0.16417535795230792, 0.17574649095283265, 74, 7.7796799860844015),
    ],
    ("byol", 500): [
        (4.2706305396846425, 0.1665243256081819, 0.17812739784083545, 90, -5.192718855690546),
        (4.0153569617695375, 0.2029987408119762, 0.17997407078332286, 94, -0.801295084720498),
    ],
    ("simsiam", 0): [
        (0.05061944359272272, 0.048818711790711566, 0.04649964211641379, 101, 3.1104758355685957),
        (-0.08519060194737516, 0.04309556332296416, 0.04318895585138455, 83, 1.8867522770916292),
    ],
    ("simsiam", 500): [
        (0.03915478037844015, 0.04305039349957034, 0.04584328807958148, 81, -2.249817788958933),
        (0.022870784599666114, 0.05149510775867509, 0.046118604084502274, 77, 1.7521672953737364),
    ],
}


@pytest.mark.parametrize(("name", "seed"), FIGURES)
def test_two_steps_are_those_of_solo_learn(name: str, seed: int) -> None:
    task = MiniTask(name, {"queue_size": 24, "out_dim": 16, "hidden_dim": 4})
    queue = task.loss.queue
    queue.double().rows.copy_(F.normalize(draw(seed + 90, 24, 16), dim=1))
    first = 4 if name == "byol" else 0  # projections of the teacher, or of the network
    for step, figures in enumerate(FIGURES[name, seed]):
        start = seed + 100 * step
        projection = torch.stack([draw(start + first + v, 8, 16) for v in (0, 1)])
        prediction = torch.stack([draw(start + v, 8, 16) for v in (2, 3)]).requires_grad_()
        targets = task.loss.nearest(projection, task)
        indices = (targets[0] @ queue.rows.T).argmax(dim=1).sum().item()
        if name == "byol":
            loss = regression_loss(prediction, targets.flip(0))
        else:
            loss = similarity_loss(prediction, targets)
        (gradient,) = torch.autograd.grad(loss, prediction)
        for units in task.loss.take_pending():
            queue.update(units)
        norms = gradient.norm(dim=(1, 2)).tolist()
        computed = (loss.item(), *norms, indices, queue.rows.sum().item())
        assert computed == pytest.approx(figures, rel=1e-8)


@pytest.mark.parametrize("name", ["byol", "simsiam"])
def test_no_image_is_its_own_neighbor(name: str) -> None:
    """The queue takes the projections of a batch after its step."""
    task = MiniTask(name, {"queue_size": 8, "out_dim": 5, "hidden_dim": 7})
    before = task.loss.queue.rows.clone()
    task.run(1)
    assert not torch.equal(task.loss.queue.rows, before)
    targets = task.last_batch["targets"].flatten(0, 1)
    assert all((before == row).all(dim=1).any() for row in targets)


@pytest.mark.parametrize("name", ["byol", "simsiam"])
def test_the_queue_resumes(name: str, tmp_path: Path) -> None:
    words = ("method.queue_size=40", "train.max_steps=4")
    whole = tiny.train(name, tmp_path, "whole", *words)
    tiny.train(name, tmp_path, "stopped", *words, "train.stop_at=2")
    resumed = tiny.train(name, tmp_path, "stopped", *words)
    assert torch.equal(resumed.loss.queue.rows, whole.loss.queue.rows)
    states = [task.base_model.state_dict() for task in (whole, resumed)]
    assert all(torch.equal(value, states[1][key]) for key, value in states[0].items())


@pytest.mark.parametrize("name", ["byol", "simsiam"])
def test_two_ranks_have_the_neighbors_of_one(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["check", name, "method.queue_size=40", "--ranks=1,2"]
    assert main(words) == 0, capsys.readouterr().out
