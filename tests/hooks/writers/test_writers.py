"""Writers: what they wrote is read back by the readers of TensorBoard, W&B and MLflow."""

from __future__ import annotations

import csv
import importlib.util
import io
import json
import os
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import tiny
from page_blocks import write_files
from run_folders import read_events
from selftask.api.trainer import Trainer
from selftask.config.load import load_config, to_yaml
from selftask.errors import ConfigError
from selftask.hooks.base import function_hook
from selftask.hooks.gradients.histograms import spaced
from selftask.hooks.watching.show_views import mosaic
from selftask.hooks.writers import base
from selftask.hooks.writers.base import Writer, as_image
from selftask.logs import read_metrics
from selftask.task import Task
from selftask.task.loop import train_loop

COLUMNS = ("loss", "lr", "emb_std")


def log_media(task: Task) -> None:
    """A red image and a distribution, in the third step."""
    assert task.takes_media
    if task.steps_done == 2:
        red = torch.zeros(3, 4, 6)
        red[0] = 1.0
        task.log_image("red", red)
        task.log_histogram("ramp", torch.arange(100.0))


def fail(task: Task) -> None:
    if task.steps_done == 5:
        raise ZeroDivisionError("on purpose")


def train_twice(folder: Path, hook: str, *, media: bool = True) -> list[dict[str, Any]]:
    """Fail after step 5, one step after a checkpoint; resume from step 4 to step 7."""
    words = [f"hooks.{hook}", "train.max_steps=7", "train.checkpoint_every=2"]
    for hooks in ([fail], []):
        task = tiny.task("simclr", folder, "run", *words)
        for function in hooks:
            task.add_hook(function_hook(before_step=function))
        if media:
            task.add_hook(function_hook(on_update=log_media))
        try:
            train_loop(task)
        except ZeroDivisionError:
            assert hooks
    rows = read_metrics(folder / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6, 7]
    return rows


def test_histograms_of_weights_and_gradients(tmp_path: Path) -> None:
    """After 0 and 4 steps, of each parameter as it was before the update."""
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    seen: list[dict[str, torch.Tensor]] = []

    def keep(task: Task) -> None:
        trained = {n: p for n, p in task.base_model.named_parameters() if p.requires_grad}
        for name, p in trained.items():
            seen[-1][f"weights/network.{name}"] = p.detach().clone()
            seen[-1][f"gradients/network.{name}"] = p.grad.clone()

    words = ["hooks.tensorboard={}", "hooks.histograms={every: 4}", "train.max_steps=6"]
    task = tiny.task("simclr", tmp_path, "run", *words, "hooks.clip_gradients={max_norm: 1e-6}")
    early = function_hook(before_step=lambda task: seen.append({}), on_backward=keep, priority=1)
    task.add_hook(early)
    train_loop(task)
    size = {"histograms": 100_000}
    read = accumulators.EventAccumulator(str(tmp_path / "run" / "tensorboard"), size)
    read.Reload()
    trained = {f"network.{n}" for n, p in task.base_model.named_parameters() if p.requires_grad}
    names = {f"{kind}/{name}" for kind in ("weights", "gradients") for name in trained}
    assert set(read.Tags()["histograms"]) == names
    for name in names:
        first, second = read.Histograms(name)
        assert (first.step, second.step) == (1, 5)
        for event, tensors in ((first, seen[0]), (second, seen[4])):
            actual, values = event.histogram_value, tensors[name].double()
            assert (actual.num, actual.min) == (values.numel(), pytest.approx(float(values.min())))
            assert actual.sum == pytest.approx(float(values.sum()), rel=1e-4, abs=1e-5)


def test_large_parameters_are_thinned() -> None:
    values = spaced(torch.arange(200_000.0).view(2, -1).requires_grad_())
    assert values.tolist() == list(range(0, 200_000, 4)) and not values.requires_grad
    assert spaced(torch.zeros(0)).numel() == 0


