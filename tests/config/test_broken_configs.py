"""What a user gets wrong: exit code 2, no traceback, the place and the nearest right name.

Each case is a command on the folder of ``conftest.py``: what is changed in ``my.yaml``, the
arguments after the recipe, and what must be said about it.
"""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from selftask.cli.main import main
from selftask.config.load import load_config
from selftask.errors import ConfigError

CLI = "command line: "


@dataclass(frozen=True)
class Broken:
    """A mistake and the regular expressions, one a line of stderr, that the message must match."""

    says: str | list[str]
    args: list[str] = field(default_factory=list)
    edit: tuple[str, str] | None = None
    recipe: str = "my.yaml"

    @property
    def lines(self) -> list[str]:
        return [self.says] if isinstance(self.says, str) else self.says


CASES = {
    "key on the command line": Broken(
        rf"{CLI}train\.epoch=3: unknown key 'train\.epoch'; did you mean 'train\.epochs'\?",
        ["train.epoch=3"],
    ),
    "another framework's word": Broken(
        rf"{CLI}optimizer\.learning_rat=0\.1: .* did you mean 'optimizer\.lr'\?",
        ["optimizer.learning_rat=0.1"],
    ),
    "key in a file": Broken(
        r"my\.yaml:11: unknown key 'train\.epoch'; did you mean 'train\.epochs'\?",
        edit=("epochs: 3", "epoch: 3, epochs: 3"),
    ),
    "section": Broken(r"my\.yaml:10: unknown key 'metod'; .*'method'", edit=("method:", "metod:")),
    "missing section": Broken(r"method is missing: give the name of a method", ["~method"]),
    "no data": Broken(r"data is missing: data=FOLDER", ["~data"]),
    "no backbone": Broken(r"backbone is missing: give the name of a backbone", ["~backbone"]),
    "schedule without optimizer": Broken(
        [r"optimizer.* needs the name of an? optimizer", r"optimizer\.lr is missing"],
        ["~optimizer", "+optimizer.schedule=cosine"],
    ),
    "section left out": Broken(rf"{CLI}epochs=3: .*did you mean 'train\.epochs'", ["epochs=3"]),
    "loss on no images": Broken(
        r"eval\.loss=true: data\.val is null; give the images to take it of",
        ["eval.loss=true", "data.val=null"],
    ),
    "evaluation of other labels": Broken(
        r"data\.relabel='index' replaces the labels of which eval\.evaluations \(knn\) learn",
        ["data.relabel=index", "data.val=digits", "eval.evaluations={knn: {}, spectrum: {}}"],
    ),
    "null for a hook that is none": Broken(
        rf"{CLI}hooks\.progres=null: no hook named 'progres'; did you mean 'progress'\?",
        ["hooks.progres=null"],
    ),
    "address of an unknown store": Broken(
        rf"{CLI}out=nosuch://x: Protocol not known: nosuch", ["out=nosuch://x"]
    ),
    "weights at an unknown store": Broken(
        rf"{CLI}init\.backbone=nosuch://w\.pt: Protocol not known",
        ["init.backbone=nosuch://w.pt"],
    ),
    "field of a named thing": Broken(
        rf"{CLI}method\.temprature=1: unknown key 'method\.temprature' of toy_method "
        r"\(toy\.py:\d+\); did you mean 'method\.temperature'\?",
        ["method.temprature=1"],
    ),
    "field in a list of transforms": Broken(
        r"my\.yaml:7: unknown key 'views\.main\.transforms\.0\.siz' .*transforms\.0\.size'",
        edit=("size: 32", "siz: 32, size: 32"),
    ),
    "method": Broken(
        r"my\.yaml:10: no method named 'toy_metod'; did you mean 'toy_method'\?",
        edit=("name: toy_method", "name: toy_metod"),
    ),
    "method on the command line": Broken(
        rf"{CLI}method=moko: no method named 'moko'; ", ["method=moko"]
    ),
    "transform": Broken(
        r"my\.yaml:8: no transform named 'normalise'; did you mean 'normalize'\?",
        edit=("- normalize", "- normalise"),
    ),
    "hook": Broken(
        r"my\.yaml:14: no hook named 'toy_hok'; did you mean 'toy_hook'\?",
        edit=("toy_hook:", "toy_hok:"),
    ),
    "train step": Broken(
        rf"{CLI}train\.step=standart: no train_step named 'standart'; did you mean 'standard'\?",
        ["train.step=standart"],
    ),
    "schedule": Broken(r"did you mean 'cosine'\?", ["optimizer.schedule=cosin"]),
    "recipe": Broken(rf"{CLI}simcrl: .*did you mean 'simclr'\?", recipe="simcrl"),
    "shipped recipe": Broken(r"did you mean 'simclr/digits'\?", recipe="simclr/digit"),
    "recipe file": Broken(rf"{CLI}mine\.yaml: there is no such file", recipe="mine.yaml"),
    "whole number": Broken(
        rf"{CLI}train\.max_steps='many': expected a whole number or null",
        ["train.max_steps=many"],
    ),
    "number in a file": Broken(
        r"my\.yaml:12: optimizer\.lr='fast': expected a number or key: value pairs",
        edit=("lr: 0.1", "lr: fast"),
    ),
    "true or false": Broken(
        r"train\.async_checkpoints=2: expected true or false", ["train.async_checkpoints=2"]
    ),
    "choice": Broken(
        r"train\.precision='bfloat': did you mean 'bfloat16'\?", ["train.precision=bfloat"]
    ),
    "choice of a named thing": Broken(
        r"method\.mode='meen': did you mean 'mean'\?", ["method.mode=meen"]
    ),
    "pair": Broken(
        r"transforms\.0\.scale=\[1\]: expected a list of 2", ["views.main.transforms.0.scale=[1]"]
    ),
    "limit": Broken(r"train\.batch_size=0: must be at least 1", ["train.batch_size=0"]),
    "duration": Broken(
        r"optimizer\.warmup='ten epochs': not a duration", ["optimizer.warmup=ten epochs"]
    ),
    "list for a section": Broken(
        rf"{CLI}train=\[1\]: expected a section of key: value pairs", ["train=[1]"]
    ),
    "section that is none": Broken(r"train=5: expected a section", ["train=5"]),
    "key below a value": Broken(
        rf"{CLI}train\.epochs\.x=1: train\.epochs=\{{'x': 1\}}: expected a number or null",
        ["train.epochs.x=1"],
    ),
    "item that is not there": Broken(
        rf"{CLI}views\.main\.transforms\.9\.size=3: cannot be set: list index out of range",
        ["views.main.transforms.9.size=3"],
    ),
    "item without a number": Broken(
        rf"{CLI}views\.main\.transforms\.x\.size=3: cannot be set: items of a list are numbered "
        "from 0, and 'x' is no number",
        ["views.main.transforms.x.size=3"],
    ),
    "section for a list": Broken(
        rf"{CLI}.*: cannot be set: views\.main\.transforms: a list cannot be merged",
        ["views.main.transforms={a: 1}"],
    ),
    "unfinished reference": Broken(
        r"my\.yaml:\d+: train\.epochs: no valid reference; one is written",
        edit=("epochs: 3", "epochs: '${'"),
    ),
    "set of yaml": Broken(
        r"my\.yaml:\d+: train\.epochs=.*: expected a number or null",
        edit=("epochs: 3", "epochs: !!set {a, b}"),
    ),
    "required field": Broken(
        r"my\.yaml:7: views\.main\.transforms\.0\.size is missing: a whole number",
        edit=(", size: 32", ""),
    ),
    "no length": Broken(r"train\.epochs and train\.max_steps are both null", ["train.epochs=null"]),
    "batch and processes": Broken(
        r"my\.yaml:11: train\.batch_size=8 is the global batch .* 3 processes .*; try 6",
        ["launch.processes=3"],
    ),
    "index of a device": Broken(
        rf"{CLI}train\.device='cuda:1': .*give the type only \(cuda\)", ["train.device=cuda:1"]
    ),
    "accumulate without its step": Broken(
        rf"{CLI}train\.accumulate=4 .*use train\.step=accumulate", ["train.accumulate=4"]
    ),
    "no views": Broken(r"views is empty", ["views.main=null"]),
    "null for views that are none": Broken(
        rf"{CLI}views\.mian=null: unknown key 'views\.mian'; did you mean 'main'\?",
        ["views.mian=null"],
    ),
    "not normalized": Broken(
        r"my\.yaml:6: views\.main\.transforms must end with 'normalize' \(its last is 'toy_crop'\)",
        edit=("      - normalize\n", ""),
    ),
    "a method's own rule": Broken(
        rf"{CLI}method\.crops=6: method\.crops: 6 wanted, but the views are 2", ["method.crops=6"]
    ),
    "resume": Broken(r"resume='allways': .*", ["resume=allways"]),
    "weights to start from": Broken(r"init\.backbone='no\.pt': ", ["init.backbone=no.pt"]),
    "delete what is not there": Broken(
        rf"{CLI}~hooks\.toy_hok: there is no 'hooks\.toy_hok' to delete; did you mean 'toy_hook'",
        ["~hooks.toy_hok"],
    ),
    "no key=value": Broken(rf"{CLI}train\.epochs: expected key=value", ["train.epochs", "3"]),
    "spaces around =": Broken(
        rf"{CLI}train\.epochs = 3: settings are written .* without spaces: train\.epochs=3",
        ["train.epochs", "=", "3"],
    ),
    "an option with a value": Broken(
        [rf"{CLI}--epochs 3: .*: epochs=3", rf"{CLI}epochs=3: unknown key .*'train\.epochs'"],
        ["--epochs", "3"],
    ),
    "a comma at the end": Broken(rf"{CLI}train\.seed=1,: ends with a comma", ["train.seed=1,"]),
    "a default hook": Broken(
        rf"{CLI}~hooks\.health: it is a default; hooks\.health=null takes it out",
        ["~hooks.health"],
    ),
    "a misspelled group of views": Broken(
        r"views\.mian\.transforms must end .*'mian' is a new group of views: did you mean 'main'",
        ["views.mian.count=2"],
    ),
    "an option": Broken(rf"{CLI}--epochs=3: there are no options", ["--epochs=3"]),
    "a sweep": Broken(rf"{CLI}optimizer\.lr=1,2: several values", ["optimizer.lr=1,2"]),
    "grammar": Broken(
        rf"{CLI}train\.epochs=\[a: \[ and \] do not match; .*quotes", ["train.epochs=[a"]
    ),
    "reference to nothing": Broken(
        r"my\.yaml:11: train\.epochs: .*'train\.max_step' not found",
        edit=("epochs: 3", "epochs: '${train.max_step}'"),
    ),
    "tab": Broken(r"my\.yaml:12: not valid yaml: a tab", edit=("train: {", "train:\n\tx: {")),
    "indentation": Broken(
        r"my\.yaml:11: not valid yaml: ", edit=("backbone:", "backbone:\n    a: 1\n  b:")
    ),
    "key twice": Broken(
        r"my\.yaml:14: not valid yaml: found duplicate key out",
        edit=("hooks:", "out: a\nout: b\nhooks:"),
    ),
    "not a mapping": Broken(r"list\.yaml:1: a recipe is", recipe="list.yaml"),
    "inherits nothing": Broken(
        r"my\.yaml:1: defaults: there is no recipe 'simclr/digts'; did you mean 'simclr/digits'\?",
        edit=("import:", "defaults: [/simclr/digts]\nimport:"),
    ),
    "inherits itself": Broken(
        r"my\.yaml:1: .*each other", edit=("import:", "defaults: [my]\nimport:")
    ),
    "module not there": Broken(
        r"my\.yaml:1: import: no module named 'toi'", edit=("[toy]", "[toi]")
    ),
    "file for a module": Broken(
        rf"{CLI}import: '\./toy\.py' is not the name of a module; did you mean 'toy'\?",
        ["import=[./toy.py]"],
    ),
    "module that fails": Broken(
        rf"{CLI}import: 'bad' failed at bad\.py:2: ZeroDivisionError: division by zero",
        ["import=[bad]"],
    ),
    "module that is not python": Broken(
        rf"{CLI}import: 'worse' failed at worse\.py:1: SyntaxError", ["import=[worse]"]
    ),
    "all of it together": Broken(
        [
            rf"{CLI}train\.epoch=3: .*'train\.epochs'",
            rf"{CLI}method\.mode='x': one of sum, mean",
            rf"{CLI}--fast: there are no options",
            r"my\.yaml:9: unknown key 'backbone\.widht' of toy_net .*'backbone\.width'",
        ],
        ["train.epoch=3", "method.mode=x", "--fast"],
        edit=("width: 16", "widht: 16"),
    ),
}


