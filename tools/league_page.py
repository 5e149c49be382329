"""Write the tables of docs/league.md from ``league/METHOD.json``; see tools/league.py."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from scipy.stats import spearmanr, t

from league_plan import BASELINES, LEAGUES, League, group_of, is_done, long_runs, network_of

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/league.md"
END = "<!-- end -->"
FIGURES = ("linear_top1", "knn_top1", "linear_10_labels_top1", "effective_rank", "rankme")
LABEL_FREE = (
    *("rankme", "effective_rank", "alpha", "nesum", "feature_uniformity"),
    *("lidar", "feature_alignment", "cluster_learnability", "intrinsic_dimension"),
)
ENOUGH = 10  # methods for a rank correlation
GROUPS = {
    "small_resnet": "Methods on the small ResNet",
    "vit_micro": "Methods on the ViT",
    "teacher": "Methods with a teacher, which was trained in the league",
    "labels": "With labels or captions, for reference",
}
COLUMNS = (
    *("linear", "k-NN", "10 labels", "effective rank", "RankMe", "lr", "images"),
    *("equal images: linear", "k-NN", "cost", "MB"),
)
LONG_COLUMNS = ("long runs: linear", "k-NN")


def update(folder: Path, *, check: bool, page: Path = PAGE) -> int:
    """Write the tables of all leagues; with ``check``, only return 1 if they are not up to date.

    Args:
        folder: Folder of the results.
        check: Whether to write nothing.
        page: The page, with two marks around the tables of a league.
    """
    old = new = page.read_text(encoding="utf-8")
    for name in LEAGUES:
        begin = f"<!-- begin: {name} -->\n"
        head, _, rest = new.partition(begin)
        new = (
            f"{head}{begin}{''.join(tables(name, read(folder, name)))}{END}{rest.partition(END)[2]}"
        )
    if new != old and not check:
        page.write_text(new, encoding="utf-8")
    return int(check and new != old)


def read(folder: Path, league: str) -> dict[str, dict[str, Any]]:
    """Return the entries of a league by method."""
    entries = {}
    for path in sorted(folder.glob("*.json")):
        whole = json.loads(path.read_text(encoding="utf-8"))
        if league in whole:
            entries[path.stem] = whole[league]
    return entries


def runs_of(entry: dict[str, Any], group: str) -> list[dict[str, Any]]:
    """Return the runs of a budget, or of a network for baselines."""
    seeds = entry["budget"]["seeds"]
    names = [f"{group}_{seed}" for seed in seeds]
    return [entry["runs"][name] for name in names if name in entry["runs"]]


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean, and half of its 95 % interval by Student's t; 0 for one value."""
    if len(values) < 2:
        return values[0], 0.0
    return mean(values), float(t.ppf(0.975, len(values) - 1)) * stdev(values) / len(values) ** 0.5


def shown(runs: list[dict[str, Any]], figure: str) -> str:
    """Return the mean as text, with its interval if there are several runs."""
    middle, half = interval([run[figure] for run in runs])
    digits = 3 if figure.endswith("top1") else 1
    return f"{middle:.{digits}f}" + (f" ± {half:.{digits}f}" if len(runs) > 1 else "")


