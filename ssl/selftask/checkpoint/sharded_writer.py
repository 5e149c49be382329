"""Writer of sharded checkpoints: every rank writes its own shards."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, empty_like
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as save_together
from torch.distributed.tensor import DTensor

from selftask.checkpoint import manifest, rotation
from selftask.checkpoint.rotation import MANIFEST
from selftask.checkpoint.sharded import REST, T, read_back, split
from selftask.checkpoint.writer import CheckpointWriter
from selftask.distributed.collectives import is_primary, new_group, rank, world_size
from selftask.errors import RunError
from selftask.files.replace import write_durably


class ShardedWriter(CheckpointWriter):
    """CheckpointWriter for sharded states; every rank calls it and writes in its own thread.

    The threads communicate over a separate process group. An error on one rank is raised on all.
    The first checkpoint is read back before it gets its final name.
    """

    _group: dist.ProcessGroup | None = None
    _is_readable = False  # until the first checkpoint has been read back

    def save(self, state: dict[str, Any], step: int, *, last: bool = False) -> None:
        """Save as CheckpointWriter does; write a single file if nothing is sharded."""
        self._wait_for_previous()
        rest, shards = split(state)
        if not shards:
            super().save(state, step, last=last)
            return
        self._group = self._group or new_group(backend="gloo")
        self._specs = {name: shard._spec for name, shard in shards.items()}
        mine = {name: shard.to_local().detach() for name, shard in shards.items()}
        super().save({"rest": rest if is_primary() else {}, "shards": mine}, step, last=last)

    def _write(self, state: dict[str, Any], step: int) -> None:
        if state.keys() != {"rest", "shards"}:
            super()._write(state, step)
            return
        aside = self.folder / f".step_{step:09d}.tmp"
        try:
            self._on_first(lambda: self._begin(aside))
            self._write_shards(state["shards"], aside)
            entries = self._on_all(lambda: _entries(aside.glob(f"__{rank()}_*")))
            files = {name: entry for part in entries for name, entry in part.items()}
            self._on_first(lambda: self._seal(state["rest"], aside, step, files))
            if not self._is_readable:
                self._on_all(lambda: read_back(aside, self._sharded(state["shards"], empty_like)))
                self._is_readable = True
            self._on_first(lambda: self._publish(aside, step))
        except BaseException:
            if is_primary():
                rotation.discard(aside)
            raise

    def _check_space(self, state: dict[str, Any]) -> None:
        if state.keys() != {"rest", "shards"}:
            super()._check_space(state)
            return
        self._on_all(partial(super()._check_space, state))

    def _begin(self, aside: Path) -> None:
        rotation.clear(self.folder)
        aside.mkdir()

    def _sharded(
        self, local: dict[str, Tensor], change: Callable[[Tensor], Tensor] = lambda tensor: tensor
    ) -> dict[str, Tensor]:
        """Return sharded tensors by name, after applying ``change`` to their local parts."""
        return {
            name: DTensor(change(tensor), self._specs[name], requires_grad=False)
            for name, tensor in local.items()
        }

    def _write_shards(self, local: dict[str, Tensor], aside: Path) -> None:
        shards = self._sharded(local)
        planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        try:
            save_together(
                shards,
                storage_writer=FileSystemWriter(aside, sync_files=True),
                planner=planner,
                process_group=self._group,
            )
        except CheckpointException as failure:  # the same on every rank; not an Exception
            where, (error, _) = min(failure.failures.items(), key=lambda item: item[0])
            raise _of_rank(where, error) from failure

    def _seal(
        self, rest: dict[str, Any], aside: Path, step: int, files: dict[str, dict[str, Any]]
    ) -> None:
        """Write ``rest.pt`` and the manifest, on the first rank once all shards are on disk."""
        files[REST] = manifest.write_checked(rest, aside / REST)
        files |= _entries([aside / ".metadata"])
        for file in self.durable:
            manifest.sync(file)
        write_durably(aside / MANIFEST, json.dumps({"step": step, "files": files}))
        manifest.sync(aside)

    def _publish(self, aside: Path, step: int) -> None:
        path = self.folder / f"step_{step:09d}"
        rotation.discard(path)  # a damaged checkpoint of the same step, if any
        os.replace(aside, path)
        manifest.sync(self.folder)
        self._kept.rotate(path, self.keep)

    def _on_first(self, work: Callable[[], None]) -> None:
        self._on_all(work if is_primary() else lambda: None)

    def _on_all(self, work: Callable[[], T]) -> list[T]:
        """Call ``work`` on every rank; return all results, or raise one rank's error on all."""
        result, error = None, None
        try:
            result = work()
        except Exception as raised:  # noqa: BLE001 - raised below
            error = _of_rank(rank(), raised)
        answers: list[Any] = [None] * world_size()
        dist.all_gather_object(answers, (result, error), group=self._group)
        for _, failure in answers:
            if failure is not None:
                raise failure
        return [answer for answer, _ in answers]


def _entries(files: Any) -> dict[str, dict[str, Any]]:
    """Return length and checksum of files, by name."""
    return {
        file.name: {"bytes": file.stat().st_size, manifest.CHECKSUM: manifest.checksum(file)}
        for file in files
    }


def _of_rank(where: int, error: BaseException) -> Exception:
    """Return an error with its rank in the message; OSError and RunError keep their type."""
    if isinstance(error, OSError):
        return OSError(error.errno, f"{error.strerror or error}, on rank {where}")
    if isinstance(error, RunError):
        return RunError(f"{error}, on rank {where}")
    return RunError(f"rank {where}: {type(error).__name__}: {error}")
