"""Files as other frameworks write them: each is made as that framework does, and loads whole."""

from __future__ import annotations

import logging
import pickle
import sys
from collections import OrderedDict
from collections.abc import Callable
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import timm
import torch
import torchvision
from torch import Tensor, nn

from selftask.cli.model import export
from selftask.config.load import load_config
from selftask.errors import ConfigError, UserError
from selftask.models.weights.layouts import LAYOUTS
from selftask.models.weights.load import load_weights
from selftask.models.weights.model_source import load_init, read_weights
from selftask.models.weights.read import read_state

State = dict[str, Tensor]


def resnet(name: str = "resnet18") -> nn.Module:
    model = torchvision.models.get_model(name)
    model.fc = nn.Identity()
    return model


def vit() -> nn.Module:
    return timm.create_model("vit_tiny_patch16_224", depth=2, img_size=32, num_classes=0)


def prefixed(prefix: str, state: State) -> State:
    return {prefix + key: value for key, value in state.items()}


def zeroed(state: State) -> State:
    return {key: torch.zeros_like(value) for key, value in state.items()}


@pytest.fixture
def vissl(monkeypatch: pytest.MonkeyPatch) -> type:
    """VISSL's AttrDict, which stands in its checkpoints, for as long as one is written."""
    module = ModuleType("vissl.config.attr_dict")
    kind = type("AttrDict", (dict,), {"__module__": module.__name__})
    module.AttrDict = kind  # type: ignore[attr-defined]
    for name in ("vissl", "vissl.config"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return kind


class VisslTrunk(nn.Module):
    """VISSL's ResNet: torchvision's layers in a ModuleDict, called one after the other."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        blocks = ("conv1", "bn1", "relu", "maxpool", "layer1", "layer2", "layer3", "layer4")
        names = {name: getattr(model, name) for name in (*blocks, "avgpool")}
        names["conv1_relu"] = names.pop("relu")
        order = ("conv1", "bn1", "conv1_relu", *blocks[3:], "avgpool")
        self._feature_blocks = nn.ModuleDict({name: names[name] for name in order})

    def forward(self, images: Tensor) -> Tensor:
        for block in self._feature_blocks.values():
            images = block(images)
        return images.flatten(1)


def vissl_checkpoint(trunk: State, attr_dict: type) -> dict[str, Any]:
    """All of VISSL's keys (vissl/utils/checkpoint.py), with a MoCo teacher in its loss."""
    heads = {f"0.clf.{layer}.{kind}": torch.ones(3) for layer in (0, 2) for kind in ("weight",)}
    teacher = prefixed("moco_encoder.trunk.", zeroed(trunk))
    loss = {**teacher, "queue": torch.zeros(2, 3)}
    return {
        "phase_idx": 99,
        "iteration": 250_000,
        "loss": loss,
        "iteration_num": 9,
        "train_phase_idx": 99,
        "classy_state_dict": {
            "train": True,
            "base_model": {
                "model": {"trunk": trunk, "heads": heads},
                "meta": {"trunk": {}, "heads": []},
            },
            "meters": [],
            "optimizer": {
                "optim": {"state": {0: {"momentum_buffer": torch.zeros(4)}}, "param_groups": []},
                "parameters": attr_dict({"lr": 0.03, "name": "sgd"}),
            },
            "num_updates": 320_000.0,
            "losses": [7.1, 7.0],
            "hooks": {},
            "loss": loss,
        },
        "type": "consolidated",
    }


def write(content: Any, path: Path) -> None:
    if path.suffix == ".pkl":
        path.write_bytes(pickle.dumps(content, protocol=2))
    else:
        torch.save(content, path, _use_new_zipfile_serialization=path.suffix != ".torch")


@pytest.mark.parametrize("suffix", [".torch", ".pth"])  # torch's format before 1.6, and since
def test_a_vissl_checkpoint_as_it_is(
    vissl: type, suffix: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    theirs = VisslTrunk(resnet("resnet50")).eval()
    for part in theirs.modules():
        if isinstance(part, nn.BatchNorm2d):
            nn.init.uniform_(part.running_mean)
            nn.init.uniform_(part.running_var, 0.5, 2.0)
    path = tmp_path / f"model_final_checkpoint_phase99{suffix}"
    write(vissl_checkpoint(dict(theirs.state_dict()), vissl), path)
    for name in [name for name in sys.modules if name.startswith("vissl")]:
        del sys.modules[name]  # whoever reads it has no VISSL

    ours = resnet("resnet50").eval()
    with caplog.at_level(logging.INFO, logger="selftask"):
        load_weights(ours, read_state(path), what="w")
    images = torch.randn(2, 3, 64, 64)
    assert torch.equal(ours(images), theirs(images))
    assert "python objects (vissl.config.attr_dict.AttrDict), which are not lo" in caplog.text
    assert "w: 318/318 tensors" in caplog.text
    assert "classy_state_dict.base_model.model.heads (2 tensors)" in caplog.text


def to_detectron2(state: State) -> State:
    """The rule of MoCo's and VISSL's converters, from torchvision to detectron2."""
    made = {}
    for key, value in state.items():
        new = key if "layer" in key else f"stem.{key}"
        for number in (1, 2, 3, 4):
            new = new.replace(f"layer{number}", f"res{number + 1}")
        for number in (1, 2, 3):
            new = new.replace(f"bn{number}", f"conv{number}.norm")
        new = new.replace("downsample.0", "shortcut").replace("downsample.1", "shortcut.norm")
        if "num_batches" not in key:  # frozen norms have no counter
            made[f"backbone.bottom_up.{new}"] = value
    return made


def test_export_to_detectron2_and_vissl(tmp_path: Path) -> None:
    """Through the command; the reference is the rule of the converters above."""
    state = dict(resnet().state_dict())
    torch.save(state, tmp_path / "w.pth")
    for layout in ("detectron2", "vissl"):
        words = ["torchvision:resnet18", f"weights={tmp_path / 'w.pth'}", "--to", layout]
        assert export.main([*words, "--out", str(tmp_path)]) == 0
    written = pickle.loads((tmp_path / "detectron2.pkl").read_bytes())
    assert written["matching_heuristics"] is True
    expected = {
        key.removeprefix("backbone.bottom_up."): value
        for key, value in to_detectron2(state).items()
    }
    assert written["model"].keys() == expected.keys()
    assert all(np.array_equal(written["model"][key], value) for key, value in expected.items())
    base = torch.load(tmp_path / "vissl.torch", weights_only=True)["classy_state_dict"]
    trunk = base["base_model"]["model"]["trunk"]
    assert trunk.keys() == {f"_feature_blocks.{key}" for key in state}
    for name in ("detectron2.pkl", "vissl.torch"):
        fresh = resnet()
        load_weights(fresh, read_state(tmp_path / name), what=name)
        assert all(torch.equal(value, state[key]) for key, value in fresh.state_dict().items())
    words = ["timm:vit_tiny_patch16_224", "weights=none", "--to", "vissl", f"--out={tmp_path}"]
    with pytest.raises(UserError, match=r"--to vissl is for ResNets .* not for a VisionTransf"):
        export.main(words)


def lightly_file(model: nn.Module) -> dict[str, Any]:
    """The Lightning checkpoint of lightly's examples: nn.Sequential(*list(resnet.children()))."""
    backbone = nn.Sequential(*list(model.children())[:-1])
    state = prefixed("backbone.", dict(backbone.state_dict()))
    teacher = prefixed("backbone_momentum.", zeroed(dict(backbone.state_dict())))
    head = {"projection_head.layers.0.weight": torch.zeros(4, 4)}
    return {"state_dict": {**state, **teacher, **head}, "epoch": 3, "global_step": 9}


def moco(s: State) -> dict[str, Any]:
    heads = {f"module.encoder_{e}.fc.0.weight": torch.zeros(2, 2) for e in "qk"}
    keys = prefixed("module.encoder_k.", zeroed(s))
    queue = {"module.queue": torch.zeros(2, 3)}
    return {"state_dict": {**keys, **prefixed("module.encoder_q.", s), **heads, **queue}}


FILES: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Any]]] = {
    "MoCo": (resnet, lambda m: moco(dict(m.state_dict()))),
    "MoCo v3": (
        vit,
        lambda m: {
            "state_dict": {
                **prefixed("module.momentum_encoder.", zeroed(m.state_dict())),
                **prefixed("module.base_encoder.", m.state_dict()),
                "module.base_encoder.head.0.weight": torch.zeros(2, 2),
                "module.predictor.0.weight": torch.zeros(2, 2),
            },
            "optimizer": {"state": {0: {"exp_avg": torch.zeros(2)}}},
        },
    ),
    "DINO, DINOv2": (
        vit,
        lambda m: {
            "student": prefixed("module.backbone.", zeroed(m.state_dict())),
            "teacher": {
                **prefixed("backbone.", m.state_dict()),
                "head.mlp.0.weight": torch.zeros(2, 2),
            },
            "args": pickle_of_namespace(),
        },
    ),
    "I-JEPA": (
        vit,
        lambda m: {
            "encoder": prefixed("module.", zeroed(m.state_dict())),
            "predictor": prefixed("module.predictor_", m.state_dict()),
            "target_encoder": prefixed("module.", m.state_dict()),
            "opt": {"state": {}},
        },
    ),
    "BYOL": (
        resnet,
        lambda m: {
            **prefixed("target_encoder.net.", zeroed(m.state_dict())),
            **prefixed("online_encoder.net.", m.state_dict()),
            "online_predictor.net.0.weight": torch.zeros(2, 2),
        },
    ),
    "SwAV, DeepCluster v2": (
        resnet,
        lambda m: {
            **prefixed("module.", m.state_dict()),
            "module.projection_head.0.weight": torch.zeros(2, 2),
            "module.prototypes.weight": torch.zeros(2, 2),
        },
    ),
    "MAE": (
        vit,
        lambda m: {
            "model": {
                **m.state_dict(),
                "mask_token": torch.zeros(1, 1, 2),
                "decoder_pos_embed": torch.zeros(1, 5, 2),
                "decoder_blocks.0.norm1.weight": torch.zeros(2),
            },
            "args": pickle_of_namespace(),
            "scaler": {"scale": 65536.0},
        },
    ),
    "Barlow Twins, VICReg": (
        resnet,
        lambda m: {
            "model": {
                **prefixed("module.backbone.", m.state_dict()),
                "module.projector.0.weight": torch.zeros(2, 2),
            },
            "optimizer": {"state": {0: {"mu": torch.zeros(2)}}},
        },
    ),
    "solo-learn, MMSelfSup": (
        resnet,
        lambda m: {
            "state_dict": {
                **prefixed("momentum_backbone.", zeroed(m.state_dict())),
                **prefixed("backbone.", m.state_dict()),
                "classifier.weight": torch.zeros(2, 2),
            },
        },
    ),
    "lightly": (resnet, lightly_file),
    "detectron2": (resnet, lambda m: {"model": to_detectron2(dict(m.state_dict()))}),
    "an unknown framework": (
        vit,
        lambda m: {"run": {"ours": prefixed("trunk.the-net.", m.state_dict())}},
    ),
    "torch.compile and FSDP": (
        vit,
        lambda m: {
            "_orig_mod." + key.replace("blocks.0.", "blocks.0._fsdp_wrapped_module."): value
            for key, value in m.state_dict().items()
        },
    ),
}


