"""Settings of linear evaluation in papers, by name."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Pool = Literal["class", "mean", "both", "attentive"]
Name = Literal["dinov2", "mae", "moco", "simclr", "vissl", "lejepa", "attentive"]


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """Settings of a linear evaluation: how heads are trained, and on which features.

    ``lr``, ``weight_decay``, ``blocks`` and ``pool`` are the values of a grid. One head is trained
    for each combination; see ``Probe``.
    """

    paper: str
    optimizer: str
    """Name of the optimizer; learning rates of SGD and LARS are multiplied by batch size / 256."""
    options: dict[str, Any] = field(default_factory=dict)
    """Fields of the optimizer."""
    schedule: dict[str, Any]
    """Schedule of a factor of the learning rate."""
    epochs: int
    batch_size: int
    lr: list[float]
    weight_decay: list[float] = field(default_factory=lambda: [0.0])
    blocks: list[int] = field(default_factory=lambda: [1])
    """How many of the last blocks have their features concatenated; one head for each number."""
    pool: list[Pool] = field(default_factory=lambda: ["class"])
    """Poolings of the features of a block, see ``Probe.pool``."""
    norm: Literal["none", "batch", "layer"] = "none"
    """Normalization of the features before the head, without learned parameters."""


_COSINE = {"name": "cosine", "start": 1.0, "end": 0.0}
_NESTEROV = {"nesterov": True}

PROTOCOLS: dict[str, Protocol] = {
    # Section 7.1 and appendix B.3; the grid as in the authors' code.
    "dinov2": Protocol(
        paper="arXiv:2304.07193",
        optimizer="sgd",
        schedule=_COSINE,
        epochs=10,
        batch_size=1024,
        lr=[factor * 10**power for power in (-5, -4, -3, -2) for factor in (1, 2, 5)] + [0.1],
        blocks=[1, 4],
        pool=["class", "both"],
    ),
    # Appendix A.1, table 10.
    "mae": Protocol(
        paper="arXiv:2111.06377",
        optimizer="lars",
        schedule={**_COSINE, "warmup": "10 epochs"},
        epochs=90,
        batch_size=16384,
        lr=[0.1],
        norm="batch",
    ),
    # Section 4.1.
    "moco": Protocol(
        paper="arXiv:1911.05722",
        optimizer="sgd",
        schedule={"name": "multistep", "start": 1.0, "milestones": ["60 epochs", "80 epochs"]},
        epochs=100,
        batch_size=256,
        lr=[30.0],
    ),
    # Appendix B.6.
    "simclr": Protocol(
        paper="arXiv:2002.05709",
        optimizer="sgd",
        options=_NESTEROV,
        schedule=_COSINE,
        epochs=90,
        batch_size=4096,
        lr=[0.1],
    ),
    # Goyal et al., ICCV 2019, and the configs of VISSL.
    "vissl": Protocol(
        paper="arXiv:1905.01235",
        optimizer="sgd",
        options=_NESTEROV,
        schedule={
            "name": "multistep",
            "start": 1.0,
            "milestones": ["8 epochs", "16 epochs", "24 epochs"],
        },
        epochs=28,
        batch_size=256,
        lr=[0.01],
        weight_decay=[0.0005],
        norm="batch",
    ),
    # The probe of the authors' minimal example, trained along with the network; epochs are ours.
    "lejepa": Protocol(
        paper="arXiv:2511.08544",
        optimizer="adamw",
        schedule={"name": "constant", "start": 1.0, "warmup": "1 epoch", "warmup_start": 0.01},
        epochs=100,
        batch_size=256,
        lr=[0.001],
        weight_decay=[1e-7],
        norm="layer",
    ),
    # Optimizer and epochs of V-JEPA's configs with the head of AIM (arXiv:2401.08541); grid: ours.
    "attentive": Protocol(
        paper="arXiv:2404.08471",
        optimizer="adamw",
        schedule=_COSINE,
        epochs=20,
        batch_size=1024,
        lr=[0.0001, 0.0003, 0.001, 0.003],
        weight_decay=[0.001],
        pool=["attentive"],
        norm="batch",
    ),
}
