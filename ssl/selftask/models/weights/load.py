"""Load weights from a file into a module, and report missing tensors.

``read_state`` reads files of many kinds as one flat dict of tensors, or explains what a file is.
``load_weights`` matches that dict with a module and raises an error for an incomplete match.
"""

from __future__ import annotations

import fnmatch
import pickle
import re
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from selftask.checkpoint import store
from selftask.checkpoint.manifest import DamagedCheckpoint
from selftask.checkpoint.rotation import MANIFEST
from selftask.errors import UserError, nearest, plural
from selftask.files.addresses import fetch
from selftask.files.paths import is_file, is_folder, names_in
from selftask.logs import get_logger
from selftask.models.weights.foreign_pickle import read_tensors
from selftask.models.weights.layouts import State, flatten, grouped, place
from selftask.models.weights.positions import interpolate_positions

log = get_logger(__name__)

_HEADS = (
    "fc.",
    "head.",
    "heads.",
    "head_dist.",
    "classifier.",
    "projector.",
    "projection_head.",
    "projection.",
    "prototypes.",
    "predictor.",
    "decoder",
    "mask_token",
    "queue",
)
"""Parts beyond a backbone that a file may contain."""

_COUNTER = "num_batches_tracked"
"""A BatchNorm counter that is missing in files from before 2018 and in some of today."""


def read_state(path: str | Path) -> dict[str, Tensor]:
    """Return the weights in a file as one flat dict with the file's keys.

    Supported are selftask's exports and checkpoints, sharded ones too, .safetensors, and files of
    nested dicts by torch.save or pickle, whose keys are joined by dots. Nothing in a file is
    executed: objects other than tensors are left out.

    Raises:
        UserError: If the file has no weights; the message explains what it is.
    """
    path = fetch(path)
    if is_file(path / MANIFEST):
        return backbone_state(read_backbone(path))
    if not is_file(path):
        raise UserError(f"{path}: there is no such file{_instead_of(path)}")
    if path.stat().st_size == 0:
        raise UserError(f"{path}: the file is empty (0 bytes), so writing it was cut short")
    content = _read_safetensors(path) if path.suffix == ".safetensors" else _read_torch(path)
    state = _tensors(content)
    if not state:
        keys = list(content) if isinstance(content, Mapping) else type(content).__name__
        raise UserError(f"{path}: holds no weights: no tensors by name, but {_shorten(keys)}")
    return state


