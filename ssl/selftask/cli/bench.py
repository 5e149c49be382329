"""``selftask bench``: measure the speed of data loading on this machine, and give advice."""

from __future__ import annotations

import json
from dataclasses import replace

from selftask.cli.options import needs_first, take_options
from selftask.errors import UserError, check_known

USAGE = """\
usage: selftask bench data RECIPE [--seconds 3] [--json] [key=value ...]

Measures what it takes to make batches for RECIPE: each stage (read, decode, augment, collate, to
device) alone in one process for about so many seconds, then the loader with data.num_workers; and
says what to change. Nothing is trained. With several processes on a node (launch.processes), the
loader of one of them is measured.
--json       prints everything as one line of JSON instead
The last line begins with BENCH."""

OPTIONS = {"--seconds": int, "--json": bool}
BENCHMARKS = ("data",)


def main(argv: list[str]) -> int:
    """Measure the speed of data loading; print the results with advice, or as JSON."""
    words, options = take_options(argv, OPTIONS)
    named = words[0] if words else ""
    check_known(named, BENCHMARKS, f"there is no benchmark {named!r}")
    needs_first(words[1:], "bench data needs a RECIPE", USAGE)
    seconds = options.get("--seconds", 3)
    if seconds == 0:
        raise UserError("--seconds 0: must be at least 1")

    from selftask.config.load import load_config
    from selftask.data.loading.open_data import copy_data, open_data

    config = load_config(words[1], words[2:])
    sources = copy_data(open_data(replace(config.data, val=None)), config.data.stage_to)

    from selftask.data.inspect.profile import measure
    from selftask.data.inspect.profile_report import advice, as_json, table
    from selftask.distributed.device import keep_freed_memory, pick_device
    from selftask.distributed.world import World
    from selftask.task.numerics import num_threads

    device = pick_device(config.train.device, World())
    keep_freed_memory(device)
    threads = num_threads(config, World(local_size=config.launch.processes))
    profile = measure(config, sources, device, seconds, threads)
    if options.get("--json"):
        print(json.dumps({"recipe": words[1], **as_json(profile)}))
        return 0
    print(f"{words[1]}: {len(sources.train):,} images")
    for line in table(profile):
        print(line)
    for sentence in advice(profile):
        print(f"advice: {sentence}")
    rate, workers = profile.loader_images_per_s, profile.num_workers
    print(f"BENCH data: {rate:,.0f} images/s with data.num_workers={workers}")
    return 0
