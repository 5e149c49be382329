"""EVA against the figure of its authors' code, and its targets."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import tiny
from figures import draw
from minitask import loss_of, predicted
from selftask.config.schema import FrozenModule
from selftask.errors import UserError
from selftask.methods.eva import EVA
from selftask.models.features.extract import extract

# baaivision/EVA for seeds 0 and 500: loss, gradient of the predictions; in float32 there
LOSS = [(0.18134281039237976, 0.09800359671265131), (-0.003793060779571533, 0.10538885403044622)]


def _eva() -> EVA:
    return EVA(EVA.Config(teacher=FrozenModule(model="-")))


@pytest.mark.parametrize("case", [0, 1])
def test_loss_is_that_of_the_authors_code(case: int) -> None:
    seed = 500 * case
    prediction, target = draw(seed + 6, 10, 12).requires_grad_(), draw(seed + 7, 10, 12)
    hidden = (torch.empty(0), torch.zeros(2, 5, dtype=torch.bool))
    output = predicted(prediction.view(2, 5, 12))
    loss = loss_of(_eva(), output, targets=target.view(2, 5, 12), hidden=hidden)
    (gradient,) = torch.autograd.grad(loss, prediction)
    computed = (loss.item(), gradient.norm().item())
    assert computed == pytest.approx(LOSS[case], rel=1e-5, abs=1e-7)


def test_loss_as_a_loop_over_images_and_their_hidden_patches() -> None:
    prediction, target = draw(1, 2, 3, 4), draw(2, 2, 3, 4)
    padding = torch.tensor([[False, False, False], [False, True, True]])
    of_image = []
    for image, number in ((0, 3), (1, 1)):
        pairs = zip(prediction[image, :number], target[image, :number], strict=True)
        cosines = [(a @ b / (a.norm() * b.norm())).item() for a, b in pairs]
        of_image.append(-sum(cosines) / number)
    hidden = (torch.empty(0), padding)
    loss = loss_of(_eva(), predicted(prediction), targets=target, hidden=hidden)
    assert loss.item() == pytest.approx(sum(of_image) / 2, rel=1e-12)


def test_targets_are_features_of_the_whole_image_at_the_hidden_patches(tmp_path: Path) -> None:
    """The teacher sees no mask; its map is interpolated to the student's grid."""
    task = tiny.task("eva", tmp_path)
    task.prepare()
    task.on_start(), task.on_phase_start(), task.step()
    batch, teacher = task.last_batch, task.loss.teacher.network.backbone
    images, indices = batch.all_views[0], batch["hidden"][0]
    with torch.no_grad():
        as_map = extract(teacher, images).tokens.map
    resized = F.interpolate(as_map, size=batch["grid"], mode="bilinear", antialias=True)
    for image in range(3):
        for row in range(3):
            index = int(indices[image, row])
            expected = resized[image, :, index // batch["grid"][1], index % batch["grid"][1]]
            assert torch.allclose(batch["targets"][image, row], expected, atol=1e-6)
    task.close()


def test_a_teacher_without_patches_is_refused(tmp_path: Path) -> None:
    task = tiny.task("eva", tmp_path, "run", "method.teacher=minitask:TinyBackbone")
    with pytest.raises(UserError, match=r"method\.teacher: a TinyBackbone gives one vector an"):
        task.prepare()