def pickle_of_namespace() -> Any:
    from argparse import Namespace

    return Namespace(lr=0.1, arch="vit")


@pytest.mark.parametrize("writer", FILES)
def test_every_layout_loads_whole(writer: str, tmp_path: Path) -> None:
    make, wrap = FILES[writer]
    model = make()
    torch.save(wrap(model), tmp_path / "w.pth")
    fresh = make()
    load_weights(fresh, read_state(tmp_path / "w.pth"))
    own = fresh.state_dict()
    for key, value in model.state_dict().items():
        assert torch.equal(own[key], value) or "num_batches" in key, key


def test_every_row_of_the_table_has_its_file() -> None:
    elsewhere = ("VISSL", "Classy Vision", "Caffe2")  # other tests here and in test_converters.py
    writers = {row.writer for row in LAYOUTS if not row.writer.startswith(elsewhere)}
    assert writers <= set(FILES)


def test_arrays_in_a_plain_pickle(tmp_path: Path) -> None:
    """The zoo of detectron2 is made of these; arrays of objects are none."""
    model = resnet()
    arrays = {key: value.numpy() for key, value in to_detectron2(dict(model.state_dict())).items()}
    more = {"__author__": "Caffe2", "names": np.array(["a", None], dtype=object)}
    write({"model": arrays, **more}, tmp_path / "R-18.pkl")
    fresh = resnet()
    load_weights(fresh, read_state(tmp_path / "R-18.pkl"))
    assert torch.equal(
        fresh.state_dict()["layer2.0.downsample.1.bias"], model.layer2[0].downsample[1].bias
    )
    assert torch.equal(fresh.layer4[1].conv2.weight, model.layer4[1].conv2.weight)


