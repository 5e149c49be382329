"""Checkpoints of which every rank writes its own shards: nothing is gathered, a folder for a file.

``step_N/`` holds the sharded tensors, as torch.distributed.checkpoint (DCP) writes them; in
``rest.pt`` everything else, plain, with None where a sharded tensor goes; in ``seal.json`` length
and CRC-32 of every file. The folder gets its name when all of that is on disk. Any number of ranks
reads it, each its own part; one alone, without a process group, reads the whole.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as save_together
from torch.distributed.tensor import DTensor, Shard

from selftask import checkpoint
from selftask.checkpoint import SEAL, DamagedCheckpoint
from selftask.checkpoint_writer import CheckpointWriter
from selftask.collectives import is_primary, new_group, rank, world_size
from selftask.errors import RunError
from selftask.restricted_pickle import RestrictedUnpickler

T = TypeVar("T")

REST = "rest.pt"

_CLASSES = {
    metadata: (
        *("Metadata", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING"),
        *("TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata"),
    ),
    filesystem: ("_StorageInfo",),
    torch.serialization: ("_get_layout",),
    torch: ("Size",),
}
_METADATA = {
    **{(module.__name__, n): getattr(module, n) for module, ns in _CLASSES.items() for n in ns},
    **{("torch", n): t for n, t in vars(torch).items() if isinstance(t, torch.dtype)},
    ("pathlib", "PosixPath"): lambda *parts: "/".join(parts),
}
"""All that the pickle ``.metadata`` of DCP may name."""


def split(state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, DTensor]]:
    """What goes into ``rest.pt``, and the sharded tensors by a name; every rank calls.

    Sharded are those of which each rank has some rows; what is distributed otherwise is made whole.
    """
    shards: dict[str, DTensor] = {}
    places: dict[str, list[Any]] = {}

    def cut(value: Any, place: list[Any]) -> Any:
        if isinstance(value, DTensor) and value.placements != (Shard(0),):
            return value.full_tensor().detach()
        if isinstance(value, DTensor):
            name = ".".join(map(str, place))
            assert name not in shards, name
            shards[name], places[name] = value, place
            return None
        if isinstance(value, dict):
            fresh = copy.copy(value)
            for key, item in value.items():
                fresh[key] = cut(item, [*place, key])
            return fresh
        if isinstance(value, list | tuple):
            return type(value)(cut(item, [*place, n]) for n, item in enumerate(value))
        return value

    return {"state": cut(state, []), "places": places}, shards


def load(
    path: Path,
    *,
    empty: Callable[..., Tensor] = torch.empty,
    checker: int = 0,
    num_checkers: int = 1,
) -> dict[str, Any]:
    """Read and verify a sharded checkpoint. Raises DamagedCheckpoint.

    ``empty(shape, dtype=...)`` makes what a sharded tensor is read into: the whole on the CPU, or
    this rank's part. Of several that read, each may compare the checksums of a part of the files.
    """
    try:
        _verify(path, checker, num_checkers)
        rest = checkpoint.read_file(path / REST)
        tensors = _read_shards(path, empty)
        for name, place in rest["places"].items():
            _put(rest["state"], place, tensors[name])
    except DamagedCheckpoint:
        raise
    except Exception as error:  # DCP and pickle raise many kinds for what is no checkpoint
        raise DamagedCheckpoint(f"{type(error).__name__}: {error}") from error
    state: dict[str, Any] = rest["state"]
    return state


def _verify(path: Path, checker: int, num_checkers: int) -> None:
    if not (path / SEAL).exists():
        raise DamagedCheckpoint(f"{SEAL} is missing")
    files = checkpoint.read_seal(path / SEAL)["files"]
    for number, (name, seal) in enumerate(sorted(files.items())):
        if not (path / name).exists():
            raise DamagedCheckpoint(f"{name} is missing")
        try:
            checkpoint.verify(path / name, seal, content=number % num_checkers == checker)
        except DamagedCheckpoint as damage:
            raise DamagedCheckpoint(f"{name}: {damage}") from damage


def _read_shards(path: Path, empty: Callable[..., Tensor]) -> dict[str, Tensor]:
    """DCP's own steps of a load, without its talk between ranks: each knows what it wants."""
    reader = FileSystemReader(path)
    with (path / ".metadata").open("rb") as file:  # read_metadata() would run any pickle
        table: Any = RestrictedUnpickler(file, _METADATA).load()
    tensors = {
        name: empty(kind.size, dtype=kind.properties.dtype)
        for name, kind in table.state_dict_metadata.items()
    }
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(tensors, table, True)
    reader.set_up_storage_reader(table, True)
    plan = reader.prepare_local_plan(planner.create_local_plan())
    reader.read_data(planner.finish_plan(plan), planner).wait()
    return tensors


