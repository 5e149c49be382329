"""The training samples as the ``data:`` section wants them made: by workers or on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from selftask.data.device.batches import DeviceDataset
from selftask.data.device.engine import Engine
from selftask.data.extras import ExtrasReader
from selftask.data.loading.dataset import ViewDataset
from selftask.data.source import channels_of
from selftask.data.views import Views

if TYPE_CHECKING:
    from selftask.config.schema import Config
    from selftask.data.source import Source


def train_dataset(
    config: Config, source: Source, extras: ExtrasReader | None = None
) -> ViewDataset:
    """For ``data.augment_on``; raises ConfigError for views that it cannot make."""
    views, seed = Views(config.views, channels_of(source)), config.train.seed
    if config.data.augment_on == "cpu":
        return ViewDataset(source, views, seed, extras)
    engine = Engine(views, config.views)
    return DeviceDataset(source, views, seed, engine, config.data.max_side, extras)
