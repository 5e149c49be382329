"""Stop and resume, with test phases, evaluations, accumulation: equal bit for bit."""

from __future__ import annotations

import dataclasses
import random
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

import tiny
from selftask.checkpoint import rotation, store
from selftask.config.load import to_yaml
from selftask.errors import UserError
from selftask.logs.checkpoint_results import CheckpointResults
from selftask.random import process_state
from selftask.run.compatibility import check_same_run
from selftask.task import Task

LABELED = ("meters.accuracy={topk: [1]}", "eval.evaluations={knn: {}}", "eval.every='1 epoch'")


VAL = "data.val=val.npz"
CASES = {
    "supervised": [VAL, *LABELED],
    "simclr": [VAL, *LABELED[1:], "hooks.clip_gradients={max_norm: 1.0}"],
    "barlow": ["train.precision=bfloat16"],
    "moco": ["train.step={name: grad_cache, chunks: 3}"],
    "swav": ["train.step=sam", "train.epochs=1"],
    "byol": [
        "train.step=accumulate",
        "train.accumulate=2",
        "train.log_every=2",
        "hooks.gradient_noise={}",
        "hooks.gradient_norms={}",
        "hooks.clip_gradients={mode: adaptive}",
    ],
}  # every method alone: tests/methods/test_contract.py


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("resume")


