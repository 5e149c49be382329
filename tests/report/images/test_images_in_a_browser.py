"""The images of a report in headless Chromium: mouse, touch, keyboard, phone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pictured import CLASSES, gathered

from chromium import PHONE, Page, open_page
from selftask.data.inspect.contact_sheet import Row
from selftask.report.images.class_table import class_section
from selftask.report.images.embedding_map import Projection, map_section
from selftask.report.images.neighbors import neighbors_section
from selftask.report.images.patch_maps import patch_section
from selftask.report.images.projections import pca
from selftask.report.images.reconstructions import reconstruction_section
from selftask.report.images.views import views_section
from selftask.report.page import write_page

pytestmark = pytest.mark.slow
IMAGES = gathered(90)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page of all sections, with names that would be code if they were not escaped."""
    draws = np.random.default_rng(0)
    scores, _ = pca(IMAGES.features, 2)
    projections = {
        "pca": Projection("PCA", scores, ("→ one", "↑ two")),
        "tsne": Projection("t-SNE", draws.normal(size=(len(IMAGES), 2))),
    }
    views = [draws.integers(0, 256, (48, 48, 3)).astype(np.uint8) for _ in range(12)]
    rows = [Row(f"<u>{n}.png", np.zeros((30, 90, 3), np.uint8), views) for n in range(3)]
    names = [f"local {number} <i>" for number in range(12)]
    pixels = draws.integers(0, 256, (4, 32, 32, 3)).astype(np.uint8)
    some = [f"<img src=x onerror=alert(1)>{n}" for n in range(4)]
    sections = [
        views_section(rows, names, ["a </q> caption"] * 3, "A <note>"),
        neighbors_section(IMAGES, [0, 1, 2]),
        map_section(IMAGES, projections),
        class_section(IMAGES),
        patch_section(list(pixels), some, draws.normal(size=(4, 8, 8, 6))),
        reconstruction_section({"image": pixels, "masked": pixels // 2}, some, "A <note>"),
    ]
    page = tmp_path_factory.mktemp("page") / "images.html"
    write_page(page, "<b>images</b>", sections)
    return page


@pytest.fixture
def page(path: Path) -> Iterator[Page]:
    with open_page(path) as opened:
        opened.run("document.querySelector('#map').scrollIntoView({behavior: 'instant'})")
        yield opened
        assert opened.console() == [] and opened.network() == []


def middle(page: Page, number: int) -> tuple[float, float]:
    """Position of a point in the window."""
    script = (
        "const b = document.querySelectorAll('.points use')[arguments[0]].getBoundingClientRect();"
        "return [b.left + b.width / 2, b.top + b.height / 2]"
    )
    x, y = page.run(script, number)
    return float(x), float(y)


def mouse(page: Page, kind: str, x: float, y: float, **more: Any) -> None:
    event = {"type": kind, "x": x, "y": y, "pointerType": "mouse", **more}
    page.driver.execute_cdp_cmd("Input.dispatchMouseEvent", event)


def shown_text(page: Page) -> list[str]:
    """Lines of the shown image; empty if none is."""
    script = (
        "const t = document.querySelector('.map-tip'); if (t.hidden) return [];"
        "return [...t.querySelectorAll('.words span')].map(s => s.textContent)"
    )
    return list(page.run(script))


def shown_points(page: Page) -> int:
    script = "return [...document.querySelectorAll('.points use')]"
    return int(page.run(f"{script}.filter(p => p.style.display !== 'none').length"))


def lonely(count: int) -> list[int]:
    """Points of the first projection that have no other one near them."""
    places, _ = pca(IMAGES.features, 2)
    distances = np.linalg.norm(places[:, None] - places[None], axis=2)
    np.fill_diagonal(distances, np.inf)
    return [int(row) for row in np.argsort(-distances.min(axis=1))[:count]]


def test_the_mouse_shows_thumbnail_class_and_name(page: Page) -> None:
    for number in lonely(3):
        mouse(page, "mouseMoved", *middle(page, number))
        assert shown_text(page) == [IMAGES.label_text(number), IMAGES.names[number]]
        tile = page.find(".map-tip .tile")
        assert tile.size == {"width": 40 + number % 5, "height": 40}
        assert "data:image" in tile.value_of_css_property("background-image")
    mouse(page, "mouseMoved", 2, 2)
    assert shown_text(page) == []


def test_the_page_shows_texts_as_they_are(page: Page) -> None:
    text = page.find("body").text
    for written in ("<u>1.png", "local 3 <i>", "a </q> caption", "<img src=x", CLASSES[1]):
        assert written in text, written
    assert not page.find_all("body b.injected, main img")


def test_arrow_keys_go_from_image_to_image(page: Page) -> None:
    drawing = page.find(".map-frame svg")
    seen = []
    for key in ("\ue014", "\ue014", "\ue015", "\ue012"):  # right, right, down, left
        drawing.send_keys(key)
        seen.append(tuple(shown_text(page)))
    assert all(seen) and len(set(seen)) >= 3
    drawing.send_keys("\ue00c")  # escape
    assert shown_text(page) == []


def test_zoom_by_drag_and_back_by_double_click(page: Page) -> None:
    assert shown_points(page) == len(IMAGES)
    box = page.run("return document.querySelector('.map-frame svg').getBoundingClientRect()")
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    mouse(page, "mousePressed", x - 60, y - 60, button="left", clickCount=1)
    mouse(page, "mouseMoved", x, y, button="left", buttons=1)
    assert page.find(".drag").get_attribute("visibility") == "visible"
    mouse(page, "mouseReleased", x + 60, y + 60, button="left", clickCount=1)
    assert 0 < shown_points(page) < len(IMAGES)
    for count in (1, 2):
        mouse(page, "mousePressed", x, y, button="left", clickCount=count)
        mouse(page, "mouseReleased", x, y, button="left", clickCount=count)
    assert shown_points(page) == len(IMAGES)
    page.find("[data-zoom='1.5']").click()
    page.find("[data-zoom='1.5']").click()
    assert shown_points(page) < len(IMAGES)
    page.find("[data-zoom='0']").click()
    assert shown_points(page) == len(IMAGES)


def test_projections_and_classes_are_chosen(page: Page) -> None:
    before = middle(page, 0)
    page.find("[data-projection='tsne']").click()
    assert middle(page, 0) != before
    assert page.find(".axis.across").text == ""
    page.find("[data-projection='pca']").click()
    assert middle(page, 0) == before and page.find(".axis.across").text == "→ one"
    keys = page.find_all(".legend .key")
    assert len(keys) == len(CLASSES)
    keys[0].click()
    dim = page.find_all(".points .dim")
    assert len(dim) == int((IMAGES.labels != 0).sum())
    keys[0].click()
    assert not page.find_all(".points .dim")


def test_a_phone_shows_all_of_it(path: Path, page: Page) -> None:
    with open_page(path, size=PHONE, dark=True) as phone:
        assert phone.overflow == 0, "it would scroll sideways"
        phone.run("document.querySelector('#map').scrollIntoView({behavior: 'instant'})")
        (number,) = lonely(1)
        x, y = middle(phone, number)
        for kind, points in (("touchStart", [{"x": x + 5, "y": y + 5}]), ("touchEnd", [])):
            phone.driver.execute_cdp_cmd(
                "Input.dispatchTouchEvent", {"type": kind, "touchPoints": points}
            )
        assert shown_text(phone) == [IMAGES.label_text(number), IMAGES.names[number]]
        assert phone.console() == [] and phone.network() == []
