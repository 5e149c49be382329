"""Every former name of a key is an error that gives the present one."""

from __future__ import annotations

import pytest

from selftask.config.load import load_config
from selftask.config.renamed_keys import FORMER_NAMES
from selftask.errors import ConfigError

EVAL = "eval.transforms.0"
CASES = {
    "shrink": ("simclr", "data.shrink=64", "data.max_side"),
    "max_bad": ("simclr", "data.max_bad=0.1", "data.max_unreadable"),
    "copy_to": ("simclr", "data.copy_to=ram", "data.stage_to"),
    "engine": ("simclr", "data.engine=device", "data.augment_on"),
    "timeout_s": ("simclr", "launch.timeout_s=60", "launch.hang_timeout_s"),
    "compress": ("simclr", "parallel.compress=bf16", "parallel.grad_compression"),
    "coverage": ("simclr", "init.coverage=0.5", "init.min_matched"),
    "lr_scale": ("simclr", "optimizer.lr_scale=linear", "optimizer.lr"),
    "end_weight_decay": ("dino", "optimizer.end_weight_decay=0.4", "optimizer.weight_decay"),
    "end_momentum": ("byol", "method.end_momentum=1.0", "method.momentum"),
    "start_momentum": ("data2vec", "method.start_momentum=0.9", "method.momentum"),
    "momentum_warmup": ("data2vec", "method.momentum_warmup=9", "method.momentum"),
    "start_teacher_temperature": (
        "dino",
        "method.start_teacher_temperature=0.04",
        "method.teacher_temperature",
    ),
    "teacher_temperature_warmup": (
        "dino",
        "method.teacher_temperature_warmup=9",
        "method.teacher_temperature",
    ),
    "decay_norm_and_bias": ("simclr", "optimizer.decay_norm_and_bias=true", "optimizer.decay_1d"),
    "trust": (
        "simclr",
        "optimizer={name: lars, lr: 1, trust: 0.001}",
        "optimizer.trust_coefficient",
    ),
    "of": ("simclr", "eval.transforms=[{name: normalize, of: cifar10}]", f"{EVAL}.stats"),
    "shift": ("simclr", "eval.transforms=[{name: random_affine, shift: 0.1}]", f"{EVAL}.translate"),
    "turns": ("simclr", "eval.transforms=[{name: rotate_90, turns: [1]}]", f"{EVAL}.k"),
    "per_parameter": (
        "simclr",
        "hooks.clip_gradients={per_parameter: true}",
        "hooks.clip_gradients.mode",
    ),
    "fault": ("simclr", "hooks={fault: {at: 3}}", "fault_injection"),
    "dim": ("simclr", "method.dim=64", "method.out_dim"),
    "hidden": ("simclr", "method.hidden=64", "method.hidden_dim"),
    "num_prototypes": ("dino", "method.num_prototypes=64", "method.out_dim"),
    "redundancy": ("barlow", "method.redundancy=0.01", "method.redundancy_weight"),
}


@pytest.mark.parametrize("former", FORMER_NAMES)
def test_a_former_name_is_refused_with_the_present_one(former: str) -> None:
    recipe, override, present = CASES[former]
    with pytest.raises(ConfigError) as refused:
        load_config(recipe, [override])
    told = [text for text in refused.value.problems if f"it is now {present!r}" in text]
    assert len(told) == 1, refused.value.problems
    assert told[0].startswith("command line: ")


def test_a_thing_of_which_only_a_field_is_given_has_the_place_of_that_field() -> None:
    with pytest.raises(
        ConfigError, match=r"^command line: hooks.fault.at=3: no hook named 'fault'"
    ):
        load_config("simclr", ["hooks.fault.at=3"])


def test_a_name_that_is_still_right_elsewhere_is_kept() -> None:
    assert load_config("swav", ["method.num_prototypes=64"]).method.args["num_prototypes"] == 64