def backbone_state(checkpoint: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the weights to keep from a checkpoint of selftask, which names their location.

    For some methods these are the teacher's, which are not under "model".
    """
    return weights_at(checkpoint, checkpoint["backbone"])


def weights_at(checkpoint: Mapping[str, Any], place: str) -> dict[str, Tensor]:
    """Return the weights of a module in a checkpoint, such as ``method.teacher.network.head``."""
    part, _, prefix = place.partition(".")
    weights = checkpoint.get(part)
    if not isinstance(weights, Mapping):
        raise UserError(f"the checkpoint lacks {part!r}, which has the weights of {place}")
    prefix += "."
    return {k.removeprefix(prefix): value for k, value in weights.items() if k.startswith(prefix)}


def load_part(module: nn.Module, checkpoint: Mapping[str, Any], place: str) -> None:
    """Load ``weights_at(checkpoint, place)``, all of them; nothing on the meta device of a plan."""
    weights = weights_at(checkpoint, place)
    if not is_on_meta(module):
        module.load_state_dict(weights)


def is_on_meta(module: nn.Module) -> bool:
    """Return whether a module has no memory: in a plan, or as another rank has its weights."""
    return any(parameter.is_meta for parameter in module.parameters())


def of_backbone(checkpoint: Mapping[str, Any], name: str) -> bool:
    """Return whether a tensor of a checkpoint is one of ``backbone_state``; see ``store.load``."""
    return name.startswith(f"{checkpoint['backbone']}.")


def of_networks(checkpoint: Mapping[str, Any], name: str) -> bool:
    """Return whether a tensor of a checkpoint is of the network or the method."""
    return name.startswith(("model.", "method."))


def read_backbone(path: Path) -> dict[str, Any]:
    """Return the state of a checkpoint, without reading other tensors than the backbone's.

    Raises UserError if it is damaged.
    """
    read = partial(store.load, wanted=of_backbone)
    try:
        return store.load_with({"backbone": str, "clock": dict}, path, read)
    except (DamagedCheckpoint, OSError) as error:
        raise UserError(f"{path}: is damaged ({error})") from error


def with_prefix(state: State, prefix: str, what: str) -> dict[str, Tensor]:
    """Return the tensors whose names begin with ``prefix``, without it.

    Raises UserError, with the parts of the file, if there are none.
    """
    found = {key.removeprefix(prefix): v for key, v in state.items() if key.startswith(prefix)}
    if not found:
        known = list(dict.fromkeys(key[: key.rfind(".") + 1] for key in state))
        close = get_close_matches(prefix, known, n=1, cutoff=0.0)
        raise UserError(
            f"{what}: no tensor has the prefix {prefix!r}; the nearest is {close[0]!r}"
            if close
            else f"{what}: no tensor has a prefix"
        )
    return found


def renamed(state: State, rules: Sequence[tuple[str, str]], what: str) -> dict[str, Tensor]:
    """Return the tensors under new names, by pairs of a regular expression and its replacement.

    Args:
        state: Result of ``read_state``.
        rules: Applied to all names in this order, each to the results of those before it.
        what: Name of the rules in messages.

    Raises:
        UserError: For a rule that matches no name, or gives two tensors one name.
    """
    names = list(state)
    for pattern, replacement in rules:
        changes = [re.subn(pattern, replacement, name) for name in names]
        count = sum(bool(matches) for _, matches in changes)
        if not count:
            shown = _shorten(names, show=3)
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
) -> None:
    """Load ``state`` into ``module``, from a file of any layout in ``layouts``.

    The positions of a vision transformer are interpolated to the module's grid.

    Args:
        module: The backbone.
        state: Result of ``read_state``.
        min_matched: Minimum fraction of the module's tensors to find; the others keep their values.
            With 1.0, tensors of the file's network beyond the module must belong to a head.
        skip: Patterns (``conv1.*``) of the module's tensors that keep their values.
        what: Name of the file in messages.

    Raises:
        UserError: With missing and unexpected keys, differing shapes and nearest names, or if
            several networks match. The module is then unchanged.
    """
    match = _match(module, state, what, _skipped(module, skip, what))
    share = len(match.found) / max(1, match.num_wanted)
    if share < min_matched or (min_matched >= 1.0 and not match.is_complete):
        raise UserError(_explain(match, min_matched, what))
    log.info("%s: %s", what, match.summary())
    if match.left_out:
        parts = [
            f"{name} ({count} {plural('tensor', count)})" for name, count in match.left_out.items()
        ]
        log.info("%s: left out: %s", what, _shorten(parts, show=8))
    own = module.state_dict()
    with torch.no_grad():
        for key, value in match.found.items():
            own[key].copy_(value)


@dataclass(frozen=True)
class _Match:
    """Result of matching a state with a module."""

    wanted: list[str]  # keys of the module
    found: dict[str, Tensor]  # by the module's keys, of the right shape
    missing: list[str]
    unexpected: list[str]  # keys of the state without prefix and heads
    misshapen: dict[str, tuple[tuple[int, ...], tuple[int, ...]]]  # key: (in the file, wanted)
    prefix: str  # removed from the state's keys
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
        parts = ", ".join(f"{top} {found}/{wanted}" for top, (found, wanted) in tops.items())
        return f"{len(self.found)}/{self.num_wanted} tensors ({parts})"


def _skipped(module: nn.Module, patterns: Sequence[str], what: str) -> set[str]:
    """Return the names of tensors that match a pattern. Raises UserError for an idle pattern."""
    known = list(module.state_dict())
    skipped: set[str] = set()
    for pattern in patterns:
        matches = fnmatch.filter(known, pattern)
        if not matches:
            raise UserError(
                f"{what}: skip: {pattern!r} matches no tensor of the backbone; "
                f"{nearest(pattern, known)}"
            )
        skipped.update(matches)
    if skipped:
        log.info("%s: %d tensors keep their values (%s)", what, len(skipped), ", ".join(patterns))
    return skipped


def _match(module: nn.Module, state: State, what: str, skipped: Set[str]) -> _Match:
    """Compare the module, without ``skipped`` tensors, with the best network of the file."""
    own = {key: value for key, value in module.state_dict().items() if key not in skipped}
    placed = place(state, own)
    if placed.rivals:
        names = ", ".join(map(repr, (placed.prefix, *placed.rivals)))
        raise UserError(
            f"{what}: holds several networks that fit ({names}); choose one by init.prefix, or "
            "keep one of them in a file"
        )
    known = {key: value for key, value in placed.inner.items() if key in own}
    found, misshapen = {}, {}
    for key, value in known.items():
        fitting: Tensor | None = value
        if value.shape != own[key].shape:
            fitting = interpolate_positions(module, key, value)
        if fitting is None:
            misshapen[key] = (tuple(value.shape), tuple(own[key].shape))
            continue
        if fitting is not value:
            shapes = tuple(value.shape), tuple(fitting.shape)
            log.info("%s: %s is interpolated from %s to %s", what, key, *shapes)
        found[key] = fitting
    beyond = [key for key in placed.inner if key not in own and key not in skipped]
    heads = [placed.prefix + key for key in beyond if key.startswith(_HEADS)]
    return _Match(
        wanted=[key for key in own if key in placed.inner or not key.endswith(_COUNTER)],
        found=found,
        missing=[key for key in own if key not in placed.inner and not key.endswith(_COUNTER)],
        unexpected=[key for key in beyond if not key.startswith(_HEADS)],
        misshapen=misshapen,
        prefix=placed.prefix,
        left_out={**grouped(heads, placed.prefix), **placed.left_out},
    )


def _explain(match: _Match, min_matched: float, what: str) -> str:
    """Describe the expected tensors, the tensors found and the differences in one paragraph."""
    lines = [f"{what}: {match.summary()}, wanted {min_matched:.0%} of them"]
    if match.prefix:
        lines.append(f"  removed from all keys: {match.prefix!r}")
    missing = [f"{key}{_nearest_key(key, match.unexpected)}" for key in match.missing]
    shapes = [f"{key} is {a}, wanted {b}" for key, (a, b) in match.misshapen.items()]
    for title, items in [
        ("missing", missing),
        ("unexpected", match.unexpected),
        ("of another shape", shapes),
    ]:
        if items:
            lines.append(f"  {len(items)} {title}: {_shorten(items)}")
    if not match.found:
        lines.append("  nothing fits: these are the weights of another architecture")
    return "\n".join(lines)


def _nearest_key(key: str, known: list[str]) -> str:
    close = get_close_matches(key, known, n=1, cutoff=0.6)
    return f" (the file has {close[0]})" if close else ""


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        state: dict[str, Tensor] = load_file(path)
        return state
    except SafetensorError as error:
        raise UserError(f"{path}: {_damaged(path)} ({error})") from error


def _read_torch(path: Path) -> Any:
    """Read a ``torch.save`` or pickle file; tensors and plain Python objects only."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        if "global" not in str(error).lower():
            raise UserError(f"{path}: {_damaged(path)} ({_first_line(error)})") from error
    except MemoryError:
        raise
    except Exception as error:  # reading pickles raises any error for other files
        raise UserError(f"{path}: {_damaged(path)} ({_first_line(error)})") from error
    return _read_tensors(path)


def _read_tensors(path: Path) -> Any:
    """Return the tensors of a file that also contains other Python objects."""
    try:
        content, skipped = read_tensors(path)
    except MemoryError:
        raise
    except Exception as error:  # as above for damaged files
        raise UserError(f"{path}: {_damaged(path)} ({_first_line(error)})") from error
    log.info("%s: left out: python objects (%s), which are not loaded", path, _shorten(skipped))
    if not flatten(content):
        raise UserError(
            f"{path}: holds python objects ({_shorten(skipped)}), which are not loaded because "
            "that could run code, and no tensors by name; save the model's state_dict instead"
        )
    return content


def _tensors(content: Any) -> dict[str, Tensor]:
    """Return the tensors of a file's content as a flat dict."""
    if isinstance(content, Mapping) and isinstance(content.get("backbone"), str):  # one of ours
        return backbone_state(content)
    return flatten(content)


def _damaged(path: Path) -> str:
    size = path.stat().st_size
    return f"damaged or no file of weights ({size} bytes)"


def _instead_of(path: Path) -> str:
    """Return a hint for a path that is not a file."""
    if is_folder(path):
        inside = names_in(path)
        return f", it is a folder with {_shorten(inside)}"
    if not is_folder(path.parent):
        return f", nor a folder {path.parent}"
    close = get_close_matches(path.name, names_in(path.parent), n=1)
    return f"; did you mean {path.parent / close[0]}?" if close else ""


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:200] or type(error).__name__


def _shorten(items: list[str] | str, show: int = 5) -> str:
    """Join the first items and the number of the others."""
    if isinstance(items, str):
        return items
    rest = len(items) - show
    return ", ".join(items[:show]) + (f" and {rest} more" if rest > 0 else "")
