"""Time to open a list of paths, and the private memory that it needs.

    python tools/bench/file_list.py [--count 1e6] [--rounds 5] [--tree 100000] [--alone]

``open`` is the CPU time until the list can be used, ``get`` the time of reading one of 10,000
random paths, and ``own`` the private memory for both, without shared file pages. Each figure is
measured in a separate process, forked from one that has imported everything. Each round runs every
entry once, and medians are shown. Files are in the page cache.

    selftask        the index of a list or a folder, mapped
    arrow           Arrow's IPC file, mapped
    numpy           an array of fixed-width strings, mapped
    parquet         one column, read
    text            lines of a text file, read
    pickle          a pickled list of strings
    pickle, labels  a pickled list of (path, label): torchvision's ImageFolder.samples
    json            a list of strings

--alone measures selftask only, for lists that are too large for the others.

Then a folder of --tree empty files (0: none) is scanned: first scan, next scan without changes,
scan after adding a file, and the same with torchvision and a sorted os.walk.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import pickle
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "ssl"))

from selftask.data.reading import index as store
from selftask.data.reading.path_list import read_list
from selftask.data.reading.scan import scan_folder
from selftask.data.reading.skipped_files import EXTENSIONS

try:
    import pyarrow
    import pyarrow.parquet
except ImportError:
    pyarrow = None

GETS = 10_000
OLD = 1_000_000_000  # modification time of the files, in the past


def path_of(number: int) -> str:
    return f"n{number // 1300:08d}/n{number // 1300:08d}_{number:09d}.JPEG"


def write_all(folder: Path, count: int, alone: bool) -> dict[str, Callable[[], Sequence[Any]]]:
    """Write every format; return a function for each that opens it."""
    text = folder / "list.txt"
    with text.open("w") as file:
        file.writelines(path_of(number) + "\n" for number in range(count))
    os.utime(text, (OLD, OLD))
    started = time.process_time()
    listed = read_list(str(text))
    made = time.process_time() - started
    assert listed.file is not None, "too few paths for an index; take a larger --count"
    print(f"the index of {count:,} lines is made in {made:.2f} s of CPU, once")
    stored = listed.file
    if alone:
        return {"selftask": lambda: _opened(stored)}
    names = [path_of(number) for number in range(count)]
    np.save(folder / "list.npy", np.array(names, dtype="S"))
    (folder / "list.pkl").write_bytes(pickle.dumps(names))
    samples = [(name, number // 1300) for number, name in enumerate(names)]
    (folder / "samples.pkl").write_bytes(pickle.dumps(samples))
    (folder / "list.json").write_text(json.dumps(names))
    entries: dict[str, Callable[[], Sequence[Any]]] = {
        "selftask": lambda: _opened(stored),
        "numpy": lambda: np.load(folder / "list.npy", mmap_mode="r"),
        "text": lambda: text.read_text().splitlines(),
        "pickle": lambda: pickle.loads((folder / "list.pkl").read_bytes()),
        "pickle, labels": lambda: pickle.loads((folder / "samples.pkl").read_bytes()),
        "json": lambda: json.loads((folder / "list.json").read_text()),
    }
    if pyarrow is not None:
        table = pyarrow.table({"path": names})
        with pyarrow.ipc.new_file(str(folder / "list.arrow"), table.schema) as writer:
            writer.write_table(table)
        pyarrow.parquet.write_table(table, folder / "list.parquet")
        entries["arrow"] = lambda: _mapped_arrow(folder / "list.arrow")
        entries["parquet"] = lambda: (
            pyarrow.parquet.read_table(folder / "list.parquet", use_threads=False)
            .column("path")
            .combine_chunks()
        )
    return entries


def _opened(file: Path) -> Sequence[Any]:
    index = store.load(file)
    assert index is not None
    return index.paths  # type: ignore[return-value]


def _mapped_arrow(file: Path) -> Sequence[Any]:
    with pyarrow.memory_map(str(file)) as source:
        table = pyarrow.ipc.open_file(source).read_all()
    return table.column("path").chunk(0) if table.column("path").num_chunks == 1 else table["path"]


def measure(opens: Callable[[], Sequence[Any]], count: int) -> tuple[float, float, float]:
    """Return CPU seconds to open, of one get, and private bytes, in a new process."""
    receiver, sender = multiprocessing.get_context("fork").Pipe(duplex=False)

    def work() -> None:
        asked = np.random.default_rng(0).integers(0, count, GETS).tolist()
        before = _own_bytes()
        started = time.process_time()
        paths = opens()
        opened = time.process_time()
        for number in asked:
            str(paths[number])
        done = time.process_time()
        sender.send((opened - started, (done - opened) / GETS, _own_bytes() - before))

    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    process.join()
    figures: tuple[float, float, float] = receiver.recv()
    return figures


def _own_bytes() -> int:
    """Return the memory that is not backed by a file."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("RssAnon")).split()[1])


def compare(folder: Path, count: int, rounds: int, alone: bool) -> None:
    """Print the table of formats."""
    entries = write_all(folder, count, alone)
    taken: dict[str, list[tuple[float, float, float]]] = {name: [] for name in entries}
    for _ in range(rounds):
        for name, opens in entries.items():
            taken[name].append(measure(opens, count))
    print(f"{count:,} paths; medians of {rounds} rounds; load {os.getloadavg()[0]:.1f}")
    print(f"{'':<16}{'open, ms':>12}{'get, us':>12}{'own, MB':>12}")
    for name, figures in taken.items():
        values = [statistics.median(column) for column in zip(*figures, strict=True)]
        scaled = [v * f for v, f in zip(values, (1e3, 1e6, 1e-6), strict=True)]
        print(f"{name:<16}" + "".join(f"{value:>12.2f}" for value in scaled))


def scans(folder: Path, count: int) -> None:
    """Time scans of a folder of empty files, with a thousand in each sub-folder."""
    root = folder / "tree"
    for number in range(count):
        if number % 1000 == 0:
            inner = root / f"n{number // 1000:05d}"
            inner.mkdir(parents=True)
        (inner / f"{number:09d}.jpeg").touch()
    for inner_path, _, _ in os.walk(root):
        os.utime(inner_path, (OLD, OLD))

    def another() -> None:
        (root / "n00000" / "more.jpeg").touch()
        scan_folder(str(root), EXTENSIONS)

    def walked() -> None:
        sorted(os.path.join(at, name) for at, _, names in os.walk(root) for name in names)

    from torchvision.datasets.folder import find_classes, make_dataset

    def of_torchvision() -> None:
        make_dataset(str(root), find_classes(str(root))[1], EXTENSIONS)

    print(f"{count:,} files in {-(-count // 1000):,} folders: ms of CPU, and of the clock")
    for name, look in {
        "sorted os.walk": walked,
        "torchvision": of_torchvision,
        "first scan": lambda: scan_folder(str(root), EXTENSIONS),
        "nothing changed": lambda: scan_folder(str(root), EXTENSIONS),
        "a file more": another,
    }.items():
        started = time.process_time(), time.perf_counter()
        look()
        cpu, clock = time.process_time() - started[0], time.perf_counter() - started[1]
        print(f"{name:<16}{1e3 * cpu:>12.1f}{1e3 * clock:>12.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=float, default=1e6, help="paths in the list")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tree", type=int, default=100_000, help="files in the folder")
    parser.add_argument("--alone", action="store_true", help="only selftask")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["SELFTASK_CACHE"] = str(Path(folder) / "cache")
        compare(Path(folder), int(args.count), args.rounds, args.alone)
        if args.tree:
            scans(Path(folder), args.tree)


if __name__ == "__main__":
    main()
