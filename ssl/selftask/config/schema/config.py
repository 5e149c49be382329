"""Complete config of a training run."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from selftask.config.fields import setting
from selftask.config.keys import Key
from selftask.config.schema.component import (
    BackboneComponent,
    Component,
    HookComponent,
    Section,
)
from selftask.config.schema.data import DataConfig
from selftask.config.schema.evaluation import EvalConfig
from selftask.config.schema.launch import LaunchConfig, ParallelConfig
from selftask.config.schema.optimizer import NamedOptimizerConfig, OptimizerConfig
from selftask.config.schema.resume import InitConfig, ResumeConfig
from selftask.config.schema.train import TrainConfig
from selftask.config.schema.views import ViewConfig
from selftask.files.addresses import work_folder

DEFAULT_HOOKS = (
    "health",
    "evaluation",
    "metrics",
    "progress",
    "export",
    "checkpoint",
    "preemption",
)
"""Hooks of every run, unless its config removes them: ``hooks.health=null``."""


@dataclass(frozen=True, kw_only=True)
class Config(Section):
    """Complete config of a training run."""

    recipe: str
    """Recipe as given on the command line."""
    task: str = "standard"
    """Registered name of the task class: ``Task`` or your own subclass of it."""
    data: DataConfig = setting(missing="data=FOLDER takes any tree of images")
    """Images to train on; ``data=FOLDER`` is short for ``data={name: folder, path: FOLDER}``."""
    views: dict[str, ViewConfig]
    """Groups of views, in the order in which the method receives them."""
    backbone: BackboneComponent = setting(of="backbones", missing="give the name of a backbone")
    """Network that is trained, by name: ``resnet18``, ``timm:NAME``, ``torchvision:NAME``,
    ``module:function``.
    """
    method: Component = setting(of="methods", missing="give the name of a method")
    """Self-supervised method, by name."""
    train: TrainConfig
    """Length, batch size, precision and checkpoints."""
    optimizer: OptimizerConfig = setting(missing="give its name and lr")
    """Optimizer, learning rate and weight decay."""
    optimizers: dict[str, NamedOptimizerConfig] = setting({})
    """Additional optimizers by name, for a train step that uses them; see docs/train-steps.md."""
    meters: dict[str, Component] = setting(of="meters")
    """Meters of test phases, by name."""
    hooks: dict[str, HookComponent] = setting(of="hooks")
    """Hooks by name, in addition to the default ones; null removes a hook."""
    eval: EvalConfig
    """Evaluations of the frozen backbone during training."""
    expected: dict[str, tuple[float, float]] = setting({}, also=["expected_results"])
    """Lowest and highest allowed last value of metrics, such as ``{knn_top1: [0.66, 0.74]}``; the
    run fails at its end if a value is outside this range.
    """
    init: InitConfig
    """Weights to start from."""
    resume: ResumeConfig
    """Checkpoint to resume from."""
    parallel: ParallelConfig
    """How processes train together."""
    launch: LaunchConfig
    """Processes, machines and SLURM."""
    out: str = setting(path=True)
    """Run folder: a path or an address such as ``s3://bucket/run``."""
    imports: list[str]
    """Your own modules, imported before names are looked up; ``import`` in yaml."""
    places: dict[str, str] = field(default_factory=dict, compare=False, repr=False)
    """Dotted key -> origin of its value; use ``place`` to read it."""
    notes: list[str] = field(default_factory=list, compare=False, repr=False)
    """What the user should know about the values, such as keys of a base that have no effect."""

    @property
    def out_folder(self) -> Path:
        """Local folder of the run: ``out``, or if that is an address, a folder in the cache."""
        return work_folder(self.out)

    def place(self, key: str) -> str:
        """Return the origin of a value: ``file.yaml:14``, ``command line: ...`` or a default.

        If the key itself has no recorded origin, the origin of its section is returned.
        """
        while key not in self.places and "." in key:
            key = key.rpartition(".")[0]
        return self.places.get(key, "default")

    @property
    def pipelines(self) -> dict[Key, list[Component]]:
        """Lists of transforms of all groups of views, then ``eval.transforms``, by key."""
        lists: dict[Key, list[Component]] = {
            ("views", name, "transforms"): group.transforms for name, group in self.views.items()
        }
        return {**lists, ("eval", "transforms"): self.eval.transforms}

    @property
    def all_optimizers(self) -> dict[Key, OptimizerConfig]:
        """Sections of all optimizers by key, ``optimizer`` first."""
        sections: dict[Key, OptimizerConfig] = {("optimizer",): self.optimizer}
        return sections | {("optimizers", name): one for name, one in self.optimizers.items()}

    def to_dict(self) -> dict[str, Any]:
        """Return the content of ``config.yaml``, which loads back to an equal Config."""
        values = super().to_dict()
        del values["places"], values["notes"]
        if self.task == "standard":
            del values["task"]
        if not self.optimizers:
            del values["optimizers"]
        removed = dict.fromkeys(name for name in DEFAULT_HOOKS if name not in self.hooks)
        return {
            "recipe": values.pop("recipe"),
            "import": values.pop("imports"),
            **values,
            "hooks": {**removed, **values["hooks"]},
        }


SHARED: dict[Key, frozenset[str]] = {
    ("backbone",): frozenset({"lora"}),
    ("data",): frozenset(f.name for f in fields(DataConfig)) - {"source", "val", "val_sets"},
    ("optimizer",): frozenset(f.name for f in fields(OptimizerConfig)) - {"name", "args"},
    ("optimizers",): frozenset(f.name for f in fields(NamedOptimizerConfig)) - {"name", "args"},
}
"""Fields of a component's section that are kept if a later layer names another component.

A key may also be that of a mapping of such sections.
"""
