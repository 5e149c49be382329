"""Parts of probes: augmentation, learning rates, and classes that no training image has."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from selftask.config.schema import Component
from selftask.data.transforms.pipeline import build_pipeline
from selftask.evaluate.probe import probe
from selftask.evaluate.probe.inputs import augmented
from selftask.evaluate.probe.probe import Probe, _hits


def test_training_images_are_random_crops_and_flips() -> None:
    """As in the papers: a crop of 8 to 100 % of the image, flipped half of the time."""
    normalize = Component(name="normalize", args={"stats": "half"})
    given = [
        Component(name="resize", args={"size": 20}),
        Component(name="center_crop", args={"size": 16}),
        normalize,
    ]
    transforms = augmented(given)
    build_pipeline(transforms, "transforms", 3)
    assert [part.to_dict() for part in transforms] == [
        {"name": "random_resized_crop", "size": 16},  # its scale is [0.08, 1] by default
        {"name": "horizontal_flip"},  # of probability 0.5 by default
        normalize.to_dict(),
    ]


@pytest.mark.parametrize(("protocol", "lr"), [("moco", 30 * 4 / 256), ("lejepa", 0.001)])
def test_rates_are_scaled_for_sgd_only_and_follow_the_schedule(
    protocol: str, lr: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of four images, two in an epoch."""
    factors: list[float] = []

    def grid(_: Any, __: Any, pairs: list[tuple[float, float]], *___: Any) -> Any:
        assert pairs[0][0] == pytest.approx(lr)
        return SimpleNamespace(fit=lambda _, __, factor: factors.append(factor))

    monkeypatch.setattr(probe, "HeadGrid", grid)
    rows = np.arange(8)
    x, labels = torch.zeros(8, 5), torch.arange(8) % 2
    features: Any = SimpleNamespace(
        inputs=[SimpleNamespace(pool="class", blocks=1)], batches=lambda *_: [(x, labels)]
    )
    trained = Probe(protocol=protocol, batch_size=4, augment=False)
    source: Any = None
    trained._fit(features, trained.settings(), source, rows, torch.arange(2))
    expected = [1.0] * 120 + [0.1] * 40 + [0.01] * 40  # after 60 and 80 of 100 epochs
    if protocol == "lejepa":
        expected = [0.01, (0.01 + 1) / 2] + [1.0] * 198  # warm-up of an epoch
    assert factors == pytest.approx(expected)


def test_images_of_classes_without_training_images_are_wrong() -> None:
    labels = torch.tensor([7, 3, 5, 4])  # classes 3 and 7 were trained
    features: Any = SimpleNamespace(batches=lambda *_: [(torch.zeros(4, 2), labels)])
    source: Any = None
    grid: Any = SimpleNamespace(hits=lambda _, targets: (targets == 0)[None])  # always class 3
    (hits,) = _hits(features, [grid], source, "data.val", range(4), torch.tensor([3, 7]))
    assert hits.tolist() == [[False, True, False, False]]
