"""Damaged and hostile containers: one clear line, or the images that can be read; no traceback."""

from __future__ import annotations

import io
import random
import tarfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data.odd_files import encoded
from selftask.cli.main import guarded
from selftask.config.compose.short_forms import expand_source
from selftask.config.schema import Component
from selftask.data.open_source import open_source
from selftask.data.reading import guards
from selftask.data.source import Source
from selftask.errors import BadImage, UserError

PIXELS = np.random.default_rng(0).integers(0, 256, (6, 8, 9, 3), dtype=np.uint8)
JUNK = [b"\xff" * 12, b"\xff\xfe", b"\0", b"-1", b"\n", b"9" * 400, b"1" + b"0" * 15]


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SELFTASK_CACHE", str(tmp_path / "cache"))


def opened(path: Path, **more: Any) -> Source:
    """What ``data=PATH`` opens."""
    section = expand_source(str(path)) | more
    return open_source(Component(name=section.pop("name"), args=section))


def look(path: Path) -> str:
    """Use a file as a run does: "read", or the message if it cannot be opened."""
    try:
        source = opened(path)
    except UserError as error:
        return str(error)
    assert source.describe()
    assert source.num_classes <= 10_000_000
    for index in range(min(len(source), 6)):
        with suppress(BadImage):
            source[index]
    return "read"


# -- any bytes -------------------------------------------------------------------------------------


