"""Batched color jitter, with factors and order of each image; clips after each operation.

Brightness, contrast and saturation share one formula: x * gain + luma(x) * a + mean(luma) * b, with
pixels x and the three weights gain, a and b of a step. The jitter of an image is up to three such
steps, the hue shift, and up to three more steps. An image with fewer steps, or without jitter, is
left exactly unchanged by the remaining steps. The hue shift is expensive, so it is done only once,
for all images together.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from selftask.data.device.operation import Arrays, Tensors, UniformOperation, per_image, to_levels
from selftask.data.device.transforms.color import luma
from selftask.data.transforms.color import ORDERS, ColorJitter
from selftask.registry import register_batched_transform

HUE = 3  # number of the operation; 0 brightness, 1 contrast, 2 saturation
STEPS = 3  # at most, before the hue shift and after it
_ORDERS = np.array(ORDERS)


@register_batched_transform("color_jitter")
class BatchedColorJitter(UniformOperation):
    """Color jitter, in the order drawn for each image."""

    reads = ("hue",)
    transform: ColorJitter

    def arrays(self, chosen: Any, params: Any, sizes: np.ndarray) -> Arrays:
        """Compute the weights of each step, (B, 6, 3), and the shifts of ``turn_hue``, (B, 3)."""
        *each, turn, order_number = params
        factors, order = np.stack(each, axis=1), _ORDERS[order_number.astype(np.int64)]
        jitter = self.transform
        active = np.array((jitter.brightness, jitter.contrast, jitter.saturation, jitter.hue)) != 0
        next_step = np.zeros(len(order), dtype=np.int64)
        steps = np.zeros((len(order), 2 * STEPS, 3))
        steps[:, :, 0] = 1
        for operation in order.T:
            is_hue = active[HUE] & (operation == HUE)
            next_step[is_hue] = STEPS
            (does,) = np.nonzero(chosen & active[operation] & (operation != HUE))
            step, kind = next_step[does], operation[does]
            factor = factors[does, kind]
            steps[does, step, 0] = factor
            steps[does, step, 1] = np.where(kind == 2, 1 - factor, 0.0)
            steps[does, step, 2] = np.where(kind == 1, 1 - factor, 0.0)
            next_step[does] += 1
        turn = np.where(chosen, np.trunc(turn * 255) / 256, 0.0)  # rounded as in adjust_hue
        return {"steps": steps, "shift": (6 * turn[:, None] - (0, 2, 4) + 5) % 6 - 5}

    def apply(self, values: Tensor, packed: Tensors, sizes: Tensor | None) -> Tensor:
        steps = packed["steps"].unbind(1)
        values = adjust(values, steps[0])
        for step in steps[1:STEPS]:
            adjust(values, step, out=values)
        if self.transform.hue:
            values = turn_hue(values, packed["shift"])
            for step in steps[STEPS:]:
                adjust(values, step, out=values)
        return values


def adjust(values: Tensor, step: Tensor, out: Tensor | None = None) -> Tensor:
    """Return a weighted sum of images, their luma and their mean luma, rounded and clipped.

    Args:
        values: float32 (B, C, H, W) in 0..255.
        step: Weights of the image, its luma and its mean luma, (B, 3).
        out: Destination, which may be ``values``.
    """
    gain, of_luma, of_mean = (per_image(one) for one in step.unbind(1))
    gray = luma(values)
    mean = gray.mean((2, 3), keepdim=True).add_(0.5).floor_()  # rounded as Pillow does
    added = gray.mul_(of_luma).addcmul_(mean, of_mean)
    return to_levels(torch.addcmul(added, values, gain, out=out))


def turn_hue(values: Tensor, shift: Tensor) -> Tensor:
    """Shift the hue of images (B, 3, H, W).

    Let m be the smallest of a pixel's three values, r their range, and h its hue, on a circle of
    length 6. A channel is then m + r * w(d), with the distance d on the circle from h to the
    channel's own color (red 0, green 2, blue 4). The weight w(d) is 1 up to d = 1, 0 from d = 2,
    and linear in between.

    Args:
        values: Images in whole levels 0..255, float32 (B, 3, H, W).
        shift: Shift of the hue minus the color of each channel, in -5..1, (B, 3).
    """
    red, green, blue = values.split(1, 1)
    high, low = values.amax(1, keepdim=True), values.amin(1, keepdim=True)
    span = high - low
    hue = torch.where(  # in -1..5, times the range
        high == red,
        green - blue,
        torch.where(
            high == green,
            torch.add(blue - red, span, alpha=2),
            torch.add(red - green, span, alpha=4),
        ),
    )
    # levels are whole: a span below 1 is none
    around = torch.addcdiv(shift[:, :, None, None], hue, span.clamp(min=0.5))  # in -6..6
    weight = around.abs_().sub_(3).abs_().clamp_(1, 2)  # 1 + w, since d = 3 - abs(abs(around) - 3)
    return torch.addcmul(low - span, weight, span, out=weight).round_()
