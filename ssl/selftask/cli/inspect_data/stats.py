"""``selftask data stats``: mean and std for ``normalize``, and the sizes of the images."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

from selftask.cli.inspect_data.inspect_commands import CountDone, open_for_survey
from selftask.cli.options import take_options
from selftask.errors import UserError

if TYPE_CHECKING:
    from selftask.data.inspect.pixel_statistics import Statistics

USAGE = """\
usage: selftask data stats SOURCE [--workers N] [--max N] [--seed 0] [--json] [key=value ...]

Mean and standard deviation of the pixels of SOURCE (what data= takes) on the scale [0, 1], and the
distribution of sizes. Sums are exact: the same for any number of processes.
--max N      reads N images only, drawn without replacement by --seed
--json       prints everything as one line of JSON instead
The last line is the transform to paste under views.*.transforms; each image weighs the same in it,
as crops of one size do."""

OPTIONS = {"--workers": int, "--max": int, "--seed": int, "--json": bool}
_SAME = 5e-5  # half a unit of the last printed digit of mean and std


def main(argv: list[str]) -> int:
    """Measure the pixels and sizes of the images, and print the statistics."""
    words, options = take_options(argv, OPTIONS)
    most = options.get("--max")
    if most == 0:
        raise UserError("--max 0: must be at least 1")
    survey = open_for_survey("stats", words, options.get("--workers"), USAGE)

    from selftask.data.inspect.pixel_statistics import measure

    number = min(most or len(survey.source), len(survey.source))
    with CountDone("measured", number) as count:
        statistics = measure(
            survey.source,
            survey.num_workers,
            most=most,
            seed=options.get("--seed", 0),
            progress=count,
        )
    if options.get("--json"):
        print(json.dumps({"source": survey.name, "of": len(survey.source), **statistics.to_dict()}))
        return 0
    print(f"{'source':<13}{survey.name}")
    for line in lines_of(statistics, len(survey.source)):
        print(line)
    return 0


def lines_of(statistics: Statistics, num_images: int) -> Iterator[str]:
    """Yield the lines of the report; the last one can be pasted into a recipe.

    Args:
        statistics: The statistics.
        num_images: Number of images of the source, of which not all may have been measured.
    """
    rate = statistics.num_images / max(statistics.seconds, 1e-9)
    unreadable = f", {statistics.num_unreadable:,} unreadable" if statistics.num_unreadable else ""
    yield (
        f"{'measured':<13}{statistics.num_images:,} of {num_images:,} images{unreadable} "
        f"in {statistics.seconds:.1f} s, {rate:,.0f} images/s"
    )
    yield f"{'':<13}{'least':>8}{'5%':>8}{'25%':>8}{'median':>8}{'75%':>8}{'95%':>8}{'most':>8}"
    for name, values in statistics.quantiles().items():
        digits = 2 if "/" in name else 0
        yield f"{name:<13}" + "".join(f"{value:>8.{digits}f}" for value in values)
    mean, std = _numbers(statistics.by_image.mean), _numbers(statistics.by_image.std)
    yield f"{'mean':<13}{mean}"
    yield f"{'std':<13}{std}"
    by_image, by_pixel = (
        [*moments.mean, *moments.std] for moments in (statistics.by_image, statistics.by_pixel)
    )
    if any(abs(a - b) > _SAME for a, b in zip(by_image, by_pixel, strict=True)):
        means, stds = _numbers(statistics.by_pixel.mean), _numbers(statistics.by_pixel.std)
        yield f"{'by pixel':<13}mean {means}, std {stds} (large images weigh more)"
    if min(statistics.by_image.std) < _SAME:
        yield "(a channel is constant: std has to be above 0; put your own number there)"
    yield "put this last under views.*.transforms and eval.transforms:"
    yield f"- {{name: normalize, mean: {mean}, std: {std}}}"


def _numbers(values: list[float]) -> str:
    return f"[{', '.join(f'{value:.4f}' for value in values)}]"
