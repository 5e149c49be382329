"""How a run ends: exit code, last line and status.json say the same, whatever happened."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from subprocess import PIPE

import numpy as np
import pytest
from PIL import Image

import tiny
from selftask.cli.main import main
from selftask.distributed import process_group
from selftask.errors import RunError, UserError
from selftask.logs import MetricsFile, read_metrics
from selftask.run import run_folder

EXTENSION = '''
import errno
from dataclasses import dataclass
import torch
from selftask.hooks.base import Hook
from selftask.registry import register_hook

@register_hook("trouble")
@dataclass(eq=False, kw_only=True)
class Trouble(Hook):
    """Makes trouble of a kind at a step."""
    kind: str = "raise"
    step: int = 2
    priority = 10

    def on_loss_and_meter(self, task):
        if task.steps_done + 1 == self.step and self.kind == "nan":
            task.last_batch.loss = task.last_batch.loss * torch.nan

    def on_step(self, task):
        if task.steps_done == self.step and self.kind == "raise":
            raise ZeroDivisionError("trouble on purpose")
        if task.steps_done == self.step and self.kind == "full":
            (task.out / "errors").write_text("no folder: nothing can be written into it")
            raise OSError(errno.ENOSPC, "No space left on device")
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forget_names: None) -> Path:
    (tmp_path / "trouble.py").write_text(EXTENSION)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_run_that_does_not_begin_leaves_no_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that is there stays; so does that of a run which began and failed."""
    (tmp_path / "file").write_text("no folder")
    stage = f"data.stage_to={tmp_path / 'file' / 'copies'}"
    (tmp_path / "mine").mkdir()
    (tmp_path / "runs" / "others").mkdir(parents=True)
    for out in ("new/inner/run", "runs/run", "mine"):
        words = tiny.overrides("simclr", tmp_path, out, stage)
        assert main(["train", "simclr/digits", *words]) == 2
        assert "data.stage_to" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["others"]
    assert (tmp_path / "mine" / "log.txt").exists()

    words = tiny.overrides("simclr", tmp_path, "failed", "hooks.memory_snapshot={}")
    assert main(["train", "simclr/digits", *words]) == 2
    assert tiny.status(tmp_path / "failed")["state"] == "failed"


def train(folder: Path, *more: str, out: str = "run") -> int:
    """``selftask train`` in this process."""
    return main(["train", "simclr/digits", *tiny.overrides("simclr", folder, out, *more)])


