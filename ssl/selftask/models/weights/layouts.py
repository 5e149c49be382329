"""Checkpoint layouts of other frameworks: prefixes and names of backbone weights.

A file is flattened to one dict of tensors with dotted keys. Then the prefix whose removal gives the
most keys of the backbone is removed, which suffices for most frameworks. ``LAYOUTS`` defines the
exceptions: which of several networks to use, and how to rename its keys.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from selftask.models.weights.huggingface_names import with_plain_names

State = Mapping[str, Tensor]

WRAPPERS = re.compile(r"(^|(?<=\.))(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
"""Parts of keys added by torch.compile, FSDP and activation checkpointing."""


Rename = tuple[str, str | Callable[[re.Match[str]], str]]
"""A regular expression, and its replacement."""


@dataclass(frozen=True)
class Layout:
    """Layout of one framework's checkpoints."""

    writer: str
    prefix: str  # before the backbone's own keys, including keys of enclosing dicts
    network: str = ""  # part of the prefix to prefer if a file has several networks
    renames: tuple[Rename, ...] = ()  # in this order

    def rename(self, key: str) -> str:
        """Convert a key to the name in torchvision or timm."""
        for pattern, replacement in self.renames:
            key = re.sub(pattern, replacement, key)
        return key


def _stages(pattern: str, first: int) -> Rename:
    """Return the rename of a ResNet's stages to ``layer1`` and so on.

    Args:
        pattern: Regular expression with two groups: what precedes the stage, and its number.
        first: Number of the first stage in the file.
    """
    return pattern, lambda match: f"{match[1]}layer{int(match[2]) - first + 1}."


_CLASSY_REGNET: tuple[Rename, ...] = (  # Classy Vision's blocks -> names in torchvision's RegNet
    (r"(^|\.)(conv1|stem)\.stem\.", r"\1stem."),
    (r"(^|\.)res\d\.(block\d)-(\d+)\.", r"\1trunk_output.\2.\2-\3."),
    (r"(block\d-\d+)\.proj\.", r"\1.proj.0."),
    (r"(block\d-\d+)\.bn\.", r"\1.proj.1."),
    (r"\.f\.c\.weight", ".f.c.0.weight"),
    (r"\.f\.final_bn\.", ".f.c.1."),
    (r"\.f\.se\.excitation\.0\.", ".f.se.fc1."),
    (r"\.f\.se\.excitation\.2\.", ".f.se.fc2."),
)

# the inverse of MoCo's and VISSL's converters of a ResNet to detectron2
_DETECTRON2: tuple[Rename, ...] = (
    (r"(^|\.)stem\.", r"\1"),
    _stages(r"(^|\.)res([2-5])\.", 2),
    (r"conv(\d)\.norm\.", r"bn\1."),
    (r"shortcut\.norm\.", "downsample.1."),
    (r"shortcut\.", "downsample.0."),
)

_CHILDREN: tuple[Rename, ...] = (  # nn.Sequential(*list(resnet.children())[:-1])
    (r"^((?:[^.\d][^.]*\.)*)0\.(weight)$", r"\1conv1.\2"),
    (r"^((?:[^.\d][^.]*\.)*)1\.(?=\w+$)", r"\1bn1."),
    _stages(r"^((?:[^.\d][^.]*\.)*)([4-7])\.", 4),
)

_CLASSY_RESNET: tuple[Rename, ...] = (
    (r"(^|\.)initial_block\._module\.0\.", r"\1conv1."),
    (r"(^|\.)initial_block\._module\.1\.", r"\1bn1."),
    _stages(r"(^|\.)blocks\.([0-3])\.block\2-", 0),
    (r"\.convolutional_block\.0\.", ".conv1."),
    (r"\.convolutional_block\.1\.", ".bn1."),
    (r"\.convolutional_block\.3\.", ".conv2."),
    (r"\.convolutional_block\.4\.", ".bn2."),
    (r"\.convolutional_block\.6\.", ".conv3."),
)

