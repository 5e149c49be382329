"""A user's own folder: method, train step and hook, found by ``import:`` and used by name."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import tiny
from selftask.config.load import load_config
from selftask.data.loading.open_data import open_data
from selftask.errors import ConfigError, UserError
from selftask.registry import METHODS
from selftask.task import Task
from selftask.task.loop import train_loop

PROJECT = tiny.ROOT / "projects" / "simsiam"

MINE = '''
from dataclasses import dataclass
from selftask.hooks.base import Hook
from selftask.methods.base import Method
from selftask.registry import register_hook, register_method, register_task, register_train_step
from selftask.task import Task
from selftask.train_steps.standard import standard_train_step

@register_method("pull")
class Pull(Method):
    """Pulls two views together; collapses, of course."""

    loss_reduction = "samples"

    @dataclass(frozen=True, kw_only=True)
    class Config:
        strength: float = 1.0

    def forward(self, output, batch):
        return self.config.strength * (output[0] - output[1]).square().mean()

@register_train_step("loud")
def loud(task):
    """The standard step, and a line."""
    standard_train_step(task)
    print("step", task.steps_done)

@register_task("farewell")
class Farewell(Task):
    """Prints a line after the last phase."""

    def on_end(self):
        super().on_end()
        print("that was", self.steps_done)

@register_hook("greeter")
@dataclass(eq=False, kw_only=True)
class Greeter(Hook):
    """Says a word at the start."""
    word: str = "hello"

    def on_start(self, task):
        print(self.word, type(task.loss).__name__)
'''
RECIPE = """\
# Pull, in my folder.
defaults: [/base/digits, _self_]
import: [mine]
task: farewell
method: {name: pull, strength: 2.0}
backbone: {name: small_resnet, width: 8}
train: {step: loud, epochs: null, max_steps: 3, batch_size: 32, threads: 1, log_every: 1}
eval: {evaluations: {knn: null}}
data: {num_workers: 0}
hooks: {greeter: {word: good morning}}
"""


@pytest.fixture
def mine(tmp_path: Path, forget_names: None, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "my.yaml").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_folder_of_ones_own_trains(mine: Path) -> None:
    words = [sys.executable, "-m", "selftask", "train", "my.yaml"]
    done = tiny.run(words, mine)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stderr
    assert "good morning Pull" in lines
    assert "that was 3" in lines
    assert "run        my.yaml, seed 0, new in runs/my" in lines
    assert any(line.startswith("model      pull on small_resnet of ") for line in lines)
    assert [line for line in lines if line.startswith("step ") and len(line) < 8] == [
        "step 1",
        "step 2",
        "step 3",
    ]
    assert lines[-1].startswith("RUN finished: 3 steps")
    assert (mine / "runs/my/export/backbone.pt").exists()


def test_typos_are_answered_with_ones_own_keys_and_names(mine: Path) -> None:
    with pytest.raises(ConfigError) as error:
        load_config("my.yaml", ["method.strenght=1", "train.step=lod", "hooks.greter={}"])
    for hint in ("did you mean 'method.strength'?", "did you mean 'greeter'?"):
        assert hint in str(error.value)


def test_a_typo_in_the_step_is_answered_with_ones_own_name(mine: Path) -> None:
    with pytest.raises(ConfigError, match=r"no train_step named 'lod'; did you mean 'loud'\?"):
        load_config("my.yaml", ["train.step=lod"])
    with pytest.raises(ConfigError, match=r"no task named 'farwell'; did you mean 'farewell'\?"):
        load_config("my.yaml", ["task=farwell"])


def test_a_taken_name_shows_both_places(mine: Path) -> None:
    (mine / "mine.py").write_text(MINE.replace('"pull"', '"simclr"'))
    with pytest.raises(ConfigError) as error:
        load_config("my.yaml", [])
    message = str(error.value)
    assert "the method name 'simclr' is taken" in message
    assert "methods/simclr.py:" in message
    assert "mine.py:9" in message


def test_two_of_ones_own_of_one_name(mine: Path) -> None:
    (mine / "more.py").write_text(MINE)
    with pytest.raises(ConfigError, match=r"(?s)'pull' is taken: at .*mine\.py:9.*more\.py:9"):
        load_config("my.yaml", ["import=[mine,more]"])


def project_task(words: list[str], step: str) -> Task:
    """SimSiam's task after its training."""
    out = next(word for word in words if word.startswith("out="))
    recipe = str(PROJECT / "recipe.yaml")
    config = load_config(recipe, [*words, f"train.step={step}", f"{out}_{len(step)}"])
    task = Task(config, sources=open_data(config.data))
    train_loop(task)
    return task


