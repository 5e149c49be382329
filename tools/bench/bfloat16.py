"""CPU time of a step in bfloat16 (autocast) and in float32: forward, backward, SGD.

    python tools/bench/bfloat16.py [--rounds 6]

One thread is used, and the two alternate. Figures are process CPU time: minimum and median.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
import torch.nn.functional as F

from selftask.config.schema import Component
from selftask.distributed.device import bfloat16_instructions
from selftask.models.build import build_backbone

NETS = {  # backbone -> batch size, image side in pixels
    "vit_tiny": (16, 224),
    "resnet18": (16, 96),
    "small_resnet": (64, 32),
    "vit_micro": (64, 32),
}


def measure(name: str, rounds: int) -> dict[bool, list[float]]:
    """Return CPU seconds of each step, in bfloat16 (True) and in float32 (False)."""
    batch, side = NETS[name]
    torch.manual_seed(0)
    network = build_backbone(Component(name=name))
    images = torch.randn(batch, 3, side, side).contiguous(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9)
    times: dict[bool, list[float]] = {False: [], True: []}
    for number in range(rounds + 1):  # the first round is a warm-up
        for low, seconds in times.items():
            start = time.process_time()
            with torch.autocast("cpu", torch.bfloat16, enabled=low):
                features = network(images)
            loss = F.normalize(features.float(), dim=1)[:, 0].sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if number:
                seconds.append(time.process_time() - start)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=6)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    print(f"instructions for bfloat16: {bfloat16_instructions()}")
    print(f"{'CPU ms a step':<28}{'float32':>9}{'bfloat16':>10}{'x':>7}{'x, median':>11}")
    for name, (batch, side) in NETS.items():
        times = measure(name, rounds)
        least = {low: min(seconds) for low, seconds in times.items()}
        median = {low: statistics.median(seconds) for low, seconds in times.items()}
        print(
            f"{f'{name}, {batch} x {side}':<28}{1e3 * least[False]:>9.0f}{1e3 * least[True]:>10.0f}"
            f"{least[True] / least[False]:>7.2f}{median[True] / median[False]:>11.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
