"""Opening the sources of a ``data:`` section."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from types import MappingProxyType
from typing import NamedTuple

from selftask.config.checks.requirements import of_extras, of_labels, required
from selftask.config.schema import Component, Config, DataConfig
from selftask.config.trust import refuse_addresses
from selftask.data.labels import align_classes, count_unlabeled, split_problems
from selftask.data.open_source import open_source
from selftask.data.reading.files import Policy, set_policy
from selftask.data.relabeled import relabeled
from selftask.data.sampling.sampler import Sampler, build_sampler, steps_per_epoch
from selftask.data.source import Source, channels_of, extras_of
from selftask.data.staging.staged_source import copied
from selftask.data.subset import subset_of
from selftask.data.transforms.channels import list_problems
from selftask.errors import AddressError, ConfigError, UserError


class Sources(NamedTuple):
    """The opened sources of a ``data:`` section."""

    train: Source
    val: Source | None
    val_sets: Mapping[str, Source] = MappingProxyType({})  # others, by name


def open_data(data: DataConfig) -> Sources:
    """Open the training images and the validation sets, if there are any.

    Also sets the process-wide settings of reads: timeout, retries and limits of size. Forked
    processes inherit them.

    Raises:
        UserError: If a source cannot be opened, or if a validation set has another number of
            channels than the training images, or a class that they lack.
    """
    limits = data.max_bytes, data.max_scans, data.max_pixels
    set_policy(Policy(data.read_timeout_s, data.read_retries, *limits))
    train = subset_of(_open_named(data.source, "data"), data.subset)
    train = relabeled(train, data.relabel)
    val = None if data.val is None else open_val(data.val, train, "data.val")
    sets = {
        name: open_val(component, train, f"data.val_sets.{name}")
        for name, component in data.val_sets.items()
    }
    return Sources(train, val, sets)


def open_received(config: Config, *, trust: bool) -> Sources:
    """Open the data of a run that may come from somebody else; see ``open_data``.

    Args:
        config: Config of the run.
        trust: Whether to open addresses (``s3://...``) that are not from the command line.

    Raises:
        UserError: If the data have such an address, and ``trust`` is False. Also as in
            ``open_data``.
    """
    if not trust:
        refuse_addresses(config, "data")
    return open_data(config.data)


def _open_named(component: Component, key: str) -> Source:
    """Open the source of config key ``key``, which its errors then name instead of ``data``."""
    try:
        return open_source(component)
    except AddressError as error:
        raise AddressError(f"{key}: {error}") from error
    except UserError as error:
        if not str(error).startswith(("data:", "data.")):
            raise
        raise UserError(f"{key}{str(error).removeprefix('data')}") from error


def open_val(component: Component, train: Source, key: str) -> Source:
    """Open a validation set and number its classes like those of the training images.

    Args:
        component: The validation set.
        train: The training images.
        key: Config key of the set, for messages.

    Raises:
        UserError: If it cannot be opened, or has another number of channels than the training
            images, or a class that they lack.
    """
    source = _open_named(component, key)
    if channels_of(source) != channels_of(train):
        raise UserError(
            f"{key}: its images have {channels_of(source)} channels, those of data have "
            f"{channels_of(train)}"
        )
    align_classes(source, train, key)
    return source


def copy_data(sources: Sources, stage_to: str | None) -> Sources:
    """Copy the data if ``stage_to`` is set, and return sources that read from the copies.

    This is separate from opening, since a job submission opens the sources only to count images.

    Raises:
        UserError: If a source cannot be copied, or there is too little space.
    """
    if stage_to is None:
        return sources
    train, val, sets = sources
    return Sources(
        copied(train, stage_to),
        None if val is None else copied(val, stage_to),
        {name: copied(source, stage_to) for name, source in sets.items()},
    )


def check_data(config: Config, source: Source) -> Sampler:
    """Check the training images against the config, and return the sampler of the run.

    Raises:
        ConfigError: If the transforms do not support the images' number of channels, if the
            method needs labels or captions that are missing, if the classes it needs are parts of a
            data set (train, test), if views are made from images that the data does not have, or if
            an epoch has fewer batches than one optimizer step.
        UserError: If the sampler does not suit the images.
    """
    channels = channels_of(source)
    checks: list[Iterable[str]] = [
        list_problems(ts, ".".join(key), channels) for key, ts in config.pipelines.items()
    ]
    if "labels" in required(config.method.name):  # counting may read an image
        checks.append(of_labels(config, count_unlabeled(source), len(source)))
        checks.append(split_problems(source.class_names()))
    checks.append(of_extras(config, extras_of(source)))
    if problems := list(chain.from_iterable(checks)):
        raise ConfigError(problems)
    batch_size, accumulate = config.train.batch_size, config.train.accumulate
    sampler = build_sampler(config, source)
    num_samples = sampler.num_samples
    steps = steps_per_epoch(num_samples, batch_size)
    if accumulate > steps:
        problem = (
            f"train.accumulate: {accumulate} batches are more than the {steps} of an epoch "
            f"({num_samples} images in batches of {batch_size}); at most {steps} is possible"
        )
        raise ConfigError([problem])
    return sampler


def check_val(config: Config, source: Source, key: str) -> None:
    """Raise ConfigError if the method needs labels and some images of a labeled set have none.

    Args:
        config: Config of the run.
        source: The validation set.
        key: Its config key.
    """
    if source.labels is not None:
        checks = of_labels(config, count_unlabeled(source), len(source), key)
        if problems := list(checks):
            raise ConfigError(problems)
