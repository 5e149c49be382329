"""The ``data`` section."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from selftask.config.fields import setting
from selftask.config.schema.component import Component, entries, own


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Data set, and how it is read."""

    source: Component = setting(of="sources", flat=True)  # yaml: data.name and its own fields
    # labelled images for evaluations; none: no k-NN while training
    val: Component | None = setting(None, of="sources", shared=["subset"])
    val_sets: dict[str, Component] = setting({}, of="sources", also=["val_datasets", "test_sets"])
    # further ones by name: rows get NAME/knn_top1, NAME/val_loss
    sampler: Component = setting(Component(name="shuffled"), of="samplers")  # of an epoch
    tokenizer: Component = setting(Component(name="bytes"), of="tokenizers")  # of texts
    # those of the source; the number of the image; 0 for all; or none
    relabel: Literal["no", "index", "zero", "none"] = "no"
    augment_on: Literal["cpu", "device"] = "cpu"  # who makes the views: workers, or the device
    # pixels: images for augment_on=device, and those in a cache, have a longer side of at most
    # this; crops then see no finer detail
    max_side: int | None = setting(None, min=1)
    cache: Literal["none", "ram", "disk", "device"] = "none"  # of decoded images: in each process's
    # memory, in a file below $SELFTASK_CACHE, or (small data sets, augment_on=device) on the device
    num_workers: int = setting(0, min=0, also=["workers"])  # processes; yaml: `auto` is possible
    on_error: Literal["skip", "fail"] = "skip"  # what an unreadable file does
    # share of images that may be unreadable; null: 0.1 %, but at least 3 images
    max_unreadable: float | None = setting(None, min=0, max=1)
    max_pixels: int = setting(100_000_000, min=1)  # larger images are refused: they are bombs
    max_bytes: int = setting(1 << 30, min=1)  # of an encoded image; larger ones are not read
    max_scans: int = setting(100, min=1)  # of a JPEG, each of which takes a pass over the image;
    # most have 1, progressive ones about 10
    subset: float | int | dict[str, Any] | None = None  # of the training images: see docs/data.md
    # copy the files to this folder, or to `ram`, before training
    stage_to: str | None = setting(None, path=True)
    read_timeout_s: float = setting(60.0, min=0)  # of a file, when its disk is silent; 0: none
    read_retries: int = setting(2, min=0, max=10)  # after a time-out or an error that passes

    def to_dict(self) -> dict[str, Any]:
        """Return the section as in the yaml, the source's fields beside ours."""
        named = {
            "val": self.val.to_dict() if self.val else None,
            "val_sets": entries(self.val_sets),
            "sampler": self.sampler.to_dict(),
            "tokenizer": self.tokenizer.to_dict(),
        }
        return {**self.source.to_dict(), **named, **own(self, without=("source", *named))}
