"""Records of a run: lines of ``log.txt``, rows of ``metrics.jsonl``, events."""

from selftask.logs.lines import LOGGER, get_logger
from selftask.logs.rows import json_row, read_json, read_metrics, write_json
from selftask.logs.verbosity import DETAIL, announce

__all__ = [
    "DETAIL",
    "LOGGER",
    "announce",
    "get_logger",
    "json_row",
    "read_json",
    "read_metrics",
    "write_json",
]
