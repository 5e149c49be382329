"""The sections of a config, with types, defaults, limits and units.

The fields of a *named* thing (method, backbone, hook, ...) are not here: its ``Config``, beside
its code, is their schema, and in the yaml they stand flat beside ``name``.

``load.py`` makes these objects; everybody else only reads them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from selftask.config.fields import setting
from selftask.config.keys import Key
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
"""Hooks that every run has unless its config takes them out: ``hooks.health=null``."""


@dataclass(frozen=True, kw_only=True)
class Component:
    """A named thing and its complete, validated arguments."""

    name: str
    args: dict[str, Any] = field(default_factory=dict)  # of its Config, complete with defaults

    def to_dict(self) -> dict[str, Any]:
        """Return ``{name: ..., **args}``, as in the yaml."""
        return {"name": self.name, **plain(self.args)}


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Data set, and how it is read."""

    source: Component = setting(of="sources", flat=True)  # yaml: data.name and its own fields
    # labelled images for evaluations; none: no k-NN while training
    val: Component | None = setting(None, of="sources", shared=["subset"])
    sampler: Component = setting(Component(name="shuffled"), of="samplers")  # of an epoch
    tokenizer: Component = setting(Component(name="bytes"), of="tokenizers")  # of texts
    augment_on: Literal["cpu", "device"] = "cpu"  # who makes the views: workers, or the device
    # pixels: images for augment_on=device, and those in a cache, have a longer side of at most
    # this; crops then see no finer detail
    max_side: int | None = setting(None, min=1)
    cache: Literal["none", "ram", "disk", "device"] = "none"  # of decoded images: in each process's
    # memory, in a file below $SELFTASK_CACHE, or (small data sets, augment_on=device) on the device
    num_workers: int = setting(0, min=0, also=["workers"])  # processes; yaml: `auto` is possible
    on_error: Literal["skip", "fail"] = "skip"  # what an unreadable file does
    # share of images that may be unreadable; null: 0.1 %, but at least 3 images
    max_unreadable: float | None = setting(None, min=0, max=1)
    max_pixels: int = setting(100_000_000, min=1)  # larger images are refused: they are bombs
    max_bytes: int = setting(1 << 30, min=1)  # of an encoded image; larger ones are not read
    max_scans: int = setting(100, min=1)  # of a JPEG, each of which takes a pass over the image;
    # most have 1, progressive ones about 10
    subset: float | int | dict[str, Any] | None = None  # of the training images: see docs/data.md
    # copy the files to this folder, or to `ram`, before training
    stage_to: str | None = setting(None, path=True)
    read_timeout_s: float = setting(60.0, min=0)  # of a file, when its disk is silent; 0: none
    read_retries: int = setting(2, min=0, max=10)  # after a time-out or an error that passes

    def to_dict(self) -> dict[str, Any]:
        """Return the section as in the yaml, the source's fields beside ours."""
        named = {
            "val": self.val.to_dict() if self.val else None,
            "sampler": self.sampler.to_dict(),
            "tokenizer": self.tokenizer.to_dict(),
        }
        return {**self.source.to_dict(), **named, **_own(self, without=("source", *named))}


@dataclass(frozen=True, kw_only=True)
class ViewConfig:
    """A group of views made by one pipeline."""

    count: int = setting(1, min=0, also=["num", "crops", "num_crops", "number"])
    # views of each image, or with `of` of each view of that group; 0: only for groups made from it
    image: str | None = None  # a further image of the sample, by its name in the data; none: the
    # image itself
    of: str | None = None  # the group whose views are transformed; none: the image
    draws: bool = False  # whether `batch.draws` has the parameters of this group's transforms
    transforms: list[Component] = setting([], of="transforms")

    def to_dict(self) -> dict[str, Any]:
        """Return the section as in the yaml."""
        transforms = [t.to_dict() for t in self.transforms]
        return {**_own(self, without=["transforms"]), "transforms": transforms}


