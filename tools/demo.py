"""Two minutes of self-supervised learning: SimCLR on handwritten digits, and its accuracy.

The images are rotated, scaled, shifted and vary in contrast, so that raw pixels or features of an
untrained network contain little information about the digit. No label is used in training.

    python tools/demo.py [OUT]          (`make demo` runs everything)
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from baselines import show
from selftask.cli.main import main as selftask


def main(out: str) -> int:
    """Train, then show k-NN and few-label accuracy of pixels, untrained and trained network."""
    shutil.rmtree(out, ignore_errors=True)
    code = selftask(["train", "simclr", f"out={out}"])
    if code:
        return code
    print(
        "\nAccuracy on rotated, scaled, shifted and noisy digits; no label was used for training."
    )
    print("They are hard without training: compare the trained network with the two rows above it.")
    show(out, [])
    print(f"\nthe weights: {Path(out) / 'export' / 'backbone.pt'}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else "runs/demo"))
