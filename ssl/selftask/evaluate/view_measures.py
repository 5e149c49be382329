"""Label-free measures of several views of each image: LiDAR and alignment.

N images, Q views of each, E features.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selftask.config.fields import setting
from selftask.config.schema import Config
from selftask.data.loading.bad_files import BadFiles
from selftask.data.loading.dataset import EvalDataset
from selftask.data.loading.loader import EvalBatches
from selftask.data.source import Source, channels_of
from selftask.data.subset import Part, Subset
from selftask.data.transforms.pipeline import build_pipeline
from selftask.errors import UserError
from selftask.evaluate.features import extract_features

_BATCH_SIZE = 256  # affects memory only
_DELTA, _EPS = 1e-4, 1e-8  # LiDAR, section 4


@dataclass(frozen=True, kw_only=True)
class ViewOptions:
    """Number of images and views."""

    images: int = setting(1000, min=3)
    """Number of images, drawn at random if there are more."""
    views: int = setting(10, min=2)
    """Number of views of each image; the paper has 50."""


def measure_views(
    backbone: nn.Module,
    config: Config,
    source: Source,
    options: ViewOptions,
    *,
    device: torch.device,
) -> dict[str, float]:
    """Return LiDAR and alignment of views made by the first group in ``views``.

    View number v of an image has the draws of seed ``train.seed + v``, so that measures of
    checkpoints are comparable.

    Args:
        backbone: Images (B, C, H, W) -> features (B, E).
        config: Config with ``views``.
        source: The images.
        options: Number of images and views.
        device: Device to compute features on.

    Returns:
        ``lidar``, ``alignment``, and the numbers of ``images`` and ``views``.

    Raises:
        UserError: If the views of an image are all equal, or there are fewer than three images.
    """
    name, group = next(iter(config.views.items()))
    key = f"views.{name}.transforms"
    pipeline = build_pipeline(group.transforms, key, channels_of(source))
    part = Subset(source, Part(count=min(options.images, len(source))))
    backbone = backbone.to(device)
    passes = []
    for number in range(options.views):
        batches = EvalBatches(
            EvalDataset(
                part, pipeline.for_view(number % max(1, group.count)), config.train.seed + number
            ),
            batch_size=_BATCH_SIZE,
            num_workers=config.data.num_workers,
            device=device,
            bad_files=BadFiles.of(part, config.data, None, "data"),
        )
        passes.append(extract_features(backbone, batches, device=device).features)
    features = torch.stack(passes, dim=1)  # (N, Q, E)
    if len(features) < 3:
        raise UserError(f"data: {len(features)} images; three or more are expected")
    if torch.equal(features, features[:, :1].expand_as(features)):
        raise UserError(f"{key}: all views of an image are equal; LiDAR compares different ones")
    sizes = {"images": len(features), "views": options.views}
    return {"lidar": lidar(features), "alignment": alignment(features), **sizes}


def lidar(features: Tensor) -> float:
    """Return LiDAR: the effective rank of the linear discriminant matrix of images.

    Thilak et al., ICLR 2024, arXiv:2312.04000, section 4: the exponential of the entropy of the
    eigenvalues of Sw^-1/2 Sb Sw^-1/2, where Sb is the covariance of the images' means,
    and Sw that of views around them plus 1e-4 on its diagonal.

    Args:
        features: (N, Q, E), rows of one image are its views.
    """
    num_images, num_views, width = features.shape
    means = features.mean(dim=1, dtype=torch.float64)  # (N, E)
    between = (means - means.mean(dim=0)).T
    within = _DELTA * torch.eye(width, dtype=torch.float64, device=features.device)
    for view in features.unbind(1):
        rest = view.double() - means
        within += rest.T @ rest / (num_images * (num_views - 1))
    scale, axes = torch.linalg.eigh(within)
    whitened = (axes * scale.rsqrt()).T @ between / (num_images - 1) ** 0.5  # (E, N)
    gram = whitened @ whitened.T if width < num_images else whitened.T @ whitened
    eigenvalues = torch.linalg.eigvalsh(gram).clamp(min=0)
    eigenvalues = F.pad(eigenvalues, (0, max(0, width - len(eigenvalues)))) + _EPS
    share = eigenvalues / eigenvalues.sum()
    return float(torch.exp(-(share * share.log()).sum()))


def alignment(features: Tensor) -> float:
    """Return the mean squared distance between unit vectors of two views of an image, 0 to 4.

    Wang and Isola, ICML 2020, arXiv:2005.10242, eq. 2 with exponent 2. Lower is more invariant.

    Args:
        features: (N, Q, E), rows of one image are its views.
    """
    units = F.normalize(features.double(), dim=2)
    num_views = units.shape[1]
    squared = units.sum(dim=1).square().sum(dim=1)  # sum of all cosines, also of equal views
    cosine = (squared - num_views) / (num_views * (num_views - 1))
    return float((2 - 2 * cosine).mean())
