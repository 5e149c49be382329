"""A limit stands in the schema of every number, and what is no number of use is refused."""

from __future__ import annotations

import os
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from selftask.config.checks.components import iter_problems
from selftask.config.config_class import config_class
from selftask.config.fields import default_of, has_default, setting
from selftask.config.load import load_config
from selftask.config.schema import Component
from selftask.config.values.coerce import Mismatch, check_limits, convert
from selftask.config.values.section_schema import Schema
from selftask.errors import ConfigError
from selftask.registry import REGISTRIES

SIGNED = {
    "bands.value_range",
    "beit.branch_layer",
    "contrast_noise.offset",
    "early_stopping.target",
    "normalize.mean",
    "online_probe.layers",
    "siglip.bias",
    "unic.ladder",
}
OF_VALUE = ("start", "end", "warmup_start", "first")  # limits are those of what is scheduled


def has_numbers(annotation: Any) -> bool:
    return annotation in (int, float) or any(map(has_numbers, typing.get_args(annotation)))


def filled(annotation: Any, number: float) -> Any:
    """A value of that type, made of one number."""
    inner = typing.get_args(annotation)
    if typing.get_origin(annotation) is list:
        return [number]
    if typing.get_origin(annotation) is tuple:
        return [number] * len(inner)
    return next((filled(option, number) for option in inner if has_numbers(option)), number)


def numbers() -> Iterator[tuple[str, str, str]]:
    for kind, registry in REGISTRIES.items():
        for name in registry.names():
            config = config_class(registry, name)
            if config is not None and registry.address(name).module.startswith("selftask."):
                schema = Schema.of(config)
                yield from (
                    (kind, name, field)
                    for field in schema.fields
                    if has_numbers(schema.types[field])
                    and not schema.fields[field].metadata.get("duration")
                    and f"{name}.{field}" not in SIGNED
                    and not (kind == "schedules" and field in OF_VALUE)
                )


def complaints(kind: str, name: str, field: str, value: float, whole: dict[str, Any]) -> str:
    """What is said about one number of a config whose others are as they should be."""
    schema = Schema.of(config_class(REGISTRIES[kind], name))
    needed = {key: filled(t, 8) if has_numbers(t) else "file" for key, t in schema.types.items()}
    args = {
        key: default_of(f) if has_default(f) else needed[key]
        for key, f in schema.fields.items()
        if f.metadata.get("of") in (None, "schedules")
    }
    try:
        args[field] = convert(filled(schema.types[field], value), schema.types[field])
        check_limits(args[field], schema.fields[field].metadata)
    except (Mismatch, ValueError) as error:
        return str(error)
    nested = {f.metadata.get("of") for f in schema.fields.values()}
    if nested - {None, "schedules"}:  # lists of transforms
        return ""
    problems = iter_problems(Component(name=name, args=args), REGISTRIES[kind], ("x",), whole)
    return "; ".join(text for _, text in problems)


def test_every_number_of_ours_has_a_limit() -> None:
    whole = load_config("simclr/digits", []).to_dict()
    whole["train"]["step"] = {"name": "standard"}
    free = [case for case in numbers() if not complaints(*case, -(10**9), whole)]
    free = [case for case in free if case[1] != "random_choice"]  # checked with its transforms
    assert free == []
    assert len(list(numbers())) > 120


@pytest.mark.parametrize("value", ["inf", "-inf", "nan", "1e999", "9" * 100, "-" + "9" * 100])
@pytest.mark.parametrize(
    "key", ["optimizer.lr", "train.epochs", "train.seed", "hooks.clip_gradients.max_norm"]
)
def test_what_is_no_number_of_use(key: str, value: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config("simclr/digits", [f"{key}={value}"])
    assert len(refused.value.problems) == 1
    assert refused.value.problems[0].startswith(f"command line: {key}={value}"[:60])


@pytest.mark.parametrize(
    ("lr", "says"),
    [
        ("{}", r"optimizer\.lr\.base is missing: a number"),
        ("{name: cosin}", r"no schedule named 'cosin'; did you mean 'cosine'"),
        ("{name: cosine}", r"optimizer\.lr: start is missing: the value at the start"),
        ("{name: 'classy:cosine'}", r"schedule 'cosine' cannot be made of \{'num_epochs': "),
        ("{name: 3}", r"needs the name"),
    ],
)
def test_a_scheduler_that_cannot_be_built(lr: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load_config("simclr/digits", [f"optimizer.lr={lr}"])


def test_a_pipe_is_neither_checkpoint_nor_weights(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for key in ("resume", "init.backbone"):
        with pytest.raises(ConfigError, match=rf"{key}='{pipe}': neither"):
            load_config("simclr/digits", [f"{key}={pipe}"])


def test_limits_of_lists_and_required_fields() -> None:
    from dataclasses import MISSING

    field = setting([0.5], above=0, below=1)
    assert field.default_factory() == [0.5]
    for wrong in ([0.5, 1.0], [0.0]):
        with pytest.raises(ValueError, match="must be"):
            check_limits(wrong, field.metadata)
    check_limits([0.5, 0.9], field.metadata)
    assert setting(min=1).default is MISSING
