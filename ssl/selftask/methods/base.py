"""Base class of methods: loss, state and hook points of one paper in one object.

A method is an ``nn.Module``. Its queue, center, prototypes or teacher are buffers and sub-modules,
so they are moved, saved and resumed without additional code. Its own parameters, such as a
predictor's, are trained. It is also a hook, called before all others at each hook point.
``task.loss`` is the method: its ``forward`` returns the loss.

B: images per rank, C: channels of an image, or classes, E: width of the backbone, N: rows, such as
views of images.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from selftask.batch import Batch, Loss
from selftask.config.extensions.user_code import source_of
from selftask.config.schema import Component
from selftask.config.schema.optimizer import GroupRule
from selftask.distributed import accelerator
from selftask.errors import UserError
from selftask.hooks.base import Hook
from selftask.hooks.base import Task as Task
from selftask.methods.frozen import open_frozen, open_trained
from selftask.models.build import embed_dim
from selftask.models.network import Network
from selftask.models.weights.frozen import Frozen

if TYPE_CHECKING:
    from selftask.data.tokenizers.base import Tokenizer
    from selftask.models.weights.trained import Scores, TrainedNetwork

NumViews: TypeAlias = int | tuple[int, int | None]


class Method(nn.Module, Hook):
    """Base class of methods. Attributes and methods are in the order in which they are used.

    ``loss_reduction`` states how W ranks with B / W samples each compute the loss and gradients of
    one rank with B samples. A method must define it to be registered, and ``selftask check``
    verifies it:

    * ``"samples"``: the loss is a mean over samples that are independent of the rest of the batch.
      Each rank computes its own, and the mean of the ranks' gradients is correct.
    * ``"gathered"``: samples are compared with those of all ranks, gathered by
      ``collectives.gather_cat_with_grad``, or without gradient.
    * ``"statistics"``: the loss uses sums over the batch of all ranks (a mean, a correlation, the
      sizes of clusters), computed by ``collectives.sum_with_grad``, or without gradient.

    Random draws of a method are functions of (seed, epoch, sample), see ``random.keyed``. Memories
    are updated in the order of the global batch.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """Config of a method without options."""

    loss_reduction: ClassVar[Literal["samples", "gathered", "statistics"]]
    views: ClassVar[NumViews | dict[str, NumViews]] = (1, None)
    """Number of views, or the smallest and largest number (None: any). For methods with named
    groups of views, a dict with these numbers for each group.
    """
    requires: ClassVar[tuple[str, ...]] = ()
    """Other requirements of the loss, checked before a run starts: words of
    ``registry.REQUIREMENTS``, such as ``"labels"`` or ``"index"``. See docs/methods.md.
    """
    min_batch_size: ClassVar[int] = 1
    """Smallest ``train.batch_size``; 2 if the loss compares the images of a batch, or if BatchNorm
    in the head has one row for each of them.
    """
    paper: ClassVar[str] = ""
    """Reference: authors, title, and venue with the year, or the year alone. The docstring of
    the method begins with its name and arXiv number: ``DINO (arXiv:2104.14294): one sentence``.
    """
    columns: ClassVar[dict[str, str]] = {}
    """Columns of metrics.jsonl that the method logs, such as loss terms: name -> description."""
    outputs_logits: ClassVar[bool] = False  # True if the output is (B, C), as meters expect
    sample_dim: ClassVar[int | None] = 1
    """Dimension of the samples in the network's output, or in the ``prediction`` of a
    ``PatchOutput``, if that is one tensor; else None. Train steps that divide a batch
    (``grad_cache``) need it, and samples as dimension 0 of the tensors in ``batch.input``.
    """
    per_view: ClassVar[bool] = False  # True if BatchNorm statistics are per view

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.pending: list[Any] = []  # results of the batches since the last step

    def take_pending(self) -> list[Any]:
        """Return ``pending`` and clear it; called in ``on_update``."""
        pending, self.pending = self.pending, []
        return pending

    @staticmethod
    def check_backbone(backbone: nn.Module) -> None:
        """Check a backbone before a run starts; raise UserError if the method cannot train it."""

    def build_head(self, embed_dim: int) -> nn.Module:
        """Return the head, by default the identity.

        It is trained on top of the backbone and discarded after training. The default network
        applies it to pooled features (N, E).

        Args:
            embed_dim: Number of features of the backbone, E.
        """
        return nn.Identity()

    def build_network(self, backbone: nn.Module, task: Task) -> nn.Module:
        """Return the network to train: ``head(backbone(views))`` by default.

        A method that needs patches or hidden layers returns a ``Network`` with a forward pass of
        its own, which calls ``self.extract``. The forward pass takes ``batch.input`` and returns
        ``batch.output``: a ``PatchOutput``, or tensors in any tuple or dict.

        Args:
            backbone: Images (B, C, H, W) -> features (B, E); becomes the attribute ``backbone`` of
                the network.
            task: The task, with its config, data and length.

        Raises:
            UserError: If the backbone does not fit the method, or if ``build_head`` returns no
                module, or one whose first linear layer takes another number of features.
        """
        width = embed_dim(backbone)
        head = self.build_head(width)
        subject = f"{source_of(self.build_head)}: {type(self).__name__}.build_head returned"
        if not isinstance(head, nn.Module):
            raise UserError(f"{subject} {head!r}, not an nn.Module")
        first = head
        while type(first) is nn.Sequential and len(first):
            first = first[0]
        if isinstance(first, nn.Linear) and first.in_features != width:
            raise UserError(
                f"{subject} a head whose first layer takes {first.in_features} features, and the "
                f"backbone has {width}; use the argument embed_dim"
            )
        return Network(backbone, head, per_view=self.per_view)

    def setup(self, task: Task) -> None:
        """Build parts that depend on network or data, before a checkpoint is loaded.

        Examples are a teacher and a memory. The base class sets ``batch_size``, that of all ranks.
        """
        self.batch_size = task.length.batch_size  # of all ranks

    def group_rules(self) -> list[GroupRule]:
        """Return rules for parameter groups that belong to the method; none by default.

        They apply to every recipe. Examples are a constant learning rate of a predictor, no weight
        decay of prototypes, and a last layer that is frozen at first. Names begin with
        ``network.`` or ``loss.``; ``network.`` may be omitted. Rules of ``optimizer.groups``
        override them.
        """
        return []

    def open_frozen(self, name: str, task: Task) -> Frozen:
        """Return the frozen module that the config field ``name``, a ``FrozenModule``, specifies.

        Call it in ``build_network`` or ``setup``. The result has the module as ``network``: your
        own one for ``package.module:Class``; otherwise the backbone of a run, a file or a library.
        ``models.features.extract.extract(result.network, images)`` returns its patches.

        Raises:
            UserError: If the module or its weights cannot be opened, or if a backbone takes images
                with another number of channels than the data have.
        """
        return open_frozen(getattr(self.config, name), f"method.{name}", task)

    def open_trained(self, name: str, task: Task, *, scores: bool = False) -> TrainedNetwork:
        """Return the trained network that the config field ``name``, a ``FrozenModule``, specifies.

        Wrap the network in ``Frozen`` to keep it from being trained.

        Args:
            name: Name of the field.
            task: The task.
            scores: Whether the network must have a head that scores classes or prototypes.

        Raises:
            UserError: As ``open_frozen``, or if the network has no such head.
        """
        value = getattr(self.config, name)
        return open_trained(value, f"method.{name}", task, scores=scores)

    def draw(self, seed: int, key: Tensor, sizes: list[tuple[int, int]]) -> Any:
        """Draw random tensors for a batch, such as masks; none by default. See ``drawn``.

        The result must depend on the arguments and the config only. Loader processes call this
        method ahead of the step, so that training does not wait for it.

        Args:
            seed: Seed of the run.
            key: Random keys of the samples, (B, 2) on the CPU; see ``random.keyed``.
            sizes: Height and width in pixels of each view of ``batch.all_views``.

        Returns:
            Tensors on the CPU, which may be nested in dicts, lists and (named) tuples; or None.
        """
        return None

    def drawn(self, batch: Batch, task: Task) -> Any:
        """Return the result of ``draw`` for a batch, on its device.

        If the loader has not called ``draw``, as in test phases, it is called here. The result is
        kept in ``batch.drawn``.
        """
        if "method" not in batch.drawn:  # loaders draw in training only
            views = batch.all_views
            sizes = [(view.shape[2], view.shape[3]) for view in views]
            drawn = self.draw(task.config.train.seed, batch.key, sizes)
            to_device = partial(accelerator.copy_to, views[0].device)
            batch.drawn["method"] = tree_map_only(Tensor, to_device, drawn)
        return batch.drawn["method"]

    def prepare_batch(self, batch: Batch, task: Task) -> None:
        """Set ``batch.input``, the argument of the network; all views by default."""
        batch.input = batch.all_views

    def forward(self, output: Any, batch: Batch) -> Loss:
        """Return the loss of this rank's part of the batch, a mean over its samples.

        It is a pure function of the output, the batch and the method's state, which it does not
        change. It may be called more than once in a step. Memories are updated in ``on_update``. A
        predictor with BatchNorm is part of the network, see ``models.heads.ProjectorPredictor``.

        Args:
            output: Output of the network.
            batch: The batch.

        Returns:
            A scalar, or named terms whose sum is the loss; terms are logged.

        Raises:
            UserError: If a subclass does not define this method.
        """
        raise UserError(
            f"{source_of(type(self))}: {type(self).__name__} has no method forward(self, output, "
            "batch), which returns the loss"
        )

    def logits(self, output: Any, head: str | None = None) -> Tensor:
        """Return class scores (B, C) for meters, if ``outputs_logits``; by default the output.

        Args:
            output: Output of the network.
            head: Name of the head, from ``meters.NAME.head``, for methods with several heads.
        """
        return output

    def meter_input(
        self, output: Any, batch: Batch, head: str | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return class scores (N, C) and classes: ``logits`` and ``batch.labels`` by default.

        Classes are (N,), or (N, C) if images have several labels; meters compare them with the
        scores. Override it in a method that makes its own classes, such as the rotation of each
        image. Its runs then have meters without ``outputs_logits``. N need not be the number of
        images.

        Args:
            output: Output of the network.
            batch: The batch.
            head: As in ``logits``.
        """
        scores = self.logits(output) if head is None else self.logits(output, head)
        return scores, batch.labels

    @property
    def has_meter_input(self) -> bool:
        """True if meters can be computed."""
        return self.outputs_logits or type(self).meter_input is not Method.meter_input

    def for_meter(self, meter: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return ``meter_input`` for a meter, of the head that it names; scores are detached."""
        head = getattr(meter, "head", None)  # Classy's meters have none
        scores, classes = self.meter_input(batch.output, batch, head)
        return scores.detach(), classes

    def visualize(self, output: Any, batch: Batch) -> dict[str, Tensor]:
        """Return images that illustrate the method, for the report; none by default.

        Called without gradients after ``prepare_batch`` and ``on_forward``.

        Args:
            output: Output of the network.
            batch: The batch.

        Returns:
            Name -> (B, C, H, W), normalized as the views of the first group, in the order in which
            they are shown: ``{"image": ..., "masked": ..., "reconstruction": ...}``.
        """
        return {}

    @property
    def chance_loss(self) -> float | None:
        """Return the loss of an uninformed network; None if it is not a fixed number.

        The docs show the text after the first colon of an override's docstring as its formula.
        """
        return None

    def export_backbone(self, network: nn.Module) -> nn.Module:
        """Return the backbone to export: the network's, or in some methods the teacher's."""
        return network.backbone  # type: ignore[return-value]

    def further_backbones(self) -> dict[str, Component]:
        """Return the architectures of additional trained backbones, by name; none by default.

        The network of each is ``network.further[NAME]``, and its backbone is exported to the folder
        ``export/NAME``.
        """
        return {}

    def load_scores(self, embed_dim: int, checkpoint: Mapping[str, Any]) -> Scores | None:
        """Return the trained head that scores classes or prototypes; None if there is none.

        Used by the distillation methods, whose students learn these scores.

        Args:
            embed_dim: Number of features of the exported backbone, E.
            checkpoint: Checkpoint of a run of this method: ``model``, ``method``, ``length``, ...
        """
        return None

    def load_text(
        self, embed_dim: int, checkpoint: Mapping[str, Any], tokenizer: Tokenizer
    ) -> tuple[nn.Module, nn.Module] | None:
        """Return the trained head for images and the text tower; None if there is none.

        Both embed in one space: features (B, E) -> (B, D), token ids (T, L) of T texts of L tokens
        -> (T, D).

        Args:
            embed_dim: Number of features of the exported backbone, E.
            checkpoint: As in ``load_scores``.
            tokenizer: Tokenizer of the run.
        """
        return None
