"""How a model is shown an image by ``selftask eval`` and ``features``."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from selftask.config.schema import Config
from selftask.data.transforms.pipeline import build_pipeline


def shown(config: Config, path: Path) -> Tensor:
    """What the network is given of an image, (3, H, W)."""
    pipeline = build_pipeline(config.eval.transforms, "eval.transforms", 3)
    pixels = pipeline(np.asarray(Image.open(path)), np.random.default_rng(0), None)
    return pipeline.to_float(torch.from_numpy(np.ascontiguousarray(pixels))[None])[0]
