"""Pages with copies and outliers of a data set: `data check --html`, `features rank=html`."""

from __future__ import annotations

import base64
import csv
import io
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from selftask.cli.main import main
from selftask.report.images.copies import joined

FIGURE = re.compile(r"<figure class=sample>(.*?)</figure>", re.DOTALL)
TILE = re.compile(
    r'class="tile (\w+)".*?title="([^"]*)" style="width:(\d+)px;height:(\d+)px;'
    r'background-position:-(\d+)px -(\d+)px"'
)
SHEET = re.compile(r"\.(\w+)\{background-image:url\(data:image/\w+;base64,([^)]*)\)")


def groups_of(page: Path) -> dict[str, list[tuple[str, dict[str, tuple[float, ...]]]]]:
    """Per section its groups: the text, and the mean color of each image by its name."""
    html = page.read_text(encoding="utf-8")
    assert " src=" not in html and "default-src 'none'" in html, "one file"
    sheets = {
        name: np.asarray(Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB"))
        for name, data in SHEET.findall(html)
    }
    groups: dict[str, list[tuple[str, dict[str, tuple[float, ...]]]]] = {}
    for figure in FIGURE.findall(html):
        text = re.search(r"<figcaption>(.*)</figcaption>", figure)
        assert text is not None
        colors = {}
        for name, title, *numbers in TILE.findall(figure):
            width, height, left, top = map(int, numbers)
            tile = sheets[name][top : top + height, left : left + width]
            colors[title] = tuple(tile.mean(axis=(0, 1)))
        groups.setdefault(name, []).append((text[1], colors))
    return groups


def save(path: Path, color: tuple[int, int, int], seed: int) -> None:
    noise = np.random.default_rng(seed).integers(-6, 7, (32, 40, 3))
    path.parent.mkdir(exist_ok=True)
    Image.fromarray((np.array(color) + noise).astype(np.uint8)).save(path)


RED, GREEN, BLUE = (200, 20, 20), (20, 200, 20), (20, 20, 200)


def test_the_duplicates_of_a_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, color, seed in (("a", RED, 0), ("b", GREEN, 1), ("c", BLUE, 2), ("d", RED, 3)):
        save(tmp_path / "images" / f"{name}.png", color, seed)
    for name, copies in (("a", ("e <b>", "f")), ("c", ("g",))):
        for copy in copies:
            content = (tmp_path / "images" / f"{name}.png").read_bytes()
            (tmp_path / "images" / f"{copy}.png").write_bytes(content)
    page = tmp_path / "copies.html"
    assert main(["data", "check", f"{tmp_path}/images", "--workers=1", f"--html={page}"]) == 0
    (red_text, red), (blue_text, blue) = groups_of(page)["copies"]
    assert (red_text, [*red]) == ("3 equal images", ["a.png", "e &lt;b&gt;.png", "f.png"])
    assert (blue_text, [*blue]) == ("2 equal images", ["c.png", "g.png"])
    for colors, expected in ((red, RED), (blue, BLUE)):
        assert np.allclose([*colors.values()], expected, atol=6)
    assert "2 groups of images with the same content; 2 are shown." in page.read_text()
    assert main(["data", "check", f"{tmp_path}/images", f"--html={tmp_path}/none/x.html"]) == 2
    assert f"--html {tmp_path}/none/x.html: there is no folder" in capsys.readouterr().err


def test_the_page_of_ranked_features(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An unreadable image has no row; names and colors of the others still fit."""
    for number in range(12):
        save(
            tmp_path / "images" / f"{number:02}.png",
            (230 - 17 * number, 20 + 17 * number, 20),
            number,
        )
    (tmp_path / "images/03.png").write_bytes(b"damaged")
    save(tmp_path / "images/12.png", (230 - 17 * 5, 20 + 17 * 5, 20), 5)  # the pixels of 05.png
    out = tmp_path / "out"
    words = ["features", "timm:test_resnet", "weights=none", f"data={tmp_path}/images"]
    words += ["eval.transforms=[normalize]", "data.num_workers=0", "data.max_unreadable=1"]
    assert main([*words, f"out={out}", "rank=html"]) == 0
    features = np.load(out / "features.npy").astype(np.float64)
    with (out / "images.csv").open(newline="") as file:
        names = [Path(row["path"]).name for row in csv.DictReader(file)]
    assert len(names) == 12 and "03.png" not in names
    features /= np.linalg.norm(features, axis=1, keepdims=True)
    cosines = features @ features.T - 3 * np.eye(12)
    groups = groups_of(out / "ranking.html")
    shown = []
    for text, colors in groups["rare"]:
        row, other = (names.index(name) for name in colors)
        shown.append(float(text.removeprefix("cosine ")))
        assert cosines[row, other] == pytest.approx(cosines[row].max(), abs=1e-6)
        assert shown[-1] == pytest.approx(cosines[row, other], abs=1e-4)
    assert len(shown) == 12 and shown == sorted(shown)
    first_text, first = groups["copies"][0]
    assert first_text == "cosine 1.0000" and {"05.png", "12.png"} <= first.keys()
    for _, colors in (*groups["copies"], *groups["rare"]):
        for name, color in colors.items():
            number = 5 if name == "12.png" else int(name[:2])
            assert np.allclose(color, (230 - 17 * number, 20 + 17 * number, 20), atol=9)
    capsys.readouterr()
    assert main([*words, f"out={tmp_path}/other", "rank=yes"]) == 2
    assert "rank=yes: expected true, false or html" in capsys.readouterr().err


def test_groups_are_connected_components() -> None:
    draws = np.random.default_rng(0)
    nearest = (np.arange(300) + draws.integers(1, 300, 300)) % 300
    cosines = draws.random(300)
    rows = np.argsort(-cosines)[:80]
    graph = coo_array((np.ones(80), (rows, nearest[rows])), shape=(300, 300))
    component = connected_components(graph, directed=False)[1]
    members = {*rows.tolist(), *nearest[rows].tolist()}
    expected = [
        {number for number in members if component[number] == kind}
        for kind in dict.fromkeys(component[rows])
    ]
    groups = joined(rows.tolist(), cosines.tolist(), nearest.tolist())
    assert [{*group.indices} for group in groups] == expected
    assert len(groups) < 80 and groups[0].text == f"cosine {cosines.max():.4f}"
