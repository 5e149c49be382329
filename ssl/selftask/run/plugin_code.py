"""Copy the user's own modules to the run folder, for reproducibility."""

from __future__ import annotations

import shutil
from pathlib import Path

from selftask.config.extensions.plugin_files import plugin_files
from selftask.config.schema import Config
from selftask.logs import get_logger

log = get_logger(__name__)


def copy_plugins(config: Config, out: Path) -> None:
    """Copy the modules named in a config, and imported modules next to them, to ``out/code``.

    A file that cannot be copied is logged.

    Args:
        config: The config of the run.
        out: The run folder.

    Raises:
        UserError: If an address in the config cannot be imported.
    """
    for name, file in plugin_files(config).items():
        target = out / "code" / name
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, target)
        except OSError as error:
            log.warning("%s is not copied into the run: %s", file, error)
