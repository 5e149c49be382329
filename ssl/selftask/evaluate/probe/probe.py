"""Linear and attentive probes of a frozen backbone by the protocol of a paper.

N training images, B images of a batch, C classes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from selftask.config.fields import setting
from selftask.config.run_length import RunLength
from selftask.config.schema import Config
from selftask.data.data_module import val_key
from selftask.data.labels import count_unlabeled
from selftask.data.loading.open_data import Sources
from selftask.data.source import Source
from selftask.distributed.accelerator import forked_rng
from selftask.distributed.heartbeat import track
from selftask.errors import UserError, plural
from selftask.evaluate.figure import Figure
from selftask.evaluate.label_counts import LabelCounts
from selftask.evaluate.online import of_set
from selftask.evaluate.probe.heads import AttentiveHead, HeadGrid, LinearHead, normalization
from selftask.evaluate.probe.inputs import Input, ProbeInputs, Rows, augmented, regrouped
from selftask.evaluate.probe.protocols import PROTOCOLS, Name, Pool, Protocol
from selftask.logs import get_logger
from selftask.models.eval_mode import in_eval_mode
from selftask.optim.schedules import build_schedule
from selftask.registry import register_evaluation

log = get_logger(__name__)


@register_evaluation("probe")
@dataclass(frozen=True, kw_only=True)
class Probe:
    """Linear or attentive probe by the protocol of a paper: probe_mae_top1, and so on.

    One head is trained for each combination of learning rate, weight decay, number of blocks and
    pooling, all simultaneously on the same batches. If there are several, the best on held-out
    training images is tested.
    """

    needs_labels: ClassVar[bool] = True
    takes_backbone: ClassVar[bool] = True

    protocol: Name
    """Protocol whose settings replace null in the other fields."""
    lr: list[float] | None = setting(None, above=0, nonempty=True)
    """Learning rates; those of SGD and LARS are multiplied by batch size / 256."""
    weight_decay: list[float] | None = setting(None, min=0, nonempty=True)
    """Weight decays; biases are not decayed."""
    blocks: list[int] | None = setting(None, min=1, nonempty=True)
    """Numbers of last blocks whose features are concatenated; ``attentive`` uses the last only."""
    pool: list[Pool] | None = setting(None, nonempty=True)
    """Features of a block. ``class``: class token, or mean of the patches if there is none;
    ``mean``: mean of the patches; ``both``: class tokens and the mean of the last block's patches;
    ``attentive``: the last block's patches, pooled by attention to learned queries.
    """
    queries: int = setting(1, min=1)
    """Number of queries of attentive pooling, whose results are averaged."""
    epochs: int | None = setting(None, min=1)
    """Number of epochs."""
    batch_size: int | None = setting(None, min=2)
    """Number of images of a step; all training images if there are fewer."""
    augment: bool = True
    """Whether each epoch has new random crops and flips; false: features of ``eval.transforms``,
    computed once and kept in memory.
    """
    held_out: float = setting(0.1, above=0, below=1)
    """Share of the training images that is held out to choose among several heads; none if there
    is one head.
    """
    seed: int = setting(0, min=0)
    """Seed of initial weights, order, crops, and held-out images."""
    seeds: int = setting(1, min=1)
    """Number of seeds, from ``seed`` on, over which metrics are averaged. With several seeds, the
    settings of the tested heads are only logged, since each seed may choose different ones.
    """

    def settings(self) -> Protocol:
        """Return the settings of the protocol, replaced by the fields that are not None."""
        names = ("lr", "weight_decay", "blocks", "pool", "epochs", "batch_size")
        values = {name: getattr(self, name) for name in names}
        changed = {name: value for name, value in values.items() if value is not None}
        return replace(PROTOCOLS[self.protocol], **changed)

    def __call__(
        self, backbone: nn.Module, config: Config, sources: Sources, device: torch.device
    ) -> dict[str, float]:
        """Return the accuracy (0 to 1) on each validation set, by column.

        The settings of the tested head are also returned if there is one seed, and its accuracy on
        held-out images if it was chosen among several heads.

        Several ranks share the images; each trains all heads, on the features of all images.

        Raises:
            UserError: If there is no validation set, labels are missing, the backbone has no
                patches or too few blocks, or there are too few images.
        """
        train = sources.train
        every = {"": sources.val, **sources.val_sets}
        tests = {name: source for name, source in every.items() if source is not None}
        if not tests:
            raise UserError("data.val is missing: give the labeled images to test on, data.val=DIR")
        _check_labels(train, tests)
        settings = self.settings()
        inputs = [Input(*pair) for pair in product(settings.pool, settings.blocks)]
        if self.augment:
            augmented(config.eval.transforms)  # raises before the first image is read
        features = ProbeInputs(backbone.to(device), inputs, config, device)
        order = np.random.default_rng(self.seed).permutation(len(train))
        num_heads = len(inputs) * len(settings.lr) * len(settings.weight_decay)
        num_held = max(1, round(self.held_out * len(train))) if num_heads > 1 else 0
        if len(train) - num_held < 2:
            raise UserError(f"data: {len(train)} images; three or more are expected")
        held, kept = order[:num_held], order[num_held:]
        prefix = f"probe_{self.protocol}"
        row: dict[str, float] = {}
        held_out: dict[str, float] = {}
        chosen = 0, 0
        with in_eval_mode(backbone), forked_rng(), torch.no_grad():
            classes = _classes(features, train)
            torch.manual_seed(self.seed)
            grids = self._fit(features, settings, train, kept, classes)
            if num_heads > 1:
                on_held = _hits(features, grids, train, "data", held.tolist(), classes)
                means = [hits.double().mean(dim=1) for hits in on_held]
                chosen = max(
                    ((i, h) for i, mean in enumerate(means) for h in range(len(mean))),
                    key=lambda pair: float(means[pair[0]][pair[1]]),
                )
                held_out[f"{prefix}_held_out_top1"] = float(means[chosen[0]][chosen[1]])
            for name, test in tests.items():
                rows = range(len(test))
                tested = _hits(features, grids, test, val_key(name), rows, classes)
                hits = Figure.of_scores(tested[chosen[0]][chosen[1]].cpu())
                row |= of_set(name, {f"{prefix}_top1": hits})
        return row | held_out | self._settings_of(chosen, inputs, settings)

    def _settings_of(
        self, chosen: tuple[int, int], inputs: Sequence[Input], settings: Protocol
    ) -> dict[str, float]:
        """Log the settings of the tested head, and return them if there is one seed."""
        pairs = list(product(settings.lr, settings.weight_decay))
        (rate, decay), num_heads = pairs[chosen[1]], len(inputs) * len(pairs)
        part = inputs[chosen[0]]
        log.info(
            "probe: %s; %d %s; tested: pool %s, blocks %d, lr %g, weight decay %g",
            *(settings.paper, num_heads, plural("head", num_heads)),
            *(part.pool, part.blocks, rate, decay),
        )
        names = {"lr": rate, "weight_decay": decay, "blocks": part.blocks}
        row = {f"probe_{self.protocol}_{name}": value for name, value in names.items()}
        return row if self.seeds == 1 else {}

    def _fit(
        self,
        features: ProbeInputs,
        settings: Protocol,
        train: Source,
        rows: np.ndarray,
        classes: Tensor,
    ) -> list[HeadGrid]:
        """Train the heads of each input on the images with the numbers ``rows``; return them."""
        size = min(settings.batch_size, len(rows))
        length = RunLength(len(rows), size, epochs=settings.epochs)
        schedule = build_schedule(settings.schedule, length)
        scale = 1.0 if settings.optimizer == "adamw" else size / 256
        pairs = [(rate * scale, d) for rate, d in product(settings.lr, settings.weight_decay)]
        kept: Rows = ()
        if not self.augment:
            parts = features.batches(train, "data", rows.tolist())
            kept = tuple(map(torch.cat, zip(*parts, strict=True)))
        grids: list[HeadGrid] = []
        step = 0
        draws = np.random.default_rng(self.seed)
        for epoch in track("probe", range(settings.epochs)):
            order = draws.permutation(len(kept[-1]) if kept else len(rows))
            if kept:
                chosen = torch.from_numpy(order).to(kept[-1].device).split(size)
                parts = (tuple(column[part] for column in kept) for part in chosen)
            else:
                seed = self.seed + epoch + 1
                parts = features.batches(train, "data", rows[order].tolist(), seed)
            for *inputs, labels in regrouped(parts, size):
                if not grids:
                    grids = self._grids(settings, features.inputs, inputs, len(classes), pairs)
                factor = schedule(min(step / length.total_steps, 1 - 1e-9))
                targets = torch.searchsorted(classes.to(labels.device), labels)
                for grid, x in zip(grids, inputs, strict=True):
                    grid.fit(x, targets, factor)
                step += 1
        if not grids:
            raise UserError(f"data: fewer than {size} images can be read; use a smaller batch_size")
        return grids

    def _grids(
        self,
        settings: Protocol,
        inputs: Sequence[Input],
        features: list[Tensor],
        num_classes: int,
        pairs: list[tuple[float, float]],
    ) -> list[HeadGrid]:
        grids = []
        for part, x in zip(inputs, features, strict=True):
            width = x.shape[-1]
            head = LinearHead(width, num_classes)
            if part.pool == "attentive":
                head = AttentiveHead(width, num_classes, self.queries)
            norm = normalization(settings.norm, width).to(x.device)
            options = settings.optimizer, settings.options
            grids.append(HeadGrid(head.to(x.device), norm, pairs, *options))
        return grids


def _check_labels(train: Source, tests: Mapping[str, Source]) -> None:
    """Log the numbers of images and classes; raise UserError if images have no label."""
    for key, source in {"data": train, **{val_key(n): s for n, s in tests.items()}}.items():
        if unlabeled := count_unlabeled(source):
            raise UserError(
                f"probe, {key}: {unlabeled} of {len(source)} images have no label, or none that is "
                "a whole number"
            )
    for name, test in tests.items():
        counts = LabelCounts.of_sources(Sources(train, test))
        if counts is not None:
            log.info("probe: %s%s", f"{name}: " if name else "", counts.describe())


def _classes(features: ProbeInputs, train: Source) -> Tensor:
    """Return the distinct labels (C,) of the training images, ascending.

    If the source does not know them, all images are read once more.
    """
    if train.labels is not None:
        return torch.from_numpy(np.unique(train.labels))
    parts = features.batches(train, "data", range(len(train)))
    return torch.unique(torch.cat([labels for *_, labels in parts]))


def _hits(
    features: ProbeInputs,
    grids: list[HeadGrid],
    source: Source,
    key: str,
    rows: Sequence[int],
    classes: Tensor,
) -> list[Tensor]:
    """Return whether each head predicts the label of each image, (G, B) bool, for each input.

    Images of classes without training images count as wrong.
    """
    parts = []
    for *inputs, labels in features.batches(source, key, rows):
        numbers = classes.to(labels.device)
        match = labels[:, None] == numbers  # (B, C)
        targets = torch.where(match.any(dim=1), match.int().argmax(dim=1), -1)
        parts.append([grid.hits(x, targets) for grid, x in zip(grids, inputs, strict=True)])
    return [torch.cat(column, dim=1) for column in zip(*parts, strict=True)]
