"""Write ``oldest.txt``: the oldest versions that setup.py allows, as constraints for pip.

python tools/release/oldest.py           write tools/release/oldest.txt
python tools/release/oldest.py --check   exit 1 if it does not fit setup.py

`make test-oldest` installs them and trains. Indirect requirements, which setup.py does not name,
are installed in the newest version that fits.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FILE = Path(__file__).with_suffix(".txt")
HEADER = "# Written by tools/release/oldest.py from setup.py's lower bounds: `make test-oldest`"
_REQUIREMENT = re.compile(r"([A-Za-z0-9_.-]+)(\[[a-z,]+\])?>=([0-9a-z.]+)$")


def core_requirements(setup: Path = ROOT / "setup.py") -> list[str]:
    """Return ``install_requires``, read from the source of setup.py."""
    for node in ast.walk(ast.parse(setup.read_text(encoding="utf-8"))):
        if isinstance(node, ast.keyword) and node.arg == "install_requires":
            found: list[str] = ast.literal_eval(node.value)
            return found
    raise ValueError(f"{setup} has no install_requires")


def oldest(requirements: list[str]) -> list[str]:
    """Return ``name==version`` for each requirement ``name>=version``."""
    pins = []
    for requirement in requirements:
        match = _REQUIREMENT.match(requirement)
        if match is None:
            raise ValueError(f"setup.py: {requirement!r} has no lower bound, such as numpy>=1.24")
        pins.append(f"{match[1]}=={match[3]}")
    return pins


def main() -> int:
    """Write or check the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    text = "\n".join([HEADER, *oldest(core_requirements())]) + "\n"
    if parser.parse_args().check:
        same = FILE.exists() and FILE.read_text(encoding="utf-8") == text
        print(f"{FILE.name} fits setup.py" if same else f"{FILE.name} differs from setup.py")
        return 0 if same else 1
    FILE.write_text(text, encoding="utf-8")
    print(FILE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