def _put(state: Any, place: list[Any], tensor: Tensor) -> None:
    """Set the item at the end of a chain of keys; the containers around tensors are dicts."""
    for key in place[:-1]:
        state = state[key]
    state[place[-1]] = tensor


class ShardedWriter(CheckpointWriter):
    """The same for shards: every rank calls, copies its own, and a thread of each writes them.

    The threads talk over a group of their own. What fails on one rank is raised on all.
    """

    _group: dist.ProcessGroup | None = None

    def save(self, state: dict[str, Any], step: int, *, last: bool = False) -> None:
        """As with one file; on one process, where nothing is sharded, it is one."""
        self._wait_for_the_one_before()
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
            seals = self._on_all(lambda: _seal(aside.glob(f"__{rank()}_*")))
            files = {name: seal for part in seals for name, seal in part.items()}
            self._on_first(lambda: self._finish(state["rest"], aside, step, files))
        except BaseException:
            if is_primary():
                checkpoint.discard(aside)
            raise

    def _begin(self, aside: Path) -> None:
        checkpoint.clear(self.folder)
        aside.mkdir()

    def _write_shards(self, local: dict[str, Tensor], aside: Path) -> None:
        shards = {
            name: DTensor(tensor, self._specs[name], requires_grad=False)
            for name, tensor in local.items()
        }
        planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        try:
            save_together(
                shards,
                storage_writer=FileSystemWriter(aside, sync_files=True),
                planner=planner,
                process_group=self._group,
            )
        except CheckpointException as failure:  # the same on every rank; no Exception
            where, (error, _) = min(failure.failures.items(), key=lambda item: item[0])
            raise _of_rank(where, error) from failure

    def _finish(
        self, rest: dict[str, Any], aside: Path, step: int, files: dict[str, dict[str, int]]
    ) -> None:
        """All that the first rank writes, once the shards are on disk; then the name."""
        files[REST] = checkpoint.write_checked(rest, aside / REST)
        files |= _seal([aside / ".metadata"])
        for file in self.durable:
            checkpoint.sync(file)
        checkpoint.write_durably(aside / SEAL, json.dumps({"step": step, "files": files}))
        checkpoint.sync(aside)
        path = self.folder / f"step_{step:09d}"
        checkpoint.discard(path)  # a damaged one of the same step, if any
        os.replace(aside, path)
        checkpoint.sync(self.folder)
        checkpoint.rotate(path, self.keep)

    def _on_first(self, work: Callable[[], None]) -> None:
        self._on_all(work if is_primary() else lambda: None)

    def _on_all(self, work: Callable[[], T]) -> list[T]:
        """What each rank's work gives, once all are done; an error of one is raised on all."""
        result, error = None, None
        try:
            result = work()
        except Exception as raised:  # noqa: BLE001 - raised below
            error = _of_rank(rank(), raised)
        told: list[Any] = [None] * world_size()
        dist.all_gather_object(told, (result, error), group=self._group)
        for _, failure in told:
            if failure is not None:
                raise failure
        return [given for given, _ in told]


def _seal(files: Any) -> dict[str, dict[str, int]]:
    """Length and CRC-32 of files, by name."""
    return {
        file.name: {"bytes": file.stat().st_size, "crc32": checkpoint.crc32(file)} for file in files
    }


def _of_rank(where: int, error: BaseException) -> Exception:
    """The error of a rank, to be raised on all; one of the disk stays one."""
    if isinstance(error, OSError):
        return OSError(error.errno, f"{error.strerror or error}, on rank {where}")
    return RunError(f"rank {where}: {type(error).__name__}: {error}")
