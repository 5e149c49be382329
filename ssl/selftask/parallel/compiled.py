"""torch.compile of the network, whole or block by block."""

from __future__ import annotations

import functools
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from selftask.config.schema import CompileConfig
from selftask.parallel.blocks import find_blocks


def compile_function(function: Any, options: CompileConfig) -> Any:
    """Compile a function or a module with torch.compile."""
    return torch.compile(function, **asdict(options))


def compile_blocks(network: nn.Module, options: CompileConfig) -> None:
    """Compile the forward pass of each block, in place.

    Sharding and activation checkpointing wrap single blocks, which a graph of the whole network
    would not allow.
    """
    for block in find_blocks(network):
        kind: Any = type(block)
        block.__class__ = _compiled(kind, options)


def compile_whole(network: nn.Module, options: CompileConfig) -> nn.Module:
    """Return the network compiled as a whole; it shares the parameters."""
    compiled: nn.Module = compile_function(network, options)
    return compiled


@functools.cache
def _compiled(kind: Any, options: CompileConfig) -> Any:
    """Return a subclass of ``kind`` with a compiled forward pass, shared by all its blocks."""
    forward = compile_function(kind.forward, options)
    return type(kind.__name__, (kind,), {"forward": forward})
