"""Time of gradient reduction: manual buckets, DDP, and single tensors.

    python tools/bench/reduction.py [--ranks 2] [--model resnet50] [--rounds 30] [--device cpu]

Every rank has gradients with the shapes of a torchvision model, from a backward pass with hardly
any other work. So the reduction and its overlap with the backward pass are measured. Each round
runs every entry once; the first entry changes with the round:

    alone       the backward pass without communication
    flat        lower bound: the same number of bytes, ready in tensors of 25 MiB, on
                the groups of manual
    per tensor  for each tensor in turn, one all-reduce, then a division
    async       all all-reduces at once, then the divisions (as in VISSL)
    one bucket  all gradients in one flat tensor after the backward pass
    manual      parallel.reduce=manual: buckets are sent during the backward pass
    fp16        the same with parallel.grad_compression=fp16
    ddp         torch's DistributedDataParallel

``ms`` is the median and ``least`` the minimum of whole passes on rank 0; ``reduce`` is the median
minus that of ``alone``. ``x ddp`` is the median of the ratios to DDP's pass of the same round, with
its 95 % bootstrap interval. Other load on the machine affects ratios less.
"""

from __future__ import annotations

import argparse
import itertools
import socket
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rounds import in_turns, median_and_interval
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "ssl"))

from selftask.parallel.ddp import DDPReduction
from selftask.parallel.manual import ManualReduction, bucket_groups
from selftask.parallel.reduction import Reduction


class Parameters(nn.Module):
    """Parameters of given shapes, each with a constant gradient."""

    def __init__(self, shapes: list[torch.Size], device: torch.device) -> None:
        super().__init__()
        self.all = nn.ParameterList(torch.zeros(shape, device=device) for shape in shapes)

    def forward(self) -> Tensor:
        return torch.stack([p.sum() for p in self.all]).sum()


class Alone(Reduction):
    """Entry without communication."""


class PerTensor(Reduction):
    def register(self, named: list[tuple[str, nn.Parameter]]) -> None:
        self.parameters = [p for _, p in named]

    def reduce(self) -> None:
        for parameter in self.parameters:
            dist.all_reduce(parameter.grad)
            parameter.grad.div_(dist.get_world_size())  # type: ignore[union-attr]


class Async(PerTensor):
    def reduce(self) -> None:
        works = [dist.all_reduce(p.grad, async_op=True) for p in self.parameters]
        for work in works:
            work.wait()
        for parameter in self.parameters:
            parameter.grad.div_(dist.get_world_size())  # type: ignore[union-attr]


class OneBucket(PerTensor):
    def reduce(self) -> None:
        grads = [p.grad for p in self.parameters]
        flat = torch.cat([grad.flatten() for grad in grads])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        parts = flat.split([grad.numel() for grad in grads])
        torch._foreach_copy_(grads, [part.view_as(g) for part, g in zip(parts, grads, strict=True)])


class Flat(Reduction):
    def register(self, named: list[tuple[str, nn.Parameter]]) -> None:
        size, device = sum(p.numel() for _, p in named), named[0][1].device
        self.chunks = torch.zeros(size, device=device).split(25 * 2**20 // 4)
        self.groups = bucket_groups()

    def reduce(self) -> None:
        turns = zip(self.chunks, itertools.cycle(self.groups), strict=False)
        works = [dist.all_reduce(chunk, group=group, async_op=True) for chunk, group in turns]
        for work in works:
            work.wait()


ENTRIES: dict[str, Callable[[], Reduction]] = {
    "alone": Alone,
    "flat": Flat,
    "per tensor": PerTensor,
    "async": Async,
    "one bucket": OneBucket,
    "manual": ManualReduction,
    "fp16": lambda: ManualReduction(compression="fp16"),
    "ddp": DDPReduction,
}


def one_pass(module: nn.Module, parameters: Parameters, reduction: Reduction) -> float:
    """Return the seconds of a backward pass with its reduction; all ranks start together."""
    parameters.zero_grad()
    loss = module()
    dist.barrier()
    _wait(loss.device)
    start = time.perf_counter()
    loss.backward()
    reduction.reduce()
    _wait(loss.device)
    return time.perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(rank: int, args: argparse.Namespace, port: int) -> None:
    """Measure all entries in turn on one rank; rank 0 prints."""
    import torchvision

    torch.set_num_threads(1)
    cuda = args.device == "cuda"
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    backend, address = ("nccl" if cuda else "gloo"), f"tcp://localhost:{port}"
    dist.init_process_group(backend, init_method=address, rank=rank, world_size=args.ranks)
    model = torchvision.models.get_model(args.model, weights=None)
    shapes = [p.shape for p in model.parameters()]
    setups = {}
    for name, make in ENTRIES.items():
        parameters, reduction = Parameters(shapes, device), make()
        called = reduction.wrap(parameters)
        reduction.register(list(parameters.named_parameters()))
        setups[name] = (called, parameters, reduction)
    seconds: dict[str, list[float]] = {name: [] for name in setups}
    for number in range(args.rounds + 3):
        for name in in_turns([*setups], number):
            taken = one_pass(*setups[name])
            if number >= 3:  # the first rounds create buckets or find unused parameters
                seconds[name].append(taken)
    if rank == 0:
        megabytes = sum(shape.numel() for shape in shapes) * 4 / 2**20
        print(f"{args.model}: {len(shapes)} tensors, {megabytes:.0f} MiB; {args.ranks} ranks")
        alone = statistics.median(seconds["alone"])
        for name, taken in seconds.items():
            ms, least = 1e3 * statistics.median(taken), 1e3 * min(taken)
            ratios = [mine / ddp for mine, ddp in zip(taken, seconds["ddp"], strict=True)]
            ratio, low, high = median_and_interval(ratios)
            print(
                f"{name:<12}{ms:8.1f} ms  least {least:8.1f}  reduce {ms - 1e3 * alone:8.1f}  "
                f"x ddp {ratio:.2f} [{low:.2f}, {high:.2f}]"
            )
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--model", default="resnet50", help="of torchvision")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    args = parser.parse_args()
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    mp.spawn(measure, (args, port), nprocs=args.ranks)


if __name__ == "__main__":
    main()
