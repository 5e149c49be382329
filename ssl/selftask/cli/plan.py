"""``selftask plan``: estimate the cost of a run before it starts."""

from __future__ import annotations

import json

from selftask.cli.options import needs_first, take_options

USAGE = """\
usage: selftask plan RECIPE [key=value ...] [--measure] [--json]

Prints steps, parameters, FLOPs, memory of a rank, communication, checkpoints, time and price of a
run of this config. Nothing is allocated or trained: one step runs on torch's fake tensors.
  launch.nodes=32 launch.processes=8   plan for 256 ranks; none of them is started
  samples=1.28M                        images of the data, if they are not on this machine;
                                       also: side=224 classes=1000 channels=3
  memory=80GB                          of a rank's device: whether the run fits, or what would
  images_per_s=12k price_per_hour=2.5  throughput of all ranks, price per rank: time and price
  mtbf=30d write_speed=1GB             time between failures of a node, bytes written a second:
                                       how often to save checkpoints
--measure  train a few steps of random images on this machine, for the throughput
--json     all figures, in bytes, seconds and FLOPs (a multiply-add is two)"""
KNOWN: dict[str, type] = {"--json": bool, "--measure": bool}


def main(argv: list[str]) -> int:
    """Print the plan of a recipe; if it does not fit into ``memory``, also changes that help."""
    words, options = take_options(argv, KNOWN)
    needs_first(words, "plan needs a RECIPE", USAGE)
    from selftask.config.load import load_config
    from selftask.plan.assumptions import take_assumptions

    overrides, assumptions = take_assumptions(words[1:])
    config = load_config(words[0], overrides)
    from selftask.plan.plan import make_plan
    from selftask.plan.remedies import remedies
    from selftask.plan.table import lines, remedy_lines

    plan = make_plan(config, assumptions, measured=bool(options.get("--measure")))
    fits = assumptions.memory is None or plan.memory.fits(assumptions.memory)
    changes = remedies(plan)
    if options.get("--json"):
        rows = [
            {"change": one.words, "effect": one.effect, "memory": one.memory.total}
            for one in changes
        ]
        print(json.dumps({**plan.to_dict(), "remedies": rows}, indent=2))
        return 0
    print("\n".join(lines(plan)))
    if not fits:
        print("\n".join(remedy_lines(changes)))
    return 0
