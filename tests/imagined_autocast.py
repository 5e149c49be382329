"""CUDA's lists of autocast for the imagined device, as the installed torch has them.

CUDA's lists differ from those of the CPU: layer norm, softmax, sums, powers, logarithms and losses
run in float32, some operations in the widest type of their arguments, and products in low
precision. ``ATen/autocast_mode.h``, which belongs to every build of torch, has them for all
accelerators; they are those of the documentation of ``torch.amp``. The cache of cast weights is
left out, which changes no value.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

_HEADER = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
_MACROS = {
    "low": "AT_FORALL_LOWER_PRECISION_FP",
    "float32": "AT_FORALL_FP32",
    "float32_result": "AT_FORALL_FP32_SET_OPT_DTYPE",
    "widest": "AT_FORALL_PROMOTE",
}
_NORMS = {"norm.Scalar": "norm.ScalarOpt_dtype", "norm.ScalarOpt_dim": "norm.ScalarOpt_dim_dtype"}
aten = torch.ops.aten


@cache
def lists() -> dict[str, list[str]]:
    """Return the operations of each list, such as ``pow.Tensor_Scalar``."""
    text = _HEADER.read_text(encoding="utf-8").replace("\\\n", "\n")
    found = {}
    for kind, macro in _MACROS.items():
        body = text.split(f"#define {macro}(_)", 1)[1].split("#", 1)[0]
        entries = re.findall(r"_\((\w+)(?:, (\w+))?\)", body)
        found[kind] = [f"{name}.{overload}" if overload else name for name, overload in entries]
    return found


def register(name: str, libraries: list[Any]) -> None:
    """Register the lists for the type of device ``name``; ``libraries`` keeps them alive."""
    others = torch.library.Library("_", "IMPL", "AutocastPrivateUse1")
    others.fallback(torch.library.fallthrough_kernel)
    casts = torch.library.Library("aten", "IMPL", "AutocastPrivateUse1")
    libraries += [others, casts]
    kernels = {"low": _in_low, "float32": _in_float32, "float32_result": _with_float32_result}
    for kind, kernel in {**kernels, "widest": _in_widest}.items():
        for word in lists()[kind]:
            casts.impl(word, _outside(kernel(_operation(word), name)))
    for word, with_dtype in _NORMS.items():
        casts.impl(word, _outside(_norm(_operation(word), _operation(with_dtype), name)))
    casts.impl("binary_cross_entropy", _refused)


def _operation(word: str) -> Any:
    name, _, overload = word.partition(".")
    return getattr(getattr(aten, name), overload or "default")


def _outside(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Return a kernel that runs with autocast excluded."""
    key = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(key):
            return kernel(*args, **kwargs)

    return run


def _is_cast(x: Any, name: str) -> bool:
    """Return whether autocast may cast an argument: floats of the device, but not doubles."""
    is_float = isinstance(x, Tensor) and x.is_floating_point()
    return is_float and x.dtype != torch.float64 and x.device.type == name


def _cast(values: Any, dtype: torch.dtype, name: str) -> Any:
    return tree_map_only(Tensor, lambda x: x.to(dtype) if _is_cast(x, name) else x, values)


def _in_low(operation: Any, name: str) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        low = torch.get_autocast_dtype(name)
        return operation(*_cast(args, low, name), **_cast(kwargs, low, name))

    return run


def _in_float32(operation: Any, name: str) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        full = torch.float32
        return operation(*_cast(args, full, name), **_cast(kwargs, full, name))

    return run


def _with_float32_result(operation: Any, name: str) -> Callable[..., Any]:
    position = [argument.name for argument in operation._schema.arguments].index("dtype")

    def run(*args: Any, **kwargs: Any) -> Any:
        has_dtype = len(args) > position or kwargs.get("dtype") is not None
        if _is_cast(args[0], name) and not has_dtype:
            kwargs["dtype"] = torch.float32
        return operation(*args, **kwargs)

    return run


def _norm(operation: Any, with_dtype: Any, name: str) -> Callable[..., Any]:
    def run(x: Tensor, *args: Any) -> Any:
        if not _is_cast(x, name):
            return operation(x, *args)
        p, *rest = args or (2,)
        dims = rest if with_dtype is aten.norm.ScalarOpt_dtype else [*rest, False][:2]
        return with_dtype(x, p, *dims, dtype=torch.float32)

    return run


def _in_widest(operation: Any, name: str) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        types = set()
        tree_map_only(
            Tensor, lambda x: types.add(x.dtype) if _is_cast(x, name) else None, (args, kwargs)
        )
        if len(types) < 2:
            return operation(*args, **kwargs)
        return operation(*_cast(args, torch.float32, name), **_cast(kwargs, torch.float32, name))

    return run


def _refused(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("binary_cross_entropy is unsafe to autocast")
