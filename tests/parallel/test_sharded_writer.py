"""The writer of shards on two ranks: whole or absent; what fails on one rank fails on both."""

from __future__ import annotations

import errno
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, empty

from selftask.checkpoint import manifest, rotation, sharded, sharded_writer, store
from selftask.checkpoint.writer import CheckpointWriter
from selftask.errors import RunError

SHAPES = {"even": (4, 3), "odd": (5, 2), "one row": (1, 7), "vector": (3,)}


def tensors() -> dict[str, Tensor]:
    """One of each shape; with two ranks, the second one's part of ``one row`` is empty."""
    generator = torch.Generator().manual_seed(0)
    made = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    made["half"] = torch.randn(6, 2, generator=generator).bfloat16()
    made["count"] = torch.arange(6)
    return made


def state_of(change: Any) -> dict[str, Any]:
    """Tensors deep inside of a state, each as ``change`` makes it, beside what is whole."""
    made = {name: change(tensor) for name, tensor in tensors().items()}
    return {
        "model": {**made, "buffer": torch.ones(2)},
        "optimizer": {"state": {0: {"exp_avg": made["odd"], "step": torch.tensor(3.0)}}},
        "clock": [1, (2, None), "three"],
    }


def written_on_two(rank: int) -> dict[str, Any]:
    """Save four times: while the state changes, on a full disk of one rank, again, and last."""
    folder = shared_folder()
    mesh = init_device_mesh("cpu", (2,))
    cut = state_of(lambda tensor: distribute_tensor(tensor, mesh, [Shard(0)]))
    cut["optimizer"]["norm"] = distribute_tensor(torch.tensor(7.0), mesh, [Replicate()])
    writer = sharded_writer.ShardedWriter(folder, keep=2)
    writer.save(cut, 1)
    for tensor in cut["model"].values():
        tensor.zero_()
    writer.wait()
    first = store.load(folder / "step_000000001")
    fresh = state_of(lambda tensor: distribute_tensor(tensor, mesh, [Shard(0)]))
    results = []
    for breaks, step in ((NoRoom, 2), (FullDisk, 2), (Bug, 3)):
        with breaks(on_rank=1):
            writer.save(fresh, step)
            results.append(failure_of(writer))
    dist.barrier()  # the first rank has cleared away
    left = sorted(path.name for path in folder.glob(".*"))
    dist.barrier()  # both have looked
    if rank == 0:
        (folder / ".step_000000003.tmp").mkdir()  # of a run that was killed
        (folder / "step_000000004").mkdir()  # a damaged checkpoint
        (folder / "step_000000004/rest.pt").touch()
    writer.save(fresh, 4)
    writer.save(fresh, 5, last=True)
    dist.barrier()
    read = sharded.load(
        folder / "step_000000005",
        empty=lambda shape, dtype: empty(
            *shape, dtype=dtype, device_mesh=mesh, placements=[Shard(0)]
        ),
    )
    assert isinstance(read["model"]["odd"], DTensor)
    return {
        "folder": str(folder),
        "first": first,
        "told": results,
        "left": left,
        "bytes": {
            name: t.to_local().numel() for name, t in read["model"].items() if name in SHAPES
        },
        "same": all(
            torch.equal(tensor.to_local(), fresh["model"][name].to_local())
            for name, tensor in read["model"].items()
            if isinstance(tensor, DTensor)
        ),
    }


def shared_folder() -> Path:
    """A folder that both ranks know."""
    names = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(names)
    return Path(str(names[0]))


class FullDisk:
    """Within, that rank's disk has no room for the shards."""

    owner: type = FileSystemWriter
    name, error = "write_data", OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def __init__(self, on_rank: int) -> None:
        self.active = dist.get_rank() == on_rank

    def __enter__(self) -> None:
        self.kept = getattr(self.owner, self.name)
        if self.active:
            setattr(self.owner, self.name, self.fail)

    def fail(self, *given: Any) -> Any:
        raise self.error

    def __exit__(self, *exception: object) -> None:
        setattr(self.owner, self.name, self.kept)


class NoRoom(FullDisk):
    """Within, that rank's disk has no room, which is known before a file is written."""

    owner, name = CheckpointWriter, "_check_space"


class Bug(FullDisk):
    """Within, that rank trips over a bug of ours."""

    name, error = "prepare_local_plan", ZeroDivisionError("a bug")  # type: ignore[assignment]


def failure_of(writer: CheckpointWriter) -> str:
    try:
        writer.wait()
    except RunError as error:
        return str(error)
    return "nothing"


ON_RANKS = (written_on_two,)


def test_two_ranks_write_one_checkpoint(rank_results: list[dict[str, Any]]) -> None:
    first, second = (of_rank["written_on_two"] for of_rank in rank_results)
    folder = Path(first["folder"])
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["step_000000004", "step_000000005"], "two are kept, nothing half is left"
    whole = state_of(lambda tensor: tensor)
    assert first["first"]["optimizer"].pop("norm") == 7
    for read in (first["first"], *[store.load(folder / name) for name in names]):
        assert read["clock"] == whole["clock"]
        assert list(read["model"]) == list(whole["model"])
        for key, tensor in whole["model"].items():
            assert read["model"][key].dtype == tensor.dtype
            assert torch.equal(read["model"][key], tensor), key
        moments = read["optimizer"]["state"][0]
        assert torch.equal(moments["exp_avg"], whole["model"]["odd"])
        assert moments["step"] == 3
    assert first["same"]
    assert second["same"]
    last = Path(first["folder"]) / "step_000000005"
    sealed = json.loads((last / rotation.MANIFEST).read_text())["files"]
    assert {*sealed, rotation.MANIFEST} == {path.name for path in last.iterdir()}
    for name, entry in sealed.items():
        manifest.verify(last / name, entry)
    assert first["bytes"] == {"even": 6, "odd": 6, "one row": 7, "vector": 2}
    assert second["bytes"] == {"even": 6, "odd": 4, "one row": 0, "vector": 1}


def test_what_fails_on_one_rank_is_told_on_both(rank_results: list[dict[str, Any]]) -> None:
    for of_rank in rank_results:
        *full, bug = of_rank["written_on_two"]["told"]
        assert len(full) == 2
        for no_room in full:
            assert "the checkpoint of step 2 could not be written" in no_room
            assert "(No space left on device, on rank 1)" in no_room
            assert "it continues from step_000000001" in no_room
        assert bug == "rank 1: ZeroDivisionError: a bug"
        assert of_rank["written_on_two"]["left"] == [], "half a checkpoint is in the way"
