"""Report of ``selftask bench data``: a table of times, and advice."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from selftask.data.inspect.profile import StageTimes
from selftask.data.loading.data_stall import Cores, workers_advice
from selftask.errors import plural

FILLS_CACHE = ("read", "decode", "read+decode")  # stages that run once with data.cache=ram or disk
DOMINANT = 0.5  # fraction of a worker's time from which a stage gets advice


def as_json(found: StageTimes) -> dict[str, Any]:
    """Return the result for ``--json``."""
    return {
        "ms_per_image": {name: 1e3 * seconds for name, seconds in found.stages.items()},
        "one_process_images_per_s": 1 / found.worker_s,
        "loader_images_per_s": found.loader_images_per_s,
        "decodes_per_sample": found.decodes_per_sample,
        "images": found.num_images,
        "batch_size": found.batch_size,
        "workers": found.num_workers,
        "processes": found.processes,
        "cores": found.num_cores,
        "device": found.device,
        "augment_on": found.augment_on,
        "cache": found.cache,
        "views": [list(size) for size in found.views],
        "transforms": found.transforms,
        "advice": advice(found),
    }


def advice(found: StageTimes) -> list[str]:
    """Return at most two pieces of advice."""
    return list(_advice(found))[:2]


def _advice(found: StageTimes) -> Iterator[str]:
    if found.cache == "device":
        return  # there are no workers after the start
    if found.augment_on == "device" and found.to_device_s > found.worker_s / max(
        found.num_workers, 1
    ):
        yield (
            f"{found.device} takes {1e3 * found.to_device_s:.1f} ms to make the views of an image, "
            "longer than the workers take for the rest; try data.augment_on=cpu"
        )
    machine = Cores(found.num_cores, found.processes)
    about_workers = workers_advice(found.num_workers, machine)
    if about_workers:
        yield about_workers
    if found.decodes_per_sample > 1.5:
        yield f"an image is decoded {found.decodes_per_sample:.2f} times for its views"
    yield from _on_longest_stage(found)


def _on_longest_stage(found: StageTimes) -> Iterator[str]:
    """Yield advice on the stage that takes most of a worker's time, if one dominates."""
    *in_worker, _ = found.stages
    again = [name for name in in_worker if found.cache == "none" or name not in FILLS_CACHE]
    seconds = sum(found.stages[name] for name in again)
    stages = {name: found.stages[name] / seconds for name in again}
    name = max(stages, key=lambda stage: stages[stage])
    if stages[name] < DOMINANT:
        return
    largest = max((width * height for width, height in found.views), default=1)
    if name == "read":
        yield (
            f"{name} takes {stages[name]:.0%}: data.stage_to=FOLDER_ON_A_LOCAL_DISK, or "
            "few large files instead of many small ones, would help"
        )
    elif "decode" in name and found.image_pixels > 4 * largest:
        yield (
            f"{name} takes {stages[name]:.0%}, of images with {found.image_pixels / largest:.0f} "
            "times the pixels of the largest view: a copy of them at about twice its sides decodes "
            "in a fraction of the time"
        )
    elif "decode" in name:
        yield f"{name} takes {stages[name]:.0%}: only more workers, or data.cache=ram or disk, help"
    elif name == "augment":
        costliest = next(iter(found.transforms.items()), None)
        most = f", {costliest[0]} {costliest[1]:.0%} of that" if costliest else ""
        yield (
            f"making {len(found.views)} views takes {stages[name]:.0%}{most}: fewer or smaller "
            "views, or transforms that are drawn less often, would help"
        )
    elif name == "collate":
        yield f"putting batches together takes {stages[name]:.0%}: views of fewer pixels would help"


def table(found: StageTimes) -> Iterator[str]:
    """Yield the lines of the report, without advice."""
    views = ", ".join(f"{w}x{h}" for w, h in dict.fromkeys(found.views))
    yield (
        f"{len(found.views)} views of {views}, from images of {found.image_pixels / 1e3:,.0f} "
        f"thousand pixels (median of {found.num_images})"
    )
    yield f"{'stage':<12}{'ms/image':>10}{'images/s':>10}{'share':>8}   in one process"
    total = sum(found.stages.values())
    for name, seconds in found.stages.items():
        rate = 1 / max(seconds, 1e-9)
        yield f"{name:<12}{1e3 * seconds:>10.3f}{rate:>10,.0f}{seconds / total:>8.0%}"
    yield f"{'all':<12}{1e3 * total:>10.3f}{1 / total:>10,.0f}"
    if found.cache != "none":
        what = (
            "what comes before the last stage" if found.cache == "device" else "reading, decoding"
        )
        yield f"data.cache={found.cache}: {what} is done once, at the start"
    if found.transforms and found.augment_on == "cpu":
        shares = (f"{name} {share:.0%}" for name, share in found.transforms.items())
        yield f"augment one by one: {', '.join(shares)}"
    yield f"decodes per sample {found.decodes_per_sample:.2f}"
    workers = f"{found.num_workers} {plural('worker', found.num_workers)}"
    alone_s = found.worker_s if found.augment_on == "cpu" else total
    times = found.loader_images_per_s * alone_s
    yield (
        f"loader with {workers}, batches of {found.batch_size}, {found.num_cores} cores, to "
        f"{found.device}: {found.loader_images_per_s:,.0f} images/s, {times:.2f} times one process"
    )
