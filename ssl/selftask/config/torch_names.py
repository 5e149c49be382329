"""``torch:NAME``: optimizers of torch.optim by class name."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from selftask.config.keys import Key, dotted
from selftask.config.schema import OptimizerConfig
from selftask.errors import UserError, check_known, nearest

PREFIX = "torch:"
_OURS = ("params", "lr", "weight_decay")  # arguments set from the section's own fields
_REFUSED = {
    "LBFGS": "it evaluates the loss several times a step",
    "SparseAdam": "it takes sparse gradients only",
    "Muon": "it takes matrices only; optimizer.name=muon also trains all other parameters",
}
_NOT_SHARDED = ("Adafactor",)  # not implemented for DTensors in torch


def is_torch_name(kind: str, name: str) -> bool:
    """Return whether ``name`` is written as an optimizer of torch.optim."""
    return kind == "optimizer" and name.startswith(PREFIX)


def torch_optimizer(name: str, args: dict[str, Any], params: Any) -> Any:
    """Build the optimizer ``torch:NAME``.

    Args:
        name: ``torch:NAME``.
        args: Arguments of the optimizer other than the parameters. Lists become tuples, which torch
            requires for betas.
        params: Parameters or parameter groups.

    Raises:
        UserError: If there is no such class, or if selftask does not support it.
    """
    tuples = {k: tuple(v) if isinstance(v, list) else v for k, v in args.items()}
    return _class(name)(params, **tuples)


def _class(name: str) -> Any:
    import torch  # slow, so only if needed

    kinds = {
        word: kind
        for word, kind in vars(torch.optim).items()
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
    }
    del kinds["Optimizer"]
    bare = name.removeprefix(PREFIX)
    if bare in _REFUSED:
        raise UserError(f"torch.optim.{bare} does not work here: {_REFUSED[bare]}")
    check_known(bare, kinds, f"torch.optim has no optimizer {bare!r}")
    return kinds[bare]


def torch_problems(config: OptimizerConfig, key: Key, reduce: str) -> Iterator[tuple[Key, str]]:
    """Yield problems of an optimizer of torch.optim and its arguments.

    Args:
        config: The section of the optimizer.
        key: Key of the section, ``optimizer`` or ``optimizers.NAME``.
        reduce: The value of ``parallel.reduce``.
    """
    try:
        arguments = inspect.signature(_class(config.name)).parameters
    except UserError as error:
        yield (*key, "name"), str(error)
        return
    owner = f"torch.optim.{config.name.removeprefix(PREFIX)}"
    if reduce == "fsdp" and owner.rpartition(".")[2] in _NOT_SHARDED:
        text = f"parallel.reduce='fsdp': {owner} needs whole tensors; use 'ddp' or 'manual'"
        yield ("parallel", "reduce"), text
    if config.weight_decay and "weight_decay" not in arguments:
        text = f"{dotted(key)}.weight_decay={config.weight_decay}: {owner} has no weight decay"
        yield (*key, "weight_decay"), f"{text}; set it to 0"
    names = [word for word in arguments if word not in _OURS]
    for word, value in config.args.items():
        if word not in names:
            text = f"unknown key {dotted((*key, word))!r}: {owner} has no such argument"
            yield (*key, word), f"{text}; {nearest(word, names)}"
        elif isinstance(arguments[word].default, bool) and not isinstance(value, bool):
            yield (*key, word), f"{dotted((*key, word))}={value!r}: expected true or false"
    if set(config.args) <= set(names):
        yield from _refused_values(config, key, owner)


def _refused_values(config: OptimizerConfig, key: Key, owner: str) -> Iterator[tuple[Key, str]]:
    """Yield the errors that torch itself raises for the values, by building the optimizer."""
    import torch

    try:
        torch_optimizer(config.name, config.args, [torch.zeros(1, requires_grad=True)])
    except (AssertionError, RuntimeError, TypeError, ValueError) as error:
        yield key, f"{owner} refuses {config.args}: {error}"
