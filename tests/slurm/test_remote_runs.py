"""``out=mem://...``: train, kill, resume, evaluate and export through a handler of a plug-in."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
from selftask.checkpoint import mirror
from selftask.cli.main import main
from selftask.errors import RunError, UserError
from selftask.files import addresses

TESTS = Path(__file__).resolve().parents[1]
OUT = "mem://bucket/runs/a"
TIMES = tiny.TIMES


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forget_names: None) -> Path:
    folder = tmp_path / "store"
    folder.mkdir()
    monkeypatch.setenv("MEM_STORE", str(folder))
    monkeypatch.setenv("SELFTASK_CACHE", str(tmp_path / "machine_1"))
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    monkeypatch.chdir(tmp_path)
    import mem_store  # noqa: F401 - registers its handler

    return folder


def words(folder: Path, out: str, *more: str) -> list[str]:
    overrides = tiny.overrides("simclr", folder, "unused", "train.epochs=2", *more)
    return ["simclr/digits", *overrides, "import=[mem_store]", f"out={out}"]


def wait_for(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 90
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def rows(text: str) -> list[dict[str, float]]:
    read = [json.loads(line) for line in text.splitlines()]
    return [{name: row[name] for name in row if name not in TIMES} for row in read]


def test_a_folder_may_be_removed_while_it_is_listed(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rotation removes sharded checkpoints while the mirror looks for changes."""
    old, new = (tmp_path / "run" / "checkpoints" / f"step_{step}" for step in (1, 2))
    for folder in (old, new):
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text("{}")
    scan = os.scandir

    def remove_and_scan(path: Any) -> Any:
        if str(path) == str(old):
            old.rename(tmp_path / "removed")
        return scan(path)

    monkeypatch.setattr(os, "scandir", remove_and_scan)
    monkeypatch.setattr(mirror, "TRIES", 1)
    with mirror.mirrored(OUT, tmp_path / "run", {}):
        pass
    assert [*addresses.walk(OUT)] == ["checkpoints/step_2/manifest.json"]


