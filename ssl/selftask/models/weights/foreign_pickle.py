"""Read weights from files that also contain other Python objects, such as configs or optimizers.

Tensors are read; everything else is replaced by a placeholder. Nothing is imported or called. The
reader replaces the module ``pickle`` in ``torch.load``.
"""

from __future__ import annotations

import codecs
import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import torch


class _Dtype:
    """A numeric dtype. NumPy's own accepts flags from a pickle that turn bytes into pointers."""

    def __init__(self, code: Any, *_: Any) -> None:
        self.dtype = np.dtype(code if isinstance(code, str) else "V")

    def __setstate__(self, state: Any) -> None:
        self.dtype = self.dtype.newbyteorder(state[1])


class _Array(np.ndarray):
    """Array that a pickle can only fill with numbers; otherwise it stays empty."""

    def __setstate__(self, state: Any) -> None:
        version, shape, kind, is_fortran, content = state
        if isinstance(kind, _Dtype) and kind.dtype.kind in "biuf":
            super().__setstate__((version, shape, kind.dtype, is_fortran, content))


def _reconstruct(*_: Any) -> _Array:
    return _Array(0, bool)


def _scalar(kind: Any, content: Any = b"") -> Any:
    """Return a NumPy number, or None for anything else."""
    if not (isinstance(kind, _Dtype) and isinstance(content, bytes)):
        return None
    dtype = kind.dtype
    fits = dtype.kind in "biuf" and len(content) == dtype.itemsize
    return np.frombuffer(content, dtype)[0] if fits else None


_ALLOWED: dict[str, Any] = {
    "collections.OrderedDict": OrderedDict,
    "torch.Size": torch.Size,
    "torch._utils._rebuild_tensor": torch._utils._rebuild_tensor,
    "torch._utils._rebuild_tensor_v2": torch._utils._rebuild_tensor_v2,
    "torch._utils._rebuild_parameter": torch._utils._rebuild_parameter,
    "numpy.ndarray": _Array,
    "numpy.dtype": _Dtype,
    "numpy.core.multiarray._reconstruct": _reconstruct,  # renamed in NumPy 2
    "numpy._core.multiarray._reconstruct": _reconstruct,
    "numpy.core.multiarray.scalar": _scalar,
    "numpy._core.multiarray.scalar": _scalar,
    "_codecs.encode": codecs.encode,  # for bytes of arrays in pickles of protocol 2
}
"""Functions that rebuild tensors and arrays, without other effects."""


def read_tensors(path: Path) -> tuple[Any, list[str]]:
    """Return the content of a ``torch.save`` or pickle file, and the names of skipped classes.

    Raises pickle.UnpicklingError or an error of torch for other kinds of files.
    """
    skipped: dict[str, None] = {}

    class Reader(_TensorUnpickler):
        names = skipped

    class Module:
        """Stand-in for the module ``pickle``, for torch.load."""

        Unpickler = Reader
        __name__ = "pickle"

        @staticmethod
        def load(file: Any, **options: Any) -> Any:
            return Reader(file, **options).load()

    if not zipfile.is_zipfile(path):
        with path.open("rb") as file:
            content = Reader(file, encoding="latin1").load()  # Python 2 wrote bytes as text
        if content != torch.serialization.MAGIC_NUMBER:  # otherwise torch's format before 1.6
            return content, list(skipped)
    content = torch.load(path, map_location="cpu", weights_only=False, pickle_module=Module())
    return content, list(skipped)


class _TensorUnpickler(pickle.Unpickler):
    """Resolves functions that rebuild tensors; every other name becomes a placeholder."""

    names: dict[str, None]

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if full in _ALLOWED:
            return _ALLOWED[full]
        found = getattr(torch, name, None) if module.partition(".")[0] == "torch" else None
        if isinstance(found, torch.dtype) or (isinstance(found, type) and name.endswith("Storage")):
            return found
        self.names[full] = None
        return _Placeholder


class _Placeholder:
    """Placeholder for an object whose class is not loaded. It accepts any state."""

    def __new__(cls, *args: Any, **options: Any) -> _Placeholder:
        return super().__new__(cls)

    def __init__(self, *args: Any, **options: Any) -> None: ...
    def __setstate__(self, state: Any) -> None: ...
    def __setitem__(self, key: Any, value: Any) -> None: ...
    def append(self, item: Any) -> None: ...
    def extend(self, items: Any) -> None: ...
    def __call__(self, *args: Any, **options: Any) -> _Placeholder:
        return self
