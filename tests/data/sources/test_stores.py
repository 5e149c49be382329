"""HDF5, LMDB and Hugging Face's data sets give what their own libraries wrote."""

from __future__ import annotations

import io
import multiprocessing
import pickle
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from selftask.config.compose.short_forms import expand_source
from selftask.data.source import Source
from selftask.errors import BadImage, UserError
from selftask.registry import SOURCES

PIXELS = np.random.default_rng(0).integers(0, 256, (6, 5, 7, 3), dtype=np.uint8)
LABELS = [2, 0, 1, 1, 0, 2]
WORDS = [["bee", "ant", "cat"][label] for label in LABELS]
SORTED = [{"ant": 0, "bee": 1, "cat": 2}[word] for word in WORDS]


def build(name: str, **args: Any) -> Source:
    cls = SOURCES[name]
    source: Source = cls(cls.Config(**args))
    return source


def png(pixels: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def _read_all(source: Source, queue: Any) -> None:
    queue.put([source[i] for i in range(len(source))])


def check(source: Source, labels: list[int] | None) -> None:
    """Pixels and labels here, of a copy, and in a worker that was forked after the file was read.

    (Other processes than forked ones get the copy.)
    """
    assert len(source) == len(PIXELS)
    assert (None if source.labels is None else source.labels.tolist()) == labels
    here = [source[i] for i in (5, 0, 1, 2, 3, 4)]
    here = here[1:] + here[:1]
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    worker = context.Process(target=_read_all, args=(source, queue))
    worker.start()
    there = queue.get(timeout=30)
    worker.join()
    assert worker.exitcode == 0
    copy = pickle.loads(pickle.dumps(source))
    for read in (here, there, [copy[i] for i in range(len(copy))]):
        for (image, _), pixels in zip(read, PIXELS, strict=True):
            assert np.array_equal(image, pixels)
        assert [label for _, label in read] == (labels or [-1] * len(PIXELS))
    with pytest.raises(IndexError):
        source[len(PIXELS)]


def test_hdf5_arrays(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("images", data=PIXELS, chunks=(2, 5, 7, 3), compression="gzip")
        file["labels"] = np.array(LABELS).reshape(-1, 1, 1, 1)  # PCam's shape
        file["deep/first"] = PIXELS.transpose(0, 3, 1, 2)
        file["words"] = WORDS
    path = str(tmp_path / "x.h5")
    source = build("hdf5", path=path)
    check(source, LABELS)
    assert source.describe() == "6 images of 5x7x3, 3 classes"
    assert source.path(4) == f"{path}:images[4]"
    named = build("hdf5", path=path, images="deep/first", labels="words")
    check(named, SORTED)
    assert (source.class_names(), named.class_names()) == (None, ["ant", "bee", "cat"])
    with h5py.File(tmp_path / "y.h5", "w") as file:
        file["y"] = LABELS
    check(build("hdf5", path=path, labels="y", labels_path=str(tmp_path / "y.h5")), LABELS)


def test_hdf5_reads_no_other_files_of_this_machine(tmp_path: Path) -> None:
    """A received file showed any local file as pixels."""
    h5py = pytest.importorskip("h5py")
    (tmp_path / "theirs").mkdir()
    private = tmp_path / "private.h5"
    with h5py.File(private, "w") as file:
        file["images"] = PIXELS
    (tmp_path / "theirs/link.h5").symlink_to(private)
    raw = [(str(private), 0, h5py.h5f.UNLIMITED)]
    for number, other in enumerate((str(private), "../private.h5", "link.h5")):
        path, name = tmp_path / f"theirs/{number}.h5", Path(other).name
        layout = h5py.VirtualLayout(PIXELS.shape, "uint8")
        layout[:] = h5py.VirtualSource(other, "images", PIXELS.shape, "uint8")
        with h5py.File(path, "w") as file:
            file.create_dataset("images", PIXELS.shape, "uint8", external=raw)
            file["link"] = h5py.ExternalLink(other, "images")
            file.create_virtual_dataset("virtual", layout)
        for key, message in (("images", "another file"), ("link", name), ("virtual", name)):
            with pytest.raises(UserError, match=f"data.images: {key!r} of .*{re.escape(message)}"):
                build("hdf5", path=str(path), images=key, labels=None)
            with pytest.raises(UserError, match=f"data.labels: {key!r} of .*"):
                build("hdf5", path=str(private), labels=key, labels_path=str(path))


def test_hdf5_parts_in_its_folder(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    for part in (0, 1):
        with h5py.File(tmp_path / f"part{part}.h5", "w") as file:
            file["images"] = PIXELS[3 * part : 3 * part + 3]
    layout = h5py.VirtualLayout(PIXELS.shape, "uint8")
    for part in (0, 1):
        source = h5py.VirtualSource(f"part{part}.h5", "images", (3, *PIXELS.shape[1:]), "uint8")
        layout[3 * part : 3 * part + 3] = source
    with h5py.File(tmp_path / "all.h5", "w") as file:
        file.create_virtual_dataset("images", layout)
    check(build("hdf5", path=str(tmp_path / "all.h5")), None)


def test_hdf5_encoded(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    encoded = [np.frombuffer(png(pixels), np.uint8) for pixels in PIXELS]
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("images", (6,), dtype=h5py.vlen_dtype(np.uint8))
        for i, data in enumerate(encoded):
            file["images"][i] = data
        file["fixed"] = np.array([data.tobytes() for data in encoded], dtype="V400")
        file.create_dataset("bad", data=np.array([b"nothing", b"x"], dtype="S8"))
    check(build("hdf5", path=str(tmp_path / "x.h5")), None)
    check(build("hdf5", path=str(tmp_path / "x.h5"), images="fixed"), None)
    with pytest.raises(BadImage, match=r"x\.h5:bad\[1\]: not an image"):
        build("hdf5", path=str(tmp_path / "x.h5"), images="bad")[1]


def test_hdf5_encoded_with_zeros_at_the_end(tmp_path: Path) -> None:
    """NumPy drops them from an item of fixed length."""
    h5py = pytest.importorskip("h5py")
    file = io.BytesIO()
    Image.new("RGB", (4, 4)).save(file, "BMP")
    with h5py.File(tmp_path / "x.h5", "w") as opened:
        opened["images"] = np.array([file.getvalue()])
    image, _ = build("hdf5", path=str(tmp_path / "x.h5"))[0]
    assert image.shape == (4, 4, 3)
    assert not image.any()


def test_hdf5_damaged_chunk_and_errors(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as file:
        made = file.create_dataset(
            "group/images", data=PIXELS, chunks=(1, 5, 7, 3), compression="gzip"
        )
        chunk = made.id.get_chunk_info(3)
        file["labels"] = LABELS[:4]
        file["flat"] = np.arange(5)
    whole = bytearray(path.read_bytes())
    whole[chunk.byte_offset : chunk.byte_offset + chunk.size] = b"\0" * chunk.size
    path.write_bytes(whole)
    source = build("hdf5", path=str(path), images="group/images", labels=None)
    assert np.array_equal(source[2][0], PIXELS[2])
    with pytest.raises(BadImage, match=r"x\.h5:group/images\[3\]: "):
        source[3]

    def fails(match: str, **args: Any) -> None:
        with pytest.raises(UserError, match=match):
            build("hdf5", **{"path": str(path), **args})

    fails(r"no data set 'group/image'; did you mean 'group/images'", images="group/image")
    fails(r"no data set 'label'; did you mean 'labels'", images="group/images", labels="label")
    fails(r"6 images but labels of shape \(4,\)", images="group/images")
    fails(r"'flat' of .* has shape \(5,\)", images="flat")
    fails(r"no such file: .*y\.h5; did you mean '.*x\.h5'", path=str(tmp_path / "y.h5"))
    (tmp_path / "z.h5").write_text("nothing")
    fails(r"z\.h5 is not an HDF5 file", path=str(tmp_path / "z.h5"))


def write_lmdb(path: Path, items: dict[str, bytes]) -> str:
    lmdb = pytest.importorskip("lmdb")
    with lmdb.open(str(path), map_size=1 << 22) as opened, opened.begin(write=True) as transaction:
        for key, value in items.items():
            transaction.put(key.encode(), value)
    return str(path)


def test_lmdb(tmp_path: Path) -> None:
    images = {f"{i}.png": png(pixels) for i, pixels in enumerate(PIXELS)}
    notes = {"__len__": pickle.dumps(6), "__keys__": b"x"}
    backwards = dict(reversed(images.items()))
    source = build("lmdb", path=write_lmdb(tmp_path / "plain", {**notes, **backwards}))
    check(source, None)
    assert source.path(2) == f"{tmp_path}/plain:2.png"
    labels = {f"{i}.cls": word.encode() for i, word in enumerate(WORDS)}
    check(build("lmdb", path=write_lmdb(tmp_path / "words", {**images, **labels})), SORTED)
    again = build("lmdb", path=str(tmp_path / "words"), labels=False)  # the same file, twice open
    check(again, None)
    shutil.copy(tmp_path / "words" / "data.mdb", tmp_path / "file.mdb")
    named = build("lmdb", path=str(tmp_path / "file.mdb"))
    check(named, SORTED)
    assert named.class_names() == ["ant", "bee", "cat"]


def test_lmdb_of_arrays(tmp_path: Path) -> None:
    arrays = {}
    for i, pixels in enumerate(PIXELS):
        file = io.BytesIO()
        np.save(file, pixels)
        arrays[f"{i}"] = file.getvalue()
    check(build("lmdb", path=write_lmdb(tmp_path / "npy", arrays)), None)
    raw = {f"{i}": pixels.tobytes() for i, pixels in enumerate(PIXELS)}
    path = write_lmdb(tmp_path / "raw", raw)
    check(build("lmdb", path=path, shape=[5, 7, 3]), None)
    with pytest.raises(BadImage, match=r"raw:4: 105 bytes are not pixels of shape \[4, 4, 3\]"):
        build("lmdb", path=path, shape=[4, 4, 3])[4]
    with pytest.raises(BadImage, match=r"raw:4: not an image"):
        build("lmdb", path=path)[4]


def test_lmdb_errors(tmp_path: Path) -> None:
    write_lmdb(tmp_path / "empty", {})
    with pytest.raises(UserError, match=r"no images in .*empty"):
        build("lmdb", path=str(tmp_path / "empty"))
    with pytest.raises(UserError, match=r"no such LMDB: .*emty; did you mean '.*/empty'"):
        build("lmdb", path=str(tmp_path / "emty"))
    (tmp_path / "file").write_bytes(b"nothing" * 1000)
    with pytest.raises(UserError, match=r"file is not an LMDB"):
        build("lmdb", path=str(tmp_path / "file"))


def test_lmdb_never_unpickles(tmp_path: Path) -> None:
    """Many LMDBs hold pickles, which run code when they are read."""
    path = write_lmdb(tmp_path / "x", {"0": pickle.dumps((PIXELS[0], 1))})
    with pytest.raises(BadImage, match="not an image"):
        build("lmdb", path=path)[0]


def save_dataset(folder: Path, **columns: Any) -> Any:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(
        {
            "image": datasets.Image(),
            "label": datasets.ClassLabel(names=["ant", "bee", "cat"]),
            "word": datasets.Value("string"),
            "array": datasets.Array3D((5, 7, 3), "uint8"),
            "lists": datasets.Sequence(
                datasets.Sequence(datasets.Sequence(datasets.Value("uint8")))
            ),
        }
    )
    rows = {
        "image": [{"bytes": png(pixels), "path": None} for pixels in PIXELS],
        "label": LABELS,
        "word": WORDS,
        "array": list(PIXELS),
        "lists": PIXELS.tolist(),
    }
    return datasets.Dataset.from_dict({**rows, **columns}, features=features)


def test_hugging_face(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    save_dataset(tmp_path).save_to_disk(tmp_path / "one", num_shards=2)
    source = build("huggingface", path=str(tmp_path / "one"))
    check(source, LABELS)
    assert source.path(3) == f"{tmp_path}/one[3]"
    assert source.describe() == "6 images, 3 classes"
    named = build("huggingface", path=str(tmp_path / "one"), labels="word")
    check(named, SORTED)
    assert named.class_names() == ["ant", "bee", "cat"]
    check(build("huggingface", path=str(tmp_path / "one"), images="array"), LABELS)
    check(build("huggingface", path=str(tmp_path / "one"), images="lists"), LABELS)
    files = []
    for i, pixels in enumerate(PIXELS):
        (tmp_path / f"{i}.png").write_bytes(png(pixels))
        files.append({"bytes": None, "path": str(tmp_path / f"{i}.png")})
    splits = {"train": save_dataset(tmp_path), "val": save_dataset(tmp_path, image=files)}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "two")
    check(build("huggingface", path=str(tmp_path / "two")), LABELS)
    check(build("huggingface", path=str(tmp_path / "two"), split="val"), LABELS)


def test_hugging_face_paths(tmp_path: Path) -> None:
    """Older versions saved the paths of images that were files; newer ones put the files in."""
    datasets = pytest.importorskip("datasets")
    (tmp_path / "0.png").write_bytes(png(PIXELS[0]))
    paths = [{"bytes": None, "path": str(tmp_path / f"{i}.png")} for i in range(2)]
    saved = tmp_path / "x"
    features = datasets.Features({"image": datasets.Image()})
    none = {"image": [{"bytes": b"x", "path": None}] * 2}
    datasets.Dataset.from_dict(none, features=features).save_to_disk(saved)
    import pyarrow as pa

    (arrow,) = saved.glob("*.arrow")
    kind = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    table = pa.table({"image": pa.array(paths, kind)})
    with pa.OSFile(str(arrow), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
    source = build("huggingface", path=str(saved))
    assert np.array_equal(source[0][0], PIXELS[0])
    with pytest.raises(BadImage, match=r"/x\[1\]: .*/1\.png: no such file"):
        source[1]


def test_hugging_face_selected_rows(tmp_path: Path) -> None:
    """Rows that were selected and not yet written out are an indirection of their own."""
    save_dataset(tmp_path).select([4, 1, 1]).save_to_disk(tmp_path / "some")
    source = build("huggingface", path=str(tmp_path / "some"))
    assert source.labels.tolist() == [0, 0, 0]
    assert [np.array_equal(source[i][0], PIXELS[n]) for i, n in enumerate([4, 1, 1])] == [True] * 3


def test_hugging_face_errors(tmp_path: Path) -> None:
    dataset = save_dataset(tmp_path, image=[{"bytes": b"nothing", "path": None}, None] * 3)
    dataset.save_to_disk(tmp_path / "x")
    source = build("huggingface", path=str(tmp_path / "x"))
    for index, reason in enumerate(["not an image", "there is no image"]):
        with pytest.raises(BadImage, match=rf"/x\[{index}\]: {reason}"):
            source[index]

    def fails(match: str, **args: Any) -> None:
        with pytest.raises(UserError, match=match):
            build("huggingface", **{"path": str(tmp_path / "x"), **args})

    fails(r"data\.images: .* no column 'imag'; did you mean 'image'", images="imag")
    fails(r"data\.labels: .* no column 'lable'; did you mean 'label'", labels="lable")
    fails(r"data\.labels: column 'image' .* holds", labels="image")
    fails(r"data\.split=val: .* without splits", split="val")
    fails(r"is not there", path=str(tmp_path / "y"))
    fails(r"was not written by save_to_disk", path=str(tmp_path))
    pytest.importorskip("datasets").DatasetDict({"a": dataset, "b": dataset}).save_to_disk(
        tmp_path / "ab"
    )
    fails(r"data\.split=none: .* other splits; known: a, b", path=str(tmp_path / "ab"))


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs = [
        ("hdf5", "h5py", "data"),
        ("lmdb", "lmdb", "data"),
        ("huggingface", "datasets", "datasets"),
    ]
    classes = [SOURCES[name] for name, _, _ in needs]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for cls, (_, package, extra) in zip(classes, needs, strict=True):
        with pytest.raises(UserError, match=rf"pip install {package}, or .*selftask\[{extra}\]"):
            cls(cls.Config(path=str(tmp_path)))


def test_short_forms_of_stores(tmp_path: Path) -> None:
    for name in (
        "a_lmdb/data.mdb",
        "hf/dataset_info.json",
        "hf/state.json",
        "dict/dataset_dict.json",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    for text, name in [
        ("x.h5", "hdf5"),
        ("x.hdf5", "hdf5"),
        ("x.mdb", "lmdb"),
        (f"{tmp_path}/a_lmdb", "lmdb"),
        (f"{tmp_path}/hf", "huggingface"),
        (f"{tmp_path}/dict", "huggingface"),
        (str(tmp_path), "folder"),
    ]:
        assert expand_source(text) == {"name": name, "path": text}