@pytest.mark.parametrize("method", CASES)
def test_stopped_and_resumed_is_never_stopped(
    method: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    step = Task.step

    def drawing(task: Task) -> None:
        random.random(), np.random.rand(), torch.rand(())  # as a step of one's own may
        step(task)

    monkeypatch.setattr(Task, "step", drawing)
    tiny.digits_file(folder, "val.npz", 400, 430)
    more = ["train.epochs=2", *CASES[method]]
    tiny.train(method, folder, f"{method}_whole", *more)
    # in the middle of an epoch, and exactly at the end of one (accumulate: by two)
    updates = 3 if "train.step=accumulate" in more else tiny.STEPS_PER_EPOCH
    for stop in (updates - 2, updates):
        stopped = tiny.train(method, folder, f"{method}_parts", *more, f"train.stop_at={stop}")
        assert stopped.steps_done == stop
    resumed = tiny.train(method, folder, f"{method}_parts", *more)
    assert resumed.resumed
    assert resumed.clock.done

    whole, parts = folder / f"{method}_whole", folder / f"{method}_parts"
    assert tiny.rows(whole) == tiny.rows(parts)
    assert tiny.differences(tiny.last_state(whole), tiny.last_state(parts)) == []
    assert len({row["step"] for row in tiny.rows(whole) if "loss" in row}) >= updates


def test_schedule_by_epochs_goes_on_where_it_was(folder: Path) -> None:
    """A scheduler that moves once an epoch must not move when an epoch is taken up again."""
    lr = (
        "optimizer.lr={name: linear, start: 0.01, end: 0.0, update: epoch, "
        "warmup: 2 epochs, warmup_start: 0.001}"
    )
    tiny.train("simclr", folder, "epoch_whole", lr)
    tiny.train("simclr", folder, "epoch_parts", lr, "train.stop_at=7")
    tiny.train("simclr", folder, "epoch_parts", lr)
    rates = [row["lr"] for row in tiny.rows(folder / "epoch_whole")]
    assert rates == pytest.approx([0.001] * 5 + [0.0055] * 5 + [0.01] * 5)
    assert tiny.rows(folder / "epoch_whole") == tiny.rows(folder / "epoch_parts")


def test_another_seed_is_another_run(folder: Path) -> None:
    """The comparison above would be worth nothing if all runs were alike."""
    tiny.train("simclr", folder, "seed_0", "train.max_steps=2")
    tiny.train("simclr", folder, "seed_1", "train.max_steps=2", "train.seed=1")
    assert tiny.differences(tiny.last_state(folder / "seed_0"), tiny.last_state(folder / "seed_1"))


def test_what_a_checkpoint_holds(folder: Path) -> None:
    """Plain tensors and Python objects: every part of the task, its config, counters and rows."""
    val = f"data.val={tiny.digits_file(folder, 'val.npz', 400, 430)}"
    more = ("train.max_steps=2", "hooks.ema={}", "train.precision=float16", val)
    task = tiny.train("moco", folder, "layout", *more)
    (path,) = rotation.checkpoints(task.out / "checkpoints")
    state = torch.load(path, weights_only=True)
    parts = {
        "model": task.base_model.state_dict(),
        "method": task.loss.state_dict(),
        "optimizer": task.optimizer.get_classy_state(),
        "scaler": task.grad_scaler.state_dict(),
        "length": dataclasses.asdict(task.length),
        "history": task.history.state_dict(),
        "data": task.data_module.fingerprint,
    }
    for name, part in parts.items():
        assert tiny.differences(state[name], part, name) == []
    assert any("queue" in name for name in state["method"])
    assert state["optimizer"]["optim"]["state"], "moments of the optimizer"
    assert yaml.safe_load(state["config"]) == yaml.safe_load(to_yaml(task.config))
    assert (state["clock"]["steps_done"], state["clock"]["batch"]) == (2, 2)
    assert state["clock"].keys() == {"steps_done", "batch", "phase", "skipped", "tested"}
    assert state["hooks"].keys() == task.named_hooks.keys()
    assert state["hooks"]["ema"]["weights"].keys() <= state["model"].keys()
    assert [set(rng) >= {"python", "numpy", "torch"} for rng in state["rng"]] == [True]
    assert state["metrics_bytes"] == (task.out / "metrics.jsonl").stat().st_size
    assert torch.is_tensor(state["model"][f"{state['backbone'].partition('.')[2]}.stem.0.weight"])


def test_first_weights_are_those_of_the_seed(folder: Path) -> None:
    """Of the network and its predictor, whatever was drawn before; ranks draw apart afterwards."""
    weights = []
    for number, more in enumerate(([], [], ["train.seed=1"])):
        torch.rand(number)
        task = tiny.task("byol", folder, f"first_{number}", *more)
        task.prepare()
        weights.append(torch.cat([p.detach().flatten() for p in task.base_model.parameters()]))
        next_draw = torch.rand(())
        process_state.seed_all(number // 2, rank=0)
        assert torch.equal(next_draw, torch.rand(()))
        task.close()
    assert torch.equal(weights[0], weights[1])
    assert not torch.isclose(weights[0], weights[2]).all()


def test_another_network_does_not_fit(folder: Path) -> None:
    tiny.train("simclr", folder, "width", "train.stop_at=2")
    with pytest.raises(UserError, match=r"(?s)step_000000002\.pt does not fit.*another out="):
        tiny.train("simclr", folder, "width", "backbone.width=4")


def test_never_sets_the_old_run_aside(folder: Path) -> None:
    """Old checkpoints, being of later steps, must neither crowd out new ones nor be resumed."""
    out = folder / "never"
    every = ("train.checkpoint_every='1 steps'", "train.keep_checkpoints=2")
    tiny.train("simclr", folder, "never", *every, "train.stop_at=6")
    CheckpointResults(out, []).add(5, ["knn"], {"knn_top1": 0.5})
    tiny.train("simclr", folder, "never", *every, "train.stop_at=3", "resume=never")
    assert CheckpointResults(out, []).missing(5, ["knn"]) == ["knn"], "of other weights"
    kept = [path.name for path in rotation.checkpoints(out / "checkpoints")]
    assert kept == ["step_000000003.pt", "step_000000002.pt"]
    aside = sorted(path.name for path in (out / "checkpoints/replaced_1").glob("*.pt"))
    assert aside == ["step_000000005.pt", "step_000000006.pt"]
    assert [row["step"] for row in tiny.rows(out)] == [1, 2, 3]


def test_from_a_file(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An own older checkpoint winds the run back; one from elsewhere starts it, once."""
    every = "train.checkpoint_every='1 steps'"
    tiny.train("simclr", folder, "file", every, "train.stop_at=4")
    third = folder / "file/checkpoints/step_000000003.pt"
    with caplog.at_level("INFO", logger="selftask"):
        back = tiny.train("simclr", folder, "file", every, f"resume={third}", "train.stop_at=4")
    assert f"resumed from {third}: step 3" in caplog.text
    assert back.steps_done == 4
    assert [row["step"] for row in tiny.rows(folder / "file")] == [1, 2, 3, 4]

    for stop in (4, 5):  # the same command again goes on
        task = tiny.train("simclr", folder, "other", f"resume={third}", f"train.stop_at={stop}")
        assert task.steps_done == stop
    assert [row["step"] for row in tiny.rows(folder / "other")] == [4, 5]
    shutil.rmtree(folder / "other/checkpoints")  # killed before its first checkpoint
    tiny.train("simclr", folder, "other", f"resume={third}", "train.stop_at=4")
    assert [row["step"] for row in tiny.rows(folder / "other")] == [4], "rows begin anew"
    third.write_bytes(third.read_bytes()[:100])
    with pytest.raises(UserError, match=r"cannot be read \(100 of \d+ bytes\)"):
        tiny.train("simclr", folder, "third", f"resume={third}")


def test_missing_rows_are_reported(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A file that lost rows after its checkpoint looked like that of a run that began later."""
    lost = tiny.train("simclr", folder, "rows", "train.stop_at=3").out / "metrics.jsonl"
    lost.write_bytes(b"".join(lost.read_bytes().splitlines(keepends=True)[:1]))
    tiny.train("simclr", folder, "rows", "train.stop_at=4")
    assert f"{lost}: rows before step 4 are missing" in caplog.text
    caplog.clear()
    tiny.train("simclr", folder, "rows", "train.stop_at=5")
    assert "missing" not in caplog.text
    assert [row["step"] for row in tiny.rows(folder / "rows")] == [1, 4, 5]


def test_what_is_no_checkpoint_says_what_to_name(folder: Path) -> None:
    run = tiny.train("simclr", folder, "named", "train.max_steps=2").out
    newest = run / "checkpoints/step_000000002.pt"
    for resume, hint in (
        (run, f"such as {newest}"),
        (run / "checkpoints", f"such as {newest}"),
        (run / "export", "there is none in it"),
        (run / "export/backbone.pt", f"init.backbone={run / 'export/backbone.pt'}"),
    ):
        with pytest.raises(UserError, match=re.escape(hint)):
            tiny.train("simclr", folder, "not_named", f"resume={resume}")


def test_a_file_from_elsewhere_does_not_make_another_run_the_same(folder: Path) -> None:
    """Once a run has checkpoints it goes on with those, so the config must be theirs."""
    start = tiny.train("simclr", folder, "start", "train.max_steps=1").out
    resume = f"resume={start / 'checkpoints/step_000000001.pt'}"
    own = tiny.train("simclr", folder, "own", resume, "train.stop_at=2").out
    own_file = f"resume={own / 'checkpoints/step_000000002.pt'}"
    (own / "config.yaml").write_text(to_yaml(tiny.config("simclr", folder, "own", resume)))
    check_same_run(tiny.config("simclr", folder, "own", resume, "train.epochs=9"))
    for more in ("resume=auto", resume):
        with pytest.raises(UserError, match=r"train\.seed: 0 there, 1 now"):
            check_same_run(tiny.config("simclr", folder, "own", more, "train.seed=1"))
    for more in ("resume=never", own_file):
        check_same_run(tiny.config("simclr", folder, "own", more, "train.seed=1"))


def test_damaged_newest_falls_back(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    every = "train.checkpoint_every='1 steps'"
    tiny.train("simclr", folder, "good", "train.stop_at=6")
    tiny.train("simclr", folder, "damaged", every, "train.stop_at=5")
    newest = rotation.checkpoints(folder / "damaged/checkpoints")[0]
    newest.write_bytes(newest.read_bytes()[:-20])
    with caplog.at_level("INFO", logger="selftask"):
        task = tiny.train("simclr", folder, "damaged", every, "train.stop_at=6")
    assert "step_000000005.pt is damaged" in caplog.text
    assert "resumed from" in caplog.text
    assert "step 4," in caplog.text
    assert task.steps_done == 6
    assert tiny.rows(folder / "damaged") == tiny.rows(folder / "good")
    for path in rotation.checkpoints(folder / "damaged/checkpoints"):
        path.write_bytes(b"")
    with pytest.raises(UserError, match="none of the 3 checkpoints"):
        tiny.train("simclr", folder, "damaged")


def test_other_statistics_of_batch_norm_are_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Per rank they are of 16 / W images; other layers and synchronized ones do not change."""
    cases = (("simclr", ()), ("simclr", ("parallel.sync_batch_norm=all",)), ("mae", ()))
    messages = []
    for number, (method, more) in enumerate(cases):
        tiny.train(method, tmp_path, f"{number}", *more, "train.stop_at=1")
        path = rotation.checkpoints(tmp_path / f"{number}/checkpoints")[0]
        state = store.load(path)
        for ranks in (1, 2):
            caplog.clear()
            store.save({**state, "rng": state["rng"] * ranks}, path.parent, 1, keep=1)
            again = tiny.task(method, tmp_path, f"{number}", *more)
            again.prepare()
            again.close()
            messages.append([text for text in caplog.messages if "BatchNorm" in text])
    same, doubled, *others = messages
    assert same == [] and others == [[], [], [], []]
    expected = (
        "BatchNorm takes its statistics per rank: over 16 images now (1 rank), 8 before (2); the "
        "result depends on it. parallel.sync_batch_norm=all takes those of all ranks"
    )
    assert doubled == [expected]
