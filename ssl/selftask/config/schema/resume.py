"""The sections ``init`` and ``resume``: where a run starts from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from selftask.config.fields import setting
from selftask.config.schema.component import own


@dataclass(frozen=True, kw_only=True)
class InitConfig:
    """Weights to start from; not to be confused with ``resume``."""

    backbone: str | None = setting(None, path=True)
    """Weights to start from: a file, a run, ``timm:NAME`` or ``torchvision:NAME``; ``RUN@best`` and
    ``RUN@STEP`` take a certain checkpoint of a run.
    """
    min_matched: float = setting(1.0, min=0, max=1)
    """Smallest share of the backbone's tensors that must be found in the weights."""
    rename: list[tuple[str, str]] = setting([], also=["revise_keys"])
    """Pairs of a regular expression and its replacement (``re.sub``), such as ``[['^trunk', '']]``,
    for names of tensors in a file that no known layout fits. Each is applied to all names, after
    the pairs before it, and before ``prefix``.
    """
    prefix: str | None = setting(None, also=["remove_prefix"])
    """Prefix of the tensors to take from a file with several networks, such as
    ``state_dict.encoder_k.``; null: the network that matches best.
    """
    skip: list[str] = setting([], also=["skip_layers"])
    """Patterns of the backbone's tensors that keep their random values, such as ``["conv1.*"]``."""
    head: bool = False
    """Whether the head is loaded, too: that of a checkpoint of the run."""

    def to_dict(self) -> dict[str, Any]:
        """Return the section as in the yaml."""
        return own(self)


@dataclass(frozen=True, kw_only=True)
class ResumeConfig:
    """Which checkpoint to resume from; ``resume=auto`` is short for ``resume.checkpoint=auto``."""

    checkpoint: str = setting("auto", path=True)
    """``auto``: the newest checkpoint in ``out``; ``never``; or the path of one."""
    data: Literal["refuse", "allow"] = "refuse"
    """What to do if images, names or classes have changed since the checkpoint."""

    def to_dict(self) -> dict[str, Any]:
        """Return the section as in the yaml."""
        return own(self)
