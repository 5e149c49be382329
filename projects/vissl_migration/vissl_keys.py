"""The keys of a VISSL config: converted, without effect here, or not converted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

# Keys without effect on training here: automatic in selftask, logging, or VISSL's launcher. A key
# includes all keys below it.
IDLE = (
    *("VERBOSE", "VERSION", "TEST_ONLY", "TEST_MODEL", "TEST_EVERY_NUM_EPOCH", "MACHINE"),
    *("MULTI_PROCESSING_METHOD", "MONITOR_PERF_STATS", "PERF_STAT_FREQUENCY", "METERS"),
    *("ROLLING_BTIME_FREQ", "engine_name", "CLEAR_CUDA_CACHE_FREQ"),
    *("DATA.TRAIN.LABEL_TYPE", "DATA.TRAIN.COLLATE_FUNCTION", "DATA.TRAIN.MMAP_MODE"),
    *("DATA.TRAIN.DROP_LAST", "DATA.TRAIN.LABEL_SOURCES", "DATA.TRAIN.LABEL_PATHS"),
    *("DATA.PIN_MEMORY", "DATA.TEST", "MODEL.SYNC_BN_CONFIG", "MODEL.AMP_PARAMS"),
    *("DISTRIBUTED", "SLURM", "TENSORBOARD_SETUP", "PROFILING", "HOOKS"),
    *("OPTIMIZER.param_schedulers.lr_head", "OPTIMIZER.larc_config", "MODEL._MODEL_INIT_SEED"),
)


class Unconvertible(Exception):
    """Raised for a value without a counterpart; the message says what to write instead."""


class Keys:
    """A VISSL config that records which keys have been read.

    Args:
        config: The content of ``config:``.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        self._config = config
        self._taken: set[str] = set()
        self._refused: dict[str, str] = {}
        self.notes: list[str] = []
        self.num_off = 0  # number of unknown keys that are switched off

    @property
    def processes(self) -> int:
        """Number of processes on each node, one per GPU."""
        count: int = self.take("DISTRIBUTED.NUM_PROC_PER_NODE", 1)
        return count

    @property
    def num_taken(self) -> int:
        return len(self._taken - self._refused.keys())

    def has(self, key: str) -> bool:
        return self._find(key) is not None

    def names(self, section: str) -> list[str]:
        """Return the keys of a section."""
        value = self._find(section)
        return list(value) if isinstance(value, dict) else []

    def take(self, key: str, default: Any) -> Any:
        """Return the value of a key and count it as converted; ``default`` if it is missing."""
        value = self._find(key)
        if value is None:
            return default
        self._taken.add(key)
        return value

    def drop(self, key: str) -> None:
        """Count everything below a key as without effect."""
        self._taken |= {path for path, _ in _leaves(self._config) if path.startswith(f"{key}.")}

    def attempt(self, key: str, make: Callable[[Any], Any]) -> Any:
        """Return ``make(value)`` for the value of a key, or None; report the key if that fails."""
        value = self.take(key, None)
        if value is None:
            return None
        try:
            return make(value)
        except Unconvertible as error:
            self.refuse(key, str(error))
        except (KeyError, IndexError, TypeError, ValueError) as error:
            self.refuse(key, f"not as VISSL writes it ({type(error).__name__}: {error})")
        return None

    def refuse(self, key: str, reason: str) -> None:
        """Report a key as not converted."""
        self._refused[key] = reason

    def not_converted(self) -> list[str]:
        """Return a line for each key that was not converted: refused with its reason, or unknown.

        Unknown keys that are switched off (False, None, -1, empty) are counted and not listed,
        since a ``train_config.yaml`` contains hundreds of them.
        """
        lines = [f"{key}: {reason}" for key, reason in self._refused.items()]
        known = (*self._taken, *self._refused, *IDLE)
        for path, value in _leaves(self._config):
            if any(path == key or path.startswith(f"{key}.") for key in known):
                continue
            if value in (False, None, -1, "", [], {}):
                self.num_off += 1
            else:
                lines.append(f"{path} = {value!r}: nothing here corresponds to it")
        return lines

    def _find(self, key: str) -> Any:
        value: Any = self._config
        for name in key.split("."):
            if not isinstance(value, dict) or name not in value:
                return None
            value = value[name]
        return value


def _leaves(section: dict[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in section.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", value
