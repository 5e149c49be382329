"""A method: loss, state and hook points of one paper in one object.

It is an ``nn.Module``, so its queue, centre, prototypes or teacher are moved, saved and resumed as
buffers and sub-modules without a line of code, and its parameters (a predictor) are trained. It is
a hook, called first at each point. ``task.loss`` is the method: ``forward`` is the loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

from torch import nn

from selftask.batch import Batch, Loss
from selftask.hooks.base import Hook
from selftask.models.build import embed_dim
from selftask.models.network import Network

if TYPE_CHECKING:
    from selftask.task import Task

NumViews: TypeAlias = int | tuple[int, int | None]


class Method(nn.Module, Hook):
    """Base class of methods. Definitions are in the order in which they are called.

    ``loss_reduction`` says what makes W ranks with B / W samples each give the loss and gradients
    of one rank with B; without it a method does not register, and ``selftask check`` tries it out:

    * ``"samples"``: the loss is a mean over samples, to each of which the rest of the batch is
      nothing. Ranks compute it alone, and the mean of their gradients is right.
    * ``"gathered"``: samples are compared with those of all ranks, which
      ``collectives.gather_cat_with_grad`` brings together.
    * ``"statistics"``: sums over the batch of all ranks (a mean, a correlation, the sizes of
      clusters) enter the loss: ``collectives.sum_with_grad``, or without gradient.

    Whatever a method draws is a function of (seed, epoch, sample), see ``random.keyed``, and what
    it remembers enters its memory in the order of the global batch.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """Of a method without anything to choose."""

    loss_reduction: ClassVar[Literal["samples", "gathered", "statistics"]]
    views: ClassVar[NumViews | dict[str, NumViews]] = (1, None)
    """Number of views, or the least and the largest number (None: any); or these by group, if the
    method tells groups apart by name."""
    requires: ClassVar[tuple[str, ...]] = ()
    """What else the loss needs, checked before a run starts; a tuple of these words:

    * of the backbone, see ``models.features``: ``"dense"``: feature maps; ``"hidden"``: hidden
      layers; ``"tokens"``: patches that a mask token can replace; ``"subset"``: patches that can be
      left out.
    * ``"labels"``: a label for each image.
    * ``"index"``: ``batch.index``, the number of each image, is used as an address in a memory.
    * ``"boxes"``: crop boxes of the views; ``"captions"``: a caption for each image.
    """
    outputs_logits: ClassVar[bool] = False  # True if the output is (B, C), as meters expect
    per_view: ClassVar[bool] = False  # whether BatchNorm statistics are those of one view, not all

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config

    @staticmethod
    def check_backbone(backbone: nn.Module) -> None:
        """Raise UserError for a backbone that the method cannot train; before a run starts."""

    def build_head(self, embed_dim: int) -> nn.Module:
        """What is trained on top of the backbone and thrown away."""
        return nn.Identity()

    def build_network(self, backbone: nn.Module, task: Task) -> nn.Module:
        """Return the network that is trained: ``head(backbone(views))`` by default.

        A method that needs patches or hidden layers returns a ``Network`` with a forward pass of
        its own, which calls ``models.features.extract``. It takes ``batch.input`` and may return
        tensors in any tuple or dict, ``batch.output``.

        Args:
            backbone: Images (B, C, H, W) -> features (B, E); the network keeps it under this name.
            task: Its config, data and length are known.
        """
        head = self.build_head(embed_dim(backbone))
        return Network(backbone, head, per_view=self.per_view)

    def setup(self, task: Task) -> None:
        """Build what depends on network or data (teacher, memory), before anything is loaded."""

    def prepare_batch(self, batch: Batch, task: Task) -> None:
        """Set ``batch.input``, the argument of the network: all views by default."""
        batch.input = batch.all_views

    def forward(self, output: Any, batch: Batch) -> Loss:
        """Return the loss of this rank's part of the batch, a mean over its samples.

        A pure function of the output, the batch and the method's own state: it changes none of
        them and may be called more than once in a step. Memories move in ``on_update``. A predictor
        with BatchNorm is part of the network, see ``models.heads.ProjectorPredictor``.

        Returns:
            A scalar, or named terms whose sum is the loss; terms are logged.
        """
        raise NotImplementedError(f"{type(self).__name__} has no loss")

    @property
    def chance_loss(self) -> float | None:
        """The loss of a network that knows nothing; None if that is no fixed number."""
        return None

    def export_backbone(self, network: nn.Module) -> nn.Module:
        """The backbone to keep: the teacher's, where the method says so."""
        backbone: nn.Module = network.backbone  # type: ignore[assignment]
        return backbone
