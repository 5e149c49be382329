"""The league: its arithmetic, its files and its page."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import scipy.stats

import league
import league_cost
import league_page
import league_plan
from selftask.api.objects import overrides
from selftask.config.load import load_config
from selftask.data.loading.open_data import open_data
from selftask.registry import METHODS

DIGITS = league_plan.LEAGUES["digits"]


def test_interval_is_that_of_scipy() -> None:
    values = [0.61, 0.66, 0.59]
    low, high = scipy.stats.t.interval(0.95, 2, loc=np.mean(values), scale=scipy.stats.sem(values))
    middle, half = league_page.interval(values)
    assert (middle - half, middle + half) == pytest.approx((low, high))


def test_learning_rate_is_chosen_by_knn_and_linear_together() -> None:
    search = [
        {"factor": 0.3, "knn_top1": 0.5, "linear_top1": 0.5},
        {"factor": 1.0, "knn_top1": 0.4, "linear_top1": 0.7},
        {"factor": 3.0, "knn_top1": 0.6, "linear_top1": 0.3},
    ]
    assert league.best_factor(search) == 1.0


def test_search_sees_no_test_image_and_rates_no_training_image() -> None:
    sources = open_data(load_config("simclr/digits", []).data)
    assert sources.val is not None
    train, rated = league_plan.held_out(sources, 0.8)[:2]
    assert rated is not None
    paths = [[source.path(i) for i in range(len(source))] for source in (train, rated)]
    tests = {sources.val.path(i) for i in range(len(sources.val))}
    assert not set(paths[0]) & set(paths[1])
    assert not tests & set(paths[0] + paths[1])
    assert len(paths[0]) + len(paths[1]) == len(sources.train) == 1347
    assert [rated[i][1] for i in range(9)] == rated.labels[:9].tolist()  # type: ignore[index]


def test_cost_of_a_step_is_that_of_the_fastest_epoch_but_the_first() -> None:
    times = [8.0, 9.0, 10.5, 11.0, 12.0, 12.5, 15.0, 16.0]  # two steps an epoch
    assert league_cost.step_cost(times, 2) == pytest.approx(1.5 / 2)


def test_cpu_time_begins_with_the_first_step() -> None:
    ticks = iter([5.0, 6.0, 7.0, 8.5])
    watch = league_cost.CpuTime(clock=lambda: next(ticks))
    task: Any = SimpleNamespace()
    watch.on_start(task)
    for _ in range(3):
        watch.on_step(task)
    assert watch.times == [1.0, 2.0, 3.5]


def test_cost_is_relative_and_of_the_fastest_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {"method": iter([0.6, 0.5]), "supervised": iter([0.2, 0.3])}  # of a step

    def train(config: Any, sources: Any) -> tuple[None, SimpleNamespace]:
        step = next(seconds[config.name])
        return None, SimpleNamespace(times=[step * n for n in range(1, 4 * league_cost.EPOCHS + 1)])

    monkeypatch.setattr(league_cost, "train", train)
    configs: list[Any] = [SimpleNamespace(name=name) for name in seconds]
    sources = open_data(load_config("simclr/digits", []).data)
    assert league_cost.relative_cost(*configs, sources) == pytest.approx(0.5 / 0.2)


def test_equal_cost_means_fewer_images_of_a_costly_method() -> None:
    small = dataclasses.replace(DIGITS, images=1000, cost=6000)
    steps = league_plan.lengths(small, {"relative": 3.0, "batch_size": 64})
    assert steps == {"images": 16, "cost": 32}  # 1000 / 64 and 2000 / 64, rounded up


def test_long_runs_cost_more_on_networks_that_have_them() -> None:
    photographs = league_plan.LEAGUES["cifar10"]
    cost = {"relative": 2.0, "batch_size": 100}
    steps = league_plan.lengths(photographs, cost, "small_resnet")
    assert steps == {"images": 500, "cost": 1500, "long": 11250}
    assert "long" not in league_plan.lengths(photographs, cost, "vit_micro")


def test_a_method_with_long_runs_is_finished_when_they_are(tmp_path: Path) -> None:
    small = dataclasses.replace(DIGITS, long={"small_resnet": 10**6})
    whole = entry([0.5, 0.6, 0.7], 0.8, 20.0)
    cost = whole["runs"]["relative_cost"]
    steps = league_plan.lengths(small, cost, "small_resnet")["long"]
    assert len(league_page.row(small, "simclr", whole, long=True).split("|")) == 16
    whole["runs"]["long_1"] = {**whole["runs"]["cost_1"], "steps": steps, "linear_top1": 0.9}
    whole["runs"]["long_2"] = {**whole["runs"]["long_1"], "steps": steps - 1}  # of another length
    (tmp_path / "simclr.json").write_text(json.dumps({"digits": whole}))
    done = [
        league.finished(league.Runs(small, "digits", "simclr", tmp_path, long=count))
        for count in (0, 1, 2)
    ]
    assert done == [True, True, False]
    assert league_page.row(small, "simclr", whole, long=True).endswith("| 0.900 | 0.500 |\n")


def test_supervised_of_the_cost_has_the_network_and_batch_of_the_method() -> None:
    recipe, made = league_plan.reference_settings(DIGITS, "vit_micro", 5, 64)
    config = load_config(recipe, overrides(made)).to_dict()
    network = DIGITS.networks["vit_micro"]
    assert config["backbone"] == config["backbone"] | {"name": "vit_micro", **network.backbone}
    assert (config["data"]["size"], config["train"]["batch_size"]) == (network.size, 64)


def test_finished_runs_are_kept_after_a_kill_and_others_made(tmp_path: Path) -> None:
    made: list[str] = []

    def run(key: str, runs: league.Runs) -> None:
        runs.run(key, lambda: made.append(key) or {"knn_top1": 0.5})  # type: ignore[func-returns-value]

    run("a", league.Runs(DIGITS, "digits", "simclr", tmp_path))
    (tmp_path / "simclr.partial").write_text("{")  # killed while writing
    again = league.Runs(DIGITS, "digits", "simclr", tmp_path)
    run("a", again)
    run("b", again)
    assert made == ["a", "b"]
    longer = league.Runs(dataclasses.replace(DIGITS, cost=1), "digits", "simclr", tmp_path)
    run("a", longer)
    assert made == ["a", "b"]  # each run has its own length
    changed = dataclasses.replace(DIGITS, kept=0.5)
    run("a", league.Runs(changed, "digits", "simclr", tmp_path))
    assert made == ["a", "b", "a"]  # other settings begin anew
    assert [*json.loads((tmp_path / "simclr.json").read_text())["digits"]["runs"]] == ["a"]


def test_every_method_is_in_the_order_once_and_after_its_teachers() -> None:
    order = DIGITS.methods
    assert sorted([*order, *league_plan.LEFT_OUT]) == METHODS.names()
    for method, (_, teacher) in league_plan.TEACHERS.items():
        assert order.index(teacher) < order.index(method)


def test_a_run_is_made_again_for_another_learning_rate_or_length(tmp_path: Path) -> None:
    runs = league.Runs(DIGITS, "digits", "simclr", tmp_path)
    made = [
        runs.run(
            "images_1", lambda f=f, n=n: {"factor": f, "steps": n, "id": (f, n)}, factor=f, steps=n
        )["id"]
        for f, n in ((1.0, 7), (3.0, 7), (3.0, 9))
    ]
    assert made == [(1.0, 7), (3.0, 7), (3.0, 9)]


@pytest.mark.parametrize("method", ["simclr", "ressl", "mae"])
def test_views_are_those_of_the_league_but_for_weak_ones(method: str) -> None:
    _, made = league_plan.settings(DIGITS, method, 1.0, 5, 0)
    degrees = [
        item["degrees"]
        for key, items in made.items()
        if key.startswith("views.")
        for item in items
        if item["name"] == "random_affine"
    ]
    assert degrees == {"ressl": [10.0, 20], "simclr": [20], "mae": [20]}[method]


def entry(knn: list[float], linear: float, rank: float) -> dict[str, Any]:
    rest: dict[str, Any] = dict.fromkeys(league_page.LABEL_FREE, rank)
    rest |= {"linear_10_labels_top1": 0.3, "linear_top1": linear, "effective_rank": -rank}
    made = {"machine": "m", "commit": "c", "date": "d"}
    rest |= {"lr": 0.01, "cpu_s": 2.0, "peak_mb": 9, **made}
    cost = {"batch_size": 256, "relative": 2.26, **made}
    steps = league_plan.lengths(DIGITS, cost)
    runs = {
        f"{budget}_{seed}": {"knn_top1": value, **rest, "steps": steps[budget]}
        for budget in league_plan.BUDGETS
        for seed, value in zip(DIGITS.seeds, knn, strict=True)
    }
    return {"budget": league_plan.budget(DIGITS), "runs": {"relative_cost": cost, **runs}}


def test_page_shows_files_and_lists_what_is_missing(tmp_path: Path) -> None:
    whole = {"digits": entry([0.5, 0.6, 0.7], 0.8, 20.0)}
    (tmp_path / "simclr.json").write_text(json.dumps(whole))
    del whole["digits"]["runs"]["images_3"]
    (tmp_path / "byol.json").write_text(json.dumps(whole))  # not finished
    shorter = {"digits": entry([0.5, 0.6, 0.7], 0.8, 20.0)}
    shorter["digits"]["runs"]["cost_1"]["steps"] -= 1
    (tmp_path / "vicreg.json").write_text(json.dumps(shorter))  # of another budget
    page = tmp_path / "page.md"
    marks = [f"<!-- begin: {name} -->\n{league_page.END}\n" for name in league_plan.LEAGUES]
    page.write_text(f"before\n{marks[0]}between\n{marks[1]}after\n")
    assert league_page.update(tmp_path, check=True, page=page) == 1
    assert league_page.update(tmp_path, check=False, page=page) == 0
    assert league_page.update(tmp_path, check=True, page=page) == 0
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    text, _, photographs = text.partition("between\n")
    assert f"0 of {len(league_plan.OF_PHOTOGRAPHS)} methods were run." in photographs
    row = next(line for line in text.splitlines() if line.startswith("| `simclr` |"))
    assert row.startswith("| `simclr` | 0.800 ± 0.000 | 0.600 ± 0.248 |")  # 4.303 * 0.1 / sqrt(3)
    assert row.endswith(
        "| 0.01 | 36 | 0.800 ± 0.000 | 0.600 ± 0.248 | 2.3 | 9 |"
    )  # 80 / 2.26 thousand
    assert "1 of 90 methods were run." in text
    missing = next(line for line in text.splitlines() if line.startswith("**Not run**"))
    assert "`byol`" in missing
    assert "`vicreg`" in missing
    assert "`simclr`" not in missing
    assert "Rank correlation" not in text  # too few methods


def test_correlation_is_that_of_ranks_over_at_least_ten_methods() -> None:
    names = [n for n in METHODS.names() if league_plan.group_of(n) == "small_resnet"][:10]
    done = {
        name: entry([0.1, 0.2, 0.3], 0.1 * number, number**3) for number, name in enumerate(names)
    }
    text = "".join(league_page.correlations(DIGITS, done))
    assert "| rankme | 1.00 |" in text
    assert "| effective_rank | -1.00 |" in text
    assert not [*league_page.correlations(DIGITS, dict([*done.items()][:9]))]


def test_page_of_the_docs_is_up_to_date(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["", "--check"])
    assert league.main() == 0


def test_photographs_are_cropped_and_only_strong_views_change_colors() -> None:
    photographs = league_plan.LEAGUES["cifar10"]
    made = {}
    for method in photographs.methods:
        recipe, more = league_plan.settings(photographs, method, 1.0, 9, 0)
        config = load_config(recipe, overrides(more)).to_dict()
        assert config["data"]["name"] == "folder"
        assert [item["name"] for item in config["eval"]["transforms"]] == ["normalize"]
        views = config["views"].items()
        made[method] = {name: [item["name"] for item in g["transforms"]] for name, g in views}
    assert all(names[0] == "random_resized_crop" for m in made.values() for names in m.values())
    weak = ["random_resized_crop", "horizontal_flip", "normalize"]
    strong = [weak[0], "color_jitter", "grayscale", *weak[1:]]
    assert made["simclr"] == {"main": strong}
    assert made["ressl"] == {"weak": weak, "strong": strong}
    assert made["mae"] == {"main": weak}


def test_cost_is_measured_with_a_part_of_the_training_images() -> None:
    sources = open_data(load_config("simclr/digits", []).data)
    assert len(league_plan.measured(sources, 0.04).train) == round(0.04 * 1347)
    assert len(league_plan.measured(sources, 1.0).train) == 1347


@pytest.mark.slow
def test_a_method_from_search_to_figures(tmp_path: Path) -> None:
    small = dataclasses.replace(
        DIGITS,
        images=256,
        cost=2048,
        factors=(1.0,),
        seeds=(1,),
        long={"small_resnet": 4096},
    )
    runs = league.Runs(small, "digits", "simclr", tmp_path, long=1)
    league.run_method(runs, tmp_path / "scratch")
    assert league.finished(league.Runs(small, "digits", "simclr", tmp_path, long=1))
    made = runs.entry["runs"]
    assert made["images_1"]["steps"] == 1
    assert made["relative_cost"]["relative"] > 1
    assert made["long_1"]["steps"] > made["cost_1"]["steps"] > 1
    assert 1 <= made["cost_1"]["effective_rank"] <= 128
    assert 1 <= made["cost_1"]["lidar"] <= 128
    assert 0 <= made["cost_1"]["linear_10_labels_top1"] <= 1
