"""The page: texts of users cannot become code, curves keep their extremes, it stays small."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import numpy as np
import pytest

from selftask.logs import json_row
from selftask.report.charts import Chart, Curve, charts_html, thinned
from selftask.report.layers import layer_charts, layers_section
from selftask.report.page import Section, json_data, page_html, render, static_text
from selftask.report.record import RunRecord, columns_of
from selftask.report.run_report import write_run_report
from selftask.report.settings import flat

EVIL = "</script><script>alert(1)</script><!-- \" ' & \u2028"


def run_folder(folder: Path, rows: list[dict[str, object]], **config: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(json.dumps(config or {"recipe": "simclr"}))
    (folder / "metrics.jsonl").write_text("".join(json_row(row) + "\n" for row in rows))
    return folder


def test_json_cannot_end_its_element() -> None:
    text = json_data({EVIL: [EVIL, 1.5, None]}, "x")
    inner = text.removeprefix('<script type="application/json" id="x">').removesuffix("</script>")
    assert not set("<>&\u2028") & set(inner)
    assert json.loads(inner) == {EVIL: [EVIL, 1.5, None]}


def test_texts_of_users_are_escaped(tmp_path: Path) -> None:
    """In every place that a run can bring a text to."""
    rows = [
        {"step": n, "epoch": n / 3, "loss": 2.0 / n, "lr": 0.1, EVIL: 1.0, f"{EVIL}/x": n}
        for n in range(1, 8)
    ]
    config = {"recipe": EVIL, "method": {"name": EVIL}, "data": {"path": EVIL}, "k": {EVIL: EVIL}}
    run = run_folder(tmp_path / "<img src=x onerror=alert(1)>", rows, **config)
    event = {"time": EVIL, "step": 1, "event": "warning", "text": EVIL, "data": {}}
    (run / "events.jsonl").write_text(
        json.dumps(event) + "\n" + json.dumps({**event, "event": EVIL})
    )
    status = {"command": ["selftask", EVIL], "host": EVIL, "gpus": [EVIL], "origins": {"k": EVIL}}
    status["git"] = {"commit": EVIL, "branch": EVIL, "dirty": True}
    (run / "environment.json").write_text(json.dumps(status))
    (run / "status.json").write_text(json.dumps({"state": EVIL, "error": EVIL}))
    (run / "export").mkdir()
    (run / "export" / "<b>.pt").write_text("")
    text = write_run_report(RunRecord.read(run)).read_text()
    assert "<script>alert" not in text and "<img" not in text and "<b>" not in text
    own = {f"<script>{static_text(name)}</script>" for name in ("page.js", "charts.js")}
    own |= {f"<script>{static_text('uplot/uPlot.iife.min.js')}</script>"}
    for script in own:
        assert text.count(script) == 1
        text = text.replace(script, "")
    assert re.findall("<script[^>]*>", text) == ['<script type="application/json" id="charts">']


def test_a_long_run_shows_all_digits_of_its_length(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", [], train={"max_steps": 1_250_001, "epochs": 0.5})
    assert "0.5 epochs or 1,250,001 steps" in write_run_report(RunRecord.read(run)).read_text()


def test_only_known_scripts_may_run() -> None:
    """The policy has the digest of each script, and no connection is allowed."""
    page = page_html("t", [Section("a", "x", "a", script="let a;"), Section("b", "", "b")])
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]+)"', page)
    assert page.count("sha256-") == len(re.findall("<script>", page)) == 4
    assert "default-src 'none'" in policy and "connect-src 'none'" in policy
    assert "unsafe-inline" not in policy.partition("script-src")[2].partition(";")[0]
    assert 'id="b"' not in page  # empty sections are left out
    assert not re.findall(r'(?:src|href)="(?!#)', page)


def test_a_thinned_curve_keeps_its_extremes() -> None:
    random = np.random.default_rng(0)
    values = random.normal(size=100_001)
    values[50_321], values[7] = 40.0, np.nan
    steps, kept = thinned(range(100_001), values.tolist(), most=2000)
    assert len(steps) <= 2000 and steps == sorted(steps)
    assert (steps[0], steps[-1]) == (0, 100_000)
    numbers = [value for value in kept if value is not None]
    assert max(numbers) == 40.0 and min(numbers) == pytest.approx(np.nanmin(values), rel=1e-5)
    assert all(
        v is None or v == pytest.approx(values[s], rel=1e-5)
        for s, v in zip(steps, kept, strict=True)
    )
    assert thinned([1, 2], [1.0, float("inf")]) == ([1, 2], [1.0, None])
    assert thinned([], []) == ([], [])


@pytest.mark.parametrize("number", [20_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_a_long_run_makes_a_small_page_quickly(number: int, tmp_path: Path) -> None:
    """100,000 rows: below a megabyte, within three seconds."""
    row = {"loss": 5.1234, "lr": 0.001, "images_per_s": 812.5, "data_wait": 0.02, "step_s": 0.31}
    names = ("emb_std", "effective_rank", "chance_ratio", "memory_mb", "dino", "ibot", "koleo")
    line = json.dumps({**row, **dict.fromkeys(names, 0.512345678)})[1:]
    folder = run_folder(tmp_path / "run", [])
    rows = (f'{{"step": {n}, "epoch": {n / 700:.4f}, {line}\n' for n in range(1, number + 1))
    (folder / "metrics.jsonl").write_text("".join(rows))
    started = time.process_time()
    path = write_run_report(RunRecord.read(folder))
    assert time.process_time() - started < 3.0
    assert path.stat().st_size < 1e6


def test_charts_without_data_are_left_out() -> None:
    assert charts_html([]) == charts_html([Chart("a", [Curve("b", [], [])])]) == ""
    assert "<figcaption>a&lt;" in charts_html([Chart("a<", [Curve("b", [1], [2.0])])])


@pytest.mark.parametrize("name", ["metrics.jsonl", "events.jsonl", "status.json", "config.yaml"])
@pytest.mark.parametrize("content", [b"", b"\x00\xff{", b"[1]\n{}\nnull\n", b'{"a": 1}\n{"st'])
def test_damaged_files_are_named_and_harmless(tmp_path: Path, name: str, content: bytes) -> None:
    run = run_folder(tmp_path / "run", [{"step": 1, "loss": 1.0, "lr": 0.1}])
    (run / name).write_bytes(content)
    record = RunRecord.read(run)
    assert "<h1>run" in write_run_report(record).read_text()
    cut = name.endswith(".jsonl") and b"\n" not in content  # a last line that is being written
    named = any(problem.startswith(name) for problem in record.problems)
    assert named == (not cut and (b"null" in content or not name.endswith(".jsonl")))


def test_a_run_that_is_being_written(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", [{"step": 1, "loss": 1.0}, {"step": 2, "loss": None}])
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "lo')
    record = RunRecord.read(run)
    assert [row["step"] for row in record.rows] == [1, 2]
    assert (record.columns["loss"].steps, record.step) == ([1], 2)
    assert not any("metrics" in problem for problem in record.problems)


def test_columns_of_rows() -> None:
    actual = columns_of(
        [{"step": 2, "a": 1}, {"step": 1, "a": 3, "b": "x", "c": True}, {"step": 2, "a": 9}]
    )
    assert {name: (c.steps, c.values) for name, c in actual.items()} == {"a": ([1, 2], [3, 9])}


def test_flat_config() -> None:
    nested = {"a": {"b": 1, "c": {}}, "views": [{"name": "x", "p": [1, 2]}], "d": None}
    assert dict(flat(nested)) == {
        "a.b": 1, "a.c": {}, "views.0.name": "x", "views.0.p": [1, 2], "d": None,
    }  # fmt: skip


def test_texts_are_escaped_and_passwords_masked() -> None:
    html = render("run.link", "x\" onclick='y'", "<a>&http://me:secret@host/a")
    name = "&lt;a&gt;&amp;http://me:***@host/a"
    assert html == f'<a href="x&#34; onclick=&#39;y&#39;">{name}</a>'
    assert render("compare.value", html, []) == html, "the HTML of a macro, not escaped again"


def test_metrics_of_hidden_layers_are_charts_over_layers(tmp_path: Path) -> None:
    """The newest result of each metric; a single layer is no curve."""
    rows: list[dict[str, object]] = [
        {"step": 5, "knn_top1_layer0": 0.1, "knn_top1_layer2": 0.3},
        {"step": 9, "lr": 0.1, "probe_lr_layer0": 3.0, "probe_lr_layer2": 1.0},
    ]
    run = run_folder(tmp_path / "run", rows)
    results: list[dict[str, object]] = [
        {"linear_top1_layer0": 0.9, "linear_top1_layer1": 0.9},
        {"linear_top1_layer10": 0.7, "linear_top1_layer2": 0.6, "linear_top1_layer2_low": 0.5},
        {"rankme_layer0": 12.5, "rankme_layer1": 20.0, "svm_top1_layer1": 0.5},
        {"knn_top1_layer0": "x", f"knn_top1_layer{10**30}": 0.5},
    ]
    (run / "evaluations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in results))
    record = RunRecord.read(run)
    charts = {chart.title: chart.curves for chart in layer_charts(record)}
    assert charts == {
        "Accuracy": [
            Curve("knn_top1 during training", [0, 2], [0.1, 0.3]),
            Curve("linear_top1", [2, 10], [0.6, 0.7]),
        ],
        "rankme": [Curve("rankme", [0, 1], [12.5, 20.0])],
    }
    assert 'data-charts="layers"' in write_run_report(record).read_text()
    (run / "evaluations.jsonl").unlink()
    (run / "metrics.jsonl").write_text("")
    assert layers_section(RunRecord.read(run)).html == ""