@pytest.fixture
def broken(project: Path, request: pytest.FixtureRequest) -> Broken:
    """The case, with its files in the current folder."""
    case: Broken = request.param
    Path("list.yaml").write_text("- 1\n")
    Path("bad.py").write_text("zero = 0\none = 1 / zero\n")
    Path("worse.py").write_text("def f(:\n")
    if case.edit:
        text = Path("my.yaml").read_text()
        assert case.edit[0] in text
        Path("my.yaml").write_text(text.replace(*case.edit, 1))
    return case


@pytest.mark.parametrize("broken", CASES.values(), ids=CASES.keys(), indirect=True)
def test_says_place_and_remedy(broken: Broken, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", broken.recipe, *broken.args]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "Traceback" not in printed.err
    lines = printed.err.splitlines()
    assert all(line.startswith("error: ") for line in lines), printed.err
    for pattern in broken.lines:
        assert any(re.search(f"^error: .*{pattern}", line) for line in lines), printed.err


@pytest.mark.parametrize("command", ["config", "train"])
def test_within_three_seconds_without_torch(project: Path, command: str) -> None:
    args = ["my.yaml", "train.epoch=3", "hooks.nope={}", "optimizer=addam"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "selftask", command, *args],
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode == 2
    assert len(errors) == 3
    assert "Traceback" not in done.stderr
    assert seconds < 3, "CPU seconds: other tests may share the machine"
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert not imported & {"torch", "torchvision", "sklearn", "timm", "classy_vision"}


def test_every_problem_once(project: Path) -> None:
    with pytest.raises(ConfigError) as error:
        load_config("my.yaml", ["train.epoch=3", "trian.epochs=3", "hooks.nope={}", "x=1"])
    problems = error.value.problems
    assert len(problems) == len(set(problems)) == 4


def test_an_unreadable_config_field_names_its_class(project: Path) -> None:
    Path("odd.py").write_text(
        "from __future__ import annotations\n"
        "from dataclasses import dataclass\n"
        "from selftask.registry import register_method\n"
        '@register_method("odd")\n'
        "class Odd:\n"
        '    loss_reduction = "samples"\n'
        "    @dataclass(frozen=True, kw_only=True)\n"
        "    class Config:\n"
        "        x: Unknown = 1\n"
    )
    with pytest.raises(Exception, match=r"odd \(odd\.py:4\): name 'Unknown' is not defined"):
        load_config("my.yaml", ["import=[toy,odd]", "method=odd"])


def test_anchors_that_stand_for_millions_of_values(tmp_path: Path) -> None:
    lines = ["a0: &a0 [1, 2, 3, 4, 5, 6, 7, 8, 9]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    deep = "{a: " * 100 + "1" + "}" * 100
    for name, text in {"bomb": "\n".join(lines), "circle": "data: &a [*a]", "deep": deep}.items():
        path = tmp_path / f"{name}.yaml"
        path.write_text(text)
        with pytest.raises(
            ConfigError,
            match=rf"{name}.yaml: cannot be read as yaml: holds more than 100,000 values",
        ):
            load_config(str(path), [])


@pytest.mark.parametrize(
    "words",
    [
        [f"data.val={'x' * 5_000}"],
        [f"data.val={'x/' * 5_000}"],
        [f"train.{'x' * 700}=1"],
        [f"{'x.' * 700}y=1"],
        [f"train.epochs={'9' * 5_000}"],
        [f"train.epochs={'[' * 5_000}"],
        [f"method={'m' * 5_000}"],
    ],
)
def test_very_long_words(words: list[str]) -> None:
    """Are quoted in part, in one line each."""
    with pytest.raises(ConfigError) as refused:
        load_config("simclr/digits", words)
    assert refused.value.problems
    assert all(len(problem) < 1_000 for problem in refused.value.problems), refused.value.problems
