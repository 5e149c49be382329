"""The figures of ImageNet-C: strengths of its corruptions and errors of AlexNet, as published."""

from __future__ import annotations

import pytest

from selftask.evaluate.corruptions import CORRUPTIONS
from selftask.evaluate.robustness import ALEXNET

STRENGTHS = {  # of Hendrycks' make_imagenet_c.py
    "gaussian_noise": (0.08, 0.12, 0.18, 0.26, 0.38),
    "shot_noise": (60, 25, 12, 5, 3),
    "impulse_noise": (0.03, 0.06, 0.09, 0.17, 0.27),
    "gaussian_blur": (1, 2, 3, 4, 6),
    "defocus_blur": ((3, 0.1), (4, 0.5), (6, 0.5), (8, 0.5), (10, 0.5)),
    "fog": ((1.5, 2), (2, 2), (2.5, 1.7), (2.5, 1.5), (3, 1.4)),
    "contrast": (0.4, 0.3, 0.2, 0.1, 0.05),
    "brightness": (0.1, 0.2, 0.3, 0.4, 0.5),
    "pixelate": (0.6, 0.5, 0.4, 0.3, 0.25),
    "jpeg": (25, 18, 15, 10, 7),
}


def test_strengths_are_those_of_imagenet_c() -> None:
    assert {name: CORRUPTIONS[name].strengths for name in STRENGTHS} == STRENGTHS
    assert CORRUPTIONS.keys() - STRENGTHS.keys() == {"motion_blur", "zoom_blur"}


def shares_of_alexnet() -> dict[str, float]:
    """AlexNet's errors at each strength as published by users of ImageNet-C, where known here."""
    return {
        "gaussian_noise": (0.69528 + 0.82542 + 0.93554 + 0.98138 + 0.99452) / 5,
        "impulse_noise": (0.78374 + 0.89808 + 0.9487 + 0.9872 + 0.99548) / 5,
        "motion_blur": (0.5843 + 0.70048 + 0.82108 + 0.8975 + 0.92638) / 5,
    }


AUGMIX = (  # ALEXNET_ERR of google-research/augmix, imagenet.py, in the order of its CORRUPTIONS
    *(0.886428, 0.894468, 0.922640, 0.819880, 0.826268, 0.785948, 0.798360, 0.866816, 0.826572),
    *(0.819324, 0.564592, 0.853204, 0.646056, 0.717840, 0.606500),
)
IN_ORDER = [
    *("gaussian_noise", "shot_noise", "impulse_noise", "defocus_blur", "glass_blur"),
    *("motion_blur", "zoom_blur", "snow", "frost", "fog", "brightness", "contrast"),
    *("elastic_transform", "pixelate", "jpeg_compression"),
]


def test_errors_of_alexnet_are_the_published_ones() -> None:
    published = dict(zip(IN_ORDER, AUGMIX, strict=True))
    assert {**published, "jpeg": published["jpeg_compression"]} == ALEXNET
    assert all(ALEXNET[n] == pytest.approx(e) for n, e in shares_of_alexnet().items())
