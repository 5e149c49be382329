"""Each section of a config by its schema: what ``load.py`` composed, as typed objects."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import Field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from selftask.config.checks.image_size import with_image_size
from selftask.config.fields import check_limits, has_default
from selftask.config.keys import Key
from selftask.config.schema import (
    DEFAULT_HOOKS,
    Component,
    Config,
    DataConfig,
    EvalConfig,
    InitConfig,
    LaunchConfig,
    OptimizerConfig,
    ParallelConfig,
    ResumeConfig,
    TrainConfig,
    ViewConfig,
)
from selftask.config.schema_reader import (
    Reader,
    Schema,
    hint_for,
)
from selftask.config.values import auto_values
from selftask.config.values.coerce import Mismatch, convert
from selftask.registry import (
    BACKBONES,
    EVALUATIONS,
    HOOKS,
    METERS,
    METHODS,
    OPTIMIZERS,
    SAMPLERS,
    SOURCES,
    TOKENIZERS,
    TRANSFORMS,
    Registry,
)

T = TypeVar("T")

DATA = Schema.of(DataConfig, without=["source", "val", "sampler", "tokenizer"])
PART = Schema({"subset": DATA.fields["subset"]}, DATA.types, "")  # of data.val, as of data
OPTIMIZER = Schema.of(OptimizerConfig, without=["name", "args"])
SECTIONS: dict[str, type | None] = {
    "recipe": None,
    "import": None,
    "image_size": None,
    "data": DataConfig,
    "views": None,
    "backbone": None,
    "method": None,
    "train": TrainConfig,
    "optimizer": OptimizerConfig,
    "meters": None,
    "hooks": None,
    "eval": EvalConfig,
    "init": InitConfig,
    "resume": ResumeConfig,
    "parallel": ParallelConfig,
    "launch": LaunchConfig,
    "out": None,
}
# Of the sections with a name, the fields that stay when another thing is named:
OURS: dict[Key, frozenset[str]] = {
    ("data",): frozenset({*DATA.fields, "sampler", "tokenizer"}),
    ("optimizer",): frozenset(OPTIMIZER.fields),
}


def read_config(reader: Reader, values: dict[str, Any], recipe: str) -> Config | None:
    """All sections; None if one of them could not be read. Problems are the reader's to tell."""
    _unknown_sections(reader, values)
    launch = _plain_section(reader, values, "launch", LaunchConfig)
    data = _read_data(reader, values.get("data"), launch.processes if launch else 1)
    views = _read_views(reader, values.get("views"))
    backbone = _read_named(reader, values, "backbone", BACKBONES)
    method = _read_named(reader, values, "method", METHODS)
    train = _plain_section(reader, values, "train", TrainConfig)
    optimizer = _read_optimizer(reader, values.get("optimizer"))
    evaluation = _read_eval(reader, values.get("eval"))
    init = _plain_section(reader, values, "init", InitConfig)
    parallel = _plain_section(reader, values, "parallel", ParallelConfig)
    name = _text(reader, values, "recipe", recipe)
    meters = reader.components(values.get("meters"), METERS, ("meters",))
    hooks = reader.components(_with_default_hooks(values.get("hooks")), HOOKS, ("hooks",))
    resume = _plain_section(reader, values, "resume", ResumeConfig)
    out = os.path.expanduser(_text(reader, values, "out", default_out(name)))
    imports = _module_names(reader, values.get("import"))
    size = _image_size(reader, values.get("image_size"))
    if not (data and backbone and method and train and optimizer):
        return None
    if not (init and resume and parallel and launch):
        return None
    config = Config(
        recipe=name,
        data=data,
        views=views,
        backbone=backbone,
        method=method,
        train=train,
        optimizer=optimizer,
        meters=meters,
        hooks=hooks,
        eval=evaluation,
        init=init,
        resume=resume,
        parallel=parallel,
        launch=launch,
        out=out,
        imports=imports,
        places=reader.places,
    )
    return config if size is None else with_image_size(config, size, reader)


def _image_size(reader: Reader, value: Any) -> int | None:
    """Pixels, or None for the sizes of the recipe."""
    try:
        size: int | None = convert(value, int | None)
        check_limits(size, {"min": 1})
    except (Mismatch, ValueError) as error:
        reader.problem(("image_size",), f"image_size={value!r}: {error}")
        return None
    return size


def _with_default_hooks(given: Any) -> Any:
    """The hooks of every run, then those of the config; ``null`` takes one out."""
    if given is not None and not isinstance(given, dict):
        return given  # not a section: the reader says so
    return {**{name: {} for name in DEFAULT_HOOKS}, **(given or {})}


def default_out(recipe: str) -> str:
    """``runs/simclr_resnet18_cifar10`` for ``simclr/resnet18_cifar10``; a file gives its name."""
    path = Path(recipe)
    name = path.stem if path.suffix in (".yaml", ".yml") else recipe.replace("/", "_")
    return f"runs/{name}"