def num_views(views: Mapping[str, ViewConfig]) -> dict[str, int]:
    """Return how many views of an image each group adds to a batch."""
    made: dict[str, int] = {}
    for name, group in views.items():
        made[name] = max(1, group.count) * made.get(group.of or "", 1)
    return {name: made[name] if group.count else 0 for name, group in views.items()}


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Length, batch size, precision and checkpoints of the training."""

    epochs: int | None = setting(None, min=1, also=["num_epochs", "max_epochs", "n_epochs"])
    max_steps: int | None = setting(None, min=1, also=["steps", "num_steps", "iterations"])
    # epochs and max_steps: at least one; with both, whichever comes first
    batch_size: int = setting(256, min=1, also=["batch", "bs"])  # images, over all processes
    precision: Literal["float32", "bfloat16", "float16"] = setting(
        "float32", also=["amp", "fp16", "bf16", "dtype"]
    )
    step: str = setting("standard", also=["train_step"])  # the train step's registered name
    accumulate: int = setting(1, min=1, also=["accum", "grad_accum", "accumulation"])
    # batches per step (step: accumulate), each of batch_size; a loss sees one batch at a time
    seed: int = setting(0, min=0)
    compile: bool = False
    log_every: int = setting(50, min=1, also=["log_interval"])  # steps
    device: Literal["auto", "cpu", "cuda"] = setting("auto", also=["gpu", "accelerator"])
    checkpoint_every: int | str = setting(
        "1 epoch", duration=True, min=1, also=["save_every", "save_interval"]
    )
    keep_checkpoints: int = setting(3, min=1)  # the newest; older ones are deleted
    async_checkpoints: bool = True  # write while training goes on, from a copy in host memory
    sharded_checkpoints: bool = setting(False, also=["sharded", "dcp"])  # every process writes
    # its part into a folder, nothing is gathered (parallel.reduce: fsdp)
    threads: int | Literal["auto"] = setting(
        "auto", min=1, max=1024
    )  # of torch on the CPU, per process;
    # auto: three quarters of the cores, with a GPU those that workers leave; kept on resume
    stop_at: int | None = setting(None, min=1)  # stop after this step as if interrupted

    def to_dict(self) -> dict[str, Any]:
        """Return the section as in the yaml."""
        return _own(self)


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Optimizer, learning rate and weight decay over the training."""

    name: str = setting(of="optimizers", flat=True)
    args: dict[str, Any] = field(default_factory=dict)  # the named optimizer's own fields
    # peak; or a Classy parameter scheduler ({name: ..., ...}), which then is the schedule
    lr: float | dict[str, Any] = setting(min=0, also=["learning_rate", "base_lr", "blr"])
    lr_scale: Literal["none", "linear", "sqrt"] = "none"  # lr times batch_size/256, or its root
    schedule: str = setting("cosine", also=["scheduler", "lr_schedule", "lr_scheduler"])
    warmup: int | str = setting(0, duration=True, also=["warmup_epochs", "warmup_steps"])
    start_lr: float = setting(0.0, min=0, also=["warmup_lr", "start_warmup"])  # of the warm-up
    end_lr: float = setting(0.0, min=0, also=["min_lr", "final_lr"])  # at the end of training
    weight_decay: float = setting(0.0, min=0, also=["wd"])
    end_weight_decay: float | None = setting(None, min=0)  # none: constant
    decay_1d: bool = False  # whether one-dimensional parameters decay too
    decay_tokens: bool = False  # whether a transformer's tokens and learned positions do

    def to_dict(self) -> dict[str, Any]:
        """Return the section as in the yaml, the optimizer's fields beside ours."""
        return {"name": self.name, **plain(self.args), **_own(self, without=("name", "args"))}


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Evaluations of the frozen backbone during training."""

    transforms: list[Component] = setting([], of="transforms")
    evaluations: dict[str, Component] = setting({}, of="evaluations")  # {"knn": ...}
    every: int | str | None = setting(None, duration=True, min=1)  # none: step 0 and the end only

    def to_dict(self) -> dict[str, Any]:
        """Return the section as in the yaml."""
        return {
            "transforms": [t.to_dict() for t in self.transforms],
            "evaluations": _entries(self.evaluations),
            "every": self.every,
        }


@dataclass(frozen=True, kw_only=True)
class InitConfig:
    """Weights to start from; not to be confused with ``resume``."""

    backbone: str | None = setting(None, path=True)  # a file, a run, timm:NAME or torchvision:NAME
    min_matched: float = setting(1.0, min=0, max=1)  # least share of the backbone's tensors loaded

    def to_dict(self) -> dict[str, Any]:
        """Return the section as in the yaml."""
        return _own(self)


@dataclass(frozen=True, kw_only=True)
class ResumeConfig:
    """Which checkpoint to resume from; ``resume=auto`` is short for ``resume.checkpoint=auto``."""

    checkpoint: str = setting("auto", path=True)  # auto: the newest of ``out``; never; or a path
    data: Literal["refuse", "allow"] = "refuse"  # if images, names or classes are not as they were

    def to_dict(self) -> dict[str, Any]:
        """Return the section as in the yaml."""
        return _own(self)


@dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    """Number of machines and processes, restarts, options of SLURM."""

    nodes: int = setting(1, min=1, also=["num_nodes"])
    processes: int = setting(1, min=1, also=["gpus", "num_gpus", "nproc_per_node"])  # per node
    slurm: dict[str, Any] = field(default_factory=dict)
    hang_timeout_s: float = setting(
        600.0, min=1
    )  # a run in which no rank moves for so long is stuck
    max_restarts: int = setting(0, min=0)  # new attempts after a rank failed or was killed
    max_requeues: int = setting(100, min=0)  # SLURM: returns to the queue, preempted or timed out

    @property
    def world_size(self) -> int:
        """Total number of processes."""
        return self.nodes * self.processes

    def to_dict(self) -> dict[str, Any]:
        """Return the section as in the yaml."""
        return _own(self)


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How processes share the work; without cost on one process."""

    reduce: Literal["manual", "ddp", "fsdp"] = setting("manual", also=["strategy", "backend"])
    bucket_mb: float = setting(25.0, min=0.001)  # MiB of gradients that travel together
    grad_compression: Literal["none", "fp16", "bf16"] = "none"  # of gradients on their way (manual)
    static_graph: bool = False  # every step uses the same parameters, equally often (ddp)
    activation_checkpointing: float | str = setting(
        "none", also=["checkpointing", "grad_checkpointing", "gradient_checkpointing"]
    )  # blocks: keep what enters a block only, compute the rest again: memory for time; a size
    # ('8 GB') or a share (0.5): of as few blocks as keep the rest within that
    sync_batch_norm: int | Literal["none", "all", "node"] = setting(
        "none", min=1, also=["sync_bn", "syncbn", "sync_batchnorm"]
    )  # statistics over all processes, those of a node, or groups of so many

    def to_dict(self) -> dict[str, Any]:
        """Return the section as in the yaml."""
        return _own(self)


