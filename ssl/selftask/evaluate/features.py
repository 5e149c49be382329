"""Features of a labeled data set from a frozen backbone, kept in memory for all evaluations.

N images, E features.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from selftask.batch import Batch
from selftask.data.labels import MAX_CLASSES
from selftask.distributed.accelerator import forked_rng
from selftask.distributed.collectives import world_size
from selftask.errors import UserError, nearest_path
from selftask.evaluate.chunks import InChunks
from selftask.logs import DETAIL, get_logger
from selftask.logs.stages import staged
from selftask.models.build import check_images
from selftask.models.eval_mode import in_eval_mode
from selftask.models.precision import to_float32

TOO_LARGE = "too large (a norm above 1.8e19)"
_ROWS = 8192
_WARM_UP = 5  # batches
_LOG_EVERY_S = 30.0

log = get_logger(__name__)


@dataclass(frozen=True)
class Features:
    """Features and labels of images, one row per image, in the order in which they were read."""

    features: Tensor  # (N, E) float32
    targets: Tensor  # (N,) int64; -1 for images without a label
    indices: Tensor  # (N,) int64; index of the image in the data set

    @classmethod
    def joined(cls, parts: Sequence[Features]) -> Features:
        """Return the rows of all parts, one part after another."""
        columns = ([getattr(part, field.name) for part in parts] for field in fields(cls))
        return cls(*map(torch.cat, columns))

    def __len__(self) -> int:
        return len(self.features)

    def to(self, device: torch.device | str) -> Features:
        """Return the features on a device; tensors that are there already are not copied."""
        return Features(*(x.to(device) for x in (self.features, self.targets, self.indices)))

    def __getitem__(self, rows: Tensor) -> Features:
        """Return a subset of the rows."""
        return Features(self.features[rows], self.targets[rows], self.indices[rows])

    def draw(self, count: int, generator: torch.Generator) -> Features:
        """Draw ``count`` images of each class, or all images of a class that has fewer.

        The result is sorted by class. The generator is on the CPU.
        """
        return self._draw(lambda _: count, generator)

    def draw_share(self, share: float, generator: torch.Generator) -> Features:
        """Draw a share (0 to 1) of the images of each class, at least one; see ``draw``."""
        return self._draw(lambda number: max(1, round(share * number)), generator)

    def _draw(self, count: Callable[[int], int], generator: torch.Generator) -> Features:
        """Draw ``count(number)`` of the ``number`` images of each class."""
        order = torch.randperm(len(self), generator=generator).to(self.targets.device)
        order = order[self.targets[order].argsort(stable=True)]
        sizes = torch.unique(self.targets, return_counts=True)[1].tolist()
        return self[torch.cat([rows[: count(len(rows))] for rows in order.split(sizes)])]

    def split(self, widths: Sequence[int]) -> list[Features]:
        """Split the features into blocks of columns; targets and indices are unchanged."""
        blocks = self.features.split(list(widths), dim=1)
        return [replace(self, features=block.contiguous()) for block in blocks]

    def check_finite(self) -> None:
        """Raise UserError if features are not finite or too large; see ``are_finite``."""
        check_finite(self.features, "the features")

    def check_labels(self, subject: str) -> None:
        """Raise UserError unless there are images and all of them have labels."""
        check_targets(self.targets, subject)


@dataclass(frozen=True)
class FileRows:
    """Rows of a ``.npy`` file of float32 (N, E), read when they are indexed.

    Reading raises UserError if features are not finite or too large; see ``are_finite``.
    """

    path: Path
    shape: tuple[int, int]

    @classmethod
    def of(cls, path: str | Path) -> FileRows:
        """Open a file; raise UserError if it is not a float32 array (N, E)."""
        try:
            mapped = np.load(path, mmap_mode="r")
        except FileNotFoundError as error:
            raise UserError(f"{path}: there is no such file; {nearest_path(path)}") from error
        except (OSError, ValueError, EOFError) as error:
            raise UserError(f"{path}: is no file of features: {error}") from error
        if mapped.ndim != 2 or mapped.dtype != np.float32:
            raise UserError(
                f"{path}: is {mapped.dtype} of shape {mapped.shape}; expected float32 (images, "
                "features)"
            )
        return cls(Path(path), mapped.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice | np.ndarray) -> Tensor:
        mapped = np.load(self.path, mmap_mode="r")  # for this block: pages in memory do not add up
        features = torch.from_numpy(np.array(mapped[rows]))
        if not bool(are_finite(features).all()):
            raise UserError(f"{self.path}: features are not finite, or {TOO_LARGE}")
        return features


def in_blocks(rows: Tensor | FileRows) -> Iterator[Tensor]:
    """Yield blocks of consecutive rows, at most 8192 rows each."""
    for first in range(0, len(rows), _ROWS):
        yield rows[first : first + _ROWS]


@dataclass(frozen=True)
class FileFeatures:
    """Features in a file, which may be larger than the memory, and labels of the images.

    Evaluations with ``takes_files = True`` read them block by block.
    """

    features: FileRows  # (N, E)
    targets: Tensor  # (N,) int64; -1 for images without a label

    def __len__(self) -> int:
        return len(self.features)

    def __getitem__(self, rows: Tensor) -> Features:
        """Return a subset of the rows, in memory. ``rows`` is a mask (N,) or row numbers."""
        numbers = torch.arange(len(self))
        return Features(self.features[rows.numpy()], self.targets[rows], numbers[rows])

    def loaded(self) -> Features:
        """Return all rows, in memory."""
        return Features(self.features[:], self.targets, torch.arange(len(self)))

    def check_finite(self) -> None:
        """Raise UserError if features are not finite or too large; see ``are_finite``."""
        for _ in in_blocks(self.features):
            pass  # reading has checked it


def is_constant(deviation: Tensor) -> Tensor:
    """Return a mask (E,) of the features that deviate by rounding errors only.

    These have less than 1e-6 of the median deviation. A few features may be larger than all others
    by any factor.

    Args:
        deviation: Standard deviation of each feature, (E,).
    """
    active = deviation[deviation > 0]
    return deviation <= 1e-6 * (active.median() if len(active) else 1.0)


def are_finite(rows: Tensor) -> Tensor:
    """Return a mask (B,) of the rows (B, ...) whose norm is finite in float32.

    Above 1.8e19, squares of finite features overflow: a normalized row would be 0.
    """
    return to_float32(rows).flatten(1).norm(dim=1).isfinite()


def check_finite(features: Tensor, subject: str) -> None:
    """Raise UserError if the features of any image are not finite or too large; see ``are_finite``.

    Args:
        features: Features of the images, (B, ...).
        subject: Beginning of the message.
    """
    if broken := int((~are_finite(features)).sum()):
        raise UserError(
            f"{subject} of {broken} of {len(features)} images are not finite, or {TOO_LARGE}: the "
            "weights are damaged or training has diverged"
        )


def check_targets(targets: Tensor, subject: str) -> None:
    """Raise UserError unless there are targets (N,) and all of them are class numbers."""
    if not len(targets):
        raise UserError(f"{subject}: there are no images to evaluate on")
    unlabeled = int((targets < 0).sum())
    if unlabeled:
        raise UserError(
            f"{subject}: {unlabeled} of {len(targets)} images have no label, or none that is a "
            "whole number; evaluations need a labeled set, such as a folder with one sub-folder "
            "for each class"
        )
    if int(targets.max()) >= MAX_CLASSES:
        raise UserError(
            f"{subject}: the label {int(targets.max())} is no class number; expected 0 to "
            f"{MAX_CLASSES - 1}"
        )


def extract_features(
    backbone: nn.Module, batches: Iterable[Batch], *, device: torch.device | str
) -> Features:
    """Run the backbone over batches and collect its features on the CPU.

    The backbone is in eval mode meanwhile. Its mode and torch's random state are restored.

    Args:
        backbone: Images (B, C, H, W) -> features (B, E).
        batches: Batches, of which the first view is used.
        device: Device of the backbone.

    Raises:
        UserError: If there are no images, features are not finite, or a vision transformer does not
            accept the size of the images.
    """
    return collect(iterate_features(backbone, batches, device=device))


def collect(batches: Iterable[Features]) -> Features:
    """Join batches of features; raise UserError if there are none or if some are not finite."""
    parts = list(batches)
    if not parts:
        raise UserError("there are no images to take features of")
    features = Features.joined(parts)
    features.check_finite()
    return features


@torch.no_grad()
def iterate_features(
    backbone: nn.Module, batches: Iterable[Batch], *, device: torch.device | str
) -> Iterator[Features]:
    """Yield the features (B, E) of each batch, float32 on the CPU; they may be NaN or infinite.

    The backbone is in eval mode until the iterator ends. If the device runs out of memory, the
    backbone runs on parts of a batch.

    Args:
        backbone: Images (B, C, H, W) -> features (B, E).
        batches: Batches, of which the first view is used.
        device: Device of the backbone.

    Raises:
        UserError: At the first batch, if the backbone does not accept the size of the images.
    """
    run = InChunks(lambda images: (backbone(images).float().cpu(),), "images")
    dtype = next((p.dtype for p in backbone.parameters()), torch.float32)
    is_first, begun, computed_s, count = True, time.monotonic(), 0.0, 0
    with in_eval_mode(backbone), forked_rng():
        for batch in log_speed(batches):
            images = batch.all_views[0].to(device, dtype, non_blocking=True)  # (B, C, H, W)
            if is_first:
                check_images(backbone, images)
                is_first = False
            before = time.monotonic()
            (features,) = run(images)  # (B, E) on the CPU, so the device has finished
            computed_s, count = computed_s + time.monotonic() - before, count + len(features)
            yield Features(features, batch.labels.cpu(), batch.index.cpu())
    text = "features: %s images in %.1f s, of which the backbone computed %.1f s"
    log.log(DETAIL, text, f"{count:,}", time.monotonic() - begun, computed_s)


def log_speed(batches: Iterable[Batch]) -> Iterator[Batch]:
    """Yield the batches; log images per second of all ranks and the remaining time every 30 s.

    The first five batches do not count, since workers and kernels are starting. The remaining time
    is logged if ``batches`` has a length. A progress line is drawn on terminals.
    """
    images, logged = 0, time.monotonic()
    total = len(batches) if isinstance(batches, Sized) else None
    for number, batch in enumerate(staged("features", batches, total)):
        yield batch
        now = time.monotonic()
        if number < _WARM_UP:
            started = now
            continue
        images += len(batch.index) * world_size()  # ranks share the images
        if now - logged >= _LOG_EVERY_S:
            logged = now
            text = f"features: {images / (now - started):,.0f} images/s"
            if total is not None:
                remaining = (total - number - 1) * (now - started) / (number + 1 - _WARM_UP)
                text += f", eta {timedelta(seconds=round(remaining))}"
            log.info("%s", text)
