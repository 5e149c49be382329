"""Sharded checkpoints: the tensors of the one file, for any number of ranks, whole or absent."""

from __future__ import annotations

import copy
import functools
import json
import shutil
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader

import selftask
import tiny
from ranks import run_ranks
from selftask.checkpoint import manifest, rotation, sharded, store
from selftask.cli.main import main
from selftask.config.schema import Config
from selftask.data.loading.open_data import open_data
from selftask.distributed.collectives import rank, world_size
from selftask.distributed.world import World
from selftask.errors import RunError, UserError
from selftask.models.weights.model_source import open_model, read_weights
from selftask.models.weights.read import read_state
from selftask.task import Task

pytestmark = pytest.mark.slow

METHOD = "byol"  # has a teacher, BatchNorm and a predictor that the teacher has not
LENGTH = 4
COMMON = (
    "parallel={reduce: fsdp, sync_batch_norm: all}",
    f"train.max_steps={LENGTH}",
    "train.checkpoint_every='1 steps'",
    "train.keep_checkpoints=9",
    "hooks.ema={decay: 0.5}",
)


@functools.cache
def small_config(folder: Path) -> Config:
    return tiny.config(METHOD, folder, "run", *COMMON)


def train(folder: Path, out: str, stop_at: int | None = None) -> dict[str, Any]:
    """Train, in shards unless ``out`` says plain; the state it was resumed with."""
    torch.set_num_threads(1)
    config = small_config(folder)
    in_shards = not out.endswith("plain")
    how = replace(config.train, sharded_checkpoints=in_shards, stop_at=stop_at)
    config = replace(config, train=how, out=str(folder / out))
    task = Task(config, sources=open_data(config.data))
    task.world = World(rank(), world_size(), rank(), world_size())
    began: dict[str, Any] = {}
    start = Task.on_start

    def on_start(task: Task) -> None:
        if task.resumed:
            began.update(copy.deepcopy(task.state_dict()))
        start(task)

    task.on_start = lambda: on_start(task)  # type: ignore[method-assign]
    tiny.loop(task)
    return began


Run = tuple[str, int | None]  # its name, and where it stops


def on_ranks(_: int, folder: Path, runs: list[Run]) -> list[Any]:
    results: list[Any] = []
    for run in runs:
        try:
            results.append(train(folder, *run))
        except Exception:  # noqa: BLE001 - told by the parent
            results.append(traceback.format_exc())
    return results