def last_line(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().out.splitlines()[-1]


def test_finished_and_again(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steps = "train={epochs: null, max_steps: %d}"  # counted in steps only
    assert train(folder, steps % 3) == 0
    assert last_line(capsys).startswith("RUN finished: 3 steps in ")
    status = tiny.status(folder / "run")
    assert (status["state"], status["step"]) == ("finished", 3)
    log = (folder / "run/log.txt").read_text()
    for fact in (
        r"simclr/digits, out=\S+/run, seed",
        r"step 3  epoch \S+  loss \d",
        "RUN finished",
    ):
        assert re.search(rf"(?m)^\d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d .*{fact}", log), fact
    before = {path: path.stat().st_mtime_ns for path in (folder / "run").rglob("*")}
    assert {"config.yaml", "environment.json", "log.txt", "metrics.jsonl", "status.json"} <= {
        path.name for path in before
    }

    assert train(folder, steps % 3) == 0
    assert last_line(capsys).startswith("RUN finished already")
    assert before == {path: path.stat().st_mtime_ns for path in (folder / "run").rglob("*")}

    assert train(folder, steps % 4) == 0  # a longer run goes on
    assert last_line(capsys).startswith("RUN finished: 4 steps")
    assert [row["step"] for row in tiny.rows(folder / "run")] == [1, 2, 3, 4]


def test_a_clock_that_is_set_back(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hours = itertools.count(2e9, -3600)
    monkeypatch.setattr(time, "time", lambda: next(hours))
    assert train(folder, "train.max_steps=1") == 0
    assert re.match(r"RUN finished: 1 steps in \d s", last_line(capsys))


def test_export_to_what_is_no_folder(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(folder, "train.stop_at=1") == 75
    (folder / "a_file").write_text("")
    assert main(["export", "run", "--out", "a_file"]) == 2
    assert re.search("error: export: .*a_file.*--out DIR", capsys.readouterr().err)
    assert main(["export", "run", "--out", "mine"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "mine/backbone.pt"


def test_a_folder_of_images_without_labels(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Images at any depth; an empty folder is told before anything starts."""
    draws = np.random.default_rng(0)
    for name in ("1.png", "2.JPG", "a/3.png", "a/b/4.png", "a/b/5.png", "c/6.png"):
        (folder / "images" / name).parent.mkdir(parents=True, exist_ok=True)
        pixels = draws.integers(0, 256, (32, 32, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / "images" / name)
    small = ("backbone={name: small_resnet, width: 8}", "image_size=32", "data.num_workers=0")
    words = [*small, "train={batch_size: 3, epochs: 2, threads: 1, device: cpu}", "out=run"]
    assert main(["train", "simclr", "data=images", *words]) == 0
    printed = capsys.readouterr().out
    assert "6 images, 4 folders, 0 unreadable" in printed
    assert printed.splitlines()[-1].startswith("RUN finished: 4 steps")
    (folder / "empty").mkdir()
    assert main(["train", "simclr", "data=empty", *words]) == 2
    assert re.search(r"no images.*\.png", capsys.readouterr().err)


def test_own_config_starts_the_same_run(folder: Path) -> None:
    assert train(folder, "train.max_steps=2") == 0
    config = folder / "run/config.yaml"
    assert main(["train", str(config), f"out={folder / 'twin'}"]) == 0
    assert tiny.rows(folder / "run") == tiny.rows(folder / "twin")


def test_interrupted(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(folder, "train.stop_at=3") == 75
    line = last_line(capsys)
    assert line.startswith("RUN interrupted by train.stop_at=3 at step 3; checkpoint saved in ")
    status = tiny.status(folder / "run")
    assert (status["state"], status["step"]) == ("interrupted", 3)
    assert status["by"] == "train.stop_at=3"


def test_a_signal_before_the_first_step(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the ranks look for one another, the hook that saves on a signal is not there yet."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # whatever a test before has left
    monkeypatch.setattr(
        process_group, "join_world", lambda *_, **__: os.kill(os.getpid(), signal.SIGTERM)
    )
    assert train(folder) == 128 + signal.SIGTERM
    assert last_line(capsys).startswith("RUN interrupted by SIGTERM at step 0; left at once; ")
    assert tiny.status(folder / "run")["state"] == "interrupted"
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_full_disk_is_told_where_it_cannot_be_written_down(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(folder, "import=[trouble]", "hooks.trouble={kind: full}") == 1
    assert re.fullmatch(
        "RUN FAILED at step 2 on rank 0: OSError: .* No space left on device; make room and start "
        "the same command again: it goes on",
        last_line(capsys),
    )


HOLDER = """
import fcntl, sys
lock = open(sys.argv[1], "a+")
fcntl.lockf(lock, fcntl.LOCK_EX)
lock.truncate(0)
print("process 7 on node3", file=lock, flush=True)
print("held", flush=True)
sys.stdin.read()
"""


def test_two_runs_in_one_folder(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(folder, "train.stop_at=1") == 75
    before = {path: path.read_bytes() for path in (folder / "run").rglob("*") if path.is_file()}
    command = [sys.executable, "-c", HOLDER, folder / "run" / ".lock"]
    with subprocess.Popen(command, stdin=PIPE, stdout=PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        assert train(folder) == 2
        other.communicate()
    expected = (
        "run: process 7 on node3 is training there; wait for it, stop it, or use another out="
    )
    assert expected in capsys.readouterr().err
    before.pop(folder / "run" / ".lock")
    assert all(path.read_bytes() == content for path, content in before.items())
    assert train(folder, "train.stop_at=2") == 75  # the lock ended with its process


def hold(folder: Path, job: str, host: str, seconds: float) -> subprocess.Popen[str]:
    """A process that has the folder's lock, as of a job on a host; touches it so long."""
    code = (
        "import fcntl, os, sys, time; f = open(sys.argv[1], 'a+'); fcntl.lockf(f, fcntl.LOCK_EX)\n"
        "f.truncate(0); print(sys.argv[2], file=f, flush=True); print('held', flush=True)\n"
        "end = time.monotonic() + float(sys.argv[3])\n"
        "while time.monotonic() < end: os.utime(sys.argv[1]); time.sleep(0.05)\n"
        "sys.stdin.read()"
    )
    words = [folder / run_folder.LOCK, f"process 7 on {host}\njob {job}", str(seconds)]
    command = [sys.executable, "-c", code, *words]
    process = subprocess.Popen(command, stdin=PIPE, stdout=PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


@pytest.mark.parametrize(
    ("job", "host", "taken"),
    [("12", "node3", True), ("13", "node3", False), ("12", socket.gethostname(), False)],
)
def test_a_requeued_job_takes_over_from_a_dead_node_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, job: str, host: str, taken: bool
) -> None:
    """An earlier attempt of the same job, on another machine, that gives no sign of life."""
    monkeypatch.setattr(run_folder, "TAKE_OVER_S", 0.4)
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    started = time.monotonic()
    with hold(tmp_path, job, host, seconds=1.0) as other:
        if taken:
            with run_folder.locked(str(tmp_path), first=True):
                assert time.monotonic() - started > 1.0  # as long as it lived, and a little more
        else:
            with (
                pytest.raises(UserError, match="process 7"),
                run_folder.locked(str(tmp_path), first=True),
            ):
                raise AssertionError("taken")
        other.communicate()


def test_a_run_gives_signs_of_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_folder, "TOUCH_S", 0.05)
    with run_folder.locked(str(tmp_path), first=True):
        lock = tmp_path / run_folder.LOCK
        os.utime(lock, (0, 0))
        time.sleep(0.5)
        assert lock.stat().st_mtime > 0


@pytest.mark.parametrize(
    ("out", "message"), [("a_file", "cannot be written to"), ("", "out is empty; give the folder")]
)
def test_no_folder_to_run_in(
    folder: Path, capsys: pytest.CaptureFixture[str], out: str, message: str
) -> None:
    (folder / "a_file").write_text("")
    assert main(["train", "simclr/digits", *tiny.overrides("simclr", folder), f"out={out}"]) == 2
    assert message in capsys.readouterr().err


def test_what_a_power_cut_emptied(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(folder, "train.stop_at=2") == 75
    (folder / "run" / "status.json").write_text("")
    assert train(folder, "train.stop_at=3") == 75
    (folder / "run" / "config.yaml").write_text("")
    assert train(folder) == 2
    assert "config.yaml: is damaged" in capsys.readouterr().err


def test_a_bug_is_told_in_full(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = ("import=[trouble]", "hooks.trouble={kind: raise}")
    assert train(folder, *more) == 1
    out = capsys.readouterr().out
    assert "trouble.py" in out
    assert "Traceback" in out
    expected = "RUN FAILED at step 2 on rank 0: ZeroDivisionError: trouble on purpose"
    assert out.splitlines()[-1] == expected
    status = tiny.status(folder / "run")
    assert (status["state"], status["step"]) == ("failed", 2)
    assert status["error"] == "ZeroDivisionError: trouble on purpose"
    assert "ZeroDivisionError" in (folder / "run/errors/rank0.txt").read_text()
    assert expected in (folder / "run/log.txt").read_text().splitlines()[-1]


def test_a_loss_that_is_not_finite(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Found at the next log line or save, then searched from the last checkpoint; never saved."""
    save = "train.checkpoint_every='2 steps'"
    trouble = ("import=[trouble]", "hooks.trouble={kind: nan, step: 3}")
    assert train(folder, *trouble, save, "train.log_every=10") == 1
    line = last_line(capsys)
    assert line.startswith("RUN FAILED at step 2 on rank 0: the loss is nan at step 3 on rank 0")
    assert "optimizer.lr" in line
    saved = sorted(path.name for path in (folder / "run/checkpoints").glob("*.pt"))
    assert saved == ["step_000000002.pt"]
    assert tiny.status(folder / "run")["state"] == "failed"


def test_a_network_that_diverged(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its weights and embeddings are not finite either, and the line at hand is the log's."""
    assert train(folder, "optimizer.lr=1e30", "train.log_every=1") == 1
    assert re.search(
        r"RUN FAILED at step \d on rank 0: the loss is (nan|inf) at", last_line(capsys)
    )


def test_the_step_of_a_bad_loss_when_accumulating(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ("train.step=accumulate", "train.accumulate=2", "train.log_every=10")
    trouble = ("import=[trouble]", "hooks.trouble={kind: nan, step: 5}")
    assert train(folder, *more, *trouble) == 1
    assert "the loss is nan at step 5 on rank 0" in last_line(capsys)


def test_too_many_bad_files(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from PIL import Image

    photos = folder / "photos"
    photos.mkdir()
    for number in range(64):
        Image.new("RGB", (32, 32), (number, 0, 0)).save(photos / f"{number:02}.png")
    (photos / "07.png").write_bytes(b"no image")
    words = tiny.overrides("simclr", folder, "run", "train.max_steps=2")
    words = [word for word in words if not word.startswith("data=")]
    command = ["train", "simclr/digits", f"data={photos}", *words]
    assert main([*command, "data.max_unreadable=0.001"]) == 2
    out = capsys.readouterr().out
    last = out.splitlines()[-1]
    assert last.startswith("RUN FAILED at step 0 ")
    assert "1 of 64 images (1.56%) cannot be read, more than data.max_unreadable=0.001" in last
    assert last.endswith(f"; all of them: {folder}/run/bad_files.txt")
    assert "Traceback" not in out
    assert "07.png" in (folder / "run/bad_files.txt").read_text()
    assert tiny.status(folder / "run")["state"] == "failed"
    assert main([*command, "data.max_unreadable=1"]) == 0
    assert len((folder / "run/bad_files.txt").read_text().splitlines()) == 1
    (photos / "07.png").write_bytes((photos / "08.png").read_bytes())
    (photos / "09.png").write_bytes(b"no image")
    assert main([*command, "data.max_unreadable=1", "resume=never"]) == 0
    (line,) = (folder / "run/bad_files.txt").read_text().splitlines()
    assert "09.png" in line, "a run that starts anew starts its list anew"


@pytest.mark.parametrize("without", ["data", "data.val"])
def test_evaluations_without_labels_are_told(folder: Path, without: str) -> None:
    """Who gives data.val waits for its numbers."""
    val = f"data.val={tiny.digits_file(folder)}"
    knn = "eval.evaluations={knn: {}}"
    assert train(folder, val, f"{without}.labels=null", knn, "train.max_steps=1") == 0
    text = (folder / "run/log.txt").read_text()
    assert f"no knn while training: the images of {without} have no labels" in text
    assert "knn_top1" not in text


@pytest.mark.parametrize("labelled", [True, False])
def test_meters_without_labelled_images_are_told(tmp_path: Path, labelled: bool) -> None:
    val = [f"data.val={tiny.digits_file(tmp_path)}"] if labelled else []
    words = ["meters.accuracy={topk: [1]}", "train.max_steps=1", *val]
    words = tiny.overrides("supervised", tmp_path, "run", *words)
    assert main(["train", "supervised/digits", *words]) == 0
    text = (tmp_path / "run/log.txt").read_text()
    told = "meters (accuracy) measure nothing: data.val has no labelled images"
    assert (told in text) == (not labelled)
    assert ("test_accuracy_top_1" in tiny.rows(tmp_path / "run")[-1]) == labelled


def test_before_the_run_nothing_is_written(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(folder, "train.epoch=3") == 2
    error = capsys.readouterr().err
    assert "did you mean 'train.epochs'?" in error
    assert "Traceback" not in error
    assert not (folder / "run").exists()


def test_a_row_that_cannot_be_written_ends_the_run_in_one_line(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.write({"step": 1})
    file.close()
    with pytest.raises(RunError, match=r"^/dev/full: a row could not be written: No space"):
        MetricsFile(Path("/dev/full")).write({"step": 2})
    with pytest.raises(RunError, match=f"^{re.escape(str(tmp_path))}: [Ii]s a directory$"):
        MetricsFile(tmp_path)


def test_metrics_are_cut_back(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    rows = MetricsFile(path)
    rows.write({"step": 1, "loss": 0.5})
    kept = rows.length
    rows.write({"step": 2, "loss": float("nan")})
    rows.close()
    assert read_metrics(path)[1] == {"step": 2, "loss": None}
    with path.open("ab") as file:
        file.write(b'{"step": 3, "lo')  # killed while it wrote
    assert [row["step"] for row in read_metrics(path)] == [1, 2]
    again = MetricsFile(path)
    again.cut(kept)
    again.write({"step": 2, "loss": 0.25})
    again.close()
    lines = path.read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"step": 1, "loss": 0.5},
        {"step": 2, "loss": 0.25},
    ]


def test_meters_of_class_scores_need_a_method_that_gives_them(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = f"data.val={tiny.digits_file(folder)}"
    assert train(folder, "meters={accuracy: {}}", data) == 2
    assert "method.name=simclr gives none" in last_line(capsys)


def test_more_guesses_than_classes_are_told_before_the_first_epoch(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = f"data.val={tiny.digits_file(folder)}"
    words = tiny.overrides("supervised", folder, "run", "meters.accuracy.topk=[1,11]", data)
    assert main(["train", "supervised/digits", *words]) == 2
    expected = (
        "RUN FAILED at step 0 on rank 0: meters.accuracy.topk=[1, 11]: there are only 10 classes"
    )
    assert last_line(capsys) == expected
