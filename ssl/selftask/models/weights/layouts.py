"""Checkpoint layouts of other frameworks: prefixes and names of backbone weights.

A file is flattened to one dict of tensors with dotted keys. Whatever single prefix turns most of
those keys into a backbone's own is removed, so that most frameworks need nothing here. ``LAYOUTS``
says the rest: which network to take from a file that holds several, and other names for its parts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

State = Mapping[str, Tensor]

_WRAPPERS = re.compile(r"(^|(?<=\.))(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
"""What torch.compile, FSDP and activation checkpointing put into keys, anywhere."""


@dataclass(frozen=True)
class Layout:
    """Layout of one framework's checkpoints."""

    writer: str
    prefix: str  # before the backbone's own keys, with the keys of the dicts around them
    network: str = ""  # the part of the prefix to look for if a file holds several networks
    renames: tuple[tuple[str, str], ...] = ()  # (regular expression, replacement), in this order

    def rename(self, key: str) -> str:
        """Return the key under torchvision's or timm's name."""
        for pattern, replacement in self.renames:
            key = re.sub(pattern, replacement, key)
        return key


_CLASSY_REGNET = (  # Classy Vision's blocks as torchvision's RegNet calls them
    (r"(^|\.)conv1\.stem\.", r"\1stem."),
    (r"(^|\.)res\d\.(block\d)-(\d+)\.", r"\1trunk_output.\2.\2-\3."),
    (r"(block\d-\d+)\.proj\.", r"\1.proj.0."),
    (r"(block\d-\d+)\.bn\.", r"\1.proj.1."),
    (r"\.f\.c\.weight", ".f.c.0.weight"),
    (r"\.f\.final_bn\.", ".f.c.1."),
    (r"\.f\.se\.excitation\.0\.", ".f.se.fc1."),
    (r"\.f\.se\.excitation\.2\.", ".f.se.fc2."),
)

_DETECTRON2 = (  # as MoCo's and VISSL's converters to detectron2 name a ResNet, turned round
    (r"(^|\.)stem\.", r"\1"),
    (r"(^|\.)res2\.", r"\1layer1."),
    (r"(^|\.)res3\.", r"\1layer2."),
    (r"(^|\.)res4\.", r"\1layer3."),
    (r"(^|\.)res5\.", r"\1layer4."),
    (r"conv(\d)\.norm\.", r"bn\1."),
    (r"shortcut\.norm\.", "downsample.1."),
    (r"shortcut\.", "downsample.0."),
)

_CHILDREN = (  # nn.Sequential(*list(resnet.children())[:-1])
    (r"^((?:[^.\d][^.]*\.)*)0\.(weight)$", r"\1conv1.\2"),
    (r"^((?:[^.\d][^.]*\.)*)1\.(?=\w+$)", r"\1bn1."),
    (r"^((?:[^.\d][^.]*\.)*)4\.", r"\1layer1."),
    (r"^((?:[^.\d][^.]*\.)*)5\.", r"\1layer2."),
    (r"^((?:[^.\d][^.]*\.)*)6\.", r"\1layer3."),
    (r"^((?:[^.\d][^.]*\.)*)7\.", r"\1layer4."),
)

_VISSL = "classy_state_dict.base_model.model.trunk."

LAYOUTS = (
    Layout("VISSL", f"{_VISSL}_feature_blocks.", "base_model"),
    Layout("VISSL, vision transformer", _VISSL, "base_model"),
    Layout("VISSL, RegNet", f"{_VISSL}_feature_blocks.", "base_model", _CLASSY_REGNET),
    Layout("DINO, DINOv2", "teacher.backbone.", "teacher"),
    Layout("MoCo", "state_dict.module.encoder_q.", "encoder_q"),
    Layout("MoCo v3", "state_dict.module.base_encoder.", "base_encoder"),
    Layout("BYOL", "online_encoder.net.", "online_encoder"),
    Layout("I-JEPA", "target_encoder.module.", "target_encoder"),
    Layout("SwAV, DeepCluster v2", "state_dict.module.", "state_dict"),
    Layout("MAE", "model.", "model"),
    Layout("Barlow Twins, VICReg", "model.module.backbone.", "model"),
    Layout("solo-learn, MMSelfSup", "state_dict.backbone.", "backbone"),
    Layout("lightly", "state_dict.backbone.", "backbone", _CHILDREN),
    Layout("detectron2", "model.backbone.bottom_up.", "bottom_up", _DETECTRON2),
)
"""Rows above win over those below if networks of a file fit equally well."""

