"""Weights from the files people have: loaded whole, or refused with the reason."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import timm
import torch
import torchvision
from safetensors.torch import load_file, save_file
from torch import nn

from selftask.checkpoint import store
from selftask.config.schema import Component
from selftask.errors import UserError
from selftask.models.build import build_backbone
from selftask.models.network import Network
from selftask.models.teacher import Teacher
from selftask.models.weights.export import portable_state, save_backbone
from selftask.models.weights.load import load_weights
from selftask.models.weights.model_source import open_model, read_weights
from selftask.models.weights.read import read_state

RESNET = Component(name="resnet18", args={"stem": "imagenet"})


@pytest.fixture(scope="module")
def resnet() -> nn.Module:
    torch.manual_seed(1)
    return build_backbone(RESNET)


def _same(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def _prefixed(*prefixes: str) -> Callable[[dict], dict]:
    return lambda state: {"".join(prefixes) + key: value for key, value in state.items()}


def _with_head(state: dict) -> dict:
    return {**state, "fc.weight": torch.zeros(1000, 512), "fc.bias": torch.zeros(1000)}


def _without_counters(state: dict) -> dict:
    return {k: v for k, v in state.items() if "num_batches" not in k}


@pytest.mark.parametrize(
    "wrap",
    [
        dict,
        _with_head,
        _without_counters,
        _prefixed("module."),
        _prefixed("_orig_mod."),
        _prefixed("module.", "_orig_mod.", "backbone."),
        lambda s: {"state_dict": _prefixed("module.encoder_q.")(s), "epoch": 3, "arch": "resnet18"},
        lambda s: {"student": {"x": torch.zeros(1)}, "teacher": _prefixed("backbone.")(s)},
        lambda s: {
            "state_dict": {**_prefixed("encoder.")(s), "projector.0.weight": torch.zeros(2)}
        },
        lambda s: {"model": {**_prefixed("backbone.")(s), "head.0.weight": torch.zeros(2)}},
        lambda s: {"step": torch.tensor(3), "seed": torch.tensor(4), "model": s},
    ],
)
def test_known_files_load_whole(wrap: Callable, resnet: nn.Module, tmp_path: Path) -> None:
    path = tmp_path / "weights.pth"
    torch.save(wrap(dict(resnet.state_dict())), path)
    fresh = build_backbone(RESNET)
    load_weights(fresh, read_state(path))
    assert _same(fresh.state_dict(), resnet.state_dict())


def test_safetensors_and_our_checkpoint(resnet: nn.Module, tmp_path: Path) -> None:
    save_file(portable_state(resnet), tmp_path / "w.safetensors")
    network = Network(resnet, nn.Linear(512, 8))
    torch.save({"model": network.state_dict(), "epoch": 1}, tmp_path / "c.pt")
    torch.save({"teacher": Teacher(network).state_dict()}, tmp_path / "t.pt")
    for name in ("w.safetensors", "c.pt", "t.pt"):
        fresh = build_backbone(RESNET)
        load_weights(fresh, read_state(tmp_path / name))
        assert _same(fresh.state_dict(), resnet.state_dict())


def test_of_a_checkpoint_what_export_would_take(resnet: nn.Module, tmp_path: Path) -> None:
    """DINO and I-JEPA keep the teacher: starting from a checkpoint and from an export is one."""
    student = Network(build_backbone(RESNET), nn.Linear(512, 8))
    teacher = Teacher(Network(resnet, nn.Linear(512, 8)))
    places = {"backbone": "method.teacher.network.backbone", "model": student.state_dict()}
    method = {f"teacher.{key}": value for key, value in teacher.state_dict().items()}
    torch.save({**places, "method": method}, tmp_path / "step_000000001.pt")
    fresh = build_backbone(RESNET)
    load_weights(fresh, read_state(tmp_path / "step_000000001.pt"))
    assert _same(fresh.state_dict(), resnet.state_dict())


def test_coverage_is_logged_by_module(resnet: nn.Module, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="selftask"):
        load_weights(build_backbone(RESNET), resnet.state_dict(), what="init.backbone")
    assert "init.backbone: 120/120 tensors (conv1 1/1, bn1 5/5, layer1 24/24" in caplog.text


def test_one_renamed_key_is_named_with_its_nearest(resnet: nn.Module) -> None:
    state = dict(resnet.state_dict())
    state["layer1.0.convv1.weight"] = state.pop("layer1.0.conv1.weight")
    fresh = build_backbone(RESNET)
    before = {key: value.clone() for key, value in fresh.state_dict().items()}
    with pytest.raises(UserError) as error:
        load_weights(fresh, state, what="w.pt")
    text = str(error.value)
    assert "1 missing: layer1.0.conv1.weight (the file has layer1.0.convv1.weight)" in text
    assert "1 unexpected: layer1.0.convv1.weight" in text and "119/120" in text
    assert _same(fresh.state_dict(), before)
    load_weights(fresh, state, min_matched=0.99)
    assert torch.equal(fresh.bn1.weight, resnet.bn1.weight)


def test_another_architecture_is_refused(resnet: nn.Module) -> None:
    deeper = build_backbone(Component(name="resnet34", args={}))
    with pytest.raises(UserError, match=r"unexpected: layer1\.2\.conv1\.weight"):
        load_weights(build_backbone(RESNET), deeper.state_dict())
    small_stem = build_backbone(Component(name="resnet18", args={"stem": "cifar"}))
    with pytest.raises(UserError, match=r"conv1.weight is \(64, 3, 7, 7\), wanted \(64, 3, 3, 3\)"):
        load_weights(small_stem, resnet.state_dict())
    vit = timm.create_model("vit_tiny_patch16_224", depth=1, num_classes=0)
    with pytest.raises(UserError, match="another architecture"):
        load_weights(build_backbone(RESNET), vit.state_dict(), min_matched=0.5)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.bool, torch.complex64])
def test_weights_that_are_no_floating_point_numbers_are_refused(
    dtype: torch.dtype, resnet: nn.Module
) -> None:
    """Without its scale, a quantized weight means nothing; a complex one would lose a part."""
    state = {**resnet.state_dict(), "layer1.0.conv1.weight": torch.zeros(64, 64, 3, 3, dtype=dtype)}
    fresh = build_backbone(RESNET)
    before = {key: value.clone() for key, value in fresh.state_dict().items()}
    name = str(dtype).removeprefix("torch.")
    with pytest.raises(UserError, match=rf"w\.pt: layer1\.0\.conv1\.weight is {name}, and weights"):
        load_weights(fresh, state, what="w.pt")
    assert _same(fresh.state_dict(), before)


class _Config(dict):
    """A config object that someone pickled with the weights."""


def _truncated(path: Path, state: dict) -> None:
    torch.save(state, path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize(
    ("name", "write", "message"),
    [
        ("w.pt", lambda p, s: p.write_bytes(b""), r"empty \(0 bytes\)"),
        ("w.pt", _truncated, "damaged"),
        ("w.pt", lambda p, s: p.write_text("no weights at all"), "damaged or no file of weights"),
        ("w.pt", lambda p, s: p.write_text("train simclr"), "damaged or no file of weights"),
        ("w.safetensors", lambda p, s: p.write_bytes(b"\x10" * 99), "damaged"),
        ("w.pt", lambda p, s: torch.save({"epoch": 3, "cfg": _Config()}, p), "_Config.*not loaded"),
        ("w.pt", lambda p, s: torch.save({"epoch": 3, "cfg": {"lr": 1}}, p), "no weights.*epoch"),
        ("w.pt", lambda p, s: torch.save([1, 2], p), "no weights"),
        ("w.pt", lambda p, s: p.mkdir(), "a folder"),
        ("w.pt", lambda p, s: (p.parent / "w.pth").write_text(""), r"did you mean .*w\.pth"),
    ],
)
def test_what_holds_no_weights_says_what_it_is(
    name: str, write: Callable, message: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    write(path, {"conv1.weight": torch.randn(64, 64)})
    with pytest.raises(UserError, match=message) as error:
        read_state(path)
    assert str(path) in str(error.value) and len(str(error.value)) < 1000


def test_export_loads_strictly_into_torchvision(resnet: nn.Module, tmp_path: Path) -> None:
    run = tmp_path / "run"
    meta = {
        "architecture": {"name": "resnet18", "args": RESNET.args},
        "normalization": {"mean": [0.5] * 3, "std": [0.25] * 3},
        "input_size": 64,
        "method": "moco",
        "step": 7,
    }
    path = save_backbone(resnet, run / "export", meta)
    state = torch.load(path, weights_only=True)
    theirs = torchvision.models.resnet18()
    theirs.fc = nn.Identity()
    theirs.load_state_dict(state, strict=True)
    assert _same(state, load_file(run / "export" / "backbone.safetensors"))
    assert sorted(p.name for p in (run / "export").iterdir()) == [
        "backbone.json",
        "backbone.pt",
        "backbone.safetensors",
    ]
    for address in (run, run / "export", path):
        backbone, facts = open_model(str(address))
        assert _same(backbone.state_dict(), resnet.state_dict()) and not backbone.training
        assert facts["embed_dim"] == 512 and facts["step"] == 7
        assert _same(read_weights(str(address)), state)


def test_export_can_be_read_by_those_whom_the_umask_lets(resnet: nn.Module, tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        save_backbone(resnet, tmp_path, {})
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o640}


def test_export_loads_strictly_into_timm(tmp_path: Path) -> None:
    args = {"img_size": 32, "patch_size": 8, "depth": 2, "pool": "avg", "class_token": False}
    vit = build_backbone(Component(name="vit_tiny", args=args))
    path = save_backbone(vit, tmp_path, {"architecture": {"name": "vit_tiny", "args": args}})
    theirs = timm.create_model(
        "vit_tiny_patch16_224",
        img_size=32,
        patch_size=8,
        depth=2,
        num_classes=0,
        class_token=False,
        global_pool="avg",
        fc_norm=False,
    )
    theirs.load_state_dict(torch.load(path, weights_only=True), strict=True)
    x = torch.randn(2, 3, 32, 32)
    assert torch.equal(theirs.eval()(x), vit.eval()(x))


def test_wrapped_modules_export_clean_keys(resnet: nn.Module) -> None:
    compiled = torch.compile(resnet)  # wraps only; nothing is compiled before it is called
    assert _same(portable_state(compiled), dict(resnet.state_dict()))


def test_own_names_like_those_of_wrappers_are_kept() -> None:
    own = nn.ModuleDict({"patch_module": nn.Linear(2, 2), "module": nn.Linear(2, 2)})
    assert portable_state(own).keys() == own.state_dict().keys()


def test_libraries_by_address(resnet: nn.Module, tmp_path: Path) -> None:
    backbone, facts = open_model("timm:resnet18", weights="none")
    assert facts["architecture"]["args"]["model"] == "resnet18" and facts["embed_dim"] == 512
    assert facts["normalization"]["mean"] == pytest.approx([0.485, 0.456, 0.406])
    torch.save(_with_head(dict(resnet.state_dict())), tmp_path / "w.pth")
    backbone, _ = open_model("torchvision:resnet18", weights=str(tmp_path / "w.pth"))
    assert _same(backbone.state_dict(), resnet.state_dict())


def test_addresses_that_lead_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for address, message in [
        ("torchvision:resnet19", "torchvision has no model named 'resnet19'"),
        (str(tmp_path), "holds no backbone.pt"),
        (str(tmp_path / "none.pt"), "no such file or run"),
    ]:
        with pytest.raises(UserError, match=message):
            open_model(address)
    path = save_backbone(
        build_backbone(RESNET), tmp_path, {"architecture": {"name": "resnet18", "args": {}}}
    )
    (tmp_path / "backbone.json").write_text(json.dumps({"a": 1}))
    with pytest.raises(UserError, match="not what selftask writes"):
        open_model(str(path))
    (tmp_path / "backbone.json").write_text(json.dumps({"step": 1, "bytes": 2, "xxh3_128": "3"}))
    with pytest.raises(UserError, match="is a checkpoint; give the folder of its run"):
        open_model(str(path))
    (tmp_path / "backbone.json").unlink()
    with pytest.raises(UserError, match="nothing says which architecture"):
        open_model(str(path))


def test_the_export_of_an_earlier_end_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A run that was made longer has it until it ends again."""
    meta = {"architecture": {"name": "resnet18", "args": {}}, "step": 10}
    save_backbone(build_backbone(RESNET), tmp_path / "export", meta)
    for step, warns in ((10, False), (15, True)):
        store.save({"step": step}, tmp_path / "checkpoints", step, keep=3)
        open_model(str(tmp_path))
        assert ("is of step 10, and the newest checkpoint of step 15" in caplog.text) is warns


def test_no_network_names_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise OSError("no route to host")

    monkeypatch.setattr(torch.hub, "load_state_dict_from_url", fail)
    monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", fail)
    with pytest.raises(UserError, match=r"no route to host.*weights=none"):
        open_model("torchvision:resnet18")
