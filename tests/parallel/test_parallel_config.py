"""The ``parallel:`` section: its short form, and what does not go together."""

from __future__ import annotations

import pytest

from selftask.config.load import load_config
from selftask.errors import ConfigError


def test_short_form_and_defaults() -> None:
    assert load_config("simclr/digits", []).parallel.reduce == "manual"
    parallel = load_config("simclr/digits", ["parallel=ddp", "parallel.sync_batch_norm=4"]).parallel
    assert (parallel.reduce, parallel.sync_batch_norm) == ("ddp", 4)
    assert parallel.to_dict()["activation_checkpointing"] == "none"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["parallel=dpp"], "parallel.reduce='dpp'"),
        (["parallel.sync_bn=all"], "did you mean 'parallel.sync_batch_norm'"),
        (["parallel.sync_batch_norm=0"], "parallel.sync_batch_norm=0"),
        (["parallel=ddp", "parallel.grad_compression=bf16"], "use parallel.reduce=manual"),
        (["parallel.static_graph=true"], "use parallel.reduce=ddp"),
        (
            ["parallel=ddp", "parallel.static_graph=true", "train.accumulate=2"],
            "parallel.static_graph does not go with train.accumulate",
        ),
        (["parallel=fsdp", "train.precision=float16"], "use 'bfloat16'"),
        (
            ["parallel=ddp", "train.sharded_checkpoints=true"],
            "train.sharded_checkpoints=true has no effect with parallel.reduce='ddp'",
        ),
        (["train.sharded=true"], "did you mean 'train.sharded_checkpoints'"),
        (["parallel=fsdp", "train.compile=true"], "train.compile goes with neither"),
        (["parallel.activation_checkpointing=block"], "did you mean 'blocks'?"),
        (["parallel.activation_checkpointing=8"], "for a size say what of: '8 GB'"),
        (
            ["parallel.activation_checkpointing=blocks", "train.compile=true"],
            "train.compile goes with neither",
        ),
    ],
)
def test_what_does_not_go_together(words: list[str], told: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load_config("simclr/digits", words)
    assert told in str(raised.value)
