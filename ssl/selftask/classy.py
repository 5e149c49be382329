"""The one door to Classy Vision: what we take from it, and how its registered names are built.

Taken: the contracts of task, hook, meter and optimizer, the parameter schedulers, the losses.
Whatever anyone registered with Classy works in a selftask config as ``classy:NAME`` (or by its
bare name once an ``import:``ed module has registered it). Not taken, because measured to break:
its models under compile, ``all_reduce_mean`` (overwrites its input), its checkpoint files.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import sys
import warnings
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from selftask.errors import UserError, nearest
from selftask.logs import show_root_lines_of


class _LoadedAlone(MetaPathFinder, Loader):
    """Single modules of Classy, loaded without running their package's ``__init__``.

    ``classy_vision.tasks`` and ``.hooks`` import every model, data set and hook of Classy, which
    costs a second of start-up. Whoever imports the whole package later finds the same module.
    """

    def __init__(self) -> None:
        self.modules: dict[str, ModuleType] = {}

    def load(self, name: str) -> ModuleType:
        """The module ``classy_vision.PACKAGE.LEAF``, alone."""
        if name in sys.modules:
            return sys.modules[name]
        root = importlib.util.find_spec("classy_vision")
        if root is None or not root.submodule_search_locations:
            raise UserError("classy-vision is not installed; `pip install classy-vision`")
        path = Path(root.submodule_search_locations[0], *name.split(".")[1:]).with_suffix(".py")
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        self.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self.modules[name])
        return self.modules[name]

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name in self.modules else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        """Nothing: it was run when it was loaded."""


_alone = _LoadedAlone()
sys.meta_path.insert(0, _alone)

ClassyTask: Any = _alone.load("classy_vision.tasks.classy_task").ClassyTask
ClassyHook: Any = _alone.load("classy_vision.hooks.classy_hook").ClassyHook
ClassyMeter: Any = _alone.load("classy_vision.meters.classy_meter").ClassyMeter

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # deprecations inside torch that its optimizers touch
    from classy_vision.optim import ClassyOptimizer
    from classy_vision.optim import param_scheduler as schedulers

    UpdateInterval = schedulers.UpdateInterval

__all__ = [
    "ClassyHook",
    "ClassyMeter",
    "ClassyOptimizer",
    "ClassyTask",
    "ClassyTaskNames",
    "UpdateInterval",
    "build",
    "has",
    "names",
    "schedulers",
]


class ClassyTaskNames(ClassyTask):  # type: ignore[misc]  # classy-vision ships no types
    """The names under which Classy's own hooks and trainers look for things in a task."""

    ema = False  # evaluate the model itself; Classy's EMA hook asks

    @property
    def phase_type(self) -> str:
        return "train" if self.train else "test"

    phase_begun = -1  # number of the newest phase; it stays until the next one begins

    @property
    def has_test_phases(self) -> bool:
        """With meters and a test set, each train phase is followed by a test phase."""
        return bool(self.meters) and bool(self.data_module.has_test)

    @property
    def phase_idx(self) -> int:
        return int(self.phase_begun)

    @property
    def train_phase_idx(self) -> int:
        """The newest train phase, from 0; -1 before the first."""
        return self.phase_begun // 2 if self.has_test_phases else self.phase_begun

    @property
    def eval_phase_idx(self) -> int:
        """The newest test phase, from 0; -1 before the first."""
        return (self.phase_begun - 1) // 2 if self.has_test_phases else -1

    @property
    def num_batches_per_phase(self) -> int:
        return int(
            self.length.batches_per_epoch if self.train else self.data_module.num_test_batches
        )

    @property
    def use_gpu(self) -> bool:
        return bool(self.device.type == "cuda")

    def get_batchsize_per_replica(self) -> int:
        """Images per process and batch."""
        return int(self.length.batch_size // self.world.size)

    def get_classy_state(self, deep_copy: bool = False) -> dict[str, Any]:
        state: dict[str, Any] = self.state_dict()
        return copy.deepcopy(state) if deep_copy else state

    def set_classy_state(self, state: dict[str, Any]) -> None:
        self.load_state_dict(state)


_PACKAGES = {
    "hook": ("classy_vision.hooks", "HOOK_REGISTRY"),
    "meter": ("classy_vision.meters", "METER_REGISTRY"),
    "optimizer": ("classy_vision.optim", "OPTIMIZER_REGISTRY"),
    "loss": ("classy_vision.losses", "LOSS_REGISTRY"),
    "schedule": ("classy_vision.optim.param_scheduler", "PARAM_SCHEDULER_REGISTRY"),
}

INSTEAD = {
    "checkpoint": "selftask saves by itself: train.checkpoint_every, train.keep_checkpoints",
    "model_complexity": "it asks for a ClassyModel; a run's first lines say how large the model is",
    "model_tensorboard": "it asks for a ClassyModel; hooks.classy:tensorboard_plot={} draws curves",
    "precise_bn": "it asks for Classy's loaders; hooks.precise_bn={} does the same",
    "profiler": "it asks for a ClassyModel; hooks.timing={} says where the time of a step goes",
    "torchscript": "it asks for a ClassyModel; `selftask export RUN` writes the backbone",
}
"""Classy's hooks that cannot work on a selftask Task: why, and what does the same."""

_NEEDS = {
    "progress_bar": ("progressbar", "progressbar2"),
    "tensorboard_plot": ("tensorboard", "tensorboard"),
    "visdom": ("visdom", "visdom"),
}  # hook -> module, package


def refusal(name: str) -> str | None:
    """Return why the hook ``classy:NAME`` cannot work here, or None."""
    bare = name.removeprefix("classy:")
    if bare in INSTEAD:
        return f"Classy Vision's hook {bare!r} does not work here: {INSTEAD[bare]}"
    module, package = _NEEDS.get(bare, ("", ""))
    if module and importlib.util.find_spec(module) is None:
        return f"Classy Vision's hook {bare!r} needs {package}: pip install {package}"
    return None


def _hook_defaults(name: str, out: Path) -> dict[str, Any]:
    """Return default arguments of a Classy hook: where to write, on which device."""
    defaults: dict[str, dict[str, Any]] = {
        "ema_model_weights": {"device": "gpu" if torch.cuda.is_available() else "cpu"},
        "output_csv": {"folder": str(out), "id_key": "index"},
        "tensorboard_plot": {"summary_writer": {"log_dir": str(out / "tensorboard")}},
    }
    return defaults.get(name, {})


def has(kind: str, name: str) -> bool:
    """Whether Classy knows ``name``: ``classy:NAME``, or a bare name registered by now.

    A bare name is looked up only in what is already imported: loading Classy takes two seconds,
    too long to answer a typo.
    """
    if kind not in _PACKAGES:
        return False
    if name.startswith("classy:"):
        return name.removeprefix("classy:") in _registry(kind)
    module = sys.modules.get(_PACKAGES[kind][0])
    return module is not None and name in getattr(module, _PACKAGES[kind][1], {})


def names(kind: str) -> list[str]:
    """All names Classy has for this kind, without the prefix. Imports that part of Classy."""
    return sorted(_registry(kind))


def build(kind: str, name: str, args: dict[str, Any], out: Path | None = None) -> Any:
    """The Classy hook, meter, optimizer, loss or schedule called ``name``, from its config.

    What a hook writes goes to ``out``, the run's folder, unless ``args`` say where.
    """
    bare = name.removeprefix("classy:")
    known = _registry(kind)
    if bare not in known:
        raise UserError(f"Classy Vision has no {kind} named {bare!r}; {nearest(bare, known)}")
    config = {**args, "name": bare}
    if kind == "hook":
        config = {**_hook_defaults(bare, out or Path()), **args}
        show_root_lines_of("classy_vision")  # its hooks log through the root logger
    try:
        if kind == "hook" and "folder" in config:
            Path(config["folder"]).mkdir(parents=True, exist_ok=True)
        return known[bare].from_config(config)
    except (AssertionError, KeyError, OSError, TypeError, ValueError) as error:  # its own checks
        raise UserError(
            f"Classy Vision's {kind} {bare!r} cannot be made of {args}: "
            f"{type(error).__name__}: {error}"
        ) from error


def _registry(kind: str) -> dict[str, Any]:
    package, attribute = _PACKAGES[kind]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecations of torchvision video and torch.jit, not ours
        return dict(getattr(importlib.import_module(package), attribute))
