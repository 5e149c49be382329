"""Muon, orthogonalized momentum for matrices (Jordan et al., kellerjordan.github.io/posts/muon)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch

from selftask.config.fields import setting
from selftask.registry import register_optimizer


@register_optimizer("muon")
@dataclass(frozen=True, kw_only=True)
class MuonConfig:
    """torch.optim.Muon for two-dimensional weights, AdamW for all other parameters."""

    muon_momentum: float = setting(0.95, min=0, below=1)
    """Momentum for the matrices that Muon updates."""
    nesterov: bool = True
    """Whether to use Nesterov momentum."""
    adjust_lr: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """Rule that scales lr by a weight's shape; with match_rms_adamw (arXiv:2502.16982) AdamW's lr
    can be used.
    """
    betas: tuple[float, float] = setting((0.9, 0.999), min=0, below=1)
    """AdamW's decay of the first and second moment, for other parameters."""
    eps: float = setting(1e-8, min=0)
    """AdamW's term added to the denominator."""

    def problems(self, config: dict[str, Any]) -> Iterator[str]:
        """Yield a problem if weights are sharded."""
        if config["parallel"]["reduce"] == "fsdp":
            yield (
                "parallel.reduce='fsdp': optimizer 'muon' needs whole matrices; use 'ddp' or "
                "'manual', or another optimizer"
            )

    def build(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return Muon(
            groups,
            muon={
                "momentum": self.muon_momentum,
                "nesterov": self.nesterov,
                "adjust_lr_fn": self.adjust_lr,
            },
            adamw={"betas": self.betas, "eps": self.eps, "fused": True},
        )


class Muon(torch.optim.Optimizer):
    """torch's Muon and AdamW as one optimizer, with common groups and a common state.

    Args:
        params: Parameters or groups of them.
        muon: Options of torch.optim.Muon, for the two-dimensional parameters.
        adamw: Options of torch.optim.AdamW, for all others.
    """

    def __init__(self, params: Any, *, muon: dict[str, Any], adamw: dict[str, Any]) -> None:
        super().__init__(params, {"lr": 1e-3, "weight_decay": 0.0})
        kinds: list[tuple[Any, dict[str, Any], bool]] = [
            (torch.optim.Muon, muon, True),
            (torch.optim.AdamW, adamw, False),
        ]
        self._parts: list[torch.optim.Optimizer] = []
        for kind, options, is_matrix in kinds:
            groups = [
                {"params": [p for p in group["params"] if (p.ndim == 2) == is_matrix]}
                for group in self.param_groups
            ]
            if any(group["params"] for group in groups):
                self._parts.append(kind(groups, **options))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the states, and move AdamW's step counts to the device, as its fused step needs."""
        super().load_state_dict(state_dict)
        for parameter, state in self.state.items():
            if "step" in state:
                state["step"] = state["step"].to(parameter.device)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update the parameters by both optimizers, with the settings of the common groups.

        Returns:
            The loss of ``closure``, if given.
        """
        loss = None if closure is None else closure()
        for part in self._parts:
            part.state = self.state
            for part_group, group in zip(part.param_groups, self.param_groups, strict=True):
                part_group.update(
                    {k: v for k, v in group.items() if k in part_group and k != "params"}
                )
            part.step()
        return loss