# blobs of Detectron's ResNets: conv1_w, res_conv1_bn_s, res2_0_branch2a_w
_CAFFE2: tuple[Rename, ...] = (
    (r"_bn_(s|gamma)$", "_bn.weight"),
    (r"_bn_(b|beta)$", "_bn.bias"),
    (r"_bn_(rm|running_mean)$", "_bn.running_mean"),
    (r"_bn_(riv|running_var)$", "_bn.running_var"),
    (r"_w$", ".weight"),
    (r"_b$", ".bias"),
    (r"(^|\.)res_conv1_bn\.", r"\1bn1."),
    _stages(r"(^|\.)res([2-5])_(?=\d)", 2),
    (r"(^|\.)(layer\d\.\d+)_", r"\1\2."),
    (r"branch1_bn\.", "downsample.1."),
    (r"branch1\.", "downsample.0."),
    (r"branch2([a-c])_bn\.", lambda match: f"bn{'abc'.index(match[1]) + 1}."),
    (r"branch2([a-c])\.", lambda match: f"conv{'abc'.index(match[1]) + 1}."),
    (r"(^|\.)(fc1000|pred)\.", r"\1fc."),
)

_DINOV2: tuple[Rename, ...] = (  # Meta's vision transformer -> timm's
    (r"(^|\.)blocks\.\d+\.(?=\d+\.)", r"\1blocks."),  # with block_chunks: CHUNK.INDEX of all blocks
    (r"\.mlp\.w12\.", ".mlp.fc1."),
    (r"\.mlp\.w3\.", ".mlp.fc2."),
)

# OpenMMLab's vision transformer -> timm's
_MMPRETRAIN: tuple[Rename, ...] = (
    (r"(^|\.)patch_embed\.projection\.", r"\1patch_embed.proj."),
    (r"(^|\.)layers\.(\d+)\.ln([12])\.", r"\1blocks.\2.norm\3."),
    (r"(^|\.)layers\.(\d+)\.ffn\.layers\.0\.0\.", r"\1blocks.\2.mlp.fc1."),
    (r"(^|\.)layers\.(\d+)\.ffn\.layers\.1\.", r"\1blocks.\2.mlp.fc2."),
    (r"(^|\.)layers\.(\d+)\.attn\.", r"\1blocks.\2.attn."),
    (r"(^|\.)ln1\.", r"\1norm."),
)

_DINOV3 = (  # Meta's vision transformer -> timm's
    (r"\.ls([12])\.gamma$", r".gamma_\1"),
    (r"(^|\.)storage_tokens$", r"\1reg_token"),
    (r"\.mlp\.w1\.", ".mlp.fc1_g."),
    (r"\.mlp\.w2\.", ".mlp.fc1_x."),
    (r"\.mlp\.w3\.", ".mlp.fc2."),
)

_VISSL = "classy_state_dict.base_model.model.trunk."

LAYOUTS = (
    Layout("VISSL", f"{_VISSL}_feature_blocks.", "base_model"),
    Layout("VISSL, vision transformer", _VISSL, "base_model"),
    Layout("VISSL, RegNet", f"{_VISSL}_feature_blocks.", "base_model", _CLASSY_REGNET),
    Layout("DINO, DINOv2", "teacher.backbone.", "teacher", _DINOV2),
    Layout("DINOv3", "teacher.backbone.", "teacher", _DINOV3),
    Layout("MoCo", "state_dict.module.encoder_q.", "encoder_q"),
    Layout("MoCo v3", "state_dict.module.base_encoder.", "base_encoder"),
    Layout("BYOL", "online_encoder.net.", "online_encoder"),
    Layout("I-JEPA", "target_encoder.module.", "target_encoder"),
    Layout("SwAV, DeepCluster v2", "state_dict.module.", "state_dict"),
    Layout("MAE", "model.", "model"),
    Layout("Barlow Twins, VICReg", "model.module.backbone.", "model"),
    Layout("solo-learn, MMSelfSup", "state_dict.backbone.", "backbone"),
    Layout(
        "MMSelfSup, MMPretrain, vision transformer", "state_dict.backbone.", "backbone", _MMPRETRAIN
    ),
    Layout("lightly", "state_dict.backbone.", "backbone", _CHILDREN),
    Layout(
        "lightly-train",
        "state_dict.teacher_embedding_model.wrapped_model._model.",
        "teacher_embedding_model",
    ),
    Layout(
        "lightly-train, DINOv2 of 2025",
        "state_dict.teacher_embedding_model_wrapper._model.",
        "teacher_embedding_model_wrapper",
    ),
    Layout("detectron2", "model.backbone.bottom_up.", "bottom_up", _DETECTRON2),
    Layout("Classy Vision, RegNet", _VISSL, "base_model", _CLASSY_REGNET),
    Layout("Classy Vision, ResNet", _VISSL, "base_model", (*_CLASSY_RESNET, (r"\.bn\.", ".bn3."))),
    Layout(
        "Classy Vision, ResNet of basic blocks",
        _VISSL,
        "base_model",
        (*_CLASSY_RESNET, (r"\.bn\.", ".bn2.")),
    ),
    Layout("Caffe2, Detectron", "blobs.", "blobs", _CAFFE2),
)
"""Rows are in order of preference, for networks of a file that match equally well."""

