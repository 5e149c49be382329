"""README.md and docs/: links, anchors, names and commands exist."""

from __future__ import annotations

import re
import shlex
from functools import cache
from pathlib import Path

import pytest

import selftask.registry as registry
from manual import reference_pages
from selftask.cli.main import COMMANDS
from selftask.config.load import load_config

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
INDEX = ROOT / "docs" / "index.md"
NAMES_PAGE = ROOT / "docs" / "names.md"
PAGES = sorted((ROOT / "docs").glob("*.md"))
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """GitHub's anchors of the headings of a page."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def commands(page: Path) -> list[list[str]]:
    """Words of the ``selftask`` commands in ``sh`` blocks."""
    blocks = re.findall(r"^```sh\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    words = [shlex.split(line, comments=True) for line in lines]
    return [line[1:] for line in words if line[:1] == ["selftask"]]


@cache
def made_pages() -> set[str]:
    """Paths in docs/ of the pages that `make docs` writes."""
    return {f"reference/{name}" for name in reference_pages.pages()} | {
        f"methods/{name}.md" for name in ("index", *registry.METHODS.names())
    }


@pytest.mark.parametrize("page", [README, *PAGES], ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = target.partition("#")
        if "://" in path:
            continue
        if path.removeprefix("docs/") in made_pages():
            continue
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), target


def test_every_page_is_in_the_contents() -> None:
    """Sphinx says so too, but `make docs` is slow."""
    blocks = re.findall(r"^```{toctree}\n(.*?)^```", INDEX.read_text("utf-8"), re.M | re.S)
    lines = [line for block in blocks for line in block.splitlines() if not line.startswith(":")]
    listed = [line.strip("<> ").rpartition("<")[2] for line in lines if line]
    assert len(listed) == len(set(listed))
    assert {page.stem for page in PAGES} - {"index"} <= set(listed)


@pytest.mark.parametrize(
    ("key", "names"),
    [
        ("train.step", registry.TRAIN_STEPS),
        ("optimizer", registry.OPTIMIZERS),
        ("optimizer.schedule", registry.SCHEDULES),
        ("eval.evaluations", registry.EVALUATIONS),
        ("meters", registry.METERS),
        ("data.sampler", registry.SAMPLERS),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_names_page_lists_what_is_registered(key: str, names: registry.Registry) -> None:
    (row,) = re.findall(rf"^\| `{key}`.*$", NAMES_PAGE.read_text("utf-8"), re.MULTILINE)
    assert sorted(re.findall(r"`(\w+)`", row.split("|")[2])) == sorted(names)


@pytest.mark.parametrize("page", [README, *PAGES], ids=lambda page: page.stem)
def test_commands_exist(page: Path) -> None:
    assert {words[0] for words in commands(page)} <= {*COMMANDS, "help", "--help", "--version"}


@pytest.mark.parametrize("page", [README, *PAGES], ids=lambda page: page.stem)
def test_files_exist(page: Path) -> None:
    names = re.findall(r"`((?:tests|ssl)/[\w./]+\.py)`", page.read_text(encoding="utf-8"))
    assert not [name for name in names if "NAME" not in name and not (ROOT / name).exists()]


@pytest.mark.slow
@pytest.mark.parametrize("page", [README, *PAGES], ids=lambda page: page.stem)
def test_keys_of_commands_exist(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files that they name do not; recipes of docs/methods.md run in a test of their own."""
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)  # W&B has no login on this machine
    weights = tmp_path / "weights.pt"
    weights.touch()
    for command, recipe, *words in filter(lambda words: len(words) > 1, commands(page)):
        if command not in ("train", "finetune") or recipe.endswith(".yaml"):
            continue
        if page.stem.startswith("how-to-"):  # test_how_to_pages.py runs these commands
            continue
        words = [re.sub(r"^init\.backbone=.*", f"init.backbone={weights}", word) for word in words]
        words = [re.sub(r"=(\w+)(,\w+)+$", r"=\1", word) for word in words]  # a sweep
        words = [word for word in words if not word.startswith(("resume=", "weights="))]
        if page.stem == "data":  # its keys depend on the kind of file that is found
            words = [word for word in words if not word.startswith("data")]
        if not any(word.startswith(("data=", "data.path=")) for word in words):
            words.append("data=digits")
        load_config(recipe if command == "train" else "supervised/finetune", words)
