"""Checks of device, precision and compilation against the rest of a config."""

from __future__ import annotations

import os
from collections.abc import Iterator
from shutil import which

from selftask.config.keys import Key
from selftask.config.schema import CompileConfig, Config, ParallelConfig
from selftask.errors import nearest

Problem = tuple[Key, str]
_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
DEVICES = ("auto", "cpu", "cuda", "mps", "xpu")


def problems(config: Config) -> Iterator[Problem]:
    """Yield key and text of each contradiction."""
    yield from _device(config)
    yield from _precision(config)
    yield from _compile(config)


def _device(config: Config) -> Iterator[Problem]:
    name = config.train.device
    kind, colon, _ = name.partition(":")
    if colon and kind in DEVICES:
        text = (
            f"train.device={name!r}: give the type only ({kind}); each process takes the device of "
            "its local rank, and CUDA_VISIBLE_DEVICES or the launcher says which there are"
        )
        yield ("train", "device"), text
    elif name not in DEVICES:
        hint = nearest(name, list(DEVICES))
        hint = hint if hint.startswith("did") else "one of " + ", ".join(DEVICES)
        yield ("train", "device"), f"train.device={name!r}: {hint}"
    if kind == "mps" and config.launch.world_size > 1:
        text = "train.device='mps' runs one process: it has no collectives; set launch.processes=1"
        yield ("train", "device"), text


def _precision(config: Config) -> Iterator[Problem]:
    train = config.train
    if train.precision not in ("auto", "float32") and train.step.name == "manual":
        text = f"train.step='manual' has no mixed precision ({train.precision}); use standard"
        yield ("train", "step"), text
    if train.deterministic and train.cudnn_benchmark:
        text = (
            "train.cudnn_benchmark chooses algorithms by their time, which differs from run to "
            "run, and train.deterministic forbids that; take one of them out"
        )
        yield ("train", "cudnn_benchmark"), text


def _compile(config: Config) -> Iterator[Problem]:
    train, parallel = config.train, config.parallel
    if train.compile == "step":
        text = "train.compile='step': forward, loss and backward together are train.step=compiled"
        yield ("train", "compile"), text
    compiler = os.environ.get("CXX", "g++")
    inductor = train.compile_options.backend == "inductor"
    if train.uses_compiler and inductor and not (which(compiler) or which("clang++")):
        key = "compile" if train.compile else "step"
        text = (
            f"train.{key}: torch's inductor needs a C++ compiler, and {compiler} is not on the "
            "PATH; install one, or use train.compile_options.backend=aot_eager"
        )
        yield ("train", key), text
    if train.uses_compiler:
        yield from _compile_mode(train.compile_options, parallel)
    if train.compile and parallel.activation_checkpointing not in ("none", "blocks"):
        text = (
            "train.compile needs parallel.activation_checkpointing to be none or blocks: a budget "
            "measures while layers run, which a graph does not allow"
        )
        yield ("train", "compile"), text


def _compile_mode(options: CompileConfig, parallel: ParallelConfig) -> Iterator[Problem]:
    key, text = ("train", "compile_options", "mode"), f"train.compile_options.mode={options.mode!r}"
    if options.mode is None:
        return
    if options.mode not in _MODES:
        yield key, f"{text}: {nearest(options.mode, list(_MODES))}"
    elif options.backend != "inductor":
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
