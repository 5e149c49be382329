"""``data.cache=ram`` and ``disk``: workers decode every image once, before the first step."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from typing import IO, Any

import torch

from selftask.config.schema import DataConfig
from selftask.data.cache.decoded import DamagedStore, Decoded, Store, store_name
from selftask.data.cache.on_device import CacheDataset, free_bytes
from selftask.data.device.batches import DeviceBatch
from selftask.data.loading.bad_files import BadFiles
from selftask.data.loading.loader import EvalBatches
from selftask.data.loading.shared_memory import memory_file
from selftask.data.source import Source, channels_of
from selftask.errors import UserError, explained
from selftask.files.cache_dir import cache_folder, locked
from selftask.files.replace import replacing
from selftask.logs import get_logger
from selftask.logs.stages import staged

log = get_logger(__name__)

_SHARE = 0.9  # fraction of the free space that images may take
_READ_AT_ONCE = 64  # batch size for reading


def decode_once(source: Source, data: DataConfig, bad_files: BadFiles) -> Decoded:
    """Decode all images of a source, and return a source that reads them.

    With ``data.cache=ram`` each process of a run keeps its own images and shares them with its
    workers. With ``disk`` all processes of a machine share one file below ``$SELFTASK_CACHE``,
    which later runs reuse. It is not reused if the file system failed to provide some images.

    Args:
        source: Source of the images.
        data: Config of the data.
        bad_files: Record to which unreadable images are added.

    Raises:
        UserError: If there are too many bad files or too little space, or a file cannot be written.
    """
    fill = _Filling(source, data, bad_files)
    if data.cache == "ram":
        with memory_file("selftask-decoded") as file:
            return Decoded(source, fill.into(file, lambda: free_bytes(torch.device("cpu"))))
    folder = cache_folder() / "decoded"
    pixels = folder / f"{store_name(source, data.max_side)}.pixels"
    table = pixels.with_suffix(".table")
    with locked(pixels.with_suffix(".lock")):
        if table.exists() and pixels.exists():
            log.info("data.cache=disk: decoded images of an earlier run, %s", pixels)
            try:
                return Decoded(source, Store.open(pixels, table, channels_of(source)))
            except DamagedStore as error:
                log.warning("data.cache=disk: %s; it is made again", error)
        with replacing(pixels) as temporary, open(temporary, "w+b") as file:
            store = fill.into(file, lambda: shutil.disk_usage(folder).free)
            os.fsync(file.fileno())
        if bad_files.storage_failures:
            log.warning(
                "data.cache=disk: the file system did not give %d images; this run keeps the "
                "others, and the next one reads all images again",
                bad_files.storage_failures,
            )
            return Decoded(source, store)
        store.save_table(table)
        return Decoded(source, Store.open(pixels, table, channels_of(source)))


class _Filling:
    """Writer of all decoded images of a source into one file."""

    def __init__(self, source: Source, data: DataConfig, bad_files: BadFiles) -> None:
        self.source = source
        self.data = data
        self.bad_files = bad_files

    def into(self, file: IO[bytes], free: Callable[[], int]) -> Store:
        """Decode all images into an empty file and map it; ``free`` returns the free bytes.

        Raises:
            UserError: If there is not enough space, the file cannot be written, or there are too
                many bad files.
        """
        started = time.perf_counter()
        store = Store(len(self.source), channels_of(self.source))
        images: Any = EvalBatches(
            CacheDataset(self.source, self.data.max_side),
            batch_size=_READ_AT_ONCE,
            num_workers=self.data.num_workers,
            bad_files=self.bad_files,
        )
        missing = set(range(len(self.source)))
        with explained(f"data.cache={self.data.cache}", OSError):
            for batch in staged("cache", images.read(), len(images)):
                self._put(file, store, batch)
                missing -= set(batch.index.tolist())
                if store.length and len(self.source) - len(missing) <= _READ_AT_ONCE:
                    self._check_space(store, free())
        for index in missing:
            path = self.source.path(index)
            store.reasons[index] = self.bad_files.reasons.get(path, "could not be read when cached")
        store.map(file)
        took = time.perf_counter() - started
        kept, size = len(self.source) - len(missing), store.length / 2**20
        log.info(
            "data.cache=%s: %d images, %.0f MiB, read in %.0f s", self.data.cache, kept, size, took
        )
        return store

    def _put(self, file: IO[bytes], store: Store, batch: DeviceBatch) -> None:
        assert batch.sizes is not None
        rows = zip(batch.index, batch.views[0].numpy(), batch.sizes, batch.labels, strict=True)
        for index, canvas, (height, width), label in rows:
            store.put(file, int(index), canvas[:height, :width], int(label))

    def _check_space(self, store: Store, free: int) -> None:
        """Raise UserError if the images will not fit, as estimated from the first ones."""
        expected = store.length / max(1, int((store.sizes[:, 0] > 0).sum())) * len(self.source)
        if expected > _SHARE * (free + store.length):
            raise UserError(
                f"data.cache={self.data.cache}: {len(self.source)} decoded images would take about "
                f"{expected / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free; a smaller "
                "data.max_side makes them smaller"
            )