@dataclass(frozen=True, kw_only=True)
class Config:
    """Complete config of a training; equal configs give equal trainings."""

    recipe: str  # as given on the command line
    data: DataConfig = setting(missing="data=FOLDER takes any tree of images")
    views: dict[str, ViewConfig]  # in the order in which they reach the method
    backbone: Component = setting(of="backbones", missing="give the name of a backbone")
    method: Component = setting(of="methods", missing="give the name of a method")
    train: TrainConfig
    optimizer: OptimizerConfig = setting(missing="give its name and lr")
    meters: dict[str, Component] = setting(of="meters")
    hooks: dict[str, Component] = setting(of="hooks")
    eval: EvalConfig
    init: InitConfig
    resume: ResumeConfig
    parallel: ParallelConfig
    launch: LaunchConfig
    out: str = setting(path=True)  # the run folder
    imports: list[str]  # yaml `import`: the user's own modules
    places: dict[str, str] = field(default_factory=dict, compare=False, repr=False)
    # dotted key -> where its value comes from; read through `place`

    @property
    def out_folder(self) -> Path:
        """Local folder of the run: ``out``, or the local copy of its address."""
        return work_folder(self.out)

    def place(self, key: str) -> str:
        """Return where a key was set: ``file.yaml:14``, ``command line: ...`` or a default.

        A key without a place of its own has that of the section around it.
        """
        while key not in self.places and "." in key:
            key = key.rpartition(".")[0]
        return self.places.get(key, "default")

    @property
    def pipelines(self) -> dict[Key, list[Component]]:
        """Every list of transforms by its key."""
        lists: dict[Key, list[Component]] = {
            ("views", name, "transforms"): group.transforms for name, group in self.views.items()
        }
        return {**lists, ("eval", "transforms"): self.eval.transforms}

    def to_dict(self) -> dict[str, Any]:
        """Return the content of ``config.yaml``, which loads back to an equal Config."""
        return {
            "recipe": self.recipe,
            "import": list(self.imports),
            "data": self.data.to_dict(),
            "views": {name: view.to_dict() for name, view in self.views.items()},
            "backbone": self.backbone.to_dict(),
            "method": self.method.to_dict(),
            "train": self.train.to_dict(),
            "optimizer": self.optimizer.to_dict(),
            "meters": _entries(self.meters),
            "hooks": {
                **dict.fromkeys([n for n in DEFAULT_HOOKS if n not in self.hooks]),
                **_entries(self.hooks),
            },
            "eval": self.eval.to_dict(),
            "init": self.init.to_dict(),
            "resume": self.resume.to_dict(),
            "parallel": self.parallel.to_dict(),
            "launch": self.launch.to_dict(),
            "out": self.out,
        }


SHARED: dict[Key, frozenset[str]] = {
    ("data",): frozenset(f.name for f in fields(DataConfig)) - {"source", "val"},
    ("optimizer",): frozenset(f.name for f in fields(OptimizerConfig)) - {"name", "args"},
}
"""Fields of sections with a name that stay if the config names another thing there."""


def plain(value: Any) -> Any:
    """Return a copy for yaml, with lists for tuples."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def _own(section: Any, *, without: Sequence[str] = ()) -> dict[str, Any]:
    names = [f.name for f in fields(section) if f.name not in without]
    return {name: plain(getattr(section, name)) for name in names}


def _entries(named: dict[str, Component]) -> dict[str, Any]:
    """Return ``key: {args}`` entries, with ``name`` only if it differs from the key."""
    entries = {}
    for key, component in named.items():
        entry = component.to_dict()
        if component.name == key:
            del entry["name"]
        entries[key] = entry
    return entries
