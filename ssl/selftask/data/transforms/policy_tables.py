"""Operations of automatic augmentation, with torchvision's names and magnitudes."""

from __future__ import annotations

from typing import NamedTuple

NEUTRAL = ("Identity",)
GEOMETRY = ("ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate")
COLORS = ("Brightness", "Color", "Contrast", "Sharpness")
TABLES = ("Posterize", "Solarize", "AutoContrast", "Equalize")
SIGNED = frozenset({*GEOMETRY, *COLORS})  # magnitudes with a random sign


class Strengths(NamedTuple):
    """Magnitudes of the last bin, which grow linearly from 0 in the first bin.

    Of ``bits``, both ends are given.
    """

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
    (rotate), distance of a factor from 1 (brightness, color, contrast, sharpness), number of bits
    that are kept (posterize) or threshold in gray levels (solarize). It is 0 for the others.

    Args:
        name: Name of the operation.
        level: From 0 for the first bin to 1 for the last.
        height: Height of the image, in pixels.
        width: Width of the image, in pixels.
        strengths: Magnitudes of the last bin, such as ``RAND``.
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
