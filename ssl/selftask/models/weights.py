"""Weights out of a file and into a module, with nothing missing in silence.

``read_state`` makes of the files people have one flat dict of tensors, or says what a file is.
``load_weights`` matches that dict with a module and refuses less than was asked for.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from selftask.checkpoint import SEAL
from selftask.errors import UserError
from selftask.file_system import expand_user, is_file, is_folder, names_in
from selftask.logs import get_logger

log = get_logger(__name__)

State = Mapping[str, Tensor]

_WRAPPERS = ("backbone", "teacher", "student", "state_dict", "model", "network", "module")
"""Keys that hold the weights in the files of others, the one worth most first."""

_PREFIXES = (
    "module.",
    "_orig_mod.",
    "_fsdp_wrapped_module.",
    "network.",
    "teacher.",
    "student.",
    "target_encoder.",
    "encoder_q.",
    "base_encoder.",
    "model.",
    "backbone.",
    "encoder.",
)
"""What frameworks put before a backbone's own keys: DDP, torch.compile, FSDP, SSL wrappers."""

_HEADS = (
    "fc.",
    "head.",
    "heads.",
    "head_dist.",
    "classifier.",
    "projector.",
    "predictor.",
    "decoder",
    "mask_token",
)
"""What a file may hold beyond a backbone without being asked for."""

_COUNTER = "num_batches_tracked"
"""A BatchNorm counter that files from before 2018, and some of today, do not have."""


def read_state(path: str | Path) -> dict[str, Tensor]:
    """The weights in a file, as one flat dict with the keys the file has.

    Read are selftask's exports and checkpoints, .safetensors, and what torch.save made of a plain
    state dict or of one under a key such as "state_dict", "model" or "teacher". Nothing in a file
    is ever executed. Raises UserError that says what the file is if it holds no weights.
    """
    path = expand_user(path)
    refuse_sharded(path)
    if not is_file(path):
        raise UserError(f"{path}: there is no such file{_instead_of(path)}")
    if path.stat().st_size == 0:
        raise UserError(f"{path}: the file is empty (0 bytes), so writing it was cut short")
    content = _read_safetensors(path) if path.suffix == ".safetensors" else _read_torch(path)
    state = _find_state(content)
    if not state:
        keys = list(content) if isinstance(content, Mapping) else type(content).__name__
        raise UserError(f"{path}: holds no weights: no tensors by name, but {_shorten(keys)}")
    return state


def backbone_state(checkpoint: Mapping[str, Any]) -> dict[str, Tensor]:
    """The weights to keep out of a checkpoint of ours, which says where they lie.

    For some methods they are the teacher's, which is not under "model".
    """
    part, _, prefix = checkpoint["backbone"].partition(".")
    weights: dict[str, Tensor] = checkpoint[part]
    prefix += "."
    return {k.removeprefix(prefix): value for k, value in weights.items() if k.startswith(prefix)}


def refuse_sharded(path: Path) -> None:
    """Raise UserError for a sharded checkpoint, which is a folder: only a run reads it as it is."""
    if is_file(path / SEAL):
        raise UserError(
            f"{path}: is a sharded checkpoint; `selftask export {path.parent.parent}` takes the "
            "backbone out of a run's newest, and --to checkpoint makes one file of it"
        )


def load_weights(
    module: nn.Module, state: State, *, coverage: float = 1.0, what: str = "weights"
) -> None:
    """Copy ``state`` into ``module``, having removed the prefixes of wrappers from its keys.

    ``coverage`` is the least share of the module's tensors that must be found, 1.0 for all; those
    not found keep their values. What ``state`` has beyond the module must be a head. Logs how many
    tensors each top-level module got. Raises UserError with missing and unexpected keys, differing
    shapes and nearest names below that, and then has changed nothing.
    """
    match = _match(module, state)
    share = len(match.found) / max(1, match.num_wanted)
    if share < coverage or (coverage >= 1.0 and not match.is_complete):
        raise UserError(_explain(match, coverage, what))
    log.info("%s: %s", what, match.summary())
    own = module.state_dict()
    with torch.no_grad():
        for key, value in match.found.items():
            own[key].copy_(value)


