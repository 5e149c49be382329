"""Load weights into a module, from a file of any layout, and report what does not match."""

from __future__ import annotations

import fnmatch
import re
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor, nn

from selftask.errors import UserError, join_some, nearest, plural, with_noun
from selftask.logs import get_logger
from selftask.models.weights.layouts import State, grouped, place
from selftask.models.weights.positions import interpolate_positions
from selftask.models.weights.read import weights_at

log = get_logger(__name__)

_HEADS = (
    *("fc.", "head.", "heads.", "head_dist.", "classifier.", "projector.", "projection_head."),
    *("projection.", "prototypes.", "predictor.", "decoder", "mask_token", "queue", "pooler."),
)
"""Prefixes of tensors in a file that are not part of a backbone."""

_COUNTER = "num_batches_tracked"
"""A BatchNorm counter; missing in files from before 2018, some recent ones and frozen layers."""


_FLAT = (
    "the file is the shard of one rank, with FSDP's flat parameters: load a file of the whole "
    "network (DINOv2 writes eval/training_N/teacher_checkpoint.pth)"
)


def load_part(module: nn.Module, checkpoint: Mapping[str, Any], path: str) -> None:
    """Load a module's weights from a checkpoint, unless the module is on the meta device.

    Args:
        module: Module to load into; all names and shapes must match.
        checkpoint: The checkpoint.
        path: Location of the weights, see ``weights_at``.

    Raises:
        UserError: If the checkpoint lacks the first part of ``path``.
        RuntimeError: If names or shapes differ.
    """
    weights = weights_at(checkpoint, path)
    if not is_on_meta(module):
        module.load_state_dict(weights)


def is_on_meta(module: nn.Module) -> bool:
    """Return True if a module is on the meta device, as in a plan or if another rank loads it."""
    return any(parameter.is_meta for parameter in module.parameters())


def with_prefix(state: State, prefix: str, what: str) -> dict[str, Tensor]:
    """Return the tensors whose names begin with a prefix, with the prefix removed.

    Args:
        state: Result of ``read_state``.
        prefix: The prefix.
        what: Beginning of the error message, such as a config key.

    Raises:
        UserError: If there are no such tensors; the message names the nearest prefix.
    """
    matches = {key.removeprefix(prefix): v for key, v in state.items() if key.startswith(prefix)}
    if not matches:
        ends = ((key, dot.end()) for key in state for dot in re.finditer(r"\.", key))
        prefixes = list(dict.fromkeys(key[:end] for key, end in ends))
        close = get_close_matches(prefix, prefixes, n=1, cutoff=0.0)
        raise UserError(
            f"{what}: no tensor has the prefix {prefix!r}; the nearest is {close[0]!r}"
            if close
            else f"{what}: no tensor has a prefix"
        )
    return matches


def renamed(state: State, rules: Sequence[tuple[str, str]], what: str) -> dict[str, Tensor]:
    """Rename tensors by pairs of a regular expression and its replacement.

    Args:
        state: Result of ``read_state``.
        rules: Pairs, applied to all names one after another.
        what: Name of the rules in messages.

    Raises:
        UserError: If a rule matches no name, or gives two tensors the same name.
    """
    names = list(state)
    for pattern, replacement in rules:
        changes = [re.subn(pattern, replacement, name) for name in names]
        count = sum(bool(matches) for _, matches in changes)
        if not count:
            shown = join_some(names, show=3)
            raise UserError(f"{what}: {pattern!r} matches no tensor of the file: {shown}")
        log.info("%s: %r -> %r: %d %s", what, pattern, replacement, count, plural("tensor", count))
        names = [name for name, _ in changes]
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        old = [key for key, name in zip(state, names, strict=True) if name == twice[0]]
        raise UserError(f"{what}: gives {' and '.join(old[:2])} the same name {twice[0]!r}")
    return dict(zip(names, state.values(), strict=True))


def load_weights(
    module: nn.Module,
    state: State,
    *,
    min_matched: float = 1.0,
    skip: Sequence[str] = (),
    what: str = "weights",
    option: str = "",
) -> None:
    """Load ``state`` into ``module``, from a file of any layout in ``layouts``.

    The positions of a vision transformer are interpolated to the module's grid.

    Args:
        module: The backbone.
        state: Result of ``read_state``. For a module on the meta device it is only compared.
        min_matched: Minimum fraction of the module's tensors to find; the others keep their values.
            With 1.0, additional tensors of the file's network must belong to a head.
        skip: Patterns (``conv1.*``) of the module's tensors that keep their values.
        what: Name of the file in messages.
        option: Name of the option that selects a network of the file, for messages; empty if
            there is none.

    Raises:
        UserError: If too few tensors match, if several networks match, if weights in the file are
            not floating-point numbers, or if a pattern of ``skip`` matches nothing. The module is
            then unchanged. The message lists missing and unexpected keys, and different shapes.
    """
    match = _match(module, state, what, _skipped(module, skip, what))
    share = len(match.found) / max(1, match.num_wanted)
    if share < min_matched or (min_matched >= 1.0 and not match.is_complete):
        raise UserError(_explain(match, min_matched, what))
    if match.rivals:
        names = ", ".join(map(repr, (match.prefix, *match.rivals)))
        choice = f"choose one by {option}, or " if option else ""
        raise UserError(
            f"{what}: holds several networks that fit ({names}); {choice}keep one of them in a file"
        )
    tensors = module.state_dict()
    for key, value in match.found.items():
        if tensors[key].is_floating_point() and not value.is_floating_point():
            raise UserError(
                f"{what}: {key} is {str(value.dtype).removeprefix('torch.')}, and weights are "
                "floating-point numbers; quantized files cannot be loaded"
            )
    if is_on_meta(module):
        return  # the weights fit
    log.info("%s: %s", what, match.summary())
    if match.left_out:
        parts = [f"{name} ({with_noun(count, 'tensor')})" for name, count in match.left_out.items()]
        log.info("%s: left out: %s", what, join_some(parts, show=8))
    with torch.no_grad():
        for key, value in match.found.items():
            tensors[key].copy_(value)