def test_trains_resumes_exports_and_evaluates(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    often = ("train.checkpoint_every=2 steps", "train.keep_checkpoints=2")
    assert main(["train", *words(tmp_path, OUT, *often, "train.stop_at=5")]) == 75
    said = capsys.readouterr().out
    assert f"checkpoint saved in {OUT}/checkpoints" in said
    assert "no locks there" in said
    names = set(addresses.walk(OUT))
    steps = {f"checkpoints/step_00000000{step}" for step in (4, 5)}
    saved = {name for name in names if name.startswith("checkpoints/step_")}
    assert saved == {step + ending for step in steps for ending in (".pt", ".json")}
    files = {"config.yaml", "environment.json", "log.txt", "metrics.jsonl", "status.json"}
    assert files | {"report.html"} <= names
    assert not [name for name in names if ".tmp" in name or ".lock" in name]
    assert json.loads(addresses.read_bytes(f"{OUT}/status.json"))["state"] == "interrupted"

    monkeypatch.setenv("SELFTASK_CACHE", str(tmp_path / "machine_2"))
    assert main(["train", *words(tmp_path, OUT, *often)]) == 0
    said = capsys.readouterr().out
    assert "resumed from" in said
    assert "step 5" in said
    assert OUT in said.splitlines()[-1]
    assert main(["train", *words(tmp_path, OUT, *often)]) == 0
    assert f"RUN finished already: {OUT} is complete" in capsys.readouterr().out
    assert json.loads(addresses.read_bytes(f"{OUT}/status.json"))["state"] == "finished"

    assert main(["train", *words(tmp_path, str(tmp_path / "plain"), *often)]) == 0
    plain = tmp_path / "plain"
    assert rows(addresses.read_bytes(f"{OUT}/metrics.jsonl").decode()) == rows(
        (plain / "metrics.jsonl").read_text()
    )
    theirs = torch.load(plain / "export/backbone.pt")
    (tmp_path / "ours.pt").write_bytes(addresses.read_bytes(f"{OUT}/export/backbone.pt"))
    ours = torch.load(tmp_path / "ours.pt")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_run_at_an_address_is_a_model(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *words(tmp_path, OUT, "train.max_steps=2")]) == 0
    plugin, data = "import=[mem_store]", f"data={tiny.digits_file(tmp_path)}"
    trusted = ("trust=true", plugin)  # of a run that names code of its own
    exported = addresses.read_bytes(f"{OUT}/export/backbone.pt")
    assert main(["export", OUT, *trusted]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"{OUT}/export/backbone.pt"
    assert addresses.read_bytes(f"{OUT}/export/backbone.pt") == exported
    assert main(["export", f"{OUT}/export/backbone.pt", "--out", "mem://bucket/x", plugin]) == 0
    for model in (OUT, f"{OUT}/export/backbone.pt", "mem://bucket/x"):
        capsys.readouterr()
        assert main(["eval", "knn", model, data, "k=[5]", *trusted]) == 0
        assert 0 < json.loads(capsys.readouterr().out.splitlines()[-1])["knn_top1"] <= 1
    assert b"knn_top1" in addresses.read_bytes(f"{OUT}/evaluations.jsonl")
    assert main(["features", OUT, data, "out=mem://bucket/features", *trusted]) == 0
    assert set(addresses.list_names("mem://bucket/features")) == {
        *("features.npy", "features.json", "images.csv")
    }
    assert main(["features", OUT, data, "out=mem://bucket/features", *trusted]) == 2
    assert "features.npy exists already" in capsys.readouterr().err
    for out, start in (("a", f"init.backbone={OUT}"), ("b", f"resume={step_of_run(2)}")):
        assert main(["train", *words(tmp_path, out, "train.max_steps=3", start)]) == 0
    assert "resumed from" in capsys.readouterr().out
    for folder in (OUT, f"{OUT}/checkpoints"):
        assert main(["train", *words(tmp_path, "c", "train.max_steps=3", f"resume={folder}")]) == 2
        assert f"name one of its checkpoints, such as {step_of_run(2)}" in capsys.readouterr().out
    assert main(["eval", "knn", "mem://bucket/none", data, plugin]) == 2
    assert "mem://bucket/none" in capsys.readouterr().err


def manifest_is_whole(address: str) -> bool:
    """Return True if an upload is over: in this store, a part of an object is seen before."""
    if not addresses.exists(address):
        return False
    with suppress(ValueError):
        json.loads(addresses.read_bytes(address))
        return True
    return False


def step_of_run(step: int) -> str:
    return f"{OUT}/checkpoints/step_{step:09d}.pt"


@pytest.mark.slow
def test_a_killed_run_goes_on_elsewhere(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    often = "train.checkpoint_every=1 steps"
    sleeps = "hooks.fault_injection={at: 5, kind: sleep}"
    command = [sys.executable, "-m", "selftask", "train"]
    process = subprocess.Popen([*command, *words(tmp_path, OUT, often, sleeps)])
    wait_for(lambda: manifest_is_whole(f"{OUT}/checkpoints/step_000000004.json"))
    process.send_signal(signal.SIGKILL)
    process.wait()

    checkpoints = "bucket%2Fruns%2Fa%2Fcheckpoints%2Fstep_"
    (store / f"{checkpoints}000000009.pt").write_bytes(b"cut off")
    whole = (store / f"{checkpoints}000000004.json").read_bytes()
    shutil.copy(store / f"{checkpoints}000000004.pt", store / f"{checkpoints}000000005.pt")
    (store / f"{checkpoints}000000005.json").write_bytes(whole[: len(whole) // 2])
    (store / "bucket%2Fruns%2Fa%2Fstatus.json").write_bytes(b"")
    monkeypatch.setenv("SELFTASK_CACHE", str(tmp_path / "machine_2"))
    done = subprocess.run(
        [*command, *words(tmp_path, OUT, often, sleeps)], capture_output=True, text=True, check=True
    )
    assert "step_000000004.pt: step 4" in done.stdout
    assert main(["train", *words(tmp_path, str(tmp_path / "plain"), often)]) == 0
    assert rows(addresses.read_bytes(f"{OUT}/metrics.jsonl").decode()) == rows(
        (tmp_path / "plain/metrics.jsonl").read_text()
    )


@pytest.mark.slow
def test_two_ranks_and_a_dead_one(store: Path, tmp_path: Path) -> None:
    more = ("launch.processes=2", "train.checkpoint_every=1 steps")
    fault = "hooks.fault_injection={at: 3, kind: kill, rank: 0}"
    command = [sys.executable, "-m", "selftask", "train"]
    died = subprocess.run([*command, *words(tmp_path, OUT, *more, fault)], check=False)
    assert died.returncode != 0
    assert json.loads(addresses.read_bytes(f"{OUT}/status.json"))["state"] == "failed"
    assert b"RUN FAILED" in addresses.read_bytes(f"{OUT}/log.txt").splitlines()[-1]
    subprocess.run([*command, *words(tmp_path, OUT, *more, fault)], check=True)
    assert json.loads(addresses.read_bytes(f"{OUT}/status.json"))["state"] == "finished"


def test_what_a_store_cannot_do_is_said(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["submit", *words(tmp_path, OUT), "--dry-run"]) == 2
    assert f"out={OUT}: a job's scripts and logs need a folder" in capsys.readouterr().err
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    asked = words(tmp_path, OUT, "launch.nodes=2", "launch.processes=1")
    assert main(["train", *asked]) == 2
    assert f"out={OUT}: an address is for the ranks of one machine" in capsys.readouterr().err


def test_uploads_in_an_order_that_a_kill_may_cut(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    (folder / "checkpoints/step_2").mkdir(parents=True)
    for name in ("checkpoints/step_1.json", "checkpoints/step_2/manifest.json", "status.json"):
        (folder / name).write_text('{"files": {}}')
    for name in ("checkpoints/step_1.pt", "checkpoints/step_2/rest.pt", "metrics.jsonl", ".lock"):
        (folder / name).write_text("x")
    sent: list[str] = []
    upload = addresses.upload
    monkeypatch.setattr(
        addresses,
        "upload",
        lambda path, to: (sent.append(to.removeprefix(f"{OUT}/")), upload(path, to)),
    )
    with mirror.mirrored(OUT, folder, {}) as flush:
        flush()
        assert sent == [
            "metrics.jsonl",
            *("checkpoints/step_1.pt", "checkpoints/step_2/rest.pt"),
            *("checkpoints/step_1.json", "checkpoints/step_2/manifest.json"),
            "status.json",
        ]
        sent.clear()
        (folder / "metrics.jsonl").write_text("xx")
        (folder / "checkpoints/step_1.pt").write_text("again")
        (folder / "checkpoints/step_2/rest.pt").unlink()
        flush()
        assert sent == ["metrics.jsonl", "checkpoints/step_1.pt", "checkpoints/step_1.json"]
        assert not addresses.exists(f"{OUT}/checkpoints/step_2/rest.pt")

        removed: list[str] = []
        remove = addresses.remove
        monkeypatch.setattr(
            addresses, "remove", lambda at: (removed.append(at.removeprefix(f"{OUT}/")), remove(at))
        )
        for suffix in ("pt", "json"):
            (folder / f"checkpoints/step_1.{suffix}").unlink()
        flush()
        assert removed == ["checkpoints/step_1.json", "checkpoints/step_1.pt"]


def test_fetches_whole_checkpoints_that_are_not_here_yet(store: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    checkpoints = folder / "checkpoints"
    checkpoints.mkdir(parents=True)

    def put(name: str, content: str) -> None:
        (tmp_path / "sent").write_text(content)
        addresses.upload(tmp_path / "sent", f"{OUT}/{name}")

    def put_checkpoint(step: int, content: str) -> None:
        put(f"checkpoints/step_{step}.pt", content)
        entry = {"bytes": len(content), "xxh3_128": f"of {content}"}
        put(f"checkpoints/step_{step}.json", json.dumps(entry))

    put("metrics.jsonl", "{}")
    put_checkpoint(1, "first")
    put_checkpoint(2, "second")
    put("checkpoints/step_3.pt", "cut off: it has no manifest")
    (checkpoints / "step_7.pt").write_text("of an earlier attempt, not at the address")
    sent = mirror.fetch_run(OUT, folder, num_checkpoints=1)
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step_2.json", "step_2.pt"]
    here = (folder / "metrics.jsonl").stat()
    assert sent["metrics.jsonl"] == (here.st_mtime_ns, here.st_size)
    assert sent["checkpoints/step_1.pt"] == (0, 0), "it is not here"

    (checkpoints / "step_2.pt").write_text("sec")  # killed during the download
    mirror.fetch_run(OUT, folder)
    assert (checkpoints / "step_2.pt").read_text() == "second"
    assert (checkpoints / "step_1.pt").read_text() == "first"
    put_checkpoint(2, "SECOND")  # by another machine, of the same length
    mirror.fetch_run(OUT, folder)
    assert (checkpoints / "step_2.pt").read_text() == "SECOND"


def test_what_was_written_before_an_error_is_uploaded(store: Path, tmp_path: Path) -> None:
    """Such as the checkpoint of an interrupted run."""
    path = tmp_path / "run/checkpoints/step_1.pt"
    path.parent.mkdir(parents=True)

    def train() -> None:
        path.write_text("x")
        raise ValueError("in training")

    with pytest.raises(ValueError, match="in training"), mirror.mirrored(OUT, tmp_path / "run", {}):
        train()
    assert addresses.read_bytes(f"{OUT}/checkpoints/step_1.pt") == b"x"


def test_a_store_that_refuses_is_a_failed_run(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/log.txt").write_text("x")
    monkeypatch.setattr(mirror, "EVERY_S", 0.01)
    os.rmdir(store)
    with (
        pytest.raises(RunError, match=f"^out={OUT}: cannot be written .* the files of the run are"),
        mirror.mirrored(OUT, tmp_path / "run", {}),
    ):
        pass


def test_telemetry_is_off(store: Path) -> None:
    assert addresses.manager(OUT)._enable_logging is False


def test_an_unknown_scheme() -> None:
    with pytest.raises(UserError, match=r"^nosuch://x: .*nosuch"):
        addresses.exists("nosuch://x")
