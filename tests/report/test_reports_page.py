"""The commands of docs/reports.md, as typed, in a folder with runs."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from page_blocks import blocks
from run_folders import write_run
from selftask.cli.main import main
from selftask.report.watch import server

COMMANDS = [words for block in blocks("reports") for words in block.commands]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("mine", "other", "sweep/lr_0.1", "sweep/lr_0.3"):
        lr = float(name.partition("_")[2] or 0.2)
        folder = write_run(tmp_path / "runs" / name, knn=lr, config={"optimizer": {"lr": lr}})
        rows = (folder / "metrics.jsonl").read_text().replace('"lr"', '"emb_std": 0.5, "lr"')
        (folder / "metrics.jsonl").write_text(rows)
    write_run(tmp_path / "runs/bad", "failed", knn=None)
    return tmp_path


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_commands_run(
    words: list[str],
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Those that watch serve until Ctrl-C; images are left out: these runs have no weights."""

    def interrupted(self: server.Server, poll_interval: float) -> None:
        assert threading.current_thread() is threading.main_thread()
        raise KeyboardInterrupt

    monkeypatch.setattr(server.Server, "serve_forever", interrupted)
    one_run = words[:2] == ["report", "runs/mine"] and "runs/other" not in words
    assert main([*words, *(["images=false"] if one_run else [])]) == 0
    printed = capsys.readouterr().out
    if words[0] == "report":
        assert Path(printed.splitlines()[-1]).is_file()
    elif "--json" in words:
        assert any("emb_std" in run["values"] for run in json.loads(printed))
    elif words[0] == "runs":
        assert "1 failed" in printed or "2 finished" in printed
    else:
        assert "http://127.0.0.1:" in printed and "stopped watching" in printed