def two(folder: Path, *runs: Run) -> list[dict[str, Any]]:
    """What the first of two ranks began each run with."""
    first, second = run_ranks(on_ranks, 2, folder, list(runs))
    assert not [text for text in (*first, *second) if isinstance(text, str)], (first, second)
    return list(first)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runs of two ranks that all tests start from."""
    folder = tmp_path_factory.mktemp("sharded")
    tiny.digits_file(folder)
    runs = {"plain": None, "sharded": None, "legs_plain": 1, "legs_sharded": 1, "stopped": 2}
    two(folder, *runs.items())
    for way in ("plain", "sharded"):
        (folder / way / "config.yaml").write_text(store.load(checkpoints(folder, way)[0])["config"])
    return folder


def checkpoints(folder: Path, name: str) -> list[Path]:
    return rotation.checkpoints(folder / name / "checkpoints")


def assert_same(*states: dict[str, Any]) -> None:
    """Except for what differs between equal runs: rows hold times."""
    own = ("config", "metrics_bytes")
    kept = [{key: item for key, item in state.items() if key not in own} for state in states]
    assert tiny.differences(*kept) == []


def test_the_shards_are_the_plain_file(folder: Path) -> None:
    plain, shards = (checkpoints(folder, way) for way in ("plain", "sharded"))
    assert [path.name for path in plain] == [f"step_{n:09d}.pt" for n in range(LENGTH, 0, -1)]
    assert [f"{path.name}.pt" for path in shards] == [path.name for path in plain]
    for file, whole in zip(shards, plain, strict=True):
        loaded, expected = store.load(file), store.load(whole)
        assert_same(loaded, expected)
        assert list(loaded["model"]) == list(expected["model"])
        assert {type(tensor) for tensor in loaded["model"].values()} == {torch.Tensor}
    newest = shards[0]
    assert not list(newest.parent.glob(".*"))
    names = {path.name for path in newest.iterdir()}
    assert names == {".metadata", "__0_0.distcp", "__1_0.distcp", "rest.pt", "manifest.json"}
    sizes = {path.name: path.stat().st_size for path in newest.iterdir()}
    assert sizes["rest.pt"] < sizes["__0_0.distcp"] + sizes["__1_0.distcp"]
    rest = torch.load(newest / "rest.pt", weights_only=True)
    cut = [key for key, value in rest["state"]["model"].items() if value is None]
    parameters = [k for k in cut if k.endswith((".weight", ".bias"))]
    assert parameters, "the network's parameters are in the shards"
    sealed = json.loads((newest / "manifest.json").read_text())["files"]
    assert sealed.keys() == names - {"manifest.json"}


def test_any_number_of_ranks_goes_on_with_the_same_tensors(folder: Path) -> None:
    for way in ("plain", "sharded"):
        out = f"legs_{way}"
        assert_began_with(train(folder, out, 3), checkpoints(folder, out)[-1])
    kinds = [path.suffix for path in checkpoints(folder, "legs_sharded")]
    assert kinds == [".pt", ".pt", ""], "on one rank nothing is sharded"
    shutil.copytree(folder / "stopped", folder / "damaged")
    (checkpoints(folder, "damaged")[0] / "__1_0.distcp").unlink()
    runs = ("stopped", "damaged", "legs_sharded", "legs_plain")
    files = [checkpoints(folder, run)[run == "damaged"] for run in runs]
    began = two(folder, *[(run, None) for run in runs])
    for state, file in zip(began, files, strict=True):
        assert_began_with(state, file)
    end = {run: store.load(checkpoints(folder, run)[0]) for run in (*runs, "plain")}
    assert_same(end["stopped"], end["plain"])
    assert_same(end["damaged"], end["plain"])
    assert_same(end["legs_sharded"], end["legs_plain"])


def assert_began_with(state: dict[str, Any], file: Path) -> None:
    """``state`` is that of the file; generators are of each rank, and one is not two."""
    saved = store.load(file)
    of_ranks = {"rng": 0, "threads": 0}  # one entry for each
    assert_same({**state, **of_ranks}, {**{key: saved[key] for key in state}, **of_ranks})


@pytest.mark.parametrize("kind", ["shard missing", "shard cut", "bit", "rest", "metadata", "seal"])
def test_damage_falls_back_and_says_so(
    folder: Path, tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    for path in checkpoints(folder, "sharded")[-2:]:
        shutil.copytree(path, tmp_path / path.name)
    newest, before = rotation.checkpoints(tmp_path)
    names = {"rest": "rest.pt", "metadata": ".metadata", "seal": "manifest.json"}
    file = newest / names.get(kind, "__1_0.distcp")
    content = bytearray(file.read_bytes())
    if kind == "bit":
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    elif kind == "shard cut":
        file.write_bytes(content[:-1])
    else:
        file.unlink()
    loaded = store.load_newest(tmp_path)
    assert loaded is not None
    assert loaded[1] == before
    assert f"{newest.name} is damaged ({file.name}" in caplog.text
    (before / "manifest.json").write_text("{}")
    with pytest.raises(UserError, match="none of the 2 checkpoints"):
        store.load_newest(tmp_path)


def test_export_makes_the_one_plain_file(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = folder / "sharded"
    assert main(["export", str(run), "--to", "checkpoint", "--out", str(tmp_path)]) == 0
    path = Path(capsys.readouterr().out.splitlines()[-1])
    assert path == tmp_path / f"step_{LENGTH:09d}.pt"
    code = (
        "import sys; sys.modules['selftask'] = None; import torch; "
        f"state = torch.load({str(path)!r}, weights_only=True); print(sorted(state))"
    )
    done = tiny.run([tiny.sys.executable, "-c", code], tmp_path)
    expected = torch.load(checkpoints(folder, "plain")[0], weights_only=True)
    assert done.stdout.strip() == str(sorted(expected)), done.stderr
    assert_same(torch.load(path, weights_only=True), expected)
    assert main(["export", str(run), "--out", str(tmp_path)]) == 0
    weights = torch.load(tmp_path / "backbone.pt", weights_only=True)
    trained = torch.load(run / "export/backbone.pt", weights_only=True)
    assert tiny.differences(weights, trained) == []


def without_export(folder: Path, tmp_path: Path) -> Path:
    """A copy of the run in shards that was never exported."""
    ignored = shutil.ignore_patterns("export")
    return shutil.copytree(folder / "sharded", tmp_path / "run", ignore=ignored)


def test_weights_are_read_without_an_export(folder: Path, tmp_path: Path) -> None:
    run = without_export(folder, tmp_path)
    export = folder / "sharded/export"
    expected = torch.load(export / "backbone.pt", weights_only=True)
    written = json.loads((export / "backbone.json").read_text())
    newest = rotation.checkpoints(run / "checkpoints")[0]
    for address in (newest, run):
        backbone, facts = open_model(str(address))
        assert tiny.differences(dict(backbone.state_dict()), expected) == []
        assert {"format": "selftask backbone 1", **facts} == written
        assert tiny.differences(read_weights(str(address)), expected) == []
    assert tiny.differences(read_state(newest), expected) == []
    images = torch.rand(2, 3, 32, 32)
    models = [selftask.load(address) for address in (run, newest, export / "backbone.pt")]
    features = [model.features(images) for model in models]
    assert torch.equal(features[0], features[2])
    assert torch.equal(features[1], features[2])
    assert models[0].facts["step"] == LENGTH


def test_commands_take_runs_in_shards(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = without_export(folder, tmp_path)
    shutil.copytree(folder / "sharded/export", tmp_path / "exported/export")
    shutil.copy(run / "config.yaml", tmp_path / "exported")
    val = f"data.val={tiny.digits_file(folder, 'val.npz', 400, 430)}"
    rows = []
    for address in (run, tmp_path / "exported"):
        assert main(["eval", "knn", str(address), val, "k=[3]"]) == 0
        row = json.loads(capsys.readouterr().out.splitlines()[-1])
        rows.append({key: value for key, value in row.items() if key not in tiny.TIMES})
        assert main(["features", str(address), f"out={tmp_path / 'of' / address.name}"]) == 0
    assert rows[0] == rows[1]
    arrays = [np.load(tmp_path / f"of/{name}/features.npy") for name in ("run", "exported")]
    assert np.array_equal(*arrays)


@pytest.mark.parametrize("head", [False, True])
def test_a_run_starts_from_shards(folder: Path, head: bool) -> None:
    newest = checkpoints(folder, "sharded")[0]
    words = (f"init.backbone={newest}", f"init.head={str(head).lower()}")
    task = tiny.task(METHOD, folder, f"from_shards_{head}", *words)
    task.prepare()
    trained, began = store.load(newest)["model"], task.state_dict()["model"]
    task.close()
    same = {name for name, value in began.items() if torch.equal(value, trained[name])}
    heads = {name for name in began if name.startswith("head.") and name.endswith("0.weight")}
    assert {name for name in began if name.startswith("backbone.")} <= same
    assert heads and (heads <= same) == head


def pieces(checkpoint: Path, prefix: str) -> list[tuple[Path, int, int]]:
    """File, offset and length of the shards of tensors with this prefix, as DCP says."""
    stored = FileSystemReader(checkpoint).read_metadata().storage_data
    return [
        (checkpoint / info.relative_path, info.offset, info.length)
        for index, info in stored.items()
        if index.fqn.startswith(prefix)
    ]


def spoil(pieces: list[tuple[Path, int, int]]) -> None:
    """Change a byte in the middle of each piece; no length changes."""
    assert pieces
    for path, offset, length in pieces:
        content = bytearray(path.read_bytes())
        content[offset + length // 2] ^= 1
        path.write_bytes(content)


def test_only_the_backbone_is_read(folder: Path, tmp_path: Path) -> None:
    expected = torch.load(folder / "sharded/export/backbone.pt", weights_only=True)
    newest = tmp_path / "step_000000004"
    shutil.copytree(checkpoints(folder, "sharded")[0], newest)
    for unread in ("optimizer.", "method.", "hooks.", "model.head."):
        spoil(pieces(newest, unread))
    assert tiny.differences(read_state(newest), expected) == []
    assert tiny.differences(dict(open_model(str(newest))[0].state_dict()), expected) == []
    with pytest.raises(manifest.DamagedCheckpoint):
        store.load(newest)
    spoil(pieces(newest, "model.backbone.")[-1:])
    for read in (read_state, open_model):
        with pytest.raises(UserError, match=r"is damaged: __._0\.distcp: .*checksum"):
            read(str(newest))


def test_a_damaged_newest_checkpoint_gives_the_weights_of_the_one_before(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = without_export(folder, tmp_path)
    newest, before, *_ = rotation.checkpoints(run / "checkpoints")
    spoil(pieces(newest, "model.backbone.")[:1])
    backbone, facts = open_model(str(run))
    whole = store.load(before)["model"]
    expected = {k.removeprefix("backbone."): v for k, v in whole.items() if k[:9] == "backbone."}
    assert tiny.differences(dict(backbone.state_dict()), expected) == []
    assert facts["step"] == LENGTH - 1
    assert f"{newest.name} is damaged" in caplog.text


def test_export_of_an_average_in_shards(folder: Path, tmp_path: Path) -> None:
    weights = []
    for way in ("plain", "sharded"):
        words = [str(folder / way), "--weights", "ema", "--out", str(tmp_path / way)]
        assert main(["export", *words]) == 0
        weights.append(torch.load(tmp_path / way / "backbone.pt", weights_only=True))
    assert tiny.differences(*weights) == []
    trained = torch.load(folder / "plain/export/backbone.pt", weights_only=True)
    assert tiny.differences(weights[0], trained) != []


def test_the_last_few_are_kept_whatever_their_kind(folder: Path, tmp_path: Path) -> None:
    for path in checkpoints(folder, "sharded"):
        shutil.copytree(path, tmp_path / path.name)
    (tmp_path / ".step_000000005.tmp").mkdir()
    (tmp_path / ".step_000000005.tmp/__0_0.distcp").write_bytes(b"half")
    store.save({"n": 4}, tmp_path, LENGTH, keep=2)
    kept = sorted(path.name for path in tmp_path.iterdir())
    assert kept == ["step_000000003", "step_000000004.json", "step_000000004.pt"]
    rotation.archive(tmp_path, 2)
    assert (tmp_path / "replaced_1/step_000000003/manifest.json").exists()


def unreadable(_: int, folder: Path) -> str:
    """The error of a run that cannot read what its torch writes."""
    del sharded._METADATA["torch.Size"]
    try:
        train(folder, "unreadable")
    except RunError as error:
        return str(error)
    return ""


def test_what_cannot_be_read_back_is_not_kept(folder: Path) -> None:
    for error in run_ranks(unreadable, 2, folder):
        assert "just written cannot be read again" in error and "torch.Size" in error
        assert "train.sharded_checkpoints=false" in error
    assert list((folder / "unreadable/checkpoints").iterdir()) == []


# In the run's own folder, as a user's extension: the second rank dies half-way through its shards.
KILLER = """
import os, signal
from dataclasses import dataclass
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from selftask.hooks.base import Hook
from selftask.registry import register_hook

