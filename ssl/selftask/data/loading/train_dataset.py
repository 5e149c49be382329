"""The training dataset, whose views are made by workers or on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from selftask.config.checks.requirements import required
from selftask.data.device.batches import DeviceDataset
from selftask.data.device.engine import Engine
from selftask.data.draw_recorder import DrawRecorder
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
    """Build the dataset for ``data.augment_on``; raises ConfigError for unsupported views."""
    views, seed = Views(config.views, channels_of(source)), config.train.seed
    recorder = _recorder(config, views)
    if config.data.augment_on == "cpu":
        return ViewDataset(source, views, seed, extras, recorder)
    engine = Engine(views, config.views)
    return DeviceDataset(source, views, seed, engine, config.data.max_side, extras, recorder)


def _recorder(config: Config, views: Views) -> DrawRecorder | None:
    """Return a recorder of the groups whose draws the recipe or method requests, or None."""
    boxes = "boxes" in required(config.method.name)
    asked = [name for name, group in config.views.items() if group.draws or boxes]
    return DrawRecorder(views, config.views, asked) if asked else None
