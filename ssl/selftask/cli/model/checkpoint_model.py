"""Open the frozen backbone of a run's checkpoint."""

from __future__ import annotations

import tempfile
from pathlib import Path

from selftask.checkpoint.kept import named_checkpoint
from selftask.checkpoint.mirror import local_run
from selftask.checkpoint.rotation import checkpoints
from selftask.cli.model.export import Average, export_run
from selftask.cli.model.load_model import Frozen, open_frozen
from selftask.cli.options import take
from selftask.config.compose.overrides import import_plugins
from selftask.config.trust import take_trust
from selftask.files.paths import expand_user


def open_named(address: str, overrides: list[str]) -> tuple[Frozen, str]:
    """Open a model or a checkpoint (``RUN@STEP``, ``RUN@best``); return it and its run or address.

    Args:
        address: As for ``open_frozen``, or a checkpoint of a run. With ``weights=ema`` or
            ``weights=swa``, a run means its newest checkpoint.
        overrides: As for ``open_frozen`` or, for a checkpoint, ``open_checkpoint``.

    Raises:
        UserError: As ``open_checkpoint``.
    """
    checkpoint = named_checkpoint(address)
    if checkpoint is None and take("weights", overrides)[0] in ("ema", "swa"):  # not in the export
        run = expand_user(local_run(address, num_checkpoints=1))
        checkpoint = next(iter(checkpoints(run / "checkpoints")), None)
    if checkpoint is None:
        return open_frozen(address, overrides), address
    return open_checkpoint(checkpoint, overrides), str(checkpoint.parent.parent)


def open_checkpoint(checkpoint: Path, overrides: list[str]) -> Frozen:
    """Return the model of a checkpoint, and the images of its run or of ``overrides``.

    Args:
        checkpoint: Checkpoint of a run, plain or sharded.
        overrides: As for ``open_frozen``. ``weights=ema`` or ``weights=swa`` loads the average of
            the weights that this hook keeps.

    Raises:
        UserError: As ``open_frozen``, or if the checkpoint is damaged or has no such average.
    """
    import_plugins(overrides)
    average, words = take("weights", overrides)
    _, trust = take_trust(words)
    run = checkpoint.parent.parent
    with tempfile.TemporaryDirectory() as folder:
        exported = export_run(
            run, Path(folder), trust=trust, average=Average(average), checkpoint=checkpoint
        )
        return open_frozen(str(run), words, export=exported, name=str(checkpoint))