_PLAIN = Layout("as timm or torchvision", "")


@dataclass(frozen=True)
class Placement:
    """The network of a file that matches a backbone best."""

    inner: dict[str, Tensor]  # its tensors, under the backbone's names
    prefix: str  # prefix removed from all keys
    rivals: tuple[str, ...]  # other prefixes that match equally well, with other values
    left_out: dict[str, int]  # number of tensors in other parts of the file


def flatten(content: Any) -> dict[str, Tensor]:
    """Return the tensors and numeric arrays in nested dicts, with keys joined by dots."""
    tensors: dict[str, Tensor] = {}

    def visit(value: Any, path: str) -> None:
        if isinstance(value, Tensor):
            tensors[path] = value
        elif isinstance(value, np.ndarray) and value.dtype.kind in "fiu":
            tensors[path] = torch.from_numpy(value)
        elif isinstance(value, Mapping):
            for key, item in value.items():
                visit(item, f"{path}.{key}" if path else str(key))

    visit(content, "")
    return tensors


def place(state: State, backbone: State) -> Placement:
    """Match the tensors of a file with a backbone's state dict ``backbone``.

    The renames of each of ``LAYOUTS`` are tried on all keys, then every prefix whose removal gives
    some key of the backbone. The result with the most tensors of equal name and shape is used; ties
    are resolved by the number of equal names, the order of ``LAYOUTS``, then the shorter prefix.
    """
    clean = with_statistics({WRAPPERS.sub("", key): value for key, value in state.items()})
    clean = with_registers(with_plain_names(clean, backbone), backbone)
    clean = with_masked_biases(clean, backbone)
    forms: list[tuple[tuple[int, int], dict[str, str], list[str]]] = []
    for layout in (_PLAIN, *(row for row in LAYOUTS if row.renames)):
        names = {layout.rename(key): key for key in clean}
        score, prefixes = _best_prefixes(names, clean, backbone)
        forms.append((score, names, prefixes))
        if score[0] == len(backbone):
            break
    _, names, prefixes = max(forms, key=lambda form: form[0])
    chosen, *others = sorted(prefixes, key=lambda prefix: (_rank(prefix), len(prefix), prefix))
    inner = {
        name[len(chosen) :]: clean[key] for name, key in names.items() if name.startswith(chosen)
    }
    rivals = [p for p in others if _rank(p) == _rank(chosen) and _differ(p, names, clean, inner)]
    outside = (key for name, key in names.items() if not name.startswith(chosen))
    return Placement(inner, chosen, tuple(rivals), grouped(outside, chosen))


