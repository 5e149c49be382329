"""The ``parallel:`` section: its short form, and what does not go together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
from selftask.config.load import load_config
from selftask.errors import ConfigError
from selftask.task import build


def test_short_form_and_defaults() -> None:
    assert load_config("simclr/digits", []).parallel.reduce == "manual"
    parallel = load_config("simclr/digits", ["parallel=ddp", "parallel.sync_batch_norm=4"]).parallel
    assert (parallel.reduce, parallel.sync_batch_norm) == ("ddp", 4)
    assert parallel.to_dict()["activation_checkpointing"] == "none"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["parallel=dpp"], "parallel.reduce='dpp'"),
        (["parallel.sync_bn=all"], "did you mean 'parallel.sync_batch_norm'"),
        (["parallel.sync_batch_norm=0"], "parallel.sync_batch_norm=0"),
        (["parallel=ddp", "parallel.grad_compression=bf16"], "use parallel.reduce=manual"),
        (["parallel.static_graph=true"], "use parallel.reduce=ddp"),
        (["parallel=fsdp", "parallel.find_unused=true"], "use parallel.reduce=ddp"),
        *(
            (["parallel=ddp", f"parallel.{key}"], "use parallel.reduce=fsdp")
            for key in ("shard_over=node", "cpu_offload=true", "prefetch=2", "meta_init=true")
        ),
        (["parallel=fsdp", "parallel.shard_over=0"], "parallel.shard_over=0"),
        (
            ["parallel=ddp", "parallel.static_graph=true", "parallel.find_unused=true"],
            "parallel.find_unused does not go with parallel.static_graph",
        ),
        (
            ["parallel=fsdp", "parallel.cpu_offload=true", "train.precision=float16"],
            "use train.precision=bfloat16",
        ),
        (
            ["parallel=ddp", "parallel.static_graph=true", "train.accumulate=2"],
            "parallel.static_graph does not go with train.accumulate",
        ),
        (
            ["parallel=ddp", "train.sharded_checkpoints=true"],
            "train.sharded_checkpoints=true has no effect with parallel.reduce='ddp'",
        ),
        (
            ["parallel.buffers=mean", "parallel.sync_buffers=never"],
            "parallel.buffers='mean' has no effect with parallel.sync_buffers=never",
        ),
        (["parallel.broadcast_buffers=true"], "did you mean 'parallel.sync_buffers'"),
        (["train.sharded=true"], "did you mean 'train.sharded_checkpoints'"),
        (["parallel.activation_checkpointing=block"], "did you mean 'blocks'?"),
        (["parallel.activation_checkpointing=8"], "for a size say what of: '8 GB'"),
        (
            ["parallel.activation_checkpointing=8 GB", "train.compile=model"],
            "train.compile needs parallel.activation_checkpointing to be none or blocks",
        ),
    ],
)
def test_what_does_not_go_together(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load_config("simclr/digits", words)
    assert message in str(raised.value)


def test_the_runs_precision_is_that_of_its_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, make = [], build.build_reduction

    def note(config: Any, precision: Any) -> Any:
        seen.append((config.reduce, precision))
        return make(config, precision)

    monkeypatch.setattr(build, "build_reduction", note)
    task = tiny.task("simclr", tmp_path, "run", "parallel=fsdp", "train.precision=bfloat16")
    task.prepare()
    task.close()
    assert seen == [("fsdp", torch.bfloat16)]