def test_tensorboard(tmp_path: Path) -> None:
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    rows = train_twice(tmp_path, "tensorboard={}")
    read = accumulators.EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    read.Reload()
    for name in COLUMNS:
        events = read.Scalars(name)
        assert [event.step for event in events] == [row["step"] for row in rows]
        values = [event.value for event in events]
        assert values == pytest.approx([row[name] for row in rows], rel=1e-6)
    for name in ("images_per_s", "data_wait", "memory_mb"):  # step 5 is measured twice
        assert read.Scalars(name)[-1].value == pytest.approx(rows[-1][name], rel=1e-6)
    (image,) = read.Images("red")
    assert (image.step, image.width, image.height) == (3, 6, 4)
    (histogram,) = read.Histograms("ramp")
    value = histogram.histogram_value
    assert (value.num, value.min, value.max, value.sum) == (100, 0, 99, 4950)


def test_csv(tmp_path: Path) -> None:
    rows = train_twice(tmp_path, "csv={}", media=False)
    with (tmp_path / "run" / "metrics.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert table == [{name: str(value) for name, value in row.items()} for row in rows]


def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tracking = pytest.importorskip("mlflow.tracking")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = (tmp_path / "mlruns").as_uri()
    rows = train_twice(tmp_path, f"mlflow={{uri: '{uri}'}}")
    client = tracking.MlflowClient(uri)
    experiment = client.get_experiment_by_name("selftask")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.params["train.batch_size"] == "16"
    for name in COLUMNS:
        points = client.get_metric_history(run.info.run_id, name)
        assert [point.step for point in points] == [row["step"] for row in rows]
        assert [p.value for p in points] == pytest.approx([row[name] for row in rows], rel=1e-8)
    images = [item.path for item in client.list_artifacts(run.info.run_id, "images/red")]
    assert images == ["images/red/000000003.png"]


def wandb_records(folder: Path) -> list[Any]:
    """All records of the offline runs in a folder, oldest first."""
    from wandb.proto import wandb_internal_pb2

    records = []
    for path in sorted(folder.glob("offline-run-*/*.wandb")):
        content = path.read_bytes()
        for data in leveldb_log(content) if content else ():  # W&B's process has not begun to write
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            records.append(record)
    return records


def leveldb_log(content: bytes, block: int = 32768) -> Iterator[bytes]:
    """Yield the records of a log in LevelDB's format, as W&B writes it after seven bytes."""
    assert content[:4] == b":W&B"
    place, parts = 7, b""
    while place + 7 <= len(content):
        if block - place % block < 7:  # too short for a header: filled with zeros
            place += block - place % block
        _, length, kind = struct.unpack("<IHB", content[place : place + 7])
        parts += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


def wandb_history(folder: Path, rows: int) -> list[dict[str, Any]]:
    """Return the rows of the offline runs in a folder, once all of them are there.

    W&B's own process may still write for a while after ``finish``.
    """
    for _ in range(100):
        items = [r.history.item for r in wandb_records(folder) if r.HasField("history")]
        if len(items) >= rows:
            break
        time.sleep(0.2)
    return [
        {i.key or ".".join(i.nested_key): json.loads(i.value_json) for i in row} for row in items
    ]


def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    rows = train_twice(tmp_path, "wandb={mode: offline, project: mine, entity: ours}")
    history = wandb_history(tmp_path / "run" / "wandb", len(rows))
    records = wandb_records(tmp_path / "run" / "wandb")
    runs = [record.run for record in records if record.WhichOneof("record_type") == "run"]
    whose = {(run.entity, run.project, run.display_name) for run in runs}
    assert whose == {("ours", "mine", "run")}
    sent = {u.key: json.loads(u.value_json) for run in runs for u in run.config.update}
    assert sent["train"]["batch_size"] == tiny.BATCH_SIZE
    assert len({run.run_id for run in runs}) == 1, "a resumed run goes on under its id"
    assert [row["_step"] for row in history] == [row["step"] for row in rows]
    for name in COLUMNS:
        assert [row[name] for row in history] == pytest.approx([row[name] for row in rows])
    (media,) = [row for row in history if "red.path" in row]
    assert (media["_step"], media["red.width"], media["red.height"]) == (3, 6, 4)
    assert (sum(media["ramp.values"]), media["ramp.bins"][-1]) == (100, 99)


def test_a_writer_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It warns once, which is an event of the run, and training goes on."""
    calls = []

    def full(*args: Any) -> None:
        calls.append(args)
        raise OSError(28, "No space left on device")

    module = importlib.import_module("selftask.hooks.writers.csv_table")
    monkeypatch.setattr(module.Csv, "write", full)
    Trainer().train(tiny.task("simclr", tmp_path, "run", "hooks.csv={}", "train.max_steps=3"))
    assert len(calls) == 1 and len(tiny.rows(tmp_path / "run")) == 3
    texts = [e["text"] for e in read_events(tmp_path / "run") if e["event"] == "warning"]
    (text,) = [text for text in texts if "hooks.csv" in text]
    assert text.startswith("hooks.csv has failed and writes no more, training continues: OSError: ")


def test_a_missing_package_is_told_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *more: None if name == "wandb" else original(name, *more),
    )
    assert list(Writer.problems(type("W", (Writer,), {"package": "json"})(), {})) == []
    with pytest.raises(ConfigError, match=r"hooks\.wandb.*pip install 'selftask\[wandb\]'"):
        tiny.config("simclr", tmp_path, "run", "hooks.wandb={}")


@pytest.fixture
def no_login(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home without W&B's key, settings or module; wandb need not be installed."""
    original = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *more: object() if name == "wandb" else original(name, *more),
    )
    for name in [name for name in os.environ if name.startswith(("WANDB_", "NETRC"))]:
        monkeypatch.delenv(name)
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_wandb_without_login_is_refused_before_training(no_login: Path) -> None:
    """One line; the run used to start and to write nothing."""
    with pytest.raises(
        ConfigError, match=r"hooks\.wandb.*no login.*`wandb login`.*offline"
    ) as info:
        tiny.config("simclr", no_login, "run", "hooks.wandb={}")
    assert len(str(info.value).splitlines()) == 1
    tiny.config("simclr", no_login, "run", "hooks.wandb.mode=offline")
    text = to_yaml(tiny.config("simclr", no_login, "run", "hooks.wandb.mode=offline"))
    (no_login / "config.yaml").write_text(text.replace("mode: offline", "mode: online"))
    assert load_config(str(no_login / "config.yaml"), [], trust=False).hooks["wandb"]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("WANDB_API_KEY", "0" * 40),
        ("WANDB_MODE", "offline"),
        ("WANDB_MODE", "disabled"),
        (".netrc", "machine api.wandb.ai\n login user\n password key\n"),
        ("wandb/settings", "[default]\nmode = offline\n"),
        (".config/wandb/settings", "[default]\nbase_url = https://w.example\napi_key = key\n"),
    ],
)
def test_a_login_of_wandb_is_seen(
    name: str, content: str, no_login: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name.isupper():
        monkeypatch.setenv(name, content)
    else:
        (no_login / name).parent.mkdir(parents=True, exist_ok=True)
        (no_login / name).write_text(content)
        (no_login / name).chmod(0o600)
    tiny.config("simclr", no_login, "run", "hooks.wandb={}")


@pytest.mark.parametrize("primary", [True, False])
def test_writers_are_opened_late_and_on_the_first_rank(
    primary: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "is_primary", lambda: primary)
    task = tiny.task("simclr", tmp_path, "run", "hooks.csv={}", "train.max_steps=1")
    task.prepare()
    opened: list[Task] = []
    writer = task.named_hooks["csv"]
    open_table = writer.open
    writer.open = lambda task: (opened.append(task), open_table(task))
    table = tmp_path / "run" / "metrics.csv"
    assert not table.exists()
    task.on_start()
    assert opened == ([task] if primary else [])
    task.on_phase_start()
    task.step()
    task.close()
    assert table.exists() == primary and len(opened) == primary
    assert (tmp_path / "run" / "metrics.jsonl").exists()


def test_nothing_is_kept_without_a_writer(tmp_path: Path) -> None:
    task = tiny.task("simclr", tmp_path)
    task.log_image("wrong", torch.zeros(7))
    task.log_histogram("ramp", torch.zeros(7))
    assert task.media is None and not task.takes_media
    task.media = {}
    with pytest.raises(ValueError, match=r"\(C, H, W\) with 1 or 3 channels, not \(7,\)"):
        task.log_image("wrong", torch.zeros(7))


def test_images_and_grids_against_numpy() -> None:
    batch = torch.rand(5, 3, 2, 4)
    grid = as_image(batch)
    assert grid.dtype == torch.uint8 and grid.shape == (3, 4, 12)
    pixels = np.round(batch.numpy() * 255)
    for number in range(5):
        row, column = divmod(number, 3)
        part = grid[:, 2 * row : 2 * row + 2, 4 * column : 4 * column + 4]
        assert (part.numpy() == pixels[number]).all()
    assert (grid[:, 2:, 8:] == 0).all()
    assert as_image(torch.tensor([[[2.0, -1.0]]])).flatten().tolist() == [255, 0]


def test_views_are_shown_once_an_epoch(tmp_path: Path) -> None:
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    words = ["hooks.tensorboard={}", "hooks.show_views={images: 3}", "hooks.activations={}"]
    task = tiny.train("simclr", tmp_path, "run", *words, "train.log_every=2", "train.max_steps=8")
    read = accumulators.EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    read.Reload()
    images = read.Images("views/main")
    assert [image.step for image in images] == [2, 6]  # the first logged step of each five
    height, width = task.last_batch.views["main"][0].shape[2:]
    assert (images[0].width, images[0].height) == (3 * width, 2 * height)
    assert read.Histograms("activations/stem.0")[-1].step == 8


def test_a_hook_of_the_page_draws_on_an_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``drawn.py`` of docs/logs.md: a red box, and a blue mask where it computes one."""
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert write_files("logs", tmp_path) == ["drawn.py"]
    words = ["import=[drawn]", "hooks.drawn={}", "hooks.tensorboard={}", "train.max_steps=1"]
    tiny.train("simclr", tmp_path, "run", *words, "train.log_every=1")
    read = accumulators.EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    read.Reload()
    (event,) = read.Images("drawn")
    pixels = np.asarray(Image.open(io.BytesIO(event.encoded_image_string))).astype(int)
    boxed, masked = pixels[2:34, 2:34], pixels[2:34, 36:68]  # of two images of 32 x 32 in a grid
    assert (boxed[4:29, 4] == (255, 0, 0)).all() and (boxed[28, 4:21] == (255, 0, 0)).all()
    blue = masked[..., 2] > masked[..., 0] + 50
    assert 0.1 < blue.mean() < 0.9


def test_mosaic_by_hand() -> None:
    views = [torch.arange(8.0).view(2, 1, 2, 2), torch.arange(8.0, 16.0).view(2, 1, 2, 2)]
    rows = [[0, 1, 4, 5], [2, 3, 6, 7], [8, 9, 12, 13], [10, 11, 14, 15]]
    assert (mosaic(views)[0] * 15).round().tolist() == rows


def test_a_resumed_run_shows_views_at_the_same_steps(tmp_path: Path) -> None:
    words = ["hooks.tensorboard={}", "hooks.show_views={every: 6 steps}", "train.log_every=2"]
    tiny.train("simclr", tmp_path, "run", *words, "train.stop_at=4")
    task = tiny.train("simclr", tmp_path, "run", *words, "train.max_steps=8")
    assert task.saved is not None
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    read = accumulators.EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    read.Reload()
    assert [image.step for image in read.Images("views/main")] == [2, 8]
