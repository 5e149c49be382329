"""How a run ends: exit code, last line and status.json say the same, whatever happened."""

from __future__ import annotations

import itertools
import os
import re
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from in_process import last_line, train
from PIL import Image
from submitit.core.job_environment import SignalHandler

import tiny
from selftask.cli.main import main
from selftask.distributed import process_group
from selftask.run import environment


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
    row = tiny.rows(folder / "run")[-1]
    assert row["epoch"] > 0 and row["loss"] > 0 and "lr" in row
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
    assert re.match(r"RUN finished: 1 step in \d s", last_line(capsys))


def test_a_folder_in_place_of_the_log(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "run/log.txt").mkdir(parents=True)
    assert train(folder) == 2
    assert "run: the log cannot be opened: [Errno 21] Is a dir" in capsys.readouterr().err


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


@pytest.mark.parametrize("launcher", ["shell", "submitit"])
def test_a_signal_before_the_first_step(
    launcher: str, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the ranks look for one another, the hook that saves on a signal is not there yet."""
    jobs = SignalHandler(None, None, None)  # type: ignore[arg-type]
    handler = {"shell": signal.SIG_DFL, "submitit": jobs.bypass}[launcher]
    signal.signal(signal.SIGTERM, handler)
    monkeypatch.setattr(
        process_group, "join_world", lambda *_, **__: os.kill(os.getpid(), signal.SIGTERM)
    )
    try:
        assert train(folder) == 128 + signal.SIGTERM
        assert signal.getsignal(signal.SIGTERM) == handler
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    assert last_line(capsys).startswith("RUN interrupted by SIGTERM at step 0; left at once; ")
    assert tiny.status(folder / "run")["state"] == "interrupted"


def test_a_signal_behind_an_error_of_a_library(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGTERM in the middle of an import: torch fails to import the rest as it cleans up."""

    def join(*_: object, **__: object) -> None:
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            raise AttributeError("module 'sympy' has no attribute 'logic'")

    monkeypatch.setattr(process_group, "join_world", join)
    assert train(folder) == 128 + signal.SIGTERM
    assert last_line(capsys).startswith("RUN interrupted by SIGTERM at step 0; left at once; ")
    assert tiny.status(folder / "run")["state"] == "interrupted"


def test_a_signal_after_a_failed_run_in_the_same_job(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The failure is that of another run; SLURM sends SIGTERM once more after a requeue."""
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    assert train(folder, "import=[trouble]", "hooks.trouble={kind: raise}") == 1
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    monkeypatch.setattr(environment, "write", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    try:
        assert train(folder) == 128 + signal.SIGTERM
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        for number in (signal.SIGTERM, signal.SIGUSR2):
            signal.signal(number, signal.SIG_DFL)
    assert last_line(capsys).startswith("RUN interrupted by SIGTERM at step 0; left at once; ")


def test_a_full_disk_is_told_where_it_cannot_be_written_down(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(folder, "import=[trouble]", "hooks.trouble={kind: full}") == 1
    assert re.fullmatch(
        r"RUN FAILED at step 2 on rank 0: \S*trouble.py:\d+: OSError: .* No space left on device; "
        "make room and start the same command again: it continues",
        last_line(capsys),
    )


def test_a_folder_that_cannot_be_reached_any_more(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run has failed, with exit code 1: nothing in its config is wrong."""
    assert train(folder, "import=[trouble]", "hooks.trouble={kind: unreachable}") == 1
    assert re.fullmatch(
        r"RUN FAILED at step 2 on rank 0: OSError: .*symbolic links: '\S*/run/\S+'",
        last_line(capsys),
    )


def test_a_bug_is_told_in_full(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = ("import=[trouble]", "hooks.trouble={kind: raise}")
    assert train(folder, *more) == 1
    out = capsys.readouterr().out
    assert "trouble.py" in out
    assert "Traceback" in out
    expected = r"(\S*trouble\.py:\d+: ZeroDivisionError: trouble on purpose)"
    last = re.fullmatch(f"RUN FAILED at step 2 on rank 0: {expected}", out.splitlines()[-1])
    assert last is not None
    status = tiny.status(folder / "run")
    assert (status["state"], status["step"]) == ("failed", 2)
    assert status["error"] == last[1]
    assert "ZeroDivisionError" in (folder / "run/errors/rank0.txt").read_text()
    log = (folder / "run/log.txt").read_text()
    assert last[0] in log.splitlines()[-1]


def test_a_kept_graph(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(folder, "import=[trouble]", "hooks.trouble={kind: graph}") == 1
    assert "a result of an earlier step was kept with its graph; keep x.d" in last_line(capsys)


def test_a_loss_that_is_not_finite(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Found at the next log line or save, then searched from the last checkpoint; never saved."""
    save = "train.checkpoint_every='2 steps'"
    trouble = ("import=[trouble]", "hooks.trouble={kind: nan, step: 3}")
    assert train(folder, *trouble, save, "train.log_every=10") == 1
    line = last_line(capsys)
    assert line.startswith("RUN FAILED at step 3 on rank 0: the loss is nan at step 3 on rank 0")
    assert "optimizer.lr" in line
    saved = sorted(path.name for path in (folder / "run/checkpoints").glob("*.pt"))
    assert saved == ["step_000000002.pt"]
    assert tiny.status(folder / "run")["state"] == "failed"


ANEW = """
import json, shutil
from selftask.hooks.base import Hook
from selftask.registry import register_hook

@register_hook("anew")
class Anew(Hook):
    priority = 5
    def on_step(self, task):
        if task.steps_done == 2:
            shutil.rmtree(task.out)
            task.out.mkdir()
            content = {"state": "running", "host": "elsewhere", "pid": 1, "started": 2.0}
            (task.out / "status.json").write_text(json.dumps(content))
            (task.out / "metrics.jsonl").write_text("of another run")
"""


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


REPLACED = {"state": "running", "host": "elsewhere", "pid": 1, "started": 2.0}


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ([], r"RUN FAILED at step 2 on rank 0: .*metrics.jsonl: was moved, removed or replaced"),
        (["train.log_every=9", "train.stop_at=2"], r"RUN FAILED at step 2 .* removed or replaced"),
        (["hooks.trouble={kind: raise}"], "RUN FAILED at step 2 on rank 0: .*trouble on purpose"),
    ],
    ids=["row", "checkpoint", "other error"],
)
def test_a_run_leaves_the_files_of_another_one_in_its_folder_alone(
    more: list[str], said: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "anew.py").write_text(ANEW)
    assert train(folder, "import=[anew, trouble]", "hooks.anew={}", *more) == 1
    assert re.match(said, last_line(capsys))
    assert tiny.status(folder / "run") == REPLACED
    assert {path.name for path in (folder / "run").iterdir()} == {"status.json", "metrics.jsonl"}


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