def test_a_vissl_regnet(vissl: type, tmp_path: Path) -> None:
    """Classy Vision's model, as VISSL takes it apart, gives the features of torchvision's."""
    from classy_vision.models import build_model

    theirs = build_model({"name": "regnet_y_400mf", "heads": []}).eval()
    blocks = {"conv1": theirs.stem}
    for block in theirs.trunk_output.children():
        blocks[f"res{len(blocks) + 1}"] = block
    trunk = nn.Module()
    trunk._feature_blocks = nn.ModuleDict(blocks)
    write(vissl_checkpoint(dict(trunk.state_dict()), vissl), tmp_path / "w.pth")
    ours = resnet("regnet_y_400mf").eval()
    load_weights(ours, read_state(tmp_path / "w.pth"))
    images = torch.randn(2, 3, 64, 64)
    expected = theirs.trunk_output(theirs.stem(images)).mean(dim=(2, 3))
    torch.testing.assert_close(ours(images), expected)


def test_two_networks_that_nothing_tells_apart_are_refused(tmp_path: Path) -> None:
    state = dict(resnet().state_dict())
    torch.save({"left": state, "right": zeroed(state)}, tmp_path / "w.pth")
    with pytest.raises(UserError, match=r"several networks that fit \('left\.', 'right\.'\)"):
        load_weights(resnet(), read_state(tmp_path / "w.pth"), what="w.pth")
    torch.save({"left": state, "right": state}, tmp_path / "w.pth")
    load_weights(resnet(), read_state(tmp_path / "w.pth"))


