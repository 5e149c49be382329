"""Initial weights by the rules of ``init.rules``, and the report ``initial.txt``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from selftask.config.schema.optimizer import GroupRule
from selftask.config.schema.resume import InitRule
from selftask.distributed.collectives import is_primary
from selftask.errors import explained
from selftask.logs import get_logger
from selftask.models.weights.load import is_on_meta
from selftask.optim.param_groups import Parameter, check_matches, named_parameters

log = get_logger(__name__)


def initialize(network: nn.Module, rules: Sequence[InitRule], out: Path) -> None:
    """Initialize the parameters that ``rules`` match, in place, and write ``initial.txt``.

    Does nothing without rules. The first rank writes the file, unless the network is on the meta
    device.

    Args:
        network: The network, with the weights of ``init.backbone``.
        rules: Rules in order; if several match a parameter, the last one applies.
        out: The run folder.

    Raises:
        UserError: If a rule matches no parameter, or its function cannot initialize one.
    """
    if not rules:
        return
    parameters = named_parameters([("network", network)])
    origins: dict[str, str] = {}
    for number, rule in enumerate(rules):
        key = f"init.rules.{number}"
        group = GroupRule(match=rule.match, type=rule.type)
        named = [p for p in parameters if p.name.endswith(f".{rule.parameter}")]
        matches = [p for p in named if p.matches(group)]
        check_matches(group, key, matches, named or parameters)
        for parameter in matches:
            _draw(parameter, rule, key)
            origins[parameter.name] = f"{key}: {rule.by}"
    log.info("initial weights: %d of %d tensors by init.rules", len(origins), len(parameters))
    if is_primary() and not is_on_meta(network):
        lines = [_line(p, origins.get(p.name, "built or loaded")) for p in parameters]
        (out / "initial.txt").write_text("".join(lines), encoding="utf-8")


@torch.no_grad()
def _draw(parameter: Parameter, rule: InitRule, key: str) -> None:
    shape = "x".join(map(str, parameter.value.shape))
    problem = f"{key}.by={rule.by}: of {parameter.name} ({shape})"
    with explained(problem, TypeError, ValueError, RuntimeError):
        getattr(nn.init, f"{rule.by}_")(parameter.value, **rule.args)


def _line(parameter: Parameter, origin: str) -> str:
    value = parameter.value.detach().float()
    shape = "x".join(map(str, value.shape))
    mean, std = value.mean().item(), value.std(correction=0).item()
    return f"{parameter.name:<60}  {shape:<14}  mean {mean:9.3g}  std {std:8.3g}  {origin}\n"
