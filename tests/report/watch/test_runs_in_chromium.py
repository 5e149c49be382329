"""Comparison and live pages in a real browser: sorting, switching, updates while rows come."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from chromium import PHONE, Page, open_page
from run_folders import row, write_run
from selftask.cli.main import main
from selftask.cli.monitor.runs import lines_of
from selftask.report.watch.access import Access
from selftask.report.watch.server import Server, open_server
from selftask.report.watch.site import Site

pytestmark = pytest.mark.slow


def wait_until(done: Callable[[], bool], what: str, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


def column(page: Page, table: str, number: int) -> list[str]:
    """Texts of a column of a table, from the top; in one go, as rows are replaced."""
    script = "return [...document.querySelectorAll(arguments[0])].map((e) => e.innerText.trim())"
    return list(page.run(script, f"#{table} tbody tr td:nth-child({number})"))


def click(page: Page, css: str) -> None:
    """Click on the first element that matches, wherever it is on the page."""
    page.run("document.querySelector(arguments[0]).click()", css)


@pytest.fixture
def comparison(tmp_path: Path) -> Path:
    for lr, values in {0.1: (0.6, 0.62), 0.3: (0.8, 0.7), 1.0: (0.5, 0.4)}.items():
        for seed, knn in enumerate(values):
            config = {"optimizer": {"lr": lr}, "train": {"seed": seed}}
            write_run(tmp_path / f"s/lr_{lr}_seed_{seed}", knn=knn, loss=lr + 1, config=config)
    write_run(tmp_path / "s/bad", "failed", steps=3, knn=None, config={"optimizer": {"lr": 9.0}})
    assert main(["report", str(tmp_path / "s")]) == 0
    return tmp_path / "s/report.html"


def test_comparison_sorts_and_switches(comparison: Path) -> None:
    with open_page(comparison) as page:
        assert column(page, "groups", 1) == ["lr 0.3", "lr 0.1", "lr 1", "lr 9"]
        loss = page.find("#groups thead th:nth-child(5) button")
        assert loss.text == "loss"
        click(page, "#groups thead th:nth-child(5) button")  # small is good
        assert column(page, "groups", 1) == ["lr 0.1", "lr 0.3", "lr 1", "lr 9"]
        click(page, "#groups thead th:nth-child(5) button")
        assert column(page, "groups", 1)[-1] == "lr 0.1"
        click(page, "#groups thead th:nth-child(3) button")
        assert column(page, "groups", 1) == ["lr 0.3", "lr 0.1", "lr 1", "lr 9"], "none is last"
        shown = "return selftask.charts.charts.plots[0].series.slice(1).map((s) => s.show)"
        assert page.run(shown) == [True] * 6
        click(page, 'input[data-group="0"]')
        assert page.run(shown) == [False] * 2 + [True] * 4, "both seeds of the group"
        click(page, 'input[data-group="0"]')
        assert page.run(shown) == [True] * 6
        click(page, ".u-legend tr:nth-child(3) th")
        assert page.run(shown).count(False) == 1
        link = page.find("#runs tbody a").get_attribute("href")
        page.driver.get(link)
        assert "lr_0.3_seed_" in page.driver.title
        assert page.console() == []
        assert [a for a in page.network() if not a.startswith("file:")] == []


def test_comparison_on_a_phone(comparison: Path) -> None:
    with open_page(comparison, size=PHONE) as page:
        assert page.overflow <= 0 and page.console() == []


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[tuple[Path, Server, str]]:
    root = tmp_path / "runs"
    write_run(root / "going", "running", steps=8, total=400, knn=0.5)
    write_run(root / "good", knn=0.9)
    write_run(root / "poor", knn=0.1)
    site = Site(root, lambda: lines_of([root]))
    server = open_server(site, Access("127.0.0.1"), 0)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    yield root, server, f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def append(run: Path, *rows: dict[str, float]) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write("".join(json.dumps(one) + "\n" for one in rows))


def test_the_table_follows_and_stays_sorted(watched: tuple[Path, Server, str]) -> None:
    root, _, url = watched
    with open_page(url) as page:
        page.run("window.opened = 'once'")
        page.run(
            "[...document.querySelectorAll('#runs th button')]"
            ".find((head) => head.textContent === 'knn_top1').click()"
        )
        assert column(page, "runs", 2) == ["good", "going", "poor"]
        page.run("document.querySelector('#runs input[value=poor]').click()")
        append(root / "going", row(9, 1.5), {"step": 9, "epoch": 2.25, "knn_top1": 0.95})
        wait_until(lambda: column(page, "runs", 2) == ["going", "good", "poor"], "no update")
        assert page.run("return document.querySelector('#runs input[value=poor]').checked")
        assert page.find("#compare").get_attribute("href").endswith("/compare?run=poor")
        write_run(root / "new", "failed", knn=0.2, log="RUN FAILED at step 3: <img src=x>")
        wait_until(lambda: len(column(page, "runs", 2)) == 4, "the new run is missing")
        row_of_new = (
            "return document.querySelector('#runs input[value=new]').closest('tr').innerText"
        )
        assert "<img src=x>" in page.run(row_of_new)
        assert page.run("return window.opened") == "once", "the page was not loaded again"
        assert page.console() == []
        page.run("window.fetch = () => Promise.reject(new Error('refused'))")
        wait_until(lambda: "no answer" in page.find("#live-status").text, "the stop is not told")


def test_a_run_follows_with_zoom_and_place_kept(watched: tuple[Path, Server, str]) -> None:
    root, _, url = watched
    last = "return selftask.charts.charts.data.charts[0].curves[0].x.at(-1)"
    zoom = "return selftask.charts.charts.zoom"
    with open_page(f"{url}/run/going/") as page:
        page.run("window.opened = 'once'; scrollTo({top: 200, behavior: 'instant'})")
        place = page.run("return scrollY")
        assert page.run(last) == 8 and place == 200
        wait_until(lambda: "8" in page.find(".u-legend").text, "not drawn")
        page.run("selftask.charts.charts.setZoom([2, 6])")
        wait_until(lambda: page.run(zoom) == [2, 6], "no zoom")
        append(root / "going", *(row(step, 1.0) for step in range(9, 13)))
        wait_until(lambda: page.run(last) == 12, "the new rows are missing")
        assert page.run(zoom) == [2, 6] and page.run("return scrollY") == place
        scale = page.run(
            "const {min, max} = selftask.charts.charts.plots[0].scales.x; return [min, max]"
        )
        assert scale == [2, 6]
        assert page.run("return window.opened") == "once"
        kept = (root / "going/metrics.jsonl").read_text().splitlines()[:5]
        (root / "going/metrics.jsonl").write_text("\n".join(kept) + "\n")  # a resume
        wait_until(lambda: page.run(last) == 5, "the rows of before are still there")
        assert page.console() == []
    with open_page(f"{url}/run/going/", size=PHONE) as page:
        assert page.overflow <= 0
