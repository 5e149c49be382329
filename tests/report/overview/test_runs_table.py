"""``selftask runs``: states, ages and newest values of all runs below a folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import tiny
from run_folders import row, write_run
from selftask.cli.main import main
from selftask.report.overview.durations import show_seconds
from selftask.report.overview.find import find_runs
from selftask.report.overview.run_line import read_line
from selftask.report.overview.table import smallest_first
from selftask.report.record import RunRecord
from selftask.slurm import queue


def dead_process() -> int:
    done = subprocess.Popen(["true"])
    done.wait()
    return done.pid


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One run in each state."""
    monkeypatch.chdir(tmp_path)
    below = tmp_path / "runs"
    write_run(below / "lr_10", loss=1.0, knn=0.9)
    write_run(below / "lr_2", loss=1.5, knn=0.7, config={"method": {"name": "moco"}})
    write_run(below / "deep/er/going", "running", steps=5, knn=None)
    write_run(below / "failed", "failed", steps=3, log="RUN FAILED at step 3 on rank 0: <b>")
    write_run(below / "stopped", "interrupted", steps=4, log="RUN interrupted by SIGINT")
    write_run(below / "killed", "running", steps=4, pid=dead_process())
    write_run(below / "silent", "running", steps=4, age_s=600.0)
    write_run(below / "no_heartbeat", "running", steps=4, host="node7")
    (below / "no_heartbeat/.lock").touch()
    os.utime(below / "no_heartbeat/.lock", (time.time() - 400,) * 2)
    write_run(below / "torn", steps=4)
    (below / "torn/status.json").write_text('{"state": "runn')
    write_run(below / "no_status", None, steps=4)
    return below


def listed(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, object]]:
    assert main(["runs", *words, "--json"]) == 0
    printed: list[dict[str, object]] = json.loads(capsys.readouterr().out)
    return printed


