"""Packages of an installation of selftask, and their licenses.

python tools/release/sbom.py [--out dist]

Writes dist/sbom.json (CycloneDX, by cyclonedx-bom) and dist/licenses.md (by pip-licenses, and
bundled.py for the libraries inside the wheels) for selftask and all direct and indirect
requirements of its core, as installed in this environment. Extras and developer tools are not
included. The exit code is 1 if a license is copyleft or unknown.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import bundled
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PACKAGE = "selftask"
COPYLEFT = re.compile(
    r"\b(A|L)?GPL|General Public Licen[sc]e|EUPL|SSPL|CC-BY-SA|OSL-", re.IGNORECASE
)
FREE = re.compile(
    r"MIT|BSD|Apache|PSF|Python Software|ISC|HPND|MPL|Mozilla|Unlicense|Public Domain|Zlib|NVIDIA|"
    r"Boost|CC0|0BSD",
    re.IGNORECASE,
)
"""Licenses without conditions for programs that use the package. MPL requires publishing changes of
its own files only; NVIDIA's are those of the CUDA libraries that torch wheels require.
"""
EMPTY = {"cuda-toolkit": "NVIDIA: an empty package that requires the CUDA libraries"}
"""Licenses of packages whose metadata have none."""

NAMELESS = ("OSI Approved", "Other/Proprietary License")
"""Ends of classifiers that name no license; the field ``License`` does."""


def core_packages(root: str = PACKAGE) -> list[str]:
    """Return the canonical names of ``root``'s direct and indirect requirements, without extras."""
    closure: set[str] = set()
    waiting = [(root, frozenset[str]())]
    while waiting:
        name, extras = waiting.pop()
        for text in importlib.metadata.requires(name) or ():
            requirement = Requirement(text)
            marker = requirement.marker
            wanted = marker is None or any(marker.evaluate({"extra": e}) for e in (extras or {""}))
            other = canonicalize_name(requirement.name)
            if wanted and other not in closure:
                closure.add(other)
                waiting.append((other, frozenset(requirement.extras)))
    return sorted(closure)


def license(name: str) -> str:
    """Return a package's license from its metadata: expression, classifiers or text."""
    metadata = importlib.metadata.metadata(name)
    classifiers = [
        text.rpartition(" :: ")[2]
        for text in metadata.get_all("Classifier") or ()
        if text.startswith("License :: ") and not text.endswith(NAMELESS)
    ]
    expression = (
        metadata.get("License-Expression") or ", ".join(classifiers) or metadata.get("License")
    )
    return (expression or EMPTY.get(name, "")).strip().partition("\n")[0]


def problems(packages: list[str]) -> list[str]:
    """Return a line for each package whose license is copyleft or unknown."""
    lines = []
    for name in packages:
        terms = license(name)
        if COPYLEFT.search(terms):
            lines.append(f"{name}: copyleft: {terms}")
        elif not FREE.search(terms):
            lines.append(f"{name}: unknown license: {terms or 'none given'}")
        lines += bundled.problems(name, bundled.parts(name))
    return lines


def write_sbom(path: Path, packages: list[str]) -> None:
    """Write the CycloneDX document of these packages."""
    words = [sys.executable, "-m", "cyclonedx_py", "environment", "--output-format", "JSON"]
    whole = json.loads(
        subprocess.run([*words, sys.executable], check=True, capture_output=True).stdout
    )
    kept = {*packages, PACKAGE}
    components = [c for c in whole["components"] if canonicalize_name(c["name"]) in kept]
    refs = {component["bom-ref"] for component in components}
    missing = kept - {canonicalize_name(component["name"]) for component in components}
    if missing:
        raise SystemExit(f"{path}: cyclonedx does not know {', '.join(sorted(missing))}")
    whole["components"] = components
    whole["dependencies"] = [_within(d, refs) for d in whole["dependencies"] if d["ref"] in refs]
    path.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")


def _within(dependency: dict[str, Any], refs: set[str]) -> dict[str, Any]:
    """Return the dependency with only those targets that are kept."""
    return {**dependency, "dependsOn": [r for r in dependency.get("dependsOn", []) if r in refs]}


def write_licenses(path: Path, packages: list[str]) -> None:
    """Write the licenses, with the addresses of the projects, and what their wheels contain."""
    words = ["-m", "piplicenses", "--format=markdown", "--with-urls", "--order=name"]
    done = subprocess.run(
        [sys.executable, *words, "--packages", *packages],
        check=True,
        capture_output=True,
        text=True,
    )
    head = f"# Licenses\n\nOf what selftask requires; selftask itself: {license(PACKAGE)}.\n\n"
    path.write_text(f"{head}{done.stdout}\n{bundled.table(packages)}", encoding="utf-8")


def main() -> int:
    """Write both files; return 1 if there are problems with licenses."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("dist"))
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    packages = core_packages()
    write_sbom(out / "sbom.json", packages)
    write_licenses(out / "licenses.md", packages)
    print(f"{out}/sbom.json, {out}/licenses.md: {len(packages)} packages")
    messages = problems(packages)
    print("\n".join(messages))
    return 1 if messages else 0


if __name__ == "__main__":
    sys.exit(main())
