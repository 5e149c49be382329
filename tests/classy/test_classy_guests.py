"""Anyone's Classy hook, meter, optimizer, scheduler and loss at home in a selftask config."""

from __future__ import annotations

import importlib.util
import logging
import re
from pathlib import Path

import pytest
import torch

import tiny
from selftask import classy
from selftask.api.trainer import Trainer
from selftask.cli.main import COMMANDS
from selftask.config.load import load_config
from selftask.errors import ConfigError, UserError
from selftask.registry import HOOKS
from selftask.task import Task
from selftask.task.loop import train_loop

THEIRS = '''
from classy_vision.hooks import ClassyHook, register_hook
from classy_vision.meters import ClassyMeter, register_meter
import torch

@register_hook("their_counter")
class Counter(ClassyHook):
    """Written for Classy Vision, knows nothing of selftask."""
    on_start = on_phase_start = on_phase_end = on_end = ClassyHook._noop

    def __init__(self, by=1):
        super().__init__()
        self.by, self.state.count = by, 0

    def on_step(self, task):
        if task.train:
            self.state.count += self.by

@register_meter("their_rows")
class Rows(ClassyMeter):
    """Counts images."""
    def __init__(self, factor):
        super().__init__()
        self.factor, self.count = factor, 0

    @classmethod
    def from_config(cls, config): return cls(config["factor"])
    @property
    def name(self): return "rows"
    @property
    def value(self): return {"seen": self.factor * self.count}
    def sync_state(self): pass
    def reset(self): self.count = 0
    def update(self, model_output, target, **kwargs): self.count += len(target)
    def validate(self, model_output_shape, target_shape): pass
    def get_classy_state(self): return {"count": self.count}
    def set_classy_state(self, state): self.count = state["count"]
'''


def labeled(folder: Path) -> str:
    return f"data.val={tiny.digits_file(folder, 'val.npz', 400, 430)}"


def test_their_hook_and_meter_by_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    more = [
        labeled(tmp_path),
        "hooks.logging={name: 'classy:loss_lr_meter_logging', log_freq: 2}",
        "meters.top={name: 'classy:accuracy', topk: [1, 3]}",
        "train.epochs=1",
    ]
    with caplog.at_level(logging.INFO):
        tiny.train("supervised", tmp_path, "run", *more)
    logged = [message for message in caplog.messages if "Approximate meters: " in message]
    assert len(logged) == 2
    assert "train phase 0 (40.00% done), loss: " in logged[0]
    ended = [message for message in caplog.messages if "Synced meters: " in message]
    assert [("train phase 0" in line, "test phase 0" in line) for line in ended] == [
        (True, False),
        (False, True),
    ]
    rows = tiny.rows(tmp_path / "run")
    assert 0 < rows[-1]["test_top_top_1"] < rows[-1]["test_top_top_3"] <= 1


