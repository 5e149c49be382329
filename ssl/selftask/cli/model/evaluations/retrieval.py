"""``selftask eval retrieval``: find images of the same object by features of a model."""

from __future__ import annotations

from selftask.cli.model.checkpoint_model import open_named
from selftask.cli.model.evaluate_words import take_model, take_options
from selftask.cli.model.kept_results import keep
from selftask.cli.model.load_model import FROZEN, SHIPPED, WEIGHTS
from selftask.cli.options import take
from selftask.cli.verbosity import USAGE as VERBOSITY
from selftask.data.source import Source
from selftask.errors import UserError, aligned
from selftask.logs import announce, json_row

USAGE = f"""\
usage: selftask eval retrieval RUN_OR_MODEL data=DIR [truth=FILE] [key=value ...]

Describes each image, ranks the others by cosine, and prints mean average precision and precision
at K, as one JSON line last.
{FROZEN}
data=DIR      images of queries and database, with the relevant images of each query by
  (no truth)            class folders: each image is looked for among the others of all classes
  truth=gnd_x.pkl       Oxford or Paris; of the revisited sets easy, medium and hard
  truth=copydays        folders original, strong, jpegqual/3, ..., distractors
  truth=gnd_instre.mat  INSTRE
  truth=FILE.csv        a row for each query: query,positives,junk,box; names separated by `;`,
                        a box is `left top right bottom` in pixels
pool=pooled   the output of the backbone, or of its last map: mean, gem (p=3), rmac (levels=3)
side=1024     longest side in pixels; larger images are shrunk
scales=[1,0.7071,0.5]   sizes whose descriptors are averaged; default: [1]
whiten=DIR    images to learn a PCA whitening on; whiten_dim=N keeps N dimensions
crop_queries=true       queries are cut out by their box
k=[1,5,10]    the K of precision at K
{WEIGHTS}
{VERBOSITY}"""

_OWN = ("truth", "whiten")


def main(argv: list[str]) -> int:
    """Evaluate a model, print the metrics, and append those of a run to ``evaluations.jsonl``."""
    address, overrides = take_model("retrieval", argv, USAGE)
    from selftask.evaluate.retrieval.benchmark import open_benchmark
    from selftask.evaluate.retrieval.evaluation import RetrievalOptions, evaluate_retrieval

    options, words = take_options("retrieval", overrides, RetrievalOptions, _OWN)
    truth, words = take("truth", words)
    whiten, words = take("whiten", words)
    if whiten is None and options.whiten_dim is not None:
        raise UserError("whiten_dim: without whiten=DIR nothing is whitened")
    if any(word.partition("=")[0].startswith("data.val") for word in words):
        raise UserError("data.val: eval retrieval finds images of data= in data=; leave it out")
    learn = None if whiten is None else _open_images(whiten)
    frozen, address = open_named(address, ["data.val=null", "data.val_sets=null", *words])
    source = frozen.sources.train
    benchmark = open_benchmark(source, truth)
    row = evaluate_retrieval(
        frozen.backbone,
        frozen.config,
        source,
        benchmark,
        options,
        device=frozen.device,
        whiten=learn,
        tell=announce,
    )
    parts = [part for part in benchmark.parts if part]
    if parts:
        announce(_table(row, parts))
    print(json_row(row))
    keep(address, "retrieval", overrides, frozen, options, row)
    return 0


def _open_images(data: str) -> Source:
    """Return the source of images that ``data=`` would open in a config."""
    from selftask.config.compose import recipes
    from selftask.config.load import load_config
    from selftask.data.loading.open_data import open_data

    return open_data(load_config(str(recipes.folder() / SHIPPED), [f"data={data}"]).data).train


def _table(row: dict[str, float], parts: list[str]) -> str:
    """Format a table of the metrics, with a row for each part of the benchmark."""
    first = next(f"retrieval_{part}_" for part in parts if f"retrieval_{part}_map" in row)
    names = [name.removeprefix(first) for name in row if name.startswith(first)]
    rows = [("", *names)]
    for part in parts:
        cells = (row.get(f"retrieval_{part}_{name}") for name in names)
        rows.append((part, *("-" if cell is None else f"{cell:.4f}" for cell in cells)))
    return "\n".join(aligned(rows, right=range(1, len(rows[0]))))
