"""torch.compile of the network, whole or block by block."""

from __future__ import annotations

import functools
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from selftask.config.schema import CompileConfig
from selftask.parallel.blocks import find_blocks


def compile_function(function: Any, options: CompileConfig, device: torch.device) -> Any:
    """Compile a function or a module with torch.compile.

    On a CPU, inductor keeps convolutions in the layout of their inputs: with copies to
    channels-last and back, a step of ResNet-18 is slower than in eager mode. `CPUGraphPass`
    rewrites linear layers and attention. ``mode: default`` selects unmodified inductor.
    """
    arguments: dict[str, Any] = asdict(options)
    if device.type == "cpu" and options.backend == "inductor" and options.mode is None:
        from selftask.parallel.cpu_graph_pass import CPUGraphPass  # imports inductor

        arguments["options"] = {  # torch does not accept a mode with options
            "layout_optimization": False,
            "post_grad_custom_post_pass": CPUGraphPass(),
        }
    return torch.compile(function, **arguments)


def compile_blocks(network: nn.Module, options: CompileConfig, device: torch.device) -> None:
    """Compile the forward pass of each block, in place.

    Sharding and activation checkpointing wrap single blocks, which a graph of the whole network
    would not allow.
    """
    for block in find_blocks(network):
        kind: Any = type(block)
        block.__class__ = _compiled(kind, options, device)


def compile_whole(network: nn.Module, options: CompileConfig, device: torch.device) -> nn.Module:
    """Return the network compiled as a whole; it shares the parameters."""
    compiled: nn.Module = compile_function(network, options, device)
    return compiled


@functools.cache
def _compiled(kind: Any, options: CompileConfig, device: torch.device) -> Any:
    """Return a subclass of ``kind`` with a compiled forward pass, shared by all its blocks."""
    forward = compile_function(kind.forward, options, device)
    return type(kind.__name__, (kind,), {"forward": forward})
