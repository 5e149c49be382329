"""From JPEG files to updated weights: selftask beside other libraries, each with its own trainer.

    python -m venv --system-site-packages PEERS
    PEERS/bin/pip install lightly lightly-train stable-pretraining
    PEERS/bin/python tools/bench/end_to_end.py SMALL PHOTOS [--contests mae dino] [--rounds 5]

SMALL is a folder of classes with JPEGs of 32 pixels (CIFAR-10), PHOTOS one with photographs; files
are linked so often that no epoch ends. A library that does not run is named with its error.
solo-learn is left out: PyPI has only its version 1.0.2, which requires torch 1.9.1.

Every contestant (end_to_end_peers.py) is a process of its own with one thread, and one worker
process: reading, decoding, augmenting, collating, forward, backward and update. All but one are
stopped (SIGSTOP), workers too, so a turn goes on where the last one ended. All stay in memory: 8 to
12 GB. A turn lasts ``--steps`` steps, from the end of one to the end of another; the first step
after a stop does not count. Figures are milliseconds an image: CPU time of all processes of a
contestant, and wall time with all cores. Libraries but selftask compute in float32 on a CPU by
default; selftask's default is ``auto``. The last two columns are selftask's CPU time at ``auto``
and in float32, divided by that of the contestant in the same round: median over rounds, with its
95 % interval by bootstrap.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import selectors
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from end_to_end_peers import CONTESTANTS, CONTESTS, LACKS
from rounds import in_turns, median_and_interval

WARM_UP = 2  # steps after the start that do not count
PATIENCE_S = 300.0  # for a step, and for the start
QUIET = {
    "OMP_NUM_THREADS": "1",
    "LIGHTLY_TRAIN_EVENTS_DISABLED": "1",
    "LIGHTLY_DID_VERSION_CHECK": "True",
    "NO_ALBUMENTATIONS_UPDATE": "1",
    "HF_HUB_OFFLINE": "1",
    "WANDB_MODE": "offline",
}


class Contestant:
    """A training in processes of its own, which runs in turns."""

    def __init__(self, name: str, contest: str, precision: str, images: Path, out: Path) -> None:
        self.name, self.precision, self.batch = name, precision, CONTESTS[contest].batch
        self.turns: list[tuple[float, float]] = []  # CPU and wall milliseconds an image
        out.mkdir()
        reader, writer = os.pipe()
        script = Path(__file__).with_name("end_to_end_peers.py")
        words = [name, contest, precision, images, out, writer]
        with open(out / "log", "wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(script), *map(str, words)],
                cwd=out,
                env={**os.environ, **QUIET, "SPT_CACHE_DIR": str(out), "TMPDIR": str(out.parent)},
                stdout=log,
                stderr=log,
                pass_fds=[writer],
                start_new_session=True,
            )
        os.close(writer)
        self.marks = reader
        self.log = out / "log"
        self.selector = selectors.DefaultSelector()
        self.selector.register(reader, selectors.EVENT_READ)

    def wait(self, steps: int) -> bool:
        """Return True after that many steps, False if the process ended."""
        for _ in range(steps):
            if not self.selector.select(PATIENCE_S):
                return False
            if not os.read(self.marks, 1):
                return False
        return True

    def run(self, steps: int) -> None:
        """Run one turn, and record its figures."""
        os.killpg(self.process.pid, signal.SIGCONT)
        alive = self.wait(1)
        cpu, wall = self.cpu_seconds(), time.perf_counter()
        alive = alive and self.wait(steps)
        cpu, wall = self.cpu_seconds() - cpu, time.perf_counter() - wall
        self.stop()
        if not alive:
            raise SystemExit(f"{self.name} ended: {self.last_line()}")
        images = steps * self.batch
        self.turns.append((1e3 * cpu / images, 1e3 * wall / images))

    def cpu_seconds(self) -> float:
        """Return the CPU time of all processes of the group."""
        total = 0.0
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if os.getpgid(int(folder.name)) == self.process.pid:
                    total += time.clock_gettime(~int(folder.name) << 3 | 2)  # clock_getcpuclockid
            except OSError:  # ended meanwhile
                continue
        return total

    def stop(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGSTOP)

    def end(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        os.close(self.marks)

    def last_line(self) -> str:
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return lines[-1][:200] if lines else "no output"


def link_often(folder: Path, out: Path, count: int) -> Path:
    """Link the files of a folder of classes until there are ``count``, so that epochs are long."""
    files = sorted(path for path in folder.resolve().glob("*/*") if path.is_file())
    if not files:
        raise SystemExit(f"{folder}: no files in folders of classes")
    for number in range(max(count, len(files))):
        path = files[number % len(files)]
        link = out / path.parent.name / f"{number // len(files)}_{path.name}"
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(path)
    return out


def enter(contest: str, images: Path, folder: Path, ends: ExitStack) -> list[Contestant]:
    """Start all contestants, one after the other; each is stopped after its first steps."""
    entered = []
    for name in CONTESTANTS:
        if CONTESTS[contest].method in LACKS.get(name, ()):
            continue
        for precision in ("float32", "fast"):
            out = folder / f"{contest}_{name}_{precision}".replace(" ", "_").replace(",", "")
            contestant = Contestant(name, contest, precision, images, out)
            ends.callback(contestant.end)
            if contestant.wait(WARM_UP):
                contestant.stop()
                entered.append(contestant)
            else:
                print(f"{contest}: without {name}, {precision}: {contestant.last_line()}")
    return entered


def table(contest: str, entered: list[Contestant]) -> str:
    """Return the rows of a contest."""
    ours = {one.precision: one for one in entered if one.name == "selftask"}
    rows = []
    for one in entered:
        cpu, wall = zip(*one.turns, strict=True)
        label = "auto" if one.name == "selftask" and one.precision == "fast" else one.precision
        label = "bfloat16" if label == "fast" else label
        cells = [contest, one.name, label, f"{min(cpu):.2f}", f"{statistics.median(cpu):.2f}"]
        cells.append(f"{statistics.median(wall):.2f}")
        for precision in ("fast", "float32"):
            if one is ours.get(precision) or precision not in ours:
                cells.append("")
                continue
            ratios = [a[0] / b[0] for a, b in zip(ours[precision].turns, one.turns, strict=True)]
            ratio, low, high = median_and_interval(ratios)
            cells.append(f"{ratio:.2f} [{low:.2f}, {high:.2f}]")
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("small", type=Path)
    parser.add_argument("photos", type=Path)
    parser.add_argument("--contests", nargs="+", default=[""], help="beginnings of their names")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4)
    options = parser.parse_args()
    for name in ("torch", *CONTESTANTS):
        try:
            print(name, importlib.metadata.version(name), end="; ")
        except importlib.metadata.PackageNotFoundError as error:
            print(error, end="; ")
    print("\n| | library | precision | CPU, least | median | wall | auto / it | float32 / it |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        images = {
            32: link_often(options.small, Path(folder) / "small", 50_000),
            224: link_often(options.photos, Path(folder) / "photos", 20_000),
        }
        for contest, made in CONTESTS.items():
            if not contest.startswith(tuple(options.contests)):
                continue
            with ExitStack() as ends:
                entered = enter(contest, images[made.size], Path(folder), ends)
                for number in range(options.rounds):
                    for contestant in in_turns(entered, number):
                        contestant.run(options.steps)
                print(table(contest, entered), flush=True)


if __name__ == "__main__":
    main()
