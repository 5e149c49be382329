"""Checkpoint files: whole or absent, checked, plain."""

from __future__ import annotations

import enum
import errno
import json
import os
import shutil
import stat
from collections import OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from selftask.checkpoint import manifest, rotation, store
from selftask.checkpoint.writer import CheckpointWriter, HostBuffers
from selftask.errors import UserError
from selftask.logs.checkpoint_results import CheckpointResults, result_files


def save(folder: Path, *steps: int, keep: int = 3) -> list[Path]:
    return [store.save({"n": step}, folder, step, keep=keep) for step in steps]


class Colour(enum.IntEnum):
    RED = 1


@pytest.mark.parametrize(
    ("value", "place"),
    [
        ({"a": np.float64(1.5)}, "state.a is a float64"),  # a float to isinstance
        ({"a": [1, {"b": np.int64(1)}]}, r"state.a\[1\].b is a int64"),
        ({"a": Colour.RED}, "state.a is a Colour"),
        ({"a": defaultdict(int)}, "state.a is a defaultdict"),
        ({"a": Path("x")}, "state.a is a PosixPath"),
        ({"a": {np.int64(1): 2}}, "a key of state.a is a int64"),
        ({"a": {1, 2}}, "state.a is a set"),
        ({"a": torch.tensor([1]).max(dim=0)}, "state.a is a max"),  # a named tuple
    ],
)
def test_only_plain_things(tmp_path: Path, value: dict[str, Any], place: str) -> None:
    with pytest.raises(TypeError, match=place):
        store.save(value, tmp_path, 1, keep=1)
    assert list(tmp_path.iterdir()) == []


def test_what_is_saved_comes_back(tmp_path: Path) -> None:
    state = {
        "t": torch.arange(3, dtype=torch.bfloat16),
        "nested": OrderedDict(x=[1, 2.5, None, True, "ä"], y=(1, 2)),
        "empty": torch.empty(0, 4),
        3: torch.tensor(1.0),
    }
    path = store.save(state, tmp_path, 7, keep=1)
    assert path.name == "step_000000007.pt"
    loaded = store.load(path)
    assert torch.equal(loaded.pop("t"), state["t"])
    assert loaded["nested"] == state["nested"]
    assert loaded["empty"].shape == (0, 4)
    seal = json.loads(path.with_suffix(".json").read_text())
    assert seal["bytes"] == path.stat().st_size


def test_the_last_few_are_kept(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 10, 9, keep=2)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [
        "step_000000009.json",
        "step_000000009.pt",
        "step_000000010.json",
        "step_000000010.pt",
    ]


def test_a_step_has_a_file_or_a_folder(tmp_path: Path) -> None:
    """A run that resumes without shards may save a step that has a sharded checkpoint."""
    (first,) = save(tmp_path, 1)
    shards = tmp_path / "step_000000002"
    shards.mkdir()
    (shards / rotation.MANIFEST).write_text("{}")
    (second,) = save(tmp_path, 2)
    assert rotation.checkpoints(tmp_path) == [second, first]


def test_a_folder_that_is_half_removed_has_no_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = tmp_path / "step_000000002"
    shards.mkdir()
    for name in (rotation.MANIFEST, "rank_0"):
        (shards / name).write_text("{}")
    monkeypatch.setattr(rotation.shutil, "rmtree", lambda path, **options: None)  # killed before it
    rotation.discard(shards)
    assert [path.name for path in shards.iterdir()] == ["rank_0"]


def damage(path: Path, kind: str) -> None:
    content = bytearray(path.read_bytes())
    if kind == "truncated":
        path.write_bytes(content[:-1])
    elif kind == "one bit":
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    elif kind == "empty":
        path.write_bytes(b"")
    else:
        path.with_suffix(".json").write_text("{")


