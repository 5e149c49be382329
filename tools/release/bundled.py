"""Libraries of others inside the wheels of the core, which the metadata of packages do not name.

Read from the license files and the shared libraries of the installed wheels. opencv's
LICENSE-3RD-PARTY.txt has a section for each library, NumPy's and SciPy's LICENSE.txt has blocks
of ``Name:``, ``Files:`` and ``License:``.
"""

from __future__ import annotations

import importlib.metadata
import re
import sys
from collections.abc import Iterator
from pathlib import PurePath
from typing import NamedTuple

PLATFORMS = {"linux": "Linux", "darwin": "macOS", "win32": "Windows"}
LICENSES = {
    "LGPL": r"LESSER GENERAL PUBLIC|LIBRARY GENERAL PUBLIC",
    "GPL": r"GENERAL PUBLIC",
    "OpenSSL": r"OpenSSL License",
}
"""Licenses by words of their texts, the first that fits; others are without conditions."""
OTHER = "see the wheel's license file"
_RULE = re.compile(r"^-{78,}$", re.MULTILINE)
_BLOCK = re.compile(r"^Name: (.+)\nFiles: .+\n(?:.+\n)*?License: (.+)$", re.MULTILINE)
_SENTENCE = re.compile(r"(.+?) (?:library )?(?:is|are) redistributed within (.+?)\.(?:\s|$)", re.S)


class Part(NamedTuple):
    """A library that a wheel contains."""

    name: str
    license: str


def parts(package: str) -> list[Part]:
    """Return what the license files of an installed package say of libraries inside it."""
    files = importlib.metadata.files(package) or []
    # opencv's wheel has the file twice: in cv2/ and among the metadata.
    named = [f for f in files if f.parts[0].endswith(".dist-info") and _is_license(f.name)]
    texts = [f.locate().read_text(encoding="utf-8", errors="replace") for f in named]
    return [part for text in texts for part in parts_of(text)]


def shared_libraries(package: str) -> list[str]:
    """Return the names of the shared libraries that were put into an installed wheel."""
    files = importlib.metadata.files(package) or []
    return sorted(f.name for f in files if f.parts[0].endswith(".libs") and ".so" in f.name)


def parts_of(text: str, platform: str = sys.platform) -> list[Part]:
    """Return the libraries that a license file names for wheels of this platform."""
    sections = [part for section in _RULE.split(text) for part in _of_section(section, platform)]
    return sections + [Part(*block) for block in _BLOCK.findall(text)]


def problems(package: str, parts: list[Part]) -> list[str]:
    """Return a line for each part under the GPL itself.

    The LGPL is admitted: its libraries are shared libraries, which can be replaced. So is the
    exception of GCC's runtime libraries, which frees the programs that use them.
    """
    admitted = re.compile(r"LGPL|Lesser|GCC-exception")
    return [
        f"{package}: contains {part.name}: copyleft: {part.license}"
        for part in parts
        if "GPL" in part.license and not admitted.search(part.license)
    ]


def table(packages: list[str]) -> str:
    """Return what the wheels contain, as a section of licenses.md."""
    lines = ["## Libraries inside the wheels", "", "| wheel | library | license |", "|---|---|---|"]
    for package in packages:
        lines += [f"| {package} | {part.name} | {part.license} |" for part in parts(package)]
    for package in packages:
        if libraries := shared_libraries(package):
            lines += ["", f"Shared libraries of {package}: {', '.join(libraries)}."]
    return "\n".join(lines) + "\n"


def _is_license(name: str) -> bool:
    return PurePath(name).stem.upper().startswith(("LICENSE", "LICENCE", "COPYING"))


def _of_section(section: str, platform: str) -> Iterator[Part]:
    """Yield the libraries of one section of opencv's file, of which the first lines name them."""
    head = section.strip().partition("\n\n")[0].partition("This license applies")[0]
    for name, wheels in _SENTENCE.findall(head):
        platforms = [word for word in PLATFORMS.values() if word in wheels]
        elsewhere = platforms and PLATFORMS[platform] not in platforms
        if "non-headless" not in wheels and not elsewhere:
            yield Part(" ".join(name.split()), _license(section))


def _license(text: str) -> str:
    """Return the license whose text this is."""
    fits = (name for name, words in LICENSES.items() if re.search(words, text, re.IGNORECASE))
    return next(fits, OTHER)
