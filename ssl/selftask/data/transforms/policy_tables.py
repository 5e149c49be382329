"""Operations and magnitudes of automatic augmentation, and AutoAugment's policies.

AutoAugment: Cubuk et al., arXiv:1805.09501, tables 7 to 9; magnitudes and names as in torchvision.
"""

from __future__ import annotations

from typing import NamedTuple

NEUTRAL = ("Identity",)
GEOMETRY = ("ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate")
COLORS = ("Brightness", "Color", "Contrast", "Sharpness")
TABLES = ("Posterize", "Solarize", "AutoContrast", "Equalize")
SIGNED = frozenset({*GEOMETRY, *COLORS})  # magnitudes with a random sign


class Strengths(NamedTuple):
    """Magnitudes of the last bin; they grow linearly from 0 in the first bin."""

    shear: float  # tangent of the angle
    shift: float  # fraction of the side, or pixels if above 1
    degrees: float
    color: float  # distance of a factor from 1
    bits: tuple[int, int]  # kept by posterize in the first and in the last bin


RAND = Strengths(shear=0.3, shift=150 / 331, degrees=30.0, color=0.9, bits=(8, 4))
WIDE = Strengths(shear=0.99, shift=32.0, degrees=135.0, color=0.99, bits=(8, 2))
MIX = Strengths(shear=0.3, shift=1 / 3, degrees=30.0, color=0.9, bits=(4, 0))


def magnitude(name: str, level: float, height: int, width: int, strengths: Strengths) -> float:
    """Return the magnitude of an operation at ``level`` in [0, 1], without sign.

    The unit depends on the operation: tangent of the angle (shear), pixels (translate), degrees
    (rotate), distance of a factor from 1 (brightness, color, contrast, sharpness), bits (posterize)
    or gray levels (solarize).

    Args:
        name: Name of the operation.
        level: From 0 for the first bin to 1 for the last.
        height: Height of the image, in pixels.
        width: Width of the image, in pixels.
        strengths: Magnitudes of the last bin.
    """
    if name.startswith("Shear"):
        return strengths.shear * level
    if name.startswith("Translate"):
        side = width if name.endswith("X") else height
        return strengths.shift * level * (1 if strengths.shift > 1 else side)
    if name == "Rotate":
        return strengths.degrees * level
    if name in COLORS:
        return strengths.color * level
    if name == "Posterize":
        first, last = strengths.bits
        return first - round((first - last) * level)
    return 255.0 * (1 - level) if name == "Solarize" else 0.0


