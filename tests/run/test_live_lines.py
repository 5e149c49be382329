"""Lines of the log while a live line is drawn: each is printed once, whatever happens next."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from selftask import logs
from selftask.logs import stages
from selftask.logs.lines import start_log, stop_log

SCRIPT = """
import os, sys
from pathlib import Path
from selftask import logs
from selftask.logs import stages
from selftask.logs.lines import flush_lines, start_log

log = logs.get_logger("selftask_live")  # outside selftask, whatever its name begins with
stages.REFRESHES_PER_S = 0.01  # the thread does not draw within this test
start_log(Path(sys.argv[0]).parent, rank=0)
line = stages.Stage("scan", 10)
line.draw()
log.info("before the end of %s", sys.argv[1])
{end}
"""
ENDS = {
    "close": "line.close()",
    "flush": "flush_lines(); os._exit(0)",
    "fork": """
child = os.fork()
if child == 0:
    log.info("printed by the child")
    line.close()
    os._exit(0)
os.waitpid(child, 0)
line.close()
""",
    "exception": "raise KeyError",
}


@pytest.mark.parametrize("end", ENDS)
def test_every_line_is_printed_once(end: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(end=ENDS[end]))
    ours, theirs = pty.openpty()
    command = [sys.executable, str(script), end]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    process = subprocess.Popen(command, stdout=theirs, stderr=subprocess.PIPE, env=environment)
    os.close(theirs)
    shown = _read(ours)
    process.communicate()
    assert "scan" in shown, "the live line was not drawn"
    assert shown.count(f"before the end of {end}") == 1
    assert shown.count("printed by the child") == (end == "fork")


def _read(terminal: int) -> str:
    """Return all that is written to a pseudo-terminal, until its last writer has ended."""
    text = b""
    try:
        while block := os.read(terminal, 4096):
            text += block
    except OSError:  # Linux: the other side is closed
        pass
    os.close(terminal)
    return text.decode()


def test_lines_do_not_wait_without_a_live_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start_log(tmp_path, rank=0)
    with stages.stage("scan", at_once=True):  # stdout is no terminal
        logs.get_logger("live").info("at once")
        assert "at once" in capsys.readouterr().out
    stop_log()
