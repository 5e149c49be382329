"""Names of data sets, in files and from the environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from selftask.config.compose.short_forms import expand_source
from selftask.config.load import load_config
from selftask.errors import UserError

CATALOG = """
flowers: /data/flowers
imagenet:
  name: folder
  path: /data/imagenet/train
  val: /data/imagenet/val
again: imagenet
shards: {path: "/data/x-{000..009}.tar", labels: json.id}
cifar: {name: torchvision, dataset: CIFAR10, root: /data/cifar, val: digits}
mixed: {path: /data/flowers, val: imagenet}
half-env: {name: folder, path: "${oc.env:HALF_ENV}/x"}
"""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder with a catalog; the folder of settings is there, and empty."""
    monkeypatch.delenv("SELFTASK_CATALOG", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)
    Path("catalog.yaml").write_text(CATALOG)
    (tmp_path / "config" / "selftask").mkdir(parents=True)
    return tmp_path / "config" / "selftask"


def test_entries() -> None:
    imagenet = {
        "name": "folder",
        "path": "/data/imagenet/train",
        "val": {"name": "folder", "path": "/data/imagenet/val"},
    }
    assert expand_source("flowers") == {"name": "folder", "path": "/data/flowers"}
    assert expand_source("imagenet") == expand_source("again") == imagenet
    shards = {"name": "webdataset", "path": "/data/x-{000..009}.tar", "labels": "json.id"}
    assert expand_source("shards") == shards
    assert expand_source("cifar")["val"] == {"name": "digits"}
    assert expand_source("mixed")["val"] == imagenet["val"]
    assert expand_source("./imagenet") == {"name": "folder", "path": "./imagenet"}


def test_environment_replaces_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SELFTASK_DATA_IMAGENET", "/scratch/in1k")
    monkeypatch.setenv("SELFTASK_DATA_CIFAR", "/scratch/c")
    monkeypatch.setenv("SELFTASK_DATA_FLOWERS", "flowers.csv")
    monkeypatch.setenv("SELFTASK_DATA_CUB_200", "/scratch/cub")
    imagenet = expand_source("imagenet")
    assert (imagenet["path"], imagenet["val"]["path"]) == ("/scratch/in1k", "/data/imagenet/val")
    cifar = expand_source("cifar")
    assert (cifar["name"], cifar["root"]) == ("torchvision", "/scratch/c")
    assert expand_source("flowers") == {"name": "table", "path": "flowers.csv"}
    assert expand_source("cub-200") == {"name": "folder", "path": "/scratch/cub"}
    monkeypatch.setenv("SELFTASK_DATA_DIGITS", "/x")
    assert expand_source("digits") == {"name": "digits"}  # registered names win


def test_which_file_counts(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "catalog.yaml").write_text("flowers: /home/flowers\nbirds: /home/birds\n")
    assert expand_source("flowers")["path"] == "/data/flowers"
    assert expand_source("birds")["path"] == "/home/birds"
    Path("other.yaml").write_text("flowers: /other\n")
    monkeypatch.setenv("SELFTASK_CATALOG", "other.yaml")
    assert expand_source("flowers")["path"] == "/other"
    assert expand_source("birds") == {"name": "folder", "path": "birds"}
    monkeypatch.setenv("SELFTASK_CATALOG", "gone.yaml")
    with pytest.raises(UserError, match=r"SELFTASK_CATALOG: there is no file gone\.yaml"):
        expand_source("flowers")


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("x: [", r"catalog\.yaml cannot be read: while parsing"),
        ("- x", r"catalog\.yaml: `name: folder` or"),
        ("digits: /x", r"catalog\.yaml: 'digits' is a source's"),
        ("a/b: /x", r"catalog\.yaml: 'a/b' is not a valid name"),
        ("x: 3", r"catalog\.yaml: x is 3; a path or a section"),
        ("x: {labels: true}", "the catalog's x: `name` or `path` is missing"),
        ("{x: y, y: z, z: x}", "its entry refers to itself"),
        ("xyzw: /x", "neither a folder nor in the catalog; did you mean 'xyzw'"),
    ],
)
def test_broken_catalogs_are_refused(text: str, match: str) -> None:
    Path("catalog.yaml").write_text(text)
    with pytest.raises(UserError, match=match):
        expand_source("xyz" if text.startswith("xyzw") else "x")


def test_catalog_names_are_expanded_in_a_config(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALF_ENV", "/half")
    config = load_config("simclr", ["data=imagenet"])
    assert config.data.source.args["path"] == "/data/imagenet/train"
    assert config.data.val is not None
    assert config.data.val.args["path"] == "/data/imagenet/val"
    other = load_config("simclr", ["data=flowers", "data.val=imagenet"]).data
    assert other.val == config.data.val  # of an entry with a validation set, that one
    assert config.place("data.path") == "command line: data=imagenet"
    assert load_config("simclr", ["data=half-env"]).data.source.args["path"] == "/half/x"
    Path("mine.yaml").write_text("defaults: [/simclr/digits]\ndata: imagenet\n")
    assert load_config("mine.yaml", []).data.source.args["path"] == "/data/imagenet/train"
