"""SupCon: the views of all images of a class attract each other.

V: views of an image, B: images per rank, W: ranks, D: width of the head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from selftask.batch import Batch
from selftask.config.fields import setting
from selftask.config.schema import num_views
from selftask.distributed.collectives import all_gather_cat
from selftask.methods.base import Task
from selftask.methods.families.batch_contrast import BatchContrast
from selftask.models.losses.contrast import view_cosines
from selftask.models.precision import in_full_precision
from selftask.registry import register_method

BASE_TEMPERATURE = 0.07  # the loss is multiplied by temperature / 0.07, as in the authors' code


@register_method("supcon")
class SupCon(BatchContrast):
    """SupCon (arXiv:2004.11362): contrastive learning whose positives are images of one class.

    An image without a label (-1) has its own other views as positives, as in SimCLR.

    Loss: ``-mean_p ln softmax(z.z_p/tau)`` of a view z, over the views z_p of images of the same
    class (eq. 2).

    Published: CIFAR-10 top-1 of ResNet-50 96.0; ImageNet 79.1 with the momentum encoder of
    MoCo, which is not part of this method (authors' README).

    Use it if all or many images have labels.

    Differs from the authors' code:

    * Images and labels of all ranks are compared; the authors' code compares those of one process.
    """

    paper = "Khosla et al., Supervised Contrastive Learning, NeurIPS 2020"
    views = (1, None)
    requires: ClassVar[tuple[str, ...]] = ("labels",)

    @dataclass(frozen=True, kw_only=True)
    class Config(BatchContrast.Config):
        norm: bool = False
        """Whether both layers of the head have BatchNorm."""
        temperature: float = setting(0.1, above=0)
        """Temperature of the similarities, tau."""
        sum_positives: Literal["outside", "inside"] = "outside"
        """Where the positives of a view are summed. outside: outside the logarithm (eq. 2, L_out);
        the loss is multiplied by ``temperature`` / 0.07. inside: inside the logarithm (eq. 3), as
        in solo-learn, without this factor.
        """

    def setup(self, task: Task) -> None:
        super().setup(task)
        views = sum(num_views(task.config.views).values())
        self.num_others = self.num_negatives + views - 1

    def forward(self, output: Tensor, batch: Batch) -> Tensor:
        """Return the loss for ``output`` (V, B, D), averaged over images and views.

        It is multiplied by ``temperature`` / 0.07, unless positives are summed ``inside``.
        """
        config = self.config
        inside = config.sum_positives == "inside"
        loss = supcon_loss(output, batch.labels, temperature=config.temperature, inside=inside)
        return loss if inside else loss * config.temperature / BASE_TEMPERATURE

    @property
    def chance_loss(self) -> float | None:
        """Loss of equal similarities: ``temperature`` / 0.07 * ln(views * batch - 1).

        Less if some views have no positive. None with ``sum_positives: inside``.
        """
        if self.config.sum_positives == "inside":
            return None  # depends on the number of positives
        return self.config.temperature / BASE_TEMPERATURE * math.log(self.num_others)


@in_full_precision
def supcon_loss(output: Tensor, labels: Tensor, *, temperature: float, inside: bool) -> Tensor:
    """Return -log softmax of the positives among all other views, averaged over this rank's views.

    The other views are those of all ranks; every rank must call this function. A view without a
    positive counts as 0.

    Args:
        output: (V, B, D), not necessarily normalized.
        labels: (B,), -1 for images without one.
        temperature: tau.
        inside: Sum the probabilities of the positives; if False, average their logarithms.
    """
    cosines, same = view_cosines([*output])
    hidden = (cosines / temperature).scatter(1, same[:1].T, -torch.inf)  # without the view itself
    log_p = (hidden - hidden.logsumexp(dim=1, keepdim=True)).scatter(1, same[:1].T, 0.0)
    positive = _same_class(labels, len(output)).scatter(1, same.T, True)
    positive = positive.scatter(1, same[:1].T, False)
    count = positive.sum(dim=1)
    if inside:
        alone = count == 0  # such rows keep all entries, for finite gradients, and count as 0
        summed = log_p.masked_fill(~(positive | alone[:, None]), -torch.inf).logsumexp(dim=1)
        return -torch.where(alone, 0.0, summed).mean()
    return -((log_p * positive).sum(dim=1) / count.clamp(min=1)).mean()


def _same_class(labels: Tensor, count: int) -> Tensor:
    """Return whether views have the same label, bool (VB, VBW), for V = ``count`` views."""
    labels, others = labels.repeat(count), all_gather_cat(labels).repeat(count)
    return (labels[:, None] == others) & (labels >= 0)[:, None]
