"""Checkpoints in the background: the state is copied immediately and written during training.

A thread writes the file. torch.save, xxhash, write and fsync release the GIL while they work on
bytes. A separate process would slow down training as much (docs/benchmarks.md), and would need
memory and start-up time.
"""

from __future__ import annotations

import errno
import shutil
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from selftask.checkpoint import rotation, store
from selftask.checkpoint.kept import Kept
from selftask.checkpoint.nested import Keys, check_plain, map_tensors
from selftask.distributed.accelerator import pins_memory, record_event
from selftask.distributed.heartbeat import activity
from selftask.errors import RunError
from selftask.logs import get_logger

log = get_logger(__name__)

LONG_WAIT_S = 0.1  # longer waits are logged, once


class CheckpointWriter:
    """Writer of the checkpoints of one run to ``folder``, one at a time.

    A write that fails in the background is logged immediately, and raised by the next ``save`` or
    ``wait``. The thread is not a daemon, so Python exits only after it has ended.

    Args:
        folder: Folder of the checkpoints.
        keep: Number of newest checkpoints to keep.
        background: If True, write in a thread; if False, before ``save`` returns.
        durable: Files to which a state refers (``metrics.jsonl``), synced before its file gets its
            final name.
    """

    def __init__(
        self, folder: Path, *, keep: int, background: bool = True, durable: Sequence[Path] = ()
    ) -> None:
        self.folder, self.keep, self.durable = folder, keep, durable
        self.background = background
        self.kept = self._kept = Kept()  # for the next checkpoint, and for the one being written
        self._buffers = HostBuffers()
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._has_warned = False

    def keep_now(self, kept: Kept) -> None:
        """Replace the list of kept checkpoints, and remove old ones that it does not contain.

        Waits for the current write; raises RunError if it failed.
        """
        self.wait()
        self.kept = kept
        saved = rotation.checkpoints(self.folder)
        if saved:
            kept.rotate(saved[0], self.keep)

    def save(self, state: dict[str, Any], step: int, *, last: bool = False) -> None:
        """Copy ``state`` and return while a thread writes it.

        Args:
            state: Tensors and plain Python objects in nested containers.
            step: Step after which the state is saved.
            last: Write in this thread; the file is on disk when the call returns.

        Raises:
            TypeError: If the state contains other objects.
            RunError: If the previous write failed, or this one if no thread writes it.
        """
        check_plain(state)
        self._wait_for_previous()
        self._kept = self.kept
        if last or not self.background:  # nothing changes the state meanwhile, so no copy is needed
            self._save_file(on_host(state), step)
            return
        copied, copying = self._buffers.copy(state)
        self._thread = threading.Thread(
            target=self._run, args=(copied, copying, step), name="checkpoint", daemon=False
        )
        self._thread.start()

    def wait(self) -> None:
        """Wait until the checkpoint is on disk; raise RunError, once, if that failed."""
        if self._thread is not None:
            with activity("waiting for the checkpoint to be written"):
                self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    @property
    def busy(self) -> bool:
        """True while a file is being written."""
        return self._thread is not None and self._thread.is_alive()

    def finalize(self) -> None:
        """Wait for the current write after another error; log a failure instead of raising it."""
        try:
            self.wait()
        except Exception:  # noqa: BLE001 - already logged
            log.warning("the newest checkpoint is missing, too")

    def _wait_for_previous(self) -> None:
        start = time.perf_counter()
        self.wait()
        waited = time.perf_counter() - start
        if waited > LONG_WAIT_S and not self._has_warned:
            self._has_warned = True
            log.warning(
                "waited %.1f s until the checkpoint before was written: "
                "train.checkpoint_every is shorter than that takes here (said once)",
                waited,
            )

    def _run(self, state: dict[str, Any], copying: list[Any], step: int) -> None:
        """Run in the thread; log an error and keep it for ``wait``."""
        try:
            for event in copying:
                event.synchronize()
            self._save_file(state, step)
        except BaseException as error:  # noqa: BLE001 - raised again in the training loop
            self._failure = error
            log.error("%s", error)

    def _save_file(self, state: dict[str, Any], step: int) -> None:
        try:
            self._check_space(state)
            self._write(state, step)
        except OSError as error:
            raise self._explain(error, step) from error

    def _write(self, state: dict[str, Any], step: int) -> None:
        kept, durable = self._kept, self.durable
        store.save(state, self.folder, step, keep=self.keep, durable=durable, kept=kept)

    def _check_space(self, state: dict[str, Any]) -> None:
        """Raise OSError before writing a file that does not fit on the disk."""
        tensors = (leaf for leaf in tree_leaves(state) if isinstance(leaf, Tensor))
        needed = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        self.folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(self.folder).free
        if needed > free:
            text = f"{needed / 1e6:.1f} MB are needed and {free / 1e6:.1f} MB free"
            raise OSError(errno.ENOSPC, text)

    def _explain(self, error: OSError, step: int) -> RunError:
        before = rotation.checkpoints(self.folder)
        start = f"from {before[0].name}" if before else "at the beginning"
        return RunError(
            f"the checkpoint of step {step} could not be written to {self.folder} "
            f"({error.strerror or error}); make room or access there and start the same command "
            f"again: it continues {start}"
        )


class HostBuffers:
    """Host memory for copies of states, reused by the next save; pinned for GPU tensors.

    Page faults in new memory cost more than the copy itself; with reuse, only the first save has
    them.
    """

    def __init__(self) -> None:
        self._buffers: dict[Keys, tuple[Any, Tensor]] = {}  # place in the state -> (kind, buffer)

    def copy(self, state: dict[str, Any]) -> tuple[dict[str, Any], list[Any]]:
        """Copy a state into buffers that the next call overwrites.

        Returns:
            The copy, and events to wait for before reading copies of GPU tensors. Copies are queued
            on the current stream, so training may continue and change the state.
        """
        before, self._buffers = self._buffers, {}
        copies: dict[Any, Tensor] = {}  # tied tensors are copied and stored once
        devices: set[torch.device] = set()

        def copied(tensor: Tensor, path: Keys) -> Tensor:
            if tensor.layout != torch.strided:
                return tensor.detach().to("cpu", copy=True)
            pinned = pins_memory(tensor.device)
            kind = (tensor.dtype, tensor.shape, tensor.stride(), pinned)
            same = (tensor.data_ptr(), kind)
            buffer = copies.get(same)
            if buffer is None:
                fits, buffer = before.get(path, (None, tensor))
                if fits != kind:
                    buffer = torch.empty_like(tensor, device="cpu", pin_memory=pinned)
                if pinned:
                    devices.add(tensor.device)
                buffer.copy_(tensor, non_blocking=pinned)  # the other copies are not pinned
                self._buffers[path], copies[same] = (kind, buffer), buffer
            return buffer

        with torch.no_grad():
            result = map_tensors(copied, state)
        return result, [record_event(device) for device in devices]


def on_host(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state with every tensor on the CPU, so that it loads without a GPU."""
    return map_tensors(lambda tensor, path: tensor.detach().cpu(), state)
