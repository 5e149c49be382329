"""FSDP2: each rank keeps a shard of parameters, gradients and optimizer state.

The network is sharded block by block. Teachers are sharded in the same way, so that the moving
average of parameters is computed on local shards. The method's own parameters (a predictor,
prototypes) are not sharded, and their gradients are reduced manually. Checkpoints contain full
tensors, or shards with ``train.sharded_checkpoints``; either kind can be loaded. Full checkpoints
do not depend on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor import empty as empty_shards
from torch.utils._pytree import tree_map_only

from selftask.distributed.accelerator import forked_rng, is_accelerator
from selftask.distributed.collectives import collective_device, host_group, is_primary, world_size
from selftask.distributed.heartbeat import collective_activity
from selftask.distributed.shards import full_tensor
from selftask.errors import RunError, UserError
from selftask.logs import get_logger
from selftask.parallel.blocks import find_blocks
from selftask.parallel.initial_weights import InitialWeights
from selftask.parallel.manual import ManualReduction
from selftask.parallel.rank_groups import rank_groups
from selftask.parallel.reduction import Named, Reduction
from selftask.parallel.sync_batch_norm import has_batch_norm
from selftask.parallel.unused import count_ranks, describe, set_flags

log = get_logger(__name__)

_FILLS_IN = hasattr(FSDPModule, "set_reduce_scatter_unused_params")


class FSDPReduction(Reduction):
    """Reduction that shards each block of a network, then its other parameters.

    Args:
        bucket_mb: Size of a gradient bucket for unsharded parameters, in MiB.
        low_precision: Dtype of the forward pass; None for float32.
        shard_over: Ranks that share one copy: ``all``, those of a ``node``, or a number. Gradients
            are averaged over the copies (hybrid sharding).
        cpu_offload: Keep shards, gradients and optimizer state on the CPU.
        prefetch: Number of blocks to gather in advance; 0 for torch's own prefetching.
    """

    def __init__(
        self,
        *,
        bucket_mb: float = 25.0,
        low_precision: torch.dtype | None,
        shard_over: str | int = "all",
        cpu_offload: bool = False,
        prefetch: int = 0,
    ) -> None:
        self._low = low_precision
        self._shard_over, self._cpu_offload, self._ahead = shard_over, cpu_offload, prefetch
        self._bucket_mb = bucket_mb
        self._method: Reduction = Reduction()  # for parameters that are not sharded
        self._idle: list[int] | None = None  # without a gradient on any rank in the first step
        self._host_group: Any = None

    def shard(self, networks: Iterable[nn.Module], initial: InitialWeights) -> None:
        networks, device = list(networks), initial.device
        self._mesh = _mesh(device.type, self._shard_over)
        offload = OffloadPolicy()
        if self._cpu_offload:
            offload = CPUOffloadPolicy(pin_memory=is_accelerator(device))
        networks[0].register_forward_hook(_own_memory)
        for network in networks:
            blocks = find_blocks(network)
            for part in (*blocks, network):
                initial.materialize(part)
                fully_shard(
                    part,
                    mesh=self._mesh,
                    # also reshard the root: between steps, teachers need every parameter as a shard
                    reshard_after_forward=True,
                    mp_policy=self._policy(part),
                    offload_policy=offload,
                )
            if self._ahead:
                _prefetch(network, blocks, self._ahead)
        self._network = cast(Any, networks[0])
        if _FILLS_IN:
            self._network.set_reduce_scatter_unused_params(True)
        self._arrivals = Arrivals(self._network)

    def register(self, named: Named) -> None:
        names = {p: name for name, p in self._network.named_parameters()}
        self._sharded = [(name, p) for name, p in named if isinstance(p, DTensor)]
        self._inner_names = [names[p] for _, p in self._sharded]  # without the prefix ``network.``
        rest = [(name, p) for name, p in named if not isinstance(p, DTensor)]
        if rest:
            self._method = ManualReduction(bucket_mb=self._bucket_mb)
            self._method.register(rest)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        self._network.set_requires_gradient_sync(False)
        try:
            with self._method.no_sync():
                yield
        finally:
            self._network.set_requires_gradient_sync(True)

    def reduce(self) -> None:
        self._method.reduce()
        if self._idle is None:
            self._idle = self._find_idle()
            self._host_group = host_group() if self._idle else None
            self._flags = torch.empty(len(self._sharded), device=collective_device())
        present = [name in self._arrivals.names for name in self._inner_names]
        self._arrivals.names.clear()
        for index in self._without_gradient_anywhere(present):
            self._sharded[index][1].grad = None  # as on one process; FSDP sets it to zero

    def discard(self) -> None:
        """Discard the unsharded gradients that FSDP2 has accumulated under ``no_sync``.

        They are not in ``Parameter.grad``, so ``zero_grad`` does not clear them.
        """
        parts = (part for part in self._network.modules() if isinstance(part, FSDPModule))
        for state in (part._get_fsdp_state() for part in parts):
            groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
            for kept in chain.from_iterable(g.fsdp_params for g in groups if g is not None):
                kept.unsharded_accumulated_grad = None
                if hasattr(kept, "_unsharded_param"):  # it has been gathered once
                    kept._unsharded_param.grad = None
        self._arrivals.names.clear()

    def _without_gradient_anywhere(self, present: list[bool]) -> list[int]:
        """Return the indices of sharded parameters without a gradient on any rank in this step.

        The host waits for the device only if a gradient is absent here that is not idle.
        """
        absent = [index for index, is_here in enumerate(present) if not is_here]
        idle: list[int] = self._idle or []
        unclear = [i for i in absent if i not in idle and self._sharded[i][1].requires_grad]
        set_flags(self._flags, unclear)  # others are not read
        with collective_activity("all_reduce of which parameters have gradients"):
            dist.all_reduce(self._flags)
        flags = self._flags.tolist() if unclear else []
        counts = count_ranks([present[i] for i in idle], self._host_group) if idle else []
        unused = [i for i, count in zip(idle, counts, strict=True) if count == 0]
        return unused + [i for i in unclear if flags[i] == 0]

    def _find_idle(self) -> list[int]:
        """Log the parameters without a gradient in the first step.

        Returns the indices of those without a gradient on any rank.
        Raises RunError if only some ranks lack a gradient and this torch cannot fill in zeros.
        """
        counts = count_ranks([name in self._arrivals.names for name in self._inner_names])
        if min(counts, default=world_size()) < world_size():
            message = describe([name for name, _ in self._sharded], counts)
            if max(c for c in counts if c < world_size()) > 0 and not _FILLS_IN:
                raise RunError(f"{message}\nparallel.reduce=fsdp needs torch 2.14 for this")
            log.warning("%s\n  what no rank has a gradient for keeps its value", message)
        return [index for index, count in enumerate(counts) if count == 0]

    def _policy(self, part: nn.Module) -> MixedPrecisionPolicy:
        """Return a policy that runs a block in low precision and reduces gradients in float32.

        Parts with BatchNorm stay in float32, since its statistics require it. Autocast still runs
        their matrix products in low precision.
        """
        if self._low is None or has_batch_norm(part):
            return MixedPrecisionPolicy()
        return MixedPrecisionPolicy(param_dtype=self._low, reduce_dtype=torch.float32)

    def full_state(self, state: Any) -> Any:
        def on_first_rank(shards: DTensor) -> Tensor:
            full = full_tensor(shards)
            return full.cpu() if is_primary() else full.new_empty(0)

        return tree_map_only(DTensor, on_first_rank, state)

    def empty(self, shape: Sequence[int], *, dtype: torch.dtype) -> Tensor:
        placements = [*[Replicate()] * (self._mesh.ndim - 1), Shard(0)]
        return empty_shards(*shape, dtype=dtype, device_mesh=self._mesh, placements=placements)

    def shard_state(self, module: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
        mine = module.state_dict()
        return {key: _share(value, mine.get(key)) for key, value in state.items()}

    def regroup(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Split groups into sharded and unsharded parameters; fused optimizers cannot mix them."""
        self._parameters = [p for group in groups for p in group["params"]]
        self._layout: list[tuple[int, list[int]]] = []  # per new group: old group, its parameters
        arranged, first = [], 0
        for number, group in enumerate(groups):
            places = range(first, first + len(group["params"]))
            first = places.stop
            for sharded in (True, False):
                mine = [i for i in places if isinstance(self._parameters[i], DTensor) == sharded]
                if mine:
                    arranged.append({**group, "params": [self._parameters[i] for i in mine]})
                    self._layout.append((number, mine))
        return arranged

    def rearrange(self, state: dict[str, Any]) -> dict[str, Any]:
        optim = state["optim"]
        places = [index for _, mine in self._layout for index in mine]
        of_place = {places[i]: value for i, value in optim["state"].items()}
        groups: dict[int, dict[str, Any]] = {}
        for (number, mine), group in zip(self._layout, optim["param_groups"], strict=True):
            before = groups.get(number, {"params": []})["params"]
            groups[number] = {**group, "params": sorted([*before, *mine])}
        ordered = {index: of_place[index] for index in sorted(of_place)}
        return {**state, "optim": {"state": ordered, "param_groups": list(groups.values())}}

    def shard_state_of_optimizer(self, state: dict[str, Any]) -> dict[str, Any]:
        optim = state["optim"]
        places = [index for _, mine in self._layout for index in mine]
        of_one = {
            i: {key: self._share_like(value, index) for key, value in optim["state"][index].items()}
            for i, index in enumerate(places)
            if index in optim["state"]
        }
        groups, first = [], 0
        for number, mine in self._layout:
            params = list(range(first, first + len(mine)))
            groups.append({**optim["param_groups"][number], "params": params})
            first += len(mine)
        return {**state, "optim": {"state": of_one, "param_groups": groups}}

    def _share_like(self, value: Any, index: int) -> Any:
        parameter = self._parameters[index]
        same = isinstance(value, Tensor) and value.shape == parameter.shape
        return _share(value, parameter) if same else value

    def unsharded(self, module: nn.Module, build: Callable[[], nn.Module]) -> nn.Module:
        full = {
            key: full_tensor(value) if isinstance(value, DTensor) else value
            for key, value in module.state_dict().items()
        }
        with forked_rng():
            copy = build()
        copy.load_state_dict(full)
        device = next(iter(full.values())).device
        return copy.to(device).train(module.training)


