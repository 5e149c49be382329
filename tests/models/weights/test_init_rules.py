"""``init``: what of a file is taken, by rules of one's own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from written_files import State, resnet, zeroed

from selftask.config.load import load_config
from selftask.errors import ConfigError, UserError
from selftask.models.weights.model_source import load_init


def test_rules_of_ones_own(tmp_path: Path) -> None:
    """``init.prefix`` and ``init.skip``, as from the command line."""
    weights, path = dict(resnet().state_dict()), tmp_path / "w.pth"
    part = {key: value for key, value in weights.items() if not key.startswith("layer4.")}
    torch.save({"left": weights, "right": zeroed(weights), "part": part}, path)

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
    with pytest.raises(UserError, match="missing: layer4"):
        start("init.prefix=part.")
    before, after = start("init.prefix=part.", "init.min_matched=0.5")
    for key, value in after.items():
        assert torch.equal(value, (before if key.startswith("layer4.") else weights)[key]), key
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
