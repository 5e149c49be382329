"""An imagined accelerator: it computes on the CPU, and reports what a real one would be slow at.

``imagined`` is registered with torch as PrivateUse1, the place for devices outside of torch, so
``train.device=auto`` selects it, and autocast, streams and events work. The registration cannot
be undone; tests use it in a process of their own (``in_process``).

Inside ``ImaginedDevice`` tensors can be on the device. Their values are those of the CPU. As on a
GPU, an operation on tensors of both devices raises an error, except for 0-d tensors of the CPU.
Operations that would make the host wait for the device are collected in ``waits``, and those that
read what another stream may still write, or may free too early, in ``races``
(``imagined_streams.py``). Autocast has CUDA's lists (``imagined_autocast.py``).
"""

from __future__ import annotations

import multiprocessing
import weakref
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

import imagined_autocast
from imagined_streams import (
    Event,
    Memory,
    Stream,
    check_streams,
    entered,
    memory_of,
    on_stream,
    place,
    report_wait,
    streams,
)
from selftask.distributed import accelerator

NAME = "imagined"
aten = torch.ops.aten

# the result, or its size, depends on values of the device
_READS_VALUES = {
    aten._local_scalar_dense,
    aten._unique2,
    aten._linalg_eigh,  # LAPACK's result code
    aten.allclose,
    aten.bincount,
    aten.equal,
    aten.is_nonzero,
    aten.masked_select,
    aten.nonzero,
    aten.unique_consecutive,
    aten.unique_dim,
}
_FILLS = {aten.index_fill, aten.index_fill_}  # a value of the device is read: trace's backward pass
_INDEXES = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}
# raise an error on CUDA under torch.use_deterministic_algorithms, as its documentation lists
_NOT_DETERMINISTIC = {
    aten._adaptive_avg_pool2d_backward,
    aten._adaptive_avg_pool3d_backward,
    aten._ctc_loss_backward,
    aten._upsample_bicubic2d_aa_backward,
    aten._upsample_bilinear2d_aa_backward,
    aten.adaptive_max_pool2d_backward,
    aten.avg_pool3d_backward,
    aten.fractional_max_pool2d_backward,
    aten.grid_sampler_2d_backward,
    aten.grid_sampler_3d_backward,
    aten.histc,
    aten.max_unpool2d,
    aten.median,
    aten.nll_loss2d_forward,
    aten.put_,
    aten.reflection_pad1d_backward,
    aten.reflection_pad2d_backward,
    aten.upsample_bicubic2d_backward,
    aten.upsample_linear1d_backward,
    aten.upsample_trilinear3d_backward,
}
_STAGED = 64 * 1024  # bytes of pageable memory that CUDA copies without waiting
COLLECTIVES: dict[Any, Callable[..., Any]] = {}  # how they run, by operation
_COPIES = {aten._to_copy, aten.copy_, aten._copy_from}


class MixedDevices(RuntimeError):
    """An operation on tensors of both devices."""


class OnDevice(Tensor):
    """A tensor on the imagined device; ``values`` is the tensor on the CPU."""

    values: Tensor
    memory: Memory  # shared by its views
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, values: Tensor) -> OnDevice:
        made: Any = Tensor._make_wrapper_subclass(
            cls,
            values.size(),
            strides=values.stride(),
            storage_offset=values.storage_offset(),
            dtype=values.dtype,
            device=torch.device(NAME, 0),
        )
        made.values = values
        made.memory = memory_of(values)
        return made  # type: ignore[no-any-return]

    def __repr__(self) -> str:
        report_wait("repr")
        return f"OnDevice({self.values!r})"

    def data_ptr(self) -> int:
        return self.values.data_ptr()

    def untyped_storage(self) -> Any:
        return self.values.untyped_storage()

    def tolist(self) -> Any:
        report_wait("tolist")
        return self.values.tolist()

    def numpy(self, *, force: bool = False) -> Any:
        raise MixedDevices(f"{place()}: numpy() of a tensor that is not on the CPU")

    def record_stream(self, stream: Any) -> None:
        self.memory.recorded.add(stream)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied: Any = self.detach().clone().requires_grad_(self.requires_grad)
        copied = (
            nn.Parameter(copied, self.requires_grad) if isinstance(self, nn.Parameter) else copied
        )
        return memo.setdefault(id(self), copied)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class ImaginedDevice(TorchDispatchMode):
    """Context in which tensors can be on the device.

    ``waits`` lists where the host would have waited for it: ``file:line``, source and operation;
    ``races`` lists uses of a tensor on a stream that has not waited for the one that made it, or
    without ``record_stream``; ``nondeterministic`` what would raise an error on CUDA under
    ``torch.use_deterministic_algorithms``; ``doubles`` results in float64, which MPS refuses.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []
        self.races: list[str] = []
        self.nondeterministic: list[str] = []
        self.doubles: list[str] = []

    def __enter__(self) -> ImaginedDevice:
        _register()
        entered.append(self)
        return super().__enter__()  # type: ignore[no-any-return]

    def __exit__(self, *error: Any) -> None:
        entered.remove(self)
        super().__exit__(*error)

    def launched(self, func: Any, args: Any) -> None:
        """Receive each operation on the device; for subclasses that count them."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # first it calls the operation of its shards
        return _run(func, args, kwargs or {})