def _unknown_sections(reader: Reader, values: dict[str, Any]) -> None:
    """Note a problem for each unknown top-level key; hints include keys inside sections."""
    inner: dict[str, Field[Any]] = {
        f"{section}.{field.name}": field
        for section, schema in SECTIONS.items()
        if schema is not None
        for field in fields(schema)
        if field.name not in ("source", "args")
    }
    for name in values:
        if name in SECTIONS:
            continue
        meant = [
            dotted
            for dotted, field in inner.items()
            if name == dotted.rpartition(".")[2] or name in field.metadata.get("also", ())
        ]
        top = dict.fromkeys(SECTIONS, next(iter(inner.values())))
        hint = f"did you mean {meant[0]!r}?" if meant else hint_for(name, top, ())
        reader.problem((name,), f"unknown key {name!r}; {hint}")


def _plain_section(reader: Reader, values: dict[str, Any], name: str, kind: type[T]) -> T | None:
    schema = Schema.of(kind)
    section = reader.mapping(values.get(name), (name,))
    reader.unknown_keys(section, (name,), schema)
    return _make(kind, schema, reader.section(section, schema, (name,)))


def _make(kind: Callable[..., T], schema: Schema, values: dict[str, Any], **more: Any) -> T | None:
    """The section's object, or None if a value that it needs turned out wrong."""
    needed = [name for name, field in schema.fields.items() if not has_default(field)]
    if any(name not in values for name in needed):
        return None
    return kind(**values, **more)


def _read_named(
    reader: Reader, values: dict[str, Any], name: str, registry: Registry
) -> Component | None:
    if values.get(name) is None:
        reader.problem((name,), f"{name} is missing: give the name of a {registry.kind}")
        return None
    return reader.component(values[name], registry, (name,))[0]


def _read_data(reader: Reader, value: Any, processes: int) -> DataConfig | None:
    if value is None:
        reader.problem(("data",), "data is missing: data=FOLDER takes any tree of images")
        return None
    derived = val = sampler = tokenizer = None
    if isinstance(value, dict):
        value = dict(value)
        val, sampler = value.pop("val", None), value.pop("sampler", None)
        tokenizer = value.pop("tokenizer", None)
        if value.get("num_workers", "auto") == "auto":
            value["num_workers"], derived = auto_values.num_workers(processes)
    source, ours = reader.component(value, SOURCES, ("data",), ours=DATA)
    if derived:
        reader.places["data.num_workers"] = derived
    validation = None
    reader.note_place(("data", "val"))
    if val is not None:
        validation, part = reader.component(val, SOURCES, ("data", "val"), ours=PART)
        if validation is not None and part.get("subset") is not None:
            validation = replace(validation, args={**validation.args, **part})
    reader.note_place(("data", "sampler"))
    order, _ = reader.component(sampler or {"name": "shuffled"}, SAMPLERS, ("data", "sampler"))
    reader.note_place(("data", "tokenizer"))
    key = ("data", "tokenizer")
    if tokenizer is None or isinstance(tokenizer, dict):
        tokenizer = {"name": "bytes", **(tokenizer or {})}
    words, _ = reader.component(tokenizer, TOKENIZERS, key)
    if source is None or order is None or words is None:
        return None
    return DataConfig(source=source, val=validation, sampler=order, tokenizer=words, **ours)


def _read_views(reader: Reader, value: Any) -> dict[str, ViewConfig]:
    schema = Schema.of(ViewConfig, without=["transforms"])
    allowed = Schema.of(ViewConfig)
    views = {}
    for name, group in reader.mapping(value, ("views",)).items():
        key = ("views", str(name))
        if group is None:
            continue
        section = reader.mapping(group, key)
        reader.unknown_keys(section, key, allowed)
        pipeline = reader.pipeline(section.get("transforms"), TRANSFORMS, (*key, "transforms"))
        views[str(name)] = ViewConfig(**reader.section(section, schema, key), transforms=pipeline)
    return views


def _read_optimizer(reader: Reader, value: Any) -> OptimizerConfig | None:
    if value is None:
        reader.problem(("optimizer",), "optimizer is missing: give its name and lr")
        return None
    component, ours = reader.component(value, OPTIMIZERS, ("optimizer",), ours=OPTIMIZER)
    if component is None:
        return None
    return _make(OptimizerConfig, OPTIMIZER, ours, name=component.name, args=component.args)


def _read_eval(reader: Reader, value: Any) -> EvalConfig:
    section = reader.mapping(value, ("eval",))
    reader.unknown_keys(section, ("eval",), Schema.of(EvalConfig))
    schema = Schema.of(EvalConfig, without=["transforms", "evaluations"])
    key = ("eval", "transforms")
    return EvalConfig(
        transforms=reader.pipeline(section.get("transforms"), TRANSFORMS, key),
        evaluations=reader.components(
            section.get("evaluations"), EVALUATIONS, ("eval", "evaluations")
        ),
        **reader.section(section, schema, ("eval",)),
    )


def _text(reader: Reader, values: dict[str, Any], name: str, default: str) -> str:
    value = values.get(name)
    if value is None:
        reader.places[name] = "default"
        return default
    if isinstance(value, dict | list):
        reader.problem((name,), f"{name}={value!r}: expected text")
        return default
    reader.places[name] = reader.layers.place((name,)) or "default"
    return str(value)


def _module_names(reader: Reader, value: Any) -> list[str]:
    reader.places["import"] = reader.layers.place(("import",)) or "default"
    return [value] if isinstance(value, str) else list(value or [])
