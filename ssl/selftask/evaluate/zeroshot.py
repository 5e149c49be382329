"""Classification of images by the names of their classes, with a text tower.

N test images, C classes, T prompts, D numbers of an embedding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selftask.config.schema import Config
from selftask.data.loading.open_data import Sources
from selftask.data.source import Source
from selftask.errors import UserError, check_known, explained, join_some
from selftask.evaluate.features import collect
from selftask.evaluate.figure import Figure
from selftask.evaluate.offline import iterate_source
from selftask.evaluate.online import evaluated_model
from selftask.evaluate.tables import read_rows
from selftask.files.paths import expand_user
from selftask.logs import get_logger
from selftask.models.eval_mode import in_eval_mode
from selftask.models.text import ImageTextModel

log = get_logger(__name__)

TEMPLATES = ("a photo of a {}.", "a photo of a big {}.", "a photo of a small {}.")
"""Prompts of section 3.1.4 of Radford et al."""
_TEXTS, _ROWS = 256, 4096  # prompts and images at once; affects memory only
_EQUAL = 1 - 1e-10  # cosine of equal texts, whose embeddings differ by rounding in float32


@dataclass(frozen=True, kw_only=True)
class ZeroshotOptions:
    """Names of the classes, and prompts."""

    classes: str | None = None
    """Table with the columns class (name of the folder, or number) and name; a class may have
    several rows. null: names of the folders, with spaces for underscores.
    """
    templates: str | None = None
    """File with one prompt per line, in which {} is replaced by the class name; null: three prompts
    of the paper.
    """
    only_test_classes: bool = False
    """Whether predicted classes are restricted to those of the test set."""


@torch.no_grad()
def measure_zeroshot(
    model: ImageTextModel,
    config: Config,
    sources: Sources,
    options: ZeroshotOptions,
    *,
    device: torch.device,
    tell: Callable[[str], None] = log.info,
) -> dict[str, float]:
    """Return the accuracy of the class whose prompts are most similar to the image.

    Radford et al., arXiv:2103.00020, section 3.1: a class is represented by the mean of the unit
    embeddings of its prompts. Similarity is the cosine, so that temperature and bias do not matter.
    Several ranks share the images.

    Args:
        model: Embeds images and texts.
        config: Config with ``eval.transforms``.
        sources: Images; those of ``data.val`` are tested or, without it, those of ``data``.
        options: Names of the classes, and prompts.
        device: Device to compute on; the model is moved to it.
        tell: Called with a line about the classes, and with warnings about unreadable images and
            classes without test images.

    Returns:
        ``zeroshot_top1``; ``zeroshot_top5`` for more than five classes;
        ``zeroshot_mean_per_class``, the mean over classes of their top-1; ``test_images``,
        ``classes`` and ``chance``.

    Raises:
        UserError: If the test images lack labels, a class lacks a name, a table or file is damaged,
            two classes have the same embedding, or ``eval.layers`` is set.
    """
    if config.eval.layers:
        raise UserError("eval.layers: zeroshot compares the output with texts; leave it out")
    test, key = (sources.train, "data") if sources.val is None else (sources.val, "data.val")
    names = read_names(options.classes, _class_names(test, sources.train))
    templates = read_templates(options.templates)
    images = nn.Sequential(evaluated_model(model.backbone, config.eval), model.head)
    parts = iterate_source(images.to(device), config, test, device=device, key=key, tell=tell)
    features = collect(parts)
    features.check_labels(key)
    chosen, targets = _candidates(names, features.targets.cpu(), options.only_test_classes, tell)
    prompts = {
        name: [t.replace("{}", n) for n in names[name] for t in templates] for name in chosen
    }
    example = repr(prompts[chosen[0]][0])
    tell(f"{len(targets)} test images; {len(chosen)} classes; prompts such as {example}")
    classes = embed_classes(model.to(device), prompts)  # (C, D)
    top = [
        (F.normalize(rows.double(), dim=1) @ classes.T).topk(min(5, len(chosen))).indices
        for rows in features.features.split(_ROWS)
    ]
    hits = torch.cat(top) == targets[:, None]  # (N, 5)
    top5 = {"zeroshot_top5": Figure.of_scores(hits.any(dim=1))} if len(chosen) > 5 else {}
    return {
        "zeroshot_top1": Figure.of_scores(hits[:, 0]),
        **top5,
        "zeroshot_mean_per_class": mean_per_class(hits[:, 0].double(), targets),
        "test_images": len(targets),
        "classes": len(chosen),
        "chance": 1 / len(chosen),
    }


def embed_classes(model: ImageTextModel, prompts: Mapping[str, Sequence[str]]) -> Tensor:
    """Return the unit embedding (C, D) of each class on the CPU, float64.

    Args:
        model: Embeds texts.
        prompts: Prompts by class.

    Raises:
        UserError: If two classes have the same embedding.
    """
    texts = [text for of_class in prompts.values() for text in of_class]
    with in_eval_mode(model):
        parts = [
            F.normalize(model.embed_texts(texts[n : n + _TEXTS]).cpu().double(), dim=1)
            for n in range(0, len(texts), _TEXTS)
        ]
    means = [p.mean(dim=0) for p in torch.cat(parts).split([*map(len, prompts.values())])]
    classes = F.normalize(torch.stack(means), dim=1)
    same = (classes @ classes.T).fill_diagonal_(0) > _EQUAL
    if same.any():
        first, second = (list(prompts)[n] for n in same.nonzero()[0])
        raise UserError(
            f"classes: the texts of {first!r} and {second!r} are the same to the text tower, such "
            f"as {prompts[first][0]!r}: equal names, or cut to the length of the tokenizer"
        )
    return classes


def mean_per_class(scores: Tensor, targets: Tensor) -> Figure:
    """Return the mean over classes of the mean score of their images.

    The result keeps the influence of each image, ``mean + (score - mean of its class) N / (C' n)``,
    with C' classes that have images and n images of its class. The mean of the influences is the
    result, and their variance gives the variance of the result under resampling.

    Args:
        scores: Scores (N,) of the images.
        targets: Their classes (N,).
    """
    counts = targets.bincount()  # (C,)
    of_class = targets.bincount(scores) / counts.clamp(min=1)
    mean = of_class[counts > 0].mean()
    weights = len(scores) / ((counts > 0).sum() * counts[targets])
    return Figure.of_scores(mean + (scores - of_class[targets]) * weights)


def read_names(table: str | None, classes: Sequence[str]) -> dict[str, list[str]]:
    """Return the names of each class: those of a table, or else its own with spaces for ``_``.

    Args:
        table: Path of the table with the columns class and name.
        classes: Name or number of each class of the data.

    Raises:
        UserError: If the table is damaged, its classes are not those of the data, or there is no
            table and the classes are numbers.
    """
    if table is None:
        if all(name.isdecimal() for name in classes):
            raise UserError(
                f"classes is missing: the classes of the data are numbers, "
                f"{join_some([*classes])}; classes=FILE, a table with the columns class,name, "
                "names them"
            )
        return {name: [name.replace("_", " ")] for name in classes}
    path = expand_user(table)
    names: dict[str, list[str]] = {name: [] for name in classes}
    for line, row in enumerate(read_rows(path, ("class", "name"), f"classes={path}"), start=2):
        check_known(
            row["class"], names, f"classes={path}:{line}: the data have no class {row['class']!r}"
        )
        if not row["name"].strip():
            raise UserError(f"classes={path}:{line}: class {row['class']!r} has an empty name")
        names[row["class"]].append(row["name"].strip())
    if missing := [name for name in names if not names[name]]:
        raise UserError(f"classes={path}: no row for {join_some(missing)}")
    return names


def read_templates(file: str | None) -> Sequence[str]:
    """Return the prompts of a file, one per line that is not blank; ``TEMPLATES`` if it is None.

    Raises:
        UserError: If it cannot be read or is empty, or a line lacks ``{}``.
    """
    if file is None:
        return TEMPLATES
    path = expand_user(file)
    with explained(f"templates={path}: cannot be read", OSError, UnicodeError):
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    for number, line in enumerate(lines, start=1):
        if line.strip() and "{}" not in line:
            raise UserError(
                f"templates={path}:{number}: {line!r:.100} lacks {{}}, which stands for the name"
            )
    templates = [line.strip() for line in lines if line.strip()]
    if not templates:
        raise UserError(
            f"templates={path}: is empty; expected a prompt a line, such as a cat: {{}}"
        )
    return templates


def _class_names(test: Source, train: Source) -> list[str]:
    """Return the names of all classes, or their numbers as text if they have no names."""
    names = test.class_names() or train.class_names()
    return names or [str(number) for number in range(max(test.num_classes, train.num_classes))]


def _candidates(
    names: Mapping[str, Sequence[str]],
    targets: Tensor,
    only_test_classes: bool,
    tell: Callable[[str], None],
) -> tuple[list[str], Tensor]:
    """Return the classes that may be predicted, and the targets (N,) as numbers of these."""
    counts = targets.bincount(minlength=len(names))
    every = [*names]
    if only_test_classes:
        numbers = counts.nonzero()[:, 0]
        return [every[n] for n in numbers], torch.searchsorted(numbers, targets)
    if without := [name for name, count in zip(every, counts, strict=True) if not count]:
        tell(
            f"warning: no test images of {len(without)} of {len(every)} classes "
            f"({join_some(without)}); only_test_classes=true leaves them out"
        )
    return every, targets