def test_rules_of_ones_own(tmp_path: Path) -> None:
    """``init.prefix`` and ``init.skip``, as from the command line."""
    weights, path = dict(resnet().state_dict()), tmp_path / "w.pth"
    torch.save({"left": weights, "right": zeroed(weights)}, path)

    def start(*words: str) -> tuple[State, State]:
        """The backbone's first weights before and after loading."""
        backbone = resnet()
        before = {key: value.clone() for key, value in backbone.state_dict().items()}
        shown = ["backbone={name: resnet18, stem: imagenet}", f"init.backbone={path}", *words]
        config = load_config("simclr/digits", [*shown, f"out={tmp_path / 'run'}"])
        load_init(backbone, config)
        return before, backbone.state_dict()

    _, after = start("init.prefix=right.")
    assert not any(value.any() for value in after.values())
    before, after = start("init.prefix=left.", "init.skip=[conv1.*, layer4.*]")
    for key, value in after.items():
        skipped = key.startswith(("conv1.", "layer4."))
        assert torch.equal(value, before[key] if skipped else weights[key]), key
    with pytest.raises(UserError, match=r"no tensor has the prefix 'rihgt\.'.*nearest is 'right"):
        start("init.prefix=rihgt.")
    with pytest.raises(UserError, match=r"skip: 'conv2\.\*' matches no tensor"):
        start("init.prefix=left.", "init.skip=[conv2.*]")
    with pytest.raises(ConfigError, match=r"init.skip=\['x'\] has no effect without init.backbone"):
        load_config("simclr/digits", ["init.skip=[x]"])


def test_names_are_changed_by_rules_of_ones_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """``init.rename``, before ``init.prefix``: each rule on all names, after those before it."""
    weights, path = dict(resnet().state_dict()), tmp_path / "w.pth"
    odd = {
        f"net/{key.replace('layer', 'stage_').replace('.', '/')}": v for key, v in weights.items()
    }
    torch.save(odd, path)

    def start(*words: str) -> State:
        backbone = resnet()
        shown = ["backbone={name: resnet18, stem: imagenet}", f"init.backbone={path}", *words]
        load_init(backbone, load_config("simclr/digits", [*shown, f"out={tmp_path / 'run'}"]))
        return backbone.state_dict()

    caplog.set_level("INFO", "selftask")
    with pytest.raises(UserError, match="0/100 tensors"):
        start()
    rules = r"""['/', '.'], ['stage_(\d)', 'layer\1']"""
    for words in ([f"init.rename=[{rules}]"], [f"init.rename=[{rules}]", "init.prefix=net."]):
        after = start(*words)
        assert all(torch.equal(value, weights[key]) for key, value in after.items())
    assert f"init.rename: '/' -> '.': {len(weights)} tensors" in caplog.text
    assert (
        f"init.backbone: {len(weights)}/{len(weights)} tensors (conv1 1/1, bn1 5/5" in caplog.text
    )
    with pytest.raises(
        UserError, match=r"rename: '\^not' matches no tensor of the file: net/conv1"
    ):
        start("init.rename=[['^not', '']]")
    with pytest.raises(UserError, match=r"gives net/.* and net/.* the same name 'x'"):
        start("init.rename=[['^net.*(weight|bias)$', 'x']]")
    for rule, message in [
        ("['(', x]", r"init\.rename\.0: '\(': missing \)"),
        (r"[a, '\2']", r"init\.rename\.0: 'a': invalid group reference 2"),
        ("a", r"init\.rename=.*expected a list of 2: text, text"),
    ]:
        with pytest.raises(ConfigError, match=message):
            load_config("simclr/digits", [f"init.backbone={path}", f"init.rename=[{rule}]"])


