"""The documentation builds without a warning, and its pages need no network."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

pytest.importorskip("sphinx")
ROOT = Path(__file__).resolve().parents[2]
LOADS = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}
QUESTIONS = {
    "labels only for evaluation": ("how-to-own-data", "evaluation only"),
    "emb_std": ("reference/runs", "emb_std"),
    "11.09": ("expected-curves", "11.09"),
    "continue from DINOv2": ("how-to-continue", "DINOv2"),
    "stop a sweep": ("slurm", "selftask cancel"),
}  # of newcomers -> the page that answers, and words of the answer


class Page(HTMLParser):
    """What a page links to, loads, and names as an anchor."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(file.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value for name, value in attrs if value}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        if given.get(LOADS.get(tag, "")) and given.get("rel", "icon") in (
            "stylesheet",
            "icon",
            "preload",
        ):
            self.loaded.append(given[LOADS[tag]])


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pages, built as `make docs` does."""
    out = tmp_path_factory.mktemp("docs")
    options = ["-W", "-n", "--keep-going", "-q", "-E", "-b", "html", "-d", str(out / "doctrees")]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "sphinx", *options, "docs", str(out / "html")],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr  # by -W, each warning of Sphinx is an error
    return out / "html"


@pytest.fixture(scope="module")
def pages(built: Path) -> dict[Path, Page]:
    return {path: Page(path) for path in sorted(built.rglob("*.html"))}


def broken(pages: dict[Path, Page]) -> Iterator[str]:
    """Yield the links within the documentation that lead nowhere."""
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            known = pages[target].anchors if target in pages else None
            if not target.is_file():
                yield f"{path.name}: {link}"
            elif parts.fragment and known and unquote(parts.fragment) not in known:
                yield f"{path.name}: {link}: no such anchor"


@pytest.mark.slow
def test_every_link_leads_somewhere(pages: dict[Path, Page]) -> None:
    assert len(pages) > 30
    assert list(broken(pages)) == []


@pytest.mark.slow
def test_a_broken_link_is_seen(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text('<a href="b.html#x">b</a><a href="c.html">c</a>')
    (tmp_path / "b.html").write_text('<p id="y">b</p>')
    pages = {path: Page(path) for path in tmp_path.glob("*.html")}
    assert list(broken(pages)) == ["a.html: b.html#x: no such anchor", "a.html: c.html"]


@pytest.mark.slow
def test_pages_load_nothing_from_elsewhere(built: Path, pages: dict[Path, Page]) -> None:
    for path, page in pages.items():
        assert [at for at in page.loaded if urlsplit(at).netloc] == [], path
        for at in page.loaded:
            local = (path.parent / unquote(urlsplit(at).path)).resolve()
            assert at.startswith("data:") or local.is_file(), (path, at)
    for style in built.rglob("*.css"):
        assert not re.search(r"(url\(|@import)\s*[\"']?(https?:)?//", style.read_text("utf-8"))


@pytest.mark.slow
@pytest.mark.parametrize("question", QUESTIONS)
def test_the_front_page_answers(pages: dict[Path, Page], built: Path, question: str) -> None:
    """A newcomer's question stands on the front page, beside a link to the answer."""
    text = (built / "index.html").read_text(encoding="utf-8")
    rows = [row for row in re.findall(r"<tr.*?</tr>", text, re.S) if question in _plain(row)]
    page, answer = QUESTIONS[question]
    assert any(f'href="{page}.html' in row for row in rows)
    assert answer in _plain((built / f"{page}.html").read_text("utf-8"))


def _plain(html: str) -> str:
    return re.sub(r"<[^>]+>", "", html)
