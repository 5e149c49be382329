"""Config of a task that only loads a checkpoint of a run, without changing the run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from selftask.config.schema import Config, ResumeConfig
from selftask.config.schema.component import HookComponent


def config_to_load(
    config: Config, checkpoint: Path, folder: Path, hooks: Mapping[str, HookComponent]
) -> Config:
    """Return the config of a task on one process that loads ``checkpoint`` in ``prepare``.

    Args:
        config: The config of the run.
        checkpoint: The checkpoint to load.
        folder: Temporary run folder of the task.
        hooks: Hooks of the task, such as a hook that holds averaged weights.
    """
    return replace(
        config,
        out=str(folder),
        hooks=dict(hooks),
        resume=ResumeConfig(checkpoint=str(checkpoint), data="allow"),
        launch=replace(config.launch, nodes=1, processes=1),
        parallel=replace(config.parallel, reduce="manual"),
        train=replace(config.train, sharded_checkpoints=False, compile=False, threads="auto"),
    )
