"""Checks of ``acceptance.py`` on speed and memory, with the recipes of the papers."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from itertools import repeat
from pathlib import Path

import torch

import tiny
from gpu.agreement import EXACT
from gpu.rows import Result, Setting
from selftask.config.load import load_config
from selftask.config.schema import Config
from selftask.data.loading.open_data import open_data
from selftask.distributed.accelerator import memory_bytes, reset_memory_peaks, wait_for
from selftask.logs import read_metrics
from selftask.plan.assumptions import take_assumptions
from selftask.plan.plan import Plan, make_plan
from selftask.task import Task
from selftask.task.loop import train_loop

PRECISIONS = {  # cuDNN's TF32 is on by default
    "float32": ("train.precision=float32", "train.cudnn_tf32=false"),
    "TF32": ("train.precision=float32", "train.matmul_precision=high"),
    "bfloat16": ("train.precision=bfloat16",),
    "float16": ("train.precision=float16",),
}
LOWEST_RATIO = 0.95  # to the bare loop: the rest of a step is at most 5 % of the networks' time
LOWEST_OF_LOADER = 0.9  # of synthetic data: if less, the loader starves the GPU
LARGEST_OF_PLAN, LEAST_OF_PLAN = 1.25, 0.8  # the allocator's fragments; what a plan rounds up
COMPILED = 2e-2  # difference of losses: a compiled network sums in another order


def measured(setting: Setting, recipe: str, *more: str) -> Plan:
    """Return the plan of a recipe, with the speed of steps whose images are on the device."""
    sizes = setting.sizes
    words = ["samples=1.28M", *sizes.assumed, f"train.batch_size={sizes.batch_size}"]
    overrides, assumptions = take_assumptions([*words, setting.on_device, *sizes.more, *more])
    return make_plan(load_config(recipe, overrides), assumptions, measured=True)


def check_speed(setting: Setting) -> Iterator[Result]:
    """Images a second without a loader, and peak memory beside the plan's."""
    device = torch.device(setting.device)
    for recipe in setting.sizes.recipes:
        gc.collect()  # the last recipe's task
        reset_memory_peaks(device)
        before = memory_bytes(device).get("allocated", 0)
        plan = measured(setting, recipe)
        rate = plan.assumptions.images_per_s
        yield Result("speed", f"{recipe}, synthetic", f"{rate:,.1f} images/s")
        peak = memory_bytes(device).get("allocated_peak")
        if not peak:
            yield Result("speed", f"{recipe}, memory", "not counted on this device")
            continue
        ratio = (peak - before) / plan.memory.total
        passed = LEAST_OF_PLAN <= ratio <= LARGEST_OF_PLAN
        limits = f"{LEAST_OF_PLAN} to {LARGEST_OF_PLAN}"
        yield Result("speed", f"{recipe}, memory", f"{ratio:.2f} of the plan", limits, passed)


def check_loader(setting: Setting) -> Iterator[Result]:
    """Images a second with the loader and its workers, and with images kept on the device."""
    ways = {"loader": (), "cached": ("data.cache=device", "data.augment_on=device")}
    for recipe in setting.sizes.recipes:
        synthetic = measured(setting, recipe).assumptions.images_per_s or 0.0
        for way, words in ways.items():
            rate = _trained_rate(setting, recipe, way, *words)
            ratio = rate / synthetic
            figure = f"{rate:,.1f} images/s, {ratio:.2f} of synthetic"
            expected = f"at least {LOWEST_OF_LOADER} of synthetic"
            yield Result("loader", f"{recipe}, {way}", figure, expected, ratio >= LOWEST_OF_LOADER)


def _trained_rate(setting: Setting, recipe: str, way: str, *more: str) -> float:
    """Return the images a second of the last row of a run; the first ones warm up."""
    config = _config(setting, recipe, way, *more)
    train_loop(Task(config, sources=open_data(config.data)))
    rows = read_metrics(Path(config.out) / "metrics.jsonl")
    return float([row["images_per_s"] for row in rows if "images_per_s" in row][-1])


