"""Files that would crash a reader of weights are refused in one line, and real ones are read."""

from __future__ import annotations

import io
import pickle
import struct
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from selftask.checkpoint import manifest
from selftask.errors import UserError
from selftask.models.weights.foreign_pickle import read_tensors
from selftask.models.weights.read import read_state

LEVELS = 20_000
MANY_LEVELS = 200_000  # Python overflows the stack when it hashes such a tuple
MEMORY = 8 * (1 << 45)


def name(module: str, attribute: str) -> bytes:
    """A pickle's instruction that names an object."""
    return f"c{module}\n{attribute}\n".encode()


def number(value: int) -> bytes:
    return b"\x8a\x08" + struct.pack("<q", value)


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def entry(content: bytes, before: bytes = b"") -> bytes:
    """A pickle of a dict with one entry, after another one."""
    return b"\x80\x02}" + before + text("a") + content + b"s."


def archive(content: bytes, storage: bytes = b"") -> bytes:
    """A file as torch.save writes it, with this pickle and one storage."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as zipped:
        zipped.writestr("archive/data.pkl", content)
        zipped.writestr("archive/version", "3\n")
        zipped.writestr("archive/data/0", storage)
    return file.getvalue()


def legacy(content: bytes) -> bytes:
    """A file as torch.save wrote it before 1.6."""
    system = {"protocol_version": 1001, "little_endian": True, "type_sizes": {}}
    start = (torch.serialization.MAGIC_NUMBER, 1001, system)
    return b"".join([*(pickle.dumps(part, 2) for part in start), content, pickle.dumps([], 2)])


def tensor(
    numel: int = 4, offset: int = 0, size: int = 4, stride: int = 1, before: bytes = b""
) -> bytes:
    """A pickle of four numbers as torch.save writes it, or nearly so, after another entry."""
    storage = b"(" + text("storage") + name("torch", "FloatStorage") + text("0") + text("cpu")
    shape = number(offset) + number(size) + b"\x85" + number(stride) + b"\x85\x89"
    hooks = name("collections", "OrderedDict") + b")R"
    rebuild = name("torch._utils", "_rebuild_tensor_v2")
    made = rebuild + b"(" + storage + number(numel) + b"tQ" + shape + hooks + b"tR"
    return b"\x80\x02}" + before + text("a") + made + b"s."


OBJECT = text("b") + name("mine", "Config") + b")Rs"  # torch's own reader stops here
DEEP_TUPLE = b")" + b"\x85" * 150
ALLOCATOR = b"K@\x85}" + text("allocator") + number(0x41414141414141) + b"s\x92"
ADDRESSES = b"K\x01\x85" + text("O") + b"C\x08AAAAAAAA\x87R"
DTYPE = name("numpy", "dtype") + text("f8") + b"K\x00K\x01\x87R"
NEW_ARRAY = name("numpy.core.multiarray", "_reconstruct") + name("numpy", "ndarray")
ARRAY = NEW_ARRAY + b"K\x00\x85U\x01b\x87R"

PICKLES = {
    "allocator": name("torch.storage", "UntypedStorage") + ALLOCATOR,
    "untyped storage": name("torch.storage", "UntypedStorage") + b"K\x40\x85R",
    "addresses": name("torch", "Size") + name("numpy", "ndarray") + ADDRESSES + b"\x85R",
    "size of text": name("torch", "Size") + text("abc") + b"\x85R",
    "negative size": name("torch", "Size") + number(-1) + b"\x85\x85R",
    "huge array": ARRAY + b"(K\x01" + number(1 << 60) + b"\x85" + DTYPE + b"\x89U\x01bt" + b"b",
    "negative array": ARRAY + b"(K\x01" + number(-8) + b"\x85" + DTYPE + b"\x89U\x00t" + b"b",
    "long array": NEW_ARRAY + number(1 << 60) + b"\x85U\x01b\x87R",
    "short number": name("numpy.core.multiarray", "scalar") + DTYPE + b"U\x01a\x86R",
    "dtype of fields": name("numpy", "dtype") + b"]K\x00K\x01\x87R",
    "tensor of a number": name("torch._utils", "_rebuild_tensor") + b"(K\x00K\x00))tR",
    "other encoding": name("_codecs", "encode") + text("a") + text("idna") + b"\x86R",
    "extension": b"\x82\x01",
    "function with state": name("torch", "Size") + b"}" + text("call") + b"K\x01sb",
    "class with state": name("torch", "Size") + b"N}" + text("call") + b"K\x01s\x86b",
    "item of a tensor": name("torch", "Size") + b"K\x00K\x01s",
    "appended item": name("torch", "Size") + b"K\x01a",
    "appended items": name("torch", "Size") + b"(K\x01e",
    "added items": name("torch", "Size") + b"(K\x01\x90",
    "set items": name("torch", "Size") + b"(K\x01K\x01u",
    "called number": b"K\x01)R",
    "dict of a dict": name("collections", "OrderedDict") + b"}\x85R",
    "called with names": (name("collections", "OrderedDict") + b")}" + text("a") + b"K\x01s\x92"),
    "long text": b"\x8d" + struct.pack("<Q", MEMORY),
    "long bytes": b"\x8e" + struct.pack("<Q", MEMORY),
    "long bytearray": b"\x96" + struct.pack("<Q", MEMORY),
    "deep dicts": (b"}" + text("a")) * LEVELS + b"K\x01" + b"s" * LEVELS,
    "deep tuple": DEEP_TUPLE,
    "deep key": b"}" + DEEP_TUPLE + b"K\x01s",
    "deepest key": b"}" + b")" + b"\x85" * MANY_LEVELS + b"K\x01s",
    "deep keys": b"}(" + DEEP_TUPLE + b"K\x01u",
    "deep key of old form": b"(" + DEEP_TUPLE + b"K\x01d",
    "deep item of a set": b"\x8f(" + DEEP_TUPLE + b"\x90",
    "deep item of a frozenset": b"(" + DEEP_TUPLE + b"\x91",
    "deepest item of a set": b"\x8f()" + b"\x85" * MANY_LEVELS + b"\x90",
    "deepest item of a frozenset": b"()" + b"\x85" * MANY_LEVELS + b"\x91",
    "deepest storage": b")" + b"\x85" * MANY_LEVELS + b"Q",
    "deepest key of a storage": (
        b"("
        + text("storage")
        + name("torch", "FloatStorage")
        + b")"
        + b"\x85" * MANY_LEVELS
        + text("cpu")
        + b"K\x04tQ"
    ),
    "deep list to a set": name("builtins", "set") + b"](" + DEEP_TUPLE + b"e\x85R",
    "deep key of an OrderedDict": (
        name("collections", "OrderedDict") + b"](](" + DEEP_TUPLE + b"K\x01ee\x85R"
    ),
    "deep in itself": b"}q\x00" + text("a") + b"h\x00s",
    "deep and twice the same": b"]q\x00" + 40 * b"](h\x00h\x00eq\x00",
}


REFUSALS = {  # part of the message -> kinds; others are damaged, or refused by what they call
    "changes an object (Constructor)": (
        *("function with state", "class with state", "item of a tensor"),
        *("appended item", "appended items", "added items", "set items"),
    ),
    "calls with names of arguments": ("allocator", "called with names"),
    "calls an object": ("untyped storage", "addresses", "called number"),
    "makes a dict of no list": ("dict of a dict",),
    "names the extension 1": ("extension",),
    "has a shape of other things": ("size of text", "negative size", "negative array"),
}


@pytest.mark.parametrize("form", ["pickle", "zip", "legacy"])
@pytest.mark.parametrize("kind", PICKLES)
def test_hostile_pickles_are_refused(kind: str, form: str, tmp_path: Path) -> None:
    """Of a file that names an object of Python: our own reader takes over from torch's there."""
    path = tmp_path / "weights.pth"
    content = entry(PICKLES[kind], OBJECT)
    path.write_bytes({"pickle": bytes, "zip": archive, "legacy": legacy}[form](content))
    with pytest.raises(UserError) as raised:
        read_state(path)
    message = str(raised.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message and len(message) < 400
    assert ("nests its content too deeply" in message) == kind.startswith("deep")
    for part, kinds in REFUSALS.items():
        assert (part in message) == (kind in kinds)


@pytest.mark.parametrize(
    "kind", ["deep dicts", "deepest key", "deep list to a set", "deep in itself"]
)
def test_hostile_checkpoints_are_damaged(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "step_000000001.pt"
    path.write_bytes(archive(entry(PICKLES[kind])))
    with pytest.raises(manifest.DamagedCheckpoint, match="nests its content too deeply"):
        manifest.read_file(path)


@pytest.mark.parametrize("before", [b"", OBJECT], ids=["tensors", "objects"])
@pytest.mark.parametrize(
    "wrong",
    [
        {"numel": 1 << 20, "size": 1 << 20},  # more than the file has
        {"size": 5},
        {"size": 1 << 40},
        {"stride": 2},
        {"stride": -1, "offset": 3},
        {"offset": 1},
        {"offset": -1},
        {"size": 1 << 62, "stride": 4},  # 4 bytes each: overflows to 0
    ],
)
def test_tensors_stay_in_their_storage(
    wrong: dict[str, int], before: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "weights.pth"
    storage = np.arange(4, dtype="<f4").tobytes()
    path.write_bytes(archive(tensor(before=before), storage))
    assert read_state(path)["a"].tolist() == [0, 1, 2, 3]
    path.write_bytes(archive(tensor(before=before, **wrong), storage))
    with pytest.raises(UserError, match="damaged or no file of weights"):
        read_state(path)


def test_scripts_and_archives_are_not_opened(tmp_path: Path) -> None:
    """torch.load hands TorchScript to torch.jit.load, and unpacks a tar file."""
    path = tmp_path / "weights.pth"
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), path)
    with pytest.raises(RuntimeError, match="TorchScript"):
        read_tensors(path)
    start = pickle.dumps(torch.serialization.MAGIC_NUMBER, 2)
    member = tarfile.TarInfo(start.decode("latin1"))  # a pickle, too
    member.type, member.linkname = tarfile.SYMTYPE, "/etc/passwd"
    with tarfile.open(path, "w", encoding="latin1", format=tarfile.GNU_FORMAT) as file:
        file.addfile(member)
    with pytest.raises(Exception, match=r"tar|pickle|EOF|load key|index|opcode|0"):
        read_tensors(path)


class Config:
    """An object of the kind that trainers save with their weights."""

    def __init__(self) -> None:
        self.depth = 50


@pytest.mark.parametrize("protocol", range(6))
def test_arrays_of_every_protocol(protocol: int, tmp_path: Path) -> None:
    arrays = {
        "big_endian": np.arange(6, dtype=">f4").reshape(2, 3),
        "by_columns": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "every_second": np.arange(12, dtype=np.int16)[::2],
        "flags": np.array([True, False]),
        "empty": np.zeros((0, 3), np.float16),
    }
    path = tmp_path / "weights.pkl"
    content = {"arrays": arrays, "number": np.float32(0.5), "config": Config()}
    path.write_bytes(pickle.dumps(content, protocol))
    read, skipped = read_tensors(path)
    for key, array in arrays.items():
        assert np.array_equal(read["arrays"][key], array)
        assert read["arrays"][key].dtype == array.dtype.newbyteorder("=")
    assert read["number"] == 0.5
    assert f"{__name__}.Config" in skipped


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("protocol", range(2, 6))
@pytest.mark.parametrize("zipped", [True, False])
def test_tensors_beside_objects(zipped: bool, protocol: int, tmp_path: Path) -> None:
    network = torch.nn.BatchNorm1d(3)
    rows = torch.arange(12.0).reshape(3, 4)
    content: dict[str, Any] = {
        "state_dict": network.state_dict(),
        "parameter": network.weight,
        "columns": rows.t(),
        "second_row": rows[1],
        "half": rows.to(torch.bfloat16),
        "config": Config(),
        "classes": {"a", "b"},
    }
    path = tmp_path / "weights.pth"
    torch.save(content, path, _use_new_zipfile_serialization=zipped, pickle_protocol=protocol)
    state = read_state(path)
    assert torch.equal(state["state_dict.running_var"], torch.ones(3))
    assert torch.equal(state["parameter"], torch.ones(3))
    for key in ("columns", "second_row", "half"):
        assert torch.equal(state[key], content[key])
    assert "config" not in state
