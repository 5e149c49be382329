"""Spread and rank of the embeddings, and the loss relative to chance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from selftask.config.fields import setting
from selftask.distributed.accelerator import to_float64
from selftask.errors import join_some
from selftask.hooks.base import Hook, Task
from selftask.hooks.gradients.trained import parameters_of_optimizers, updated_parameters
from selftask.hooks.watching.limits import (
    CHANCE_AT_WHERE,
    CHANCE_STEPS,
    COLLAPSED,
    FROM_STEP,
    MIN_RANK,
    UNTIL_WHERE,
    stays_at_chance,
)
from selftask.logs import get_logger
from selftask.optim.gradients import local_parts, to_one_device
from selftask.registry import register_hook

log = get_logger(__name__)

LEAST_MOVE = 1e-8  # relative to the norm of the weights; below the rounding of float32
NUM_SAMPLED = 64  # values of each parameter, to detect whether it changes


@register_hook("health")
@dataclass(eq=False, kw_only=True)
class Health(Hook):
    """Logs embedding statistics; warns once of each sign that a run does not learn.

    Embeddings are the network's pooled features (N, E) of the views on rank 0. ``emb_std`` is their
    mean standard deviation, after scaling to unit length, times sqrt(E): 1 for directions spread
    evenly, 0 for a collapse (SimSiam, arXiv:2011.10566, section 4.1). ``mean_cosine`` is the mean
    cosine of two embeddings, ``effective_rank`` the number of directions in which they vary,
    ``chance_ratio`` the loss divided by ``chance_loss``, that of an uninformed network, if the
    method declares it. All are computed for logged steps only.
    """

    priority: ClassVar[int] = 60
    collapsed: float = setting(COLLAPSED, min=0, max=1)
    """An ``emb_std`` below this is reported as a collapse."""
    min_rank: float = setting(MIN_RANK, min=1)
    """An ``effective_rank`` below this is reported as a dimensional collapse."""
    max_rows: int = setting(512, min=2)
    """Maximum number of embeddings from which the values of a row are computed."""

    def __post_init__(self) -> None:
        self.warned: set[str] = set()
        self.parameters: set[str] | None = None  # names at the start, until they are compared
        self.before: Tensor | None = None  # values of the weights before this step
        self.moved = False  # whether the weights have changed in a logged step
        self.is_reached = False  # whether a gradient has reached the backbone
        self.ratios: list[float] = []  # the first and the smallest chance_ratio of the run

    def on_start(self, task: Task) -> None:
        self.parameters = _parameters(task)

    def on_backward(self, task: Task) -> None:
        if not task.should_log:
            return
        if not self.is_reached and self._may_warn(task, "gradients"):
            self._check_gradients(task)
        # weights that changed keep changing
        if self._may_warn(task, "weights") and (not self.moved or _peak(task) == 0):
            self.before = _sample(task)

    def on_update(self, task: Task) -> None:
        if not task.should_log:
            return
        self._check_parameters(task)
        ratio = self._log_loss(task)
        self._check_weights(task, ratio)
        embedding = getattr(task.base_model, "embedding", None)
        if embedding is not None and len(embedding) > 1:  # one row has no spread
            self._check_embedding(task, embedding[: self.max_rows].float())

    def state_dict(self) -> dict[str, Any]:
        return {"ratios": list(self.ratios), "warned": sorted(self.warned)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.ratios = list(state.get("ratios", ()))
        self.warned = set(state.get("warned", ()))

    def _log_loss(self, task: Task) -> float | None:
        """Log and return ``chance_ratio``, or None; warn if the loss has stayed at chance."""
        chance = task.loss.chance_loss
        if not chance:
            return None
        ratio = float(task.last_batch.loss) / chance
        task.log("chance_loss", chance)
        task.log("chance_ratio", ratio)
        self.ratios = self.ratios or [ratio, ratio]
        self.ratios[1] = min(self.ratios[1], ratio)
        first, lowest = self.ratios
        late = task.where >= CHANCE_AT_WHERE and task.steps_done + 1 >= CHANCE_STEPS
        if late and stays_at_chance(first, lowest):
            self._warn(
                task,
                "chance",
                "the loss is that of an uninformed network or worse and has not fallen "
                f"(chance_ratio {first:.3g} at first, {lowest:.3g} at best): nothing is learned. "
                f"Try another optimizer.lr (now {_peak(task):.3g}), a shorter optimizer.warmup or "
                "weaker views.*.transforms",
            )
        return ratio

    def _check_parameters(self, task: Task) -> None:
        """Warn if a forward pass has created parameters, which no optimizer knows."""
        before, self.parameters = self.parameters, None
        if before is None:
            return
        if created := sorted(_parameters(task) - before):
            self._warn(
                task,
                "parameters",
                f"a forward pass has created {join_some(created)}: not trained, and a resume "
                "fails. Create modules and parameters in __init__ or build_head",
            )

    def _check_gradients(self, task: Task) -> None:
        """Warn if all gradients of the backbone are missing or 0, since its output is detached."""
        frozen = task.frozen.now(task.steps_done)
        updated = set(parameters_of_optimizers(task))
        backbone = task.base_model.backbone.parameters()
        trained = [p for p in backbone if p in updated and p not in frozen]
        gradients = local_parts([p.grad for p in trained if p.grad is not None])
        self.is_reached = any(bool(part.any()) for part in gradients)
        if trained and not self.is_reached:
            self._warn(
                task,
                "gradients",
                "no gradient reaches the backbone, so only the layers after it learn. Look for "
                ".detach() or torch.no_grad() in the backbone, the method or a hook",
            )

    def _check_weights(self, task: Task, ratio: float | None) -> None:
        before, self.before = self.before, None
        if before is None:
            return
        change = (_sample(task) - before).norm()  # NaN or infinite if weights overflow
        self.moved = not bool(change.isfinite() & (change <= LEAST_MOVE * before.norm()))
        if self.moved:
            return
        lr = _peak(task)
        stays = "" if ratio is None else f", and the loss stays at {ratio:.3g} times chance"
        if lr == 0:
            remedy = "the learning rate is 0 here: raise optimizer.lr or optimizer.end_lr"
        else:
            remedy = (
                f"the learning rate is {lr:.3g}, so it is far too small or no gradient arrives: "
                "raise optimizer.lr, or look at what the method freezes"
            )
        self._warn(task, "weights", f"no weight moves{stays}; {remedy}")

    def _check_embedding(self, task: Task, rows: Tensor) -> None:
        spread, rank = float(embedding_std(rows)), float(effective_rank(rows))
        task.log("emb_std", spread)
        task.log("mean_cosine", mean_cosine(rows))
        task.log("effective_rank", rank)
        if spread < self.collapsed:
            self._warn(
                task,
                "collapse",
                f"emb_std {spread:.3f}: the embeddings of different images are almost the same "
                "(collapse). Lower optimizer.lr, lengthen optimizer.warmup, or look at the "
                "method's temperature and momentum (method.*)",
            )
        elif rank < self.min_rank:
            self._warn(
                task,
                "rank",
                f"effective_rank {rank:.2f}: the embeddings vary in one direction only "
                "(dimensional collapse). Strengthen views.*.transforms, lower optimizer.lr or "
                "raise optimizer.weight_decay",
            )

    def _may_warn(self, task: Task, kind: str) -> bool:
        in_time = task.steps_done + 1 >= FROM_STEP and task.where <= UNTIL_WHERE
        return in_time and kind not in self.warned

    def _warn(self, task: Task, kind: str, text: str) -> None:
        if kind not in self.warned:
            self.warned.add(kind)
            log.warning("step %d: %s", task.steps_done + 1, text, extra={"about": kind})


def _parameters(task: Task) -> set[str]:
    """Return the names of the parameters of the network and the method."""
    return {name for part, module in task.trained for name, _ in module.named_parameters(part)}


def _peak(task: Task) -> float:
    """Return the largest learning rate of this step's groups."""
    return max(float(group["lr"]) for group in task.optimizer.param_groups)


