"""All that needs two ranks, in one pair of processes: starting torch costs seconds."""

from __future__ import annotations

from typing import Any


def everything(rank: int) -> dict[str, Any]:
    """What each function that is to run on ranks returns, by its name."""
    import test_activation_budget
    import test_buffers
    import test_collectives
    import test_layers
    import test_manual_reduction
    import test_meta_init
    import test_reductions
    import test_sharded_parameters
    import test_sharded_writer

    functions = (
        *test_activation_budget.ON_RANKS,
        *test_collectives.ON_RANKS,
        *test_reductions.ON_RANKS,
        *test_manual_reduction.ON_RANKS,
        *test_sharded_parameters.ON_RANKS,
        *test_buffers.ON_RANKS,
        *test_layers.ON_RANKS,
        *test_meta_init.ON_RANKS,
        *test_sharded_writer.ON_RANKS,
    )
    return {function.__name__: function(rank) for function in functions}
