"""Writer for MLflow."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from selftask.hooks.base import Task
from selftask.hooks.writers.base import TrackingWriter
from selftask.registry import register_hook

MAX_PARAMS = 100  # per request


@register_hook("mlflow")
@dataclass(eq=False, kw_only=True)
class MLflow(TrackingWriter):
    """Sends rows, images and the config to MLflow, which does not store histograms."""

    package: ClassVar[str] = "mlflow"
    experiment: str = "selftask"
    """Name of the experiment."""
    run_name: str | None = None
    """Name of the run; null: the name of the run folder."""
    uri: str | None = None
    """Address of the server; null: MLFLOW_TRACKING_URI if set, else MLflow's default."""

    def connect(self, task: Task, run_id: str | None) -> str:
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        self.client: Any = MlflowClient(self.uri)
        if run_id:
            self.client.update_run(run_id, status="RUNNING")
            return run_id
        existing = self.client.get_experiment_by_name(self.experiment)
        experiment = (
            existing.experiment_id if existing else self.client.create_experiment(self.experiment)
        )
        run = self.client.create_run(experiment, run_name=self.run_name or task.out.name)
        params = [Param(name, str(value)[:500]) for name, value in _flat(task.config.to_dict())]
        for first in range(0, len(params), MAX_PARAMS):
            self.client.log_batch(run.info.run_id, params=params[first : first + MAX_PARAMS])
        return str(run.info.run_id)

    def send(self, step: int, row: dict[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        metrics = [Metric(name, float(value), now, step) for name, value in row.items()]
        self.client.log_batch(self.id, metrics=metrics)

    def write_image(self, step: int, name: str, image: Tensor) -> None:
        if step > self.sent:
            pixels = image.permute(1, 2, 0).numpy()
            self.client.log_image(self.id, pixels, artifact_file=f"images/{name}/{step:09d}.png")

    def close(self, *, failed: bool) -> None:
        self.client.set_terminated(self.id, status="FAILED" if failed else "FINISHED")


def _flat(config: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Return the dotted keys of a config with their values; lists are not flattened."""
    pairs: list[tuple[str, Any]] = []
    for name, value in config.items():
        if isinstance(value, dict) and value:
            pairs += _flat(value, f"{prefix}{name}.")
        else:
            pairs.append((f"{prefix}{name}".replace(":", "."), value))
    return pairs
