"""Every key of a config says in one line what it is, beside its declaration."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from selftask.config.config_class import config_class
from selftask.config.field_docs import field_docs
from selftask.config.schema import Config
from selftask.registry import REGISTRIES

UNITS = {"_s": "seconds", "_mb": "MiB", "max_side": "pixels", "max_bytes": "bytes"}


def sections(kind: type) -> Iterator[type]:
    """Yield a config class and those of its fields, at any depth."""
    yield kind
    for annotation in typing.get_type_hints(kind).values():
        for inner in (annotation, *typing.get_args(annotation)):
            if dataclasses.is_dataclass(inner) and isinstance(inner, type):
                yield from sections(inner)


def classes() -> dict[str, type]:
    actual = {kind.__name__: kind for kind in sections(Config)}
    for plural, registry in REGISTRIES.items():
        for name in registry.names():
            config = config_class(registry, name)
            if config is not None:
                actual[f"{plural}: {name}"] = config
    return actual


CLASSES = classes()


@pytest.mark.parametrize("name", CLASSES)
def test_every_key_has_its_line(name: str) -> None:
    config = CLASSES[name]
    docs = field_docs(config)
    fields = [field.name for field in dataclasses.fields(config)]
    assert [field for field in fields if field not in docs] == []
    for field in fields:
        text = docs[field]
        assert text.endswith("."), f"{field}: {text}"
        assert text[0].isupper() or text[0] in "`/" or text[0].isdigit(), f"{field}: {text}"
        for ending, unit in UNITS.items():
            assert not field.endswith(ending) or unit in text, f"{field}: which unit?"


def test_texts_of_bases_and_of_imported_classes() -> None:
    @dataclass
    class Base:
        one: int
        """The first."""
        two: int = 0
        three: int = 0
        """A text
        on two lines.
        """

    @dataclass
    class Derived(Base):
        one: int = 1
        """Another first."""

    assert field_docs(Base) == {"one": "The first.", "three": "A text on two lines."}
    assert field_docs(Derived) == {"one": "Another first.", "three": "A text on two lines."}
    assert field_docs(int) == {}