def in_process(function: Callable[..., Any], *args: Any) -> Any:
    """Return ``function(*args)``, run in the process that knows the device."""
    return _process().submit(function, *args).result()


@cache
def _process() -> ProcessPoolExecutor:
    import ranks  # noqa: F401 - sets what the server imports once

    context = multiprocessing.get_context("forkserver")
    return ProcessPoolExecutor(1, mp_context=context, initializer=_start)


def _start() -> None:
    torch.set_num_threads(1)
    _register()
    patched: Any = Tensor  # threads that load images have no dispatch mode
    patched.pin_memory, patched.is_pinned = _pin, _is_pinned


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation on the CPU; put its results on the device if it is there."""
    tensors: list[Tensor] = []
    tree_map(lambda x: tensors.append(x) if isinstance(x, Tensor) else None, (args, kwargs))
    op = func.overloadpacket
    if op is aten.is_pinned:
        return _is_pinned(args[0])
    if op is aten._pin_memory:
        return _pin(args[0])
    inside = any(isinstance(x, OnDevice) for x in tensors)
    asked = torch.device(kwargs["device"]) if kwargs.get("device") is not None else None
    if not inside and (asked is None or asked.type != NAME):
        return func(*args, **kwargs)
    if op in COLLECTIVES:
        return COLLECTIVES[op](*args, **kwargs)
    check_streams(func, tensors)
    for mode in entered:
        mode.launched(func, args)
    if inside and op not in _COPIES:
        _check_devices(func, tensors)
    if _is_refused(op, args) and torch.are_deterministic_algorithms_enabled():
        for mode in entered:  # an error in a thread of autograd ends the process
            mode.nondeterministic.append(f"{place()}: {func}")
    if _makes_host_wait(op, args, kwargs, tensors):
        report_wait(func)
    out = func(*tree_map(_to_cpu, args), **tree_map(_to_cpu, kwargs))
    if func._schema.is_mutable:
        for number, argument in enumerate(func._schema.arguments):
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            if argument.alias_info is not None and argument.alias_info.is_write:
                tree_map(lambda x: x.memory.written() if isinstance(x, OnDevice) else None, value)
    to_cpu = asked is not None and asked.type == "cpu"
    if op is aten.copy_ or to_cpu:
        return args[0] if op is aten.copy_ else out
    same = {id(x.values): x for x in tensors if isinstance(x, OnDevice)}  # of in-place operations

    def wrapped(value: Any) -> Any:
        is_new = type(value) is Tensor and id(value) not in same
        made = OnDevice(value) if is_new else same.get(id(value), value)
        for mode in entered if is_new and value.dtype == torch.float64 else ():
            mode.doubles.append(f"{place()}: {func}")
        if op is aten.scalar_tensor:
            _numbers.add(made)
        return made

    return tree_map(wrapped, out)


def _pin(tensor: Tensor, device: Any = None) -> Tensor:
    """Return a copy in page-locked memory."""
    pinned = tensor.clone()
    storage = pinned.untyped_storage()
    _pinned[storage._cdata] = pinned
    return pinned


def _is_pinned(tensor: Tensor, device: Any = None) -> bool:
    return tensor.untyped_storage()._cdata in _pinned


_pinned: Any = weakref.WeakValueDictionary()  # tensors in page-locked memory, by their storage
_numbers: weakref.WeakSet[Any] = weakref.WeakSet()  # made of numbers of Python by an assignment


def is_number(tensor: Tensor) -> bool:
    """Return whether an assignment made the tensor of a number of Python."""
    return any(tensor is number for number in _numbers)


def _to_cpu(value: Any) -> Any:
    if isinstance(value, OnDevice):
        return value.values
    is_here = isinstance(value, torch.device) and value.type == NAME
    return torch.device("cpu") if is_here else value


def _check_devices(func: Any, tensors: list[Tensor]) -> None:
    indexes = func.overloadpacket in _INDEXES  # an index may be on the CPU: it is copied
    for tensor in tensors[: 1 if indexes else None]:
        if not isinstance(tensor, OnDevice) and tensor.ndim > 0:
            shape = tuple(tensor.shape)
            raise MixedDevices(f"{place()}: {func} with a tensor {shape} on the CPU")


def _is_refused(op: Any, args: Any) -> bool:
    """Return True for an operation that CUDA refuses in deterministic mode."""
    if op is aten.nll_loss2d_forward and args[3] == 0:  # no reduction, no sum in any order
        return False
    return op in _NOT_DETERMINISTIC


def _makes_host_wait(op: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> bool:
    """Return whether values go from one device to the other, or decide about a size."""
    if op in _COPIES:
        target = args[0] if op is aten.copy_ else None
        ends = [isinstance(x, OnDevice) for x in tensors]
        if op is aten._to_copy:
            asked = kwargs.get("device")
            ends.append(ends[0] if asked is None else torch.device(asked).type == NAME)
        sent = len(set(ends)) == 2
        waits = not kwargs.get("non_blocking", len(args) > 2 and target is not None and args[2])
        if sent and not waits and target is None and not isinstance(tensors[0], OnDevice):
            waits = tensors[0].nbytes > _STAGED and not _is_pinned(tensors[0])
        return sent and waits
    if op in _FILLS:
        return isinstance(args[3], OnDevice) and not is_number(args[3])
    if op in _INDEXES:
        if op is not aten.index and is_number(args[2]):  # CUDA gets it from the CPU
            return True
        return any(
            not isinstance(x, OnDevice) or x.dtype in (torch.bool, torch.uint8)
            for x in _indices(args)
        )
    if op is aten.repeat_interleave:
        return kwargs.get("output_size") is None
    return op in _READS_VALUES


def _indices(args: Any) -> list[Tensor]:
    return [index for index in args[1] if index is not None]


# -- registration ----------------------------------------------------------------------------------

_libraries: list[Any] = []  # what a library registers ends with it


class _Module:
    """``torch.imagined``."""

    Event, Stream = Event, Stream
    current_stream = staticmethod(lambda device=None: streams[-1])
    stream = staticmethod(on_stream)
    device_count = staticmethod(lambda: 1)
    current_device = staticmethod(lambda: 0)
    is_available = staticmethod(lambda: True)
    is_initialized = staticmethod(lambda: True)
    _is_in_bad_fork = staticmethod(lambda: False)
    manual_seed_all = staticmethod(lambda seed: None)
    get_rng_state = staticmethod(lambda device=None: torch.zeros(1, dtype=torch.uint8))
    set_rng_state = staticmethod(lambda state: None)
    emptied = 0  # how often

    def empty_cache(self) -> None:
        self.emptied += 1

    mem_get_info = staticmethod(lambda device: (2**40, 2**40))
    allocated = peak = 0  # bytes; reserved is twice as much

    def allocate(self, size: int) -> None:
        self.allocated += size
        self.peak = max(self.peak, self.allocated)

    def memory_stats(self, device: Any) -> dict[str, int]:
        now, peak = self.allocated, self.peak
        return {
            "allocated_bytes.all.current": now,
            "allocated_bytes.all.peak": peak,
            "reserved_bytes.all.current": 2 * now,
            "reserved_bytes.all.peak": 2 * peak,
        }

    def reset_peak_memory_stats(self, device: Any) -> None:
        self.peak = self.allocated

    get_amp_supported_dtype = staticmethod(lambda: [torch.bfloat16, torch.float16])

    @staticmethod
    def synchronize(device: Any = None) -> None:
        for stream in streams:
            stream.finished = stream.launched
        report_wait("synchronize")


def _register() -> None:
    if _libraries:
        return
    _setup_privateuseone_for_python_backend(NAME, backend_module=_Module())
    accelerator._PINNED = (*accelerator._PINNED, NAME)
    accelerator._CHANNELS_LAST = (*accelerator._CHANNELS_LAST, NAME)
    imagined_autocast.register(NAME, _libraries)
    # torch.tensor, and an index that is a list, go round __torch_dispatch__ to these two
    kernels = torch.library.Library("aten", "IMPL", "PrivateUse1")
    kernels.impl("empty_strided", _empty_strided)
    kernels.impl("_copy_from", _copy_from)
    _libraries.append(kernels)


def _empty_strided(size: Any, stride: Any, dtype: Any = None, **place: Any) -> Tensor:
    return OnDevice(torch.empty_strided(size, stride, dtype=dtype))


def _copy_from(source: Tensor, target: Any, non_blocking: bool = False) -> Tensor:
    if not non_blocking:
        report_wait("copy of numbers of the host")
    target.values.copy_(source)
    return target  # type: ignore[no-any-return]
