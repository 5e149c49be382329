"""Recipes in json, and bases of recipes by path and by address."""

from __future__ import annotations

import json
from pathlib import Path

import fsspec
import pytest
import yaml

from selftask.config.compose import recipes
from selftask.config.load import load_config
from selftask.errors import ConfigError


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "my home@x"
    folder.mkdir()
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.setenv("SELFTASK_CACHE", str(tmp_path / "the cache"))
    return folder


@pytest.mark.parametrize("style", [{"indent": "\t"}, {"separators": (",", ":")}], ids=str)
def test_a_recipe_in_json_is_the_one_in_yaml(style: dict[str, str], project: Path) -> None:
    values = yaml.safe_load(Path("my.yaml").read_text())
    values["optimizer"]["weight_decay"] = 5e-05
    values["method"]["mode"] = "mean"
    Path("other.yaml").write_text(yaml.safe_dump(values))
    Path("other.json").write_text(json.dumps(values, **style))
    ours, theirs = (load_config(f"other.{kind}", []) for kind in ("json", "yaml"))
    assert ours.to_dict() == theirs.to_dict() | {"recipe": "other.json"}
    assert ours.out == "runs/other"
    if style == {"indent": "\t"}:
        lines = Path("other.json").read_text().splitlines()
        line = next(n for n, text in enumerate(lines, 1) if '"width"' in text)
        assert ours.place("backbone.width") == f"other.json:{line}"


def test_broken_json_is_told_with_its_line(project: Path) -> None:
    Path("broken.json").write_text('{\n\t"train": {"epochs": 3}\n\t"seed": 1\n}\n')
    with pytest.raises(ConfigError, match=r"broken\.json:3: not valid yaml: .*expected ',' or '}'"):
        load_config("broken.json", [])


def test_installed_recipes_may_be_json(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/digits.json").write_text("{}")
    assert list(recipes._recipes_in(tmp_path)) == ["mine/digits"]


def test_bases_of_installed_packages(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By their names, as on the command line; with what stands beside them."""
    folder = project / "site-packages/theirs/configs"
    (folder / "theirs").mkdir(parents=True)
    (folder / "theirs/digits.yaml").write_text("defaults: [length, /simclr/digits, _self_]\n")
    (folder / "theirs/length.json").write_text('{"train": {"seed": 11, "epochs": 3}}')
    monkeypatch.setattr(recipes, "_installed_folders", lambda: [folder])
    Path("child.yaml").write_text(
        "defaults: [/theirs/digits, _self_]\nout: x\ntrain: {batch_size: 8}\n"
    )
    config = load_config("child.yaml", [])
    assert (config.train.epochs, config.train.batch_size) == (80, 8), "the later base, the child"
    assert (config.method.name, config.train.seed) == ("simclr", 11)
    assert load_config("theirs/digits", []).train.seed == 11


def test_the_file_that_is_named_is_read(project: Path) -> None:
    """Not one of the same name with another ending."""
    for ending, epochs in (("yaml", 4), ("yml", 5), ("json", 6)):
        text = json.dumps({"defaults": ["my", "_self_"], "train": {"epochs": epochs}})
        Path(f"twin.{ending}").write_text(text)
    for ending, epochs in (("yaml", 4), ("yml", 5), ("json", 6)):
        assert load_config(f"twin.{ending}", []).train.epochs == epochs


def test_bases_in_the_home_folder_and_by_absolute_path(project: Path, home: Path) -> None:
    """Each with bases of its own beside it; json, a parent folder, and no ending after ``~``."""
    (home / "parts").mkdir()
    (home / "base.yaml").write_text("defaults: [parts/size, _self_]\ntrain: {seed: 5, epochs: 8}\n")
    (home / "parts/size.json").write_text('{"defaults": ["../last"], "train": {"batch_size": 16}}')
    (home / "last.yml").write_text("train: {log_every: 3, batch_size: 2}\n")
    Path("child.yaml").write_text(f"defaults: [{project}/my.yaml, ~/base, _self_]\nout: x\n")
    config = load_config("child.yaml", [])
    assert config.backbone.args == {"width": 16}
    train = config.train
    assert (train.seed, train.epochs, train.batch_size, train.log_every) == (5, 8, 16, 3)
    assert config.place("train.epochs") == f"{home.name}/base.yaml:2"
    assert config.place("train.batch_size") == f"{home.name}/parts/size.json:1"


def test_bases_at_an_address(project: Path, home: Path) -> None:
    """Fetched with what stands beside them; each value's place is the address."""
    store = fsspec.filesystem("memory")
    store.pipe("/lab/base.yaml", b"defaults: [more, _self_]\ntrain: {epochs: 8}\n")
    store.pipe("/lab/more.yaml", b"defaults: [/simclr/digits]\ntrain: {seed: 7, epochs: 2}\n")
    Path("child.yaml").write_text("defaults: [memory://lab/base.yaml, _self_]\nout: x\n")
    config = load_config("child.yaml", [])
    assert (config.method.name, config.train.seed, config.train.epochs) == ("simclr", 7, 8)
    assert config.place("train.epochs") == "memory://lab/base.yaml:2"
    assert config.place("train.seed") == "memory://lab/more.yaml:2"
    store.pipe("/lab/base.yaml", b"defaults: [more, _self_]\ntrain: {epochs: 90}\n")
    assert load_config("child.yaml", []).train.epochs == 90, "the one that is there now"
    store.pipe("/lab/base.yaml", b"train: {epohs: 8}\n")
    with pytest.raises(ConfigError, match=r"memory://lab/base\.yaml:1: unknown key 'train\.epohs'"):
        load_config("child.yaml", [])


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("~/nowhere.yaml", r"child\.yaml:1: defaults: there is no file ~/nowhere\.yaml"),
        ("/no/where.json", r"child\.yaml:1: defaults: there is no recipe 'no/where\.json'"),
        (
            "memory://no/where.yaml",
            r"child\.yaml:1: defaults: memory://no/where\.yaml: cannot be",
        ),
        ("htps://host/a.yaml", r"child\.yaml:1: defaults: htps://host/a\.yaml: .*'https'"),
        ("child", r"child\.yaml:1: defaults: recipes that inherit each other"),
        ("~/back", r":1: defaults: recipes that inherit each other"),
    ],
)
def test_bases_that_are_not_there(entry: str, message: str, project: Path, home: Path) -> None:
    Path("child.yaml").write_text(f"defaults: [{entry}, _self_]\nout: x\n")
    (home / "back.yaml").write_text(f"defaults: [{project}/child.yaml]\n")
    with pytest.raises(ConfigError, match=message):
        load_config("child.yaml", [])


