"""Names of Classy Vision in a config."""

from __future__ import annotations

from pathlib import Path

import pytest

from selftask.config.load import load_config
from selftask.errors import ConfigError


def test_classys_own_names_take_any_arguments(project: Path) -> None:
    config = load_config(
        "my.yaml",
        ["optimizer={name: 'classy:sgd', nesterov: true}", "meters.top={name: 'classy:accuracy'}"],
    )
    assert config.optimizer.name == "classy:sgd"
    assert config.optimizer.args == {"nesterov": True}
    assert config.meters["top"].name == "classy:accuracy"
    assert config.place("optimizer.nesterov").startswith("command line: ")


def test_registered_by_the_users_module(project: Path) -> None:
    Path("theirs.py").write_text(
        "from classy_vision.hooks import ClassyHook, register_hook\n"
        '@register_hook("theirs_config_test")\n'
        "class Theirs(ClassyHook):\n"
        "    pass\n"
    )
    config = load_config("my.yaml", ["import=[toy,theirs]", "hooks.theirs_config_test={a: 1}"])
    assert config.hooks["theirs_config_test"].args == {"a": 1}


def test_unknown_in_classy(project: Path) -> None:
    with pytest.raises(ConfigError, match=r"no optimizer named 'classy:sgdd'"):
        load_config("my.yaml", ["optimizer='classy:sgdd'"])
