"""Writer for Weights & Biases."""

from __future__ import annotations

import netrc
import os
import sys
from collections.abc import Iterator
from configparser import ConfigParser
from configparser import Error as ConfigParserError
from dataclasses import dataclass
from typing import Any, ClassVar, Literal
from urllib.parse import urlsplit

from torch import Tensor

from selftask.hooks.base import Task
from selftask.hooks.writers.base import TrackingWriter
from selftask.registry import register_hook


@register_hook("wandb")
@dataclass(eq=False, kw_only=True)
class Wandb(TrackingWriter):
    """Sends rows, images, histograms and the config to Weights & Biases.

    The environment variables of wandb apply (``WANDB_API_KEY``, ``WANDB_MODE``, ...). In offline
    mode, files are written to ``OUT/wandb``, and ``wandb sync`` sends them later; the files of a
    resumed run become a single run.
    """

    package: ClassVar[str] = "wandb"
    project: str = "selftask"
    """Name of the project."""
    entity: str | None = None
    """User or team; null: the account's default."""
    run_name: str | None = None
    """Name of the run; null: the name of the run folder."""
    mode: Literal["online", "offline"] | None = None
    """When rows are sent. online: during training; offline: later, they are written to
    ``OUT/wandb``; null: WANDB_MODE if set, else online.
    """

    def problems(self, config: dict[str, Any]) -> Iterator[str]:
        """Yield a problem if the package is missing, or rows would be sent without a login."""
        missing = [*super().problems(config)]
        yield from missing
        if not missing and _needs_login(self.mode):
            yield (
                "W&B has no login on this machine: run `wandb login`, or set WANDB_API_KEY, or "
                "hooks.wandb.mode=offline to write to OUT/wandb for `wandb sync`"
            )

    def connect(self, task: Task, run_id: str | None) -> str:
        import wandb

        self.run: Any = wandb.init(
            project=self.project,
            entity=self.entity,
            name=self.run_name or task.out.name,
            id=run_id,
            resume="allow" if run_id else None,
            mode=self.mode,
            dir=str(task.out),
            config=task.config.to_dict(),
        )
        return str(self.run.id)

    def send(self, step: int, row: dict[str, float]) -> None:
        self.run.log(row, step=step)

    def write_image(self, step: int, name: str, image: Tensor) -> None:
        import wandb

        self._send_media(step, {name: wandb.Image(image.permute(1, 2, 0).numpy())})

    def write_histogram(self, step: int, name: str, values: Tensor) -> None:
        import wandb

        self._send_media(step, {name: wandb.Histogram(values.tolist())})

    def _send_media(self, step: int, media: dict[str, Any]) -> None:
        if step > self.sent:
            self.run.log(media, step=step)

    def close(self, *, failed: bool) -> None:
        self.run.finish(exit_code=1 if failed else 0)


def _needs_login(mode: str | None) -> bool:
    """Return True if wandb would look for an API key and not find one.

    wandb itself is not imported for this, since that takes a second. A script that has imported it
    may have logged in.
    """
    if "wandb" in sys.modules or {"WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"} & os.environ.keys():
        return False
    folder = os.environ.get("WANDB_CONFIG_DIR", os.path.expanduser("~/.config/wandb"))
    settings = ConfigParser(interpolation=None)  # of `wandb login --host`, `wandb offline`
    try:
        settings.read([f"{folder}/settings", "wandb/settings"])
        saved = dict(settings["default"]) if "default" in settings else {}
        mode = mode or os.environ.get("WANDB_MODE") or saved.get("mode", "online")
        if mode not in ("online", "run") or "api_key" in saved or "disabled" in saved:
            return False
        address = os.environ.get("WANDB_BASE_URL") or saved.get("base_url", "https://api.wandb.ai")
        paths = [os.environ.get("NETRC", ""), *map(os.path.expanduser, ("~/.netrc", "~/_netrc"))]
        return not any(
            netrc.netrc(path).authenticators(urlsplit(address).netloc)
            for path in paths
            if os.path.exists(path)
        )
    except (OSError, ConfigParserError, netrc.NetrcParseError):
        return False  # unknown; wandb reports its own errors
