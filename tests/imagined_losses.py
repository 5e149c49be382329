"""The imagined device with a list of what a loss computes in half precision."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from bench.launches import Counts
from imagined_streams import is_view, place

_HALF = (torch.float16, torch.bfloat16)
# operations that compute nothing
_MOVES = ("_to_copy", "cat", "clone", "copy_", "flip", "gather", "index", "stack")


class Checked(Counts):
    """Device that counts launches, and lists operations of the loss in half precision."""

    def __init__(self) -> None:
        super().__init__()
        self.halves: list[str] = []

    def launched(self, func: Any, args: Any) -> None:
        super().launched(func, args)
        name = func._schema.name.removeprefix("aten::")
        if self.parts[-1] == "loss" and not is_view(func) and name not in _MOVES:
            tensors = [x for x in tree_leaves(args) if isinstance(x, Tensor)]
            if any(x.dtype in _HALF for x in tensors):
                self.halves.append(f"{place()}: {func}")
