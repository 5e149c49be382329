"""Reading a sharded checkpoint that others made runs none of its code."""

from __future__ import annotations

import io
import json
import pickle
import re
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from received_runs import Payload, words_of
from selftask.checkpoint import manifest, rotation, sharded, store
from selftask.cli.main import main
from selftask.errors import RunError


def sharded_checkpoint(
    folder: Path, *, metadata: Callable[[Any], Any] = lambda table: table
) -> None:
    """As two ranks would have written it, with seals that fit."""
    folder.mkdir(parents=True)
    dcp.save(
        {"model.weight": torch.arange(6.0)}, storage_writer=FileSystemWriter(folder), no_dist=True
    )
    file = folder / ".metadata"
    file.write_bytes(pickle.dumps(metadata(pickle.loads(file.read_bytes()))))
    rest = {"state": {"model": {"weight": None}}, "places": {"model.weight": ["model", "weight"]}}
    torch.save(rest, folder / sharded.REST)
    files = {path.name: path for path in folder.iterdir()}
    seals = {
        name: {"bytes": path.stat().st_size, manifest.CHECKSUM: manifest.checksum(path)}
        for name, path in files.items()
    }
    (folder / rotation.MANIFEST).write_text(json.dumps({"step": 1, "files": seals}))


def test_the_metadata_of_sharded_checkpoints(
    pwned: Path, received: Callable[[dict[str, Any]], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    good = pwned.parent / "good" / "step_000000001"
    sharded_checkpoint(good)
    assert torch.equal(store.load(good)["model"]["weight"], torch.arange(6.0))

    run = received({})
    rotation.discard(rotation.checkpoints(run / "checkpoints")[0])
    evil = run / "checkpoints" / "step_000000002"

    def plant(table: Any) -> Any:
        table.planner_data = Payload(pwned)
        return table

    sharded_checkpoint(evil, metadata=plant)
    assert main(words_of("export", run)) == 2
    assert not pwned.exists()
    with pytest.raises(manifest.DamagedCheckpoint, match=r"names (posix|nt)\.mkdir"):
        store.load(evil)
    pickle.loads((evil / ".metadata").read_bytes())
    assert pwned.exists()


class OldPickler(pickle._Pickler):
    """Writes members of an Enum as Python 3.11.0 to 3.11.4, and paths as 3.13."""

    def reducer_override(self, value: Any) -> Any:
        return (getattr, (type(value), value.name)) if isinstance(value, Enum) else NotImplemented


@pytest.mark.parametrize("module", ["pathlib", "pathlib._local"])
def test_the_metadata_of_other_pythons(module: str, tmp_path: Path) -> None:
    """A checkpoint is written by one Python and read by another."""
    folder = tmp_path / "step_000000001"
    written = pickle.dumps

    def dumps(table: Any) -> bytes:
        file = io.BytesIO()
        OldPickler(file, 2, fix_imports=False).dump(table)
        assert b"getattr" in file.getvalue()
        return re.sub(rb"cpathlib(\._local)?\n", f"c{module}\n".encode(), file.getvalue())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pickle, "dumps", dumps)
        sharded_checkpoint(folder)
    assert pickle.dumps is written
    assert torch.equal(store.load(folder)["model"]["weight"], torch.arange(6.0))


class Call:
    """Unpickled, calls a function with these arguments."""

    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> Any:
        return self.call[0], self.call[1:]


def members() -> Any:
    return metadata._MEM_FORMAT_ENCODING


def in_planner_data(content: Any) -> Callable[[Any], Any]:
    def plant(table: Any) -> Any:
        table.planner_data = content
        return table

    return plant


def with_path(path: str) -> Callable[[Any], Any]:
    def plant(table: Any) -> Any:
        for info in table.storage_data.values():
            info.relative_path = path
        return table

    return plant


@pytest.mark.parametrize(
    "plant",
    [
        in_planner_data(Call(getattr, members(), "__members__")),
        in_planner_data(Call(getattr, members(), "__class__")),
        in_planner_data(Call(getattr, metadata.Metadata, "TORCH_CONTIGUOUS_FORMAT")),
        in_planner_data(Call(getattr, "text", "upper")),
        in_planner_data(Call(torch.Size, "text")),
        in_planner_data(Call(torch.serialization._get_layout, "torch.sparse_csr")),
        in_planner_data(Call(members(), 17)),
        with_path("../__0_0.distcp"),
        with_path("/dev/zero"),
    ],
)
def test_forged_metadata(plant: Callable[[Any], Any], tmp_path: Path) -> None:
    folder = tmp_path / "step_000000001"
    sharded_checkpoint(folder, metadata=plant)
    (tmp_path / "__0_0.distcp").write_bytes((folder / "__0_0.distcp").read_bytes())
    with pytest.raises(manifest.DamagedCheckpoint):
        store.load(folder)
    with pytest.raises(RunError, match=r"cannot be read again .*sharded_checkpoints=false"):
        sharded.read_back(folder, {"model.weight": torch.empty(6)})


@pytest.mark.parametrize("name", ["/dev/zero", "../rest.pt"])
def test_a_manifest_names_files_of_its_folder(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "step_000000001"
    sharded_checkpoint(folder)
    (tmp_path / sharded.REST).write_bytes((folder / sharded.REST).read_bytes())
    content = json.loads((folder / rotation.MANIFEST).read_text())
    content["files"][name] = content["files"][sharded.REST]
    (folder / rotation.MANIFEST).write_text(json.dumps(content))
    with pytest.raises(manifest.DamagedCheckpoint, match=f"{name} is missing"):
        store.load(folder)


def test_every_file_is_verified_by_one_of_the_readers(tmp_path: Path) -> None:
    folder = tmp_path / "step_000000001"
    sharded_checkpoint(folder)
    files = json.loads((folder / rotation.MANIFEST).read_text())["files"]
    assert len(files) == 3
    for name in files:
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        reports = []
        for checker in range(2):
            try:
                sharded._verify(folder, checker, 2, shards=True)
            except manifest.DamagedCheckpoint as damage:
                reports.append(str(damage).partition(":")[0])
        assert reports == [name]
        (folder / name).write_bytes(content)


def test_a_new_sharded_checkpoint_is_read_back(tmp_path: Path) -> None:
    folder = tmp_path / "step_000000001"
    sharded_checkpoint(folder)
    tensors = {"model.weight": torch.empty(6)}
    sharded.read_back(folder, tensors)
    assert torch.equal(tensors["model.weight"], torch.arange(6.0))
    (folder / sharded.REST).write_bytes(b"")
    with pytest.raises(RunError, match="cannot be read again"):
        sharded.read_back(folder, tensors)
