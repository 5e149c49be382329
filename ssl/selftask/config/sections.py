"""Convert nested values to a Config of typed sections."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field, dataclass, fields, is_dataclass
from typing import Any

from selftask.config.checks.grid import with_image_size
from selftask.config.compose.provenance import Layers
from selftask.config.fields import setting
from selftask.config.schema import Config
from selftask.config.schema_reader import Reader, hint_for
from selftask.config.values.section_schema import Schema


@dataclass(frozen=True, kw_only=True)
class Shorthand:
    """Top-level keys that stand for several others."""

    image_size: int | None = setting(None, min=1)
    """Height and width of views, evaluated images and a vision transformer, in pixels."""


SCHEMA = Schema.of(Config, without=["imports", "places", "notes"]) | Schema.of(Shorthand)


def read_config(values: dict[str, Any], layers: Layers) -> tuple[Config | None, list[str]]:
    """Return the config, or None if a section cannot be read, and all problems."""
    reader = Reader(layers)
    _refuse_unknown(reader, values)
    sections = reader.fields(values, SCHEMA, ())
    imports = values.get("import") or []
    reader.note_place(("import",))
    if len(sections) < len(SCHEMA.fields):
        return None, reader.problems
    size = sections.pop("image_size")
    names = [imports] if isinstance(imports, str) else list(imports)
    config = Config(**sections, imports=names, places=reader.places)
    if size is None:
        return config, reader.problems
    config, problems = with_image_size(config, size, layers)
    return config, [*reader.problems, *(layers.located(key, text) for key, text in problems)]


def _refuse_unknown(reader: Reader, values: Mapping[str, Any]) -> None:
    """Add a problem for each unknown top-level key; hints include keys inside sections."""
    top = {*SCHEMA.fields, "import"}
    inner: dict[str, Field[Any]] = {
        f"{section}.{field.name}": field
        for section, kind in SCHEMA.types.items()
        if is_dataclass(kind)
        for field in fields(kind)
        if field.name != "args" and not field.metadata.get("flat")
    }
    for name in values:
        if name in top:
            continue
        meant = [
            key
            for key, field in inner.items()
            if name == key.rpartition(".")[2] or name in field.metadata.get("also", ())
        ]
        sections = dict.fromkeys(sorted(top), SCHEMA.fields["recipe"])
        hint = f"did you mean {meant[0]!r}?" if meant else hint_for(name, sections, ())
        reader.problem((name,), f"unknown key {name!r}; {hint}")
