"""Report of ``selftask bench data``: a table of times, and advice."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from selftask.data.inspect.profile import StageTimes
from selftask.data.loading.data_stall import Cores, workers_advice
from selftask.errors import with_noun

FILLS_CACHE = ("read", "decode", "read+decode")  # stages that run once with data.cache=ram or disk
DOMINANT = 0.5  # a stage gets advice if it takes at least this fraction of a worker's time


def as_json(times: StageTimes) -> dict[str, Any]:
    """Return the report as plain values, for ``--json``."""
    return {
        "ms_per_image": {name: 1e3 * seconds for name, seconds in times.stages.items()},
        "one_process_images_per_s": 1 / times.worker_s,
        "loader_images_per_s": times.loader_images_per_s,
        "decodes_per_sample": times.decodes_per_sample,
        "images": times.num_images,
        "batch_size": times.batch_size,
        "workers": times.num_workers,
        "processes": times.processes,
        "cores": times.num_cores,
        "device": times.device,
        "augment_on": times.augment_on,
        "cache": times.cache,
        "views": [list(size) for size in times.views],
        "transforms": times.transforms,
        "advice": advice(times),
    }


def advice(times: StageTimes) -> list[str]:
    """Return at most two sentences of advice on the config; there may be none."""
    return list(_advice(times))[:2]


def _advice(times: StageTimes) -> Iterator[str]:
    if times.cache == "device":
        return  # there are no workers after the start
    if times.augment_on == "device" and times.to_device_s > times.worker_s / max(
        times.num_workers, 1
    ):
        yield (
            f"{times.device} takes {1e3 * times.to_device_s:.1f} ms to make the views of an image, "
            "longer than the workers take for the rest; try data.augment_on=cpu"
        )
    machine = Cores(times.num_cores, times.processes)
    about_workers = workers_advice(times.num_workers, machine)
    if about_workers:
        yield about_workers
    if times.decodes_per_sample > 1.5:
        yield f"an image is decoded {times.decodes_per_sample:.2f} times for its views"
    yield from _on_longest_stage(times)


def _on_longest_stage(times: StageTimes) -> Iterator[str]:
    """Yield advice on the stage that takes most of a worker's time, if one dominates."""
    *in_worker, _ = times.stages
    again = [name for name in in_worker if times.cache == "none" or name not in FILLS_CACHE]
    seconds = sum(times.stages[name] for name in again)
    stages = {name: times.stages[name] / seconds for name in again}
    name = max(stages, key=lambda stage: stages[stage])
    if stages[name] < DOMINANT:
        return
    largest = max((width * height for width, height in times.views), default=1)
    if name == "read":
        yield (
            f"{name} takes {stages[name]:.0%}: data.stage_to=FOLDER_ON_A_LOCAL_DISK, or "
            "few large files instead of many small ones, would help"
        )
    elif "decode" in name and times.image_pixels > 4 * largest:
        yield (
            f"{name} takes {stages[name]:.0%}, of images with {times.image_pixels / largest:.0f} "
            "times the pixels of the largest view: a copy of them at about twice its sides decodes "
            "in a fraction of the time"
        )
    elif "decode" in name:
        yield f"{name} takes {stages[name]:.0%}: only more workers, or data.cache=ram or disk, help"
    elif name == "augment":
        costliest = next(iter(times.transforms.items()), None)
        most = f", {costliest[0]} {costliest[1]:.0%} of that" if costliest else ""
        yield (
            f"making {len(times.views)} views takes {stages[name]:.0%}{most}: fewer or smaller "
            "views, or transforms that are drawn less often, would help"
        )
    elif name == "collate":
        yield f"putting batches together takes {stages[name]:.0%}: views of fewer pixels would help"


def table(result: StageTimes) -> Iterator[str]:
    """Yield the lines of the report, without advice."""
    views = ", ".join(f"{w}x{h}" for w, h in dict.fromkeys(result.views))
    yield (
        f"{len(result.views)} views of {views}, from images of {result.image_pixels / 1e3:,.0f} "
        f"thousand pixels (median of {result.num_images})"
    )
    yield f"{'stage':<12}{'ms/image':>10}{'images/s':>10}{'share':>8}   in one process"
    total = sum(result.stages.values())
    for name, seconds in result.stages.items():
        rate = 1 / max(seconds, 1e-9)
        yield f"{name:<12}{1e3 * seconds:>10.3f}{rate:>10,.0f}{seconds / total:>8.0%}"
    yield f"{'all':<12}{1e3 * total:>10.3f}{1 / total:>10,.0f}"
    if result.cache != "none":
        stages = (
            "what comes before the last stage" if result.cache == "device" else "reading, decoding"
        )
        yield f"data.cache={result.cache}: {stages} is done once, at the start"
    if result.transforms and result.augment_on == "cpu":
        shares = (f"{name} {share:.0%}" for name, share in result.transforms.items())
        yield f"augment one by one: {', '.join(shares)}"
    yield f"decodes per sample {result.decodes_per_sample:.2f}"
    workers = with_noun(result.num_workers, "worker")
    alone_s = result.worker_s if result.augment_on == "cpu" else total
    times = result.loader_images_per_s * alone_s
    yield (
        f"loader with {workers}, batches of {result.batch_size}, {result.num_cores} cores, to "
        f"{result.device}: {result.loader_images_per_s:,.0f} images/s, "
        f"{times:.2f} times one process"
    )
