"""Initial weights: drawn on every rank, or only on the first one (``parallel.meta_init``)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from selftask.config.schema import ParallelConfig
from selftask.distributed.accelerator import prefers_channels_last
from selftask.distributed.collectives import (
    broadcast_module,
    gather_objects,
    is_primary,
    world_size,
)
from selftask.distributed.heartbeat import collective_activity
from selftask.errors import RunError, UserError, shorten
from selftask.random import process_state


class InitialWeights:
    """Initial weights that every rank draws or reads, before rank 0's are copied to all.

    The order of calls is: ``building`` and ``to_device`` for each module, ``broadcast``, then
    ``materialize`` for each part just before it is sharded, and finally for unsharded modules.

    Args:
        device: Device of the run.
        channels_last: Whether to store convolution weights in ``torch.channels_last``, so that
            cuDNN need not convert them in each pass.
    """

    def __init__(self, device: torch.device, *, channels_last: bool = False) -> None:
        self.device, self.channels_last = device, channels_last

    def building(self) -> AbstractContextManager[None]:
        """Context in which modules are built and their weights loaded."""
        return nullcontext()

    def to_device(self, module: nn.Module) -> nn.Module:
        """Move a built module to the device, in ``channels_last`` if set, and return it."""
        for part in module.modules() if self.channels_last else ():
            if isinstance(part, nn.Conv2d | nn.ConvTranspose2d):
                part.to(memory_format=torch.channels_last)
        return module.to(self.device)

    def broadcast(self, modules: Iterable[nn.Module]) -> None:
        """Copy parameters and buffers of the first rank to all ranks."""
        for module in modules:
            broadcast_module(module)

    def materialize(self, module: nn.Module) -> None:
        """Do nothing; ``MetaInit`` allocates a module's meta tensors with the first rank's values.

        Every rank must call this method.
        """


class MetaInit(InitialWeights):
    """Initial weights that only rank 0 draws or reads; the others build on the meta device.

    Each part of a network is allocated, received and sharded before the next one, so that the other
    ranks never hold a whole network. Weights, buffers and generators are bit-identical to those of
    ``InitialWeights``.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._done: set[nn.Module] = set()

    @contextmanager
    def building(self) -> Iterator[None]:
        """Context in which modules are built; an error on any rank is raised on all.

        Raises UserError if a module cannot be built on the meta device. Afterwards all ranks get
        the generator states of the first one, since draws on the meta device do not advance
        generators.
        """
        error: Exception | None = None
        try:
            with nullcontext() if is_primary() else torch.device("meta"):
                yield
        except Exception as raised:  # noqa: BLE001 - raised again below, on every rank
            error = raised
        _raise_on_all(error)
        first, *_ = gather_objects(process_state.rng_state() if is_primary() else None)
        process_state.set_rng_state(first)

    def to_device(self, module: nn.Module) -> nn.Module:
        """Return the module unchanged: ``materialize`` moves it part by part."""
        return module

    def broadcast(self, modules: Iterable[nn.Module]) -> None:
        """Check that ``materialize`` can copy all tensors of the modules.

        Raises UserError on every rank if a tensor on the meta device is neither parameter nor
        buffer.
        """
        strays = [stray for module in modules for stray in find_strays(module)]
        error = None
        if strays:
            error = UserError(
                f"tensors that are neither parameters nor buffers: {', '.join(strays)}; "
                "register_buffer(..., persistent=False) makes them buffers"
            )
        _raise_on_all(error)

    @torch.no_grad()
    def materialize(self, module: nn.Module) -> None:
        copies: dict[Tensor, Tensor] = {}  # tied parameters stay tied
        with collective_activity("broadcast of initial weights"):
            for part in module.modules():
                if part in self._done:
                    continue
                self._done.add(part)
                tables: tuple[dict[str, Any], ...] = (part._parameters, part._buffers)
                for table in tables:
                    present = {name: t for name, t in table.items() if t is not None}
                    for name, tensor in present.items():
                        if tensor not in copies:
                            copies[tensor] = self._receive(tensor)
                        table[name] = copies[tensor]

    def _receive(self, tensor: Tensor) -> Tensor:
        """Return the tensor on the device, with the values of the first rank."""
        if tensor.is_meta:
            moved = torch.empty_like(tensor, device=self.device)
        else:
            moved = tensor.detach().to(self.device)
        dist.broadcast(moved, src=0)
        if not isinstance(tensor, nn.Parameter):
            return moved
        if not tensor.is_meta:
            tensor.data = moved
            return tensor
        parameter = nn.Parameter(moved, requires_grad=tensor.requires_grad)
        parameter.__dict__.update(tensor.__dict__)  # attributes set by the model's library
        return parameter


def initial_weights(config: ParallelConfig, device: torch.device) -> InitialWeights:
    """Return ``MetaInit`` for FSDP with ``parallel.meta_init``, otherwise ``InitialWeights``."""
    is_sharded = config.reduce == "fsdp" and world_size() > 1
    if config.meta_init and is_sharded:
        return MetaInit(device)
    # FSDP refuses parameters that are not contiguous
    channels_last = prefers_channels_last(device) and not is_sharded
    return InitialWeights(device, channels_last=channels_last)


def find_strays(module: nn.Module) -> list[str]:
    """Return the names of attributes with meta tensors that are neither parameters nor buffers."""
    return [
        ".".join(filter(None, (path, name)))
        for path, part in module.named_modules()
        for name, value in vars(part).items()
        if name not in ("_parameters", "_buffers", "_modules") and _holds_meta(value)
    ]


def _holds_meta(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_holds_meta, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_holds_meta, value))
    return isinstance(value, Tensor) and value.is_meta


def _raise_on_all(error: Exception | None) -> None:
    """Raise an error of any rank on every rank; rank 0 raises its own error unchanged.

    If only other ranks have errors, the meta device is the cause, and UserError is raised.
    """
    for_user = isinstance(error, UserError)
    text = None if error is None else str(error) if for_user else f"{type(error).__name__}: {error}"
    errors = gather_objects((for_user, text))
    if error is not None and is_primary():
        raise error
    for_user, text = errors[0]
    if text is not None:
        raise (UserError if for_user else RunError)(f"rank 0: {text}") from error
    others = [(rank, text) for rank, (_, text) in enumerate(errors) if text is not None]
    if others:
        rank, text = others[0]
        raise UserError(
            "parallel.meta_init=true: backbone or method cannot be built on the meta device "
            f"(rank {rank}: {shorten(text)}); use parallel.meta_init=false"
        ) from error
