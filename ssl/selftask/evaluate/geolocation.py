"""Locations of images, estimated from the locations of their nearest neighbors.

B images, k neighbors. Places are latitude and longitude in degrees; distances are in km.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selftask.config.fields import setting
from selftask.config.schema import Config
from selftask.data.loading.open_data import Sources
from selftask.data.source import Source
from selftask.errors import UserError
from selftask.evaluate.features import Features, collect
from selftask.evaluate.nearest import QUERIES, Bank
from selftask.evaluate.offline import iterate_source
from selftask.evaluate.online import evaluated_model
from selftask.evaluate.tables import read_rows
from selftask.logs import get_logger

log = get_logger(__name__)

EARTH_KM = 6371.0088  # mean radius


@dataclass(frozen=True, kw_only=True)
class GeolocationOptions:
    """Table of coordinates, neighbors and distances."""

    coordinates: str = ""
    """Table with the columns path, latitude, longitude; paths are relative to its folder."""
    k: int = setting(1, min=1)
    """Number of neighbors. The estimate is the location of the neighbor with the highest density of
    neighbors around it.
    """
    bandwidth: float = setting(25.0, above=0)
    """Standard deviation of the Gaussian that weights neighbors by distance, in km; for k > 1."""
    distances: list[float] = setting([1.0, 25.0, 200.0, 750.0, 2500.0], above=0, nonempty=True)
    """Distances within which a place is correct, in km: street, city, region, country, continent.
    """

    def problems(self) -> Iterator[str]:
        if not self.coordinates:
            yield "coordinates is missing: a table with the columns path,latitude,longitude"


@torch.no_grad()
def measure_geolocation(
    backbone: nn.Module,
    config: Config,
    sources: Sources,
    options: GeolocationOptions,
    *,
    device: torch.device,
    tell: Callable[[str], None] = log.info,
) -> dict[str, float]:
    """Return the share (0 to 1) of test images whose location is estimated within each distance.

    The estimate is the location of the most similar training image. With k neighbors it is the
    location of the neighbor at which their density, a sum of Gaussians over neighbors, is highest.
    Several ranks share the images.

    Args:
        backbone: Images (B, C, H, W) -> features (B, E).
        config: Config with ``eval.transforms``.
        sources: Training and test images; without test images, each training image is located by
            the other training images.
        options: Table, neighbors and distances.
        device: Device to compute on; the backbone is moved to it.
        tell: Called with a line about unreadable images.

    Returns:
        ``geolocation_25km`` and so on; ``geolocation_median_km``, the median distance of the
        estimated from the true locations; ``train_images`` and ``test_images``.

    Raises:
        UserError: If the table is damaged or lacks an image, if there are too few neighbors, or if
            features of several layers are requested.
    """
    if len(config.eval.layers) > 1:
        raise UserError("eval.layers: places are measured for one layer, such as eval.layers=[-1]")
    table = read_coordinates(Path(options.coordinates).expanduser())
    model = evaluated_model(backbone, config.eval).to(device)
    is_alone = sources.val is None
    keys = {"data": sources.train}
    if sources.val is not None:
        keys["data.val"] = sources.val
    places = {key: _places(source, table, key) for key, source in keys.items()}

    def features(key: str) -> Features:
        return collect(iterate_source(model, config, keys[key], device=device, key=key, tell=tell))

    train = features("data")
    test = train if is_alone else features("data.val")
    if options.k > len(train) - is_alone:
        raise UserError(
            f"k: {options.k} neighbors are asked for; there are {len(train) - is_alone}"
        )
    train_places = places["data"][train.indices.cpu()]
    test_places = train_places if is_alone else places["data.val"][test.indices.cpu()]
    bank, own_rows = Bank(train.features), torch.arange(len(test), device=test.features.device)
    own_rows = own_rows if is_alone else torch.full_like(own_rows, -1)
    placed = []
    for rows, left_out in zip(test.features.split(QUERIES), own_rows.split(QUERIES), strict=True):
        _, neighbors = bank.nearest(F.normalize(rows, dim=1), options.k, left_out)
        placed.append(densest(train_places[neighbors.cpu()], options.bandwidth))
    errors = distance_km(torch.cat(placed), test_places)
    return {
        **{f"geolocation_{d:g}km": float((errors <= d).double().mean()) for d in options.distances},
        "geolocation_median_km": float(np.median(errors.numpy())),
        "train_images": len(train),
        "test_images": len(test),
    }


def densest(places: Tensor, bandwidth: float) -> Tensor:
    """Return the location (B, 2) of the neighbor at which the density of neighbors is highest.

    Args:
        places: (B, k, 2), nearest neighbor first, which wins ties.
        bandwidth: Standard deviation of the Gaussian around each neighbor, in km.
    """
    distances = distance_km(places[:, :, None], places[:, None])  # (B, k, k)
    density = torch.exp(-0.5 * (distances / bandwidth).square()).sum(dim=2)
    return places[torch.arange(len(places)), density.argmax(dim=1)]


def distance_km(first: Tensor, second: Tensor) -> Tensor:
    """Return great-circle distances in km, by the haversine formula.

    Args:
        first: Latitude and longitude in degrees, (..., 2).
        second: Latitude and longitude in degrees, of a shape that broadcasts with ``first``.

    Returns:
        Distances (...).
    """
    first, second = first.deg2rad(), second.deg2rad()
    half = ((first - second) / 2).sin().square()
    cosines = first[..., 0].cos() * second[..., 0].cos()
    haversine = half[..., 0] + cosines * half[..., 1]
    return 2 * EARTH_KM * haversine.clamp(max=1).sqrt().asin()


def read_coordinates(path: Path) -> dict[str, tuple[float, float]]:
    """Return latitude and longitude in degrees by absolute path of the image.

    Raises:
        UserError: If the file is not a table of coordinates.
    """
    where = f"coordinates={path}"
    rows = read_rows(path, ("path", "latitude", "longitude"), where)
    table: dict[str, tuple[float, float]] = {}
    for line, row in enumerate(rows, start=2):
        try:
            coordinates = float(row["latitude"]), float(row["longitude"])
        except (TypeError, ValueError):
            coordinates = (math.nan, math.nan)
        if not (abs(coordinates[0]) <= 90 and abs(coordinates[1]) <= 180):
            raise UserError(
                f"{where}:{line}: latitude {row['latitude']!r}, longitude {row['longitude']!r}; "
                "expected degrees from -90 to 90 and from -180 to 180"
            )
        table[os.path.abspath(path.parent / row["path"])] = coordinates
    return table


def _places(source: Source, table: dict[str, tuple[float, float]], key: str) -> Tensor:
    """Return the places (N, 2) of all images of a source, float64.

    Raises:
        UserError: If the table lacks an image.
    """
    paths = [source.path(index) for index in range(len(source))]
    for path in paths:
        if os.path.abspath(path) not in table:
            raise UserError(f"coordinates: no row for {path} of {key}")
    return torch.tensor([table[os.path.abspath(path)] for path in paths], dtype=torch.float64)
