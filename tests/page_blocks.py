"""The fenced blocks of a documentation page, in their order, for tests that run them."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
NAME = re.compile(r"# (\S+\.(?:py|yaml))(?: .*)?\n")


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, and the file that its first line names, if it is one."""

    language: str
    text: str

    @property
    def file(self) -> str | None:
        """``mine.py`` of a block that begins with ``# mine.py``."""
        matched = NAME.match(self.text) if self.language in ("python", "yaml") else None
        return matched[1] if matched else None

    @property
    def commands(self) -> list[list[str]]:
        """Words of the ``selftask`` commands, without their comments."""
        if self.language != "sh":
            return []
        lines = self.text.replace("\\\n", " ").splitlines()
        words = [shlex.split(line, comments=True) for line in lines]
        return [line[1:] for line in words if line[:1] == ["selftask"]]


def blocks(page: str) -> list[Block]:
    """The blocks of ``docs/page.md``."""
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    return [Block(language, body) for _, language, body in FENCE.findall(text)]


def sessions(page: str) -> list[tuple[str, str]]:
    """Words after ``$ selftask`` in the blocks of ``docs/page.md``, and the output below them."""
    texts = [block.text for block in blocks(page) if block.text.startswith("$ selftask ")]
    parts = [part for text in texts for part in re.split(r"^\$ selftask ", text, flags=re.M)[1:]]
    return [(command, output) for command, _, output in (part.partition("\n") for part in parts)]


def write_files(page: str, folder: Path) -> list[str]:
    """Write the blocks that are files; return their names."""
    named = [(block.file, block.text) for block in blocks(page) if block.file]
    for name, text in named:
        (folder / str(name)).write_text(text, encoding="utf-8")
    return [str(name) for name, _ in named]
