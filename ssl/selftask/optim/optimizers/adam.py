"""Adam (Kingma and Ba, arXiv:1412.6980)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from selftask.config.fields import setting
from selftask.optim.field_arguments import FieldArguments
from selftask.registry import register_optimizer


@register_optimizer("adam")
@dataclass(frozen=True, kw_only=True)
class Adam(FieldArguments):
    """torch.optim.Adam; weight decay is added to the gradient, unlike in AdamW."""

    optimizer = torch.optim.Adam
    options: ClassVar[dict[str, Any]] = {"fused": True}

    betas: tuple[float, float] = setting((0.9, 0.999), of="schedules", min=0, below=1)
    """Decay of the first and second moment."""
    eps: float = setting(1e-8, min=0)
    """Term added to the denominator for numerical stability."""
    amsgrad: bool = False
    """Whether to divide by the maximum of the second moment so far (arXiv:1904.09237)."""
