"""Kernel launches a step beside forward and backward of networks, for each method.

    python tools/bench/launches.py [--methods simclr,dino] [--networks resnet50,vit_small]
    python tools/bench/launches.py --views dino/vit_small_imagenet,simclr/resnet50_imagenet

Networks have full size; images have 32 pixels and a batch 4 of them, on the imagined device of
``tests/imagined_device.py``, so that a CPU suffices. The third step is counted, which is neither
logged nor the first. Forward passes of networks (student, teacher, heads) and the backward pass
are left out. What is counted:

* ``batch``: reading and copies to the device.
* ``draws``: everything that ``selftask/random`` draws, inside networks too (stochastic depth).
* ``forward hooks``: the teacher's part, masks and targets of the method.
* ``loss``: the loss function, without its backward pass.
* ``backward hooks``: clipping and norms, after the backward pass.
* ``optimizer``: the update, and setting gradients to zero.
* ``update hooks``: EMA of the teacher, queues, centers.
* ``rest``: what remains, such as the mean of losses.

Rules: an operation is one launch. Views and allocations are none. A foreach or fused operation is
as many as torch's ``multi_tensor_apply`` launches: a launch takes at most 110, 64, 48, 36 or 30
tensors per list for 1 to 5 lists, and at most 320 chunks of 65,536 elements. An operation that CUDA
composes of several kernels (a sort, a sum in two passes) counts as one, too.

``--views`` counts the launches by transform with which ``data.augment_on=device`` makes the views
of a batch.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "ssl"), str(ROOT / "tests")]

import tiny  # noqa: E402
from imagined_device import NAME, ImaginedDevice  # noqa: E402
from imagined_streams import is_view  # noqa: E402
from selftask.config.load import load_config  # noqa: E402
from selftask.data.device.engine import Engine  # noqa: E402
from selftask.data.loading.open_data import open_data  # noqa: E402
from selftask.data.views import Views  # noqa: E402
from selftask.errors import UserError  # noqa: E402
from selftask.registry import METHODS  # noqa: E402
from selftask.task import Task  # noqa: E402

NETWORKS = {"resnet50": "resnet50", "vit_small": "{name: vit_small, patch_size: 4, img_size: 32}"}
_TILES = (
    "[{name: tile, grid: 2, size: 16}, {name: contrast_noise, contrast: [0.5, 1.0], noise: 0.05}, "
    "{name: normalize, stats: half}]"
)
# what a network asks of the rest of a recipe
ASKS = {
    ("ijepa", "vit_small"): ["backbone.pool=avg"],
    ("pirl", "vit_small"): [f"views.tiles.transforms={_TILES}"],
}
BOUND = 150  # launches a step
STEP = 3  # the counted one
_TENSORS = (110, 64, 48, 36, 30)  # of a list in one launch, by the number of lists
_CHUNKS, _CHUNK_SIZE = 320, 65_536
_OF_POINT = {"on_forward": "forward hooks", "on_backward": "backward hooks"}
_OF_POINT["on_update"] = "update hooks"
_ALLOCATIONS = ("aten::empty", "aten::new_empty", "aten::detach", "aten::_unsafe_view")
_DRAWS = "/selftask/random/"
_DEPTH = 15  # frames that are searched for it


class Counts(ImaginedDevice):
    """Imagined device that counts launches by part of the step."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: Counter[str] = Counter()
        self.parts = ["rest"]

    def launched(self, func: Any, args: Any) -> None:
        part = "draws" if _draws() else self.parts[-1]
        if part and not is_view(func) and not func._schema.name.startswith(_ALLOCATIONS):
            self.launches[part] += kernels(func, args)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        self.parts.append(name)
        try:
            yield
        finally:
            self.parts.pop()

    def counted(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        """Return ``function`` with its launches counted as part ``name``; ``""``: not counted."""

        def run(*args: Any, **more: Any) -> Any:
            with self.part(name):
                return function(*args, **more)

        return run


def kernels(func: Any, args: Any) -> int:
    """Return the number of kernels of an operation."""
    lists = [x for x in args if isinstance(x, list | tuple) and x and isinstance(x[0], Tensor)]
    name = func._schema.name
    if not lists or not name.startswith(("aten::_foreach", "aten::_fused", "aten::_amp_foreach")):
        return 1
    writes_new = not func._schema.is_mutable
    width = len(lists) + writes_new - name.startswith("aten::_fused")  # steps are counted apart
    limit = _TENSORS[min(max(width, 1), len(_TENSORS)) - 1]
    launches = tensors = chunks = 0
    for tensor in lists[0]:
        remaining = -(-tensor.numel() // _CHUNK_SIZE)
        tensors += 1
        while remaining:
            taken = min(remaining, _CHUNKS - chunks)
            chunks, remaining = chunks + taken, remaining - taken
            if chunks == _CHUNKS:
                launches, chunks, tensors = launches + 1, 0, min(remaining, 1)
        if tensors == limit:
            launches, chunks, tensors = launches + 1, 0, 0
    return launches + (tensors > 0)


def _draws() -> bool:
    """Return whether a module of ``selftask/random`` calls this operation."""
    frame: Any = sys._getframe(2)
    for _ in range(_DEPTH):
        if frame is None:
            return False
        if _DRAWS in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False


def count(method: str, network: str | None, folder: Path, *more: str) -> Counter[str]:
    """Return the launches of one step by part; without ``network``, with the one of ``tiny.py``.

    Raises:
        UserError: If the method cannot use the network.
    """
    quiet = ("train.epochs=1", "train.log_every=1000", "hooks.progress=null", "train.device=auto")
    words = tiny.overrides(method, folder, f"{method}-{network}", *quiet, "train.batch_size=4")
    if network is not None:
        words = [word for word in words if not word.startswith("backbone=")]
        words += [f"backbone={NETWORKS[network]}", *ASKS.get((method, network), [])]
    with Counts() as device:
        chosen = load_config(f"{method}/digits", [*words, *more])
        task = Task(chosen, sources=open_data(chosen.data))
        task.prepare()
        with count_parts(task, device):
            task.on_start()
            task.on_phase_start()
            for _ in range(STEP):
                device.launches.clear()
                task.step()
        task.close()
    return device.launches


@contextmanager
def count_parts(task: Any, device: Counts) -> Iterator[None]:
    """Context in which the parts of a step are counted apart."""
    networks = [m for root in (task.model, task.loss) for m in root.modules() if m is not task.loss]
    outer = [m for m in dict.fromkeys(networks) if not isinstance(m, nn.modules.loss._Loss)]
    for module in outer:
        module.forward = device.counted(module.forward, "")
    task.loss.forward = device.counted(task.loss.forward, "loss")
    run_hooks, backward = task.run_hooks, torch.autograd.backward
    read, update = task.optimizer.zero_grad, task.optimizer.step

    def run(point: str, *args: Any, **more: Any) -> Any:
        with device.part(_OF_POINT.get(point, "rest")):
            return run_hooks(point, *args, **more)

    task.run_hooks = run
    task.optimizer.zero_grad = device.counted(read, "optimizer")
    task.optimizer.step = device.counted(update, "optimizer")
    torch.autograd.backward = device.counted(backward, "")
    try:
        yield
    finally:
        torch.autograd.backward = backward


def count_views(recipe: str, side: int = 256, images: int = 2) -> Counter[str]:
    """Return the launches by transform for the views of a batch, made by the device engine.

    Args:
        recipe: Name of a recipe whose transforms all have a batched version.
        side: Height and width of the images.
        images: Number of images.
    """
    config = load_config(recipe, ["data=unused"]).views
    engine = Engine(Views(config), config)
    numbers, sizes = np.arange(images), np.full((images, 2), side)
    packed = engine.draw_batch(0, 0 * numbers, numbers, sizes)
    pixels = torch.zeros(images, side, side, 3, dtype=torch.uint8)
    with Counts() as device:
        sent, on_device = pixels.to(NAME), packed.to(torch.device(NAME))
        engine(sent, None, on_device)  # the first call makes constants
        operations: list[Any] = [one for program in engine.programs for one in program.operations]
        for operation in operations:
            name = type(operation.transform).__name__
            operation.apply = device.counted(operation.apply, name)
        device.launches.clear()
        engine(sent, None, on_device)
    return device.launches


def listed(launches: Counter[str]) -> str:
    return ", ".join(f"{part} {n}" for part, n in launches.most_common())


def main() -> int:
    """Print a line for each method and network; exit 1 if one is above the bound."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--methods", default=",".join(METHODS.names()))
    parser.add_argument("--networks", default=",".join(NETWORKS))
    parser.add_argument("--views", help="recipes whose views are counted instead")
    options = parser.parse_args()
    for recipe in filter(None, (options.views or "").split(",")):
        launches = count_views(recipe)
        print(f"{recipe:<32}{launches.total():>6}  {listed(launches)}", flush=True)
    if options.views:
        return 0
    above = 0
    with tempfile.TemporaryDirectory() as folder:
        for network in options.networks.split(","):
            for method in options.methods.split(","):
                name = f"{method:<20}{network:<12}"
                try:
                    launches = count(method, network, Path(folder))
                except UserError as error:
                    print(f"{name}     -  {str(error).splitlines()[0]}", flush=True)
                    continue
                total = launches.total()
                above += total > BOUND
                print(f"{name}{total:>6}  {listed(launches)}", flush=True)
    print(f"{above} above {BOUND}")
    return int(above > 0)


if __name__ == "__main__":
    sys.exit(main())
