"""Length of a run, its phases, and the counters of its progress."""

from __future__ import annotations

import math

import pytest

from selftask.config.run_length import Clock, RunLength


def test_counters_of_a_run_cut_short() -> None:
    """epochs and max_steps: the shorter; a partial accumulation ends at the end of its epoch."""
    length = RunLength(num_samples=160, batch_size=32, accumulate=2, epochs=3, max_steps=5)
    assert (length.steps_per_epoch, length.total_steps, length.total_batches) == (3, 5, 9)
    assert length.num_epochs == 2
    clock = Clock(length, steps_done=3, batch=5)
    assert (clock.epoch, clock.batch_in_epoch, clock.where) == (1, 0, 5 / 9)
    assert clock.where_of_epoch == Clock(length, steps_done=4, batch=7).where_of_epoch == 5 / 9
    assert Clock(length, batch=9).done
    assert Clock(length, batch=9).where < 1
    clock, seen = Clock(length), []
    for batches in (2, 2, 1, 2):  # of each update
        clock.advance(batches)
        seen.append((clock.steps_done, clock.batch, clock.epoch, clock.batch_in_epoch))
    assert seen == [(1, 2, 0, 2), (2, 4, 0, 4), (3, 5, 1, 0), (4, 7, 1, 2)]
    assert (clock.where, clock.done) == (7 / 9, False)


@pytest.mark.parametrize("accumulate", [1, 2, 3])
@pytest.mark.parametrize("phases", [1, 2, 3, 4])
def test_phases_divide_an_epoch(accumulate: int, phases: int) -> None:
    """Of eleven batches and more than three steps, counted step by step."""
    length = RunLength(
        num_samples=11 * 8, batch_size=8, accumulate=accumulate, epochs=3, phases_per_epoch=phases
    )
    steps = length.steps_per_epoch
    cuts = {math.floor(number * steps / phases) for number in range(1, phases + 1)}
    clock, ended = Clock(length), 0
    while not clock.done:
        assert length.phases_before(clock.batch) == ended
        inside = clock.batch_in_epoch
        left = min(cut * accumulate for cut in cuts if cut * accumulate > inside)
        assert clock.batches_left == min(left, 11) - inside
        clock.advance(min(accumulate, 11 - inside))
        done = (clock.batch_in_epoch + accumulate - 1) // accumulate or steps
        assert clock.between_phases == (done in cuts)
        ended += done in cuts
    assert ended == 3 * phases


@pytest.mark.parametrize(("epochs", "steps"), [(1, 5), (1.5, 8), (0.5, 2), (0.01, 1), (2.0, 10)])
def test_steps_of_fractional_epochs(epochs: float, steps: int) -> None:
    assert RunLength(num_samples=80, batch_size=16, epochs=epochs).total_steps == steps
