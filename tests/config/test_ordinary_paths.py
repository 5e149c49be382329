"""Folders as people name them: a key whose type is a path takes the text as it is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml
from PIL import Image

from selftask.config.checks.locations import check_not_moved
from selftask.config.compose.sweep import expand_sweep
from selftask.config.load import load_config, to_yaml
from selftask.config.schema import Config
from selftask.data.loading.open_data import open_data
from selftask.errors import ConfigError, UserError
from selftask.files.yaml_file import read_yaml
from selftask.report.images.cache import digest

NAMES = (
    *("fotos_für", "photos (1)", "O'Brien", "x#y", "a&b", "x!y", "a,b", "x=y", "x[1]", "{q}"),
    *('it\'s "q"', "100%", "a\\b", "a:b", "1e3", "007", "true", "2024-01-05", "…", "$HOME"),
)


@pytest.fixture(autouse=True)
def _folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("plain", *NAMES):
        for number in range(2):
            path = Path(name, f"{number}.png")
            path.parent.mkdir(exist_ok=True)
            Image.new("RGB", (8, 8), (number, 0, 0)).save(path)


def paths_in(config: Config) -> list[object]:
    """All paths of a config that the tests below set."""
    val = config.data.val
    return [
        config.data.source.args["path"],
        val and val.args["path"],
        config.out,
        config.init.backbone,
        config.resume.checkpoint,
        config.data.stage_to,
    ]


def overrides(name: str) -> list[str]:
    keys = ("data", "data.val", "out", "init.backbone", "resume", "data.stage_to")
    return [f"{key}={name}" for key in keys]


@pytest.mark.parametrize("name", NAMES)
def test_on_the_command_line_and_back_from_config_yaml(name: str) -> None:
    config = load_config("simclr/images", overrides(name))
    assert paths_in(config) == [name] * 6
    assert [len(source or "") for source in open_data(config.data)[:2]] == [2, 2]
    Path("saved.yaml").write_text(to_yaml(config), encoding="utf-8")
    assert paths_in(load_config("saved.yaml", [])) == [name] * 6


@pytest.mark.parametrize("name", NAMES)
def test_in_a_recipe_as_far_as_yaml_allows(name: str) -> None:
    text = repr(name) if name[0] == "{" else name
    lines = ["defaults: [/simclr/images]", f"data: {text}", f"out: {text}", f"resume: {text}"]
    Path(name, "mine.yaml").write_text("\n".join(lines), encoding="utf-8")
    config = load_config(f"{name}/mine.yaml", [])
    assert [config.data.source.args["path"], config.out, config.resume.checkpoint] == [name] * 3


def test_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    config = load_config("simclr/images", overrides("~/plain"))
    assert config.out == config.init.backbone == config.resume.checkpoint == str(tmp_path / "plain")
    assert [len(source or "") for source in open_data(config.data)[:2]] == [2, 2]
    unknown = load_config("simclr/images", ["data=plain", "out=~nobody-of-this-name/x"])
    assert unknown.out == "~nobody-of-this-name/x"


def test_what_is_no_path_is_still_read() -> None:
    config = load_config(
        "simclr/images", ["data={name: folder, path: plain, val: 'x#y'}", 'out="a b"']
    )
    assert paths_in(config)[:3] == ["plain", "x#y", "a b"]
    none = load_config("simclr/images", ["data=plain", "data.val=plain", "data.val=null"])
    assert none.data.val is None


def test_a_sweep_over_paths() -> None:
    """Commas separate values of a sweep, unless there is a folder of that name."""
    assert [point.overrides for point in expand_sweep(["data=plain,x y"])] == [
        ["data=plain"],
        ["data=x y"],
    ]
    assert [point.overrides for point in expand_sweep(["data=a,b"])] == [["data=a,b"]]


def test_numbers_of_a_recipe_stay_numbers() -> None:
    text = "defaults: [/simclr/images]\ndata: plain\ntrain: {epochs: 7}\noptimizer: {lr: 1e-3}\n"
    Path("mine.yaml").write_text(text)
    config = load_config("mine.yaml", [])
    assert (config.train.epochs, config.optimizer.lr) == (7, 0.001)
    assert yaml.safe_load(to_yaml(config))["train"]["epochs"] == 7


def test_a_name_that_is_no_utf8_is_read_back_from_config_yaml() -> None:
    """Images on disks of old servers have such names."""
    name = os.fsdecode(b"caf\xe9")
    Path(name).mkdir()
    Image.new("RGB", (8, 8)).save(Path(name, "0.png"))
    config = load_config("simclr/images", [f"data={name}"])
    saved = Path("saved.yaml")
    saved.write_text(to_yaml(config), encoding="utf-8")
    assert config.data.source.args["path"] == name
    assert load_config("saved.yaml", []).data.source.args["path"] == name
    assert read_yaml(saved)["data"]["path"] == name  # as reports read it
    assert digest(name) != digest(os.fsdecode(b"caf\xea"))


def test_a_run_folder_whose_name_is_no_utf8_is_refused() -> None:
    """Torch writes checkpoints there, but does not read them."""
    name = os.fsdecode(b"caf\xe9")
    with pytest.raises(ConfigError, match="this name is no UTF-8"):
        load_config("simclr/images", ["data=plain", f"out={name}"])


def test_a_moved_run_does_not_train_in_its_old_folder() -> None:
    saved = Path("new/config.yaml")
    saved.parent.mkdir()
    saved.write_text(to_yaml(load_config("simclr/images", ["data=plain", "out=old"])))
    (saved.parent / "status.json").write_text("{}")
    with pytest.raises(UserError, match=r"out=old is another folder than this.*; out=new resumes"):
        check_not_moved(str(saved), load_config(str(saved), []))
    for out in ("old", "new"):
        check_not_moved(str(saved), load_config(str(saved), [f"out={out}"]))
    saved.parent.rename("old")
    check_not_moved("old/config.yaml", load_config("old/config.yaml", []))