def _mesh(device_type: str, shard_over: str | int) -> DeviceMesh:
    """Return a mesh of all ranks, or a (copies, shards) mesh if several groups have a copy each."""
    groups = rank_groups(shard_over, "parallel.shard_over")
    if len({len(group) for group in groups}) > 1:
        sizes = ", ".join(str(len(group)) for group in groups)
        raise UserError(
            f"parallel.shard_over={shard_over}: nodes have different numbers of processes "
            f"({sizes}); use 'all', or a number that divides them"
        )
    if len(groups) == 1:
        return DeviceMesh(device_type, groups[0])
    return DeviceMesh(device_type, groups, mesh_dim_names=("copies", "shards"))


def _prefetch(network: nn.Module, blocks: list[nn.Module], depth: int) -> None:
    """Gather the next ``depth`` blocks in advance, in forward and backward passes."""
    forward, backward = [network, *blocks], [network, *reversed(blocks)]
    for n in range(len(forward)):
        part = slice(n + 1, n + 1 + depth)
        cast(Any, forward[n]).set_modules_to_forward_prefetch(forward[part])
        cast(Any, backward[n]).set_modules_to_backward_prefetch(backward[part])


def _own_memory(module: nn.Module, inputs: Any, output: Any) -> Any:
    """Forward hook: clone a view, since in-place operations on it would remove FSDP's hook."""
    return output.clone() if isinstance(output, Tensor) and output._is_view() else output


