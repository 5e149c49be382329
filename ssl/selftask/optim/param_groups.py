"""Parameter groups: weight decay by kind, ordered rules, layer-wise rates, frozen parameters."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from selftask.config.run_length import RunLength
from selftask.config.schema.optimizer import GroupRule, OptimizerConfig
from selftask.config.values.duration import steps_in
from selftask.errors import UserError, nearest

_TOKENS = {
    *("cls_token", "mask_token", "reg_token", "dist_token", "class_token"),
    *("pos_embed", "pos_embedding", "absolute_pos_embed", "relative_position_bias_table"),
}
"""Names of tokens and positions in timm, torchvision and the published code of methods."""

Named = Iterable[tuple[str, nn.Module]]


@dataclass(frozen=True)
class Parameter:
    """A parameter, its name, and the names of its module's class and that class's bases."""

    name: str  # such as network.backbone.conv1.weight
    value: nn.Parameter
    kinds: frozenset[str]

    def matches(self, rule: GroupRule) -> bool:
        """Return True if the rule applies to this parameter.

        Both ``type`` and ``match`` must apply, if given. The first part of the name, such as
        ``network.``, may be omitted in ``match``.
        """
        if rule.type and self.kinds.isdisjoint(_listed(rule.type)):
            return False
        names = (self.name, self.name.partition(".")[2])
        patterns = [glob for text in _listed(rule.match) for glob in (text, f"{text}.*")]
        return not patterns or any(fnmatchcase(n, glob) for n in names for glob in patterns)


@dataclass(frozen=True)
class Settings:
    """Settings of a parameter, from the rules, its number of dimensions and its depth."""

    parameter: Parameter
    decays: bool  # from its number of dimensions; LARS adapts these
    weight_decay: float | dict[str, Any]
    lr: float = 1.0  # factor of optimizer.lr
    schedule: dict[str, Any] = field(default_factory=dict)  # overrides optimizer.schedule
    frozen_steps: int = 0

    @property
    def key(self) -> tuple[Any, ...]:
        """Key of the parameter's group in the table of groups."""
        shown = (str(self.weight_decay), self.lr, str(self.schedule), self.frozen_steps)
        return (self.decays, *shown)


def named_parameters(modules: Named) -> list[Parameter]:
    """Return all parameters of named modules; shared parameters are listed once."""
    parameters: dict[int, Parameter] = {}
    for prefix, module in modules:
        for path, part in module.named_modules(prefix=prefix):
            kinds = frozenset(kind.__name__ for kind in type(part).__mro__)
            for name, value in part.named_parameters(recurse=False):
                parameters.setdefault(id(value), Parameter(f"{path}.{name}", value, kinds))
    return list(parameters.values())


def divide(
    modules: Named, matches: Mapping[str, str | list[str]]
) -> dict[str | None, set[nn.Parameter]]:
    """Divide the trained parameters among ``optimizer`` and the sections of ``optimizers``.

    Args:
        modules: Named modules.
        matches: ``optimizers.NAME.match`` by name.

    Returns:
        The parameters of each section of ``optimizers`` by its name, and those of ``optimizer``
        under None.

    Raises:
        UserError: If an optimizer has no parameter, or a parameter belongs to two optimizers.
    """
    parameters = [p for p in named_parameters(modules) if p.value.requires_grad]
    rules = {name: GroupRule(match=match) for name, match in matches.items()}
    parts: dict[str | None, set[nn.Parameter]] = {None: set(), **{name: set() for name in rules}}
    for name, rule in rules.items():
        mine = [parameter for parameter in parameters if parameter.matches(rule)]
        check_matches(rule, f"optimizers.{name}", mine, parameters)
    for parameter in parameters:
        owners = [name for name, rule in rules.items() if parameter.matches(rule)]
        if len(owners) > 1:
            both = " and ".join(f"optimizers.{name}.match" for name in owners)
            raise UserError(f"{both} match {parameter.name!r}; a parameter has one optimizer")
        parts[owners[0] if owners else None].add(parameter.value)
    if rules and not parts[None]:
        raise UserError("optimizers: every parameter is matched; leave some to `optimizer`")
    return parts


def freeze_for_good(
    modules: Named,
    rules: Sequence[GroupRule],
    of_method: Sequence[GroupRule] = (),
    *,
    key: str = "optimizer",
) -> None:
    """Freeze the parameters whose first rule with ``freeze`` has ``true``: they get no gradient.

    Args:
        modules: Named modules.
        rules: Rules of ``optimizer.groups``.
        of_method: Rules of the method, ``Method.group_rules``.
        key: Key of the section with the rules, for messages.

    Raises:
        UserError: If a rule with ``freeze: true``, or any rule of the method, matches nothing.
    """
    parameters = named_parameters(modules)
    for name, rule in (*_keyed(f"{key}.groups", rules), *_keyed("group_rules", of_method)):
        mine = [parameter for parameter in parameters if parameter.matches(rule)]
        if rule.freeze is True or name.startswith("group_rules"):
            check_matches(rule, name, mine, parameters)
    for parameter in parameters:
        if _first_freeze(parameter, [*rules, *of_method]) is True:
            parameter.value.requires_grad_(False)


