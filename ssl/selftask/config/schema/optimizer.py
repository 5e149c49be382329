"""The ``optimizer`` section."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from selftask.config.fields import setting
from selftask.config.keys import Key
from selftask.config.schema.component import Section

_COMMON = (
    *("start", "end", "warmup", "warmup_start", "warmup_shape", "warmup_interval"),
    "update",
)
"""Fields that every schedule has."""


@dataclass(frozen=True, kw_only=True)
class ScaledLR:
    """Learning rate for a reference batch size, scaled with the number of samples in a step."""

    base: float = setting(min=0)
    """Learning rate for the reference batch size."""
    per: int = setting(256, min=1)
    """Reference batch size, in samples."""
    rule: Literal["linear", "sqrt"] = "linear"
    """Factor of ``base`` for steps of B samples: ``linear``: B / ``per``; ``sqrt``: its square
    root.
    """

    def factor(self, batch: int) -> float:
        """Return the factor of ``base`` for steps of ``batch`` samples over all ranks."""
        ratio = batch / self.per
        return ratio if self.rule == "linear" else math.sqrt(ratio)


@dataclass(frozen=True, kw_only=True)
class GroupRule:
    """Rule for some parameters, selected by name, by type of their module, or by both."""

    match: str | list[str] | None = None
    """Names of modules or parameters, or patterns with ``*``: ``backbone.layer1``, ``*.norm*``,
    ``loss.prototypes``. null: all names.
    """
    type: str | list[str] | None = None
    """Names of the classes of modules, such as ``BatchNorm2d``, or of their base classes. null: all
    classes.
    """
    lr: float | None = setting(None, min=0)
    """Factor that multiplies the optimizer's ``lr``; null: 1."""
    weight_decay: float | dict[str, Any] | None = setting(None, of="schedules", min=0)
    """Weight decay of these parameters; null: the optimizer's, by ``decay_1d`` and
    ``decay_tokens``.
    """
    schedule: str | dict[str, Any] | None = setting(None, of="schedules")
    """Schedule in place of the optimizer's ``schedule``; start, end and warm-up default to the
    learning rate's. null: the optimizer's.
    """
    freeze: bool | int | str | None = setting(None, duration=True)
    """How long to freeze the parameters. true: the whole training, without computing gradients;
    false: not at all, whatever a later rule says.
    """

    @property
    def given(self) -> dict[str, Any]:
        """Settings of the rule that are not null, with the schedule as a section."""
        made = {name: getattr(self, name) for name in ("lr", "weight_decay", "schedule", "freeze")}
        if isinstance(self.schedule, str):
            made["schedule"] = {"name": self.schedule}
        return {name: value for name, value in made.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(Section):
    """Optimizer, learning rate and weight decay over the training.

    A value that may change during training is a number, or a section with the name of a schedule:
    ``{name: cosine, start: 0.04, end: 0.4}``.
    """

    name: str = setting(of="optimizers", flat=True)
    """Registered name of the optimizer, or ``torch:NAME``."""
    args: dict[str, Any] = field(default_factory=dict)
    """The optimizer's own keys; in yaml they are keys of the same section."""
    lr: float | ScaledLR | dict[str, Any] = setting(
        of="schedules", min=0, also=["learning_rate", "base_lr", "blr"]
    )
    """Peak learning rate; ``{base, per, rule}`` scales it with the batch size; ``{name: ...}`` is a
    complete schedule, which replaces ``schedule``, ``warmup``, ``warmup_shape``, ``start_lr`` and
    ``end_lr``.
    """
    schedule: str | dict[str, Any] = setting(
        "cosine", of="schedules", also=["scheduler", "lr_schedule", "lr_scheduler"]
    )
    """Shape of the learning rate from ``lr`` to ``end_lr``: a name, or a section with the
    schedule's own keys.
    """
    warmup: int | str = setting(0, duration=True, also=["warmup_epochs", "warmup_steps"])
    """Length of the learning rate's warm-up, such as ``10 epochs``; a number is steps; 0: none."""
    warmup_shape: Literal["linear", "cosine", "exponential", "constant"] = setting(
        "linear", also=["warmup_method"]
    )
    """Shape of the warm-up from ``start_lr`` to ``lr``; constant: ``start_lr`` throughout."""
    start_lr: float = setting(0.0, min=0, also=["warmup_lr", "start_warmup"])
    """Learning rate at the start of the warm-up; scaled like ``lr``."""
    end_lr: float = setting(0.0, min=0, also=["min_lr", "final_lr"])
    """Learning rate at the end of training; scaled like ``lr``."""
    weight_decay: float | dict[str, Any] = setting(0.0, of="schedules", min=0, also=["wd"])
    """Weight decay: a number, or a schedule such as ``{name: cosine, start: 0.04, end: 0.4}``."""
    decay_1d: bool = False
    """Whether one-dimensional parameters (biases, norms) decay too."""
    decay_tokens: bool = False
    """Whether a transformer's class and mask token, registers and learned positions decay too."""
    layer_decay: float = setting(1.0, above=0, max=1, also=["layer_wise_lr_decay", "llrd"])
    """Ratio of the learning rate of a layer of the backbone to that of the next layer. Head and
    method, with the norm after the last block, count as the last layer, which has ``lr``. 1: equal
    rates.
    """
    groups: list[GroupRule] = setting([], also=["param_groups", "paramwise_cfg", "custom_keys"])
    """Rules for some parameters; for each setting, the first matching rule applies. Rules of the
    method come after them.
    """

    def lr_section(self, batch: int, instead: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return the section of the complete schedule of the learning rate.

        Args:
            batch: Number of samples in a step, over all ranks.
            instead: Section of a schedule that replaces ``schedule``, for a rule of ``groups``;
                None: no replacement.
        """
        if isinstance(self.lr, dict):
            kept = {key: self.lr[key] for key in _COMMON if key in self.lr}
            return {**kept, **instead} if instead else self.lr
        peak, factor = (
            (self.lr.base, self.lr.factor(batch))
            if isinstance(self.lr, ScaledLR)
            else (self.lr, 1.0)
        )
        shape = {"name": self.schedule} if isinstance(self.schedule, str) else self.schedule
        return {
            "start": peak * factor,
            "end": self.end_lr * factor,
            "warmup": self.warmup,
            "warmup_shape": self.warmup_shape,
            "warmup_start": self.start_lr * factor,
            **(instead or shape),
        }

    def schedules(self, key: Key = ("optimizer",)) -> dict[Key, dict[str, Any]]:
        """Return the sections of all schedules by key, beginning with the learning rate.

        They are for checks: a learning rate that scales with the batch size is that for one sample.

        Args:
            key: Key of this section.
        """
        shown = (*key, "lr" if isinstance(self.lr, dict) else "schedule")
        sections: dict[Key, Any] = {
            shown: self.lr_section(batch=1),
            (*key, "weight_decay"): self.weight_decay,
        }
        for index, rule in enumerate(self.groups):
            of_rule = (*key, "groups", str(index))
            sections[(*of_rule, "weight_decay")] = rule.weight_decay
            if "schedule" in rule.given:
                section = self.lr_section(batch=1, instead=rule.given["schedule"])
                sections[(*of_rule, "schedule")] = section
        return {key: section for key, section in sections.items() if isinstance(section, dict)}


@dataclass(frozen=True, kw_only=True)
class NamedOptimizerConfig(OptimizerConfig):
    """An additional optimizer for some parameters, which ``optimizer`` does not train then."""

    match: str | list[str] = setting(missing="give the names of the modules that it trains")
    """Names of the modules whose parameters it trains, or patterns, as in ``optimizer.groups``."""
