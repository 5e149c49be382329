"""Batched color jitter, with factors and order of each image; clips after each operation.

Brightness, contrast and saturation share one formula: x * gain + luma(x) * a + mean(luma) * b. The
jitter of an image is up to three such steps, the hue shift, and up to three further steps. An image
with fewer steps is left exactly unchanged by the others. The hue shift is expensive and done only
once for all images.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from selftask.data.device.operation import (
    Arrays,
    Tensors,
    UniformOperation,
    on_chosen,
    per_image,
    to_levels,
)
from selftask.data.device.transforms.color import luma
from selftask.data.transforms.color import ORDERS, ColorJitter
from selftask.registry import register_batched_transform

HUE = 3  # number of the operation; 0 brightness, 1 contrast, 2 saturation
STEPS = 3  # at most, before the hue shift and after it
_ORDERS = np.array(ORDERS)


@register_batched_transform("color_jitter")
class BatchedColorJitter(UniformOperation):
    """Color jitter, in the order drawn for each image."""

    transform: ColorJitter

    def arrays(self, chosen: Any, params: Any, sizes: np.ndarray) -> Arrays:
        """Compute the coefficients of each step, (B, 6)."""
        *each, turn, order_number = params
        factors, order = np.stack(each, axis=1), _ORDERS[order_number.astype(np.int64)]
        jitter = self.transform
        active = np.array((jitter.brightness, jitter.contrast, jitter.saturation, jitter.hue)) != 0
        next_step = np.zeros(len(order), dtype=np.int64)
        gain, of_luma, of_mean = np.ones((len(order), 2 * STEPS)), *np.zeros((2, len(order), 6))
        for operation in order.T:
            is_hue = active[HUE] & (operation == HUE)
            next_step[is_hue] = STEPS
            (does,) = np.nonzero(active[operation] & (operation != HUE))
            at, what = next_step[does], operation[does]
            factor = factors[does, what]
            gain[does, at] = factor
            of_luma[does, at] = np.where(what == 2, 1 - factor, 0.0)
            of_mean[does, at] = np.where(what == 1, 1 - factor, 0.0)
            next_step[does] += 1
        arrays = {"gain": gain, "luma": of_luma, "mean": of_mean}
        arrays |= {"turn": np.trunc(turn * 255) / 256, "chosen": chosen}  # rounded as in adjust_hue
        return {name: array.astype(np.float32) for name, array in arrays.items()}

    def apply(self, values: Tensor, packed: Tensors, sizes: Tensor | None) -> Tensor:
        steps = torch.stack([packed["gain"], packed["luma"], packed["mean"]], 2)  # (B, 6, 3)
        return on_chosen(values, packed["chosen"], self._jitter, steps, packed["turn"])

    def _jitter(self, values: Tensor, steps: Tensor, turn: Tensor) -> Tensor:
        for step in range(STEPS):
            values = adjust(values, steps[:, step])
        if self.transform.hue:
            values = turn_hue(values, turn)
            for step in range(STEPS, 2 * STEPS):
                values = adjust(values, steps[:, step])
        return values


def adjust(values: Tensor, step: Tensor) -> Tensor:
    """Adjust images (B, C, H, W) in place; ``step`` (B, 3): weights of x, luma and mean luma."""
    gain, of_luma, of_mean = (per_image(one) for one in step.unbind(1))
    gray = luma(values)
    mean = gray.mean((2, 3), keepdim=True).add_(0.5).floor_()  # rounded as Pillow does
    return to_levels(values.mul_(gain).add_(gray.mul_(of_luma).add_(mean * of_mean)))


def turn_hue(values: Tensor, turn: Tensor) -> Tensor:
    """Shift the hue of images (B, 3, H, W) by fractions (B,) of the color circle.

    With hue h in 0..6, a channel is min + range * w(h). The weight w is 1 for a third of the circle
    around the channel's own color, and falls to 0 within a sixth on both sides.
    """
    red, green, blue = values.unbind(1)
    high, low = values.amax(1), values.amin(1)
    span = high - low
    scale = span.clamp(min=0.5).reciprocal_()  # levels are whole: a span below 1 is none
    hue = torch.where(
        high == red,
        green - blue,
        torch.where(
            high == green,
            torch.add(blue - red, span, alpha=2),
            torch.add(red - green, span, alpha=4),
        ),
    )
    hue.mul_(scale).add_((6 * turn)[:, None, None])
    hue.sub_(hue.mul(1 / 6).floor_(), alpha=6)
    red_weight = (hue - 3).abs_().sub_(1)
    green_weight = (hue - 2).abs_().neg_().add_(2)
    blue_weight = hue.sub_(4).abs_().neg_().add_(2)
    weights = (red_weight, green_weight, blue_weight)
    turned = [torch.addcmul(low, weight.clamp_(0, 1), span) for weight in weights]
    return torch.stack(turned, 1).round_()