def test_project_simsiam(tmp_path: Path, forget_names: None) -> None:
    """The example trains, with each of its parts, and its loss is the paper's."""
    small = [word for word in tiny.overrides("simclr", tmp_path) if not word.startswith("method=")]
    small += ["method.out_dim=16", "method.hidden_dim=8", "train.epochs=1"]
    steps = ("noisy_weights", "{name: noisy_weights, std: 0}", "standard")
    noisy, still, plain = (project_task(small, step) for step in steps)
    assert noisy.steps_done == plain.steps_done == 5
    rows = [[row["loss"] for row in tiny.rows(task.out)] for task in (noisy, still, plain)]
    assert rows[0][0] != rows[2][0], "the loss is that of weights with noise"
    assert rows[0] == pytest.approx(rows[2], abs=0.2), "of which none stays"
    assert rows[1] == rows[2]
    terms = tiny.rows(plain.out)
    assert all(r["first"] + r["second"] == pytest.approx(r["loss"], rel=1e-5) for r in terms)
    assert {"CentralizeGradients", "SimSiam"} <= {type(hook).__name__ for hook in plain.hooks}
    head = plain.base_model.head.projector[0].weight.grad
    assert head.mean(dim=1).abs().max() < 1e-7, "gradients of weights are centered"

    p, z = torch.randn(2, 4, 16).double(), torch.randn(2, 4, 16).double()
    negative_cosine = sys.modules["simsiam_method"].negative_cosine
    unit = [x / x.norm(dim=2, keepdim=True) for x in (p, z)]
    expected = -sum(float(unit[0][v, i] @ unit[1][v, i]) for v in range(2) for i in range(4)) / 8
    assert float(negative_cosine(p, z).mean()) == pytest.approx(expected, abs=1e-12)
    assert negative_cosine(p, 3 * p).tolist() == pytest.approx([-1.0, -1.0])


def test_projects_are_listed(tmp_path: Path) -> None:
    readme = (tiny.ROOT / "projects/README.md").read_text()
    for folder in (tiny.ROOT / "projects").iterdir():
        if folder.is_dir() and folder.name != "__pycache__":
            assert f"({folder.name})" in readme
            assert (folder / "README.md").exists()


PLAIN = '''
import numpy as np
from selftask.data.source import Source
from selftask.methods.base import Method
from selftask.registry import register_method, register_source

@register_method("plain")
class Plain(Method):
    """Has nothing to choose."""
    loss_reduction = "samples"

@register_method("undecorated")
class Undecorated(Method):
    """Has forgotten a line."""
    loss_reduction = "samples"

    class Config:
        width: int = 3

@register_source("squares")
class Squares(Source):
    """Black ones."""
    def __len__(self): return 9
    def __getitem__(self, index): return np.zeros((8, 8, 3), np.uint8), -1
    def path(self, index): return f"square {index}"
    def describe(self): return "9 squares"
'''


def test_what_the_least_code_of_ones_own_needs(
    tmp_path: Path, forget_names: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No Config without anything to configure; a source by its name alone, as any other."""
    (tmp_path / "plain_things.py").write_text(PLAIN)
    monkeypatch.chdir(tmp_path)
    words = ["import=[plain_things]", "data=squares"]
    config = load_config("simclr/images", [*words, "method=plain"])
    assert open_data(config.data).train.describe() == "9 squares"
    method = METHODS["plain"]
    assert method(method.Config(**config.method.args)).chance_loss is None
    with pytest.raises(UserError, match=r"undecorated \(.*\) is no dataclass; write @dataclass"):
        load_config("simclr/images", [*words, "method=undecorated"])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("weight: float = 'heavy'", "the default weight='heavy': expected a number"),
        ("most: float = float('inf')", "the default most=inf: expected a number between"),
        ("shift: int = setting(-1, min=0)", "the default shift=-1: must be at least 0"),
        ("folder: Path = Path('a')", r"the default folder=PosixPath\('a'\): a config has text, "),
        ("anything: Any = Path('a')", r"the default anything=PosixPath\('a'\): a config has text"),
        ("later: float = None", None),
        ("items: 'collections.abc.Sequence[int]' = (1, 2)", None),
    ],
)
def test_a_default_that_no_config_may_have_is_refused(
    line: str,
    message: str | None,
    tmp_path: Path,
    forget_names: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It would be in the run's own config, which no command could then read."""
    code = (
        "import collections.abc\nfrom dataclasses import dataclass\n"
        "from pathlib import Path\nfrom typing import Any\n"
        "from selftask.config.fields import setting\nfrom selftask.hooks.base import Hook\n"
        "from selftask.registry import register_hook\n"
        f'@register_hook("odd")\n@dataclass(eq=False)\nclass Odd(Hook):\n    {line}\n'
    )
    (tmp_path / "odd_default.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    words = ["import=[odd_default]", "hooks.odd={}"]
    if message is None:
        load_config("simclr/digits", words)
        return
    with pytest.raises(UserError, match=rf"the Config of odd \(odd_default\.py:8\): {message}"):
        load_config("simclr/digits", words)


def test_all_wrong_defaults_are_listed_with_the_other_mistakes(
    tmp_path: Path, forget_names: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The method's own check, which compares such a default, is left out."""
    (tmp_path / "odd_method.py").write_text(
        "from dataclasses import dataclass\nfrom selftask.methods.base import Method\n"
        "from selftask.registry import register_method\n"
        '@register_method("odd")\nclass Odd(Method):\n    """Odd."""\n'
        '    loss_reduction = "samples"\n'
        "    @dataclass(frozen=True, kw_only=True)\n    class Config:\n"
        "        weight: float = 'heavy'\n        count: int = 2.5\n"
        "        def problems(self, config):\n            return [''] * (self.weight < 1)\n"
    )
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        load_config("simclr/digits", ["import=[odd_method]", "method=odd", "task=none"])
    text = str(caught.value)
    for part in ("the default weight='heavy'", "the default count=2.5", "no task named 'none'"):
        assert part in text
