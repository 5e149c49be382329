"""Comparison of runs: groups of seeds, intervals, differences, what is not complete."""

from __future__ import annotations

import errno
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from run_folders import row, write_run
from selftask.cli.main import main
from selftask.errors import UserError
from selftask.report.compare.comparison_page import read_comparison
from selftask.report.compare.differences import differing, flat, short_names
from selftask.report.compare.interval import interval
from selftask.report.compare.tables import show_rate
from selftask.report.record import RunRecord


@pytest.mark.parametrize("count", [2, 3, 5, 30])
def test_the_interval_is_that_of_student(count: int) -> None:
    values = np.random.default_rng(count).normal(0.7, 0.1, count).tolist()
    actual = interval(values)
    assert actual is not None and actual.half is not None
    low, high = stats.t.interval(0.95, count - 1, np.mean(values), stats.sem(values))
    assert actual.mean - actual.half == pytest.approx(low, rel=1e-12)
    assert actual.mean + actual.half == pytest.approx(high, rel=1e-12)
    by_test = stats.ttest_1samp(values, 0.0).confidence_interval(0.95)
    assert actual.mean + actual.half == pytest.approx(by_test.high, rel=1e-9)


def test_few_values_have_no_interval() -> None:
    assert interval([]) is None and interval([float("nan")]) is None
    one = interval([0.5, float("inf")])
    assert one is not None and (one.mean, one.half, one.count) == (0.5, None, 1)


def test_settings_that_follow_from_a_name_are_left_out() -> None:
    adam = {"optimizer": {"name": "adamw", "lr": 0.1, "betas": [0.9, 0.95]}, "out": "a"}
    sgd = {"optimizer": {"name": "sgd", "lr": 0.3, "momentum": 0.9}, "out": "b"}
    assert differing([adam, sgd]) == ["optimizer.name", "optimizer.lr"]
    elsewhere = {"out": "c", "launch": {"nodes": 2}, "train": {"log_every": 9}}
    assert differing([adam, adam | elsewhere]) == []
    assert flat({"a": {"b": 1e12, "c": None, "d": "x"}}) == {
        "a.b": "1e+12",
        "a.c": "null",
        "a.d": "x",
    }
    assert flat({"views": [{"name": "crop", "size": 8}]}) == {
        "views.0.name": "crop",
        "views.0.size": "8",
    }
    assert short_names(["optimizer.name", "optimizer.lr", "method.teacher.lr", "train.epochs"]) == {
        "optimizer.name": "optimizer",
        "optimizer.lr": "optimizer.lr",
        "method.teacher.lr": "teacher.lr",
        "train.epochs": "epochs",
    }


def lr(value: float, seed: int = 0) -> dict[str, dict[str, float]]:
    return {"optimizer": {"lr": value}, "train": {"seed": seed}}


@pytest.fixture
def sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two configurations of three seeds, and runs that did not get to their end."""
    monkeypatch.chdir(tmp_path)
    for seed, knn in enumerate((0.6, 0.62, 0.64)):
        write_run(tmp_path / f"s/lr_0.1_seed_{seed}", knn=knn, config=lr(0.1, seed))
    for seed, knn in enumerate((0.7, 0.71)):
        write_run(tmp_path / f"s/lr_0.3_seed_{seed}", knn=knn, config=lr(0.3, seed))
    more = {"steps": 5, "config": lr(0.3, 2), "knn": 0.99}
    write_run(tmp_path / "s/lr_0.3_seed_2", "failed", log="RUN FAILED at step 5: disk", **more)
    write_run(tmp_path / "s/lr_9", "running", steps=4, knn=None, config=lr(9.0))
    return tmp_path / "s"


def test_groups_means_and_ranking(sweep: Path) -> None:
    comparison = read_comparison(sorted(sweep.iterdir()))
    assert [group.label for group in comparison.groups] == ["lr 0.3", "lr 0.1", "lr 9"]
    assert comparison.keys == ["optimizer.lr", "train.seed"]
    best = comparison.groups[0].final("knn_top1")
    assert best is not None and best.count == 2, "the failed run is shown and not counted"
    assert best.mean == pytest.approx(0.705)
    assert [len(group.members) for group in comparison.groups] == [3, 3, 1]
    by_loss = read_comparison(sorted(sweep.iterdir()), "loss")
    assert by_loss.ranked_by == "loss"
    with pytest.raises(
        UserError, match="sort=knn_top: no run has this column; did you mean 'knn_top1'"
    ):
        read_comparison(sorted(sweep.iterdir()), "knn_top")


def test_evaluations_long_before_the_last_row_are_compared(tmp_path: Path) -> None:
    for name, knn in (("a", 0.5), ("b", 0.6)):
        run = write_run(tmp_path / name, "interrupted", knn=knn, config=lr(knn))
        later = "".join(json.dumps(row(step, 1.0)) + "\n" for step in range(21, 1021))
        (run / "metrics.jsonl").write_text((run / "metrics.jsonl").read_text() + later)
    comparison = read_comparison([tmp_path / "a", tmp_path / "b"])
    assert comparison.metrics == ["knn_top1", "loss"]
    assert [group.label for group in comparison.groups] == ["lr 0.6", "lr 0.5"]


class Cells(HTMLParser):
    """Texts of the rows of tables, by id."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tables: dict[str, list[list[str]]] = {}
        self.rows: list[list[str]] = []
        self.inside = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "table":
            self.rows = self.tables.setdefault(dict(attrs).get("id") or "", [])
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
            self.inside = True

    def handle_endtag(self, tag: str) -> None:
        self.inside = self.inside and tag not in ("td", "th")

    def handle_data(self, data: str) -> None:
        if self.inside:
            self.rows[-1][-1] += data


