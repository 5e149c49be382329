"""Second step of reading a config: convert nested values to a Config of typed sections."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field, fields, is_dataclass
from typing import Any

from selftask.config.checks.image_size import with_image_size
from selftask.config.schema import Config
from selftask.config.schema_reader import Reader, Schema, hint_for
from selftask.config.values.coerce import Mismatch, check_limits, convert

SCHEMA = Schema.of(Config, without=["imports", "places", "notes"])


def read_config(reader: Reader, values: dict[str, Any]) -> Config | None:
    """Return the config, or None if a section cannot be read; problems are added to ``reader``."""
    _refuse_unknown(reader, values)
    sections = reader.fields(values, SCHEMA, ())
    imports = values.get("import") or []
    reader.note_place(("import",))
    size = _image_size(reader, values.get("image_size"))
    if len(sections) < len(SCHEMA.fields):
        return None
    names = [imports] if isinstance(imports, str) else list(imports)
    config = Config(**sections, imports=names, places=reader.places)
    return config if size is None else with_image_size(config, size, reader)


def _refuse_unknown(reader: Reader, values: Mapping[str, Any]) -> None:
    """Add a problem for each unknown top-level key; hints include keys inside sections."""
    top = {*SCHEMA.fields, "import", "image_size"}
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
            dotted
            for dotted, field in inner.items()
            if name == dotted.rpartition(".")[2] or name in field.metadata.get("also", ())
        ]
        sections = dict.fromkeys(sorted(top), SCHEMA.fields["recipe"])
        hint = f"did you mean {meant[0]!r}?" if meant else hint_for(name, sections, ())
        reader.problem((name,), f"unknown key {name!r}; {hint}")


def _image_size(reader: Reader, value: Any) -> int | None:
    """Return the size in pixels, or None to keep the sizes of the recipe."""
    try:
        size: int | None = convert(value, int | None)
        check_limits(size, {"min": 1})
    except (Mismatch, ValueError) as error:
        reader.problem(("image_size",), f"image_size={value!r}: {error}")
        return None
    return size
