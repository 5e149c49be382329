"""The batch: inputs and results of a train step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor

from selftask.errors import UserError, nearest
from selftask.logs.rows import RESERVED_COLUMNS

Loss: TypeAlias = Tensor | Mapping[str, Tensor]
"""A scalar tensor (), or named scalar tensors whose sum is the loss."""

_EXPECTED = "a scalar tensor, or a dict of scalar tensors whose sum is the loss"


def total(loss: Loss) -> Tensor:
    """Return the loss as a scalar tensor (): itself, or the sum of its named terms.

    Raises:
        UserError: If it is neither a scalar tensor nor a nonempty mapping of scalar tensors, or if
            a term has the name of a column of training.
    """
    if isinstance(loss, Tensor) and not loss.ndim:
        return loss
    terms = loss if isinstance(loss, Mapping) and loss else {"the loss": loss}
    for name, term in terms.items():
        if name in RESERVED_COLUMNS:
            raise UserError(
                f"the loss term {name!r} has the name of a column of training; rename it"
            )
        if not isinstance(term, Tensor) or term.ndim:
            value = f"a tensor {(*term.shape,)}" if isinstance(term, Tensor) else f"{term!r:.40}"
            subject = name if name == "the loss" else f"the loss term {name!r}"
            raise UserError(f"{subject} is {value}; the method must return {_EXPECTED}")
    return sum(terms.values(), start=0.0)  # type: ignore[return-value, type-var]


@dataclass(frozen=True, eq=False, kw_only=True)
class Draws:
    """Random augmentation parameters of one view of each image in a batch.

    Positions in a view are x and y in [0, 1], from its upper left corner. Positions in an image are
    in pixels of the input of the first transform, after ``data.max_side``.
    """

    matrix: Tensor
    """(B, 2, 3) float32: maps (x, y, 1) in the view to (x, y) in the image. Transforms that are not
    affine (``Transform.affine`` is False) are ignored."""
    image_size: Tensor
    """(B, 2) float32: height and width of the image in pixels."""
    params: dict[str, Tensor]
    """Transform name -> the N numbers of ``Transform.numbers`` for each image, (B, N) float32. A
    second transform of the same name in a view is called ``NAME_2``; those without numbers are
    missing."""

    @property
    def boxes(self) -> Tensor:
        """Bounding boxes of the views in the images, (B, 4) float32: left, top, right and bottom in
        pixels. They may extend beyond the image.
        """
        right, down, corner = self.matrix.unbind(2)  # (B, 2) each
        corners = torch.stack([corner, corner + right, corner + down, corner + right + down])
        return torch.cat([corners.amin(0), corners.amax(0)], dim=1)

    def centers(self, rows: int, columns: int) -> Tensor:
        """Return the positions in the image of the cell centers of a feature map.

        Args:
            rows: Height of the view's feature map.
            columns: Width of the view's feature map.

        Returns:
            (B, rows * columns, 2) float32: x and y of each center in pixels, row by row.
        """
        right, down, corner = self.matrix[:, None, None].unbind(4)  # (B, 1, 1, 2) each
        y, x = (torch.arange(0.5, n, device=corner.device)[:, None] / n for n in (rows, columns))
        of_row = torch.addcmul(corner, x, right)  # (B, 1, columns, 2)
        return torch.addcmul(of_row, y[:, None], down).flatten(1, 2)


class Extras(dict[str, Tensor]):
    """Data of a batch in addition to image and label, by name.

    ``extras[name]`` raises UserError for a missing name.
    """

    def __missing__(self, name: str) -> Tensor:
        raise UserError(
            f"data: no {name!r} in addition to image and label, which the method requires; "
            f"the data gives {', '.join(self) or 'nothing'}"
        )


@dataclass(eq=False, kw_only=True)
class Batch:
    """One batch of this rank; ``task.last_batch`` is the current one.

    The loader sets the fields up to ``epoch``, ``Method.prepare_batch`` sets ``input``, and the
    train step sets ``output``, ``local_loss`` and ``loss``. Hooks can add results by name, such as
    the output of a teacher: ``batch["teacher"] = ...``.

    Shape:
        B samples on this rank, C channels, height H and width W in pixels. The sizes of views may
        differ between groups.
    """

    views: dict[str, list[Tensor]]
    """Group name -> its views, each float (B, C, H, W), in the order of the recipe's ``views:``."""
    labels: Tensor
    """(B,) int64, -1 for an image without a label."""
    index: Tensor
    """(B,) int64, indices of the samples in the data set."""
    key: Tensor
    """(B, 2) int64 on the CPU: epoch and index of each sample, from which its random numbers are
    drawn; see ``random.keyed``."""
    extras: Extras = field(default_factory=Extras)
    """Additional data of the source, by name: numbers and arrays (B, ...), and texts as token ids
    (B, L) int64, padded with 0."""
    draws: dict[str, list[Draws]] = field(default_factory=dict)
    """Group name -> draws of its views, in training only. Set for groups with
    ``views.NAME.draws``, or for all groups if the method requires ``"boxes"``."""
    drawn: dict[str, Any] = field(default_factory=dict)
    """Random draws made ahead by the loader, on the device: ``method`` (see ``Method.draw``) and
    ``layers`` (random words of dropout layers). If one is missing, it is drawn when needed."""
    number: int = 0
    """Number of the global batch in training, from 0."""
    epoch: int = 0
    """Number of the epoch, from 0."""
    input: Any = None
    """Argument of the network."""
    output: Any = None
    """Result of the network; by default (V, B, D) for V views and D outputs of the head."""
    terms: dict[str, Tensor] = field(default_factory=dict)
    """Named terms of this rank's loss, including those of hooks, detached scalars; empty for a loss
    without named terms."""
    loss: Tensor | None = None
    """Mean of the loss over ranks, a detached scalar."""
    added: dict[str, Any] = field(default_factory=dict)
    """Results of hooks, by name, which ``batch[name]`` reads and sets."""
    added_terms: dict[str, Tensor] = field(default_factory=dict)
    """Scalar terms of hooks, with their graph, by name; hooks set them in ``on_forward``, and they
    are added to ``local_loss``."""
    _local_loss: Tensor | None = field(default=None, init=False)
    step_data: ClassVar[dict[str, Any]] = {}
    """Always empty; Classy Vision's hooks look for timings here."""

    def __getitem__(self, name: str) -> Any:
        try:
            return self.added[name]
        except KeyError:
            raise KeyError(
                f"nothing is called {name!r} in the batch; prepare_batch and on_forward may set "
                f"it; {nearest(name, self.added)}"
            ) from None

    def __setitem__(self, name: str, value: Any) -> None:
        self.added[name] = value

    @property
    def all_views(self) -> list[Tensor]:
        """Views of all groups, (B, C, H, W) each, in one list in the order of the recipe."""
        return [view for group in self.views.values() for view in group]

    @property
    def local_loss(self) -> Tensor:
        """Loss of this rank, a scalar with its graph; set it to a scalar or to named terms.

        Setting it adds ``added_terms`` to the loss and stores all named terms in ``terms``.

        Raises:
            AttributeError: If the step has not computed it yet.
            UserError: If it is set to anything else, see ``total``.
        """
        if self._local_loss is None:
            raise AttributeError("this batch has no loss yet")
        return self._local_loss

    @local_loss.setter
    def local_loss(self, loss: Loss) -> None:
        self._local_loss = total(loss)
        if isinstance(loss, Tensor) and not self.added_terms:
            return  # `terms` is empty
        terms = {} if isinstance(loss, Tensor) else dict(loss)
        for name, term in self.added_terms.items():
            self._local_loss = self._local_loss + term
            terms[name] = term
        self.terms = {name: term.detach() for name, term in terms.items()}

    @property
    def target(self) -> Tensor:
        """The labels (B,), under the name that Classy Vision's hooks use."""
        return self.labels

    @property
    def sample(self) -> dict[str, Any]:
        """Input, target and index, under the names that Classy Vision's hooks use."""
        return {"input": self.input, "target": self.labels, "index": self.index}


def with_dtype(batch: Batch, dtype: torch.dtype) -> Batch:
    """Return the batch with floating-point views in ``dtype``; a user's may be integers."""
    views = {
        name: [view.to(dtype) if view.is_floating_point() else view for view in group]
        for name, group in batch.views.items()
    }
    return replace(batch, views=views)
