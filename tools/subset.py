"""Write a text list of N images per class from a tree of class folders, for `data=LIST.txt`.

python tools/subset.py cifar10/train 2000 cifar10_20k.txt
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("folder", type=Path, help="one sub-folder for each class")
    parser.add_argument("count", type=int, help="images of each class")
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    draw = random.Random(options.seed)
    lines = []
    for label, folder in enumerate(sorted(p for p in options.folder.iterdir() if p.is_dir())):
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        chosen = draw.sample(files, min(options.count, len(files)))
        lines += [f"{path.resolve()}\t{label}" for path in sorted(chosen)]
    options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{len(lines)} images of {label + 1} classes in {options.out}")


if __name__ == "__main__":
    main()
