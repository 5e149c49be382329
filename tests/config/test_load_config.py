"""Composition, short forms, types, defaults and the round trip of a config."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from selftask.cli.main import main as cli
from selftask.config.compose import recipes
from selftask.config.compose.overrides import format_value, parse_value
from selftask.config.compose.recipe_files import read_recipe
from selftask.config.config_class import config_class
from selftask.config.difference import difference
from selftask.config.explain import explain
from selftask.config.load import load_config, to_yaml
from selftask.config.schema import DEFAULT_HOOKS, Config, DataConfig, OptimizerConfig
from selftask.errors import ConfigError
from selftask.registry import METHODS, OPTIMIZERS, REGISTRIES, SOURCES


def load(*overrides: str) -> Config:
    return load_config("my.yaml", list(overrides))


def test_values_come_from_file_command_line_and_defaults(project: Path) -> None:
    config = load("train.epochs=7", "method.temperature=1")
    assert config.train.epochs == 7
    assert config.method.args == {"temperature": 1.0, "crops": 2, "mode": "mean"}
    assert config.views["main"].transforms[0].args == {"size": 32, "scale": (0.2, 1.0)}
    assert config.place("train.epochs") == "command line: train.epochs=7"
    assert config.place("backbone.width") == "my.yaml:9"
    assert config.place("method.crops").startswith("default of toy_method (toy.py:")
    assert config.place("train.seed") == "default"


def test_round_trip_through_yaml(project: Path) -> None:
    config = load("hooks.progress=null", "train.stop_at=3", "data.val={name: toy_source, path: v}")
    Path("config.yaml").write_text(to_yaml(config))
    again = load_config("config.yaml", [])
    assert again == config
    assert "progress" not in again.hooks
    assert again.recipe == "my.yaml"
    assert again.out == "runs/my"


def test_config_command_prints_a_recipe(project: Path) -> None:
    from selftask.config.explain import explain

    config = load("optimizer=toy_adam", "train.max_steps=5")
    text = explain(config)
    Path("explained.yaml").write_text(text)
    assert load_config("explained.yaml", []) == config
    by_key = {line.split(":")[0].strip(): line for line in text.splitlines()}
    assert by_key["max_steps"].endswith("# command line: train.max_steps=5")
    assert by_key["width"].endswith("# my.yaml:9")
    assert "default of toy_adam (toy.py:" in by_key["betas"]


def test_an_empty_section_removes_all_that_it_names_and_nothing_else(project: Path) -> None:
    kept = ("hooks={ema: {decay: 0.9}}", "hooks.ema={}", "eval={}")
    assert load_config("simclr/digits", [*kept]).hooks["ema"].args["decay"] == 0.9
    assert list(load_config("simclr/digits", [*kept]).eval.evaluations) == ["knn"]
    for none in ("{}", "null"):
        config = load_config("simclr/digits", [*kept, f"eval.evaluations={none}", f"hooks={none}"])
        assert config.eval.evaluations == {}
        assert set(config.hooks) == set(DEFAULT_HOOKS)
    again = load_config("simclr/digits", ["eval.evaluations={}", "eval.evaluations.linear={}"])
    assert list(again.eval.evaluations) == ["linear"]


@pytest.mark.parametrize("recipe", ["my.yaml", "simclr/digits", "dino/vit_small_imagenet"])
def test_a_difference_is_a_recipe_of_the_other_config(project: Path, recipe: str) -> None:
    Path("FOLDER").mkdir()
    words = ["hooks={ema: {decay: 0.9}, checkpoint: null}", "train.epochs=2", "data=FOLDER"]
    config, other = load_config(recipe, words), load_config("byol/digits", [])
    text = difference(config, other, "byol/digits")
    Path("child.yaml").write_text(text)
    child = load_config("child.yaml", [])
    assert dataclasses.replace(child, recipe=config.recipe, out=config.out) == config
    assert "seed" not in text  # equal in both
    lines = {line.split(":")[0].strip(): line for line in text.splitlines()}
    assert lines["epochs"].split() == ["epochs:", "2", "#", "30"]


def test_the_command_prints_a_difference(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["config", "byol/digits", "train.epochs=3", "hooks.progress=null"]
    assert cli([*words, "--against", "byol/digits"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[:3] == [
        ["defaults:", "[/byol/digits,", "_self_]"],
        ["train:"],
        ["epochs:", "3", "#", "30"],
    ]
    assert lines[3:] == [["hooks:"], ["progress:", "null", "#", "{}"]]
    assert cli(["config", "--against=byol/digits", "byol/digits"]) == 0
    assert capsys.readouterr().out == "defaults: [/byol/digits, _self_]\n"
    assert cli(["config", "byol/digits", "--against", "bio/digits"]) == 2
    assert cli(["config", "byol/digits", "--against"]) == 2
    assert "--against needs a value" in capsys.readouterr().err


def test_defaults_list_inherits_shipped_and_own_files(project: Path) -> None:
    Path("child.yaml").write_text("defaults: [/my, _self_]\ntrain: {epochs: 9}\n")
    config = load_config("child.yaml", [])
    assert (config.train.epochs, config.train.batch_size) == (9, 8)
    assert config.place("train.epochs") == "child.yaml:2"
    assert config.place("train.batch_size") == "my.yaml:11"
    Path("mine.yaml").write_text("defaults: [/simclr/digits, _self_]\ntrain: {epochs: 2}\n")
    config = load_config("mine.yaml", [])
    assert config.method.name == "simclr"
    assert config.train.epochs == 2
    assert config.place("method.name").endswith("configs/simclr/digits.yaml:" + _line("method:"))


def _line(start: str) -> str:
    lines = (recipes.folder() / "simclr/digits.yaml").read_text().splitlines()
    return str(next(n for n, line in enumerate(lines, 1) if line.startswith(start)))


def test_another_name_forgets_the_old_ones_fields(project: Path) -> None:
    config = load("backbone=toy_wide", "optimizer=toy_adam", "method=toy_other")
    assert config.backbone.args == {"factor": 2}
    assert config.optimizer.args == {"betas": (0.9, 0.999)}
    assert config.optimizer.lr == 0.1, "the learning rate is not the optimizer's own"


def test_another_method_keeps_what_it_has_and_names_the_rest(project: Path) -> None:
    """Under a base recipe, on the command line and in a file that imports the new method itself."""
    text = Path("my.yaml").read_text().replace("temperature: 0.2", "temperature: 0.2, crops: 2")
    Path("my.yaml").write_text(text + "eval: {transforms: [normalize]}\n")
    line = next(n for n, line in enumerate(text.splitlines(), 1) if "temperature" in line)
    Path("own.py").write_text(
        "from dataclasses import dataclass\nfrom selftask.registry import register_method\n"
        '@register_method("own_net")\nclass Own:\n    loss_reduction = "samples"\n'
        "    @dataclass(frozen=True, kw_only=True)\n    class Config:\n"
        "        temperature: float = 0.7\n        width: int = 3\n"
    )
    Path("child.yaml").write_text(
        "defaults: [my.yaml, _self_]\nimport: [toy, own]\nmethod: {name: own_net, width: 5}\n"
    )
    own = load_config("child.yaml", [])
    for config, args in (
        (load("method=toy_other"), {"temperature": 0.2}),
        (own, {"temperature": 0.2, "width": 5}),
        (load("method={name: toy_other, temperature: 0.4}"), {"temperature": 0.4}),
    ):
        assert config.method.args == args
        (note,) = config.notes
        assert f"method.name={config.method.name} has no crops (my.yaml:{line})" in note
        assert explain(config).startswith(f"# note: {note}\n")
    assert own.place("method.temperature") == f"my.yaml:{line}"
    assert load().notes == []
    Path("again.yaml").write_text(explain(own))
    assert load_config("again.yaml", []) == own


def test_another_transform_forgets_the_old_ones_fields(project: Path) -> None:
    text = Path("my.yaml").read_text()
    Path("my.yaml").write_text(text.replace("size: 32", "size: 32, scale: [0.1, 0.2]"))
    place = "views.main.transforms.0"
    crop = load(f"{place}={{name: center_crop, size: 24}}").views["main"].transforms[0]
    assert (crop.name, crop.args) == ("center_crop", {"size": 24})
    same = load(f"{place}={{name: toy_crop, size: 24}}").views["main"].transforms[0]
    assert same.args == {"size": 24, "scale": (0.1, 0.2)}


def test_so_does_one_inside_of_another(project: Path) -> None:
    old = "{name: toy_crop, size: 32}"
    new = "{name: random_apply, p: 0.3, transforms: [{name: toy_crop, size: 8, scale: [0.1, 0.2]}]}"
    Path("my.yaml").write_text(Path("my.yaml").read_text().replace(old, new))
    place = "views.main.transforms.0"
    inner = load(f"{place}.transforms.0={{name: center_crop, size: 9}}").views["main"].transforms[0]
    assert inner.args == {"p": 0.3, "transforms": [{"name": "center_crop", "size": 9}]}
    outer = load(f"{place}={{name: center_crop, size: 9}}").views["main"].transforms[0]
    assert (outer.name, outer.args) == ("center_crop", {"size": 9})


def test_same_name_keeps_its_fields(project: Path) -> None:
    config = load("backbone=toy_net", "optimizer={name: toy_sgd, lr: 0.3}")
    assert config.backbone.args == {"width": 16}
    assert (config.optimizer.lr, config.optimizer.args["momentum"]) == (0.3, 0.8)


def test_order_on_the_command_line_does_not_matter(project: Path) -> None:
    one = load("backbone.factor=3", "backbone=toy_wide")
    assert one.backbone == load("backbone=toy_wide", "backbone.factor=3").backbone
    assert one.backbone.args == {"factor": 3}


def test_another_source_does_not_keep_the_labeled_images_of_the_old(project: Path) -> None:
    text = Path("my.yaml").read_text().replace("path: here", "path: here, val: {name: digits}")
    Path("my.yaml").write_text(text)
    assert load().data.val is not None
    config = load("data=./there")
    assert config.data.source.name == "folder"
    assert config.data.val is None


def test_short_forms(project: Path) -> None:
    config = load("data=digits", "data.val=digits", "backbone=timm:vit_tiny_patch16_224")
    assert config.data.source.name == "digits"
    assert config.data.val == config.data.source
    assert config.backbone.name == "timm"
    assert config.backbone.args["model"] == "vit_tiny_patch16_224"
    assert load("backbone=torchvision:resnet18").backbone.args["model"] == "resnet18"
    custom = load("backbone=pkg.mod:make").backbone
    assert custom.name == "custom"
    assert custom.args["model"] == "pkg.mod:make"


def test_hydras_grammar(project: Path) -> None:
    config = load(
        "~hooks.toy_hook",
        "launch.slurm={partition: 'a b', nice: 3}",
        'out="with, comma"',
        "views.main.transforms.0.size=28",
        "views.main.transforms.0.scale=[0.5,1]",
        "train.max_steps=${train.batch_size}",
    )
    assert "toy_hook" not in config.hooks
    assert config.launch.slurm == {"partition": "a b", "nice": 3}
    assert config.out == "with, comma"
    assert config.views["main"].transforms[0].args == {"size": 28, "scale": (0.5, 1.0)}
    assert config.train.max_steps == 8
    assert config.place("views.main.transforms.0.size").startswith("command line: views")


SCALARS = (
    "1 -1 +1 01 08 1_000 0x1f 1. .5 -.5 1.5 1e3 1e-3 1E-3 1.5e+3 -1e3 1_0.5e1 .5e-3 1e 1e- e3 "
    ".inf -.inf yes no on null ~ 2026-11-28 2026-11-28T10:00:00 1.2.3 '1e3'"
)


@pytest.mark.parametrize("text", [r"\d+", "a\\", r"\"x\\", r"a\\b", "',{"])
def test_a_formatted_value_is_read_as_it_was(text: str) -> None:
    parsed = parse_value(format_value([text]), ("method", "x"))
    assert parsed is not None and parsed.value() == [text]


def test_scalars_of_a_recipe_are_those_of_omegaconf(tmp_path: Path) -> None:
    path = tmp_path / "scalars.yaml"
    path.write_text("".join(f"{index}: {text}\n" for index, text in enumerate(SCALARS.split())))
    expected = OmegaConf.to_container(OmegaConf.load(path))
    assert isinstance(expected, dict)
    values = read_recipe(path).layer.values
    assert {key: repr(value) for key, value in values.items()} == {
        str(key): repr(value) for key, value in expected.items()
    }


def test_a_time_in_a_recipe_is_text_as_on_the_command_line(project: Path) -> None:
    text = "defaults: [my.yaml, _self_]\nlaunch: {slurm: {time: 36:00:00, qos: 0:30}}\n"
    Path("timed.yaml").write_text(text)
    in_file = load_config("timed.yaml", []).launch.slurm
    assert in_file == load("launch.slurm={time: '36:00:00', qos: '0:30'}").launch.slurm
    assert in_file["time"] == "36:00:00"


def test_short_form_from_the_environment(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_IMAGES", "/images/mine")
    text = (
        Path("my.yaml").read_text().replace("{name: toy_source, path: here}", "${oc.env:MY_IMAGES}")
    )
    Path("my.yaml").write_text(text)
    assert load().data.source.args["path"] == "/images/mine"


def test_a_folder_called_like_a_section_changes_nothing(project: Path) -> None:
    Path("data").mkdir()
    Path("data/x.yaml").write_text("path: y\n")
    assert load("data=./imgs").data.source.args["path"] == "./imgs"


def test_hooks_of_every_run_and_those_of_the_recipe(project: Path) -> None:
    default = load().hooks["health"].args
    changed = ("hooks.health.max_rows=7", "hooks.progress=null")
    config = load("hooks.second={name: toy_hook, every: 2}", "hooks.toy_hook=null", *changed)
    kept = [name for name in DEFAULT_HOOKS if name != "progress"]
    assert [*config.hooks] == [*kept, "second"]
    assert config.hooks["second"].name == "toy_hook"
    assert config.hooks["health"].args == {**default, "max_rows": 7} != default


def test_workers_are_derived_unless_given(project: Path) -> None:
    config = load()
    assert 0 <= config.data.num_workers <= 8
    assert config.place("data.num_workers").startswith("auto: ")
    assert load("data.num_workers=11").data.num_workers == 11
    with pytest.raises(ConfigError, match=r"data\.num_workers='al': expected a whole number"):
        load("data.num_workers=al")


def test_a_file_that_changed_is_read_again(project: Path) -> None:
    assert load().train.epochs == 3
    Path("my.yaml").write_text(Path("my.yaml").read_text().replace("epochs: 3", "epochs: 4"))
    assert load().train.epochs == 4


def test_nothing_is_left_behind(project: Path) -> None:
    before = sorted(os.listdir())
    load()
    assert sorted(set(os.listdir()) - {"__pycache__"}) == before


def test_no_source_or_optimizer_field_is_called_like_one_of_ours() -> None:
    for registry, ours in ((SOURCES, DataConfig), (OPTIMIZERS, OptimizerConfig)):
        fixed = set(_names(ours)) - {"source", "args"}
        for name in registry:
            config = config_class(registry, name)
            own = set(_names(config)) if config else set()
            assert not own & (fixed | {"name"}), f"{registry.kind} {name}"


@pytest.mark.parametrize("kind", sorted(REGISTRIES))
def test_fields_read_from_source_are_those_of_the_imported_class(kind: str) -> None:
    registry = REGISTRIES[kind]
    for name in registry:
        read = config_class(registry, name)
        registry[name]
        real = config_class(registry, name)
        assert (read is None) == (real is None), name
        if read is not None and real is not None:
            assert _names(read) == _names(real), name


def test_every_momentum_of_a_method_is_a_share() -> None:
    configs = [config for name in METHODS if (config := config_class(METHODS, name))]
    every = [field for config in configs for field in dataclasses.fields(config)]
    shares = [field for field in every if field.name.endswith("momentum")]
    assert len(shares) >= 8
    assert all((field.metadata["min"], field.metadata["max"]) == (0, 1) for field in shares)


def _names(config: type) -> list[str]:
    return [field.name for field in dataclasses.fields(config)]


def test_dumped_yaml_has_no_python_tags(project: Path) -> None:
    assert yaml.safe_load(to_yaml(load()))["views"]["main"]["transforms"][0]["scale"] == [0.2, 1.0]


def test_a_thing_of_which_only_a_field_is_given_has_the_place_of_that_field() -> None:
    with pytest.raises(
        ConfigError, match=r"^command line: hooks.fault.at=3: no hook named 'fault'"
    ):
        load_config("simclr", ["hooks.fault.at=3"])
