"""The ``eval`` section."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from selftask.config.fields import setting
from selftask.config.schema.component import Component, entries


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Evaluations of the frozen backbone during training."""

    transforms: list[Component] = setting([], of="transforms")
    evaluations: dict[str, Component] = setting({}, of="evaluations")  # {"knn": ...}
    every: int | str | None = setting(None, duration=True, min=1)  # none: step 0 and the end only
    loss: bool = setting(False, also=["val_loss", "validation_loss"])  # the method's own loss of
    # data.val, in the views of training, as val_loss
    test_every: int = setting(1, min=1, also=["test_phase_period", "val_interval"])  # epochs
    # between test phases, which meters have; one more at the end
    # numbers of hidden layers to evaluate, -1 is the last; none: the backbone's own output
    layers: list[int] = setting([])
    # of a layer's tokens: mean of the patches, prefix tokens (class, registers), or both
    pool: Literal["mean", "prefix", "both"] = "mean"

    def to_dict(self) -> dict[str, Any]:
        """Return the section as in the yaml."""
        return {
            "transforms": [t.to_dict() for t in self.transforms],
            "evaluations": entries(self.evaluations),
            "every": self.every,
            "loss": self.loss,
            "test_every": self.test_every,
            "layers": list(self.layers),
            "pool": self.pool,
        }
