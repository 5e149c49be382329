"""The ``data`` section."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from selftask.config.fields import setting
from selftask.config.schema.component import Component, Section


@dataclass(frozen=True, kw_only=True)
class DataConfig(Section):
    """The data set and how it is read."""

    source: Component = setting(of="sources", flat=True)
    """Source of the images: ``data.name`` and the source's own keys."""
    val: Component | None = setting(None, of="sources", shared=["subset"])
    """Images for evaluations and test phases, in the form of ``data``; most evaluations need their
    labels. null: none.
    """
    val_sets: dict[str, Component] = setting(
        {}, of="sources", shared=["subset"], also=["val_datasets", "test_sets"]
    )
    """More sets like ``val`` by name; their metrics are ``NAME/knn_top1`` and ``NAME/val_loss``."""
    sampler: Component = setting(Component(name="shuffled"), of="samplers")
    """Order of the images in an epoch."""
    tokenizer: Component = setting(Component(name="bytes"), of="tokenizers")
    """Tokenizer of captions."""
    relabel: Literal["no", "index", "zero", "none"] = "no"
    """Labels of the training images: ``no`` keeps the source's labels, ``index`` uses the index of
    the image, ``zero`` uses 0 for all, ``none`` removes them.
    """
    augment_on: Literal["cpu", "device"] = "cpu"
    """Where views are made: in the loader's processes on the CPU, or on the device."""
    max_side: int | None = setting(None, min=1)
    """Longer side, in pixels, to which larger images are scaled down before they are cached or sent
    to the device; small crops of them have less detail. null: no limit.
    """
    cache: Literal["none", "ram", "disk", "device"] = "none"
    """Cache of decoded images: ``ram``: in the memory of each rank; ``disk``: in a file below
    ``$SELFTASK_CACHE``, which later runs reuse; ``device``: on the device (small data sets with
    ``augment_on=device``).
    """
    num_workers: int = setting(0, min=0, also=["workers"], auto=True)
    """Loader processes per rank; auto: the CPU cores divided by the ranks of the machine."""
    on_error: Literal["skip", "fail"] = "skip"
    """What to do with an unreadable image: ``skip`` replaces it by another training image, or
    leaves it out of an evaluation; ``fail`` ends the run.
    """
    max_unreadable: float | None = setting(None, min=0, max=1)
    """Largest share of unreadable images with which the run continues; null: 0.1 %, but at least 3
    images.
    """
    max_pixels: int = setting(100_000_000, min=1)
    """Largest number of pixels of an image; larger ones are refused as decompression bombs."""
    max_bytes: int = setting(1 << 30, min=1)
    """Largest size of an encoded image, in bytes; larger ones are not read."""
    max_scans: int = setting(100, min=1)
    """Largest number of scans of a JPEG; ones with more are refused, since each scan takes a pass
    over the image. Most files have 1, progressive ones about 10.
    """
    subset: float | int | dict[str, Any] | None = None
    """Part of the training images to use: a share such as 0.1, a number of images such as 500, or
    a section such as ``{count: 10, per_class: true}`` with ``fraction`` or ``count``,
    ``per_class``, ``seed``, ``part`` and ``of``. null: all of them.
    """
    stage_to: str | None = setting(None, path=True)
    """Folder to copy the files to before training, or ``ram`` for shared memory; null: no copy."""
    read_timeout_s: float = setting(60.0, min=0)
    """Longest time to wait for data of a file, in seconds; 0: no limit."""
    read_retries: int = setting(2, min=0, max=10)
    """Times that a read is repeated after a time-out or a temporary error."""
