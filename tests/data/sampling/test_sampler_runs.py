"""Samplers in a run: chosen by name, told in the log, resumed exactly; one's own, too."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch

import tiny
from selftask.cli.main import main
from selftask.config.config_class import config_class
from selftask.config.load import load_config
from selftask.data.loading.open_data import check_data, open_data
from selftask.data.sampling.sampler import BatchSampler, build_sampler, steps_per_epoch
from selftask.errors import ConfigError, UserError
from selftask.registry import SAMPLERS

PAGE = (tiny.ROOT / "docs" / "samplers.md").read_text(encoding="utf-8")
MINE = PAGE.partition("```python")[2].partition("```")[0]  # the example of the documentation


def test_copies_of_an_image_are_other_views(tmp_path: Path) -> None:
    task = tiny.task("simclr", tmp_path, "run", "data.sampler={name: repeated, times: 4}")
    task.prepare()
    batch = next(task.data_module.train_batches(7))
    task.data_module.close()
    index = batch.index
    assert (batch.epoch, batch.number) == (1, 7)
    assert torch.equal(index[:4].repeat(4), index)
    for view in batch.all_views:
        flat = view.flatten(1)
        assert len(torch.unique(flat, dim=0)) == len(flat) == 16


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["{name: repeated, times: 4}", "balanced"])
def test_resumed_in_an_epoch_is_never_stopped(sampler: str, tmp_path: Path) -> None:
    chosen = f"data.sampler={sampler}"
    tiny.train("simclr", tmp_path, "whole", chosen)
    tiny.train("simclr", tmp_path, "parts", chosen, "train.stop_at=7")
    tiny.train("simclr", tmp_path, "parts", chosen)
    assert tiny.rows(tmp_path / "whole") == tiny.rows(tmp_path / "parts")
    states = [tiny.last_state(tmp_path / out) for out in ("whole", "parts")]
    assert tiny.differences(*states) == []


def test_an_epoch_is_as_long_as_the_sampler_says(tmp_path: Path) -> None:
    task = tiny.train("simclr", tmp_path, "run", "data.sampler={name: first, count: 32}")
    assert task.clock.steps_done == 6  # 3 epochs of 2 steps
    assert task.data_module.num_images == 80


def test_the_log_says_how_long_an_epoch_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", logger="selftask")
    task = tiny.task("simclr", tmp_path, "run", "data.sampler=balanced")
    task.prepare()
    task.data_module.close()
    line = "sampler: balanced, 10 classes of 8 samples; an epoch is 5 batches of 16 = 80 samples"
    assert line in caplog.messages


@pytest.mark.parametrize(
    ("sampler", "message"),
    [
        ("shufled", r"no sampler named 'shufled'; did you mean 'shuffled'\?"),
        ("{name: repeated, times: 7}", r"times: 7 does not divide train\.batch_size=16; try .*=14"),
        ("{name: repeated, time: 4}", r"did you mean 'data\.sampler\.times'\?"),
        ("weighted", r"data\.sampler\.weights is missing: text"),
        ("{name: balanced, samples: 0}", r"data\.sampler\.samples=0: must be at least 1"),
        ("{name: first, count: 3}", r"count: 3 images fill no batch of train\.batch_size=16"),
        ("5", "expected the name of a sampler"),
    ],
)
def test_wrong_samplers(sampler: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        tiny.config("simclr", tmp_path, "run", f"data.sampler={sampler}")


def test_labels_that_are_missing_are_told_before_anything_starts(tmp_path: Path) -> None:
    np.savez(tmp_path / "plain.npz", images=np.zeros((40, 8, 8, 3), dtype=np.uint8))
    words = [f"data={tmp_path / 'plain.npz'}", "data.sampler=stratified"]
    config = tiny.config("simclr", tmp_path, "run", *words)
    with pytest.raises(UserError, match="needs labels, and these images have none"):
        check_data(config, open_data(config.data).train)


def test_a_name_chosen_on_the_command_line_replaces_the_recipes(tmp_path: Path) -> None:
    """The fields of the recipe's sampler go with it, and other data keeps the sampler."""
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(
        "defaults: [/simclr/digits, _self_]\n"
        "data: {sampler: {name: repeated, times: 2}}\n"
        "train: {batch_size: 64}\n"
    )
    assert load_config(str(recipe), []).data.sampler.to_dict() == {"name": "repeated", "times": 2}
    assert load_config(str(recipe), ["data.sampler=shuffled"]).data.sampler.args == {}
    other = load_config(str(recipe), [f"data={tiny.digits_file(tmp_path)}"])
    assert other.data.sampler.args == {"times": 2}


def test_ones_own_sampler(
    tmp_path: Path, forget_names: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_sampler.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    words = ["import=[my_sampler]", "data.sampler=evens"]
    config = tiny.config("simclr", tmp_path, "run", *words)
    sampler = build_sampler(config, open_data(config.data).train)
    assert sorted(sampler.order(3).at(np.arange(40))) == list(range(0, 80, 2))
    assert steps_per_epoch(sampler.num_samples, 16) == 2


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("class S: pass", r"wrong\.py:4: the sampler S must extend .*sampler\.Sampler"),
        (
            "class S(Sampler):\n    def order(self, epoch): ...",
            r"wrong\.py:4: the sampler S has no method describe$",
        ),
        (
            "class S(Sampler):\n    order = describe = None\n    def __init__(self, *args): pass",
            r"wrong\.py:4: the sampler S: __init__ must call super\(\)\.__init__\(config, pool\)",
        ),
        (
            "class S(Sampler):\n    describe = None\n    def order(self, epoch): return [1, 2]",
            r"wrong\.py:7: a sampler's order returned a list, .* a method at\(positions\)",
        ),
        (
            "class S(Sampler):\n    describe = None\n    def order(self, epoch): return Minus()",
            r"wrong\.py:7: a sampler's order returned index -1; the images are 0 to 79",
        ),
    ],
)
def test_mistakes_in_ones_own_sampler_are_placed(
    body: str, message: str, tmp_path: Path, forget_names: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = (
        "from selftask.data.sampling.sampler import Sampler\n"
        "from selftask.registry import register_sampler\n\n"
    )
    minus = "\nclass Minus:\n    def at(self, positions): return positions - 1\n"
    (tmp_path / "wrong.py").write_text(f'{source}@register_sampler("wrong")\n{body}\n{minus}')
    monkeypatch.chdir(tmp_path)
    words = ["import=[wrong]", "data.sampler=wrong"]
    config = tiny.config("simclr", tmp_path, "run", *words)
    with pytest.raises(UserError, match=message):
        next(iter(BatchSampler(build_sampler(config, open_data(config.data).train))))


def test_samplers_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "samplers"]) == 0
    listed = capsys.readouterr().out
    assert "shuffled" in listed
    assert "data/sampling/weighted.py" in listed


def test_the_page_names_every_sampler_and_its_fields() -> None:
    for name in SAMPLERS:
        if SAMPLERS.address(name).path.is_relative_to(tiny.ROOT):
            row = next(line for line in PAGE.splitlines() if line.startswith(f"| `{name}`"))
            config = config_class(SAMPLERS, name)
            for field in fields(config) if config is not None else ():
                assert f"`{field.name}: " in row
