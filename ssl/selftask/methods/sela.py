"""SeLa: label all images by optimal transport, learn these labels, and repeat.

V: views, B: images per rank, W: ranks; N: images of the data set; E: width of the backbone, H:
heads, K: labels of a head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selftask.batch import Batch
from selftask.config.fields import setting
from selftask.distributed.accelerator import to_float64
from selftask.distributed.collectives import all_reduce_sum
from selftask.errors import UserError
from selftask.logs import get_logger
from selftask.methods.base import Method, Task
from selftask.models.clustering import logsumexp_over_ranks
from selftask.models.precision import to_float32
from selftask.registry import register_method

log = get_logger(__name__)

NO_LABEL = -100  # for unreadable images; cross_entropy ignores it
_TOLERANCE = 0.1  # limit of the total relative change of the images' scalings, as published
_COMPARED_EVERY = 10  # iterations


@register_method("sela")
class SeLa(Method):
    """SeLa (arXiv:1911.05371): predicts cluster labels that are balanced over all images.

    Loss: ``-log softmax(s)[label]`` of scores s, mean over heads; the labels minimize the same loss
    under the constraint that all labels occur equally often (eq. 3).

    Published: ImageNet linear top-1 of ResNet-50 61.5 with ten heads of 3,000 labels (authors'
    README).

    Use it in place of ``deepcluster`` if its clusters become empty.

    Differs from the authors' code:

    * Labels are renewed between epochs; in the authors' code, also within epochs.
    * Scalings are computed as logarithms, over the images of all ranks.
    """

    paper = "Asano et al., Self-Labelling via Simultaneous Clustering, ICLR 2020"
    columns = {"changed_labels": "Share of images whose label changed when labels were renewed."}
    loss_reduction = "samples"
    requires = ("index",)  # a label for each image

    @dataclass(frozen=True, kw_only=True)
    class Config:
        num_labels: int = setting(3000, min=2, tiny=4)
        """Number of labels of a head, K."""
        num_heads: int = setting(10, min=1, tiny=2)
        """Number of heads, H, each with its own labels. A renewal takes 8 * ``num_heads`` *
        ``num_labels`` bytes for each image of a rank.
        """
        sharpness: float = setting(25.0, above=0)
        """Exponent of the probabilities, lambda; with larger values, labels are closer to the
        network's predictions.
        """
        num_renewals: int = setting(80, min=1, tiny=2)
        """Number of renewals of the labels, at most one an epoch, more often at first."""

    labels: Tensor

    def build_head(self, embed_dim: int) -> nn.Module:
        """Build H linear layers: (B, E) -> logits (B, H, K)."""
        heads, labels = self.config.num_heads, self.config.num_labels
        return nn.Sequential(nn.Linear(embed_dim, heads * labels), nn.Unflatten(1, (heads, labels)))

    def setup(self, task: Task) -> None:
        """Allocate the labels. Raise UserError if there are fewer images than labels."""
        super().setup(task)
        config, num_images = self.config, task.data_module.num_images
        if config.num_labels > num_images:
            raise UserError(
                f"method.num_labels={config.num_labels}: {num_images} images cannot have "
                f"{config.num_labels} labels equally often; a hundredth of the images is plenty"
            )
        self.register_buffer("labels", torch.full((config.num_heads, num_images), NO_LABEL))
        self.renewals = renewal_epochs(config.num_renewals, task.length.num_epochs)

    def on_phase_start(self, task: Task) -> None:
        """Renew the labels before the epochs in ``renewals``, and log the share that has changed.

        Nothing is renewed if the run is resumed within an epoch.
        """
        clock = task.clock
        if task.train and clock.batch_in_epoch == 0 and clock.epoch in self.renewals:
            before = self.labels.clone()
            self.renew_labels(task)
            task.log("changed_labels", (self.labels != before).float().mean())

    @torch.no_grad()
    def renew_labels(self, task: Task) -> None:
        """Set the labels of each head, in one pass over the data in evaluation mode.

        The network is in train mode afterwards. Every rank must call this method.
        """
        log.info("sela: renewing the labels, one pass over %d images", self.labels.shape[1])
        logits, indices = [], []
        task.base_model.eval()
        for batch in task.data_module.iterate_all():
            with task.autocast():
                (output,) = task.base_model(batch.all_views[:1])  # (B, H, K)
            logits.append(to_float32(output))
            indices.append(batch.index)
        task.base_model.train()
        index = torch.cat(indices)
        labels = torch.zeros_like(self.labels)
        for head, scores in enumerate(torch.cat(logits).unbind(1)):
            labels[head, index] = 1 + balanced_labels(scores, sharpness=self.config.sharpness)
        labels = all_reduce_sum(labels)  # each image is zero on all ranks but one
        self.labels.copy_(torch.where(labels > 0, labels - 1, NO_LABEL))

    def forward(self, output: Tensor, batch: Batch) -> Tensor:
        """Return the cross-entropy of views (V, B, H, K) with their labels, averaged.

        The loss of images without labels is 0.
        """
        labels = self.labels[:, batch.index].T.expand(len(output), -1, -1)  # (V, B, H)
        scores = to_float32(output).flatten(0, 2)
        return F.cross_entropy(scores, labels.flatten(), reduction="none").mean()

    @property
    def chance_loss(self) -> float:
        """Loss of equal probabilities: ln(``num_labels``)."""
        return math.log(self.config.num_labels)


def renewal_epochs(num_renewals: int, num_epochs: int) -> set[int]:
    """Return the epochs before which labels are renewed: 0, and others at growing intervals.

    Renewal i of n, from 0, precedes epoch (i / n)^2 * ``num_epochs``, rounded down.
    """
    return {int((i / num_renewals) ** 2 * num_epochs) for i in range(num_renewals)}


@torch.no_grad()
def balanced_labels(logits: Tensor, *, sharpness: float) -> Tensor:
    """Return the labels of this rank's images; over all ranks each occurs about equally often.

    Algorithm 1: probabilities to the power of lambda are scaled by row (image) and column (label)
    until the factors of the images converge.

    Args:
        logits: (N / W, K).
        sharpness: lambda.

    Returns:
        (N / W,) int64.
    """
    scores = sharpness * to_float64(logits).log_softmax(dim=1)  # (N / W, K)
    num_images = float(all_reduce_sum(scores.new_tensor(len(scores))))
    of_image = torch.full_like(scores[:, 0], -math.log(num_images))
    iteration, change = 0, math.inf
    while change > _TOLERANCE:
        mass = logsumexp_over_ranks((scores + of_image[:, None]).logsumexp(dim=0))
        of_label = -mass - math.log(scores.shape[1])  # (K,)
        renewed = -(scores + of_label).logsumexp(dim=1) - math.log(num_images)
        if iteration % _COMPARED_EVERY == 0:
            ratio = (of_image - renewed).exp()
            change = float(all_reduce_sum((ratio - 1).abs().sum()))
        of_image, iteration = renewed, iteration + 1
    return (scores + of_label).argmax(dim=1).to(logits.device)