@pytest.mark.parametrize("kind", ["truncated", "one bit", "empty", "seal"])
def test_damage_falls_back_and_says_so(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = save(tmp_path, 1, 2)
    damage(second, kind)
    state, path = store.load_newest(tmp_path) or ({}, None)
    assert (state, path) == ({"n": 1}, first)
    assert "step_000000002.pt is damaged" in caplog.text
    damage(first, kind)
    with pytest.raises(UserError, match="none of the 2 checkpoints"):
        store.load_newest(tmp_path)


def test_a_longer_file_is_damaged(tmp_path: Path) -> None:
    """Also if only lengths are compared."""
    (path,) = save(tmp_path, 1)
    entry = json.loads(path.with_suffix(".json").read_text())
    manifest.verify(path, entry, content=False)
    path.write_bytes(path.read_bytes() + b"more")
    with pytest.raises(manifest.DamagedCheckpoint, match=r"\d+ of \d+ bytes"):
        manifest.verify(path, entry, content=False)


def test_a_checkpoint_that_a_run_replaces_while_it_is_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With keep_checkpoints=1 the newest one may go under a reader's eyes."""
    store.save({"step": 1}, tmp_path, 1, keep=1)

    def read(path: Path) -> dict[str, Any]:
        if rotation.step_of(path) < 3:
            step = rotation.step_of(path) + 1
            store.save({"step": step}, tmp_path, step, keep=1)
        return store.load(path)

    newest = store.load_newest(tmp_path, read)
    assert newest is not None
    assert newest[0] == {"step": 3}
    assert "damaged" not in caplog.text


def test_a_whole_file_without_its_seal_counts(tmp_path: Path) -> None:
    """Killed between the two renames; torch's own reader still sees a truncated one."""
    _, second = save(tmp_path, 1, 2)
    second.with_suffix(".json").unlink()
    assert store.load_newest(tmp_path) == ({"n": 2}, second)
    second.write_bytes(second.read_bytes()[:-30])
    newest = store.load_newest(tmp_path)
    assert newest is not None
    assert newest[0] == {"n": 1}


def test_a_bit_of_a_file_without_its_seal_is_checked(tmp_path: Path) -> None:
    """By the checksums in the zip file, which torch's own reader ignores."""
    path = store.save({"t": torch.zeros(4000)}, tmp_path, 1, keep=1)
    path.with_suffix(".json").unlink()
    assert store.load(path)["t"].sum() == 0
    damage(path, "one bit")
    assert torch.load(path, weights_only=True)["t"].sum() != 0
    with pytest.raises(manifest.DamagedCheckpoint, match=r"checksum of .* differs"):
        store.load(path)


def test_a_file_has_no_seal_of_an_earlier_one_of_its_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step is saved again after a test phase; killed between the two renames."""
    save(tmp_path, 1, 2)
    monkeypatch.delattr(store, "write_durably")
    with pytest.raises(NameError):
        store.save({"n": 3}, tmp_path, 2, keep=3)
    newest = store.load_newest(tmp_path)
    assert newest is not None
    assert newest[0] == {"n": 3}


def test_what_a_kill_left_is_cleared_away(tmp_path: Path) -> None:
    left = tmp_path / ".step_000000004.pt.tmp"
    left.write_bytes(b"half")
    assert store.load_newest(tmp_path) is None
    save(tmp_path, 6)
    assert not left.exists()


def test_every_cut_of_the_write_leaves_a_good_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stop before each system call that changes a name; the state is then the old or the new."""
    (first,) = save(tmp_path, 1)
    for calls in range(5):
        seen = []

        def cut(name: str, original: Any, calls: int = calls, seen: list[str] = seen) -> Any:
            def call(*args: Any, **kwargs: Any) -> Any:
                seen.append(name)
                if len(seen) > calls:
                    raise KeyboardInterrupt
                return original(*args, **kwargs)

            return call

        with monkeypatch.context() as patch:
            for name in ("replace", "fsync"):
                patch.setattr(manifest.os, name, cut(name, getattr(manifest.os, name)))
            try:
                save(tmp_path, 2)
            except KeyboardInterrupt:
                newest = store.load_newest(tmp_path)
                assert newest is not None
                assert newest[0]["n"] == (2 if calls >= 2 else 1), (calls, seen)
    assert first.exists()


def test_a_file_system_that_syncs_no_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As /proc answers; any other error of a folder, and any of a file, is an error."""
    answers = {"folder": errno.EINVAL, "file": 0}

    def fsync(handle: int) -> None:
        number = answers["folder" if stat.S_ISDIR(os.fstat(handle).st_mode) else "file"]
        if number:
            raise OSError(number, os.strerror(number))

    if Path("/proc/self").exists():
        manifest.sync(Path("/proc"))
    monkeypatch.setattr(os, "fsync", fsync)
    (saved,) = save(tmp_path, 1)
    assert store.load(saved) == {"n": 1}
    for wrong in ({"folder": errno.EIO}, {"folder": 0, "file": errno.EINVAL}):
        answers.update(wrong)
        with pytest.raises(OSError):
            save(tmp_path, 2)


def test_results_of_checkpoints_that_were_deleted_are_replaced_too(tmp_path: Path) -> None:
    CheckpointResults(tmp_path, []).add(5, ["knn"], {"knn_top1": 0.5})
    rotation.archive(tmp_path / "checkpoints", 5)
    assert result_files(tmp_path)
    rotation.archive(tmp_path / "checkpoints", -1)
    assert not result_files(tmp_path)
    assert (tmp_path / "checkpoints/replaced_1/step_5.jsonl").exists()


def test_replaced_checkpoints_have_a_new_folder_after_one_was_deleted(tmp_path: Path) -> None:
    for number in (1, 2):
        for suffix in ("pt", "json"):
            (tmp_path / f"step_{number:09d}.{suffix}").touch()
        rotation.archive(tmp_path, 0)
        assert not list(tmp_path.glob("step_*"))
    shutil.rmtree(tmp_path / "replaced_1")
    (tmp_path / "step_000000003.pt").touch()
    rotation.archive(tmp_path, 0)
    moved = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.glob("*/*.pt"))
    assert moved == ["replaced_1/step_000000003.pt", "replaced_2/step_000000002.pt"]


def test_a_view_with_other_strides_is_copied_for_itself() -> None:
    """A tensor and its transpose have the same address and shape; tied tensors are copied once."""
    weight = torch.arange(9.0).reshape(3, 3)
    state = {"weight": weight, "tied": weight[:], "transposed": weight.T}
    copied, _ = HostBuffers().copy(state)
    assert all(torch.equal(copied[name], value) for name, value in state.items())
    assert copied["weight"].data_ptr() == copied["tied"].data_ptr() != weight.data_ptr()


def test_the_writer_waits_for_copies_of_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = torch.zeros(3)

    class Event:
        def synchronize(self) -> None:
            copy.fill_(1.0)

    monkeypatch.setattr(HostBuffers, "copy", lambda self, state: ({"t": copy}, [Event()]))
    writer = CheckpointWriter(tmp_path, keep=1)
    writer.save({"t": torch.ones(3)}, 1)
    writer.wait()
    assert store.load(tmp_path / "step_000000001.pt")["t"].tolist() == [1.0] * 3
