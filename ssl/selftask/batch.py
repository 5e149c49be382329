"""The batch that flows through a train step: what was read, and what the step makes of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor

from selftask.errors import UserError

Loss: TypeAlias = Tensor | Mapping[str, Tensor]
"""A scalar, or named terms whose sum is the loss."""


def total(loss: Loss) -> Tensor:
    """Return the loss as one scalar: the sum of its terms if it has several."""
    return loss if isinstance(loss, Tensor) else sum(loss.values(), start=0.0)  # type: ignore[return-value]


@dataclass(frozen=True, eq=False, kw_only=True)
class Draws:
    """What was drawn for one view of each image of a batch.

    Positions in a view are x and y from 0 to 1, from its upper left corner. Those in the image are
    in pixels of the image as its first transform gets it, after ``data.max_side``.
    """

    matrix: Tensor
    """(B, 2, 3) float32: takes (x, y, 1) in the view to a position in the image. Transforms that no
    matrix describes (``Transform.affine`` is False) are left out of it."""
    image_size: Tensor
    """(B, 2) float32: height and width of the image in pixels."""
    params: dict[str, Tensor]
    """Name of a transform -> its numbers, (B, N) float32. The second transform of a name in one
    view is ``NAME_2``."""

    @property
    def boxes(self) -> Tensor:
        """(B, 4): left, top, right and bottom of the view in the image."""
        right, down, corner = self.matrix.unbind(2)  # (B, 2) each
        corners = torch.stack([corner, corner + right, corner + down, corner + right + down])
        return torch.cat([corners.amin(0), corners.amax(0)], dim=1)

    def centers(self, rows: int, columns: int) -> Tensor:
        """Return the positions in the image of the centers of a feature map's cells.

        Args:
            rows: Of the feature map of the view.
            columns: Of the feature map of the view.

        Returns:
            (B, rows * columns, 2): x and y of each cell, row by row.
        """
        right, down, corner = self.matrix[:, None].unbind(3)  # (B, 1, 2) each
        y, x = ((torch.arange(n, device=corner.device) + 0.5) / n for n in (rows, columns))
        x, y = x.repeat(rows)[:, None], y.repeat_interleave(columns)[:, None]
        return corner + x * right + y * down


class Extras(dict[str, Tensor]):
    """What the data gives beside image and label, by name."""

    def __missing__(self, name: str) -> Tensor:
        raise UserError(
            f"data: no {name!r} beside image and label, which the method asks for; the data gives "
            f"{', '.join(self) or 'nothing'}"
        )


@dataclass(eq=False, kw_only=True)
class Batch:
    """One batch of this rank; ``task.last_batch`` is that of the current step.

    The loader fills all fields above ``input``, ``Method.prepare_batch`` the input, the train step
    the rest, from top to bottom. What a hook computes at ``on_forward`` (the output of a teacher)
    is added under a name: ``batch["teacher"] = ...``.

    Shape:
        B images on this rank, C channels. The sizes of views may differ between groups.
    """

    views: dict[str, list[Tensor]]
    """Group name -> its views, each (B, C, H, W), as in the recipe's ``views:``."""
    labels: Tensor
    """(B,) int64, -1 for an image without a label."""
    index: Tensor
    """(B,) int64, numbers of the images in the data set."""
    key: Tensor
    """(B, 2) int64 on the host; names the random draws of each sample, see ``random.keyed``."""
    extras: Extras = field(default_factory=Extras)
    """What the source gives beside image and label, by name: numbers and arrays (B, ...), texts
    as token ids (B, L) int64 that end in 0."""
    draws: dict[str, list[Draws]] = field(default_factory=dict)
    """Group name -> the draws of its views, in training; only if ``views.NAME.draws`` is set, or
    for all groups if the method requires ``"boxes"``."""
    number: int = 0
    """Of the global batch, counted from the start of training."""
    epoch: int = 0
    """Epoch of its first sample, from 0."""
    input: Any = None
    """Argument of the network."""
    output: Any = None
    """Result of the network; (V, B, D) by default."""
    terms: dict[str, Tensor] = field(default_factory=dict)
    """Terms of the loss by name, detached; empty for a loss of one term."""
    loss: Tensor | None = None
    """Mean of the loss over ranks, detached."""
    added: dict[str, Any] = field(default_factory=dict)
    """Results of hooks, by name."""
    _local_loss: Tensor | None = field(default=None, init=False)
    step_data: ClassVar[dict[str, Any]] = {}
    """Empty; Classy Vision's hooks look for timings in it."""

    def __getitem__(self, name: str) -> Any:
        return self.added[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self.added[name] = value

    @property
    def all_views(self) -> list[Tensor]:
        """The views of all groups in one list, in the order of the recipe."""
        return [view for group in self.views.values() for view in group]

    @property
    def local_loss(self) -> Tensor:
        """Loss of this rank, with its graph; set from a scalar or from named terms.

        Raises AttributeError before the step has computed it.
        """
        if self._local_loss is None:
            raise AttributeError("this batch has no loss yet")
        return self._local_loss

    @local_loss.setter
    def local_loss(self, loss: Loss) -> None:
        self._local_loss = total(loss)
        if not isinstance(loss, Tensor):
            self.terms = {name: term.detach() for name, term in loss.items()}

    @property
    def target(self) -> Tensor:
        """The labels, under the name that Classy Vision's hooks use."""
        return self.labels

    @property
    def sample(self) -> dict[str, Any]:
        """Input, target and index, as Classy Vision's hooks look for them."""
        return {"input": self.input, "target": self.labels, "index": self.index}
