"""One item of a dataset."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from selftask.data.sampling.sampler import epoch_of
from selftask.data.transforms.transform import Trace
from selftask.errors import BadImage


@dataclass(frozen=True, slots=True)
class Sample:
    """One item of a dataset, on its way from a worker to the batch."""

    views: list[np.ndarray]  # V uint8 (H, W, C); empty if the image was skipped
    label: int  # -1 if there is none
    index: int  # of the image shown
    key: tuple[int, int]  # the requested key, which the draws depend on
    bad: list[BadImage]  # images that could not be read before this one
    extras: dict[str, np.ndarray] | None = None  # fields besides image and label
    traces: Sequence[Trace] = ()  # draws of the views, if they are recorded or made on the device

    @property
    def epoch(self) -> int:
        """Epoch of the key, whose first number also encodes the image's repeat in the epoch."""
        return epoch_of(self.key[0])
