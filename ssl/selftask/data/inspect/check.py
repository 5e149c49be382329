"""Check of a source: read every image once to find unreadable ones, duplicates and sizes."""

from __future__ import annotations

import hashlib
import io
import os
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from selftask.config.schema import DataConfig
from selftask.data.inspect.worker_pool import Lost, map_images
from selftask.data.loading.bad_files import BadLimit
from selftask.data.reading.files import now_reading, read_bytes
from selftask.data.reading.skipped_files import describe
from selftask.data.source import Source
from selftask.data.sources.files import FileSource
from selftask.errors import BadImage

_DIGEST = 16  # bytes of a content hash; probability of a collision among 10^9 images: 10^-20
_MAX_EXAMPLES = 3


class Facts(NamedTuple):
    """Facts about one image, as found by ``examine``."""

    width: int = 0  # pixels, of the upright image; 0: unreadable
    height: int = 0
    num_bytes: int = 0  # of the file, or of the pixels if the image has no file
    format: str = ""  # JPEG, PNG, ...; "" if the image has no file of its own
    mode: str = ""  # as stored: RGB, L, CMYK, ...
    digest: bytes = b""
    problem: str = ""  # why the image cannot be read
    is_dark: bool = False  # 16 bits, of which the upper two or more are 0 in all pixels


class Bad(NamedTuple):
    """Path of an unreadable image, and why it cannot be read."""

    path: str
    reason: str


