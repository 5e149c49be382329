"""torch.compile of the network, whole or block by block."""

from __future__ import annotations

import functools
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from selftask.config.schema import CompileConfig
from selftask.parallel.blocks import find_blocks


def compile_blocks(network: nn.Module, options: CompileConfig) -> None:
    """Compile the forward pass of each block, in place.

    Sharding and activation checkpointing act on blocks from outside, which a graph of the whole
    network would not allow.
    """
    for block in find_blocks(network):
        kind: Any = type(block)
        block.__class__ = _compiled(kind, options)


def compile_whole(network: nn.Module, options: CompileConfig) -> nn.Module:
    """Return the network compiled as one, sharing its parameters."""
    compiled: Any = torch.compile(network, **asdict(options))
    return compiled  # type: ignore[no-any-return]


@functools.cache
def _compiled(kind: Any, options: CompileConfig) -> Any:
    """Return a subclass of ``kind`` with a compiled forward pass, shared by all its blocks."""
    forward = torch.compile(kind.forward, **asdict(options))
    return type(kind.__name__, (kind,), {"forward": forward})
