"""Lists in text files are read as they are meant, in pieces of any size, and only when changed."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from indexed import LONG_AGO, paths_of

from selftask.data.reading import index as store
from selftask.data.reading import path_list
from selftask.data.reading.path_list import read_list
from selftask.data.reading.path_table import PathTable
from selftask.errors import UserError


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An index is made of five paths already, in a cache of the test's own."""
    monkeypatch.setenv("SELFTASK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(store, "MIN_INDEXED", 5)


def read_simply(text: str) -> tuple[list[str], list[int] | None]:
    """What a list means, in few words."""
    lines = [line.rstrip(" \t\r\x0b\x0c") for line in text.split("\n")]
    columns = [line.partition("\t") for line in lines if line.strip()]
    if not all(tab for _, tab, _ in columns):
        return [path for path, _, _ in columns], None
    labels = [label.strip() for _, _, label in columns]
    names = sorted(set(labels))
    numbers = {
        name: int(name) if all(map(str.isdigit, names)) else names.index(name) for name in names
    }
    return [path for path, _, _ in columns], [numbers[label] for label in labels]


def texts() -> Iterator[str]:
    rng = random.Random(1)
    plain = "".join(f"f{i % 7}/{i}é.png\n" for i in range(60))
    yield from [plain, plain.rstrip("\n"), "\n \n" + plain, plain.replace("3", "3 "), "x.png"]
    yield plain.replace("\n", "\r\n")
    for labels in ("cat dog bird", "7 3 11"):
        yield "".join(f"{i}.png\t{rng.choice(labels.split())} \n\n" for i in range(50))


@pytest.mark.parametrize("piece", [1, 7, 64, 1 << 24])
def test_lists_are_read_in_pieces_of_any_size(
    piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(path_list, "PIECE", piece)
    for number, text in enumerate(texts()):
        file = tmp_path / f"list{number}.txt"
        file.write_bytes(text.encode())
        paths, labels = read_simply(text)
        for _ in range(2):
            index = read_list(str(file))
            assert paths_of(index) == paths
            assert (None if index.labels is None else index.labels.tolist()) == labels
            assert index.header["num_folders"] == len({os.path.dirname(path) for path in paths})


@pytest.mark.parametrize("piece", [7, 1 << 24])
@pytest.mark.parametrize(
    ("text", "line"), [("a\tx\n\nb\n", 3), ("a\nb\nc\td\n", 3), ("a\tx\nb", 2)]
)
def test_a_list_with_some_labels(
    text: str, line: int, piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(path_list, "PIECE", piece)
    (tmp_path / "l.txt").write_text(text)
    with pytest.raises(UserError, match=rf"l\.txt:{line}: some lines have a label"):
        read_list(str(tmp_path / "l.txt"))


def test_a_list_is_read_again_when_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "l.txt"
    names = [f"{i}.png" for i in range(9)]
    file.write_text("\n".join(names))
    os.utime(file, (LONG_AGO, LONG_AGO))
    assert paths_of(read_list(str(file))) == names
    with monkeypatch.context() as patch:
        patch.setattr(path_list, "_Reading", None)  # nobody may read it
        assert paths_of(read_list(str(file))) == names
    file.write_text("\n".join(reversed(names)))
    now = os.stat(file)
    assert paths_of(read_list(str(file))) == names[::-1]
    file.write_text("\n".join(names))
    os.utime(file, ns=(now.st_atime_ns, now.st_mtime_ns))  # of the same size, in the same tick
    assert paths_of(read_list(str(file))) == names


def test_a_list_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot read .*gone\.txt: No such file"):
        read_list(str(tmp_path / "gone.txt"))


def test_tables_of_strings_and_of_arrays_agree() -> None:
    names = ["a/1", "b\0c", "", "é\udce9/x", "/absolute/2"]
    table = PathTable.of(names)
    assert [table[i] for i in range(5)] == names