@dataclass
class Report:
    """Result of ``check``; sizes are those of readable images, upright."""

    num_images: int
    num_workers: int
    seconds: float = 0.0
    num_bytes: int = 0
    formats: Counter[str] = field(default_factory=Counter)
    modes: Counter[str] = field(default_factory=Counter)
    num_dark: int = 0  # images with unused upper bits, which become nearly black
    sizes: Counter[tuple[int, int]] = field(default_factory=Counter)  # (width, height)
    smallest: tuple[str, int, int] | None = None  # path, width, height, by number of pixels
    largest: tuple[str, int, int] | None = None
    unreadable: list[Bad] = field(default_factory=list)  # in the order of the source
    duplicates: list[list[str]] = field(default_factory=list)  # paths with the same content
    copies: list[list[int]] = field(default_factory=list)  # ``duplicates`` as indices
    passed_over: dict[str, int] = field(default_factory=dict)  # skipped files, by extension

    @property
    def images_per_s(self) -> float:
        return self.num_images / max(self.seconds, 1e-9)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain values, for ``--json``."""
        return {
            "images": self.num_images,
            "unreadable": [bad._asdict() for bad in self.unreadable],
            "formats": dict(self.formats.most_common()),
            "modes": dict(self.modes.most_common()),
            "dark": self.num_dark,
            "sizes": {f"{w}x{h}": number for (w, h), number in self.sizes.most_common()},
            "smallest": self.smallest and _named_size(self.smallest),
            "largest": self.largest and _named_size(self.largest),
            "bytes": self.num_bytes,
            "duplicates": self.duplicates,
            "passed_over": self.passed_over,
            "seconds": round(self.seconds, 3),
            "images_per_s": round(self.images_per_s, 1),
            "workers": self.num_workers,
        }


def check(
    source: Source,
    num_workers: int,
    *,
    silence_s: float | None = None,
    progress: Callable[[int], None] = lambda done: None,
) -> Report:
    """Read every image of a source in several processes, as in training.

    Crashes and reads that hang do not end the check: the image is reported as unreadable. About 50
    bytes of memory are needed for each image.

    Args:
        source: The images.
        num_workers: Number of processes.
        silence_s: Time limit for one image, in seconds; None: ``patience_s()``.
        progress: Called with the number of images read so far.

    Raises:
        RunError: If processes repeatedly die before they read anything.
    """
    started = time.perf_counter()
    report = Report(len(source), num_workers, passed_over=source.passed_over())
    table = _Table(len(source))

    bad: list[tuple[int, str]] = []
    results = map_images(partial(examine, source), range(len(source)), num_workers, silence_s)
    for done, (index, facts) in enumerate(results, 1):
        if isinstance(facts, Lost):
            facts = Facts(problem=facts.reason)
        if facts.problem:
            bad.append((index, facts.problem))
        else:
            report.formats[facts.format] += 1
            report.modes[facts.mode] += 1
            report.num_dark += facts.is_dark
            report.sizes[facts.width, facts.height] += 1
        table.put(index, facts)
        progress(done)
    report.num_bytes = int(table.num_bytes.sum())
    report.unreadable = [Bad(source.path(index), why) for index, why in sorted(bad)]
    report.smallest, report.largest = table.extremes(source)
    report.copies = table.copies()
    report.duplicates = [[source.path(index) for index in group] for group in report.copies]
    report.seconds = time.perf_counter() - started
    return report


def examine(source: Source, index: int) -> Facts:
    """Inspect one image; errors are returned as ``Facts.problem``."""
    path = source.path(index)
    now_reading(path)
    num_bytes, kind, mode, digest = 0, "", "", b""
    try:
        if has_own_files(source):
            content = read_bytes(path)
            num_bytes, digest = len(content), _digest(content)
            kind, mode = _header(content, path)
        pixels = np.asarray(source[index][0])
    except Exception as error:  # noqa: BLE001 - any error of a user's data set ends a run too
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        problem = error.reason if isinstance(error, BadImage) else reason
        return Facts(num_bytes=num_bytes, digest=digest, problem=problem)
    if not digest:
        digest = _digest(np.array(pixels.shape).tobytes() + pixels.tobytes())
    channels = pixels.shape[2] if pixels.ndim == 3 else 1
    if channels not in (1, 3):  # Pillow's mode is that of the first bands
        mode = f"{channels} channels"
    return Facts(
        width=pixels.shape[1],
        height=pixels.shape[0],
        num_bytes=num_bytes or pixels.nbytes,
        format=kind,
        mode=mode or ("RGB" if channels == 3 else "1 channel"),
        digest=digest,
        is_dark=mode.startswith("I") and channels == 3 and int(pixels.max(initial=0)) < 64,
    )


def has_own_files(source: Source) -> bool:
    """Return whether ``source.path(i)`` is the file of image i.

    If a source wraps others, the innermost one decides.
    """
    while isinstance(inner := getattr(source, "source", None), Source):
        source = inner
    return isinstance(source, FileSource)


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_DIGEST).digest()


def _header(content: bytes, path: str) -> tuple[str, str]:
    """Return the stored format and mode; the extension and "" if Pillow cannot open the file."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(io.BytesIO(content)) as image:
                return image.format or "", image.mode
    except Exception:  # noqa: BLE001 - the source decides what is readable
        return os.path.splitext(path)[1].lstrip(".").upper(), ""


class _Table:
    """Per-image results in arrays, which take 32 bytes per image."""

    def __init__(self, num_images: int) -> None:
        self.num_bytes = np.zeros(num_images, dtype=np.int64)
        self.sides = np.zeros((num_images, 2), dtype=np.int32)  # width, height; 0: unreadable
        self.digests = np.zeros(num_images, dtype=f"S{_DIGEST}")  # empty: content not read

    def put(self, index: int, facts: Facts) -> None:
        self.num_bytes[index] = facts.num_bytes
        self.sides[index] = facts.width, facts.height
        self.digests[index] = facts.digest

    def extremes(
        self, source: Source
    ) -> tuple[tuple[str, int, int] | None, tuple[str, int, int] | None]:
        """Return path, width and height of the smallest and the largest readable image.

        Both are None if no image is readable.
        """
        pixels = self.sides.astype(np.int64).prod(axis=1)
        readable = np.flatnonzero(pixels)
        if not len(readable):
            return None, None
        first, last = (int(readable[f(pixels[readable])]) for f in (np.argmin, np.argmax))
        return self._named(source, first), self._named(source, last)

    def _named(self, source: Source, index: int) -> tuple[str, int, int]:
        width, height = self.sides[index].tolist()
        return source.path(index), width, height

    def copies(self) -> list[list[int]]:
        """Return groups of indices with equal content, in the order of the source."""
        _, content, counts = np.unique(self.digests, return_inverse=True, return_counts=True)
        groups: dict[int, list[int]] = {}
        for index in np.flatnonzero((counts[content] > 1) & (self.digests != b"")).tolist():
            groups.setdefault(int(content[index]), []).append(index)
        return list(groups.values())


