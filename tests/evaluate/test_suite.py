"""``selftask eval suite``: all checkpoints of a run, once each, here or as SLURM jobs."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from submitit.core.utils import DelayedSubmission
from torch.nn import functional as F

import tiny
from selftask.checkpoint import rotation
from selftask.cli.main import main
from selftask.cli.model import suite
from selftask.cli.model.suite_job import SuiteJob
from selftask.config.load import to_yaml
from selftask.logs import write_json
from selftask.logs.checkpoint_results import CheckpointResults
from selftask.report.curves import run_charts
from selftask.report.overview.liveness import LOCK
from selftask.report.record import RunRecord
from selftask.slurm import queue

STEPS = (1, 2)
Fake = Callable[[str, str], None]  # of conftest


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with checkpoints of steps 1 and 2, and labeled images."""
    folder = tmp_path_factory.mktemp("suite")
    words = (
        f"data.val={tiny.digits_file(folder, 'val.npz', 400, 440)}",
        "train.max_steps=2",
        "train.checkpoint_every='1 step'",
        "train.keep_checkpoints=5",
        "eval.evaluations={knn: {k: [3]}}",
        "hooks.ema={decay: 0.5}",
    )
    task = tiny.train("simclr", folder, "run", *words)
    (task.out / "config.yaml").write_text(to_yaml(task.config))
    write_json(task.out / "status.json", {"state": "finished", "step": 2})
    return task.out


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy of the run, without results."""
    out = tmp_path / "run"
    shutil.copytree(trained, out)
    return out


def checkpoint(run: Path, step: int) -> Path:
    """The checkpoint of a step."""
    (path,) = [p for p in rotation.checkpoints(run / "checkpoints") if rotation.step_of(p) == step]
    return path


def table(text: str) -> dict[int, dict[str, str]]:
    """The printed table: step -> metric -> cell."""
    lines = text.splitlines()
    first = next(
        number
        for number, line in enumerate(lines)
        if line.split()[:1] == ["step"] and ":" not in line
    )
    head = lines[first].split()[1:]
    rows = [line.split() for line in lines[first + 1 :]]
    return {int(step): dict(zip(head, cells, strict=True)) for step, *cells in rows}


def evaluated(capsys: pytest.CaptureFixture[str], run: Path, *words: str) -> str:
    """What the command prints."""
    capsys.readouterr()
    assert main(["eval", "suite", str(run), *words]) == 0
    return capsys.readouterr().out


def nearest_accuracy(run: Path, step: int) -> float:
    """Top-1 of the nearest image by cosine, of the weights of a checkpoint, by hand."""
    from selftask.checkpoint import store

    task = tiny.task("simclr", run.parent, "unused", f"data.val={run.parent / 'val.npz'}")
    task.prepare()
    task.base_model.load_state_dict(store.load(checkpoint(run, step))["model"])
    network = task.export_backbone().eval()
    with torch.no_grad():
        sets = []
        for batches in (task.data_module.labeled_samples(), task.data_module.test_samples("")):
            parts = [(network(batch.all_views[0]), batch.labels) for batch in batches]
            sets.append([torch.cat(column) for column in zip(*parts, strict=True)])
    task.close()
    (bank, labels), (queries, truth) = sets
    nearest = (F.normalize(queries, dim=1) @ F.normalize(bank, dim=1).T).argmax(dim=1)
    return float((labels[nearest] == truth).double().mean())


def test_a_read_only_run_is_refused_before_the_evaluation(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(dir: Path) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(dir))

    monkeypatch.setattr("selftask.logs.checkpoint_results.TemporaryFile", refuse)
    assert main(["eval", "suite", str(run)]) == 2
    printed = capsys.readouterr()
    assert "read-only file system" in printed.err and "step 1" not in printed.out


def test_every_checkpoint_once(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = evaluated(capsys, run, "knn", "knn.k=[1]")
    rows = table(text)
    assert tuple(rows) == STEPS and all(set(row) == {"knn_top1"} for row in rows.values())
    assert text.count(": knn\n") == 2
    kept = json.loads((run / "evaluations" / "step_1.jsonl").read_text())
    assert kept["step"] == 1 and kept["evaluations"] == ["knn"] and kept["test_images"] == 40
    assert f"{kept['knn_top1']:.4f}" == rows[1]["knn_top1"]

    again = evaluated(capsys, run, "knn", "knn.k=[1]", "train.threads=1")
    assert table(again) == rows and ": knn\n" not in again, "nothing is computed twice"
    assert len((run / "evaluations" / "step_1.jsonl").read_text().splitlines()) == 1

    more = evaluated(capsys, run, "knn", "linear", "knn.k=[1]", "checkpoints=last")
    assert "step 2: linear\n" in more, "knn has its result"
    assert table(more)[1]["linear_top1"] == "-" and table(more)[2]["knn_top1"] != "-"
    other = evaluated(capsys, run, "knn", "checkpoints=1")
    assert list(table(other)) == [1], "with another k the results are others"


@pytest.mark.slow
def test_figures_are_those_of_the_weights_of_the_step(
    trained: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = table(evaluated(capsys, run, "knn", "knn.k=[1]", "checkpoints=1"))
    expected = nearest_accuracy(trained, 1)
    assert float(rows[1]["knn_top1"]) == pytest.approx(expected, abs=1e-4)
    assert main(["eval", "knn", f"{run}@1", "k=[1]"]) == 0
    row = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert row["knn_top1"] == pytest.approx(expected)


def test_messages_name_the_checkpoint(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Not a temporary file, which is gone afterwards."""
    assert main(["eval", "knn", f"{run}@1", "train.device=cpu"]) == 0
    printed = capsys.readouterr().err
    assert f"{checkpoint(run, 1)}: " in printed and "backbone.pt" not in printed


