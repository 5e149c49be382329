"""Read weights from files that also contain other Python objects, such as configs or optimizers.

Tensors and arrays are rebuilt from the forms that torch.save and NumPy write; everything else is
replaced by a placeholder. Nothing is imported or called. The reader replaces the module ``pickle``
in ``torch.load``.
"""

from __future__ import annotations

import math
import pickle
import re
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from selftask.checkpoint.restricted_pickle import (
    Constructor,
    Outline,
    Placeholder,
    RefusedContent,
    StateDict,
    check_file,
    check_nesting,
    is_zip,
    open_pickle,
    size,
)

_NUMBERS = re.compile(r"[<>|=]?(\?|b1|[iu][1248]|f[248])")
"""Numeric dtypes. NumPy's dtype accepts flags from a pickle that turn bytes into pointers."""


class _Dtype:
    """Wrapper whose ``dtype`` is a NumPy dtype, or None if it is not numeric."""

    def __init__(self, code: str) -> None:
        self.dtype = np.dtype(code) if _NUMBERS.fullmatch(code) else None

    def __setstate__(self, state: Any) -> None:
        if self.dtype is not None and state[1] in ("<", ">", "|", "="):
            self.dtype = self.dtype.newbyteorder(state[1])


class _Array(np.ndarray):
    """Array that a pickle can only fill with numbers; otherwise it stays empty."""

    def __setstate__(self, state: Any) -> None:
        _, shape, kind, is_fortran, content = state
        if isinstance(content, str):
            content = content.encode("latin1")  # written by Python 2
        dtype = _dtype(kind)
        if dtype is not None:
            _check_length(content, shape, dtype)
            state = (1, tuple(shape), dtype, bool(is_fortran), content)
            super().__setstate__(state)


def _refuse(reason: str) -> RefusedContent:
    return RefusedContent(f"{reason}, as no writer of weights does; nothing was run")


def _dtype(kind: Any) -> np.dtype[Any] | None:
    return kind.dtype if isinstance(kind, _Dtype) else None


def _check_length(content: Any, shape: Any, dtype: np.dtype[Any]) -> None:
    if type(content) is not bytes or len(content) != math.prod(size(shape)) * dtype.itemsize:
        raise _refuse("has an array of another length than its shape")


def _make_dtype(code: Any, align: Any = False, copy: Any = True) -> _Dtype:
    if type(code) is not str or type(align) not in (bool, int) or type(copy) not in (bool, int):
        raise _refuse("has a dtype without a code")
    return _Dtype(code)


def _make_array(kind: Any, shape: Any, code: Any) -> Any:
    if isinstance(kind, Placeholder):
        return Placeholder()  # a subclass, such as a matrix
    if kind is not _NDARRAY or shape != (0,) or code not in ("b", b"b"):
        raise _refuse("creates an array")
    return _Array(0, bool)


def _array_of_buffer(content: Any, kind: Any, shape: Any, order: Any, axes: Any = None) -> Any:
    """Return an array from a pickle of protocol 5; empty for other dtypes and permuted axes."""
    dtype = _dtype(kind)
    if dtype is None or axes is not None:
        return _Array(0, bool)
    content = bytes(content) if type(content) is bytearray else content
    _check_length(content, shape, dtype)
    if order not in ("C", "F"):
        raise _refuse("has an array of another order")
    native = np.frombuffer(content, dtype).astype(
        dtype.newbyteorder("=")
    )  # writable, as torch requires
    return native.reshape(shape, order=order)


def _make_scalar(kind: Any, content: Any = b"") -> Any:
    """Return a NumPy number, or None for anything else."""
    dtype = _dtype(kind)
    if dtype is None:
        return None
    content = content.encode("latin1") if isinstance(content, str) else content
    _check_length(content, (), dtype)
    return np.frombuffer(content, dtype)[0]


def _encode(text: Any, encoding: Any) -> bytes:
    if type(text) is not str or encoding != "latin1":
        raise _refuse("encodes a text")
    return text.encode("latin1")


def _no_bytes() -> bytes:
    return b""


def _tensor(storage: Any, offset: Any, shape: Any, stride: Any, dtype: Any = None) -> Tensor:
    """Return a tensor after checking that it lies within its storage."""
    if not isinstance(storage, torch.storage.TypedStorage):
        raise _refuse("has a tensor without a storage")
    numbers = size((offset, *size(shape), *size(stride)))
    if len(numbers) != 1 + 2 * len(shape):
        raise _refuse("has a tensor with other strides than dimensions")
    item = torch.empty(0, dtype=dtype or storage.dtype).element_size()
    last = offset + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
    if 0 not in shape and (last + 1) * item > storage._untyped_storage.nbytes():
        raise _refuse("has a tensor that is larger than its storage")
    return torch._utils._rebuild_tensor_v3(  # type: ignore[no-any-return]
        storage, offset, shape, stride, False, OrderedDict(), dtype or storage.dtype
    )


