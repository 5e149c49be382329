"""The samples of docs/evaluation.md and docs/export.md: their commands print the same form."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from PIL import Image

import tiny
from dense_data import write_depths, write_scenes
from page_blocks import sessions
from selftask.cli.main import main
from selftask.cli.model.evaluate import COMMANDS
from selftask.registry import EVALUATIONS

SESSIONS = [*sessions("evaluation"), *sessions("export")]
NUMBER = r"-?\d+(?:,\d{3})*(?:\.\d+)?(?:e-\d+)?"
TOKEN = re.compile(rf"(^\.\.\.\n|\.\.\.|{NUMBER}| +)", re.MULTILINE)
ANY = {"...\n": r"(?:.*\n)*?", "...": ".*"}
FEWER = {
    "eval segmentation": "steps=20",
    "eval depth": "steps=20 bins=16",
    "eval robustness": "images=20",
    "eval linear runs/simclr": "repeats=1 weight_decay=[0.1]",
    "eval svm": "costs=[1]",
}  # words that change no form
BEFORE = {"eval knn features": "features runs/simclr out=features"}  # commands whose files it reads
SLOW = ("train", "eval suite", "eval robustness", "eval retrieval", "eval linear runs/mae")


def pattern(sample: str) -> str:
    """Return an expression of the texts that differ from a sample in numbers and spaces only.

    A line ``...`` stands for any lines, ``...`` inside a line for any part of it.
    """

    parts = TOKEN.split(sample)  # text, token, text, ...
    parts[::2] = map(re.escape, parts[::2])
    parts[1::2] = [ANY.get(token, " +" if token.isspace() else NUMBER) for token in parts[1::2]]
    return "".join(parts)


def training(words: list[str], folder: Path) -> list[str]:
    """Return the words of a training command with a tiny network, 160 digits and three steps."""
    recipe = words[1]
    small = tiny.overrides(recipe.partition("/")[0], folder)
    val = f"data.val={tiny.digits_file(folder, 'val.npz', 160, 240)}"
    more = [val, "eval.evaluations={knn: {}}", "train.checkpoint_every=1 step"]
    return ["train", recipe, *small, *more, *words[2:], "train.max_steps=3"]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the images that the samples name."""
    folder = tmp_path_factory.mktemp("page")
    tiny.digits_file(folder, stop=160)
    write_scenes(folder / "scenes/train", 6)
    write_scenes(folder / "scenes/val", 3, first=6)
    (folder / "scenes/train/classes.csv").write_text("index,name\n0,ground\n1,red\n2,green\n3,blue")
    write_depths(folder / "rooms/train", 4)
    write_depths(folder / "rooms/val", 2, first=4)
    write_scenes(folder / "my_images", 4)
    names = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    rows = ["class,name", *(f"{digit},{name}" for digit, name in enumerate(names))]
    (folder / "digits.csv").write_text("\n".join(rows))
    (folder / "landscapes").mkdir()
    rows = ["path,latitude,longitude"]
    for n in range(4):
        Image.new("RGB", (32, 32), (60 * n, 90, 200 - 40 * n)).save(folder / f"landscapes/{n}.png")
        rows.append(f"landscapes/{n}.png,{n},{n}")
    (folder / "places.csv").write_text("\n".join(rows))
    return folder


@pytest.mark.parametrize(
    ("command", "output"),
    [
        pytest.param(*session, marks=[pytest.mark.slow] if session[0].startswith(SLOW) else [])
        for session in SESSIONS
    ],
    ids=["_".join(command.split()[:3]) for command, _ in SESSIONS],
)
def test_a_sample_has_the_form_of_what_is_printed(
    command: str,
    output: str,
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(home)
    more = [words for start, words in FEWER.items() if command.startswith(start)]
    words = shlex.split(" ".join([command, *more]))
    if words[0] == "train":
        words = training(words, home)
    before = BEFORE.get(command.removesuffix(" --quiet"), "")
    for run in re.findall(r" runs/(\w+)", f"{command} {before}"):
        if not Path("runs", run).exists():
            assert main(training(["train", f"{run}/digits", f"out=runs/{run}"], home)) == 0
    if before and not Path("features").exists():
        assert main(before.split()) == 0
    capsys.readouterr()
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert re.fullmatch(pattern(output), printed), f"{command}\n{printed}"


def test_every_evaluation_has_a_sample() -> None:
    shown = {command.split()[1] for command, _ in SESSIONS if command.startswith("eval ")}
    assert any("protocol=" in command for command, _ in SESSIONS), "the evaluation `probe`"
    assert shown == {*COMMANDS, *EVALUATIONS.names()} - {"probe"}
