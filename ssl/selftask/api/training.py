"""Create and train tasks from Python."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from selftask.api.batches import TaskOfBatches, first_batch, settings_of
from selftask.api.model import Model, load
from selftask.api.objects import objects_in, overrides, restore
from selftask.api.trainer import Trainer
from selftask.config.checks.locations import check_not_moved
from selftask.config.compose import recipes
from selftask.config.load import load_config
from selftask.data.loading.open_data import open_data
from selftask.errors import UserError
from selftask.logs import read_metrics
from selftask.methods.base import Method
from selftask.registry import TASKS
from selftask.run.local_ranks import starts_ranks
from selftask.task import Task

_BASE = "base/python.yaml"  # recipe for method objects and classes, and for `batches`


@dataclass(frozen=True)
class Run:
    """A finished training run."""

    task: Task
    out: Path = field(init=False)
    """The run folder; absolute, since the script may change its current folder."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "out", self.task.out.absolute())

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The rows of ``metrics.jsonl`` (losses and evaluations), read from the file each time."""
        return read_metrics(self.out / "metrics.jsonl")

    @property
    def metrics(self) -> dict[str, Any]:
        """The last value of each column of ``metrics.jsonl``."""
        return {name: value for row in self.rows for name, value in row.items()}

    def load(self) -> Model:
        """Return the exported backbone; see ``selftask.load``. The run's own code is trusted."""
        restore(self.task.objects)
        return load(self.out, trust=True)


def train(
    recipe: str | Path | Method | type[Method],
    *,
    data: Any = None,
    backbone: Any = None,
    out: str | Path | None = None,
    hooks: Iterable[Any] | Mapping[str, Any] = (),
    **settings: Any,
) -> Run:
    """Train in this process; run folder, log and resuming are as in ``selftask train``.

    ::

        run = selftask.train("simclr", data="photos/", out="runs/a", train={"epochs": 100})
        run = selftask.train("simclr", data=dataset, backbone=module, **{"train.epochs": 100})

    Args:
        recipe: Name of a method, shipped recipe or yaml file; or a method object or class.
        data: Value of ``data=`` on the command line, or a map-style data set whose items are images
            or (image, label).
        backbone: A name, or a module: images (B, C, H, W) -> (B, E). It is trained in place.
        out: The run folder; calling again resumes the run. None: that of the recipe.
        hooks: Hook objects, or the section ``hooks`` as a mapping.
        **settings: Other settings by dotted key, or as nested dicts.

    Raises:
        ConfigError: With all errors in the settings.
        UserError: If the data, the backbone or the run folder do not match the settings.
        Interrupted: If a signal or ``train.stop_at`` stopped the run; a checkpoint is saved.
        Exception: Any other error that ended the run.
    """
    named = {"data": data, "backbone": backbone, "out": out}
    settings |= {key: value for key, value in named.items() if value is not None}
    task = create_task(recipe, hooks=hooks, **settings)
    Trainer().train(task)
    return Run(task)


def create_task(
    recipe: str | Path | Method | type[Method],
    *,
    batches: Iterable[Any] | None = None,
    hooks: Iterable[Any] | Mapping[str, Any] = (),
    **settings: Any,
) -> Task:
    """Create a task from names, settings and objects, for ``Trainer().train(task)``.

    Args:
        recipe: As for ``train``. With ``batches`` it must be a method, whose default recipe is not
            read.
        batches: An iterable over the batches of an epoch, such as a DataLoader, instead of
            ``data``. Each batch is a view, a list of views, a dict of view groups, a tuple of one
            of these and labels (B,), or a ``Batch``, which methods with a memory of all images
            need; views are float (B, C, H, W) and get the network's data type. Methods that undo
            the normalization of the views, such as ``mfm``, need it as ``views.main.transforms``.
            The iterable needs a length and is iterated in each epoch; its first batch is also read
            here, to derive settings. ``set_epoch(epoch)`` of it, its ``batch_sampler`` and its
            ``sampler`` is called if it exists, and ``seek(start)`` of it or else of its
            ``batch_sampler``.
        hooks: As for ``train``.
        **settings: As for ``train``: ``data``, ``backbone``, ``out``, ``optimizer``, ...

    Raises:
        UserError: If a setting is wrong (ConfigError), the data cannot be opened, the batches have
            no length or another form, or several local ranks are requested.
    """
    if not isinstance(recipe, str | Path) or batches is not None:
        settings["method"] = recipe
        recipe = recipes.folder() / _BASE
    if isinstance(hooks, Mapping):
        settings["hooks"], hooks = hooks, ()
    if not isinstance(hooks, Iterable):
        raise UserError(f"hooks: expected a list, such as [{type(hooks).__name__}(...)]")
    module = settings.get("backbone")
    backbone = module if isinstance(module, nn.Module) else None
    task: Task
    if batches is None:
        words = overrides(settings)
        config = load_config(str(recipe), words)
        check_not_moved(str(recipe), config)
        task = TASKS[config.task](config, sources=open_data(config.data), backbone=backbone)
    else:
        if unused := sorted(key for key in settings if key.partition(".")[0] == "data"):
            raise UserError(f"{unused[0]}: has no effect with batches, which are the only images")
        first = first_batch(batches)
        words = overrides({**settings_of(first), **settings})
        config = load_config(str(recipe), words)
        config.notes.clear()  # on the views, which come with the batches
        task = TaskOfBatches(
            config,
            batches,
            first.all_views[0].shape[1],
            backbone,
            has_transforms=any(key.partition(".")[0] == "views" for key in settings),
        )
    if starts_ranks(config):
        raise UserError(
            f"launch: {config.launch.world_size} processes cannot be started from Python; start "
            "this script with torchrun, or use `selftask train`"
        )
    task.objects = objects_in(words)
    for hook in hooks:
        task.add_hook(hook)
    return task
