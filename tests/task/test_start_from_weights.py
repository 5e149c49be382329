"""A run that starts from weights: what it trains, and from when on."""

from __future__ import annotations

from pathlib import Path

import torch

import tiny
from selftask.models.build import build_backbone


def test_a_loaded_backbone_is_frozen_at_first(tmp_path: Path) -> None:
    """``freeze`` of a rule of ``optimizer.groups``, across a stop and resume."""
    torch.manual_seed(7)
    loaded = build_backbone(tiny.config("simclr", tmp_path).backbone)
    torch.save(loaded.state_dict(), tmp_path / "w.pt")
    words = [f"init.backbone={tmp_path / 'w.pt'}"]
    words += ["optimizer.groups=[{match: backbone, freeze: 1 epoch}]"]

    stopped = tiny.train("simclr", tmp_path, "run", *words, "train.stop_at=5")
    trained = dict(stopped.base_model.backbone.named_parameters())
    assert all(torch.equal(trained[name], value) for name, value in loaded.named_parameters())

    resumed = tiny.train("simclr", tmp_path, "run", *words)  # whose weights, once there are some
    assert resumed.resumed and [row["step"] for row in tiny.rows(resumed.out)] == [*range(1, 16)]
    trained = dict(resumed.base_model.backbone.named_parameters())
    assert not any(torch.equal(trained[name], value) for name, value in loaded.named_parameters())

    whole = tiny.train("simclr", tmp_path, "whole", *words)
    assert tiny.differences(tiny.last_state(whole.out), tiny.last_state(resumed.out)) == []
