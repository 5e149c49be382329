"""selftask: self-supervised learning in vision that resumes bit for bit.

The names below are imported on first use, so that ``import selftask`` is fast.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from selftask.api.evaluation import evaluate
    from selftask.api.learner import Learner
    from selftask.api.model import Model, load
    from selftask.api.predictor import Prediction, Predictor
    from selftask.api.trainer import Trainer
    from selftask.api.training import Run, create_task, train
    from selftask.task import Task

__version__ = "0.1.0"

__all__ = [
    "Learner",
    "Model",
    "Prediction",
    "Predictor",
    "Run",
    "Task",
    "Trainer",
    "create_task",
    "evaluate",
    "load",
    "train",
]

_HOMES = {
    "Learner": "api.learner",
    "Model": "api.model",
    "Prediction": "api.predictor",
    "Predictor": "api.predictor",
    "Run": "api.training",
    "Task": "task",
    "Trainer": "api.trainer",
    "create_task": "api.training",
    "evaluate": "api.evaluation",
    "load": "api.model",
    "train": "api.training",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'selftask' has no attribute {name!r}")
    return getattr(importlib.import_module(f"selftask.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *_HOMES]
