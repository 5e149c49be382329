"""``selftask model-summary``: parameters, multiply-adds, activations and memory by module."""

from __future__ import annotations

from selftask.cli.options import needs_first, take_options
from selftask.errors import UserError, aligned

USAGE = """\
usage: selftask model-summary RECIPE [key=value ...] [--depth N] [--size N] [--channels N]

Prints what each module of the backbone costs for one image: parameters, multiply-adds (papers often
call them FLOPs), elements of activations, and memory kept for the backward pass in float32.

--depth N      levels of modules below the backbone (2)
--size N       height and width of the image in pixels (that of the recipe's first view)
--channels N   of the image (3)"""
KNOWN: dict[str, type] = {"--depth": int, "--size": int, "--channels": int}


def main(argv: list[str]) -> int:
    """Print the costs of each module of a recipe's backbone for one image."""
    words, options = take_options(argv, KNOWN)
    needs_first(words, "model-summary needs a RECIPE", USAGE)
    from selftask.config.checks.grid import output_side
    from selftask.config.load import load_config

    config = load_config(words[0], words[1:])
    side = options.get("--size") or output_side(next(iter(config.views.values())).transforms)
    if not side:
        raise UserError("the views have the size of the images; give one: --size 224")
    from selftask.models.build import build_backbone
    from selftask.models.summary import module_costs

    channels = options.get("--channels", 3)
    backbone = build_backbone(config.backbone, channels)
    costs = module_costs(backbone, side, channels, depth=options.get("--depth", 2))
    rows = [("module", "class", "parameters", "multiply-adds", "activations", "memory (KiB)")]
    rows += [
        (
            cost.name or "(all)",
            cost.kind,
            f"{cost.parameters:,}",
            f"{cost.macs:,}",
            f"{cost.activations:,}",
            f"{cost.saved_bytes / 1024:,.1f}",
        )
        for cost in costs
    ]
    print(f"{words[0]}: one image of {channels} x {side} x {side}")
    print("\n".join(aligned(rows, right=range(2, 6))))
    return 0
