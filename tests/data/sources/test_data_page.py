"""Every command and yaml of docs/data.md opens the data that it speaks of."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image

from page_blocks import write_files
from selftask.config.load import load_config
from selftask.data.loading.open_data import check_data, copy_data, open_data

DOCS = (Path(__file__).parents[3] / "docs" / "data.md").read_text(encoding="utf-8")
NEEDS = {"h5": "h5py", "lmdb": "lmdb", "parquet": "pyarrow", "saved": "datasets"}
DISTANT = "s3://"  # nothing answers there


def commands() -> list[str]:
    blocks = re.findall(r"```sh\n(.*?)```", DOCS, re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]


def sections() -> list[str]:
    """The yaml blocks that are configs; the catalog is no config."""
    blocks: list[str] = re.findall(r"```yaml\n(.*?)```", DOCS, re.DOTALL)
    return [block for block in blocks if not block.startswith("# catalog.yaml")]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with everything that the page speaks of."""
    home = tmp_path_factory.mktemp("docs")
    pixels = np.random.default_rng(0).integers(0, 256, (40, 8, 8, 3), dtype=np.uint8)
    names = [f"{'cat' if i % 2 else 'dog'}/{i}.png" for i in range(40)]
    encoded = []
    for name, image in zip(names, pixels, strict=True):
        for folder in ("photos", "clips", "torchvision_data/eurosat/2750"):
            (home / folder / name).parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(home / folder / name)
        encoded.append((home / "photos" / name).read_bytes())
    (home / "list.txt").write_text("".join(f"photos/{name}\n" for name in names))
    rows = "".join(f"photos/{name},{name[:3]}\n" for name in names)
    (home / "list.csv").write_text("path,label\n" + rows)
    pairs = "".join(f"photos/{name},a {name[:3]},clips/{name},0.5\n" for name in names)
    (home / "captions.csv").write_text("path,text,next_path,hour\n" + pairs)
    boxes = [{"path": f"photos/{n}", "x0": 0, "y0": 0, "x1": 8, "y1": 8} for n in names]
    (home / "regions.json").write_text(json.dumps(boxes))
    np.savez(home / "train.npz", images=pixels, labels=np.arange(40) % 2)
    np.savez(home / "test.npz", images=pixels, labels=np.arange(40) % 2)
    (home / "shards").mkdir()
    for shard in range(3):
        with tarfile.open(home / "shards" / f"train-{shard:03}.tar", "w") as tar:
            for i in range(shard, 40, 3):
                note = json.dumps({"species": names[i][:3]}).encode()
                for end, data in (("png", encoded[i]), ("cls", b"1"), ("json", note)):
                    info = tarfile.TarInfo(f"{i:04}.{end}")
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))
    (home / "sentinel").mkdir()
    np.save(home / "sentinel" / "0.npy", np.zeros((5, 8, 8), np.uint16))
    (home / "xrays").mkdir()
    Image.fromarray(np.zeros((8, 8), np.uint16)).save(home / "xrays" / "0.png")
    (home / "my_data.py").write_text(
        "import numpy as np\n"
        "class Squares:\n"
        "    def __init__(self, number): self.number = number\n"
        "    def __len__(self): return self.number\n"
        "    def __getitem__(self, i): return np.full((8, 8, 3), i, np.uint8)\n"
    )
    catalog = re.search(r"```yaml\n# catalog.yaml\n(.*?)```", DOCS, re.DOTALL)
    assert catalog is not None
    (home / "catalog.yaml").write_text(catalog[1])
    return home