@register_hook("killer")
@dataclass(eq=False, kw_only=True)
class Killer(Hook):
    def on_start(self, task):
        if task.resumed or task.world.rank != 1:
            return
        write = FileSystemWriter.write_data
        def die(self, plan, planner):
            if task.steps_done < 2:
                return write(self, plan, planner)
            (self.path / "__1_0.distcp").write_bytes(b"half")
            os.kill(os.getpid(), signal.SIGKILL)
        FileSystemWriter.write_data = die
"""


def test_a_rank_killed_half_way_through_its_shards_leaves_no_trace(folder: Path) -> None:
    (folder / "killer.py").write_text(KILLER)
    more = ("import=[killer]", "hooks.killer={}", "launch={processes: 2, max_restarts: 1}")
    words = (*COMMON, "train.async_checkpoints=false", "train.sharded_checkpoints=true")
    done = tiny.run(tiny.command(METHOD, folder, "killed", *words, *more), folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "starting again from the newest checkpoint" in done.stdout
    assert "resumed from" in done.stdout
    assert "killed/checkpoints/step_000000001: step 1" in done.stdout
    killed, whole = (checkpoints(folder, way) for way in ("killed", "plain"))
    assert not list(killed[0].parent.glob(".*"))
    ends = [store.load(paths[0]) for paths in (killed, whole)]
    for part in ("model", "method", "optimizer", "clock"):
        assert tiny.differences(ends[0][part], ends[1][part]) == []
