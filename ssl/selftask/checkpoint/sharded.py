"""Sharded checkpoints: a folder to which every rank writes its own shards.

``step_N/`` contains the sharded tensors, as written by torch.distributed.checkpoint (DCP).
``rest.pt`` contains everything else as plain objects, with None instead of sharded tensors.
``manifest.json`` contains length and checksum of each file. The folder gets its final name when all
files are on disk. Any number of ranks can read the folder, each its own part. A single process
without a process group reads full tensors.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.tensor import DTensor, Shard

from selftask.checkpoint import manifest
from selftask.checkpoint.manifest import DamagedCheckpoint
from selftask.checkpoint.nested import Keys, map_tensors
from selftask.checkpoint.restricted_pickle import Constructor, RestrictedUnpickler, size
from selftask.checkpoint.rotation import MANIFEST
from selftask.distributed.collectives import is_primary
from selftask.distributed.shards import full_tensor
from selftask.errors import RunError

T = TypeVar("T")

REST = "rest.pt"

_RECORDS = (
    *(metadata.Metadata, metadata.MetadataIndex, metadata.StorageMeta, filesystem._StorageInfo),
    *(metadata.TensorStorageMetadata, metadata.TensorProperties, metadata.ChunkStorageMetadata),
)


def _record(kind: type[T]) -> T:
    return kind.__new__(kind)


def _layout(name: str) -> torch.layout:
    if name != "torch.strided":
        raise pickle.UnpicklingError(f"has tensors of layout {name!r}")
    return torch.strided


def _path(*parts: str) -> str:
    return "/".join(parts)


_MEMORY_FORMAT = Constructor(metadata._MEM_FORMAT_ENCODING)


def _member(owner: Any, name: Any) -> Any:
    """Return a member of the Enum: Python 3.11.0 to 3.11.4 pickle ``getattr(Enum, name)``."""
    if owner is not _MEMORY_FORMAT or type(name) is not str:
        raise pickle.UnpicklingError("calls getattr; nothing was run")
    return metadata._MEM_FORMAT_ENCODING[name]


_METADATA = {
    **{f"{c.__module__}.{c.__name__}": Constructor(partial(_record, c)) for c in _RECORDS},
    **{f"torch.{name}": value for name, value in vars(torch).items() if type(value) is torch.dtype},
    "torch.Size": Constructor(size),
    "torch.serialization._get_layout": Constructor(_layout),
    "torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING": _MEMORY_FORMAT,
    "builtins.getattr": Constructor(_member),
    "pathlib.PosixPath": Constructor(_path),
    "pathlib._local.PosixPath": Constructor(_path),  # of Python 3.13
}
"""Names that DCP's pickle ``.metadata`` may contain."""


class _TableUnpickler(RestrictedUnpickler):
    """Unpickler of ``.metadata``."""

    objects = _RECORDS


def split(state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, DTensor]]:
    """Return the content of ``rest.pt``, and the sharded tensors by name.

    Tensors split by rows stay sharded; tensors distributed otherwise are gathered. Every rank must
    call this function.
    """
    shards: dict[str, DTensor] = {}
    paths: dict[str, list[Any]] = {}

    def cut(tensor: Tensor, path: Keys) -> Tensor | None:
        if not isinstance(tensor, DTensor):
            return tensor
        if not _is_split_by_rows(tensor):
            return full_tensor(tensor)
        name = ".".join(map(str, path))
        assert name not in shards, name
        shards[name], paths[name] = tensor, list(path)
        return None

    return {"state": map_tensors(cut, state), "places": paths}, shards


def _is_split_by_rows(shards: DTensor) -> bool:
    return [part for part in shards.placements if not part.is_replicate()] == [Shard(0)]


def load(
    path: Path,
    *,
    empty: Callable[..., Tensor] = torch.empty,
    checker: int = 0,
    num_checkers: int = 1,
    wanted: Callable[[Mapping[str, Any], str], bool] | None = None,
) -> dict[str, Any]:
    """Read and verify a sharded checkpoint, or some of its tensors.

    Args:
        path: Folder of the checkpoint.
        empty: ``empty(shape, dtype=...)`` allocates the destination of a sharded tensor: the full
            tensor on the CPU, or this rank's part.
        checker: Index of this reader, which verifies the checksums of its share of the files.
        num_checkers: Number of readers.
        wanted: Selects the sharded tensors to read, as in ``store.load``; None for all. The others
            become None. Checksums are then verified for the pieces that are read, not for whole
            files.

    Raises:
        DamagedCheckpoint: If it cannot be read, or a length or checksum differs.
    """
    try:
        _verify(path, checker, num_checkers, shards=wanted is None)
        rest = manifest.read_file(path / REST, mmap=wanted is not None)
        paths = {
            name: keys
            for name, keys in rest["places"].items()
            if wanted is None or wanted(rest["state"], name)
        }
        tensors = _read_shards(path, paths, empty, verify=wanted is not None)
        for name, keys in paths.items():
            _put(rest["state"], keys, tensors[name])
    except DamagedCheckpoint:
        raise
    except Exception as error:  # DCP and pickle raise many kinds for other files
        raise DamagedCheckpoint(f"{type(error).__name__}: {error}") from error
    return rest["state"]