def _named_size(image: tuple[str, int, int]) -> dict[str, Any]:
    return {"path": image[0], "width": image[1], "height": image[2]}


def lines_of(report: Report) -> list[str]:
    """Return the report as lines of text, one result per line."""
    seconds = f"{report.seconds:.1f} s, {report.images_per_s:,.0f} images/s"
    processes = f"{report.num_workers} process" + ("es" if report.num_workers > 1 else "")
    rows = [("read", f"{report.num_images:,} images in {seconds} ({processes})")]
    if any(report.formats):
        rows.append(("formats", _counts(report.formats)))
    rows.append(("modes", _counts(report.modes)))
    if report.num_dark:
        use = "use less than a quarter of their 16 bits and become dark 8-bit images"
        rows.append(("dark", f"{report.num_dark:,} {use} (data.name=bands data.value_range=...)"))
    if report.smallest and report.largest:
        sizes = Counter({f"{w}x{h}": number for (w, h), number in report.sizes.items()})
        rows.append(("sizes", f"{len(sizes)} different; {_counts(sizes)}"))
        ends = (("smallest", report.smallest), ("largest", report.largest))
        for name, (path, width, height) in ends if len(sizes) > 1 else ():
            rows.append((name, f"{width}x{height}  {path}"))
    mean = report.num_bytes / max(report.num_images, 1)
    rows.append(("bytes", f"{report.num_bytes / 1e6:,.1f} MB, {mean / 1e3:,.1f} kB an image"))
    if report.duplicates:
        num_copies = sum(len(group) - 1 for group in report.duplicates)
        groups = f"{num_copies} copies of {len(report.duplicates)} images"
        rows.append(("duplicates", f"{groups}, such as {_examples(report.duplicates)}"))
    else:
        rows.append(("duplicates", "none"))
    if report.passed_over:
        rows.append(("others", describe(report.passed_over)))
    lines = [f"{name:<11}{text}" for name, text in rows]
    if report.unreadable:
        lines.append(f"{'unreadable':<11}{len(report.unreadable)}")
        lines += [f"  {path}: {reason}" for path, reason in report.unreadable]
    return lines


def verdict(report: Report, data: DataConfig) -> str:
    """Return the last line: whether all images are readable, and whether a run would continue.

    Args:
        report: Result of ``check``.
        data: Its ``on_error`` and ``max_unreadable`` say when a run stops.
    """
    bad, all_ = len(report.unreadable), report.num_images
    if not bad:
        return f"CHECK ok: all {all_:,} images can be read"
    limit = BadLimit(all_, data.max_unreadable)
    if data.on_error == "fail":
        outcome = "a run would stop (data.on_error=fail)"
    elif limit.allows(bad):
        outcome = f"no more than {limit}: a run replaces them"
    else:
        outcome = f"more than {limit}: a run would stop"
    return (
        f"CHECK found problems: {bad:,} of {all_:,} images ({bad / all_:.2%}) cannot be read, "
        f"{outcome}"
    )


def _counts(counter: Counter[str], show: int = 6) -> str:
    parts = [f"{name or 'other'} {number:,}" for name, number in counter.most_common(show)]
    return ", ".join(parts) + (", ..." if len(counter) > show else "")


def _examples(groups: list[list[str]]) -> str:
    shown = [" = ".join(group[:_MAX_EXAMPLES]) for group in groups[:_MAX_EXAMPLES]]
    return "; ".join(shown)