@dataclass(frozen=True)
class _Match:
    """What of a state fits a module."""

    wanted: list[str]  # keys of the module
    found: dict[str, Tensor]  # by the module's keys, of the right shape
    missing: list[str]
    unexpected: list[str]  # keys of the state, prefix removed; heads left out
    misshapen: dict[str, tuple[tuple[int, ...], tuple[int, ...]]]  # key: (in the file, wanted)
    prefix: str  # removed from the state's keys

    @property
    def num_wanted(self) -> int:
        return len(self.wanted)

    @property
    def is_complete(self) -> bool:
        return not (self.missing or self.unexpected or self.misshapen)

    def summary(self) -> str:
        """``62/62 tensors (conv1 1/1, layer1 30/30)``: coverage by top-level module."""
        tops: dict[str, list[int]] = {}
        for key in self.wanted:
            count = tops.setdefault(key.partition(".")[0], [0, 0])
            count[0] += key in self.found
            count[1] += 1
        parts = ", ".join(f"{top} {found}/{wanted}" for top, (found, wanted) in tops.items())
        return f"{len(self.found)}/{self.num_wanted} tensors ({parts})"


def _match(module: nn.Module, state: State) -> _Match:
    """Try the state's keys with each chain of known prefixes removed; keep the best."""
    own = module.state_dict()
    prefix = max(_prefixes(state), key=lambda p: (_overlap(p, state, own), -len(p)))
    # A file may hold more than this backbone: only what lies under the prefix is looked at.
    inner = {key[len(prefix) :]: value for key, value in state.items() if key.startswith(prefix)}
    known = {key: value for key, value in inner.items() if key in own}
    misshapen = {
        key: (tuple(value.shape), tuple(own[key].shape))
        for key, value in known.items()
        if value.shape != own[key].shape
    }
    found = {key: value for key, value in known.items() if key not in misshapen}
    return _Match(
        wanted=[key for key in own if key in inner or not key.endswith(_COUNTER)],
        found=found,
        missing=[key for key in own if key not in inner and not key.endswith(_COUNTER)],
        unexpected=[key for key in inner if key not in own and not key.startswith(_HEADS)],
        misshapen=misshapen,
        prefix=prefix,
    )


def _overlap(prefix: str, state: State, own: State) -> int:
    return sum(key.startswith(prefix) and key[len(prefix) :] in own for key in state)


def _prefixes(state: State) -> set[str]:
    """Every chain of known prefixes that some key begins with; the empty one too."""
    chains = {""}
    for key in state:
        chain = ""
        while step := next((p for p in _PREFIXES if key.startswith(p, len(chain))), ""):
            chain += step
            chains.add(chain)
    return chains


def _explain(match: _Match, coverage: float, what: str) -> str:
    """One paragraph: what was wanted, what there was, and how the two differ."""
    lines = [f"{what}: {match.summary()}, wanted {coverage:.0%} of them"]
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
    """What torch.save wrote; tensors and plain python only."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        return _refuse_pickle(path, error)
    except MemoryError:
        raise
    except Exception as error:  # what reads pickles raises anything on a file that is none
        raise UserError(f"{path}: {_damaged(path)} ({_first_line(error)})") from error


def _refuse_pickle(path: Path, error: pickle.UnpicklingError) -> Any:
    """Tell a file with python objects in it from one that is no torch file at all."""
    text = str(error)
    if "GLOBAL" not in text and "global" not in text:
        raise UserError(f"{path}: {_damaged(path)} ({_first_line(error)})") from error
    name = text.partition("GLOBAL ")[2].split(" ")[0] or "something else than tensors"
    raise UserError(
        f"{path}: holds python objects ({name}) beside its tensors; loading those could run code, "
        f"so it is refused. If you trust the file, keep its weights only: "
        f"python -c \"import torch; c = torch.load('{path}', weights_only=False); "
        f"torch.save(c['state_dict'], 'weights.pt')\" (or whichever key holds them)"
    ) from error


def _find_state(content: Any) -> dict[str, Tensor]:
    """The flat dict of tensors in what a file held, looking under the known keys."""
    if not isinstance(content, Mapping):
        return {}
    if isinstance(content.get("backbone"), str):  # a checkpoint of ours
        return backbone_state(content)
    for key in _WRAPPERS:
        if state := _find_state(content.get(key)):
            return state
    return {str(key): value for key, value in content.items() if isinstance(value, Tensor)}


def _damaged(path: Path) -> str:
    size = path.stat().st_size
    return f"damaged or no file of weights ({size} bytes)"


def _instead_of(path: Path) -> str:
    """A hint for a path that is not a file."""
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
    """The first few of many."""
    if isinstance(items, str):
        return items
    rest = len(items) - show
    return ", ".join(items[:show]) + (f" and {rest} more" if rest > 0 else "")
