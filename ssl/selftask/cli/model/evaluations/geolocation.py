"""``selftask eval geolocation``: locate images by the coordinates of their nearest neighbors."""

from __future__ import annotations

from selftask.cli.model.evaluations.measured import print_measured
from selftask.cli.model.load_model import FROZEN, WEIGHTS
from selftask.cli.verbosity import USAGE as VERBOSITY

USAGE = f"""\
usage: selftask eval geolocation RUN_OR_MODEL coordinates=FILE.csv [data=DIR] [data.val=DIR]

Places each test image where its nearest training image is, and prints the share of images within
each distance of their true place, and the median distance, as one JSON line last. Needs no labels.
{FROZEN}
coordinates=FILE.csv  columns path,latitude,longitude (degrees) of all images; paths are relative
              to the folder of the table
data=DIR      images with known places; default: those of the run
data.val=DIR  those to place; without it each image is placed by the others
distances=[1,25,200,750,2500]  in km
k=1           number of neighbors; with several, the place is that of the neighbor with the highest
              density of the others, a sum of Gaussians of bandwidth=25 km
{WEIGHTS}
{VERBOSITY}"""


def main(argv: list[str]) -> int:
    """Evaluate, print the shares, and append them to the run's ``evaluations.jsonl``."""
    from selftask.evaluate.geolocation import GeolocationOptions, measure_geolocation

    return print_measured("geolocation", argv, USAGE, GeolocationOptions, measure_geolocation)