def _tensor_2(
    storage: Any, offset: Any, shape: Any, stride: Any, _grad: Any, _hooks: Any, bits: Any = None
) -> Tensor:
    if bits:
        raise _refuse("has a conjugated tensor")
    return _tensor(storage, offset, shape, stride)


def _tensor_3(
    storage: Any,
    offset: Any,
    shape: Any,
    stride: Any,
    _grad: Any,
    _hooks: Any,
    dtype: Any,
    bits: Any = None,
) -> Tensor:
    if bits or not isinstance(dtype, torch.dtype):
        raise _refuse("has a conjugated tensor, or one without a dtype")
    return _tensor(storage, offset, shape, stride, dtype)


def _parameter(data: Any, _grad: Any, _hooks: Any, _state: Any = None) -> Tensor:
    if type(data) is not Tensor:
        raise _refuse("has a parameter without a tensor")
    return data


_NDARRAY = object()
_NAMES: dict[str, Any] = {
    "collections.OrderedDict": Constructor(StateDict),
    "torch.Size": Constructor(size),
    "torch.storage.UntypedStorage": torch.UntypedStorage,  # named by storages, never called
    "torch._utils._rebuild_tensor": Constructor(_tensor),
    "torch._utils._rebuild_tensor_v2": Constructor(_tensor_2),
    "torch._utils._rebuild_tensor_v3": Constructor(_tensor_3),
    "torch._utils._rebuild_parameter": Constructor(_parameter),
    "torch._utils._rebuild_parameter_with_state": Constructor(_parameter),
    "numpy.ndarray": _NDARRAY,
    "numpy.dtype": Constructor(_make_dtype),
    "_codecs.encode": Constructor(_encode),  # for bytes of arrays in pickles of protocol 2
    "builtins.bytes": Constructor(_no_bytes),
    "__builtin__.bytes": Constructor(_no_bytes),
    **{f"torch.{name}": value for name, value in vars(torch).items() if type(value) is torch.dtype},
}
for _numpy in ("numpy.core", "numpy._core"):  # renamed in NumPy 2
    _NAMES[f"{_numpy}.multiarray._reconstruct"] = Constructor(_make_array)
    _NAMES[f"{_numpy}.multiarray.scalar"] = Constructor(_make_scalar)
    _NAMES[f"{_numpy}.numeric._frombuffer"] = Constructor(_array_of_buffer)


class _TensorUnpickler(Outline):
    """Unpickler that rebuilds tensors and arrays; other objects become placeholders."""

    names = _NAMES
    objects = (_Dtype, _Array, StateDict, Placeholder)

    def persistent_load(self, pid: Any) -> Any:
        """Refuse storages of a plain pickle; torch.load replaces this method."""
        raise _refuse("names a storage")


def read_tensors(path: Path) -> tuple[Any, list[str]]:
    """Return the content of a ``torch.save`` or pickle file, and the names of skipped classes.

    For other kinds of files any error may be raised, such as pickle.UnpicklingError.
    """
    skipped: dict[str, None] = {}

    class Reader(_TensorUnpickler):
        """Unpickler that torch.load can create."""

        def __init__(self, file: Any, **options: Any) -> None:
            super().__init__(file, **options)
            self.skipped = skipped

    class Module:
        """Stand-in for the module ``pickle``, for torch.load."""

        Unpickler = Reader
        __name__ = "pickle"

        @staticmethod
        def load(file: Any, **options: Any) -> Any:
            return Reader(file, **options).load()

    if not is_zip(path):
        with open_pickle(path) as file:
            content = Reader(file, encoding="latin1").load()  # Python 2 wrote bytes as text
        if content != torch.serialization.MAGIC_NUMBER:  # otherwise torch's format before 1.6
            return content, list(skipped)
    check_file(path)
    try:  # refuses TorchScript and tar, which torch.load would otherwise run and unpack
        content = torch.load(path, map_location="cpu", weights_only=True)
        check_nesting(content)
    except pickle.UnpicklingError:
        content = torch.load(path, map_location="cpu", weights_only=False, pickle_module=Module())
    return content, list(skipped)
