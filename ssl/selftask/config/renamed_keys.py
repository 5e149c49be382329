"""Former names of config keys, for the hint in the message about an unknown key."""

from __future__ import annotations

from collections.abc import Container

FORMER_NAMES = {
    "shrink": "max_side",  # data
    "max_bad": "max_unreadable",  # data
    "copy_to": "stage_to",  # data
    "engine": "augment_on",  # data
    "timeout_s": "hang_timeout_s",  # launch
    "compress": "grad_compression",  # parallel
    "coverage": "min_matched",  # init
    "lr_scale": "lr",  # optimizer
    "end_weight_decay": "weight_decay",  # optimizer
    "end_momentum": "momentum",  # methods
    "start_momentum": "momentum",  # data2vec
    "momentum_warmup": "momentum",  # data2vec
    "start_teacher_temperature": "teacher_temperature",  # dino, dinov2
    "teacher_temperature_warmup": "teacher_temperature",  # dino, dinov2
    "decay_norm_and_bias": "decay_1d",  # optimizer
    "trust": "trust_coefficient",  # lars, larc
    "of": "stats",  # normalize
    "shift": "translate",  # random_affine
    "turns": "k",  # rotate_90
    "fault": "fault_injection",  # hooks
    "per_parameter": "mode",  # clip_gradients
    "dim": "out_dim",  # methods
    "hidden": "hidden_dim",  # methods
    "num_prototypes": "out_dim",  # dino
    "redundancy": "redundancy_weight",  # barlow
}


def present_name(former: str, known: Container[str]) -> str | None:
    """Return the present name of a renamed key, or None if it is not one of the known names."""
    name = FORMER_NAMES.get(former, "")
    return name if name in known else None
