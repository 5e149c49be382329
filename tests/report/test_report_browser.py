"""The page in a real headless Chromium: no error, no request, curves that answer."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chromium import DESKTOP, PHONE, Page, chromium_or_skip, open_page
from selftask.report.record import RunRecord
from selftask.report.run_report import write_run_report

pytestmark = pytest.mark.slow

LOSS = "figure.chart:nth-of-type(1)"


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a run of 600 steps with events, terms and awkward names."""
    chromium_or_skip()
    run = tmp_path_factory.mktemp("runs") / "a run <b>&amp; more"
    run.mkdir()
    rows: list[dict[str, Any]] = [{"step": 0, "epoch": 0.0, "knn_top1": 0.17, "eval_s": 2.0}]
    for step in range(5, 601, 5):
        loss = 3 + 4 * math.exp(-step / 200) + 0.1 * math.sin(step)
        row = {"step": step, "epoch": step / 60, "loss": loss, "lr": 1e-3 * (1 - step / 600)}
        row |= {"images_per_s": 800.0, "data_wait": 0.05, "step_s": 0.3, "memory_mb": 900.0}
        row |= {"chance_ratio": loss / 6.24, "emb_std": 0.5, "effective_rank": 80.0}
        rows.append({**row, "a</script><script>alert(1)</script>": 0.5})
    rows.append({"step": 600, "epoch": 10.0, "knn_top1": 0.71, "eval_s": 2.0})
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    events = [
        {"time": "2026-01-01T10:00:00+00:00", "step": step, "event": kind, "text": f"{kind} <i>"}
        for step, kind in ((0, "start"), (300, "resume"), (450, "warning"), (600, "finish"))
    ]
    (run / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    layers = {f"knn_top1_layer{number}": 0.1 * number for number in range(5)}
    (run / "evaluations.jsonl").write_text(json.dumps(layers))
    (run / "config.yaml").write_text("{recipe: simclr, method: {name: simclr}, data: x}")
    (run / "status.json").write_text('{"state": "finished", "step": 600}')
    return write_run_report(RunRecord.read(run))


@pytest.fixture
def page(report: Path) -> Iterator[Page]:
    with open_page(report) as page:
        yield page


def legend(page: Page, number: int = 0) -> list[str]:
    """The values that the legend of a chart shows: x, then one for each curve."""
    values = "return [...document.querySelectorAll('figure.chart')[arguments[0]]"
    values += ".querySelectorAll('.u-value')].map((value) => value.textContent)"
    page.run("return new Promise((done) => setTimeout(done, 60))")
    return list(page.run(values, number))


def x_range(page: Page, number: int = 0) -> list[float]:
    script = "const s = selftask.charts.charts.plots[arguments[0]].scales.x; return [s.min, s.max]"
    return list(page.run(script, number))


def drag(page: Page, start: float, end: float) -> None:
    """Drag over a part of the first chart, from 0 (left) to 1 (right)."""
    from selenium.webdriver import ActionChains

    over = page.find(f"{LOSS} .u-over")
    width = over.size["width"]
    actions = ActionChains(page.driver, duration=20)
    actions.move_to_element_with_offset(over, int((start - 0.5) * width), 0).click_and_hold()
    actions.move_by_offset(int((end - start) * width / 2), 0)
    actions.move_by_offset(int((end - start) * width / 2), 0).release().perform()


def test_it_opens_from_disk_without_requests_or_errors(page: Page) -> None:
    assert page.url.startswith("file://")
    assert page.run("return document.title") == "a run <b>&amp; more: selftask"
    assert len(page.find_all("figure.chart canvas")) == len(page.find_all("figure.chart")) > 8
    assert page.find_all("main b, main i, main img") == []
    assert page.console() == [] and page.network() == []
    assert page.find(".verdict p").text.startswith("learning: the loss fell from 6.8")


def test_hover_shows_values_of_the_step_in_all_charts(page: Page) -> None:
    from selenium.webdriver import ActionChains

    assert legend(page)[0] == "600"  # without a pointer: the last values
    ActionChains(page.driver).move_to_element(page.find(f"{LOSS} .u-over")).perform()
    step, loss = legend(page)
    assert 290 <= int(step) <= 310
    expected = 3 + 4 * math.exp(-int(step) / 200) + 0.1 * math.sin(int(step))
    assert float(loss) == pytest.approx(expected, rel=1e-3)
    assert legend(page, 1)[0] == step
    assert page.find("#tip").text == "step 300: resume <i>"  # the line of an event is near


def test_drag_zooms_all_charts_and_a_double_click_resets(page: Page) -> None:
    from selenium.webdriver import ActionChains

    whole = x_range(page)
    assert whole == [0, 600]
    drag(page, 0.25, 0.5)
    low, high = x_range(page)
    assert low == pytest.approx(150, abs=10) and high == pytest.approx(300, abs=10)
    assert x_range(page, 3) == [low, high]
    ActionChains(page.driver).double_click(page.find(f"{LOSS} .u-over")).perform()
    assert x_range(page) == x_range(page, 3) == whole


def test_x_axis_smoothing_and_logarithm(page: Page) -> None:
    page.find("option[value=epochs]").click()
    assert x_range(page) == [0, 10]
    assert legend(page)[0] == "10"
    page.find("option[value=seconds]").click()
    assert x_range(page)[1] == pytest.approx(600 * 0.3)
    rough = page.run("return selftask.charts.charts.plots[0].data[1].filter((y) => y != null)")
    page.run(
        "const s = document.querySelector('input[name=smooth]'); s.value = 0.9;"
        "s.dispatchEvent(new Event('input'))"
    )
    page.run("return new Promise((done) => setTimeout(done, 100))")
    smooth = page.run("return selftask.charts.charts.plots[0].data[2].filter((y) => y != null)")
    assert smooth[0] == pytest.approx(rough[0])
    mean = total = 0.0
    for value in rough:  # without the bias of its start
        mean, total = 0.9 * mean + 0.1 * value, 0.9 * total + 0.1
    assert smooth[-1] == pytest.approx(mean / total)
    page.find("input[name=log]").click()
    assert page.run("return selftask.charts.charts.plots[0].scales.y.distr") == 3
    assert page.console() == []


def test_layers_have_an_axis_of_their_own(page: Page) -> None:
    page.find("option[value=epochs]").click()  # of the curves over steps
    plot = "const plot = selftask.charts.layers.plots[0]; return "
    assert page.run(f"{plot}[plot.series[0].label, plot.scales.x.min, plot.scales.x.max]") == [
        *("layer", 0, 4)
    ]
    assert page.run(f"{plot}plot.data") == [[0, 1, 2, 3, 4], [0, 0.1, 0.2, 0.3, 0.4]]
    controls = page.find_all("#hidden-layers option")
    assert [o.text for o in controls if not o.get_property("hidden")] == ["layers"]
    assert page.console() == []


def test_a_click_on_a_name_hides_its_curve(page: Page) -> None:
    page.find(f"{LOSS} .u-series:nth-child(2) th").click()
    assert page.run("return selftask.charts.charts.plots[0].series[1].show") is False
    page.find("option[value=epochs]").click()  # drawn anew
    assert page.run("return selftask.charts.charts.plots[0].series[1].show") is False


def test_dark_as_the_system_and_by_the_button(report: Path) -> None:
    back = "return getComputedStyle(document.body).backgroundColor"
    with open_page(report, dark=True) as page:
        dark = page.run(back)
        assert sum(int(n) for n in dark[4:-1].split(",")) < 150
        page.find("#theme").click()
        assert sum(int(n) for n in page.run(back)[4:-1].split(",")) > 600
        page.run("localStorage.clear()")
        assert page.console() == []


def test_a_phone_does_not_scroll_sideways(report: Path) -> None:
    with open_page(report, size=PHONE) as page:
        assert page.overflow <= 0
        page.size(*DESKTOP)
        page.size(*PHONE)
        page.run("return new Promise((done) => setTimeout(done, 100))")
        assert page.overflow <= 0
        widths = page.run(
            "return [...document.querySelectorAll('canvas')].map((c) => c.offsetWidth)"
        )
        assert max(widths) <= PHONE[0]


def test_new_data_keep_the_zoom(page: Page) -> None:
    """For pages that follow a run."""
    drag(page, 0.25, 0.5)
    before = x_range(page)
    page.run("const g = selftask.charts.charts; g.setData(g.data)")
    assert x_range(page) == before
