"""Images with features for tests of a report's sections, without a run."""

from __future__ import annotations

import numpy as np

from selftask.report.images.gather import Gathered

CLASSES = ("cat", "dog </script><script>alert(1)</script>", "eel")


def gathered(count: int = 60, *, labeled: bool = True, side: int = 40) -> Gathered:
    """Images of random pixels whose features lie around the mean of their class."""
    draws = np.random.default_rng(0)
    labels = np.arange(count) % len(CLASSES) if labeled else np.full(count, -1)
    centers = draws.normal(size=(len(CLASSES), 8)) * 2
    features = centers[labels] + draws.normal(size=(count, 8))
    thumbnails = [
        draws.integers(0, 256, (side, side + row % 5, 3)).astype(np.uint8) for row in range(count)
    ]
    return Gathered(
        what="validation images",
        names=[f"<b>{row}</b>.jpg" for row in range(count)],
        labels=labels.astype(np.int64),
        features=features.astype(np.float32),
        thumbnails=thumbnails,
        classes=CLASSES if labeled else (),
    )
