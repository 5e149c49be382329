"""Sections of a config, with types, defaults, limits and units.

The fields of a component (method, backbone, hook, ...) are not here. They are declared by the
``Config`` in the component's file. In yaml they are keys of the same section as ``name``.

``config/load.py`` creates these objects; all other code treats them as read-only.
"""

from selftask.config.schema.component import Component
from selftask.config.schema.config import DEFAULT_HOOKS, Config
from selftask.config.schema.data import DataConfig
from selftask.config.schema.evaluation import EvalConfig
from selftask.config.schema.frozen import FrozenModule
from selftask.config.schema.launch import LaunchConfig, ParallelConfig
from selftask.config.schema.optimizer import OptimizerConfig
from selftask.config.schema.resume import InitConfig, ResumeConfig
from selftask.config.schema.train import CompileConfig, GradScalerConfig, TrainConfig
from selftask.config.schema.views import ViewConfig, num_views, total_views

__all__ = [
    "DEFAULT_HOOKS",
    "CompileConfig",
    "Component",
    "Config",
    "DataConfig",
    "EvalConfig",
    "FrozenModule",
    "GradScalerConfig",
    "InitConfig",
    "LaunchConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "ResumeConfig",
    "TrainConfig",
    "ViewConfig",
    "num_views",
    "total_views",
]
