"""Write ``oldest.txt``: the oldest versions that setup.py allows, as constraints for pip.

python tools/release/oldest.py           write tools/release/oldest.txt
python tools/release/oldest.py --check   exit 1 if it does not fit setup.py

Of the core and of the extras for users. `make test-oldest` installs them and runs all quick tests.
Indirect requirements, which setup.py does not name, and the tools of the extra `test` are installed
in the newest version that fits.
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
TOOLS = {"test", "docs", "dev", "release"}  # extras for work on selftask itself
_REQUIREMENT = re.compile(r"([A-Za-z0-9_.-]+)(\[[a-z,]+\])?>=([0-9a-z.]+)$")


def requirements(setup: Path = ROOT / "setup.py") -> list[str]:
    """Return what setup.py requires for the core and for users' extras, read from its source."""
    tree = ast.walk(ast.parse(setup.read_text(encoding="utf-8")))
    values = {node.arg: node.value for node in tree if isinstance(node, ast.keyword)}
    if not {"install_requires", "extras_require"} <= values.keys():
        raise ValueError(f"{setup} has no install_requires or no extras_require")
    extras = values["extras_require"]
    assert isinstance(extras, ast.Dict)
    lists = [values["install_requires"]]
    for name, lines in zip(extras.keys, extras.values, strict=True):
        if name is not None and ast.literal_eval(name) not in TOOLS:
            lists.append(lines)
    return [line for lines in lists for line in ast.literal_eval(lines)]


def oldest(lines: list[str]) -> list[str]:
    """Return ``name==version`` for each requirement ``name>=version``."""
    pins = []
    for requirement in lines:
        match = _REQUIREMENT.match(requirement)
        if match is None:
            raise ValueError(f"setup.py: {requirement!r} has no lower bound, such as numpy>=2.1")
        pins.append(f"{match[1]}=={match[3]}")
    return pins


def main() -> int:
    """Write or check the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    text = "\n".join([HEADER, *oldest(requirements())]) + "\n"
    if parser.parse_args().check:
        same = FILE.exists() and FILE.read_text(encoding="utf-8") == text
        print(f"{FILE.name} fits setup.py" if same else f"{FILE.name} differs from setup.py")
        return 0 if same else 1
    FILE.write_text(text, encoding="utf-8")
    print(FILE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
