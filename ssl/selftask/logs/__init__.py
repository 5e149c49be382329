"""Records of a run: lines of ``log.txt``, rows of ``metrics.jsonl``, events."""

from selftask.logs.lines import (
    LOGGER,
    add_line,
    draw_over,
    get_logger,
    info_on_stderr,
    lasting_output,
    log_result,
    log_summary,
    show_root_lines_of,
    start_log,
    stop_log,
)
from selftask.logs.rows import (
    MetricsFile,
    format_row,
    json_row,
    read_json,
    read_metrics,
    utc_now,
    write_json,
)
from selftask.logs.verbosity import DETAIL, announce

__all__ = [
    "DETAIL",
    "LOGGER",
    "MetricsFile",
    "add_line",
    "announce",
    "draw_over",
    "format_row",
    "get_logger",
    "info_on_stderr",
    "json_row",
    "lasting_output",
    "log_result",
    "log_summary",
    "read_json",
    "read_metrics",
    "show_root_lines_of",
    "start_log",
    "stop_log",
    "utc_now",
    "write_json",
]
