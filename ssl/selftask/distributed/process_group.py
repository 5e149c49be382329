"""Joining and leaving the process group."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from selftask.distributed.world import INIT_FILE, LISTEN_FD, World
from selftask.errors import UserError

_BACKENDS = {"cuda": "nccl", "xpu": "xccl"}


def join_world(world: World, device: torch.device, *, timeout_s: float = 600.0) -> None:
    """Initialize the process group, unless there is one or this is the only process.

    Args:
        world: Rank and size of this process.
        device: Selects the backend: NCCL for CUDA, XCCL for XPU, else gloo.
        timeout_s: Time limit of connecting and of each collective, in seconds. After it, a waiting
            rank raises an error with gloo; NCCL ends its process.

    Raises:
        UserError: If the ranks cannot connect to each other.
    """
    if world.size == 1 or dist.is_initialized():
        return
    backend = _BACKENDS.get(device.type, "gloo")
    meeting = "env://" if world.master is None else "tcp://{}:{}".format(*world.master)
    if world.master is None and INIT_FILE in os.environ:
        meeting = f"file://{Path(os.environ[INIT_FILE]).absolute()}"
    server = _listen()  # kept alive until the process group's store shares it
    try:
        dist.init_process_group(
            backend,
            init_method=meeting,
            rank=world.rank,
            world_size=world.size,
            timeout=timedelta(seconds=timeout_s),
            device_id=device if device.type in _BACKENDS else None,
        )
    except dist.DistError as error:
        raise UserError(
            f"rank {world.rank} of {world.size} ({world.launcher}) cannot join the others at "
            f"{_place(world)}: {str(error).splitlines()[0]}; if the port is taken, set "
            f"MASTER_PORT, or another {INIT_FILE}"
        ) from error
    del server


def _listen() -> TCPStore | None:
    """Return a store on the socket that the parent process has opened for rank 0, if any.

    While it exists, ``env://`` uses its server and does not open the port.
    """
    if LISTEN_FD not in os.environ:
        return None
    return TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=True,
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=int(os.environ.pop(LISTEN_FD)),  # each can be used once
    )


def _place(world: World) -> str:
    """Return the rendezvous of the ranks, for messages: a file, or host and port of rank 0."""
    if world.master is None and INIT_FILE in os.environ:
        return os.environ[INIT_FILE]
    host, port = world.master or (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"])
    return f"{host}:{port}"


def leave_world() -> None:
    """Destroy the process group if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()