def write_optional(home: Path, package: str) -> None:
    """What another library writes; the test is skipped without it."""
    library = pytest.importorskip(package)
    with np.load(home / "train.npz") as arrays:
        pixels, labels = arrays["images"], arrays["labels"]
    if package == "h5py" and not (home / "train.h5").exists():
        with library.File(home / "train.h5", "w") as file:
            file["train/x"], file["train/y"] = pixels, labels
    elif package == "lmdb" and not (home / "train_lmdb").exists():
        for name in ("train_lmdb", "raw_lmdb"):
            with (
                library.open(str(home / name), map_size=1 << 22) as made,
                made.begin(write=True) as put,
            ):
                for i, image in enumerate(pixels):
                    file = next(home.glob(f"photos/*/{i}.png"))
                    put.put(
                        b"%d.png" % i,
                        file.read_bytes() if name == "train_lmdb" else image.tobytes(),
                    )
    elif package == "pyarrow":
        import pyarrow.parquet as parquet

        files = sorted(str(p.relative_to(home / "photos")) for p in home.glob("photos/*/*.png"))
        table = library.table({"file": files, "species": [file[:3] for file in files]})
        parquet.write_table(table, home / "list.parquet")
    elif package == "datasets" and not (home / "saved").exists():
        features = library.Features({"image": library.Array3D((8, 8, 3), "uint8")})
        features["label"] = library.ClassLabel(names=["dog", "cat"])
        rows = {"image": list(pixels), "label": labels}
        split = library.Dataset.from_dict(rows, features=features)
        library.DatasetDict({"train": split, "test": split}).save_to_disk(home / "saved")


def prepare(text: str, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for word, package in NEEDS.items():
        if re.search(rf"[._]{word}\b|\b{word} ", text):
            write_optional(home, package)
    monkeypatch.chdir(home)
    monkeypatch.syspath_prepend(home)
    monkeypatch.setenv("SELFTASK_CACHE", str(home / "cache"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home))
    monkeypatch.delenv("SELFTASK_CATALOG", raising=False)


def check_opens(overrides: list[str], recipe: str, home: Path) -> None:
    config = load_config(recipe, overrides)
    if any(DISTANT in word for word in overrides):
        return
    if config.data.stage_to is not None:
        sources = copy_data(open_data(config.data), str(home / "copies"))
    else:
        sources = open_data(config.data)
    for source in (sources.train, sources.val, *sources.val_sets.values()):
        if source is not None:
            image, _ = source[len(source) - 1]
            channels = 5 if config.data.source.args.get("bands", ()) is None else 3
            assert (image.dtype, image.shape) == (np.uint8, (8, 8, channels))
            if any(word.startswith("views.") for word in overrides):
                check_data(replace(config, train=replace(config.train, batch_size=1)), source)
            assert len(source) >= 8 or config.data.source.name == "bands"


@pytest.mark.parametrize("line", commands())
def test_commands(line: str, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(line, home, monkeypatch)
    words = shlex.split(line, comments=True)
    while "=" in words[0]:
        monkeypatch.setenv(*words.pop(0).split("=", 1))
    assert words[:2] == ["selftask", "train"]
    check_opens(words[3:], words[2], home)


@pytest.mark.parametrize("text", sections())
def test_sections(text: str, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(text, home, monkeypatch)
    assert set(yaml.safe_load(text)) == {"data"}
    Path("mine.yaml").write_text(f"defaults: [/simclr/images]\n{text}")
    check_opens([], "mine.yaml", home)


def test_own_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "rooms.py" in write_files("data", tmp_path)
    monkeypatch.chdir(tmp_path)
    words = ["import=[rooms]", "data=rooms", "data.count=8", "train.batch_size=4"]
    source = open_data(load_config("simclr/images", words).data).train
    image, label = source[3]
    assert (image.shape, label, image.max()) == ((32, 32, 3), 3, 63)
    assert (source.extra(3, "caption"), source.extra(2, "side")) == ("a square", 24)
    assert source.extra(0, "turned")[-1, 0, 0] == 60  # upper left, turned counterclockwise
    assert source.describe() == "8 squares, 4 classes"


def test_the_page_names_every_source() -> None:
    from selftask.registry import SOURCES

    table = DOCS.partition("\n## ")[0]
    for name in SOURCES.names():
        if SOURCES.address(name).path.parent.name == "sources" and os.sep not in name:
            assert f"`{name}`" in table, f"docs/data.md does not mention {name}"
