"""Blocks of a network: the unit of activation checkpointing and of sharding."""

from __future__ import annotations

from torch import nn

_CONTAINERS = (nn.Sequential, nn.ModuleList)


def find_blocks(network: nn.Module) -> list[nn.Module]:
    """Return the blocks of a network in order, such as transformer or residual blocks.

    A block is a child of a ``Sequential`` or ``ModuleList``, with parameters and at least two
    children of its own. A stage, which has a container of blocks of one class, is not a block; the
    blocks in its container are. A network without such modules (a plain ``Sequential`` of layers)
    has no blocks.
    """
    blocks: list[nn.Module] = []
    _descend(network, in_container=False, blocks=blocks)
    return blocks


def _descend(module: nn.Module, *, in_container: bool, blocks: list[nn.Module]) -> None:
    if in_container and _is_block(module):
        blocks.append(module)
        return
    for child in module.children():
        _descend(child, in_container=isinstance(module, _CONTAINERS), blocks=blocks)


def _is_block(module: nn.Module) -> bool:
    """Return True if a child of a container is a block, not a layer, a container or a stage."""
    if isinstance(module, _CONTAINERS) or len(list(module.children())) < 2:
        return False
    if next(module.parameters(), None) is None:
        return False
    return not any(_holds_blocks(child) for child in module.children())


def _holds_blocks(module: nn.Module) -> bool:
    """Return True if a module is a container of modules of one class that have children."""
    if not isinstance(module, _CONTAINERS):
        return False
    children = list(module)
    return bool(children) and all(
        type(child) is type(children[0])
        and not isinstance(child, _CONTAINERS)
        and next(child.children(), None) is not None
        for child in children
    )
