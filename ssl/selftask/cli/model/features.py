"""``selftask features``: write the features of a frozen backbone for other tools."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from selftask.cli.model.checkpoint_model import open_named
from selftask.cli.model.evaluate_words import check_words
from selftask.cli.model.load_model import FROZEN, WEIGHTS, Frozen
from selftask.cli.options import needs_first, take
from selftask.cli.verbosity import USAGE as VERBOSITY
from selftask.distributed.world import World, read_world
from selftask.errors import UserError, explained, require
from selftask.files import addresses
from selftask.files.addresses import is_remote, output_folder
from selftask.files.paths import exists, expand_user
from selftask.logs import announce

if TYPE_CHECKING:
    import numpy as np
    from torch import nn

    from selftask.data.source import Source
    from selftask.evaluate.features import Features

USAGE = f"""\
usage: selftask features RUN_OR_MODEL out=DIR|FILE.parquet [data=DIR] [key=value ...]

{FROZEN}
out=DIR       a folder for features.npy (images, features), float32; images.csv, whose rows are
              path and label of the same rows; features.json, what they were made with and the
              names of the classes (label 0 first), if the images have them
out=FILE.parquet  one table instead: path, label and feature (a list) of each image
data=DIR      the images, with or without labels; default: those the run was trained on
layers=[3,-1] hidden layers instead, each in features_layerN.npy; pool=mean|prefix|both
flip=true     means over each image and its mirror image; scales=[0.75,1]: over image sizes
clusters=K    also clusters.csv: path and cluster of each image by spherical k-means, which
              `selftask train supervised data=DIR/clusters.csv` can be trained on (ClusterFit)
rank=true     also ranking.csv: path of each image and its cosine to the nearest other one, the
              rarest image first, near copies last; rank=html: and a page with both, ranking.html
{WEIGHTS}
An image that cannot be read has no row. Ranks of torchrun share the work: the same files.
{VERBOSITY}"""

CLUSTERS, RANKING, PAGE = "clusters.csv", "ranking.csv", "ranking.html"
_TABLE = ".parquet"
_FILES = (".npy", ".npz", ".csv", ".pt", ".h5")  # not written; a folder of such a name is a mistake


def main(argv: list[str]) -> int:
    """Write the features; print the path and the numbers of images and features.

    Ranks other than 0 only compute their share.
    """
    needs_first(argv, "features needs a run or model", USAGE)
    address, overrides = argv[0], argv[1:]
    ranks, overrides = take("rank", overrides)
    if ranks not in (None, "true", "false", "html"):
        raise UserError(f"rank={ranks}: expected true, false or html")
    is_ranked = ranks in ("true", "html")
    out, clusters, overrides = _own_options(overrides)
    is_table = out.endswith(_TABLE)
    if is_table:
        require("pyarrow", "data", "parquet files", key="out")
        if clusters or is_ranked:
            raise UserError(f"out={out}: clusters and rank write into a folder; give out=DIR")
    world = read_world()
    frozen, _ = open_named(address, ["data.val=null", "data.val_sets=null", *overrides])
    facts = {
        "model": address,
        "backbone": frozen.facts,
        "data": frozen.config.data.to_dict(),
        "transforms": [transform.to_dict() for transform in frozen.config.eval.transforms],
    }
    if world.rank:
        _compute_share(frozen, world)
        return 0
    from selftask.evaluate.feature_files import write_features

    unwritten = explained(f"out={out}: the features could not be written", OSError)
    if is_table:
        with unwritten:
            num_images, width = _write_table(out, frozen, world, facts)
    else:
        with output_folder(out) as folder, unwritten:
            path = _write(partial(write_features, folder), frozen, world, facts)
            num_images, width = _mapped(path).shape
            if clusters:
                _write_clusters(folder, path, frozen.config.train.seed, clusters)
            if is_ranked:
                _write_ranking(folder, path, frozen.sources.train if ranks == "html" else None)
    print(f"{out}: {num_images:,} images, {width} features")
    return 0


def _own_options(overrides: list[str]) -> tuple[str, int, list[str]]:
    """Return ``out``, the number of clusters (0: no clustering), and the config overrides."""
    out, overrides = take("out", overrides)
    if not out:
        raise UserError("features needs out=DIR, the folder to write to")
    if out.endswith(_FILES):
        raise UserError(f"out={out}: expected a folder, or one table FILE.parquet")
    folder = [f"{out}/features.npy", f"{out}/features.json"]
    for path in [out] if out.endswith(_TABLE) else folder:
        if addresses.exists(path) if is_remote(out) else exists(expand_user(path)):
            raise UserError(f"out: {path} exists already; choose another")
    if any(text.partition("=")[0].startswith("data.val") for text in overrides):
        raise UserError("data.val: features reads data= only; run it again for these images")
    clusters, overrides = take("clusters", overrides)
    if clusters is not None and not (clusters.isdecimal() and int(clusters) > 0):
        raise UserError(f"clusters={clusters}: expected the number of clusters, such as 1000")
    evaluated = ("layers", "pool", "flip", "scales")
    check_words("features", overrides, (*evaluated, "out", "clusters", "rank"))
    overrides = [f"eval.{t}" if t.partition("=")[0] in evaluated else t for t in overrides]
    return out, int(clusters or 0), overrides


def _compute_share(frozen: Frozen, world: World) -> None:
    """Compute the features of this rank's share of the images and send them to rank 0."""
    from selftask.evaluate.on_ranks import connected

    with connected(world, frozen.backbone):
        deque(_compute(frozen)[1], maxlen=0)