def test_weights_from_a_web_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("aiohttp")
    monkeypatch.setenv("SELFTASK_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    state = resnet().state_dict()
    torch.save(state, "w.pth")
    with ThreadingHTTPServer(("127.0.0.1", 0), SimpleHTTPRequestHandler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        found = read_weights(f"http://127.0.0.1:{server.server_port}/w.pth")
        server.shutdown()
    assert found.keys() == state.keys()
    assert all(torch.equal(found[key], state[key]) for key in state)


class _Evil:
    """Creates a file when it is unpickled by ``pickle`` itself."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return exec, (f"open({str(self.path)!r}, 'w')",)


@pytest.mark.parametrize("suffix", [".pth", ".torch", ".pkl"])
def test_nothing_in_a_file_is_called(suffix: str, tmp_path: Path) -> None:
    mark = tmp_path / "called"
    state = {"conv1.weight": np.ones((2, 2))} if suffix == ".pkl" else dict(resnet().state_dict())
    write(
        {"state_dict": state, "evil": _Evil(mark), "list": [_Evil(mark)]}, tmp_path / f"w{suffix}"
    )
    read = read_state(tmp_path / f"w{suffix}")
    assert "state_dict.conv1.weight" in read
    assert not mark.exists()


def test_a_pickled_model_is_no_file_of_weights(tmp_path: Path) -> None:
    torch.save(nn.Linear(2, 2), tmp_path / "w.pth")
    with pytest.raises(UserError, match=r"torch\.nn\.modules\.linear\.Linear.*not loaded"):
        read_state(tmp_path / "w.pth")


@pytest.mark.parametrize(
    ("make", "key", "num_prefix"),
    [
        (
            lambda size: timm.create_model("vit_tiny_patch16_224", depth=1, img_size=size),
            "pos_embed",
            1,
        ),
        (
            lambda size: timm.create_model("deit_tiny_distilled_patch16_224", img_size=size),
            "pos_embed",
            2,
        ),
        (lambda size: torchvision.models.vit_b_32(image_size=size), "encoder.pos_embedding", 1),
    ],
)
def test_positions_are_interpolated_to_the_module_s_grid(
    make: Callable[[int], nn.Module], key: str, num_prefix: int
) -> None:
    """A plane over the patches stays one: bicubic interpolation is exact on it, off the border."""
    patch = 32 if key.startswith("encoder") else 16
    old, new = make(6 * patch), make(12 * patch)
    state = OrderedDict(old.state_dict())
    y, x = torch.meshgrid(torch.arange(6.0), torch.arange(6.0), indexing="ij")
    plane = (2 * x + 3 * y).reshape(1, 36, 1).expand(1, 36, state[key].shape[2])
    state[key] = torch.cat([state[key][:, :num_prefix], plane], dim=1)
    load_weights(new, state)
    found = new.state_dict()[key]
    assert torch.equal(found[:, :num_prefix], state[key][:, :num_prefix])
    grid = found[0, num_prefix:, 0].view(12, 12)
    at = (torch.arange(12.0) + 0.5) / 2 - 0.5  # pixel centres of the finer grid in the coarser
    expected = 2 * at[None, :] + 3 * at[:, None]
    torch.testing.assert_close(grid[4:8, 4:8], expected[4:8, 4:8], rtol=1e-4, atol=1e-4)
