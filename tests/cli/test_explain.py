"""``selftask explain``: keys, names, columns; what a run writes is described."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import tiny
from run_folders import describe_column, read_events
from selftask.cli.main import main
from selftask.config.reference import all_named, config_keys, named
from selftask.logs.columns import columns
from selftask.logs.events import EVENTS
from selftask.logs.rows import FILE_ONLY, MEASURED
from selftask.logs.run_files import RUN_FILES

HOOKS = ("timing", "gradient_norms", "activations", "clip_gradients", "csv")


@pytest.mark.parametrize(
    ("word", "answer"),
    [
        ("emb_std", r"emb_std: column of metrics\.jsonl, 0 to 1; .*health.*\n.*embeddings"),
        ("train.batch_size", r"train\.batch_size: a whole number, at least 1, default 256\n"),
        ("num_workers", r"data\.num_workers: a whole number or auto, at least 0, default auto\n"),
        ("base_lr", r"optimizer\.lr: a number or a schedule, at least 0, required\n"),
        (
            "queue_size",
            r"method\.queue_size \(all4one, nnclr\): a whole number, at least 1, default 9",
        ),
        ("train.keep_best", r"train\.keep_best\.mode: auto or max or min, default auto\n"),
        ("lars", r"lars: optimizer \[.*lars\.py:\d+\]\n.*\n.*optimizer\.sgd_momentum"),
        ("hooks.timing", r"timing: hook \[.*timing\.py:\d+\]\n"),
        ("eval.evaluations.knn", r"knn: evaluation \[.*knn\.py:\d+\]\n"),
        ("linear", r"(?s)linear: schedule .*linear: evaluation "),
        ("requeue", "requeue: event in events.jsonl"),
        ("checkpoints/step_N", "checkpoints/step_N/: in the run folder"),
        ("bad_files.txt", "bad_files.txt: in the run folder"),
    ],
)
def test_words(word: str, answer: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", word]) == 0
    assert re.search(answer, capsys.readouterr().out)


@pytest.mark.parametrize(
    ("column", "described"),
    [
        ("lr/backbone", ["lr/GROUP"]),
        ("test_accuracy_top_1", ["test_accuracy_top_K"]),
        ("linear_10_labels_top1", ["linear_N_labels_top1"]),
        ("train_probe_top1_layer1", ["METRIC_layerN", "train_probe_top1"]),
        ("v2/knn_top1_k200", ["SET/METRIC", "knn_top1_kK"]),
        ("ema_v2/knn_top1", ["ema_METRIC", "SET/METRIC", "knn_top1"]),
        ("ema_test_accuracy_top_1", ["ema_METRIC", "test_accuracy_top_K"]),
        ("activations/stages.0/mean", ["activations/LAYER/STATISTIC"]),
        ("val_kl", ["val_TERM"]),
    ],
)
def test_columns_as_they_are_in_the_log(
    column: str, described: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", column]) == 0
    titles = re.findall(r"(?m)^(\S+): column of metrics", capsys.readouterr().out)
    assert titles == described


def test_an_unknown_word(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "emb_sd"]) == 2
    assert capsys.readouterr().err == "error: nothing is called 'emb_sd'; did you mean 'emb_std'?\n"


def test_entries() -> None:
    keys = {key.key: key for key in config_keys()}
    assert len(keys) == len(config_keys())
    assert keys["optimizer.lr.base"].limits == "at least 0"
    assert keys["data.max_side"].unit == "pixels"
    assert keys["train.epochs"].unit == "epochs"
    assert keys["train.checkpoint_every"].unit == "steps, epochs or %"
    assert keys["views.NAME.transforms"].type == "a list of transforms"
    assert "optimizer.groups[].freeze" in keys and "image_size" in keys and "import" in keys
    dino = {key.key: key for key in named("methods", "dino").keys}
    assert dino["method.momentum"].default == "{name: cosine, start: 0.996, end: 1}"
    for entry in (*keys.values(), *(key for thing in all_named() for key in thing.keys)):
        assert entry.text and entry.type and "typing" not in entry.type, entry


def test_patterns_of_columns() -> None:
    for name, described in {"lr/backbone.layer1": "lr/GROUP", "lr": "lr"}.items():
        column = describe_column(name)
        assert column is not None and column.name == described
    assert describe_column("linear_10_labels_top1") is not None
    assert describe_column("no_such_metric") is None
    assert all(describe_column(name) is not None for name in (*MEASURED, *FILE_ONLY))
    assert len({column.name for column in columns()}) == len(columns())


def undescribed(names: set[str]) -> list[str]:
    """The columns that nothing describes; of NAME/metric, METRIC_layerN and so on the metric."""
    bare = {re.sub(r"^(other/)?(val_)?|_layer-?\d+$", "", name) for name in names}
    return sorted(name for name in bare if describe_column(name) is None)


@pytest.mark.slow
def test_what_a_run_writes_is_described(tmp_path: Path) -> None:
    """Columns, events and files of one run with many hooks."""
    val = f"data.val={tiny.digits_file(tmp_path, 'val.npz', 80, 110)}"
    other = f"data.val_sets.other={tiny.digits_file(tmp_path, 'other.npz', 110, 140)}"
    evaluations = "eval={evaluations: {knn: {k: [5, 9]}, linear: {few_labels: [1]}}, loss: true}"
    hooks = [f"hooks.{name}={{}}" for name in HOOKS]
    words = tiny.overrides("dino", tmp_path, "run", val, other, evaluations, *hooks)
    assert main(["train", "dino/digits", *words, "train.max_steps=2"]) == 0
    rows = tiny.rows(tmp_path / "run")
    names = {name for row in rows for name in row}
    assert {"emb_std", "chance_ratio", "knn_top1_k9", "other/knn_top1", "val_loss"} <= names
    assert undescribed(names) == []
    assert {event["event"] for event in read_events(tmp_path / "run")} <= set(EVENTS)
    files = {path.name for path in (tmp_path / "run").iterdir() if path.name[0] != "."}
    described = {Path(name).parts[0] for name in RUN_FILES}
    assert files - described == set()