def make_tar(path: Path, format: int = tarfile.PAX_FORMAT) -> None:
    with tarfile.open(path, "w", format=format) as tar:
        for number in range(5):
            name = "k" * (120 if number == 2 else 1) + str(number)
            for end, content in (("jpg", encoded(number)), ("cls", b"%d" % (number % 3))):
                member = tarfile.TarInfo(f"{name}.{end}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))


def make_npz(path: Path) -> None:
    np.savez_compressed(path, images=PIXELS, labels=np.array(["a", "b", "c"] * 2))


def make_csv(path: Path) -> None:
    for number in range(6):
        (path.parent / f"{number}.jpg").write_bytes(encoded(number))
    path.write_text("path,label\n" + "".join(f"{n}.jpg,{n % 3}\n" for n in range(6)))


def make_parquet(path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    make_csv(path.with_suffix(".csv"))
    names = [f"{number}.jpg" for number in range(6)]
    parquet.write_table(pa.table({"path": names, "label": ["a", "b", "c"] * 2}), path)


MAKERS = {
    "x.tar": make_tar,
    "x.npz": make_npz,
    "x.npy": lambda path: np.save(path, PIXELS),
    "x.csv": make_csv,
    "x.parquet": make_parquet,
}


def mutated(content: bytes, rng: random.Random) -> bytes:
    """Some bytes of the header, the end or the middle replaced, inserted or cut off."""
    end = len(content)
    at = rng.choice([rng.randrange(200), end - rng.randrange(1, 200), rng.randrange(end)]) % end
    what = rng.choice(["bits", "junk", "insert", "cut", "zeros"])
    if what == "cut":
        return content[:at]
    if what == "bits":
        return content[:at] + bytes([content[at] ^ rng.randrange(1, 256)]) + content[at + 1 :]
    junk = bytes(512) if what == "zeros" else rng.choice(JUNK)
    return content[:at] + junk + content[at + (0 if what == "insert" else len(junk)) :]


@pytest.mark.parametrize("name", MAKERS)
def test_mutated_containers(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    MAKERS[name](path)
    assert look(path) == "read"
    content, rng = path.read_bytes(), random.Random(15)
    messages = set()
    for number in range(60):
        path = tmp_path / f"{number}_{name}"  # an index knows a file by its path, size and time
        path.write_bytes(mutated(content, rng))
        messages.add(look(path))
    assert len(messages) > 3, "some mutations are noticed"
    assert not [message for message in messages if "\n" in message]


@pytest.mark.parametrize("kind", ["hdf5", "lmdb"])
def test_containers_that_are_cut_off(kind: str, tmp_path: Path) -> None:
    """Behind the end of a half-copied LMDB, mapped memory kills the process (SIGBUS)."""
    if kind == "hdf5":
        h5py = pytest.importorskip("h5py")
        path = file = tmp_path / "x.h5"
        with h5py.File(file, "w") as made:
            made.create_dataset("images", data=PIXELS, chunks=(1, 8, 9, 3), compression="gzip")
            made["labels"] = np.arange(6) % 3
    else:
        lmdb = pytest.importorskip("lmdb")
        path, file = tmp_path / "lmdb", tmp_path / "lmdb" / "data.mdb"
        with lmdb.open(str(path), map_size=1 << 20) as made, made.begin(write=True) as writing:
            for number in range(30):
                writing.put(b"%04d.jpg" % number, encoded(number))
    content = file.read_bytes()
    for number, length in enumerate((0, 100, *range(1000, len(content), len(content) // 7))):
        copy = tmp_path / f"cut{number}{path.suffix}"
        target = copy if kind == "hdf5" else copy / "data.mdb"
        target.parent.mkdir(exist_ok=True)
        target.write_bytes(content[:length])
        message = look(copy)
        assert message != "read"
        assert "cut off" in message or "is damaged" in message or "is not an" in message


# -- tar headers -----------------------------------------------------------------------------------


def with_field(content: bytes, header: int, start: int, field: bytes) -> bytes:
    """The tar with a field of the header at that byte replaced, and a right checksum."""
    changed = bytearray(content)
    changed[header + start : header + start + len(field)] = field
    changed[header + 148 : header + 156] = b" " * 8
    total = sum(changed[header : header + 512])
    changed[header + 148 : header + 156] = b"%06o\0 " % total
    return bytes(changed)


@pytest.mark.parametrize(
    "size",
    [
        b"-0000000512\0",
        b"+0000000010\0",
        b"0000_000010\0",
        b"\xff" * 12,
        b"\x80" + b"\xff" * 11,
        b"\x80" + (2**63).to_bytes(11, "big"),
        b"9" * 11 + b"\0",
    ],
)
def test_sizes_that_are_none_end_a_tar(size: bytes, tmp_path: Path) -> None:
    """A negative one leads back to where it came from: it was read for ever."""
    make_tar(tmp_path / "x.tar", tarfile.GNU_FORMAT)
    content = (tmp_path / "x.tar").read_bytes()
    second = content.index(b"k1.jpg")
    (tmp_path / "x.tar").write_bytes(with_field(content, second, 124, size))
    source = opened(tmp_path / "x.tar")
    assert len(source) == 1
    damage = f"cannot be read to their end, the first {tmp_path}/x.tar from byte {second} on"
    assert damage in source.describe()


@pytest.mark.parametrize(
    "record",
    [b"size=-1024", b"size=abc", b"size=", b"size=" + b"9" * 30, b"size=" + b"1" * 5000],
)
def test_sizes_in_pax_headers_that_are_none_end_a_tar(record: bytes, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "x.tar", "w", format=tarfile.PAX_FORMAT) as tar:
        for number in range(3):
            member = tarfile.TarInfo(f"{number}.jpg")
            member.size = len(encoded(number))
            if number == 1:
                member.pax_headers = {"comment": "x" * (len(record) + 20)}
            tar.addfile(member, io.BytesIO(encoded(number)))
    content = (tmp_path / "x.tar").read_bytes()
    at = content.index(b"comment=")
    end = content.index(b"\n", at)
    start = content.rindex(b"\0", 0, at) + 1
    padding = end - start + 1
    line = b"%d %s\n" % (len(record) + 2 + len(str(len(record) + 5)), record)
    (tmp_path / "x.tar").write_bytes(
        content[:start] + line + b"\0" * (padding - len(line)) + content[end + 1 :]
    )
    assert len(opened(tmp_path / "x.tar")) == 1


def test_a_long_name_of_a_gigabyte_is_not_read(tmp_path: Path) -> None:
    make_tar(tmp_path / "x.tar", tarfile.GNU_FORMAT)
    content = (tmp_path / "x.tar").read_bytes()
    header = content.index(b"././@LongLink")
    huge = with_field(content, header, 124, b"%011o\0" % (1 << 30))
    (tmp_path / "x.tar").write_bytes(huge)
    with open(tmp_path / "x.tar", "r+b") as file:
        file.truncate(header + (2 << 30))  # with holes: it takes no room
    source = opened(tmp_path / "x.tar")
    assert len(source) == 2
    assert f"x.tar from byte {header} on" in source.describe()


# -- labels ----------------------------------------------------------------------------------------


def test_labels_that_are_not_utf_8(tmp_path: Path) -> None:
    h5py, lmdb = pytest.importorskip("h5py"), pytest.importorskip("lmdb")
    names = [b"caf\xe9", b"th\xe9", b"caf\xe9"]
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["images"] = PIXELS[:3]
        file["labels"] = np.array(names)
    with lmdb.open(str(tmp_path / "lmdb"), map_size=1 << 20) as made, made.begin(write=True) as put:
        for number, name in enumerate(names):
            put.put(b"%d.jpg" % number, encoded(number))
            put.put(b"%d.cls" % number, name)
    for path in (tmp_path / "x.h5", tmp_path / "lmdb"):
        assert opened(path).labels.tolist() == [0, 1, 0]


def test_digits_that_no_number_holds_are_a_name(tmp_path: Path) -> None:
    for number in range(2):
        (tmp_path / f"{number}.jpg").write_bytes(encoded(number))
    (tmp_path / "x.csv").write_text(f"path,label\n0.jpg,{'9' * 400}\n1.jpg,7\n")
    (tmp_path / "x.txt").write_text(f"0.jpg\t{'9' * 400}\n1.jpg\t7\n")
    for name in ("x.csv", "x.txt"):
        assert opened(tmp_path / name).labels.tolist() == [1, 0]


@pytest.mark.parametrize("label", [10**15, 10_000_000, -2])
def test_numbers_that_no_class_can_have_are_refused(label: int, tmp_path: Path) -> None:
    """A head has a row for each number up to the largest."""
    np.savez(tmp_path / "x.npz", images=PIXELS, labels=np.array([0, 1, 2, 1, label, 0]))
    message = rf"x\.npz\[4\] has the label {label}; numbers are those of classes, 0 to 9999999"
    with pytest.raises(UserError, match=message):
        opened(tmp_path / "x.npz")
    assert opened(tmp_path / "x.npz", labels=None).num_classes == 0


# -- memory ----------------------------------------------------------------------------------------


def test_what_would_fill_the_memory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    h5py = pytest.importorskip("h5py")
    np.savez_compressed(tmp_path / "x.npz", images=np.zeros((100, 64, 64, 3), np.uint8))
    assert (tmp_path / "x.npz").stat().st_size < 10_000
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("images", (10**9, 8, 8, 3), np.uint8, chunks=(1, 8, 8, 3))
        file.create_dataset("labels", (10**9,), np.int64, chunks=(1000,))
    monkeypatch.setattr(guards, "available_bytes", lambda: 1_000_000)
    with pytest.raises(UserError, match=r"'images' of .*x\.npz would take 1\.2 MB of memory"):
        opened(tmp_path / "x.npz")
    with pytest.raises(UserError, match=r"'labels' of .*x\.h5 would take 8\.0 GB of memory"):
        opened(tmp_path / "x.h5")
    source = opened(tmp_path / "x.h5", labels=None)
    assert len(source) == 10**9
    assert source[999_999_999][0].shape == (8, 8, 3)


def test_a_command_that_runs_out_of_memory_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    def command(words: list[str]) -> int:
        return len(np.ones((1 << 45, 1024)))

    assert guarded(command, []) == 1
    assert capsys.readouterr().err.startswith("error: the machine's memory is full: Unable")
