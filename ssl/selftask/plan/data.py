"""Fake data of a plan, with the sizes of the real data or with assumed sizes."""

from __future__ import annotations

from selftask.config.checks.grid import output_side
from selftask.config.checks.requirements import required
from selftask.config.schema import Config
from selftask.data.loading.open_data import check_data, open_data
from selftask.data.sampling.sampler import steps_per_epoch
from selftask.data.source import Source, channels_of
from selftask.errors import UserError
from selftask.plan.assumptions import Assumptions
from selftask.plan.fake_data import FakeData

_CLASSES = 1000  # default without data, as in ImageNet


def plan_data(config: Config, assumptions: Assumptions) -> FakeData:
    """Return fake data with the sizes of the real data, or with the assumed number of samples.

    Args:
        config: Config of the run.
        assumptions: Assumptions of the plan; the data is not opened if they contain ``samples``.

    Raises:
        UserError: If no number of samples is given and the data cannot be opened or does not fit
            the config, if the samples do not fill a batch, or if the size of a view is unknown.
    """
    if assumptions.samples is not None:
        steps_per_epoch(assumptions.samples, config.train.batch_size)  # raises if there is none
        side = assumptions.side or _missing_side(config, None)
        classes = assumptions.classes or _CLASSES
        needs = " and classes" if "labels" in required(config.method.name) else ""
        origin = f"as given by samples={needs}" if needs else "as given"
        channels = assumptions.channels or 3
        count = assumptions.samples
        return FakeData(config, count, count, channels, classes, side, origin)
    try:
        source = open_data(config.data).train
        sampler = check_data(config, source)
    except UserError as error:
        raise UserError(f"{error}; to plan without the data, give samples=1.28M") from error
    return data_like(config, source, sampler.num_samples, assumptions)


def data_like(
    config: Config, source: Source, num_samples: int, assumptions: Assumptions | None = None
) -> FakeData:
    """Return fake data with the sizes of ``source``, unless ``assumptions`` has others.

    Args:
        config: Config of the run.
        source: Training images.
        num_samples: Samples of an epoch.
        assumptions: Assumptions of the plan.
    """
    assumptions = assumptions or Assumptions()
    return FakeData(
        config,
        num_samples,
        len(source),
        assumptions.channels or channels_of(source),
        assumptions.classes or source.num_classes,
        assumptions.side or _missing_side(config, source),
        source.describe(),
    )


def _missing_side(config: Config, source: Source | None) -> int | None:
    """Return the longer side of the first image in pixels if views keep its size, else None.

    Raises:
        UserError: If views keep the size and there is no source.
    """
    keeping = [
        name
        for name, group in config.views.items()
        if group.count and output_side(group.transforms) is None
    ]
    if not keeping:
        return None
    if source is None:
        raise UserError(
            f"views.{keeping[0]}: its views keep the size of the images; give it, as side=224"
        )
    height, width = source[0][0].shape[:2]
    return max(int(height), int(width))