def tables(league_name: str, entries: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Yield the text between the marks of a league."""
    league = LEAGUES[league_name]
    methods = league.methods
    done = {n: entry for n, entry in entries.items() if n in methods and is_done(entry, league)}
    yield f"\n{len(done)} of {len(methods)} methods were run.\n"
    for name, title in GROUPS.items():
        members = [method for method in done if group_of(method) == name]
        if members or name in league.networks:
            long = any(network_of(method) in league.long for method in members)
            columns = ("method", *COLUMNS, *(LONG_COLUMNS if long else ()))
            yield f"\n**{title}**\n\n| {' | '.join(columns)} |\n|{'---|' * len(columns)}\n"
            members.sort(key=lambda method: -_mean(done[method], "cost", "linear_top1"))
            yield from (row(league, method, done[method], long=long) for method in members)
            yield from baseline_rows(entries, name, len(columns))
    yield from below_untrained(entries, done)
    yield from correlations(league, done)
    missing = [f"`{method}`" for method in methods if method not in done]
    if missing:
        yield f"\n**Not run** in this league: {', '.join(missing)}.\n"
    yield from origins({k: v for k, v in entries.items() if k in done or k in BASELINES})
    yield "\n"


def _mean(entry: dict[str, Any], group: str, figure: str) -> float:
    return mean(run[figure] for run in runs_of(entry, group))


def row(league: League, method: str, entry: dict[str, Any], *, long: bool) -> str:
    """Return the row of a method, with the columns of long runs if ``long``."""
    cost, images = runs_of(entry, "cost"), runs_of(entry, "images")
    step = entry["runs"]["relative_cost"]
    cells = [f"`{method}`", *(shown(cost, figure) for figure in FIGURES)]
    cells += [f"{cost[0]['lr']:.2g}", f"{cost[0]['steps'] * step['batch_size'] / 1000:.0f}"]
    cells += [shown(images, "linear_top1"), shown(images, "knn_top1")]
    cells += [f"{step['relative']:.1f}", str(max(run["peak_mb"] for run in cost + images))]
    if long:
        made = long_runs(entry, league, network_of(method))
        cells += [shown(made, figure) if made else "" for figure in FIGURES[:2]]
    return f"| {' | '.join(cells)} |\n"


def baseline_rows(entries: dict[str, dict[str, Any]], network: str, columns: int) -> Iterator[str]:
    """Yield the rows of raw pixels and of the untrained network."""
    for name in BASELINES:
        runs = runs_of(entries[name], network) if name in entries else []
        if runs:
            cells = [name.replace("_", " "), *(shown(runs, figure) for figure in FIGURES)]
            yield f"| {' | '.join(cells + [''] * (columns - len(cells)))} |\n"


def below_untrained(
    entries: dict[str, dict[str, Any]], done: dict[str, dict[str, Any]]
) -> Iterator[str]:
    """Yield a line with the methods whose linear top-1 is below that of the untrained network."""
    low = []
    for method, entry in done.items():
        network = network_of(method)
        if "untrained" in entries and runs_of(entries["untrained"], network):
            start = _mean(entries["untrained"], network, "linear_top1")
            if _mean(entry, "cost", "linear_top1") < start:
                low.append(f"`{method}`")
    if low:
        yield (
            f"\nWith linear top-1 below the untrained network at this cost: {', '.join(low)}. "
            "Their settings were not changed for that.\n"
        )


def correlations(league: League, done: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Yield Spearman's correlation of label-free measures with linear top-1, over methods."""
    for network, net in league.networks.items():
        members = [entry for method, entry in done.items() if group_of(method) == network]
        if len(members) < ENOUGH:
            continue
        yield (
            f"\n**Rank correlation with linear top-1** ({net.title}, {len(members)} methods, means "
            "over seeds, equal cost)\n\n| measure | Spearman's rho |\n|---|---|\n"
        )
        linear = [_mean(entry, "cost", "linear_top1") for entry in members]
        for name in LABEL_FREE:
            values = [_mean(entry, "cost", name) for entry in members]
            yield f"| {name} | {spearmanr(values, linear).statistic:.2f} |\n"


def origins(entries: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Yield machines, commits and dates of the runs."""
    runs = [run for entry in entries.values() for run in entry["runs"].values()]
    if runs:
        machines, dates, commits = (
            sorted({run[key] for run in runs}) for key in ("machine", "date", "commit")
        )
        yield (
            f"\nMachine: {'; '.join(machines)}. Dates: {', '.join(dates)}. "
            f"Commits: {', '.join(commits)}.\n"
        )
