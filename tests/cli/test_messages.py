"""Messages of mistakes that new users made: what is wrong, and what to write instead."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import yaml

from selftask.cli.main import main
from selftask.config.load import load_config
from selftask.errors import nearest_path
from selftask.run.compatibility import _fixed, changes


def error_of(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(argv) == 2
    return capsys.readouterr().err


def test_config_of_a_recipe_is_printed_without_data(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "simclr/images"]) == 0
    printed = capsys.readouterr()
    assert yaml.safe_load(printed.out)["data"]["path"] == "FOLDER"
    assert printed.err.startswith("note: data is missing: ") and printed.err.count("\n") == 1
    assert "data is missing" in error_of(["config", "simclr/images", "train.epoch=1"], capsys)


def test_export_of_an_empty_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    assert "error: empty: holds no backbone.pt" in error_of(["export", "empty"], capsys)


def test_cancel_on_a_machine_without_slurm(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    assert "error: 123: this machine has no SLURM" in error_of(["cancel", "123"], capsys)


def test_folder_of_arrays_names_the_source_that_reads_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "scenes").mkdir()
    np.save(tmp_path / "scenes/1.npy", np.zeros((4, 4, 5), "uint8"))
    text = error_of(["train", "simclr/images", f"data={tmp_path}"], capsys)
    assert "no images" in text and "data.name=bands reads the .npy" in text


def test_missing_run_names_a_similar_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "first").mkdir()
    text = error_of(["eval", "knn", str(tmp_path / "frist"), "data=digits"], capsys)
    assert f"no such file or run; did you mean {str(tmp_path / 'first')!r}?" in text


def test_names_are_compared_without_their_folder(tmp_path: Path) -> None:
    for name in ("opt", "train", ".hidden"):
        (tmp_path / name).mkdir()
    known = f"known: {tmp_path / 'opt'}, {tmp_path / 'train'}"
    assert nearest_path(tmp_path / "nope") == known
    assert nearest_path(tmp_path / "trian") == f"did you mean {str(tmp_path / 'train')!r}?"
    assert nearest_path(tmp_path / "nope.pt") == known
    assert nearest_path(tmp_path / "no" / "nope") == f"{tmp_path / 'no'} does not exist"
    assert nearest_path("/nope") == "/nope does not exist"


def test_case_of_a_name_does_not_matter_for_its_hint(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert "did you mean 'adamw'?" in error_of(["train", "simclr", "optimizer=AdamW"], capsys)
    assert "did you mean 'byol'?" in error_of(["train", "BYOL"], capsys)
    assert "did you mean 'ema'?" in error_of(["train", "simclr", "hooks.EMA={}"], capsys)


def test_name_of_a_module_that_registers_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("brass_band.py").write_text("class BrassBand: ...")
    text = error_of(["train", "simclr", "import=[brass_band]", "hooks.brass_band={}"], capsys)
    assert "import=[ITS_MODULE], with @register_hook('brass_band') in it" in text


def test_key_and_value_are_shown_once(capsys: pytest.CaptureFixture[str]) -> None:
    text = error_of(["train", "simclr", "eval.layers=[a,2]"], capsys)
    assert text == "error: command line: eval.layers=['a', 2]: expected a whole number\n"


def test_device_of_another_name_lists_the_devices(capsys: pytest.CaptureFixture[str]) -> None:
    text = error_of(["train", "simclr", "train.device=gpu"], capsys)
    assert text == "error: command line: train.device='gpu': one of auto, cpu, cuda, mps, xpu\n"


def test_difference_in_the_method_comes_before_views() -> None:
    configs = [load_config(f"{name}/images", [f"data={name}"]) for name in ("moco", "dino")]
    before, now = (_fixed(config.to_dict()) for config in configs)
    keys = [change.partition(":")[0] for change in changes(before, now, "")]
    assert keys[0] == "method.name"
    first_view = next(i for i, key in enumerate(keys) if key.startswith("views."))
    others = [i for i, key in enumerate(keys) if key.startswith(("data.", "backbone", "optimizer"))]
    assert others and max(others) < first_view


def test_replay_of_a_missing_folder_names_that_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "error: step_3: there is no such folder" in error_of(["replay", "step_3"], capsys)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("method.temperature=0", "method.temperature=0: must be above 0"),
        ("data.num_workers=al", "data.num_workers='al': expected a whole number"),
        ("eval.evaluations.knn.k=[5,0]", "eval.evaluations.knn.k=[5, 0]: must be at least 1"),
        ("train.accumulate=4", "train.accumulate=4 has no effect"),
        ("train.grad_scaler.backoff_factor=1", "backoff_factor=1: must be below 1"),
    ],
)
def test_key_and_value_stand_once_in_a_message(
    word: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    key = word.partition("=")[0]
    (line,) = error_of(["config", "simclr", word], capsys).splitlines()
    assert line.startswith(f"error: command line: {key}") and message in line
    assert line.partition("; ")[0].count(key) == 1


def test_a_current_folder_that_was_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "removed"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    assert main(["list", "hooks"]) == 2
    assert capsys.readouterr().err == (
        "error: the current folder was removed; change to one that exists\n"
    )