def with_statistics(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the state of a Caffe2 file with mean 0 and variance 1 for norms without statistics.

    Caffe2's ResNets for detection have norms with only a scale and a shift (AffineChannel). The
    solver's momenta are dropped. Files without such norms are returned unchanged.
    """
    norms = {key.removesuffix("_s"): value for key, value in state.items() if key.endswith("_bn_s")}
    if not norms:
        return state
    complete = {key: value for key, value in state.items() if not key.endswith("_momentum")}
    for norm, scale in norms.items():
        if not {f"{norm}_rm", f"{norm}_running_mean"} & complete.keys():
            complete[f"{norm}_rm"] = torch.zeros_like(scale)
            complete[f"{norm}_riv"] = torch.full_like(scale, 1 - 1e-5)  # BatchNorm adds 1e-5
    return complete


def with_registers(state: dict[str, Tensor], backbone: State) -> dict[str, Tensor]:
    """Convert the registers in the state of a DINOv2 file to timm's layout.

    In DINOv2, the class token has a position and registers have none. In timm, neither has one, and
    the class token includes its position. Other files are returned unchanged.
    """
    keys = [key for key in state if key.endswith("register_tokens") and key not in backbone]
    complete = dict(state)
    for key in keys:
        part = key.removesuffix("register_tokens")
        complete[f"{part}reg_token"] = complete.pop(key)
        token, positions = (complete.get(f"{part}{name}") for name in ("cls_token", "pos_embed"))
        if token is None or positions is None or positions.ndim != 3:
            continue  # DINOv3 has RoPE
        if token.shape == positions[:, :1].shape:
            complete[f"{part}cls_token"] = token + positions[:, :1]
            complete[f"{part}pos_embed"] = positions[:, 1:]
    return complete


def with_masked_biases(state: dict[str, Tensor], backbone: State) -> dict[str, Tensor]:
    """Convert the attention biases in the state of a DINOv3 file to timm's layout.

    A DINOv3 file has one bias vector for q, k and v, and a mask that zeroes the part for k. timm
    has separate biases of q and v, or none, as in most released models, whose biases are all 0. The
    periods of RoPE and the norm of local crops are dropped. Other files are returned unchanged.
    """
    masks = [key for key in state if key.endswith(".qkv.bias_mask")]
    if not masks:
        return state
    has_biases = any(key.endswith(".q_bias") for key in backbone)
    dropped = re.compile(r"(^|\.)(rope_embed|local_cls_norm)\.")
    complete = {key: value for key, value in state.items() if not dropped.search(key)}
    for key in masks:
        mask, part = complete.pop(key).nan_to_num(), key.removesuffix("qkv.bias_mask")
        bias = complete.pop(f"{part}qkv.bias") * mask
        if has_biases or bias.any():
            complete[f"{part}q_bias"], _, complete[f"{part}v_bias"] = bias.chunk(3)
    return complete


def grouped(keys: Iterable[str], prefix: str) -> dict[str, int]:
    """Count keys by their beginning, up to the first part that differs from ``prefix``.

    With the prefix ``model.backbone.``, ``model.head.weight`` counts for ``model.head``.
    """
    beside, counts = prefix.split("."), dict[str, int]()
    for key in keys:
        parts = key.split(".")
        shared = next((i for i, (a, b) in enumerate(zip(parts, beside, strict=False)) if a != b), 0)
        group = ".".join(parts[: shared + 1])
        counts[group] = counts.get(group, 0) + 1
    return counts


def _best_prefixes(
    names: Mapping[str, str], state: State, backbone: State
) -> tuple[tuple[int, int], list[str]]:
    """Return the largest counts (equal names and shapes, equal names), and prefixes with them."""
    counts: dict[str, tuple[int, int]] = {"": (0, 0)}
    for name, key in names.items():
        parts = name.split(".")
        for start in range(len(parts)):
            rest = ".".join(parts[start:])
            if rest in backbone:
                prefix = name[: len(name) - len(rest)]
                fitting, named = counts.get(prefix, (0, 0))
                fits = state[key].shape == backbone[rest].shape
                counts[prefix] = (fitting + fits, named + 1)
    best = max(counts.values())
    return best, [prefix for prefix, count in counts.items() if count == best]


def _rank(prefix: str) -> list[int]:
    """Return the positions in LAYOUTS of rows whose network is in ``prefix``; lower is better."""
    parts = prefix.split(".")
    return [*(rank for rank, row in enumerate(LAYOUTS) if row.network in parts), len(LAYOUTS)]


def _differ(prefix: str, names: Mapping[str, str], state: State, chosen: State) -> bool:
    """Return True if the network under ``prefix`` differs in values from the chosen one."""
    other = {n[len(prefix) :]: state[key] for n, key in names.items() if n.startswith(prefix)}
    pairs = [(chosen[key], other[key]) for key in chosen if key in other]
    return not all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)