def test_nothing_is_fetched_for_a_config_that_is_only_read(project: Path, home: Path) -> None:
    fsspec.filesystem("memory").pipe("/theirs/base.yaml", b"defaults: [/simclr/digits]\n")
    Path("config.yaml").write_text("defaults: [memory://theirs/base.yaml]\nout: x\n")
    with pytest.raises(ConfigError, match=r"base\.yaml would be fetched; .*trust=true"):
        load_config("config.yaml", [], trust=False)
    assert load_config("config.yaml", [], trust=True).method.name == "simclr"


def test_a_list_of_a_base_is_given_whole(project: Path) -> None:
    """Items have no keys in a file, as they have on the command line."""
    Path("child.yaml").write_text(
        "defaults: [/simclr/digits, _self_]\nout: x\n"
        "views: {main: {transforms: {0: {degrees: 9}}}}\noptimizer: [1]\n"
    )
    with pytest.raises(ConfigError) as caught:
        load_config("child.yaml", [])
    of_list, of_section = sorted(caught.value.problems)
    assert of_list == (
        "child.yaml:3: views.main.transforms is a list in a base; give all of it here, or set keys "
        "of its items on the command line: views.main.transforms.0.KEY=VALUE"
    )
    assert of_section == "child.yaml:4: optimizer is a section in a base; give keys, not a list"
    Path("child.yaml").write_text("defaults: [/simclr/digits, _self_]\nout: x\n")
    config = load_config("child.yaml", ["views.main.transforms.0.degrees=9"])
    assert config.views["main"].transforms[0].args["degrees"] == 9


@pytest.mark.parametrize("reference", ["${views.main}", "${.main}"])
@pytest.mark.parametrize("words", [[], ["views.more.count=4"], ["views.more={count: 4}"]], ids=str)
def test_a_section_over_a_reference_changes_a_copy(
    reference: str, words: list[str], project: Path
) -> None:
    base = f"defaults: [/simclr/digits, _self_]\nviews: {{more: '{reference}'}}\n"
    Path("base.yaml").write_text(base)
    Path("child.yaml").write_text("defaults: [base, _self_]\nviews: {more: {count: 3}}\n")
    main = load_config("simclr/digits", []).views["main"]
    for recipe in ("base.yaml", "child.yaml"):
        views = load_config(recipe, words).views
        assert views["main"] == main
        assert views["more"].transforms == main.transforms
        assert views["more"].count == (4 if words else 3 if recipe == "child.yaml" else main.count)