@dataclass(frozen=True)
class _Match:
    """Result of matching a state with a module."""

    wanted: list[str]  # keys of the module
    found: dict[str, Tensor]  # by the module's keys, of the right shape
    missing: list[str]
    unexpected: list[str]  # keys of the state without prefix and heads
    misshapen: dict[str, tuple[tuple[int, ...], tuple[int, ...]]]  # key: (in the file, wanted)
    prefix: str  # removed from the state's keys
    rivals: tuple[str, ...]  # prefixes of other networks that match equally well
    left_out: dict[str, int]  # heads and other networks of the file: number of tensors

    @property
    def num_wanted(self) -> int:
        return len(self.wanted)

    @property
    def is_complete(self) -> bool:
        return not (self.missing or self.unexpected or self.misshapen)

    def summary(self) -> str:
        """Return the coverage by top-level module: ``62/62 tensors (conv1 1/1, layer1 30/30)``."""
        tops: dict[str, list[int]] = {}
        for key in self.wanted:
            count = tops.setdefault(key.partition(".")[0], [0, 0])
            count[0] += key in self.found
            count[1] += 1
        parts = ", ".join(f"{top} {matched}/{wanted}" for top, (matched, wanted) in tops.items())
        return f"{len(self.found)}/{self.num_wanted} tensors ({parts})"


def _skipped(module: nn.Module, patterns: Sequence[str], what: str) -> set[str]:
    """Return names of tensors that match a pattern; raise UserError if a pattern has no match."""
    names = list(module.state_dict())
    skipped: set[str] = set()
    for pattern in patterns:
        matches = fnmatch.filter(names, pattern)
        if not matches:
            raise UserError(
                f"{what}: skip: {pattern!r} matches no tensor of the backbone; "
                f"{nearest(pattern, names)}"
            )
        skipped.update(matches)
    if skipped:
        log.info("%s: %d tensors keep their values (%s)", what, len(skipped), ", ".join(patterns))
    return skipped


def _match(module: nn.Module, state: State, what: str, skipped: Set[str]) -> _Match:
    """Compare the module, without ``skipped`` tensors, with the best network of the file."""
    wanted = {key: value for key, value in module.state_dict().items() if key not in skipped}
    placed = place(state, wanted)
    named = {key: value for key, value in placed.inner.items() if key in wanted}
    fitting_tensors, misshapen = {}, {}
    for key, value in named.items():
        fitting: Tensor | None = value
        if value.shape != wanted[key].shape:
            fitting = interpolate_positions(module, key, value)
        if fitting is None:
            misshapen[key] = (tuple(value.shape), tuple(wanted[key].shape))
            continue
        if fitting is not value and not is_on_meta(module):
            shapes = tuple(value.shape), tuple(fitting.shape)
            log.info("%s: %s is interpolated from %s to %s", what, key, *shapes)
        fitting_tensors[key] = fitting
    counters = {key.replace("running_mean", _COUNTER) for key in named if "running_mean" in key}
    beyond = [key for key in placed.inner if key not in {*wanted, *skipped, *counters}]
    heads = [placed.prefix + key for key in beyond if key.startswith(_HEADS)]
    return _Match(
        wanted=[key for key in wanted if key in placed.inner or not key.endswith(_COUNTER)],
        found=fitting_tensors,
        missing=[key for key in wanted if key not in placed.inner and not key.endswith(_COUNTER)],
        unexpected=[key for key in beyond if not key.startswith(_HEADS)],
        misshapen=misshapen,
        prefix=placed.prefix,
        rivals=placed.rivals,
        left_out={**grouped(heads, placed.prefix), **placed.left_out},
    )


def _explain(match: _Match, min_matched: float, what: str) -> str:
    """Describe the expected tensors, the tensors found and the differences, one a line."""
    lines = [f"{what}: {match.summary()}, wanted {min_matched:.0%} of them"]
    if match.prefix:
        lines.append(f"  removed from all keys: {match.prefix!r}")
    if match.rivals:
        lines.append(f"  as many match without: {join_some([repr(p) for p in match.rivals])}")
    missing = [f"{key}{_nearest_key(key, match.unexpected)}" for key in match.missing]
    shapes = [f"{key} is {a}, wanted {b}" for key, (a, b) in match.misshapen.items()]
    for title, items in [
        ("missing", missing),
        ("unexpected", match.unexpected),
        ("of another shape", shapes),
    ]:
        if items:
            lines.append(f"  {len(items)} {title}: {join_some(items)}")
    if any(key.endswith("_flat_param") for key in match.unexpected):
        lines.append(f"  {_FLAT}")
    elif not match.found:
        lines.append("  nothing fits: these are the weights of another architecture")
    return "\n".join(lines)


def _nearest_key(key: str, keys: list[str]) -> str:
    close = get_close_matches(key, keys, n=1, cutoff=0.6)
    return f" (the file has {close[0]})" if close else ""
