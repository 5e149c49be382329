"""Sources find what is there, in a fixed order, and say what they miss."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from selftask.config.compose.short_forms import expand_source
from selftask.config.schema import Component, DataConfig
from selftask.data.labels import is_labeled
from selftask.data.loading.open_data import open_data
from selftask.data.open_source import open_source
from selftask.data.reading.path_table import PathTable
from selftask.data.source import Source
from selftask.data.sources.dataset_objects import DatasetSource
from selftask.errors import BadImage, UserError
from selftask.registry import SOURCES

PHOTOS = Path(__file__).parents[4] / "shared" / "data" / "photos" / "train"


def build(name: str, **args: Any) -> Source:
    cls = SOURCES[name]
    source: Source = cls(cls.Config(**args))
    return source


def save_image(path: Path, level: int = 0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (4, 4), (level, level, level)).save(path)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "train"
    for level, name in enumerate(["b/2.png", "a/x/1.JPG", "a/0.webp", "b/1.png"]):
        save_image(root / name, level * 60)
    (root / "a" / "notes.txt").write_text("not an image")
    save_image(root / "b" / "._1.png")
    return root


def test_folder_is_recursive_sorted_and_labeled(tree: Path) -> None:
    source = build("folder", path=str(tree))
    names = [str(Path(source.path(i)).relative_to(tree)) for i in range(len(source))]
    assert names == ["a/0.webp", "a/x/1.JPG", "b/1.png", "b/2.png"]
    assert source.labels.tolist() == [0, 0, 1, 1]
    assert source.num_classes == 2
    assert source.describe() == "4 images, 3 folders, 0 unreadable"
    image, label = source[3]
    assert (image.dtype, image.shape, label) == (np.uint8, (4, 4, 3), 1)
    assert not image.any()


def test_folder_without_labels(tree: Path) -> None:
    for source in (
        build("folder", path=str(tree), labels=False),
        build("folder", path=str(tree / "b")),
    ):
        assert source.labels is None
        assert source.num_classes == 0
        assert source[0][1] == -1


def test_folder_counts_unreadable_headers(tree: Path) -> None:
    (tree / "a" / "broken.png").write_bytes(b"")
    assert build("folder", path=str(tree)).describe() == "5 images, 3 folders, 1 unreadable"


def test_image_like_files_that_are_passed_over_are_counted(tree: Path) -> None:
    for name in ("a/1.HEIC", "b/2.heic", "b/3.cr2", "b/4.zip", "b/.5.heic"):
        (tree / name).touch()
    message = "2 .heic, 1 .cr2, 1 .zip passed over (convert images to JPEG or PNG, unpack archives)"
    folder = "4 images, 3 folders, 0 unreadable"
    assert build("folder", path=str(tree)).describe() == f"{folder}; {message}"
    assert build("glob", pattern=f"{tree}/**/*").describe() == f"{folder}; {message}"
    assert build("glob", pattern=f"{tree}/**/*.png").passed_over() == {}
    frames = build("frames", path=str(tree))
    assert frames.describe() == f"4 frames of 3 clips, no labels; {message}"


def test_archives_are_named_as_such(tmp_path: Path) -> None:
    for name in ("a.zip", "b.tgz", "c.tar.gz"):
        (tmp_path / name).touch()
        with pytest.raises(UserError, match=f"{name} is an archive: unpack it"):
            build("folder", path=str(tmp_path / name))
    with pytest.raises(UserError, match=r"1 \.tar\.gz, 1 \.tgz, 1 \.zip passed over \(unpack"):
        build("folder", path=str(tmp_path))


def test_folder_follows_links_once(tree: Path) -> None:
    (tree / "a" / "loop").symlink_to(tree)
    assert len(build("folder", path=str(tree))) == 4


def test_empty_folder_says_what_it_looked_for(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no images \(looked for \.jpg \.jpeg .*\) under "):
        build("folder", path=str(tmp_path))


def test_missing_folder_names_its_neighbour(tree: Path) -> None:
    with pytest.raises(UserError, match=r"no such folder.*did you mean '.*/train'"):
        build("folder", path=str(tree.parent / "trian" / "deeper"))
    with pytest.raises(UserError, match=r"data: no folder is given"):
        build("folder", path="")


@pytest.mark.parametrize(
    ("wrong", "start"),
    [
        (Component(name="folder", args={"path": "gone", "labels": True}), ": no such folder: gone"),
        (Component(name="glob", args={"pattern": "gone/*.png"}), r"\.pattern: gone/\*\.png: "),
    ],
)
def test_an_error_of_a_validation_set_names_its_key(
    tree: Path, wrong: Component, start: str
) -> None:
    """A recipe may have a ``data.val`` that its user does not know of."""
    good = Component(name="folder", args={"path": str(tree), "labels": True})
    for data, key in (
        (DataConfig(source=wrong), "data"),
        (DataConfig(source=good, val=wrong), r"data\.val"),
        (DataConfig(source=good, val_sets={"other": wrong}), r"data\.val_sets\.other"),
    ):
        with pytest.raises(UserError, match=f"^{key}{start}"):
            open_data(data)


def test_list_with_labels(tree: Path) -> None:
    (tree / "list.txt").write_text("b/2.png\tdog\n\na/0.webp\tcat\n")
    source = build("list", path=str(tree / "list.txt"))
    assert source.labels.tolist() == [1, 0]
    assert source.path(0) == str(tree / "b" / "2.png")
    assert source[1][1] == 0
    (tree / "numbers.txt").write_text("b/2.png\t7\na/0.webp\t3\n")
    assert build("list", path=str(tree / "numbers.txt")).labels.tolist() == [7, 3]


def test_list_errors_name_the_line(tree: Path) -> None:
    (tree / "mixed.txt").write_text("b/2.png\tdog\na/0.webp\n")
    with pytest.raises(UserError, match=r"mixed\.txt:2: some lines have a label"):
        build("list", path=str(tree / "mixed.txt"))
    (tree / "marked.txt").write_text("b/2.png\na/0.webp\n", encoding="utf-8-sig")
    assert build("list", path=str(tree / "marked.txt")).path(0) == str(tree / "b/2.png")
    (tree / "gone.txt").write_text("\nb/9.png\n")
    with pytest.raises(UserError, match=r"gone\.txt:2: no such image"):
        build("list", path=str(tree / "gone.txt"))


def test_digits_are_sklearns() -> None:
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    train, val = build("digits"), build("digits", split="val")
    assert (len(train), len(val)) == (1347, 450)
    assert np.array_equal(np.concatenate([train.labels, val.labels]), labels)
    image, label = val[3]
    expected = Image.fromarray((images[1350].reshape(8, 8) * 255 / 16).round().astype(np.uint8))
    expected = expected.resize((32, 32), Image.Resampling.BICUBIC)
    assert np.array_equal(np.asarray(image)[..., 2], np.asarray(expected))
    assert label == labels[1350]


def test_opening_sources_does_not_import_torch_or_sklearn(tree: Path) -> None:
    code = (
        "import sys; from selftask.registry import SOURCES; import selftask.data.loading.dataset\n"
        "for name, args in [('digits', {}), ('folder', {'path': sys.argv[1]})]:\n"
        "    cls = SOURCES[name]; cls(cls.Config(**args)).describe()\n"
        "assert not {'torch', 'sklearn', 'torchvision'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tree)], check=True, env=_environment())


def test_array_file(tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 256, (6, 5, 4, 3), dtype=np.uint8)
    np.savez(tmp_path / "x.npz", images=images, labels=np.arange(6) % 3)
    source = build("array", path=str(tmp_path / "x.npz"))
    assert np.array_equal(np.asarray(source[4][0]), images[4])
    assert (source[4][1], source.num_classes) == (1, 3)
    np.savez(tmp_path / "b.npz", images=images, labels=np.array(["öl".encode(), b"rot"] * 3))
    assert build("array", path=str(tmp_path / "b.npz")).class_names() == ["rot", "öl"]
    np.save(tmp_path / "x.npy", images)
    mapped = build("array", path=str(tmp_path / "x.npy"))
    assert np.array_equal(np.asarray(mapped[4][0]), images[4])
    assert mapped.labels is None


def test_array_errors(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", image=np.zeros((2, 4, 4)), labels=np.zeros(3))
    with pytest.raises(UserError, match="no array 'images'; did you mean 'image'"):
        build("array", path=str(tmp_path / "x.npz"))
    with pytest.raises(UserError, match=r"2 images but labels of shape \(3,\)"):
        build("array", path=str(tmp_path / "x.npz"), images="image")
    with pytest.raises(UserError, match=r"data.labels: .* no array 'label'; did you mean 'labels'"):
        build("array", path=str(tmp_path / "x.npz"), images="image", labels="label")
    (tmp_path / "y.npz").write_text("no array")
    with pytest.raises(UserError, match="not a numpy file"):
        build("array", path=str(tmp_path / "y.npz"))


def test_labels_of_an_array_file(tmp_path: Path) -> None:
    """Texts are numbered in sorted order; what is no class number is refused, not rounded."""

    def labels_of(labels: list) -> np.ndarray:
        images = np.zeros((3, 4, 4), np.uint8)
        np.savez(tmp_path / "x.npz", images=images, labels=np.array(labels))
        return build("array", path=str(tmp_path / "x.npz")).labels

    assert labels_of(["dog", "cat", "dog"]).tolist() == [1, 0, 1]
    assert labels_of([2.0, 0.0, 1.0]).tolist() == [2, 0, 1]
    with pytest.raises(UserError, match=r"those of .*x\.npz are float64; whole numbers or texts"):
        labels_of([0.5, 1.0, 2.0])
    with pytest.raises(UserError, match="does not hold numbers only"):
        labels_of([None, 1, 2])


def test_custom_dataset_in_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine_data.py").write_text(
        "import numpy as np\n"
        "class Pairs:\n"
        "    def __init__(self, n): self.n = n\n"
        "    def __len__(self): return self.n\n"
        "    def __getitem__(self, i):\n"
        "        if i == 2: raise OSError('damaged')\n"
        "        if i in (0, 4): return {'image': None} if i else ((None, None), 1)\n"
        "        if i == 1: raise KeyError('notes')\n"
        "        return np.full((4, 4, 3), i, dtype=np.uint8), i\n"
        "def broken(): return open('nothing')\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    source = build("custom", dataset="mine_data:Pairs", args={"n": 5})
    image, label = source[3]
    assert (len(source), label, image[0, 0].tolist()) == (5, 3, [3, 3, 3])
    with pytest.raises(Exception, match="damaged"):
        source[2]
    with pytest.raises(BadImage, match=r"failed at mine_data\.py:8: KeyError: 'notes'"):
        source[1]
    with pytest.raises(BadImage, match=r"a dict is no image; .* an image or \(image, label\)"):
        source[4]
    with pytest.raises(BadImage, match=r"a tuple is no image; .*, without views of it"):
        source[0]
    with pytest.raises(UserError, match=r"mine_data:broken' failed at mine_data\.py:10: FileNot"):
        build("custom", dataset="mine_data:broken")
    with pytest.raises(UserError, match=r"data\.args: mine_data:Pairs: missing .*'n'"):
        build("custom", dataset="mine_data:Pairs")
    with pytest.raises(UserError, match="has no 'Pair'; did you mean 'Pairs'"):
        build("custom", dataset="mine_data:Pair")
    with pytest.raises(UserError, match="no module named 'mine_dat'"):
        build("custom", dataset="mine_dat:Pairs")


def test_torchvision_that_is_not_on_disk(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no such folder.*nothing is downloaded"):
        build("torchvision", dataset="CIFAR10", root=str(tmp_path / "gone"))
    with pytest.raises(UserError, match=r"CIFAR10 .* cannot be opened"):
        build("torchvision", dataset="CIFAR10", root=str(tmp_path))
    with pytest.raises(UserError, match="did you mean 'CIFAR10"):
        build("torchvision", dataset="CIFAR11", root=str(tmp_path))


def test_torchvision_on_disk(tmp_path: Path) -> None:
    """EuroSAT keeps its images in a folder for each class: easily written."""
    folder = tmp_path / "EuroSAT" / "eurosat" / "2750"
    save_image(folder / "Forest" / "1.png", 5)
    save_image(folder / "River" / "2.png", 9)
    source = build("torchvision", dataset="EuroSAT", root=str(tmp_path / "EuroSAT"))
    assert source.describe() == "2 images, 2 classes (torchvision:EuroSAT)"
    assert source[1][0][0, 0].tolist() == [9, 9, 9]
    assert source[1][1] == 1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("digits", {"name": "digits"}),
        ("torchvision:CIFAR10", {"name": "torchvision", "dataset": "CIFAR10"}),
        ("pkg.mod:Class", {"name": "custom", "dataset": "pkg.mod:Class"}),
        ("a/b.npz", {"name": "array", "path": "a/b.npz"}),
        ("list.txt", {"name": "list", "path": "list.txt"}),
        ("./digits", {"name": "folder", "path": "./digits"}),
        ("../some/photos", {"name": "folder", "path": "../some/photos"}),
    ],
)
def test_short_forms(text: str, expected: dict[str, str]) -> None:
    assert expand_source(text) == expected


def test_paths_are_one_block(tmp_path: Path) -> None:
    names = [f"folder/{i}_\udce9.jpg" for i in range(1000)]  # a name that is no valid UTF-8
    table = PathTable.of(names)
    assert [table[i] for i in range(len(table))] == names
    assert len(pickle.dumps(table)) < sum(map(len, names)) * 2
    assert pickle.loads(pickle.dumps(table))[999] == names[999]
    with pytest.raises(IndexError):
        table[1000]


@pytest.mark.parametrize("name", ["digits", "folder"])
def test_sources_can_be_pickled(name: str, tree: Path) -> None:
    source = build(name, **({} if name == "digits" else {"path": str(tree)}))
    again = pickle.loads(pickle.dumps(source))
    assert np.array_equal(np.asarray(again[1][0]), np.asarray(source[1][0]))


@pytest.mark.skipif(not PHOTOS.is_dir(), reason="shared test images are not here")
def test_photos() -> None:
    assert build("folder", path=str(PHOTOS)).describe() == "1108 images, 20 folders, 0 unreadable"


def _environment() -> dict[str, str]:
    import os

    import selftask

    return {**os.environ, "PYTHONPATH": str(Path(selftask.__file__).parents[1])}


class NoSource:
    def __len__(self) -> int:
        return 3


def test_what_is_no_source_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SOURCES._registered, "own", NoSource)
    match = r"test_sources.py:\d+: the source 'own' must extend selftask.data.source.Source; a data"
    with pytest.raises(UserError, match=match):
        open_source(Component(name="own"))


@pytest.mark.parametrize("declares", [True, False])
def test_labels_that_are_bools_are_classes(declares: bool) -> None:
    class Hotdogs(list[Any]):
        """Images and whether each shows a hotdog."""

    items = Hotdogs((np.zeros((4, 4, 3), np.uint8), kind) for kind in (True, False, np.True_))
    if declares:
        items.targets = [kind for _, kind in items]  # type: ignore[attr-defined]
    source = DatasetSource(items, "mine")
    assert [source[index][1] for index in range(3)] == [1, 0, 1]
    assert is_labeled(source)
    assert source.num_classes == (2 if declares else 0)
