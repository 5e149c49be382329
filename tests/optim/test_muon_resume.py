"""Muon's state after a resume."""

from __future__ import annotations

import torch
from torch import nn

from selftask.optim.optimizers.muon import Muon


def test_the_steps_of_muon_are_loaded_to_the_device() -> None:
    """AdamW's fused step reads their number there; torch leaves it where the checkpoint is."""
    states = []
    for device in ("cpu", "meta"):
        parameters = [nn.Parameter(torch.zeros(size, device=device)) for size in ((2, 2), (2,))]
        optimizer = Muon(parameters, muon={}, adamw={"fused": device == "cpu"})
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        if states:
            optimizer.load_state_dict(states[0])
            kept = optimizer.state[parameters[1]]
            assert {value.device.type for value in kept.values()} == {"meta"}
        else:
            optimizer.step()
            states.append(optimizer.state_dict())
