"""Methods, train steps and both augmentation engines on an accelerator that this machine lacks.

Nothing mixes devices, and between two log points the host waits for no value of the device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import imagined_streams
import tiny
from bench.launches import BOUND, count_parts
from imagined_device import NAME, ImaginedDevice, MixedDevices, OnDevice, in_process
from imagined_losses import Checked
from selftask.batch import Batch
from selftask.distributed import accelerator
from selftask.evaluate.dense.confusion import Confusion
from selftask.evaluate.online import evaluate_task
from selftask.optim.gradients import clip_norm
from selftask.registry import METHODS, TRAIN_STEPS
from selftask.task import Task
from selftask.task.numerics import numerics

QUICK = ("moco",)
STEP_OVERRIDES = {"accumulate": ["train.accumulate=2"]}
BATCH_FORMS = (
    "[{name: random_resized_crop, size: 32}, horizontal_flip, {name: normalize, stats: half}]"
)
ALL_HOOKS = (
    "hooks.timing={}",
    "hooks.empty_cache={every: 2}",
    "hooks.ema={}",
    "hooks.swa={start: 1, every: 1}",
    "hooks.gradient_norms={}",
    "hooks.histograms={every: 1000 steps}",
    "hooks.activations={}",
    "hooks.precise_bn={batches: 2, batch_size: 4}",
)
OF_LABELS = ("hooks.train_meters={}", "hooks.mixup={}")
PROBE = "hooks.online_probe={layers: [-1]}"
CLIPPING = (
    "{mode: norm, max_norm: 1.0}",
    "{mode: per_parameter}",
    "{mode: value, max_value: 1.0}",
    "{mode: adaptive}",
)
OVERFLOW = "in unscale_: if all_reduce_sum(overflow).item()"  # float16: a step may be skipped


def run(
    method: str, folder: Path, *more: str, plant: Any = None, bound: float = math.inf
) -> tuple[list[str], Task]:
    """Train on the device, with logs at the first and last step only.

    Returns:
        Where the host waited in the steps between, and streams did not; losses in half precision;
        operations that CUDA refuses in deterministic mode; steps of more than ``bound`` launches or
        without a finite loss. And the trained task.
    """
    options = ["train.epochs=1", "train.log_every=1000", "hooks.progress=null"]
    problems, losses = [], []
    with Checked() as device:
        task = tiny.task(method, folder, "run", *options, *more, "train.device=auto")
        task.evaluate = evaluate_task
        task.prepare()
        if plant is not None:
            task.loss.forward = plant.__get__(task.loss)
        with count_parts(task, device), numerics(task.config.train, task.device):
            task.on_start()
            while not task.done_training():
                task.on_phase_start()
                for number in range(tiny.STEPS_PER_EPOCH + 1):
                    device.waits.clear()
                    device.launches.clear()
                    is_between = task.train and number and not task.should_log
                    try:
                        task.step()
                    except StopIteration:
                        break
                    losses.append(task.last_batch.loss)
                    if is_between:
                        problems += [wait for wait in device.waits if OVERFLOW not in wait]
                        if device.launches.total() > bound:
                            problems.append(f"{device.launches.total()}: {device.launches}")
                task.on_phase_end()
            task.on_end()
            task.close()
        problems += device.races + device.halves + device.nondeterministic
        problems += [f"loss {loss}" for loss in map(float, losses) if not math.isfinite(loss)]
    assert task.device.type == NAME
    assert next(task.base_model.parameters()).device == torch.device(NAME, 0)
    assert task.steps_done > 2
    return problems, task


def trained(
    method: str, folder: Path, *more: str, then: Sequence[str] = (), bound: float = math.inf
) -> list[str]:
    """Train, evaluate, save, resume with ``then`` and train on; the problems of ``run``."""
    data_words = [
        f"data.val={tiny.digits_file(folder)}",
        "eval.evaluations={knn: {}, linear: null}",
    ]
    options = [*data_words, *more]
    problems, task = run(method, folder, *options, "train.stop_at=null", bound=bound)
    assert 0.0 <= task.last_row["knn_top1"] <= 1.0
    saved = tiny.last_state(task.out)
    assert saved["clock"]["steps_done"] == task.steps_done
    resumed, again = run(method, folder, *options, *then, "train.epochs=2")
    assert again.resumed
    assert again.steps_done == 2 * task.steps_done
    return problems + resumed


@pytest.mark.parametrize("method", QUICK)
def test_methods(method: str, tmp_path: Path) -> None:
    check_method(method, tmp_path)


@pytest.mark.slow
@pytest.mark.proof
@pytest.mark.parametrize("method", METHODS.names())
def test_a_method_on_the_device(method: str, tmp_path: Path) -> None:
    check_method(method, tmp_path)


def check_method(method: str, folder: Path) -> None:
    """In bfloat16 with few launches a step; then in float16 with all hooks and a clipping."""
    clip = CLIPPING[METHODS.names().index(method) % len(CLIPPING)]
    then = ["train.precision=float16", f"hooks.clip_gradients={clip}", *ALL_HOOKS]
    then += OF_LABELS if method == "supervised" else ()
    then += [PROBE] if method not in ("supervised", "multilabel") else []
    assert in_process(trained_twice, method, folder, then) == []


def trained_twice(method: str, folder: Path, then: list[str]) -> list[str]:
    options = ["train.precision=bfloat16", "train.deterministic=true"]
    return trained(method, folder, *options, then=then, bound=BOUND)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["npid", "pirl"])
def test_noise_contrast(method: str, tmp_path: Path) -> None:
    """Whether Z is known was read from the device in each step, and after a resume."""
    assert in_process(trained, method, tmp_path, "method.loss=nce") == []


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["cpu", "device"])
@pytest.mark.parametrize("step", TRAIN_STEPS.names())
def test_train_steps(step: str, engine: str, tmp_path: Path) -> None:
    options = [f"train.step={step}", *STEP_OVERRIDES.get(step, []), f"data.augment_on={engine}"]
    assert in_process(trained, "simclr", tmp_path, *options, *ALL_HOOKS) == []


@pytest.mark.parametrize("cache", ["none", pytest.param("device", marks=pytest.mark.slow)])
def test_device_engine(cache: str, tmp_path: Path) -> None:
    options = ["data.augment_on=device", f"data.cache={cache}", "train.precision=bfloat16"]
    if cache == "device":  # what stays on the device has no workers to rotate it
        options += [
            "eval.evaluations={knn: {}, linear: {}}",
            f"views.main.transforms={BATCH_FORMS}",
        ]
    assert in_process(trained, "simclr", tmp_path, *options, *ALL_HOOKS) == []
    assert in_process(emptied) > 0


@pytest.mark.slow
@pytest.mark.parametrize("method", ["clip", "vicregl"])
def test_captions_and_draws_made_ahead(method: str, tmp_path: Path) -> None:
    assert in_process(trained, method, tmp_path, "data.augment_on=device") == []


def emptied() -> int:
    """Return how often the cache was emptied in this process."""
    count: int = torch.get_device_module(NAME).emptied
    return count


# -- the device itself -----------------------------------------------------------------------------


def reads_a_value(self: Any, output: Tensor, batch: Batch) -> Tensor:
    loss = output.float().square().mean()
    return loss if loss.item() > 0 else -loss


def counts_values(self: Any, output: Tensor, batch: Batch) -> Tensor:
    return output[output > 0].float().mean()


def reads_in_backward(self: Any, output: Tensor, batch: Batch) -> Tensor:
    output.register_hook(lambda gradient: gradient * float(gradient.abs().max()))
    return output.float().square().mean()


def writes_a_number(self: Any, output: Tensor, batch: Batch) -> Tensor:
    features = output.flatten(0, -2).float()
    rows = torch.arange(len(features), device=output.device)
    similarity = features @ features.T
    similarity[rows, rows] = 0.0
    return similarity.mean()


def takes_a_trace(self: Any, output: Tensor, batch: Batch) -> Tensor:
    features = output.flatten(0, -2).float()
    return (features.T @ features).trace()


def mixes_devices(self: Any, output: Tensor, batch: Batch) -> Tensor:
    return (output.float() * torch.ones(output.shape[-1])).mean()


def planted(plant: Any, folder: Path) -> list[str]:
    return run("simclr", folder, plant=plant)[0]


@pytest.mark.parametrize(
    ("plant", "line"),
    [
        (reads_a_value, "loss.item() > 0"),
        (counts_values, "output[output > 0]"),
        (reads_in_backward, "float(gradient.abs().max())"),
        (writes_a_number, "similarity[rows, rows] = 0.0"),
        (takes_a_trace, "index_fill"),
    ],
)
def test_waits_are_found_with_their_line(plant: Any, line: str, tmp_path: Path) -> None:
    waits = in_process(planted, plant, tmp_path)
    assert len(waits) >= 3, "in each step between the first and the last"
    file = "" if plant is takes_a_trace else f"{__file__}:"  # of which autograd has no line here
    assert any(wait.startswith(file) and line in wait for wait in waits)


def test_a_tensor_on_the_cpu_is_found_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(MixedDevices, match=r"test_imagined_device.py:\d+ in mixes_devices: .*ones"):
        in_process(planted, mixes_devices, tmp_path)


FAULTS = {
    "no wait_event": (imagined_streams.Stream, "wait_event", lambda self, event: None),
    "no record_stream": (OnDevice, "record_stream", lambda self, stream: None),
}


def made_ahead(fault: str, folder: Path) -> list[str]:
    """Races in steps that read views, extras and draws that a side stream has made."""
    with pytest.MonkeyPatch.context() as patch:
        if fault:
            patch.setattr(*FAULTS[fault])
        return run("vicregl", folder, "data.augment_on=device", "train.max_steps=3")[0]


@pytest.mark.parametrize("fault", ["", *FAULTS])
def test_what_a_side_stream_made_is_waited_for_and_kept(fault: str, tmp_path: Path) -> None:
    races = in_process(made_ahead, fault, tmp_path)
    assert bool(races) == bool(fault)
    assert all(race.endswith(fault) for race in races)


def on_both(folder: Path) -> tuple[dict[str, Any], dict[str, Any], list[set[str]]]:
    averages = "hooks={near: {name: ema, decay: 0.5}, far: {name: ema, decay: 0.5, device: cpu}}"
    options = ["train.epochs=2", "hooks.progress=null"]
    with ImaginedDevice():
        task = tiny.train("supervised", folder, "there", *options, averages, "train.device=auto")
    near, far = (task.averages[name].weights for name in ("near", "far"))
    for name, value in far.items():
        torch.testing.assert_close(value, near[name].values, rtol=1e-6, atol=1e-8)
    tiny.train("supervised", folder, "here", *options)
    places = [{value.device.type for value in weights.values()} for weights in (near, far)]
    return (*(tiny.rows(folder / out)[-1] for out in ("there", "here")), places)


def test_values_are_those_of_the_cpu(tmp_path: Path) -> None:
    there, here, places = in_process(on_both, tmp_path)
    assert places == [{NAME}, {"cpu"}], "hooks.ema.device"
    assert there["step"] == here["step"] == 2 * tiny.STEPS_PER_EPOCH
    assert there["loss"] == pytest.approx(here["loss"], rel=1e-4)


def formats(folder: Path) -> list[bool]:
    """Return whether images, weights, gradients and momenta are channels_last after a step.

    The last is a momentum that was saved on a CPU.
    """
    with ImaginedDevice():
        task = tiny.task("byol", folder, "formats", "train.device=auto")
        task.prepare()
        task.on_start()
        task.on_phase_start()
        task.step()
        weight, teacher = (
            next(part.weight for part in network.modules() if isinstance(part, nn.Conv2d))
            for network in (task.base_model, task.loss.teacher)
        )
        momentum, *_ = (x for x in task.optimizer.optimizer.state[weight].values() if x.ndim == 4)
        tensors = [task.last_batch.all_views[0], weight, teacher, weight.grad, momentum]
        state = task.optimizer.get_classy_state()
        for of_parameter in state["optim"]["state"].values():
            for name, value in of_parameter.items():
                of_parameter[name] = value.contiguous()
        task.optimizer.set_classy_state(state)
        tensors += [x for x in task.optimizer.optimizer.state[weight].values() if x.ndim == 4][:1]
        task.close()
    return [x.is_contiguous(memory_format=torch.channels_last) for x in tensors]


@pytest.mark.slow
def test_convolutions_have_the_memory_format_of_the_images(tmp_path: Path) -> None:
    assert in_process(formats, tmp_path) == [True] * 6


def clipped() -> list[Any]:
    """As with ``parallel.cpu_offload``: gradients of the network here, of the method there."""
    with ImaginedDevice():
        grads = [torch.full((7,), 2.0), torch.full((9,), 2.0, device=NAME)]
        actual = [float(clip_norm(grads, 4.0, each=each)) for each in (False, True)]
        return [*actual, *(grad.cpu().norm().item() for grad in grads)]


def test_clipping_on_two_devices() -> None:
    """A norm of 8 becomes 4; then both parts are shorter than 4 and stay."""
    assert in_process(clipped) == pytest.approx([8.0, 4.0, 7**0.5, 3.0])


def autocast_types() -> dict[str, str]:
    """Return the type of results under autocast, or the error."""
    kept = {}
    with ImaginedDevice(), torch.autocast(NAME, torch.bfloat16):
        low = torch.rand(2, 4, device=NAME, dtype=torch.bfloat16)
        full, double = low.float(), low.double()
        kept["mm"] = full @ full.T
        kept["mm of doubles"] = double @ double.T
        kept["layer_norm"] = F.layer_norm(low, (4,))
        kept["softmax"] = low.softmax(dim=1)
        kept["softmax with a type"] = low.softmax(dim=1, dtype=torch.bfloat16)
        kept["sum"] = low.sum()
        kept["norm"] = torch.ops.aten.norm(low, 2, [1])
        kept["rsqrt"] = low.rsqrt()
        kept["addcmul"] = torch.addcmul(low, full, low)
        kept["mean"] = low.mean()
        kept["gelu"] = F.gelu(low)
        with pytest.raises(RuntimeError, match="unsafe to autocast"):
            F.binary_cross_entropy(low, low)
    return {name: str(x.dtype).removeprefix("torch.") for name, x in kept.items()}


def test_autocast_has_the_lists_of_cuda() -> None:
    """As "CUDA Op-Specific Behavior" in the documentation of torch.amp says."""
    low, full = "bfloat16", "float32"
    expected = {"mm": low, "softmax with a type": low, "mean": low, "gelu": low}
    expected |= {"mm of doubles": "float64", "addcmul": full}
    expected |= dict.fromkeys(("layer_norm", "softmax", "sum", "norm", "rsqrt"), full)
    assert in_process(autocast_types) == expected


def half_loss(self: Any, output: Tensor, batch: Batch) -> Tensor:
    return (output * output).float().mean()


def planted_half(folder: Path) -> list[str]:
    return run("simclr", folder, "train.precision=bfloat16", plant=half_loss)[0]


def test_a_loss_in_half_precision_is_seen(tmp_path: Path) -> None:
    problems = in_process(planted_half, tmp_path)
    assert problems and all("(output * output)" in problem for problem in problems)


def doubles(method: str, folder: Path, *more: str) -> list[str]:
    """Return operations in float64 of a run on a device that has none, as MPS."""
    with ImaginedDevice() as device, pytest.MonkeyPatch.context() as patch:
        patch.setattr(accelerator, "_WITHOUT_FLOAT64", (NAME,))
        words = ["train.device=auto", f"data.val={tiny.digits_file(folder)}"]
        tiny.train(method, folder, "run", *words, *more)
        counts = Confusion(3, NAME)
        counts.add(torch.tensor([0, 1, 2], device=NAME), torch.tensor([0, 1, 1], device=NAME))
        assert counts.metrics()["accuracy"] == pytest.approx(2 / 3)
        return device.doubles


@pytest.mark.parametrize(
    ("method", "more"),
    [
        ("simclr", ["eval.loss=true", "hooks.precise_bn={batches: 2, batch_size: 4}"]),
        pytest.param("supervised", ["eval.test_every=1"], marks=pytest.mark.slow),
        pytest.param("sela", [], marks=pytest.mark.slow),
        pytest.param("npid", [], marks=pytest.mark.slow),
    ],
)
def test_a_device_without_float64(method: str, more: list[str], tmp_path: Path) -> None:
    assert in_process(doubles, method, tmp_path, *more) == []