class Arrivals:
    """Recorder of the parameters that received a gradient, since FSDP does not report them.

    Gradients are accumulated on the unsharded parameters, which exist only while their block runs.
    """

    def __init__(self, network: nn.Module) -> None:
        self.names: set[str] = set()
        self._network = network
        self._wanted = {name for name, p in network.named_parameters() if p.requires_grad}
        for part in network.modules():
            if isinstance(part, FSDPModule):
                part.register_forward_pre_hook(self._listen_to_gathered)

    def _listen_to_gathered(self, part: nn.Module, inputs: Any) -> None:
        """Forward pre-hook: register gradient hooks on parameters that have just been gathered."""
        if not self._wanted:
            return
        for name, p in self._network.named_parameters():
            if name in self._wanted and not isinstance(p, DTensor):
                self._wanted.remove(name)
                p.register_post_accumulate_grad_hook(partial(self._arrived, name))

    def _arrived(self, name: str, parameter: Tensor) -> None:
        self.names.add(name)


def _share(value: Any, like: Any) -> Any:
    """Return this rank's shard of a full tensor, sharded as ``like``, without communication.

    ``value`` is returned unchanged if it is already sharded, or if ``like`` is not sharded.
    """
    if not isinstance(like, DTensor) or isinstance(value, DTensor):
        return value
    value = value.to(dtype=like.dtype)
    shards = distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)
    return shards.to(like.device)  # the mesh may be on another device