def _sample(task: Task) -> Tensor:
    """Return a sample of values of every trained parameter of this rank."""
    values = []
    for shard in local_parts([parameter.detach() for parameter in updated_parameters(task)]):
        flat = shard.flatten()
        values.append(flat[:: max(1, flat.numel() // NUM_SAMPLED)].float())
    return torch.cat(to_one_device(values))


def embedding_std(rows: Tensor) -> Tensor:
    """Return sqrt(E) times the mean std of the columns of normalized rows (N, E), about 0 to 1."""
    directions = F.normalize(rows, dim=1)
    return directions.std(dim=0).mean() * rows.shape[1] ** 0.5


def mean_cosine(rows: Tensor) -> Tensor:
    """Return the mean cosine over pairs of different (N, E) rows, from -1 to 1."""
    total = F.normalize(rows, dim=1).sum(dim=0)
    return (total.square().sum() - len(rows)) / (len(rows) * (len(rows) - 1))


def effective_rank(rows: Tensor) -> Tensor:
    """Return exp(entropy) of the normalized singular values of centered (N, E) rows.

    Roy and Vetterli, The effective rank, EUSIPCO 2007: between 1 and min(N, E). Returns NaN if the
    rows are not finite, since the check of the loss then reports the cause. Products are in
    float64: with the rounding errors of float32, points on a line have a rank of 1.2 instead of 1.
    """
    rows = to_float64(rows)
    centered = rows - rows.mean(dim=0)
    gram = centered @ centered.T if len(rows) < rows.shape[1] else centered.T @ centered
    if not gram.isfinite().all():
        return gram.new_tensor(torch.nan)  # eigvalsh would raise
    singular = torch.linalg.eigvalsh(gram).clamp(min=0).sqrt()
    share = singular / singular.sum().clamp(min=1e-12)
    return torch.exp(-torch.special.xlogy(share, share).sum())