def test_which_checkpoints(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def steps(**choice: Any) -> list[int]:
        given = {"checkpoints": "all", "every": 1, **choice}
        asked = suite.Request(run, ["knn"], [], given["checkpoints"], given["every"])
        return [rotation.step_of(path) for path in asked.chosen()]

    assert steps() == [1, 2]
    assert steps(every=2) == [2]
    assert steps(checkpoints="last") == [2]
    assert steps(checkpoints="[13]") == [1]
    (run / "checkpoints" / "kept.json").write_text(
        json.dumps({"metric": "knn_top1", "mode": "max", "best": [[1, 0.5]], "every": []})
    )
    assert steps(checkpoints="best") == [1]


@pytest.mark.slow
def test_averaged_weights(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Other weights, so other features; the columns of both stay apart."""
    from selftask.cli.model.checkpoint_model import open_checkpoint

    path = checkpoint(run, 1)
    states = [open_checkpoint(path, w).backbone.state_dict() for w in ([], ["weights=ema"])]
    assert any(not torch.equal(states[0][key], states[1][key]) for key in states[0])
    evaluated(capsys, run, "knn", "checkpoints=1", "weights=ema")
    kept = json.loads((run / "evaluations" / "step_1.jsonl").read_text())
    assert kept["settings"] == ["weights=ema"]
    folders = []
    for words in ([str(run), "weights=ema"], [f"{run}@2", "weights=ema"], [f"{run}@2"]):
        folders.append(run.parent / f"features_{len(folders)}")
        assert main(["features", *words, f"out={folders[-1]}"]) == 0
    newest, same, trained = (np.load(folder / "features.npy") for folder in folders)
    assert np.array_equal(newest, same) and not np.array_equal(newest, trained)


@pytest.mark.slow
@pytest.mark.parametrize("state", ["running", "hung", "requeued"])
def test_new_checkpoints_are_followed(
    state: str, run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Step 2 comes while the suite waits; the run ends afterwards."""
    monkeypatch.setattr(suite, "_POLL_S", 0.05)
    last = checkpoint(run, 2)
    hidden = run / "hidden.pt"
    last.rename(hidden)
    status = {"state": state, "step": 1, "updated": time.time()}
    if state == "hung":  # no heartbeat
        status["state"] = "running"
        (run / LOCK).touch()
        os.utime(run / LOCK, (0, 0))
    write_json(run / "status.json", status)

    def go_on() -> None:
        results = CheckpointResults(run, [])
        while results.missing(1, ["knn"]):
            time.sleep(0.02)
        hidden.rename(last)
        while results.missing(2, ["knn"]):
            time.sleep(0.02)
        write_json(run / "status.json", {**status, "state": "finished"})

    other = threading.Thread(target=go_on, daemon=True)
    other.start()
    rows = table(evaluated(capsys, run, "--follow"))
    other.join(timeout=10)
    assert tuple(rows) == STEPS


def test_jobs_on_slurm(
    run: Path, fake: Fake, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is handed in is the command itself, for what has no result yet."""
    fake("scontrol", "exit 1")
    fake("sacct", "exit 1")
    fake("sbatch", f'cp "$1" {tmp_path}/handed_in; echo Submitted batch job 77')
    for name in ("squeue", "srun"):
        fake(name, "exit 0")
    results = CheckpointResults(run, [])
    results.add(1, ["knn"], {"knn_top1": 0.25})
    text = evaluated(capsys, run, "--slurm-each", "launch.slurm.time=30", "train.device=cpu")
    assert "submitted as job 77" in text
    assert "#SBATCH --time=30\n" in (tmp_path / "handed_in").read_text()
    job = DelayedSubmission.load(run / "evaluations" / "slurm" / "77_submitted.pkl").function
    assert isinstance(job, SuiteJob) and job.words[-1] == "checkpoints=2"
    fake("squeue", "echo '77|RUNNING|None'")
    assert main(["eval", "suite", str(run), "--slurm"]) == 2
    printed = capsys.readouterr().err
    assert "job 77 (RUNNING) evaluates its checkpoints already; `selftask cancel 77`" in printed
    assert queue.noted(run / "evaluations") == {}, "it makes no run"
    (run / "evaluations/slurm/77_0_log.err").write_text("step 2: knn\n")
    assert main(["jobs", str(run)]) == 0
    (line,) = capsys.readouterr().out.splitlines()[1:]
    assert re.fullmatch(r"77 +\S*evaluations +- +running +step 2: knn", line)
    fake("scancel", f'echo "$@" >> {tmp_path}/cancelled')
    copy = shutil.copytree(run, tmp_path / "copy")
    assert main(["cancel", str(copy)]) == 2, "the jobs are those of another folder"
    assert "neither a job's id nor a submitted run" in capsys.readouterr().err
    queue.note(run, {run: "70"})  # a job that has ended, which scancel would not know
    assert main(["cancel", str(run)]) == 0
    assert (tmp_path / "cancelled").read_text() == "-- 77\n"
    fake("squeue", "echo '70|RUNNING|None'; echo '77|PENDING|Priority'")
    assert main(["cancel", str(run)]) == 0
    assert (tmp_path / "cancelled").read_text() == "-- 77\n-- 70 77\n"
    (run / queue.JOBS).unlink()
    capsys.readouterr()
    job()
    capsys.readouterr()
    rows = table(evaluated(capsys, run))
    assert tuple(rows) == STEPS and rows[1]["knn_top1"] == "0.2500"
    assert main(["eval", "suite", str(run), "--slurm"]) == 2
    assert "nothing to evaluate" in capsys.readouterr().err
    fake("squeue", "exit 0")
    evaluated(capsys, run, "--slurm", "--follow")
    job = DelayedSubmission.load(run / "evaluations" / "slurm" / "77_submitted.pkl").function
    assert job.words[-2:] == ["checkpoints=all", "--follow"]


def test_results_are_in_the_report(run: Path) -> None:
    for settings, value in (([], 0.25), (["knn.k=[5]"], 0.5)):
        for step in STEPS:
            results = CheckpointResults(run, settings)
            results.add(step, ["knn"], {"knn_top1": value + step / 10, "classes": 10})
    path = run / "evaluations" / "step_1.jsonl"
    path.write_text(path.read_text() + '{"step": 1}\n{"damaged\n')
    record = RunRecord.read(run)
    (chart,) = [
        c for c in run_charts(record) if c.title == "Evaluations of checkpoints" and c.curves
    ]
    assert [curve.label for curve in chart.curves] == ["knn_top1", "knn_top1 knn.k=[5]"]
    assert [list(curve.values) for curve in chart.curves] == [[0.35, 0.45], [0.6, 0.7]]
    assert "evaluations/step_1.jsonl: 1 damaged lines were left out" in record.problems


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["data=x"], "eval suite needs a RUN before any key=value"),
        (["nowhere"], "nowhere: there is no such run"),
        (["RUN", "knnn"], "no evaluation named 'knnn'; did you mean 'knn'?"),
        (["RUN", "knn", "knn.kk=[1]"], "did you mean 'eval.evaluations.knn.k'?"),
        (["RUN", "knn", "optimizer.lr=1"], "eval suite: there is no 'optimizer.lr'"),
        (["RUN", "knn", "train.epochs=1"], "eval suite: there is no 'train.epochs'"),
        (["RUN", "checkpoints=5"], "has no such checkpoint; there are: 2, 1"),
        (["RUN", "checkpoints=best"], "has no best checkpoint"),
        (["RUN", "every=often"], "every=often: expected a number of steps"),
        (["RUN", "weights=swa"], "swa"),
        (["RUN", "--slurm-each", "--follow"], "--slurm-each excludes --slurm and --follow"),
        (["RUN", "--folow"], "there is no option --folow; did you mean '--follow'?"),
    ],
)
def test_bad_arguments_of_eval_suite_are_refused(
    words: list[str], message: str, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", "suite", *(word.replace("RUN", str(trained)) for word in words)]) == 2
    printed = capsys.readouterr()
    assert message in printed.err and "Traceback" not in printed.err
    assert not (trained / "evaluations").exists()
