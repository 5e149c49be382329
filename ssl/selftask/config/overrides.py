"""``key=value`` of the command line, in Hydra's grammar; keys need no ``+``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from selftask.config.layers import Key, Layer, Layers
from selftask.config.shorthand import expand
from selftask.errors import nearest


@dataclass(frozen=True)
class Override:
    """One parsed ``key=value`` or ``~key``."""

    text: str
    key: Key
    value: Any = None
    delete: bool = False

    @property
    def place(self) -> str:
        """How messages refer to it."""
        return f"command line: {self.text}"


def parse_overrides(texts: list[str]) -> tuple[list[Override], list[str]]:
    """The overrides, short forms written out, and what is wrong with those that are none."""
    parsed, problems = [], []
    parser = OverridesParser.create()
    for text in texts:
        place = f"command line: {text}"
        if text.startswith("-"):
            problems.append(f"{place}: there are no options; settings are written key=value")
            continue
        if "=" not in text and not text.startswith("~"):
            problems.append(f"{place}: expected key=value")
            continue
        try:
            override = parser.parse_override(text)
            value = override.value()
        except (HydraException, OmegaConfBaseException) as error:
            reason = str(error).strip().splitlines()[0]
            hint = "put a value with special characters in quotes inside quotes: 'key=\"value\"'"
            problems.append(f"{place}: {reason}; {hint}")
            continue
        if override.is_sweep_override():
            problems.append(
                f"{place}: several values, where one is wanted; a list is written key=[a,b], "
                "a text with a comma 'key=\"a,b\"'"
            )
            continue
        key = tuple(override.key_or_group.replace("[", ".").replace("]", "").split("."))
        if override.is_delete():
            parsed.append(Override(text, key, delete=True))
        else:
            parsed.append(Override(text, key, expand(_plain(value), key)))
    return parsed, problems


def apply_overrides(config: DictConfig, layers: Layers, overrides: list[Override]) -> list[str]:
    """Merge them into ``config`` and add them to ``layers`` as the last one; returns problems."""
    problems = []
    layer = Layer({})
    for override in overrides:
        problem = (_delete if override.delete else _set)(config, override)
        if problem:
            problems.append(problem)
        elif override.delete:
            for below in [*layers, layer]:
                below.drop(override.key)
        else:
            layer.record(override.key, override.value, override.place)
    layers.append(layer)
    return problems


def _set(config: DictConfig, override: Override) -> str | None:
    try:
        OmegaConf.update(config, ".".join(override.key), override.value, merge=True, force_add=True)
    except (OmegaConfBaseException, IndexError, TypeError, ValueError) as error:
        return f"{override.place}: cannot be set: {str(error).splitlines()[0]}"
    return None


def _delete(config: DictConfig, override: Override) -> str | None:
    parent, name = ".".join(override.key[:-1]), override.key[-1]
    section = OmegaConf.select(config, parent) if parent else config
    if isinstance(section, DictConfig) and name in section:
        del section[name]
        return None
    known = [str(key) for key in section] if isinstance(section, DictConfig) else []
    wrong, hint = ".".join(override.key), nearest(name, known)
    return f"{override.place}: there is no {wrong!r} to delete; {hint}"


def _plain(value: Any) -> Any:
    """Hydra's quoted texts as texts."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value if isinstance(value, int | float | bool | None) else str(value)
