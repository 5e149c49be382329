"""Smoke test of an installation: train, stop, resume, evaluate, export.

python tools/release/smoke.py

Runs `selftask` with the same Python in an empty folder; used by `make test-oldest` and `make
test-newest`. The exit code is 1 at the first command without the expected output, which is shown.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile

SMALL = ("train.max_steps=4", "train.batch_size=32", "backbone.width=8", "data.num_workers=1")
TRAIN = ("train", "simclr", "out=run", *SMALL)
COMMANDS = (
    (("env",), "torch"),
    (("list", "hooks"), "progress"),
    (("config", "moco/images", "data=images"), "command line: data=images"),
    ((*TRAIN, "train.stop_at=2"), "RUN interrupted by train.stop_at=2"),
    (TRAIN, "resumes at step 2 of 4"),
    (TRAIN, "RUN finished already"),
    (("eval", "knn", "run"), '"knn_top1"'),
    (("eval", "linear", "run"), '"linear_top1"'),
    (("features", "run", "out=features"), "1,347 images"),
    (("export", "run", "--to", "safetensors"), "backbone.pt"),
    (("train", "mae", "out=mae", "train.max_steps=1", "train.batch_size=32"), "RUN finished"),
    (("check", "byol", "--ranks", "1,2", "--steps", "1"), "SAME: byol on 2 ranks"),
)  # (arguments, expected part of the output)


def main() -> int:
    """Run the commands; return 1 at the first failure."""
    with tempfile.TemporaryDirectory() as folder:
        for words, expected in COMMANDS:
            run = [sys.executable, "-m", "selftask", *words]
            done = subprocess.run(run, cwd=folder, capture_output=True, text=True, check=False)
            if expected not in done.stdout:
                print(f"FAILED: selftask {' '.join(words)}: no {expected!r} in its output")
                print(done.stdout[-4000:], done.stderr[-4000:], sep="\n")
                return 1
            print(f"ok: selftask {' '.join(words)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
