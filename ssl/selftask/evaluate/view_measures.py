"""Label-free measures of several views of each image: LiDAR and alignment.

N images, Q views of each, E features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selftask.config.fields import setting
from selftask.config.schema import Config
from selftask.data.loading.dataset import Dataset, EvalDataset
from selftask.data.loading.loader import EvalBatches
from selftask.data.loading.open_data import Sources
from selftask.data.loading.sample import Sample
from selftask.data.source import Source, Wrapped, channels_of
from selftask.data.transforms.pipeline import Normalizer, build_pipeline
from selftask.distributed.accelerator import forked_rng
from selftask.errors import UserError
from selftask.evaluate.dense.patches import limited
from selftask.evaluate.features import collect
from selftask.evaluate.on_ranks import iterate_in_order
from selftask.logs import get_logger
from selftask.registry import register_evaluation

log = get_logger(__name__)

_BATCH_SIZE = 256  # affects memory only
_DELTA, _EPS = 1e-4, 1e-8  # LiDAR, section 4


@register_evaluation("views")
@dataclass(frozen=True, kw_only=True)
class ViewMeasures:
    """LiDAR and alignment of views of each image, without labels: lidar, feature_alignment."""

    needs_labels: ClassVar[bool] = False
    takes_backbone: ClassVar[bool] = True

    images: int = setting(1000, min=3)
    """Maximum number of images, chosen at random."""
    views: int = setting(10, min=2)
    """Number of views of each image; the paper has 50."""

    def __call__(
        self, backbone: nn.Module, config: Config, sources: Sources, device: torch.device
    ) -> dict[str, float]:
        """Return the measures of the images of ``data.val`` or, without it, of ``data``.

        Raises:
            UserError: As ``measure_views``.
        """
        row = measure_views(backbone, config, sources, self, device=device)
        return {name: row[name] for name in ("lidar", "feature_alignment")}


def measure_views(
    backbone: nn.Module,
    config: Config,
    sources: Sources,
    options: ViewMeasures,
    *,
    device: torch.device,
    tell: Callable[[str], None] = log.info,
) -> dict[str, float]:
    """Return LiDAR and alignment of views made by the first group in ``views``.

    View number v of an image has the draws of seed ``train.seed + v``, so that measures of
    checkpoints are comparable. Several ranks share the images.

    Args:
        backbone: Images (B, C, H, W) -> features (B, E).
        config: Config with ``views``.
        sources: The images: those of ``val``, or of ``train`` if ``val`` is None.
        options: Number of images and views.
        device: Device to compute features on; the backbone is moved to it.
        tell: Called with a line about images and views.

    Returns:
        ``lidar``, ``feature_alignment``, and the numbers of ``test_images`` and ``views``.

    Raises:
        UserError: If the views of an image are all equal, or there are fewer than three images.
    """
    source, key = (sources.train, "data") if sources.val is None else (sources.val, "data.val")
    name, group = next(iter(config.views.items()))
    pipeline = build_pipeline(group.transforms, f"views.{name}.transforms", channels_of(source))
    part = _KeepsLast(limited(source, options.images))
    pipelines = [pipeline.for_view(n % max(1, group.count)) for n in range(options.views)]
    views = _Views([EvalDataset(part, p, config.train.seed + n) for n, p in enumerate(pipelines)])
    batches = EvalBatches.of(
        views, part, config.data, batch_size=_BATCH_SIZE, device=device, key=key
    )
    with forked_rng():  # a DataLoader draws one number
        rows = collect(iterate_in_order(backbone.to(device), batches, device=device)).features
    features = rows.unflatten(0, (-1, options.views))  # (N, Q, E)
    if len(features) < 3:
        raise UserError(f"{key}: {len(features)} images; three or more are expected")
    if torch.equal(features, features[:, :1].expand_as(features)):
        raise UserError(
            f"views.{name}.transforms: all views of an image are equal; LiDAR compares different "
            "ones"
        )
    tell(f"{len(features)} images, {options.views} views of each, by views.{name}")
    measures = {"lidar": lidar(features), "feature_alignment": alignment(features)}
    return {**measures, "test_images": len(features), "views": options.views}


class _KeepsLast(Wrapped):
    """A source that reads an image once if it is asked for several times in a row."""

    def __init__(self, source: Source) -> None:
        super().__init__(source)
        self._last: tuple[int, tuple[np.ndarray, int]] | None = None

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        if self._last is None or self._last[0] != index:
            self._last = index, self.source[index]
        return self._last[1]


class _Views(Dataset):
    """All views of the first image, then those of the next, ...

    Args:
        datasets: Q datasets of N images, one for each view.
    """

    groups = EvalDataset.groups

    def __init__(self, datasets: Sequence[EvalDataset]) -> None:
        self.datasets = datasets

    @property
    def to_float(self) -> Sequence[Normalizer]:
        return self.datasets[0].to_float

    def __len__(self) -> int:
        return sum(map(len, self.datasets))

    def sample(self, key: tuple[int, int], out: Sequence[np.ndarray] = ()) -> Sample:
        image, view = divmod(key[1], len(self.datasets))
        sample = self.datasets[view].sample((0, image), out)
        return replace(sample, index=key[1])  # of the row: images have several


def lidar(features: Tensor) -> float:
    """Return LiDAR: the effective rank of the linear discriminant matrix of images.

    Thilak et al., ICLR 2024, arXiv:2312.04000, section 4: the exponential of the entropy of the
    eigenvalues of Sw^-1/2 Sb Sw^-1/2, where Sb is the covariance of the images' means, and Sw the
    covariance of views around their image's mean, plus 1e-4 on its diagonal.

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
    Features of 0 remain 0.

    Args:
        features: (N, Q, E), rows of one image are its views.
    """
    units = F.normalize(features.double(), dim=2)
    num_views = units.shape[1]
    squared = units.sum(dim=1).square().sum(dim=1)  # sum of all products, also of equal views
    lengths = units.square().sum(dim=(1, 2))  # number of views whose features are not 0
    return float((2 * (num_views * lengths - squared) / (num_views * (num_views - 1))).mean())
