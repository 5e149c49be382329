"""Record of unreadable images, and their limit."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from selftask.config.schema import DataConfig
from selftask.data.source import Source
from selftask.errors import BadImage, UserError

# Share and number of images that may be unreadable if max_unreadable is null.
DEFAULT_MAX_UNREADABLE, MIN_ALLOWED_UNREADABLE = 0.001, 3


@dataclass(frozen=True)
class BadLimit:
    """Limit of unreadable images among ``num_images``, set by ``data.max_unreadable``."""

    num_images: int
    max_unreadable: float | None  # share of the images; None: 0.1 %, but at least 3 images

    def allows(self, number: int) -> bool:
        """Return whether a run may continue with this many unreadable images."""
        if self.max_unreadable is None:
            return number <= max(MIN_ALLOWED_UNREADABLE, DEFAULT_MAX_UNREADABLE * self.num_images)
        return number <= self.max_unreadable * self.num_images

    def __str__(self) -> str:
        """Return a phrase for errors, such as ``data.max_unreadable=0.01 (1.00%) allows``."""
        if self.max_unreadable is None:
            default = f"{DEFAULT_MAX_UNREADABLE:.1%}, at least {MIN_ALLOWED_UNREADABLE} images"
            return f"the default of data.max_unreadable ({default}) allows"
        return f"data.max_unreadable={self.max_unreadable:g} ({self.max_unreadable:.2%}) allows"


class BadFiles:
    """Record of unreadable images in a file; raises UserError if there are too many.

    Each rank has one, in its main process. The file is read when a run resumes, and before new
    lines are written, since other ranks write to it too. Paths in the file are not written again.

    ``counted`` contains the unreadable images found by this rank and, as of the last ``merge``, by
    other ranks. At a given step it is the same in a resumed run, whereas the file may already list
    later images.

    Args:
        path: The file; None: kept in memory only.
        num_images: Number of images of the source.
        on_error: ``data.on_error``: ``fail`` allows no unreadable image.
        max_unreadable: ``data.max_unreadable``, a share of the images.
        key: Config key of images that are skipped if they are unreadable; empty for training
            images, which are replaced.
    """

    def __init__(
        self,
        path: Path | None,
        num_images: int,
        *,
        on_error: str = "skip",
        max_unreadable: float | None = None,
        key: str = "",
    ) -> None:
        self.path = path
        self.key = key
        self.num_images = num_images
        self.on_error = on_error
        self.limit = BadLimit(num_images, max_unreadable)
        self.reasons: dict[str, str] = {}  # path of the image -> why
        self.storage_failures = 0  # images, perhaps intact, that the file system did not give
        self._read()
        self.counted = dict(self.reasons)
        self.unshared: dict[str, str] = {}  # part of ``counted`` that other ranks do not know

    @classmethod
    def of(cls, source: Source, data: DataConfig, path: Path | None, key: str = "") -> BadFiles:
        """Return the record of a source, with ``data.on_error`` and ``data.max_unreadable``.

        Args:
            source: Source of the images.
            data: Config of the data.
            path: File of the record; None: kept in memory only.
            key: As in ``BadFiles``.
        """
        limit = data.max_unreadable
        return cls(path, len(source), on_error=data.on_error, max_unreadable=limit, key=key)

    def __len__(self) -> int:
        return len(self.reasons)

    def refuse(self, bad: Iterable[BadImage]) -> None:
        """Raise UserError before the first step if too many images are known to be unreadable.

        With ``data.on_error=fail``, one is too many. If there are few enough, nothing is recorded;
        the images are recorded when they are read. Images whose storage failed do not count, since
        the next read may succeed.
        """
        bad = [error for error in bad if not error.storage_failed]
        if bad and (self.on_error == "fail" or not self.limit.allows(len(bad))):
            entries = self._record(bad)
            self._judge(entries, entries)  # the list may hold images that were fixed since

    def add(self, bad: Iterable[BadImage]) -> None:
        """Record unreadable images.

        Raises:
            UserError: If new ones exceed ``data.max_unreadable``. If ``data.on_error`` is ``fail``,
                for any image, even one that an earlier attempt has listed.
        """
        number_before, bad = len(self), list(bad)
        self.storage_failures += sum(error.storage_failed for error in bad)
        entries = self._record(bad)
        new = {path: why for path, why in entries.items() if path not in self.counted}
        self.counted |= new
        self.unshared |= new
        if len(self) > number_before or (entries and self.on_error == "fail"):
            self._judge(entries, self.reasons)

    def merge(self, others: dict[str, str]) -> None:
        """Count the unreadable images of other ranks, path -> reason.

        Raises:
            UserError: If there are new ones, and ``data.on_error`` is ``fail`` or the images of all
                ranks exceed ``data.max_unreadable``.
        """
        new = {path: why for path, why in others.items() if path not in self.counted}
        self.counted |= new
        self.reasons = new | self.reasons
        self.unshared.clear()
        if new:
            self._judge(new, self.reasons)

    def restore(self, counted: dict[str, str], *, write: bool) -> None:
        """Restore the count of a checkpoint.

        Args:
            counted: ``counted`` at the time of the checkpoint.
            write: Whether to rewrite the file; without images, it is removed.
        """
        self.counted, self.reasons = dict(counted), dict(counted)
        self.unshared.clear()
        if write and self.path is not None:
            self.path.unlink(missing_ok=True)
            self._write(self.reasons)

    def summary(self) -> str:
        """Return a sentence such as ``3 of 200 images could not be read``, or an empty string."""
        number = len(self.counted)
        if not number:
            return ""
        was = "was" if number == 1 else "were"
        which, then = (f" of {self.key}", "left out") if self.key else ("", "replaced")
        listed = f": {self.path.name} lists {'it' if number == 1 else 'them'}" if self.path else ""
        return (
            f"{number:,} of {self.num_images:,} images{which} could not be read and "
            f"{was} {then}{listed}"
        )

    def _record(self, bad: Iterable[BadImage]) -> dict[str, str]:
        """Append new entries to the list file and return all entries, path -> reason."""
        entries = {_one_line(error.path): error.reason for error in bad}
        new = {path: why for path, why in entries.items() if path not in self.reasons}
        if new:
            self._read()
            self._write({path: why for path, why in new.items() if path not in self.reasons})
            self.reasons |= new
        return entries

    def _judge(self, entries: dict[str, str], counted: dict[str, str]) -> None:
        if self.on_error == "fail":
            path, why = next(iter(entries.items()))
            raise UserError(
                f"cannot read {path}: {why}\n(data.on_error=skip replaces unreadable images)"
            )
        if not self.limit.allows(len(counted)):
            raise UserError(self._too_many(counted))

    def _too_many(self, counted: dict[str, str]) -> str:
        share = len(counted) / self.num_images
        first = [f"{path}: {why}" for path, why in list(counted.items())[:3]]
        where = f"; all of them: {self.path}" if self.path else ""
        return (
            f"{len(counted)} of {self.num_images} images ({share:.2%}) cannot be read, more than "
            f"{self.limit}; fix or remove them, or raise data.max_unreadable: "
            f"{', '.join(first)}{where}"
        )

    def _read(self) -> None:
        if self.path is None or not self.path.exists():
            return
        for line in self.path.read_text(encoding="utf-8", errors="surrogateescape").split("\n"):
            image, tab, why = line.partition("\t")
            if tab:
                self.reasons.setdefault(image, why)

    def _write(self, new: dict[str, str]) -> None:
        """Append in one write, so that lines of several processes do not mix."""
        if self.path is None or not new:
            return
        text = "".join(f"{path}\t{why}\n" for path, why in new.items())
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "ab", buffering=0) as file:
            file.write(os.fsencode(text))


def _one_line(path: str) -> str:
    return path.replace("\t", "\\t").replace("\n", "\\n")
