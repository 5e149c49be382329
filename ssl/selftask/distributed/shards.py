"""Sharded tensors (FSDP): the ranks that hold one, and the full tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def full_tensor(shards: DTensor) -> Tensor:
    """Return the full tensor, detached. Every rank must call this function.

    Shards on the CPU are gathered on the mesh's device.
    """
    on_device: Any = shards.detach().to(shards.device_mesh.device_type)
    return on_device.full_tensor()


def ranks_of_shards(shards: DTensor) -> list[int]:
    """Return the ranks that together hold one copy of the tensor, in the order of its rows."""
    mesh = shards.device_mesh
    return mesh.mesh.flatten()[: mesh.size(-1)].tolist()