def test_sweep_report_lists_its_groups_and_every_run(
    sweep: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", "s"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[1] == str(sweep / "report.html")
    half = stats.t.ppf(0.975, 1) * np.std([0.7, 0.71], ddof=1) / np.sqrt(2)
    assert printed[0] == f"highest knn_top1: 0.705 ± {half:.2g}, lr 0.3, mean of 2 runs"
    text = (sweep / "report.html").read_text()
    tables = Cells(text).tables
    first = [cell.strip() for cell in tables["groups"][1]]
    assert first[:3] == ["lr 0.3", "2 of 3", f"0.705 ± {half:.2g}"]
    names = [path.name for path in sweep.iterdir() if path.is_dir()]
    runs = {
        name: [cell.strip() for cell in row]
        for row in tables["runs"][1:]
        for name in names
        if row[0].strip().startswith(name)  # its verdict follows
    }
    assert "failed" in runs["lr_0.3_seed_2"][0]
    assert set(runs) == {path.name for path in sweep.iterdir() if path.is_dir()}
    assert runs["lr_0.3_seed_2"][2:5] == ["failed", "5 of 20", "0.99*"]
    assert runs["lr_9"][2:5] == ["running", "4 of 20", "-"]
    assert "RUN FAILED at step 5: disk" in text
    assert 'href="lr_0.1_seed_0/report.html"' in text
    assert (sweep / "lr_0.1_seed_0/report.html").is_file()
    assert "https://" not in re.sub(r"<script>.*?</script>", "", text, flags=re.S)


def test_different_methods_lengths_and_texts_of_users(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    bad = "<script>alert(1)</script>"
    write_run(tmp_path / "a", knn=0.5)
    write_run(tmp_path / "b", knn=0.4, steps=40, total=40, config={"method": {"name": bad}})
    write_run(tmp_path / "c", None, knn=0.3)
    (tmp_path / "c/config.yaml").write_text("{ torn")
    assert main(["report", "a", "b", "c", "out=page.html", "sort=loss"]) == 0
    assert capsys.readouterr().out.startswith("lowest loss: 2")
    text = (tmp_path / "page.html").read_text()
    assert bad not in text and "&lt;script&gt;alert(1)" in text
    assert "the runs are of different length: 20, 40 steps" in text
    assert "the methods differ: losses of different scale" in text
    assert "status.json is missing" in text


def test_runs_of_a_read_only_folder_are_compared(
    sweep: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(record: RunRecord) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(record.folder))

    monkeypatch.setattr("selftask.report.run_report.write_run_report", refuse)
    assert main(["report", "s", "out=page.html"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "page.html"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["empty"], "empty: not a run folder, and there are no runs below it"),
        (["nowhere"], "nowhere: there is no such run"),
        (["run", "sort=loss"], "sort=loss: is for several runs, and there is one: run"),
        (["run", "other", "images=100"], "images=100: is for one run, and there are 2"),
        ([], "report needs a RUN"),
    ],
)
def test_mistakes_of_report(
    words: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    write_run(tmp_path / "run")
    write_run(tmp_path / "other")
    assert main(["report", *words]) == 2
    assert message in capsys.readouterr().err


def test_models_of_a_library_are_told_apart() -> None:
    """Once the column said `timm` for both, and the name of the model was nowhere."""
    configs = [{"backbone": {"name": "timm", "model": name}} for name in ("resnet18", "resnet50")]
    configs.append({"backbone": {"name": "small_resnet", "width": 8}})
    assert differing(configs) == ["backbone.name"]
    assert flat(configs[1]) == {"backbone.name": "timm:resnet50"}


def test_small_numbers_are_not_rounded_to_nothing() -> None:
    assert [show_rate(rate) for rate in (0.32, 4.25, 1409.2)] == ["0.32", "4.2", "1,409"]
