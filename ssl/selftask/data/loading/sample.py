"""One item of a dataset."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from selftask.data.reading.files import BadImage
from selftask.data.sampling.sampler import epoch_of

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, slots=True)
class Sample:
    """One item of a dataset, on its way from a worker to the batch."""

    views: list[np.ndarray]  # V uint8 (H, W, C); empty if the image was left out
    target: int  # -1 where there is none
    index: int  # of the image that is shown
    key: tuple[int, int]  # what was asked for, and what the draws are those of
    bad: list[BadImage]  # what could not be read on the way
    extras: dict[str, np.ndarray] | None = None  # what the source gives beside image and label
    drawn: Any = None  # with data.augment_on=device, which makes the views: what was drawn for them

    @property
    def epoch(self) -> int:
        """Epoch of the key, whose first number also counts repeats of an image in an epoch."""
        return epoch_of(self.key[0])