def _compute(frozen: Frozen) -> tuple[nn.Module, Iterator[Features]]:
    """Return the backbone on its device, and an iterator that computes its features."""
    from selftask.evaluate.offline import iterate_source
    from selftask.evaluate.online import evaluated_model

    config, device = frozen.config, frozen.device
    backbone = evaluated_model(frozen.backbone, config.eval).to(device)
    parts = iterate_source(backbone, config, frozen.sources.train, device=device, tell=announce)
    return backbone, parts


def _write_table(out: str, frozen: Frozen, world: World, facts: dict[str, Any]) -> tuple[int, int]:
    """Write one parquet file; return the numbers of images and of features of the last layer."""
    from selftask.evaluate.feature_files import write_parquet

    parent, name = os.path.split(out)
    with output_folder(parent or ".") as folder:
        return _write(partial(write_parquet, folder / name), frozen, world, facts)


def _write(write: Callable[..., Any], frozen: Frozen, world: World, facts: dict[str, Any]) -> Any:
    """Compute and write the features batch by batch; return the result of ``write``.

    ``write`` is called with an iterable of (features of all layers, list of those of each layer),
    the source and ``facts``.
    """
    from selftask.evaluate.on_ranks import connected
    from selftask.evaluate.online import pooled_layers

    source = frozen.sources.train
    with connected(world, frozen.backbone):
        backbone, parts = _compute(frozen)
        layers = pooled_layers(backbone)
        if layers is None:
            return write(((part, [part]) for part in parts), source, facts)
        blocks = ((part, part.split(layers.widths)) for part in parts)
        return write(blocks, source, facts, layers=layers.numbers)


def _mapped(path: Path) -> np.ndarray:
    """Return the features (N, E) of a file, memory-mapped."""
    import numpy as np

    return np.load(path, mmap_mode="r")


def _write_clusters(folder: Path, path: Path, seed: int, num_clusters: int) -> None:
    """Cluster the features in ``path`` and write the cluster of each image as its label.

    Raises UserError if there are fewer images than clusters.
    """
    import numpy as np
    import torch

    from selftask.evaluate.feature_files import IMAGES, write_table
    from selftask.models.clustering import spherical_kmeans

    features = _mapped(path)
    if len(features) < num_clusters:
        raise UserError(f"clusters={num_clusters}: there are {len(features)} images; ask for fewer")
    rows = torch.from_numpy(np.array(features))
    generator = torch.Generator().manual_seed(seed)
    _, cluster = spherical_kmeans(rows, num_clusters, iterations=20, generator=generator)
    write_table(folder / CLUSTERS, folder / IMAGES, cluster.tolist())


def _write_ranking(folder: Path, path: Path, source: Source | None) -> None:
    """Write the cosine similarity of each image to its nearest other image, smallest first.

    Args:
        folder: The folder, with ``images.csv``.
        path: File of the features.
        source: The images, of which a page is also written; None for no page.

    Raises:
        UserError: If there is only one image.
    """
    from selftask.evaluate.feature_files import IMAGES, indices_of, write_ranking
    from selftask.evaluate.features import FileRows
    from selftask.evaluate.nearest import Bank

    if len(_mapped(path)) < 2:
        raise UserError("rank=true: there is one image, and no other to compare it with")
    cosines, nearest = (part.tolist() for part in Bank(FileRows.of(path)).nearest_others())
    write_ranking(folder / RANKING, folder / IMAGES, cosines)
    if source is not None:
        from selftask.report.images.copies import write_ranked

        indices = indices_of(folder / IMAGES, source)
        title = f"Near copies and outliers: {source.describe()}"
        write_ranked(folder / PAGE, title, source, indices, cosines, nearest)
