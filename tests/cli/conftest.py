"""What tests of the commands share."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two folders of two smooth images each, 90 x 70, and one file that is no image."""
    root = tmp_path_factory.mktemp("images")
    draws = np.random.default_rng(0)
    for name in ("a", "b"):
        (root / name).mkdir()
        for number in range(2):
            small = Image.fromarray(draws.integers(0, 256, (9, 7, 3), dtype=np.uint8))
            small.resize((70, 90), Image.Resampling.BICUBIC).save(root / name / f"{number}.png")
    (root / "b" / "broken, really.png").write_bytes(b"no image")
    return root
