"""What has changed between a stop and the next start: data, length, files, disk, the end before."""

from __future__ import annotations

import io
import json
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import tiny
from selftask.checkpoint import nested, rotation
from selftask.cli.main import main
from selftask.config.load import load_config
from selftask.config.schema import Component
from selftask.data.fingerprint import differences, fingerprint
from selftask.data.open_source import open_source
from selftask.data.reading.path_table import PathTable, arrays_of_paths
from selftask.models.build import build_backbone
from selftask.models.weights.export import save_backbone
from selftask.task import Task

CLASSES = ("ant", "bee", "cat")


def photographs(folder: Path, per_class: int = 12) -> Path:
    """Small random images in a folder for each class."""
    draws = np.random.default_rng(0)
    for name in CLASSES:
        (folder / name).mkdir(parents=True)
        for number in range(per_class):
            pixels = draws.integers(0, 256, (16, 16, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{number:02}.png")
    return folder


def words(folder: Path, *more: str) -> list[str]:
    """A command line that trains on the photographs of the folder."""
    own = ["train", "simclr/digits", *tiny.overrides("simclr", folder)]
    data = ["data.name=folder", f"data.path={folder / 'photos'}", "train.batch_size=8"]
    return [*own, *data, *more]


@pytest.fixture
def stopped(tmp_path: Path) -> Path:
    """A folder with photographs and a run that stopped at step 2 of 12."""
    photographs(tmp_path / "photos")
    assert main(words(tmp_path, "train.stop_at=2")) != 0
    return tmp_path


def remove(photos: Path) -> None:
    (photos / "cat" / "11.png").unlink()


def swap(photos: Path) -> None:
    (photos / "cat" / "11.png").rename(photos / "cat" / "12.png")


def rename(photos: Path) -> None:
    (photos / "ant").rename(photos / "wasp")


def replace(photos: Path) -> None:
    Image.new("RGB", (16, 16)).save(photos / "bee" / "04.png")


def remove_class(photos: Path) -> None:
    for file in (photos / "bee").iterdir():
        file.unlink()
    (photos / "bee").rmdir()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (remove, "36 images before, 35 now"),
        (swap, "as many images (36), but not the same names"),
        (rename, "class gone: 'ant'; class new: 'wasp'"),
        (replace, "other images under the same names (1 of 36 compared: "),
        (remove_class, "36 images before, 24 now; class gone: 'bee'"),
    ],
)
def test_changed_data_is_refused_and_named(
    change: Callable[[Path], None],
    message: str,
    stopped: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    change(stopped / "photos")
    before = rotation.checkpoints(stopped / "run/checkpoints")
    assert main(words(stopped)) == 2
    told_by_run = capsys.readouterr().out
    assert message in told_by_run
    assert "resume.data=allow" in told_by_run
    assert rotation.checkpoints(stopped / "run/checkpoints") == before
    assert main(words(stopped, "resume.data=allow", "resume=auto")) == 0
    told_by_run = capsys.readouterr().out
    assert message in told_by_run
    assert "resumed from" in told_by_run


def test_the_same_data_in_another_order_of_listing_goes_on(stopped: Path) -> None:
    """A file that was removed and put back, and a folder without images, change nothing."""
    file = stopped / "photos/ant/03.png"
    content = file.read_bytes()
    file.unlink()
    file.write_bytes(content)
    (stopped / "photos/empty").mkdir()
    assert main(words(stopped)) == 0


def test_tables_of_equal_paths_have_one_hash() -> None:
    """However they were made: whole paths, or names within folders with another separator."""

    def hashed(table: PathTable) -> bytes:
        stream = io.BytesIO()
        table.hash_names(stream.write)
        return stream.getvalue()

    plain = PathTable.of(["a.png", "b.png"])
    arrays = dict(arrays_of_paths([b"a.png", b"b.png"]))
    arrays["names"] = np.frombuffer(b"a.png\nb.png\n", dtype=np.uint8)
    assert hashed(plain) == hashed(PathTable(arrays))
    assert hashed(plain) != hashed(PathTable.of(["a.png", "c.png"]))


@pytest.mark.parametrize("kind", ["array", "list", "webdataset"])
def test_fewer_images_of_any_source(kind: str, tmp_path: Path) -> None:
    """80 images cut to 48 between a stop and a resume."""
    pixels = np.random.default_rng(0).integers(0, 256, (80, 8, 8, 3), dtype=np.uint8)
    prints = []
    for count in (80, 48):
        folder = tmp_path / str(count)
        folder.mkdir()
        path = folder / {"array": "x.npz", "list": "x.txt", "webdataset": "x.tar"}[kind]
        if kind == "array":
            np.savez(path, images=pixels[:count])
        else:
            for number in range(count):
                Image.fromarray(pixels[number]).save(folder / f"{number:03}.png")
            names = sorted(file.name for file in folder.glob("*.png"))
            path.write_text("\n".join(names))
            if kind == "webdataset":
                subprocess.run(["tar", "-cf", path, "-C", folder, *names], check=True)
        prints.append(fingerprint(open_source(Component(name=kind, args={"path": str(path)}))))
    assert differences(*prints) == ["80 images before, 48 now"]


def test_labels_alone(tmp_path: Path) -> None:
    prints = []
    for labels in ([0, 1, 2], [0, 2, 1]):
        path = tmp_path / "x.npz"
        np.savez(path, images=np.zeros((3, 8, 8, 3), np.uint8), labels=labels)
        prints.append(fingerprint(open_source(Component(name="array", args={"path": str(path)}))))
    assert differences(*prints) == ["other labels"]
    nested.check_plain(prints[0])


def test_the_jump_of_another_length_is_logged_before_the_first_step(
    stopped: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ["optimizer.schedule=cosine", "optimizer.warmup=0"]
    run = [f"out={stopped / 'longer'}", *more, "optimizer.lr=1"]
    main(words(stopped, *run, "train.stop_at=4"))
    capsys.readouterr()
    assert main(words(stopped, *run, "train.epochs=2")) == 0
    out = capsys.readouterr().out
    rates = [(1 + np.cos(np.pi * 4 / steps)) / 2 for steps in (12, 8)]
    said = "the run has 8 steps now and had 12: at step 4 progress jumps from 0.333 to 0.500, and "
    said += f"the learning rate from {rates[0]:.3g} to {rates[1]:.3g}"
    assert said in out
    assert out.index(said) < out.index("step 5")


@pytest.mark.parametrize("text", ["- 1", "backbone: resnet18", "train: 5", "{"])
def test_a_config_that_is_none_is_refused(
    stopped: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (stopped / "run/config.yaml").write_text(text)
    assert main(words(stopped)) == 2
    assert "run/config.yaml: is damaged, so nothing says" in capsys.readouterr().err


def test_changed_settings_of_hooks_are_logged(
    stopped: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for norm, before in ((1.0, None), (2.0, 1.0)):
        capsys.readouterr()
        clip = f"hooks.clip_gradients.max_norm={norm}"
        assert main(words(stopped, clip, f"train.stop_at={3 + norm:.0f}")) != 0
        lines = [x for x in capsys.readouterr().out.splitlines() if x.startswith("config: ")]
        key = "hooks.clip_gradients" + (".max_norm" if before else "")
        assert [line.startswith(f"config: {key}: {before} there, ") for line in lines] == [True]


def test_a_run_without_its_config_is_compared_with_its_checkpoint(
    stopped: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (stopped / "run/config.yaml").unlink()
    capsys.readouterr()
    assert main(words(stopped, "train.seed=7", "train.stop_at=3")) != 0
    lines = [x for x in capsys.readouterr().out.splitlines() if x.startswith("config: ")]
    assert lines == ["config: train.seed: 0 there, 7 now"]


def test_a_resume_needs_no_file_that_it_does_not_use(
    stopped: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``init.backbone`` and ``resume=ELSEWHERE`` are where a run began."""
    newest = rotation.checkpoints(stopped / "run/checkpoints")[0]
    elsewhere = stopped / "elsewhere.pt"
    elsewhere.write_bytes(newest.read_bytes())
    for name, setting in (("a", f"init.backbone={elsewhere}"), ("b", f"resume={elsewhere}")):
        own = [f"out={stopped / name}", setting]
        assert main(words(stopped, *own, "train.stop_at=4")) != 0
    elsewhere.unlink()
    capsys.readouterr()
    for name, setting in (("a", f"init.backbone={elsewhere}"), ("b", f"resume={elsewhere}")):
        assert main(words(stopped, f"out={stopped / name}", setting)) == 0
        assert "resumed from" in capsys.readouterr().out
        steps = [row["step"] for row in tiny.rows(stopped / name)]
        assert steps[0] == (1 if name == "a" else 3), "weights alone, or a run to go on with"
        assert main(words(stopped, f"out={stopped / 'new'}", setting)) == 2
        assert "elsewhere.pt" in capsys.readouterr().err


@pytest.mark.parametrize("setting", ["init.backbone", "resume"])
def test_the_weights_before_the_first_step_are_those_of_the_file(
    setting: str, stopped: Path
) -> None:
    """All of them after ``resume``; those of the backbone alone with ``init.backbone``."""
    newest = rotation.checkpoints(stopped / "run/checkpoints")[0]
    state = torch.load(newest, weights_only=True)["model"]
    own = words(stopped, f"out={stopped / 'new'}", f"{setting}={newest}")
    task = Task(load_config(own[1], own[2:]))
    task.prepare()
    actual = task.base_model.state_dict()
    assert actual.keys() == state.keys()
    alike = {name for name in state if torch.equal(actual[name], state[name])}
    backbone = {name for name in state if name.startswith("backbone.")}
    assert 0 < len(backbone) < len(state)
    if setting == "resume":
        assert alike == state.keys() and task.steps_done == 2
    else:
        assert alike >= backbone and task.steps_done == 0
        assert not [name for name in alike - backbone if state[name].ndim > 1], "the head is new"
    task.close()


def test_no_room_for_a_checkpoint_is_said_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The bound is below the real size, and most of it."""
    photographs(tmp_path / "photos")
    assert main(words(tmp_path, "train.stop_at=1")) != 0
    size = rotation.checkpoints(tmp_path / "run/checkpoints")[0].stat().st_size
    for free, code in ((0.7 * size, 2), (size, 0)):
        monkeypatch.setattr(
            "selftask.task.task_state.shutil.disk_usage",
            lambda path, f=free: type("D", (), {"free": f}),
        )
        capsys.readouterr()
        out = tmp_path / f"out{code}"
        assert main(words(tmp_path, f"out={out}", "train.max_steps=1")) == code
        said = capsys.readouterr().out
        assert ("a checkpoint of this run takes at least" in said) == (code == 2)
        assert ("step 1  epoch" in said) == (code == 0)


def test_an_export_without_room_is_an_error_of_the_system(tmp_path: Path) -> None:
    """So that one line says so; the file before stays, and nothing half-written."""
    before, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    backbone = build_backbone(Component(name="small_resnet", args={"width": 8}))
    files = ("backbone.json", "backbone.pt", "backbone.safetensors")
    save_backbone(backbone, tmp_path, {})
    contents = [(tmp_path / name).read_bytes() for name in files]
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            save_backbone(backbone, tmp_path, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (before, hard))
    assert sorted(path.name for path in tmp_path.iterdir()) == list(files)
    assert [(tmp_path / name).read_bytes() for name in files] == contents


def test_a_killed_run_is_named_by_the_next_start(
    stopped: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [sys.executable, "-m", "selftask", *words(stopped, "train.epochs=10000")]
    process = subprocess.Popen(
        command, env=tiny.environment(), cwd=stopped, stdout=subprocess.DEVNULL
    )
    status = stopped / "run/status.json"
    until = time.monotonic() + 60
    while json.loads(status.read_text()).get("pid") != process.pid:
        assert time.monotonic() < until
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert json.loads(status.read_text())["state"] == "running"
    assert main(words(stopped, "train.stop_at=3")) != 0
    out = capsys.readouterr().out
    assert f"process {process.pid} on " in out
    assert "was killed without a word" in out
    assert json.loads(status.read_text())["state"] == "interrupted"


def test_status_of_a_killed_run_is_corrected_though_the_next_one_fails(stopped: Path) -> None:
    status = stopped / "run/status.json"
    content = json.loads(status.read_text())
    status.write_text(json.dumps(content | {"state": "running", "host": "elsewhere"}))
    remove(stopped / "photos")
    assert main(words(stopped)) == 2
    assert json.loads(status.read_text())["state"] == "failed"


# -- what a run keeps of its code ------------------------------------------------------------------


def test_plug_ins_and_versions_are_in_the_folder(
    stopped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = stopped / "project"
    (project / "nets/deep").mkdir(parents=True)
    (project / "nets/__init__.py").write_text("")
    (project / "nets/deep/__init__.py").write_text("from layers_of_mine import flat")
    (project / "nets/never.py").write_text("raise RuntimeError")
    (project / "layers_of_mine.py").write_text(
        "from torch import nn\n"
        "def flat():\n"
        "    return nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten())\n"
    )
    (project / "greeter_of_mine.py").write_text("greeting = 'hello'\n")
    monkeypatch.chdir(project)
    monkeypatch.setattr(sys, "path", [str(project), *sys.path])
    common = [word for word in words(stopped) if not word.startswith(("backbone.", "backbone="))]
    own = ["import=[greeter_of_mine]", "backbone=nets.deep:flat", f"out={stopped / 'own'}"]
    assert main([*common, *own, "train.max_steps=1"]) == 0
    code = stopped / "own/code"
    copied = {path.relative_to(code).as_posix() for path in code.rglob("*.py")}
    assert copied >= {"greeter_of_mine.py", "layers_of_mine.py", "nets/deep/__init__.py"}
    assert "nets/never.py" not in copied
    described = json.loads((stopped / "own/environment.json").read_text())["selftask"]
    head = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=tiny.ROOT, capture_output=True, text=True, check=True
    )
    assert described["commit"].removesuffix("-dirty") == head.stdout.strip()
    assert described["version"]
