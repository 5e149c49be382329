"""SeLa's labels against those of its authors' code, and when they are renewed."""

from __future__ import annotations

import json
import math

import pytest
import torch

from figures import draw
from minitask import NUM_IMAGES, MiniTask, loss_of
from selftask.errors import UserError
from selftask.methods.sela import NO_LABEL, balanced_labels, renewal_epochs

SMALL = {"num_labels": 4, "num_heads": 2}
# yukimasano/self-label, optimize_L_sk for seeds 0 and 500
PUBLISHED = {
    0: "[3,5,0,4,5,3,2,1,5,1,2,5,3,1,1,5,3,2,1,0,0,0,0,2,0,0,4,0,3,4,"
    "1,2,3,1,3,2,4,4,4,3,3,4,4,4,4,2,0,2,1,2,1,5,2,5,3,5,5,0,5,1]",
    500: "[0,2,4,5,5,0,5,2,2,2,1,0,5,2,3,1,5,1,0,2,3,0,3,4,1,3,5,1,2,4,"
    "4,2,1,0,1,0,2,4,4,4,3,2,1,3,3,1,4,3,0,5,5,0,1,5,0,3,3,1,5,4]",
}


@pytest.mark.parametrize("seed", PUBLISHED)
def test_labels_are_those_of_the_authors_code(seed: int) -> None:
    labels = balanced_labels(draw(seed, 60, 6), sharpness=25)
    assert labels.tolist() == json.loads(PUBLISHED[seed])


def test_labels_are_balanced_however_sure_the_network_is() -> None:
    """All images lean to label 0, by hundreds; no exponential overflows."""
    logits = draw(3, 40, 4) + torch.tensor([300.0, 0, 0, 0])
    counts = balanced_labels(logits, sharpness=25).bincount(minlength=4)
    assert counts.max() - counts.min() <= 4


def test_renewals_are_frequent_at_first() -> None:
    assert sorted(renewal_epochs(4, 16)) == [0, 1, 4, 9]
    assert sorted(renewal_epochs(80, 2)) == [0, 1]
    assert len(renewal_epochs(80, 400)) <= 80


def test_labels_are_renewed_before_the_first_step_and_learned() -> None:
    task = MiniTask("sela", SMALL)
    method = task.loss
    assert (method.labels == NO_LABEL).all()
    task.run(1)
    assert ((method.labels >= 0) & (method.labels < 4)).all()
    method.renew_labels(task)  # those of the first view, by the network as it is now
    logits = task.base_model(task.views[:1])[0].detach()
    for labels, scores in zip(method.labels, logits.unbind(1), strict=True):
        assert torch.equal(labels, balanced_labels(scores, sharpness=25.0))
    index, output = torch.tensor([20, 3, 11]), draw(0, 2, 3, 2, 4)
    terms = [
        -output[view, image, head].log_softmax(dim=0)[method.labels[head, index[image]]]
        for view in range(2)
        for image in range(3)
        for head in range(2)
    ]
    loss = loss_of(method, output, index=index).item()
    assert loss == pytest.approx(sum(terms).item() / 12, rel=1e-12)
    equal = loss_of(method, torch.zeros_like(output), index=index).item()
    assert equal == pytest.approx(math.log(4)) == method.chance_loss


def test_an_unreadable_image_has_no_label() -> None:
    method = MiniTask("sela", SMALL).run(1).loss
    output = draw(0, 1, 2, 2, 4)
    method.labels[:, 5] = NO_LABEL
    alone = loss_of(method, output[:, :1], index=torch.tensor([3])).item()
    both = loss_of(method, output, index=torch.tensor([3, 5])).item()
    assert both == pytest.approx(alone / 2, rel=1e-12), "as the mean of two ranks"
    assert loss_of(method, output[:, :1], index=torch.tensor([5])).item() == 0


def test_more_labels_than_images_are_refused() -> None:
    with pytest.raises(UserError, match=f"{NUM_IMAGES} images cannot have 30 labels"):
        MiniTask("sela", {"num_labels": 30, "num_heads": 1})
