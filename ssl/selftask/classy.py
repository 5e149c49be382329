"""The only module that imports Classy Vision.

selftask uses Classy's interfaces of task, hook, meter and optimizer, its parameter schedulers and
its losses. Hooks, meters, optimizers, schedules and losses that are registered with Classy work in
a selftask config as ``classy:NAME``, or by their bare name once an ``import:`` module has
registered them. ``INSTEAD`` and ``UNUSABLE`` list those that do not work.

selftask does not use Classy's models, which fail under compile, its ``all_reduce_mean``, which
overwrites its input, or its checkpoint files.
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

from selftask.errors import UserError, check_known
from selftask.logs.lines import show_root_lines_of


class _LoadedAlone(MetaPathFinder, Loader):
    """Loads single modules of Classy without running the ``__init__`` of their package.

    ``classy_vision.tasks`` and ``.hooks`` import every model, data set and hook of Classy, which
    takes a second. A later import of the whole package finds the same modules.
    """

    def __init__(self) -> None:
        self.modules: dict[str, ModuleType] = {}

    def load(self, name: str) -> ModuleType:
        """Return the module ``classy_vision.PACKAGE.MODULE``; load it unless it is imported.

        Raises:
            UserError: If Classy Vision is not installed.
        """
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
        """Do nothing; the module was executed by ``load``."""


_alone = _LoadedAlone()
sys.meta_path.insert(0, _alone)

ClassyTask: Any = _alone.load("classy_vision.tasks.classy_task").ClassyTask
ClassyHook: Any = _alone.load("classy_vision.hooks.classy_hook").ClassyHook
ClassyMeter: Any = _alone.load("classy_vision.meters.classy_meter").ClassyMeter

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # deprecations in torch, used by its optimizers
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
    "build_schedule",
    "has",
    "names",
    "schedulers",
]


class ClassyTaskNames(ClassyTask):  # type: ignore[misc]  # classy-vision ships no types
    """Task attributes that Classy's hooks and trainers use."""

    ema = False  # read by Classy's EMA hook; False evaluates the model itself

    @property
    def phase_type(self) -> str:
        return "train" if self.train else "test"

    phase_begun = -1  # index of the current or last phase

    @property
    def has_test_phases(self) -> bool:
        """True if there are test phases, which need meters and a test set."""
        return bool(self.meters) and bool(self.data_module.has_test)

    @property
    def phase_idx(self) -> int:
        return int(self.phase_begun)

    @property
    def train_phase_idx(self) -> int:
        """Index of the current or last train phase, or -1 before the first."""
        if not self.has_test_phases or self.phase_begun < self.phases_to_test:
            return self.phase_begun
        trained = int(self.config.eval.test_every)  # phases before each test phase
        cycles, position = divmod(self.phase_begun + self._skipped_tests, trained + 1)
        return int(cycles * trained + min(position, trained - 1))

    @property
    def eval_phase_idx(self) -> int:
        """Index of the current or last test phase, or -1 before the first."""
        if not self.has_test_phases or self.phase_begun < self.phases_to_test:
            return -1
        trained, skipped = int(self.config.eval.test_every), self._skipped_tests
        return (self.phase_begun + skipped - trained) // (trained + 1) - skipped

    @property
    def phases_to_test(self) -> int:
        """Number of train phases before the first test phase."""
        return int(self.config.eval.phases_to_test(self.length))

    @property
    def _skipped_tests(self) -> int:
        """Number of test phases that ``eval.start`` skips."""
        return int(self.phases_to_test // self.config.eval.test_every - 1)

    @property
    def num_batches_per_phase(self) -> int:
        if not self.train:
            return int(self.data_module.num_test_batches)
        phase = self.length.phases_before(self.clock.batch)
        return int(self.length.first_batch(phase + 1) - self.length.first_batch(phase))

    @property
    def use_gpu(self) -> bool:
        return bool(self.device.type == "cuda")

    def get_batchsize_per_replica(self) -> int:
        """Return the batch size per process."""
        return int(self.length.batch_size // self.world.size)

    def get_classy_state(self, deep_copy: bool = False) -> dict[str, Any]:
        """Return ``state_dict()``, under the name that Classy's hooks and trainers call.

        Args:
            deep_copy: Whether to copy the tensors, which otherwise change as training continues.
        """
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
    "model_complexity": "it asks for a ClassyModel; `selftask model-summary RECIPE` prints it",
    "model_tensorboard": "it asks for a ClassyModel; hooks.tensorboard={} draws curves",
    "precise_bn": "it asks for Classy's loaders; hooks.precise_bn={} does the same",
    "profiler": "it asks for a ClassyModel; hooks.profiler={} writes traces",
    "torchscript": "it asks for a ClassyModel; `selftask export RUN` writes the backbone",
}
"""Classy's hooks that do not work with a selftask Task, with the reason and a replacement."""

UNUSABLE = {
    ("optimizer", "adamw_mt"): "it needs torch.optim._multi_tensor, which torch has removed; "
    "optimizer.name=adamw is as fast",
    ("optimizer", "zero"): "it needs fairscale; parallel.reduce=fsdp shards the optimizer state",
    ("meter", "video_accuracy"): "it needs clips of videos; use meters.NAME={name: accuracy}",
}
"""Kind and name of other parts of Classy that do not work, with the reason and a replacement."""

_NEEDS = {
    "progress_bar": ("progressbar", "progressbar2"),
    "tensorboard_plot": ("tensorboard", "tensorboard"),
    "visdom": ("visdom", "visdom"),
}  # hook -> module, package


def refusal(kind: str, name: str) -> str | None:
    """Return why a part of Classy does not work here, or None if no reason is known.

    A reason is also a package that a hook needs and that is not installed.

    Args:
        kind: ``hook``, ``meter``, ``optimizer`` or ``schedule``.
        name: Its name in Classy, with or without the prefix ``classy:``.
    """
    bare = name.removeprefix("classy:")
    reason = INSTEAD.get(bare) if kind == "hook" else UNUSABLE.get((kind, bare))
    if reason:
        return f"Classy Vision's {kind} {bare!r} does not work here: {reason}"
    module, package = _NEEDS.get(bare, ("", "")) if kind == "hook" else ("", "")
    if module and importlib.util.find_spec(module) is None:
        return f"Classy Vision's hook {bare!r} needs {package}: pip install {package}"
    return None


def _hook_defaults(name: str, out: Path) -> dict[str, Any]:
    """Return default arguments of a Classy hook: output folder and device."""
    defaults: dict[str, dict[str, Any]] = {
        "ema_model_weights": {"device": "gpu" if torch.cuda.is_available() else "cpu"},
        "output_csv": {"folder": str(out), "id_key": "index"},
        "tensorboard_plot": {"summary_writer": {"log_dir": str(out / "tensorboard")}},
    }
    return defaults.get(name, {})


def before_save(hook: Any, task: Any) -> None:
    """Copy the current weights into the state of Classy's EMA hook.

    It restores them at the start of a phase, also of a resumed one, and copies them at the end of a
    phase only.
    """
    copy_weights = getattr(hook, "_save_current_model_state", None)
    if copy_weights is not None and task.train:
        copy_weights(task.base_model, hook.state.model_state)


def has(kind: str, name: str) -> bool:
    """Return True if Classy registers ``name``, given as ``classy:NAME`` or as a bare name.

    A bare name is only looked up in modules that are already imported, since importing Classy takes
    two seconds, which is too long for reporting a typo.

    Args:
        kind: ``hook``, ``meter``, ``optimizer``, ``loss`` or ``schedule``; False for any other.
        name: The name.
    """
    if kind not in _PACKAGES:
        return False
    if name.startswith("classy:"):
        return name.removeprefix("classy:") in _registry(kind)
    module = sys.modules.get(_PACKAGES[kind][0])
    return module is not None and name in getattr(module, _PACKAGES[kind][1], {})


def names(kind: str) -> list[str]:
    """Return all names of a kind (see ``build``) in Classy, sorted and without the prefix.

    The part of Classy that registers them is imported.
    """
    return sorted(_registry(kind))


def build(kind: str, name: str, args: dict[str, Any], out: Path | None = None) -> Any:
    """Build a Classy hook, meter, optimizer, loss or schedule.

    Args:
        kind: ``hook``, ``meter``, ``optimizer``, ``loss`` or ``schedule``.
        name: Its name in Classy, with or without the prefix ``classy:``.
        args: Its config without the name, as Classy's ``from_config`` expects it.
        out: The run folder, where hooks write unless ``args`` gives another folder; None: the
            current folder. The folder that a hook writes to is created.

    Raises:
        UserError: If the name is unknown, or the component cannot be built from ``args``.
    """
    bare = name.removeprefix("classy:")
    registered = _registry(kind)
    check_known(bare, registered, f"Classy Vision has no {kind} named {bare!r}")
    config = {**args, "name": bare}
    if kind == "hook":
        config = {**_hook_defaults(bare, out or Path()), **args}
        show_root_lines_of("classy_vision")  # its hooks log through the root logger
    try:
        if kind == "hook" and "folder" in config:
            Path(config["folder"]).mkdir(parents=True, exist_ok=True)
        return registered[bare].from_config(config)
    except (AssertionError, KeyError, OSError, TypeError, ValueError) as error:  # raised by Classy
        raise UserError(
            f"Classy Vision's {kind} {bare!r} cannot be made of {args}: "
            f"{type(error).__name__}: {error}"
        ) from error


def build_schedule(name: str, args: dict[str, Any], *, num_epochs: int) -> Any:
    """Build a schedule of Classy, such as ``classy:multistep``.

    Args:
        name: Its name in Classy, with or without the prefix ``classy:``.
        args: Arguments of the schedule.
        num_epochs: Length of the training, in epochs. It is passed to the schedule, or to the
            parts of a composite one, unless their arguments have ``num_epochs`` or
            ``num_updates``, or as many ``milestones`` as ``values``.

    Raises:
        UserError: If the name is unknown or the arguments are invalid.
    """
    return build("schedule", name, _with_epochs(args, num_epochs))


def _with_epochs(args: dict[str, Any], num_epochs: int) -> dict[str, Any]:
    if "schedulers" in args:
        parts = [_with_epochs(part, num_epochs) for part in args["schedulers"]]
        return {**args, "schedulers": parts}
    has_length = len(args.get("milestones") or ()) == len(args.get("values") or ()) > 0
    if has_length or not {"num_epochs", "num_updates"}.isdisjoint(args):
        return args
    return {"num_epochs": num_epochs, **args}


def _registry(kind: str) -> dict[str, Any]:
    package, attribute = _PACKAGES[kind]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecations of torchvision video and torch.jit
        return dict(getattr(importlib.import_module(package), attribute))
