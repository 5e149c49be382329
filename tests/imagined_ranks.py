"""Several ranks, each with an imagined device; their collectives are like those of NCCL."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    BroadcastOptions,
    ReduceScatterOptions,
)

import imagined_device as device
import imagined_streams as streams
from imagined_device import NAME, MixedDevices, OnDevice
from selftask.distributed import collectives, process_group


class Group(dist.ProcessGroup):
    """gloo between tensors of imagined devices; each collective runs on a stream of the group."""

    def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)
        self.stream = streams.Stream()
        self.gloo = dist.ProcessGroupGloo(store, rank, size, timeout)

    def _run(
        self, name: str, outputs: list[Any], inputs: list[Any], *args: Any, joint: bool
    ) -> Any:
        tensors = _flat([outputs, inputs])
        for x in tensors:
            if not isinstance(x, OnDevice):
                raise MixedDevices(
                    f"{streams.place()}: {name} of a tensor {tuple(x.shape)} on the CPU"
                )
        now = streams.streams[-1]
        self.stream.wait_stream(now)
        values = [[_values(outputs)], [_values(outputs), _values(inputs)]][not joint]
        with streams.on_stream(self.stream):
            streams.check_streams(name, tensors)
            getattr(self.gloo, name)(*values, *args).wait()
            for x in _flat(outputs):
                x.memory.written()
        return Work(outputs, inputs, self.stream)

    def allreduce(self, tensors: list[Any], opts: Any = None) -> Any:
        return self._run("allreduce", tensors, [], opts or AllreduceOptions(), joint=True)

    def allreduce_coalesced(self, tensors: list[Any], opts: Any = None) -> Any:
        return self.allreduce(tensors, opts)

    def broadcast(self, tensors: list[Any], opts: Any = None) -> Any:
        return self._run("broadcast", tensors, [], opts or BroadcastOptions(), joint=True)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        opts = opts or AllgatherOptions()
        return self._run("allgather", outputs, inputs, opts, joint=False)

    def all_gather_single(self, output: Any, input: Any, opts: Any = None) -> Any:
        return self.allgather([list(output.chunk(self.size()))], [input], opts)

    _allgather_base = all_gather_single

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        opts = opts or ReduceScatterOptions()
        return self._run("reduce_scatter", outputs, inputs, opts, joint=False)

    def reduce_scatter_single(self, output: Any, input: Any, opts: Any = None) -> Any:
        return self.reduce_scatter([output], [list(input.chunk(self.size()))], opts)

    _reduce_scatter_base = reduce_scatter_single

    def all_to_all_single(
        self, output: Any, input: Any, sizes: Any, input_sizes: Any, opts: Any = None
    ) -> Any:
        more = (sizes, input_sizes, opts or AllToAllOptions())
        return self._run("alltoall_base", output, input, *more, joint=False)

    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = None) -> Any:
        return self.gloo.barrier()

    def _get_backend(self, device: torch.device) -> Any:
        return self.gloo

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(NAME)]

    def getBackendName(self) -> str:
        return NAME

    @property
    def pg_name(self) -> str:
        return self.group_name

    @property
    def group_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]


def _group(name: Any) -> Any:
    group = dist.distributed_c10d._resolve_process_group(name)
    assert isinstance(group, Group), type(group)
    return group


def _reduced(x: Any, op: str, name: Any) -> Any:
    return _reduced_in_place(x.clone(), op, name)


def _reduced_in_place(x: Any, op: str, name: Any) -> Any:
    opts = AllreduceOptions()
    opts.reduceOp = getattr(dist.ReduceOp, op.upper())
    _group(name).allreduce([x], opts).wait()
    return x


def _gathered(x: Any, size: int, name: Any) -> Any:
    every = x.new_empty(size * len(x), *x.shape[1:])
    _group(name).all_gather_single(every, x.contiguous()).wait()
    return every


def _scattered(x: Any, op: str, size: int, name: Any) -> Any:
    opts = ReduceScatterOptions()
    opts.reduceOp = getattr(dist.ReduceOp, op.upper())
    mine = x.new_empty(len(x) // size, *x.shape[1:])
    _group(name).reduce_scatter_single(mine, x.contiguous(), opts).wait()
    return mine


class Work(dist.Work):
    def __init__(self, outputs: Any, inputs: Any, stream: Any) -> None:
        super().__init__()
        self._outputs, self._inputs = outputs, inputs  # kept until the work is waited for
        self._done = streams.Event()
        self._done.record(stream)

    def wait(self, timeout: Any = None) -> bool:
        streams.streams[-1].wait_event(self._done)
        self._inputs = None
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> Any:
        self.wait()
        future: Any = torch.futures.Future()
        future.set_result(self._outputs)
        return future


def _values(x: Any) -> Any:
    return [_values(item) for item in x] if isinstance(x, list) else x.values


def _flat(x: Any) -> list[Any]:
    return [y for item in x for y in _flat(item)] if isinstance(x, list) else [x]


def run_ranks(function: Callable[..., Any], size: int, *args: Any) -> list[Any]:
    """Return what ``function(*args)`` returns on each rank."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        work = (function, size, port, folder, args)
        mp.start_processes(_one_rank, work, nprocs=size, start_method="forkserver")
        return [torch.load(Path(folder) / f"{r}.pt", weights_only=False) for r in range(size)]


def _one_rank(rank: int, function: Any, size: int, port: int, folder: str, args: Any) -> None:
    device._start()
    # those of DTensor, whose waits are torch's own: they wait at once
    functional = torch.ops._c10d_functional
    device.COLLECTIVES.update(
        {
            functional.all_reduce: _reduced,
            functional.all_reduce_: _reduced_in_place,
            functional.all_gather_into_tensor: _gathered,
            functional.reduce_scatter_tensor: _scattered,
            functional.wait_tensor: lambda x: x,
            functional._wrap_tensor_autograd: lambda x: x,
        }
    )
    process_group._BACKENDS[NAME] = NAME
    collectives.collective_device = lambda: torch.device(NAME)
    dist.Backend.register_backend(NAME, Group, devices=[NAME])
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    try:
        torch.save(function(*args), Path(folder) / f"{rank}.pt")
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