def test_states_and_reasons(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    by_name = {str(run["run"]): run for run in listed(capsys)}
    states = {Path(name).name: (run["state"], run["note"]) for name, run in by_name.items()}
    assert states["lr_2"] == ("finished", "") and states["going"] == ("running", "")
    assert states["failed"] == ("failed", "RUN FAILED at step 3 on rank 0: <b>")
    assert states["stopped"] == ("interrupted", "RUN interrupted by SIGINT")
    assert states["killed"][0] == "lost" and "the same command resumes" in str(states["killed"][1])
    assert states["silent"][0] == "hung"
    assert "no row or event for 10 min, usually one every 2 s" in str(states["silent"][1])
    assert states["no_heartbeat"][0] == "hung"
    assert "no heartbeat of process" in str(states["no_heartbeat"][1])
    assert states["torn"][0] == "unreadable" and "status.json: is no JSON" in str(states["torn"][1])
    assert states["no_status"] == ("unknown", "status.json is missing")
    going = by_name["runs/deep/er/going"]
    assert (going["step"], going["total_steps"], going["share"]) == (5, 20, 0.25)
    assert 38 < float(str(going["eta_s"])) <= 40


def test_a_long_evaluation_is_no_hang(tmp_path: Path) -> None:
    going = write_run(tmp_path / "run", "running", steps=9, age_s=600.0)
    text = (going / "metrics.jsonl").read_text()
    for seconds, state in ((100.0, "hung"), (350.0, "running")):
        evaluation = json.dumps({"step": 9, "knn_top1": 0.5, "eval_s": seconds})
        (going / "metrics.jsonl").write_text(f"{text}{evaluation}\n")
        os.utime(going / "metrics.jsonl", (time.time() - 600,) * 2)
        assert read_line(going).state == RunRecord.read(going).state == state


def test_a_run_that_resumes_may_take_its_time(tmp_path: Path) -> None:
    resumed = write_run(tmp_path / "run", "running", steps=9, age_s=300.0)
    assert read_line(resumed).state == "running"


def test_a_killed_run_lasted_until_its_last_event(tmp_path: Path) -> None:
    """Its status is that of its start."""
    killed = write_run(tmp_path / "run", "running", pid=dead_process(), age_s=7200.0)
    later = {"time": "2100-01-01T00:00:00+00:00", "step": 9, "event": "checkpoint", "text": ""}
    (killed / "events.jsonl").write_text(json.dumps(later) + "\n")
    ended = RunRecord.read(killed).ended
    assert ended is not None and ended.isoformat().startswith(("2099", "2100"))


def test_the_table_sorts_filters_and_adds_notes(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["runs", "sort=knn_top1", "state=finished,failed"]) == 0
    lines = capsys.readouterr().out.splitlines()
    heads = "RUN METHOD STATE STEP DONE loss knn_top1 images_per_s AGE ETA"
    assert lines[0].split() == heads.split()
    assert [line.split()[0] for line in lines[1:4]] == ["runs/lr_10", "runs/lr_2", "runs/failed"]
    assert lines[1].split()[1:8] == ["simclr", "finished", "20/20", "100%", "1", "0.9", "1,409"]
    assert lines[4].strip() == "RUN FAILED at step 3 on rank 0: <b>"
    assert lines[-1] == "3 runs: 2 finished, 1 failed"
    order = [Path(str(run["run"])).name for run in listed(capsys, "sort=loss", "state=finished")]
    assert order == ["lr_10", "lr_2"]
    order = [Path(str(run["run"])).name for run in listed(capsys, "sort=-loss", "state=finished")]
    assert order == ["lr_2", "lr_10"]
    names = [Path(str(run["run"])).name for run in listed(capsys, "sort=run", "state=finished")]
    assert names == ["lr_2", "lr_10"], "numbers by their value"
    assert main(["runs", "columns=lr", "state=finished"]) == 0
    assert capsys.readouterr().out.splitlines()[0].split()[5:] == ["lr", "AGE", "ETA"]


def test_jobs_of_slurm_are_in_the_same_table(
    runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the state in the queue; also those that wait and have no folder yet."""
    submitted = {name: (runs / "sweep" / name).absolute() for name in ("going", "back", "waiting")}
    write_run(submitted["going"], "running", steps=5, host="node7")
    write_run(submitted["back"], "requeued", steps=5, host="node7")
    queue.note(runs / "sweep", {path: f"7_{i}" for i, path in enumerate(submitted.values())})
    in_slurm = {"7_0": "RUNNING", "7_1": "PENDING (BeginTime)", "7_2": "PENDING (Resources)"}
    monkeypatch.setattr(queue, "queue", lambda ids: {job: in_slurm[job] for job in ids})
    by_name = {Path(str(run["run"])).name: run for run in listed(capsys)}
    states = {name: (by_name[name]["job"], by_name[name]["state"]) for name in submitted}
    assert states == {
        "going": ("7_0", "running"),
        "back": ("7_1", "requeued, pending (begintime)"),
        "waiting": ("7_2", "pending (resources)"),
    }
    assert by_name["lr_2"]["job"] == ""
    pending = {Path(str(run["run"])).name for run in listed(capsys, "state=pending")}
    assert pending == {"back", "waiting"}
    assert main(["runs", "state=pending"]) == 0
    assert capsys.readouterr().out.startswith("JOB  RUN ")
    in_slurm |= {"7_0": "SUSPENDED", "7_2": "CONFIGURING"}
    for state, name in (("suspended", "going"), ("configuring", "waiting")):
        assert [Path(str(run["run"])).name for run in listed(capsys, f"state={state}")] == [name]
    assert listed(capsys, "state=cancelled") == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["sort=knn_top"], "no run has a column 'knn_top'; did you mean 'knn_top1'?"),
        (["columns=los"], "did you mean 'loss'?"),
        (["state=fail"], "state=fail: did you mean 'failed'?"),
        (["srt=loss"], "did you mean 'sort'?"),
        (["elsewhere"], "elsewhere: no such folder"),
        (["s3://bucket/runs"], "an address"),
        (["--watch"], "--watch needs a terminal"),
    ],
)
def test_bad_arguments_of_runs_are_refused(
    runs: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["runs", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_folder_that_may_not_be_read(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As root, permissions do not count: the system's answer is given instead."""

    def refuse(path: Path, *args: object, **more: object) -> int:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "open", refuse)
    line = read_line(runs / "lr_2")
    assert line.state == "unreadable"
    assert line.note == "cannot be read: status.json: permission denied"


def test_a_row_that_is_being_written_and_a_long_file(tmp_path: Path) -> None:
    """Only the end of the file is read; a cut line is left out."""
    folder = write_run(tmp_path / "long", "running", steps=0, knn=None)
    rows = [json.dumps(row(step, 1.0, padding=0.123456789)) for step in range(1, 3001)]
    rows.insert(-5, json.dumps({"step": 2995, "epoch": 748.75, "knn_top1": 0.25, "eval_s": 1.0}))
    text = "\n".join(rows)
    (folder / "metrics.jsonl").write_text(f"{text}\n" + '{"step": 3001, "loss": 0.')
    line = read_line(folder)
    assert (line.step, line.values["knn_top1"], line.values["loss"]) == (3000, 0.25, 1.0)
    assert line.evaluations == ("knn_top1",)


def test_an_evaluation_before_thousands_of_rows(tmp_path: Path) -> None:
    """Its column was missing, and a run was said to hang while the next one went on."""
    folder = write_run(tmp_path / "run", "running", steps=0, knn=None)
    evaluation = {"step": 0, "epoch": 0.0, "knn_top1": 0.25, "eval_s": 900.0}
    rows = [evaluation, *(row(step, 1.0) for step in range(1, 2001))]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    for path in folder.iterdir():
        os.utime(path, (time.time() - 1000,) * 2)
    line = read_line(folder)
    assert line.evaluations == ("knn_top1",) and line.values["knn_top1"] == 0.25
    assert line.state == RunRecord.read(folder).state == "running"


def test_a_thousand_runs_within_two_seconds_and_without_torch(tmp_path: Path) -> None:
    first = write_run(tmp_path / "runs/run_0", steps=200)
    files = {path.name: path.read_bytes() for path in first.iterdir()}
    for number in range(1, 1000):
        folder = tmp_path / f"runs/run_{number}"
        folder.mkdir()
        for name, content in files.items():
            (folder / name).write_bytes(content)
    code = (
        "import sys, time; from selftask.cli.main import main\n"
        "begun = time.process_time(); main(['runs'])\n"
        "print('SECONDS', time.process_time() - begun)\n"
        "print('HEAVY', sorted({'torch', 'numpy', 'rich', 'omegaconf'} & set(sys.modules)))"
    )
    done = tiny.run([sys.executable, "-c", code], tmp_path)
    *table, seconds, heavy = done.stdout.splitlines()
    assert done.returncode == 0 and heavy == "HEAVY []", done.stderr
    assert table[-1] == "1000 runs: 1000 finished" and table[11].startswith("runs/run_10 ")
    assert float(seconds.split()[1]) < 2.0


def test_folders_of_runs_are_not_searched_for_runs(tmp_path: Path) -> None:
    write_run(tmp_path / "a")
    write_run(tmp_path / "a/checkpoints/b")
    write_run(tmp_path / ".hidden/c")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    assert find_runs(tmp_path).runs == [tmp_path / "a"]
    assert find_runs(tmp_path / "a").runs == [tmp_path / "a"]


def test_a_folder_that_vanishes_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scandir = os.scandir
    (tmp_path / "temporary").mkdir()
    write_run(tmp_path / "a")

    def scan(folder: Path) -> object:
        if Path(folder).name == "temporary":
            raise FileNotFoundError(2, "No such file or directory", str(folder))
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", scan)
    assert find_runs(tmp_path).runs == [tmp_path / "a"]


def test_which_values_are_good() -> None:
    small = "loss val_loss chance_ratio step_s_median eta_s memory_mb sketch/data_wait ms_read"
    small += " correspondence_distance geolocation_median_km"
    large = "emb_std ema_svm_top1 imagenet_sketch/knn_top1 glossy/knn_top1 images_per_s"
    assert all(map(smallest_first, small.split()))
    assert not any(map(smallest_first, [*large.split(), "geolocation_25km"]))


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.4, "0 s"),
        (59.6, "1 min"),
        (3599, "1 h"),
        (4500, "1 h 15 min"),
        (86_400, "1 d"),
        (180_000, "2 d 2 h"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert show_seconds(seconds) == text