def _first_freeze(parameter: Parameter, rules: Sequence[GroupRule]) -> bool | int | str | None:
    freezes = (r.freeze for r in rules if r.freeze is not None and parameter.matches(r))
    return next(freezes, None)


def frozen_until(
    modules: Named, rules: Sequence[GroupRule], length: RunLength
) -> list[tuple[int, nn.Parameter]]:
    """Return (number of frozen steps, parameter) for each parameter that matches a rule.

    The first matching rule that has ``freeze`` counts, as in ``assign_settings``. The number is 0
    without such a rule, and for ``freeze: true``.

    Args:
        modules: Named modules.
        rules: Rules of the config and the method, in order of precedence.
        length: Length of the run, for durations that are not in steps.
    """
    return [
        (_frozen_steps(_first_freeze(parameter, rules), length), parameter.value)
        for parameter in named_parameters(modules)
        if any(parameter.matches(rule) for rule in rules)
    ]


def assign_settings(
    modules: Named,
    config: OptimizerConfig,
    length: RunLength,
    depths: Mapping[str, int],
    of_method: Sequence[GroupRule] = (),
    *,
    only: Container[nn.Parameter] | None = None,
    key: str = "optimizer",
) -> list[Settings]:
    """Return the settings of every trained parameter, in the order of the optimizer's groups.

    Each setting is taken from the first matching rule that has it.

    Args:
        modules: Named modules.
        config: The ``optimizer`` section.
        length: Length of the run, for rules that freeze parameters temporarily.
        depths: Layer index of each backbone parameter by name, from 0; all other parameters
            belong to the layer after the last.
        of_method: Rules of the method, which apply after those of the config.
        only: Parameters of this optimizer; None for all.
        key: Key of the section, for messages.

    Raises:
        UserError: If a rule of the config, other than with ``freeze: true``, matches no trained
            parameter.
    """
    parameters = [
        p
        for p in named_parameters(modules)
        if p.value.requires_grad and (only is None or p.value in only)
    ]
    for name, rule in _keyed(f"{key}.groups", config.groups):
        if rule.freeze is not True:
            check_matches(rule, name, [p for p in parameters if p.matches(rule)], parameters)
    rules = [*config.groups, *of_method]
    settings = [_settings_of(p, config, rules, length, depths) for p in parameters]
    # A stable sort. The first group, whose rate is logged as `lr`, is one with the plain
    # optimizer.lr, if there is any.
    return sorted(settings, key=lambda s: (s.lr != 1.0 or bool(s.schedule), not s.decays))


def _settings_of(
    parameter: Parameter,
    config: OptimizerConfig,
    rules: Sequence[GroupRule],
    length: RunLength,
    depths: Mapping[str, int],
) -> Settings:
    is_token = parameter.name.rpartition(".")[2] in _TOKENS
    decays = config.decay_tokens if is_token else parameter.value.ndim > 1
    decays_1d = config.decay_1d and not is_token
    top = max(depths.values(), default=-1) + 1
    layer = config.layer_decay ** (top - depths.get(parameter.name, top))
    values: dict[str, Any] = {}
    for rule in rules:
        if parameter.matches(rule):
            values = {**rule.given, **values}
    return Settings(
        parameter,
        decays,
        values.get("weight_decay", config.weight_decay if decays or decays_1d else 0.0),
        values.get("lr", 1.0) * layer,
        values.get("schedule", {}),
        _frozen_steps(values.get("freeze"), length),
    )


def _frozen_steps(freeze: bool | int | str | None, length: RunLength) -> int:
    return steps_in(freeze, length) if freeze and freeze is not True else 0


def _keyed(key: str, rules: Sequence[GroupRule]) -> list[tuple[str, GroupRule]]:
    return [(f"{key}.{index}", rule) for index, rule in enumerate(rules)]


def check_matches(
    rule: GroupRule, key: str, matched: Sequence[Parameter], parameters: Sequence[Parameter]
) -> None:
    """Raise UserError with the nearest names if a rule matches nothing.

    Args:
        rule: The rule.
        key: Key of the rule in the config, for the message.
        matched: Parameters that match the rule.
        parameters: All parameters, whose names are suggested.
    """
    if matched:
        return
    names: set[str] = set()
    for parameter in parameters:
        parts = parameter.name.split(".")
        names |= {".".join(parts[:end]) for end in range(1, len(parts) + 1)}
    if rule.match is None or any(p.matches(GroupRule(match=rule.match)) for p in parameters):
        kinds = {kind for parameter in parameters for kind in parameter.kinds} - {"object"}
        wanted, hint = "type", nearest(_listed(rule.type)[0], kinds)
    else:
        wanted, hint = "match", nearest(_listed(rule.match)[0].replace("*", ""), names)
    raise UserError(
        f"{key}.{wanted}={getattr(rule, wanted)!r}: matches no trained parameter; {hint}"
    )


def _listed(value: str | list[str] | None) -> list[str]:
    return [value] if isinstance(value, str) else value or []


def merge_alike(groups: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Merge groups with equal settings, since each group costs about 10 microseconds per step."""
    merged: list[dict[str, Any]] = []
    for group in groups:
        settings = {key: value for key, value in group.items() if key != "params"}
        for other in merged:
            if {key: value for key, value in other.items() if key != "params"} == settings:
                other["params"] = [*other["params"], *group["params"]]
                break
        else:
            merged.append(dict(group))
    return merged
