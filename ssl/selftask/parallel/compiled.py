"""Compilation of networks with torch.compile, whole or block by block."""

from __future__ import annotations

import functools
from dataclasses import asdict
from types import FunctionType
from typing import Any

import torch
from torch import nn

from selftask.config.schema import CompileConfig
from selftask.errors import UserError, nearest
from selftask.parallel.blocks import find_blocks


def compile_function(function: Any, options: CompileConfig) -> Any:
    """Compile a function or module with torch.compile; raise UserError for an unknown backend."""
    _check_backend(options.backend)
    return torch.compile(function, **asdict(options))


def compile_blocks(network: nn.Module, options: CompileConfig) -> bool:
    """Compile the forward pass of each block, in place.

    Unlike a graph of the whole network, this works with sharding and activation checkpointing,
    which wrap single blocks. The gradients of a block can also be reduced while those of other
    blocks are computed.

    Returns:
        True if the network has blocks.

    Raises:
        UserError: If there are blocks and the backend is unknown.
    """
    blocks = find_blocks(network)
    for block in blocks:
        is_trained = any(p.requires_grad for p in block.parameters())
        kind: Any = type(block)
        block.__class__ = _compiled(kind, options, repr(block), is_trained)
    return bool(blocks)


def compile_calls(network: nn.Module, options: CompileConfig) -> None:
    """Compile a network in place with ``nn.Module.compile``; submodules and state do not change.

    Raises UserError for an unknown backend.
    """
    _check_backend(options.backend)
    network.compile(**asdict(options))


@functools.cache
def _check_backend(name: str) -> None:
    from torch._dynamo.exc import InvalidBackend  # slow to import

    try:
        torch._dynamo.lookup_backend(name)
    except InvalidBackend as error:
        names = torch.compiler.list_backends(exclude_tags=())
        raise UserError(
            f"train.compile_options.backend={name!r}: torch has no such backend; "
            f"{nearest(name, names)}"
        ) from error


@functools.cache
def _compiled(kind: Any, options: CompileConfig, layers: str, is_trained: bool) -> Any:
    """Return a subclass of ``kind`` with a compiled forward pass, shared by equal blocks.

    Blocks with other layers, and frozen ones (of a teacher), get their own copy of the code: torch
    compiles the same code at most 8 times, and checks all these graphs in each call.
    """
    forward = kind.forward
    if isinstance(forward, FunctionType):
        copied = FunctionType(
            forward.__code__.replace(),
            forward.__globals__,
            forward.__name__,
            forward.__defaults__,
            forward.__closure__,
        )
        copied.__kwdefaults__ = forward.__kwdefaults__
        forward = copied
    return type(kind.__name__, (kind,), {"forward": compile_function(forward, options)})
