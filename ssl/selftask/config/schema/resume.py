"""The sections ``init`` and ``resume``: weights or checkpoint that a run starts from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from selftask.config.fields import setting
from selftask.config.schema.component import Section

_Fixed = Literal["constant", "zeros", "ones", "eye", "dirac"]
_Drawn = Literal["normal", "trunc_normal", "uniform", "orthogonal", "sparse"]
_Scaled = Literal["xavier_normal", "xavier_uniform", "kaiming_normal", "kaiming_uniform"]


@dataclass(frozen=True, kw_only=True)
class InitRule:
    """Initial values of some parameters of the network."""

    match: str | list[str] | None = None
    """Names of modules, or patterns with ``*``, as in ``optimizer.groups``; null: all names."""
    type: str | list[str] | None = None
    """Names of the classes of modules, such as ``Linear``, or of their base classes; null: all
    classes.
    """
    parameter: str = "weight"
    """Name of the parameter in the module."""
    by: _Fixed | _Drawn | _Scaled = setting(
        missing="give a function of torch.nn.init, such as trunc_normal"
    )
    """Function of ``torch.nn.init``, without the underscore at its end."""
    args: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the function, such as ``{std: 0.02}``."""


@dataclass(frozen=True, kw_only=True)
class InitConfig(Section):
    """Weights to start a new run from; not read if ``resume`` continues from a checkpoint."""

    backbone: str | None = setting(None, path=True)
    """Weights to start from: a file, a run, ``timm:NAME`` or ``torchvision:NAME``; ``RUN@best`` and
    ``RUN@STEP`` select a checkpoint of a run. null: random weights.
    """
    min_matched: float = setting(1.0, min=0, max=1)
    """Smallest share of the backbone's tensors that must be found in the weights."""
    rename: list[tuple[str, str]] = setting([], also=["revise_keys"])
    """Pairs of a regular expression and its replacement (``re.sub``), such as ``[['^trunk', '']]``,
    for tensor names in a file of unknown layout. The pairs are applied to all names in this order,
    before ``prefix``.
    """
    prefix: str | None = setting(None, also=["remove_prefix"])
    """Prefix of the tensors to take from a file with several networks, such as
    ``state_dict.encoder_k.``; null: the network that matches best.
    """
    skip: list[str] = setting([], also=["skip_layers"])
    """Patterns for tensors of the backbone that keep their random initialization, such as
    ``["conv1.*"]``.
    """
    head: bool = False
    """Whether to load the head as well; ``backbone`` must be a run or a checkpoint of a run."""
    rules: list[InitRule] = setting([], also=["init_cfg"])
    """Rules for initial values, such as ``[{type: Linear, by: trunc_normal, args: {std: 0.02}}]``,
    applied in order after the weights are loaded; the last matching rule determines the values.
    """


@dataclass(frozen=True, kw_only=True)
class ResumeConfig(Section):
    """Checkpoint to resume from; ``resume=auto`` is short for ``resume.checkpoint=auto``."""

    checkpoint: str = setting("auto", path=True)
    """``auto``: the newest checkpoint in ``out``, if there is one; ``never``: none; or the path of
    a checkpoint.
    """
    data: Literal["refuse", "allow"] = "refuse"
    """What to do if images, names or classes have changed since the checkpoint: ``refuse`` ends
    with an error; ``allow`` warns and resumes.
    """