def _verify(path: Path, checker: int, num_checkers: int, *, shards: bool) -> None:
    """Check the length of every file, and the checksums of this checker's share.

    Without ``shards`` the checksums of the tensors' files are not checked.
    """
    if not (path / MANIFEST).exists():
        raise DamagedCheckpoint(f"{MANIFEST} is missing")
    files = manifest.read_manifest(path / MANIFEST)["files"]
    for number, (name, entry) in enumerate(sorted(files.items())):
        if Path(name).name != name or not (path / name).is_file():
            raise DamagedCheckpoint(f"{name} is missing")
        try:
            mine = number % num_checkers == checker and (shards or not name.endswith(".distcp"))
            manifest.verify(path / name, entry, content=mine)
        except DamagedCheckpoint as damage:
            raise DamagedCheckpoint(f"{name}: {damage}") from damage


def _read_shards(
    path: Path, names: Iterable[str], empty: Callable[..., Tensor], *, verify: bool
) -> dict[str, Tensor]:
    table = _read_table(path)
    kinds = {name: table.state_dict_metadata[name] for name in names}
    tensors = {name: empty(kind.size, dtype=kind.properties.dtype) for name, kind in kinds.items()}
    _fill(path, table, tensors, verify=verify)
    return tensors


def read_back(path: Path, tensors: dict[str, Tensor]) -> None:
    """Read a new checkpoint to check it: shards on every rank, ``rest.pt`` on the first rank.

    Args:
        path: Folder of the checkpoint.
        tensors: Destinations of the sharded tensors, by name.

    Raises:
        RunError: If it cannot be read, so that a resume would fail.
    """
    try:
        _fill(path, _read_table(path), tensors, verify=False)
        if is_primary():
            manifest.read_file(path / REST)
    except Exception as error:  # as in load
        raise RunError(
            f"the sharded checkpoint just written cannot be read again "
            f"({type(error).__name__}: {error}); train.sharded_checkpoints=false writes one file"
        ) from error


def _read_table(path: Path) -> Any:
    """Return DCP's table of tensor locations; its own read_metadata() would unpickle anything."""
    with (path / ".metadata").open("rb") as file:
        return _TableUnpickler(file, _METADATA).load()


def _fill(path: Path, table: Any, tensors: dict[str, Tensor], *, verify: bool) -> None:
    """Fill tensors with DCP's reader and planner, without communication between ranks."""
    reader = FileSystemReader(path)
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(tensors, table, True)
    reader.set_up_storage_reader(table, True)
    plan = planner.finish_plan(reader.prepare_local_plan(planner.create_local_plan()))
    stored = [table.storage_data[item.storage_index] for item in plan.items]
    for file in {piece.relative_path for piece in stored}:
        if Path(file).name != file or not (path / file).is_file():
            raise DamagedCheckpoint(f"its .metadata names {file}")
    if verify:
        _verify_pieces(path, {(p.relative_path, p.offset, p.length) for p in stored})
    reader.read_data(plan, planner).wait()


def _verify_pieces(path: Path, pieces: Iterable[tuple[str, int, int]]) -> None:
    """Check the CRCs of parts of files (name, offset, length), each a zip file of torch.save."""
    for name, offset, length in sorted(pieces):
        with (path / name).open("rb") as file:
            file.seek(offset)
            try:
                manifest.verify_zip(io.BytesIO(file.read(length)))
            except DamagedCheckpoint as damage:
                raise DamagedCheckpoint(f"{name}: {damage}") from damage


def _put(state: Any, keys: list[Any], tensor: Tensor) -> None:
    """Set an item of nested containers, given the keys that lead to it."""
    for key in keys[:-1]:
        state = state[key]
    state[keys[-1]] = tensor