# 25 pairs of (operation, probability, bin out of 10); one pair is drawn for a view
Policy = tuple[tuple[tuple[str, float, int], tuple[str, float, int]], ...]
IMAGENET: Policy = (
    (("Posterize", 0.4, 8), ("Rotate", 0.6, 9)),
    (("Solarize", 0.6, 5), ("AutoContrast", 0.6, 0)),
    (("Equalize", 0.8, 0), ("Equalize", 0.6, 0)),
    (("Posterize", 0.6, 7), ("Posterize", 0.6, 6)),
    (("Equalize", 0.4, 0), ("Solarize", 0.2, 4)),
    (("Equalize", 0.4, 0), ("Rotate", 0.8, 8)),
    (("Solarize", 0.6, 3), ("Equalize", 0.6, 0)),
    (("Posterize", 0.8, 5), ("Equalize", 1.0, 0)),
    (("Rotate", 0.2, 3), ("Solarize", 0.6, 8)),
    (("Equalize", 0.6, 0), ("Posterize", 0.4, 6)),
    (("Rotate", 0.8, 8), ("Color", 0.4, 0)),
    (("Rotate", 0.4, 9), ("Equalize", 0.6, 0)),
    (("Equalize", 0.0, 0), ("Equalize", 0.8, 0)),
    (("Invert", 0.6, 0), ("Equalize", 1.0, 0)),
    (("Color", 0.6, 4), ("Contrast", 1.0, 8)),
    (("Rotate", 0.8, 8), ("Color", 1.0, 2)),
    (("Color", 0.8, 8), ("Solarize", 0.8, 7)),
    (("Sharpness", 0.4, 7), ("Invert", 0.6, 0)),
    (("ShearX", 0.6, 5), ("Equalize", 1.0, 0)),
    (("Color", 0.4, 0), ("Equalize", 0.6, 0)),
    (("Equalize", 0.4, 0), ("Solarize", 0.2, 4)),
    (("Solarize", 0.6, 5), ("AutoContrast", 0.6, 0)),
    (("Invert", 0.6, 0), ("Equalize", 1.0, 0)),
    (("Color", 0.6, 4), ("Contrast", 1.0, 8)),
    (("Equalize", 0.8, 0), ("Equalize", 0.6, 0)),
)
CIFAR10: Policy = (
    (("Invert", 0.1, 0), ("Contrast", 0.2, 6)),
    (("Rotate", 0.7, 2), ("TranslateX", 0.3, 9)),
    (("Sharpness", 0.8, 1), ("Sharpness", 0.9, 3)),
    (("ShearY", 0.5, 8), ("TranslateY", 0.7, 9)),
    (("AutoContrast", 0.5, 0), ("Equalize", 0.9, 0)),
    (("ShearY", 0.2, 7), ("Posterize", 0.3, 7)),
    (("Color", 0.4, 3), ("Brightness", 0.6, 7)),
    (("Sharpness", 0.3, 9), ("Brightness", 0.7, 9)),
    (("Equalize", 0.6, 0), ("Equalize", 0.5, 0)),
    (("Contrast", 0.6, 7), ("Sharpness", 0.6, 5)),
    (("Color", 0.7, 7), ("TranslateX", 0.5, 8)),
    (("Equalize", 0.3, 0), ("AutoContrast", 0.4, 0)),
    (("TranslateY", 0.4, 3), ("Sharpness", 0.2, 6)),
    (("Brightness", 0.9, 6), ("Color", 0.2, 8)),
    (("Solarize", 0.5, 2), ("Invert", 0.0, 0)),
    (("Equalize", 0.2, 0), ("AutoContrast", 0.6, 0)),
    (("Equalize", 0.2, 0), ("Equalize", 0.6, 0)),
    (("Color", 0.9, 9), ("Equalize", 0.6, 0)),
    (("AutoContrast", 0.8, 0), ("Solarize", 0.2, 8)),
    (("Brightness", 0.1, 3), ("Color", 0.7, 0)),
    (("Solarize", 0.4, 5), ("AutoContrast", 0.9, 0)),
    (("TranslateY", 0.9, 9), ("TranslateY", 0.7, 9)),
    (("AutoContrast", 0.9, 0), ("Solarize", 0.8, 3)),
    (("Equalize", 0.8, 0), ("Invert", 0.1, 0)),
    (("TranslateY", 0.7, 9), ("AutoContrast", 0.9, 0)),
)
SVHN: Policy = (
    (("ShearX", 0.9, 4), ("Invert", 0.2, 0)),
    (("ShearY", 0.9, 8), ("Invert", 0.7, 0)),
    (("Equalize", 0.6, 0), ("Solarize", 0.6, 6)),
    (("Invert", 0.9, 0), ("Equalize", 0.6, 0)),
    (("Equalize", 0.6, 0), ("Rotate", 0.9, 3)),
    (("ShearX", 0.9, 4), ("AutoContrast", 0.8, 0)),
    (("ShearY", 0.9, 8), ("Invert", 0.4, 0)),
    (("ShearY", 0.9, 5), ("Solarize", 0.2, 6)),
    (("Invert", 0.9, 0), ("AutoContrast", 0.8, 0)),
    (("Equalize", 0.6, 0), ("Rotate", 0.9, 3)),
    (("ShearX", 0.9, 4), ("Solarize", 0.3, 3)),
    (("ShearY", 0.8, 8), ("Invert", 0.7, 0)),
    (("Equalize", 0.9, 0), ("TranslateY", 0.6, 6)),
    (("Invert", 0.9, 0), ("Equalize", 0.6, 0)),
    (("Contrast", 0.3, 3), ("Rotate", 0.8, 4)),
    (("Invert", 0.8, 0), ("TranslateY", 0.0, 2)),
    (("ShearY", 0.7, 6), ("Solarize", 0.4, 8)),
    (("Invert", 0.6, 0), ("Rotate", 0.8, 4)),
    (("ShearY", 0.3, 7), ("TranslateX", 0.9, 3)),
    (("ShearX", 0.1, 6), ("Invert", 0.6, 0)),
    (("Solarize", 0.7, 2), ("TranslateY", 0.6, 7)),
    (("ShearY", 0.8, 4), ("Invert", 0.8, 0)),
    (("ShearX", 0.7, 9), ("TranslateY", 0.8, 3)),
    (("ShearY", 0.8, 5), ("AutoContrast", 0.7, 0)),
    (("ShearX", 0.7, 2), ("Invert", 0.1, 0)),
)
POLICIES = {"imagenet": IMAGENET, "cifar10": CIFAR10, "svhn": SVHN}