def _config(setting: Setting, recipe: str, name: str, *more: str) -> Config:
    """Return the config of a short run of noise images."""
    sizes = setting.sizes
    data = f"data={{name: synthetic, count: {sizes.images}, size: {sizes.height}, classes: 1000}}"
    length = f"train.max_steps={2 * sizes.steps}", f"train.log_every={sizes.steps // 2}"
    out = setting.folder / f"{recipe.replace('/', '-')}-{name}"
    words = (data, f"out={out}", f"train.batch_size={sizes.batch_size}", "hooks.progress=null")
    off = ("data.val=null", "eval.evaluations={knn: null, linear: null}", setting.on_device)
    return load_config(recipe, [*words, *length, *off, *sizes.more, *more])


def check_bare_loop(setting: Setting) -> Iterator[Result]:
    """Supervised steps of selftask beside a loop of forward, backward and update alone."""
    sizes = setting.sizes
    config = _config(setting, sizes.recipes[0], "bare", "train.log_every=1000")
    task = Task(config, sources=open_data(config.data))
    task.prepare()
    task.on_start()
    task.on_phase_start()
    batch = next(task.batches)
    task.batches = repeat(batch)
    optimizer = torch.optim.SGD(task.model.parameters(), 1e-3, momentum=0.9)

    def bare_step() -> None:
        with task.autocast():
            loss = task.loss(task.model(batch.input), batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    seconds = [_seconds(step, setting) for step in (bare_step, task.step)]
    task.close()
    ratio = seconds[0] / seconds[1]
    figure = f"{ratio:.2f} of {sizes.batch_size / seconds[0]:,.1f} images/s"
    expected = f"at least {LOWEST_RATIO}"
    yield Result("bare_loop", "supervised", figure, expected, ratio >= LOWEST_RATIO)


def _seconds(step: Callable[[], None], setting: Setting) -> float:
    """Return the mean time of a step after as many that warm up."""
    device, number = torch.device(setting.device), max(1, setting.sizes.steps // 2)
    begun = 0.0
    for count in range(2 * number):
        if count == number:
            wait_for(device)
            begun = time.perf_counter()
        step()
    wait_for(device)
    return (time.perf_counter() - begun) / number


def check_precision(setting: Setting) -> Iterator[Result]:
    """The ladder of precisions: each step down must not be slower than float32."""
    base = 0.0
    for name, words in PRECISIONS.items():
        rate = measured(setting, setting.sizes.recipes[0], *words).assumptions.images_per_s or 0.0
        base = base or rate
        figure = f"{rate:,.1f} images/s, {rate / base:.2f} of float32"
        yield Result("precision", name, figure, "at least 1 of float32", rate >= base)


def check_compile(setting: Setting) -> Iterator[Result]:
    """Losses of compiled networks beside those of the same networks."""
    for method in ("simclr", "dino"):
        expected = _losses(setting, method, "train.compile=false")
        for mode in setting.sizes.modes:
            options = f"{{backend: {setting.sizes.compiler}, mode: {mode}}}"
            words = ("train.compile=model", f"train.compile_options={options}")
            losses = _losses(setting, method, *words)
            error = max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True))
            case, most = f"{method}, mode {mode}", f"at most {COMPILED:.0e}"
            yield Result("compile", case, f"{error:.1e}", most, error <= COMPILED)


def check_compiled_speed(setting: Setting) -> Iterator[Result]:
    """Images a second of compiled networks beside those of the same networks."""
    options = f"train.compile_options={{backend: {setting.sizes.compiler}}}"
    for recipe in setting.sizes.recipes:
        eager, compiled = (
            measured(setting, recipe, *words).assumptions.images_per_s or 0.0
            for words in ((), ("train.compile=model", options))
        )
        figure = f"{compiled:,.1f} images/s, {compiled / eager:.2f} of eager"
        yield Result("compiled_speed", recipe, figure)


def _losses(setting: Setting, method: str, *words: str) -> list[float]:
    """Return the losses of five steps."""
    quiet = ("hooks.progress=null", "train.max_steps=5", setting.on_device)
    quiet += ("train.precision=float32", *EXACT)
    out = f"compile-{method}-{abs(hash(words))}"
    tiny.train(method, setting.folder, out, *quiet, *words)
    return [row["loss"] for row in tiny.rows(setting.folder / out) if "loss" in row]