_PLAIN = Layout("as timm or torchvision", "")


@dataclass(frozen=True)
class Placement:
    """The network of a file that fits a backbone best."""

    inner: dict[str, Tensor]  # its tensors, under names as the backbone has them
    prefix: str  # that all of its keys had
    rivals: tuple[str, ...]  # other prefixes that fit as well, with other values
    left_out: dict[str, int]  # other parts of the file: number of tensors


def flatten(content: Any) -> dict[str, Tensor]:
    """The tensors and arrays in nested dicts, by their keys joined with dots."""
    found: dict[str, Tensor] = {}

    def visit(value: Any, path: str) -> None:
        if isinstance(value, Tensor):
            found[path] = value
        elif isinstance(value, np.ndarray) and value.dtype.kind in "fiu":
            found[path] = torch.from_numpy(value)
        elif isinstance(value, Mapping):
            for key, item in value.items():
                visit(item, f"{path}.{key}" if path else str(key))

    visit(content, "")
    return found


def place(state: State, own: State) -> Placement:
    """Match the tensors of a file to a backbone with state dict ``own``.

    Each of ``LAYOUTS``' renames is tried on all keys, then every prefix that leaves some key as the
    backbone has it. Most tensors of the right name and shape win, then the order of ``LAYOUTS``,
    then the shorter prefix.
    """
    clean = {_WRAPPERS.sub("", key): value for key, value in state.items()}
    forms: list[tuple[tuple[int, int], dict[str, str], list[str]]] = []
    for layout in (_PLAIN, *(row for row in LAYOUTS if row.renames)):
        names = {layout.rename(key): key for key in clean}
        score, prefixes = _best_prefixes(names, clean, own)
        forms.append((score, names, prefixes))
        if score[0] == len(own):
            break
    _, names, prefixes = max(forms, key=lambda form: form[0])
    chosen, *others = sorted(prefixes, key=lambda prefix: (_rank(prefix), len(prefix), prefix))
    inner = {
        name[len(chosen) :]: clean[key] for name, key in names.items() if name.startswith(chosen)
    }
    rivals = [p for p in others if _rank(p) == _rank(chosen) and _differ(p, names, clean, inner)]
    outside = (key for name, key in names.items() if not name.startswith(chosen))
    return Placement(inner, chosen, tuple(rivals), grouped(outside, chosen))


def grouped(keys: Iterable[str], prefix: str) -> dict[str, int]:
    """Keys counted by the first of their parts in which they differ from ``prefix``."""
    beside, counts = prefix.split("."), dict[str, int]()
    for key in keys:
        parts = key.split(".")
        shared = next((i for i, (a, b) in enumerate(zip(parts, beside, strict=False)) if a != b), 0)
        group = ".".join(parts[: shared + 1])
        counts[group] = counts.get(group, 0) + 1
    return counts


def _best_prefixes(
    names: Mapping[str, str], state: State, own: State
) -> tuple[tuple[int, int], list[str]]:
    """Return the prefixes whose removal matches the most keys, and the number of fits."""
    counts: dict[str, tuple[int, int]] = {"": (0, 0)}
    for name, key in names.items():
        parts = name.split(".")
        for start in range(len(parts)):
            rest = ".".join(parts[start:])
            if rest in own:
                prefix = name[: len(name) - len(rest)]
                fitting, found = counts.get(prefix, (0, 0))
                fits = state[key].shape == own[rest].shape
                counts[prefix] = (fitting + fits, found + 1)
    best = max(counts.values())
    return best, [prefix for prefix, count in counts.items() if count == best]


def _rank(prefix: str) -> list[int]:
    """BatchBuffer in LAYOUTS of the rows whose network a prefix names: less is better."""
    parts = prefix.split(".")
    return [*(rank for rank, row in enumerate(LAYOUTS) if row.network in parts), len(LAYOUTS)]


def _differ(prefix: str, names: Mapping[str, str], state: State, chosen: State) -> bool:
    """Return whether the network under ``prefix`` differs in values from the chosen one."""
    other = {n[len(prefix) :]: state[key] for n, key in names.items() if n.startswith(prefix)}
    pairs = [(chosen[key], other[key]) for key in chosen if key in other]
    return not all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)
