"""Commands that name a run or one of its checkpoints act on that one, or say why they do not."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import selftask
from selftask.checkpoint.kept import named_checkpoint
from selftask.cli.adapt import adapt
from selftask.cli.main import main
from selftask.cli.model import export, score
from selftask.cli.model.finetune import start_settings
from selftask.cli.model.suite_request import Request
from selftask.config.schema import Config
from selftask.errors import UserError
from selftask.logs import write_json
from selftask.logs.rows import append_row


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    """A run with one checkpoint, which is cut off."""
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    (tmp_path / "run/config.yaml").touch()
    (tmp_path / "run/checkpoints/step_000000003.pt").write_bytes(b"PK")
    return tmp_path / "run"


@pytest.mark.parametrize("words", [["{run}@3"], ["{run}", "--average", "1"]])
def test_export_of_a_damaged_checkpoint_is_one_line(
    words: list[str], damaged: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", *(word.format(run=damaged) for word in words)]) == 2
    error = capsys.readouterr().err.strip()
    if len(words) == 1:
        assert error.startswith(f"error: {damaged}/checkpoints/step_000000003.pt: is damaged: ")
    else:
        assert "can be read" in error or "is damaged" in error


def test_a_damaged_checkpoint_among_averaged_ones_is_named(
    damaged: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The newest one is intact, the one before is not."""
    from selftask.checkpoint import store

    newest = damaged / "checkpoints/step_000000004.pt"
    newest.touch()
    state = {"clock": {"steps_done": 4}, "backbone": "x", "model": {}}
    monkeypatch.setattr(store, "load_newest", lambda *_: (state, newest))
    monkeypatch.setattr(export, "_newest", lambda *_: [newest.with_stem("step_000000003")])
    monkeypatch.setattr("selftask.config.load.load_config", lambda *_, **__: None)
    assert main(["export", str(damaged), "--average", "2"]) == 2
    assert "step_000000003.pt: is damaged: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["{run}@3", "--average", "2"], "takes the newest checkpoints, not step_000000003"),
        (["{run}", "--to", "checkpoint", "--weights", "ema"], "leave --weights, --average out"),
        (["{run}", "--to", "checkpoint", "--average", "2"], "leave --weights, --average out"),
    ],
)
def test_an_average_that_would_not_be_written_is_refused(
    words: list[str], message: str, damaged: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", *(word.format(run=damaged) for word in words)]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("address", "out"),
    [
        ("sweep/lr_0.5", "lr_0.5"),
        ("runs/a@100", "a@100"),
        ("timm:vit_small_patch16_224.dino", "vit_small_patch16_224.dino"),
        ("runs/a/export/backbone.pt", "backbone"),
    ],
)
def test_two_models_are_fine_tuned_in_two_folders(address: str, out: str) -> None:
    facts = {"architecture": {"name": "resnet18", "args": {}}}
    assert start_settings("finetune", address, "pretrained", facts)["out"] == f"runs/finetune_{out}"


@pytest.mark.parametrize("key", ["data", "data.path"])
def test_the_images_to_test_on_are_those_that_are_named(
    key: str, damaged: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """``data=DIR`` is short for ``data.path=DIR``; both would otherwise name training images."""
    images = [f"data={damaged}/train", f"data.val={damaged}/val"]
    assert main(["config", "supervised/images", *images]) == 0
    (damaged / "config.yaml").write_text(capsys.readouterr().out)
    configs: list[Config] = []
    monkeypatch.setattr(score, "_scores", lambda config, _: configs.append(config) or {})
    assert main(["test", str(damaged), f"{key}={damaged}/other"]) == 0
    (data,) = (config.data for config in configs)
    assert data.val is not None and data.val.args["path"] == f"{damaged}/other"
    assert data.source.args["path"] == f"{damaged}/train"


def test_a_checkpoint_of_a_remote_run_cannot_be_named() -> None:
    with pytest.raises(UserError, match="only checkpoints of a local run can be named"):
        named_checkpoint("memory://bucket/run@best")


def test_none_is_no_file_of_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the default of a function that passes its arguments on to ``selftask.evaluate``."""
    given: list[Any] = []
    monkeypatch.setattr(
        "selftask.api.evaluation.evaluate_named", lambda *words: given.append(words)
    )
    selftask.evaluate("timm:resnet10t", "knn", weights=None, prefix=None, k=[3])
    assert given == [("knn", "timm:resnet10t", ["k=[3]"])]


def test_the_last_of_two_words_for_one_option_counts() -> None:
    request = Request(Path("run"), ["knn"], ["knn.k=[5]", "knn.k=[10]"], "all", 1)
    words = [word for word in request.overrides(["knn"]) if ".k=" in word]
    assert words == ["eval.evaluations.knn.k=[5]", "eval.evaluations.knn.k=[10]"]


def test_the_best_weights_of_a_backbone_of_ones_own_are_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """``adapt`` has just trained it; asking for ``trust=true`` at the end would be too late."""
    for step, value in enumerate((0.1, 0.3, 0.2)):
        append_row(tmp_path / "metrics.jsonl", {"step": step, "knn_top1": value})
    write_json(tmp_path / "status.json", {"state": "finished"})
    exported: list[Any] = []
    uploaded: list[Any] = []

    def write_export(words: list[str]) -> None:
        exported.append(words)
        (tmp_path / "export/student").mkdir(parents=True)
        for name in ("backbone.pt", "student/backbone.json"):
            (tmp_path / "export" / name).touch()

    monkeypatch.setattr(export, "main", write_export)
    monkeypatch.setattr("selftask.files.addresses.upload", lambda *pair: uploaded.append(pair[1]))
    monkeypatch.setattr("selftask.run.status.Status.is_finished", lambda self: True)
    monkeypatch.setattr("selftask.run.status.Status.__init__", lambda self, config: None)
    kept = SimpleNamespace(metric="knn_top1")
    train = SimpleNamespace(keep_best=kept)
    remote = SimpleNamespace(out="memory://bucket/run", out_folder=tmp_path, train=train)
    adapt.conclude(remote)  # type: ignore[arg-type]
    assert exported == [[f"{tmp_path}@best", "trust=true"]]
    names = ("backbone.pt", "student/backbone.json")
    assert sorted(uploaded) == [f"memory://bucket/run/export/{name}" for name in names]
    assert "export/ has those of that step" in capsys.readouterr().out
    kept.metric = "rankme"  # RUN@best is another checkpoint
    adapt.conclude(remote)  # type: ignore[arg-type]
    assert len(exported) == 1
    assert "export/ has those of the end" in capsys.readouterr().out