def test_their_hook_prints_the_meters_of_the_training_images(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Against ``hooks.train_meters``, whose rows of one step each have all images of the epoch."""
    more = [
        labeled(tmp_path),
        "hooks.logging={name: 'classy:loss_lr_meter_logging'}",
        "hooks.train_meters={}",
        "hooks.mixup={}",
        "meters.ours={name: accuracy, topk: [3], only_test_classes: true}",
        "train.epochs=1",
    ]
    with caplog.at_level(logging.INFO):
        tiny.train("supervised", tmp_path, "run", *more)
    (message,) = (m for m in caplog.messages if "Synced meters: [0] train phase 0" in m)
    shares = [r["train_ours_top_3"] for r in tiny.rows(tmp_path / "run") if "loss" in r]
    mean = sum(shares) / len(shares)
    assert 0 < mean < 1
    assert float(re.findall(r"top_3=([\d.]+)", message)[0]) == pytest.approx(mean, abs=1e-6)


def test_a_loss_of_ones_own_by_its_bare_name(
    tmp_path: Path, forget_names: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "their_losses.py").write_text(
        "from classy_vision.losses import ClassyLoss, register_loss\n"
        "@register_loss('their_square')\n"
        "class Square(ClassyLoss):\n"
        "    @classmethod\n"
        "    def from_config(cls, config): return cls()\n"
        "    def forward(self, output, target): return 3.0 + 0.0 * output.square().sum()\n"
    )
    monkeypatch.chdir(tmp_path)
    for name in "their_square", "classy:their_square":
        out = name.replace(":", "_")
        words = ["import=[their_losses]", f"method.loss={name}", "train.max_steps=1"]
        tiny.train("supervised", tmp_path, out, *words)
        assert tiny.rows(tmp_path / out)[-1]["loss"] == 3.0
    words = ["import=[their_losses]", "method.loss=their_sqare", "train.max_steps=1"]
    with pytest.raises(UserError, match=r"loss='their_sqare' is not .*written classy:NAME"):
        tiny.train("supervised", tmp_path, "typo", *words)


ALONE = {
    "loss_lr_meter_logging": "{}",
    "output_csv": "{}",
    "tensorboard_plot": "{}",
    "progress_bar": "{}",
    "visdom": "{server: localhost, port: '8097'}",
    "ema_model_weights": "{decay: 0.5}",
}


def test_every_hook_works_or_is_refused_with_what_to_use() -> None:
    theirs = classy._registry("hook").items()  # tests in this process register more
    shipped = {name for name, hook in theirs if hook.__module__.startswith("classy_vision.")}
    assert shipped <= {*ALONE, *classy.INSTEAD}
    page = (tiny.ROOT / "docs/classy.md").read_text()
    assert [name for name in {*ALONE, *classy.INSTEAD} if f"| `{name}` |" not in page] == []
    for text in classy.INSTEAD.values():
        assert all(name in HOOKS for name in re.findall(r"hooks\.(\w+)", text)), text
        assert all(name in COMMANDS for name in re.findall(r"`selftask ([\w-]+)", text)), text
    for name in classy.INSTEAD:
        refused = rf"command line: hooks\.classy:{name}=\{{\}}: .*{name}' does not work here: "
        with pytest.raises(ConfigError, match=refused):
            load_config("simclr/digits", [f"hooks.classy:{name}={{}}"])


@pytest.mark.parametrize(("kind", "name"), classy.UNUSABLE)
def test_other_parts_that_cannot_work_are_refused_with_what_to_use(kind: str, name: str) -> None:
    assert name in classy.names(kind)
    assert f"`{name}`" in (tiny.ROOT / "docs/classy.md").read_text()
    key = "optimizer" if kind == "optimizer" else "meters.theirs"
    section = f"{key}={{name: 'classy:{name}'}}"
    with pytest.raises(ConfigError, match=f"{kind} '{name}' does not work here: "):
        load_config("supervised/digits", [section])


@pytest.mark.parametrize("name", ALONE)
def test_every_hook_by_its_name_alone(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [labeled(tmp_path), "meters.accuracy={topk: [1]}", "train.epochs=1"]
    words.append(f"hooks.classy:{name}={ALONE[name]}")
    if (module := classy._NEEDS.get(name)) and importlib.util.find_spec(module[0]) is None:
        with pytest.raises(ConfigError, match=rf"{name}' needs {module[1]}: pip install"):
            tiny.config("supervised", tmp_path, "run", *words)
        return
    Trainer().train(tiny.task("supervised", tmp_path, "run", *words))
    run = tmp_path / "run"
    log = (run / "log.txt").read_text()
    if name == "loss_lr_meter_logging":
        assert "Synced meters: [0] train phase 0 (100.00% done), loss: " in log
    elif name == "output_csv":
        lines = [line.split("\t") for line in (run / "predictions.csv").read_text().splitlines()]
        assert lines[0] == ["sample_id", "prediction", "target"]
        assert [int(line[0]) for line in lines[1:]] == list(range(30))
        right = sum(line[1] == line[2] for line in lines[1:]) / 30
        tested = [row for row in tiny.rows(run) if "test_accuracy_top_1" in row]
        assert right == pytest.approx(tested[-1]["test_accuracy_top_1"], abs=1e-6)
    elif name == "tensorboard_plot":
        assert [path.name for path in (run / "tensorboard").iterdir()]
    elif name == "ema_model_weights":
        state = tiny.last_state(run)["hooks"]["classy:ema_model_weights"]
        assert {"model_state", "ema_model_state"} <= state.keys()


def test_the_average_resumes_within_an_epoch(tmp_path: Path) -> None:
    """Classy's hook sets the network to the weights in its state whenever a phase starts."""
    words = [labeled(tmp_path), "train.max_steps=4", "hooks.classy:ema_model_weights={decay: 0.5}"]
    whole = tiny.train("supervised", tmp_path, "whole", *words)
    tiny.train("supervised", tmp_path, "cut", *words, "train.stop_at=2")
    resumed = tiny.train("supervised", tmp_path, "cut", *words)
    states = [tiny.last_state(run.out) for run in (whole, resumed)]
    for state in states:
        del state["meters"]  # of which the result of the last synchronization differs
    assert tiny.differences(*states) == []


def test_registered_by_the_users_own_module(
    tmp_path: Path, forget_names: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By their bare names; the states of hook and meter are saved and restored."""
    (tmp_path / "theirs.py").write_text(THEIRS)
    monkeypatch.chdir(tmp_path)
    more = [
        labeled(tmp_path),
        "import=[theirs]",
        "hooks.their_counter={by: 2}",
        "meters.their_rows={factor: 10}",
    ]
    tiny.train("supervised", tmp_path, "run", *more, "train.stop_at=7")
    task = tiny.train("supervised", tmp_path, "run", *more)
    assert task.named_hooks["their_counter"].state.count == 2 * 15
    assert tiny.rows(tmp_path / "run")[-1]["test_their_rows_seen"] == 300
    again = tiny.task("supervised", tmp_path, "run", *more)
    again.prepare()
    again.meters[-1].count = 7
    state = again.state_dict()
    again.meters[-1].reset()
    again.load_state_dict(state)
    assert again.meters[-1].value == {"seen": 70}
    again.close()


@pytest.mark.parametrize(
    "optimizer",
    [
        "{name: 'classy:sgd', lr: 0.1, momentum: 0.9, nesterov: true}",
        "{name: 'classy:rmsprop_tf', lr: 0.001, momentum: 0.9}",
        "{name: 'classy:adamw', lr: 0.001}",
    ],
)
def test_their_optimizers(tmp_path: Path, optimizer: str) -> None:
    more = (f"optimizer={optimizer}", "train.epochs=1")
    whole = tiny.train("simclr", tmp_path, "whole", *more)
    tiny.train("simclr", tmp_path, "run", *more, "train.stop_at=3")
    tiny.train("simclr", tmp_path, "run", *more)
    rates = [row["lr"] for row in tiny.rows(tmp_path / "whole")]
    assert rates[0] != rates[-1], "our schedules drive their optimizers"
    assert whole.steps_done == 5
    states = (tiny.last_state(tmp_path / "whole"), tiny.last_state(tmp_path / "run"))
    assert tiny.differences(*states) == []


def test_their_schedule(tmp_path: Path) -> None:
    lr = "{name: 'classy:multistep', values: [0.1, 0.01, 0.001], milestones: [1, 2]}"
    sgd = "optimizer={name: sgd}"
    tiny.train("simclr", tmp_path, "run", sgd, f"optimizer.lr={lr}", "train.epochs=3")
    rates = [row["lr"] for row in tiny.rows(tmp_path / "run")]
    assert rates == pytest.approx([0.1] * 5 + [0.01] * 5 + [0.001] * 5)
    steps = {"values": [0.1, 0.01], "milestones": [1]}
    line = {"start_value": 0.1, "end_value": 0.0}
    for name, args, interval in (("multistep", steps, "EPOCH"), ("linear", line, "STEP")):
        schedule = classy.build_schedule(f"classy:{name}", args, num_epochs=3)
        assert schedule.update_interval.name == interval  # Classy's default


def test_their_precision_and_recall() -> None:
    """By hand: two of four images are right at first, three among the best two."""
    scores = torch.tensor([[3.0, 2.0, 1.0], [1.0, 3.0, 2.0], [2.0, 1.0, 3.0], [3.0, 1.0, 2.0]])
    expected = {"precision_at_k": (2 / 4, 3 / 8), "recall_at_k": (2 / 4, 3 / 4)}
    for name, (first, second) in expected.items():
        meter = classy.build("meter", f"classy:{name}", {"topk": [1, 2]})
        meter.update(scores, torch.tensor([0, 2, 2, 1]))
        meter.sync_state()
        assert meter.value == pytest.approx({"top_1": first, "top_2": second})


def test_what_they_cannot_be_made_of_is_told() -> None:
    with pytest.raises(UserError, match=r"schedule 'multistep' cannot be made of .*: ValueError: "):
        classy.build("schedule", "multistep", {"values": [0.1, 0.01], "milestones": []})
    with pytest.raises(
        UserError, match=r"meter 'accuracy' cannot be made of \{\}: KeyError: 'topk'"
    ):
        classy.build("meter", "classy:accuracy", {})


def test_their_loss(tmp_path: Path) -> None:
    loss = "method.loss='classy:label_smoothing_cross_entropy'"
    args = "method.loss_args={ignore_index: -1, reduction: mean, smoothing_param: 0.1}"
    task = tiny.train("supervised", tmp_path, "run", loss, args, "train.epochs=1")
    assert type(task.loss.loss).__name__ == "LabelSmoothingCrossEntropyLoss"
    losses = [row["loss"] for row in tiny.rows(tmp_path / "run")]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("method", ["byol", "supervised"])
def test_classys_trainer_drives_our_task(method: str, tmp_path: Path) -> None:
    """To the same rows and the same state as our own, bit for bit."""
    from classy_vision.trainer import LocalTrainer

    more = [labeled(tmp_path), "train.epochs=2"]
    if method == "supervised":
        more.append("meters.accuracy={topk: [1]}")
    ours = tiny.task(method, tmp_path, "ours", *more)
    train_loop(ours)
    theirs = tiny.task(method, tmp_path, "theirs", *more)
    torch.manual_seed(123)  # whatever was drawn before
    LocalTrainer().train(theirs)
    theirs.close()
    assert tiny.rows(tmp_path / "ours") == tiny.rows(tmp_path / "theirs")
    states = (tiny.last_state(tmp_path / "ours"), tiny.last_state(tmp_path / "theirs"))
    assert tiny.differences(*states) == []


def steps(task: Task, number: int) -> None:
    """So many train steps, as an outsider's loop would do them."""
    task.on_phase_start()
    for _ in range(number):
        task.step()


def test_a_state_goes_into_another_task(tmp_path: Path) -> None:
    """A task takes the state of a task three steps on, and ends where that one does."""
    first = Task.from_config(tiny.config("byol", tmp_path, "first"))
    second = Task.from_config(tiny.config("byol", tmp_path, "second"))
    first.prepare()
    first.on_start()
    steps(first, 3)
    taken = first.get_classy_state(deep_copy=True)
    assert first.where == taken["clock"]["batch"] / first.length.total_batches == 3 / 15
    steps(first, 2)
    second.prepare()
    second.on_start()
    second.set_classy_state(taken)
    assert tiny.differences(second.get_classy_state()["model"], taken["model"]) == []
    steps(second, 2)
    assert second.where == first.where == 5 / 15
    without = {"rng", "metrics_bytes"}
    states = [task.get_classy_state() for task in (first, second)]
    kept = [{key: item for key, item in state.items() if key not in without} for state in states]
    assert tiny.differences(*kept) == []
    for task in (first, second):
        task.close()
