"""Head of a report, facts about the run, and links to its files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from selftask.config.values.budget import show_bytes
from selftask.errors import with_noun
from selftask.report.overview.durations import show_seconds
from selftask.report.page import Section, relative_address, render
from selftask.report.record import FILES, RunRecord
from selftask.report.record_forms import total_steps
from selftask.report.verdict import Kind, verdict_of

STATE_KINDS: dict[str, Kind] = {
    "finished": "good",
    "running": "plain",
    "interrupted": "warning",
    "requeued": "warning",
    "failed": "bad",
    "hung": "bad",
    "lost": "bad",
    "unreadable": "bad",
}
_SYMBOLS: dict[Kind, str] = {"good": "✓", "warning": "!", "bad": "✗", "plain": "·"}
MAX_CHECKPOINTS = 12  # visible rows; the others are folded


def head_html(record: RunRecord) -> str:
    """Return the heading of a run's page: name, state, verdict."""
    badge = state_badge(record.state, has_symbol=True)
    return render(
        "run.head", record.name, badge, list(_summary(record)), verdict_of(record), _SYMBOLS
    )


def state_badge(state: str, note: str = "", *, has_symbol: bool = False) -> str:
    """Return the HTML of a state as a colored word.

    Args:
        state: State of a run, such as ``running``.
        note: Text that is shown on hover.
        has_symbol: Whether a symbol precedes the word.
    """
    kind = STATE_KINDS.get(state.split(",")[0].partition(":")[0], "plain")
    return render("run.state", state, kind, note, f"{_SYMBOLS[kind]} " if has_symbol else "")


def facts_section(record: RunRecord) -> Section:
    """Return the facts section: recipe, data, length, hardware, time, versions, code."""
    items = [
        *_what(record),
        *_where(record),
        *_when(record),
        *_code(record),
        ("problems", "; ".join(record.problems)),
        ("large files", "; ".join(record.thinned)),
    ]
    return Section("What ran", render("run.facts", items, record.command), "facts")


def files_section(record: RunRecord, page: Path) -> Section:
    """Return the section with links to the files, checkpoints and exports of the run.

    Args:
        record: The run.
        page: The file that the section is written to; links are relative to it.
    """
    rows = [
        (_link(c.path, page), f"{c.step:,}", show_bytes(c.size), c.why) for c in record.checkpoints
    ]
    html = render(
        "run.files",
        [_link(record.folder / name, page) for name in FILES if (record.folder / name).exists()],
        rows[:MAX_CHECKPOINTS],
        rows[MAX_CHECKPOINTS:],
        [_link(path, page) for path in record.exports],
        [_link(p, page, "errors/") for p in sorted((record.folder / "errors").glob("*.txt"))],
    )
    return Section("Files", html, "files")


def _link(path: Path, page: Path, folder: str = "") -> tuple[str, str]:
    """Return the address of a file relative to the page, and its name."""
    return relative_address(path, page.resolve().parent), f"{folder}{path.name}"


def _summary(record: RunRecord) -> Iterable[str]:
    yield record.recipe
    total = _total_steps(record)
    steps = f"step {record.step:,}" + (f" of {total:,}" if total else "")
    yield steps if record.epoch is None else f"{steps}, epoch {record.epoch:g}"
    if record.started and record.ended:
        yield f"{record.started:%Y-%m-%d %H:%M}"
        yield show_seconds(max(0.0, (record.ended - record.started).total_seconds()))


def _total_steps(record: RunRecord) -> int | None:
    """Return the length of the run in steps, from config and last row, or None if unknown."""
    row: dict[str, Any] = next((row for row in reversed(record.rows) if row.get("epoch")), {})
    return total_steps(record.setting("train.max_steps"), record.setting("train.epochs"), row)


def _what(record: RunRecord) -> Iterable[tuple[str, str]]:
    yield "recipe", record.recipe
    yield "method", record.method
    yield "backbone", _component(record.config.get("backbone"), "model")
    yield "data", _data(record)
    yield "batch size", _number(record.setting("train.batch_size"))
    length = {"epochs": record.setting("train.epochs"), "steps": record.setting("train.max_steps")}
    yield "length", " or ".join(f"{value:,.10g} {unit}" for unit, value in length.items() if value)
    yield "optimizer", _component(record.config.get("optimizer"), "lr", "weight_decay")
    yield "precision", str(record.setting("train.precision") or "")
    yield "seed", _number(record.setting("train.seed"))


def _where(record: RunRecord) -> Iterable[tuple[str, str]]:
    machine = record.environment
    gpus = machine.get("gpus") or []
    counted = {name: gpus.count(name) for name in gpus}
    yield "GPUs", ", ".join(f"{number} x {name}" for name, number in counted.items())
    cpus, memory = machine.get("cpus"), machine.get("memory_gib")
    cpu = [str(machine.get("cpu") or "")]
    cpu += [with_noun(cpus, "core")] if cpus else []
    cpu += [f"{memory:g} GiB"] if memory else []
    yield "CPU", ", ".join(filter(None, cpu))
    yield "host", str(machine.get("host") or "")
    yield "processes", _number(_of_start(record, "world_size"))


def _when(record: RunRecord) -> Iterable[tuple[str, str]]:
    if record.started:
        yield "started", f"{record.started:%Y-%m-%d %H:%M:%S %Z}"
    if record.ended:
        yield "last change", f"{record.ended:%Y-%m-%d %H:%M:%S %Z}"
    attempts = record.num_attempts
    yield "attempts", f"{attempts}" if attempts > 1 else ""
    if record.state == "running" and (eta := record.last("eta_s")):
        yield "remaining", show_seconds(eta)


def _code(record: RunRecord) -> Iterable[tuple[str, str]]:
    environment = record.environment
    packages: Mapping[str, str] = environment.get("packages") or {}
    selftask: Mapping[str, Any] = environment.get("selftask") or {}
    yield "selftask", _with_commit(str(selftask.get("version") or ""), selftask.get("commit"))
    git: Mapping[str, Any] = environment.get("git") or {}
    if git:
        unknown = " unknown" if git.get("dirty") is None else ""
        changed = f", uncommitted changes{unknown}" if git.get("dirty") or unknown else ""
        commit = str(git.get("commit") or "")[:12]
        yield "git", f"{commit} on {git.get('branch')}{changed}"
    versions = [f"torch {packages['torch']}"] if "torch" in packages else []
    versions += [f"python {environment['python']}"] if environment.get("python") else []
    yield "versions", ", ".join(versions)


def _with_commit(version: str, commit: object) -> str:
    if not commit:
        return version
    first, dash, rest = str(commit).partition("-")
    return f"{version} ({first[:12]}{dash}{rest})"


def _component(section: object, *keys: str) -> str:
    """Return the name of a section and some of its values."""
    if not isinstance(section, dict):
        return str(section or "")
    values = [f"{key} {section[key]}" for key in keys if section.get(key) is not None]
    return ", ".join([str(section.get("name") or ""), *values])


def _data(record: RunRecord) -> str:
    section = record.config.get("data")
    if not isinstance(section, dict):
        return str(section or "")
    images = _of_start(record, "images") or section.get("path") or section.get("name")
    return str(images or "")


def _of_start(record: RunRecord, name: str) -> Any:
    """Return a value that the last attempt recorded when it started, or None."""
    starts = [event for event in record.events if event.get("event") == "start"]
    return (starts[-1].get("data") or {}).get(name) if starts else None


def _number(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else ""
