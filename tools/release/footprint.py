"""Start-up time of selftask and size of its installation, for installation.md.

python tools/release/footprint.py [--repeats 5]

Prints CPU seconds of new processes (minimum of several), and bytes on disk of the packages that the
core requires; torch with CUDA's libraries is listed separately.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

from packaging.utils import canonicalize_name
from sbom import core_packages

COMMANDS = {
    "python -c pass": ["-c", "pass"],
    "import selftask": ["-c", "import selftask"],
    "selftask --help": ["-m", "selftask", "--help"],
    "selftask list": ["-m", "selftask", "list"],
    "selftask config simclr": ["-m", "selftask", "config", "simclr"],
    "import torch": ["-c", "import torch"],
}
WITH_TORCH = ("torch", "torchvision", "triton", "nvidia-", "cuda-")


def cpu_seconds(words: list[str], repeats: int) -> float:
    """Return the minimum CPU time of a Python process with these arguments."""
    costs = []
    with tempfile.TemporaryDirectory() as empty:
        for _ in range(repeats):
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            run = [sys.executable, *words]
            subprocess.run(run, cwd=empty, check=True, stdout=subprocess.DEVNULL)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            costs.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(costs)


def size(name: str) -> int:
    """Return the bytes on disk of an installed package's files."""
    files = importlib.metadata.files(name) or []
    paths = {Path(str(file.locate())) for file in files if "__pycache__" not in file.parts}
    return sum(path.stat().st_size for path in paths if path.is_file())


def own_size() -> int:
    """Return the bytes of selftask's own package, which may be installed as a link."""
    import selftask

    folder = Path(selftask.__file__).parent
    kept = (path for path in folder.rglob("*") if "__pycache__" not in path.parts)
    return sum(path.stat().st_size for path in kept if path.is_file())


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    repeats: int = parser.parse_args().repeats
    print(
        f"python {sys.version.split()[0]}, {os.cpu_count()} cores; CPU seconds, least of {repeats}"
    )
    for label, words in COMMANDS.items():
        print(f"  {label:<24}{cpu_seconds(words, repeats):6.2f}")
    sizes = {name: size(name) for name in core_packages()}
    heavy = {name for name in sizes if canonicalize_name(name).startswith(WITH_TORCH)}
    rest = sum(size for name, size in sizes.items() if name not in heavy)
    print("size on disk, MB")
    print(f"  {'selftask':<24}{own_size() / 1e6:6.1f}")
    print(f"  {f'other {len(sizes) - len(heavy)} packages':<24}{rest / 1e6:6.0f}")
    for name in sorted(set(sizes) - heavy, key=lambda name: -sizes[name])[:6]:
        print(f"    {name:<22}{sizes[name] / 1e6:6.0f}")
    total = sum(sizes[name] for name in heavy)
    print(f"  {'torch and its libraries':<24}{total / 1e6:6.0f}")


if __name__ == "__main__":
    main()
