"""Images of a report: names, labels, thumbnails, and features computed in one pass."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor, nn

from selftask.batch import Batch
from selftask.config.schema import Config
from selftask.data.inspect.contact_sheet import to_pixels
from selftask.data.loading.loader import EvalBatches
from selftask.data.source import Source
from selftask.data.subset import subset_of
from selftask.evaluate.features import extract_features
from selftask.evaluate.offline import eval_batches
from selftask.report.images.sprite import short_names, thumbnail

_BATCH_SIZE = 64
_SIDE = 96  # longest side of a thumbnail that is kept, in pixels
_SHOWN = 8  # number of images that are shown individually
_REPORT_EVERY_S = 2.0


@dataclass(frozen=True, kw_only=True)
class Gathered:
    """N images in the order in which they were read, with their features.

    Shape:
        features: (N, E) float32.
        labels: (N,) int64, -1 for images without a label.
    """

    what: str  # name of the images in texts: "validation images"
    names: Sequence[str]
    labels: np.ndarray
    features: np.ndarray
    thumbnails: Sequence[np.ndarray]  # uint8 (h, w, 3) each
    classes: Sequence[str] = field(default=())  # class names by label, if there are any

    def __len__(self) -> int:
        return len(self.names)

    def label_text(self, row: int) -> str:
        """Return the class of an image as text, or an empty string."""
        return self.class_text(int(self.labels[row]))

    def class_text(self, label: int) -> str:
        """Return the name of a class, or its number if it has no name; empty for -1."""
        if label < 0:
            return ""
        return str(self.classes[label]) if label < len(self.classes) else str(label)

    def draw(self, count: int) -> Gathered:
        """Return ``count`` random images in their order, or all of them if there are fewer.

        The choice is the same in each call.
        """
        if count >= len(self):
            return self
        rows = np.sort(np.random.default_rng(0).permutation(len(self))[:count])
        return replace(
            self,
            names=[self.names[row] for row in rows],
            labels=self.labels[rows],
            features=self.features[rows],
            thumbnails=[self.thumbnails[row] for row in rows],
        )


@dataclass(frozen=True, kw_only=True)
class Pass:
    """Result of ``gather``, with Q randomly chosen images to be shown individually."""

    images: Gathered
    shown: list[int]  # indices of the Q images in `images`
    inputs: Tensor  # (Q, C, H, W), inputs of the network
    pixels: np.ndarray  # (Q, H, W, C) uint8, the inputs without normalization


def gather(
    backbone: nn.Module,
    config: Config,
    source: Source,
    *,
    what: str,
    count: int,
    device: torch.device,
    tell: Callable[[str], None],
) -> Pass:
    """Return features and thumbnails of ``count`` images, chosen at random by ``train.seed``.

    Images are transformed by ``eval.transforms``; unreadable images are skipped.

    Args:
        backbone: Images (B, C, H, W) -> features (B, E); it is moved to ``device``.
        config: Config of the run.
        source: The images to choose from.
        what: Name of the images in texts, such as ``validation images``.
        count: Number of images; all if there are fewer.
        device: Device on which features are computed.
        tell: Called with progress messages.

    Raises:
        UserError: If no image can be read, features are not finite, or the backbone does not accept
            the size of the images.
    """
    part = {"count": min(count, len(source)), "seed": config.train.seed}
    chosen = subset_of(source, part if count < len(source) else None)
    order = np.random.default_rng(config.train.seed).permutation(len(chosen))
    # Unreadable images must not fail a report.
    data = replace(config.data, on_error="skip", max_unreadable=1.0)
    batches = eval_batches(replace(config, data=data), chosen, device)
    kept = _Watched(config, batches, tell, what, set(order[:_SHOWN].tolist()))
    extracted = extract_features(backbone.to(device), kept, device=device)
    rows = extracted.indices.tolist()
    images = Gathered(
        what=what,
        names=short_names([chosen.path(row) for row in rows]),
        labels=extracted.targets.numpy(),
        features=extracted.features.numpy(),
        thumbnails=kept.thumbnails,
        classes=source.class_names() or (),
    )
    return Pass(
        images=images,
        shown=[number for number, row in enumerate(rows) if row in kept.wanted],
        inputs=torch.cat(kept.inputs),
        pixels=np.concatenate(kept.pixels),
    )


@dataclass
class _Watched:
    """Iterable over batches that stores thumbnails of all images, and inputs of some."""

    config: Config
    batches: EvalBatches
    tell: Callable[[str], None]
    what: str
    wanted: set[int]  # indices of images whose input is kept
    thumbnails: list[np.ndarray] = field(default_factory=list)
    inputs: list[Tensor] = field(default_factory=list)
    pixels: list[np.ndarray] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Batch]:
        reported = time.monotonic()
        for batch in self.batches:
            views = batch.all_views[0].cpu()
            pixels = to_pixels(views, self.config.eval.transforms)
            numbers = batch.index.tolist()
            kept = [row for row, number in enumerate(numbers) if number in self.wanted]
            self.inputs.append(views[kept])
            self.pixels.append(pixels[kept])
            self.thumbnails += [thumbnail(image, _SIDE) for image in pixels]
            yield batch
            if time.monotonic() - reported > _REPORT_EVERY_S:
                reported = time.monotonic()
                self.tell(f"features of {len(self.thumbnails):,} {self.what}")
