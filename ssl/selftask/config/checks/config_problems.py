"""All checks of a config whose values have valid types."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from shutil import which

from selftask.config.checks.components import component_problems, hook_problems
from selftask.config.checks.grid import patch_problems
from selftask.config.checks.locations import location_problems
from selftask.config.checks.optimizer import optimizer_problems
from selftask.config.checks.requirements import label_free, requirement_problems
from selftask.config.checks.sbatch import sbatch_problems
from selftask.config.checks.views import view_problems
from selftask.config.keys import Problem
from selftask.config.schema import Config, ParallelConfig
from selftask.config.values.budget import WORDS, parse_budget
from selftask.errors import nearest
from selftask.registry import TASKS

DEVICES = ("auto", "cpu", "cuda", "mps", "xpu")


def _named(text: str) -> Problem:
    """Return a problem with the key at the beginning of its text."""
    return tuple(re.split(r"[^\w.]", text, maxsplit=1)[0].split(".")), text


def _length(config: Config) -> Iterator[Problem]:
    train = config.train
    if train.epochs is None and train.max_steps is None:
        yield ("train",), "train.epochs and train.max_steps are both null; give at least one"


def _validation(config: Config) -> Iterator[Problem]:
    """Yield problems of ``data.val_sets``, ``eval.loss`` and the labels of evaluations."""
    data = config.data
    for name in data.val_sets:
        if not re.fullmatch(r"[\w.-]+", name):
            text = f"data.val_sets: the name {name!r} may have letters, digits and ._- only"
            yield ("data", "val_sets", name), text
    has_val = data.val is not None or bool(data.val_sets)
    if config.eval.loss and not has_val:
        yield _named("eval.loss=true: data.val is null; give the images to take it of")
    every = config.eval.evaluations
    learning = [name for name in every if name not in label_free(every)]
    if data.relabel in ("index", "zero") and has_val and learning:
        without = " ".join(f"eval.evaluations.{name}=null" for name in learning)
        yield _named(
            f"data.relabel={data.relabel!r} replaces the labels of which eval.evaluations "
            f"({', '.join(learning)}) learn, but not those of data.val; set it to no, or take "
            f"them out: {without}"
        )


def _batch(config: Config) -> Iterator[Problem]:
    train, world = config.train, config.launch.world_size
    if train.batch_size % world:
        right = max(train.batch_size // world, 1) * world
        yield _named(
            f"train.batch_size={train.batch_size} is the global batch and must be divisible by "
            f"the {world} processes of launch; try {right}"
        )


def _engine(config: Config) -> Iterator[Problem]:
    """Yield problems of options of ``data`` that do not work with ``data.augment_on=cpu``."""
    data = config.data
    if data.augment_on == "device":
        return
    if data.cache == "device":
        yield _named("data.cache='device' needs data.augment_on=device")
    if data.max_side is not None and data.cache not in ("ram", "disk"):
        yield _named(
            f"data.max_side={data.max_side} has no effect with data.augment_on='cpu' without a "
            "cache; use data.augment_on=device, or data.cache=ram or disk"
        )


_DEFAULT = ParallelConfig()
_ONLY_WITH = {
    "grad_compression": "manual",
    "static_graph": "ddp",
    "find_unused": "ddp",
    "shard_over": "fsdp",
    "cpu_offload": "fsdp",
    "meta_init": "fsdp",
    "prefetch": "fsdp",
}


def _parallel(config: Config) -> Iterator[Problem]:
    """Yield options of ``parallel`` without effect, and conflicts of them with ``train``."""
    parallel, train = config.parallel, config.train
    for key, way in _ONLY_WITH.items():
        if getattr(parallel, key) != getattr(_DEFAULT, key) and parallel.reduce != way:
            yield _named(
                f"parallel.{key} has no effect with parallel.reduce={parallel.reduce!r}; "
                f"use parallel.reduce={way}"
            )
    if parallel.sync_buffers == "never" and parallel.buffers != _DEFAULT.buffers:
        yield _named(
            f"parallel.buffers={parallel.buffers!r} has no effect with "
            "parallel.sync_buffers=never; use evaluation or step, or take it out"
        )
    if parallel.static_graph and parallel.find_unused:
        yield _named(
            "parallel.find_unused does not go with parallel.static_graph; take one of them out"
        )
    if parallel.cpu_offload and train.precision == "float16":
        yield _named(
            "parallel.cpu_offload does not go with train.precision=float16, which checks all "
            "gradients on the device; use train.precision=bfloat16"
        )
    if parallel.static_graph and train.accumulate > 1:
        yield _named(
            "parallel.static_graph does not go with train.accumulate; take one of them out"
        )
    if train.sharded_checkpoints and parallel.reduce != "fsdp":
        yield _named(
            "train.sharded_checkpoints=true has no effect with "
            f"parallel.reduce={parallel.reduce!r}, which shards nothing; use parallel.reduce=fsdp"
        )


def _activation_checkpointing(config: Config) -> Iterator[Problem]:
    value = config.parallel.activation_checkpointing
    if value in WORDS:
        return
    try:
        parse_budget(value)
    except ValueError as error:
        yield _named(f"parallel.activation_checkpointing={value!r}: {error}")


def _device(config: Config) -> Iterator[Problem]:
    """Yield problems of device, precision and determinism."""
    train = config.train
    name = train.device
    kind, colon, _ = name.partition(":")
    if colon and kind in DEVICES:
        yield _named(
            f"train.device={name!r}: give the type only ({kind}); each process takes the device of "
            "its local rank, and CUDA_VISIBLE_DEVICES or the launcher says which there are"
        )
    elif name not in DEVICES:
        yield _named(f"train.device={name!r}: one of " + ", ".join(DEVICES))
    if kind == "mps" and config.launch.world_size > 1:
        yield _named(
            "train.device='mps' runs one process: it has no collectives; set launch.processes=1"
        )
    if train.precision not in ("auto", "float32") and train.step.name == "manual":
        yield _named(
            f"train.step='manual' has no mixed precision ({train.precision}); use standard"
        )
    if train.grad_scaler.enabled and train.step.name == "manual":
        yield _named(
            "train.grad_scaler.enabled=true has no effect with train.step='manual', which does "
            "not scale the loss; use standard"
        )
    if train.deterministic and train.cudnn_benchmark:
        yield _named(
            "train.cudnn_benchmark chooses algorithms by their time, which differs from run to "
            "run, and train.deterministic forbids that; take one of them out"
        )


def _compiler(config: Config) -> Iterator[Problem]:
    """Yield problems of ``train.compile``, and of a missing compiler."""
    train = config.train
    if train.compile == "step":
        yield _named(
            "train.compile='step': forward, loss and backward together are train.step=compiled"
        )
    compiler = os.environ.get("CXX", "g++")
    inductor = train.compile_options.backend == "inductor"
    if train.uses_compiler and inductor and not (which(compiler) or which("clang++")):
        key = "compile" if train.compile else "step"
        yield _named(
            f"train.{key}: torch's inductor needs a C++ compiler, and {compiler} is not on the "
            "PATH; install one, or use train.compile_options.backend=aot_eager"
        )
    if train.compile and config.parallel.activation_checkpointing not in WORDS:
        yield _named(
            "train.compile needs parallel.activation_checkpointing to be none or blocks: a budget "
            "measures while layers run, which a graph does not allow"
        )


def _compiler_mode(config: Config) -> Iterator[Problem]:
    options, parallel = config.train.compile_options, config.parallel
    key, text = ("train", "compile_options", "mode"), f"train.compile_options.mode={options.mode!r}"
    if options.mode is None or not config.train.uses_compiler:
        return
    if options.backend != "inductor":
        yield key, f"{text} is a mode of backend: inductor, not of {options.backend}; take it out"
    elif options.records_graphs and parallel.reduce == "fsdp":
        problem = (
            "records CUDA graphs, which read weights where they were recorded, and "
            "parallel.reduce=fsdp gathers them anew in each step; set it to null"
        )
        yield key, f"{text} {problem}"
    elif options.records_graphs and parallel.activation_checkpointing != "none":
        problem = (
            "records a CUDA graph of the whole network, and parallel.activation_checkpointing="
            f"{parallel.activation_checkpointing} works on single blocks; take one of them out"
        )
        yield key, f"{text} {problem}"


def _expected(config: Config) -> Iterator[Problem]:
    for name, (low, high) in config.expected.items():
        if low > high:
            text = f"expected.{name}=[{low:g}, {high:g}]: the lowest value comes first"
            yield ("expected", name), text  # the name may contain a slash


def _task(config: Config) -> Iterator[Problem]:
    if config.task not in TASKS:
        yield ("task",), f"no task named {config.task!r}; {nearest(config.task, TASKS)}"


Check = Callable[[Config], Iterator[Problem]]
_OF_VALUES: tuple[Check, ...] = (
    *(_length, _validation, _engine, _parallel, _activation_checkpointing, _batch),
    *(_compiler, _compiler_mode, _device, _expected, _task),
    *(optimizer_problems, sbatch_problems, patch_problems, requirement_problems),
    *(view_problems, component_problems),
)
_OF_MACHINE: tuple[Check, ...] = (hook_problems, location_problems)


def config_problems(config: Config, *, is_trained: bool = True) -> list[Problem]:
    """Return key and text of each problem of a config whose values have valid types.

    Args:
        config: The config.
        is_trained: Whether a run will train with it. If not, its hooks are not checked, and files
            that it names are not looked for.
    """
    checks = _OF_VALUES + (_OF_MACHINE if is_trained else ())
    return [problem for check in checks for problem in check(config)]
