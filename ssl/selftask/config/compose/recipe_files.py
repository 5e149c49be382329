"""Read a recipe and its bases: the ``defaults:`` list of each file, in the order of Hydra.

A recipe names its bases in ``defaults:``. They are merged in the order of the list, each after its
own bases, and the file itself at ``_self_`` or, without it, at the end. Keys of each file are
global; an entry has no group or package. Short forms are expanded before files are merged. For a
config of another framework, the error message names the documentation page that translates it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from selftask.config.compose.merging import merge, value_at
from selftask.config.compose.provenance import Layer, Layers, show_path
from selftask.config.compose.recipes import Bases
from selftask.config.compose.short_forms import expand
from selftask.config.keys import Key, dotted, is_path
from selftask.config.schema import Config
from selftask.errors import ConfigError, UserError
from selftask.files.received import read_bytes
from selftask.files.yaml_file import check_size

SELF = "_self_"  # entry of `defaults:` that stands for the file itself
TOP_KEYS = frozenset({*Config.__dataclass_fields__, "defaults", "import", "image_size"})
_MANY = 3  # minimum number of keys that identify a config of another framework


class _Framework(NamedTuple):
    page: str  # of the documentation
    typical: str  # top-level keys that no beginner would write in a recipe
    others: str = ""  # top-level keys that count only together with a typical one


_FRAMEWORKS = {
    "VISSL": _Framework(
        "docs/from-vissl.md",
        "DATA LOSS OPTIMIZER TRAINER METERS HOOKS DISTRIBUTED CHECKPOINT MACHINE SEED_VALUE "
        "VERBOSE LOG_FREQUENCY TEST_MODEL",
        "MODEL",
    ),
    "DINOv2": _Framework(
        "docs/from-dinov2.md", "compute_precision dino ibot crops", "MODEL student teacher optim"
    ),
    "solo-learn": _Framework(
        "docs/from-solo-learn.md",
        "method_kwargs augmentations auto_resume sync_batchnorm",
        "name max_epochs devices momentum accelerator precision",
    ),
    "lightly-train": _Framework(
        "docs/from-lightly.md",
        "model method_args transform_args loader_args trainer_args",
        "epochs batch_size overwrite embed_dim num_nodes precision",
    ),
    "lightly": _Framework("docs/from-lightly.md", "input_dir loader trainer criterion"),
    "mmselfsup": _Framework(
        "docs/finetune.md, for its weights",
        "default_scope train_dataloader optim_wrapper param_scheduler train_cfg default_hooks "
        "env_cfg log_config lr_config checkpoint_config",
        "model runner",
    ),
}
_OF_MMSELFSUP = ("_base_", "default_scope", "model = dict(", "model=dict(")

_TEXT = yaml.resolver.BaseResolver.DEFAULT_SCALAR_TAG
_TIME = re.compile(r"[-+0-9_]+:")
_EXPONENT = re.compile(r"[-+]?(?:[0-9][0-9_]*(?:\.[0-9_]*)?|\.[0-9][0-9_]*)[eE][-+]?[0-9]+$")


class _Loader(yaml.SafeLoader):
    """Reads scalars as OmegaConf does: ``1e-3`` is a number, a date is text.

    A time is text as well, as on the command line: in OmegaConf and yaml, ``1:00:00`` is 3600.
    OmegaConf's own loader is private, and missing in newer versions of OmegaConf.
    """

    yaml_implicit_resolvers = {
        first: [(_TEXT, _TIME), *(r for r in resolvers if not r[0].endswith(":timestamp"))]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Return the mapping; raise ConstructorError if it has a key twice."""
        places: dict[str, yaml.Mark] = {}
        for key, _ in node.value:
            if key.tag == _TEXT and places.setdefault(key.value, key.start_mark) != key.start_mark:
                problem = f"found duplicate key {key.value}"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("-+0123456789."))


def compose_recipe(path: Path, *, may_fetch: bool = True) -> tuple[dict[str, Any], Layers]:
    """Return the merged values of a recipe file, with unresolved references, and its layers.

    Args:
        path: File of the recipe.
        may_fetch: Whether bases may be downloaded.

    Raises:
        ConfigError: If a file is not a valid recipe, a base is missing, a short form cannot be
            expanded, or a key is a list in one file and a section in another.
    """
    path = path.resolve()
    layers = Layers(_layers_of(path, Bases(path.parent, may_fetch=may_fetch)))
    merged: dict[str, Any] = {}
    for layer in layers:
        try:
            layer.values = expand(layer.values)
        except UserError as error:  # from the catalog, or an inaccessible path
            raise ConfigError([f"{layer.file}: {error}"]) from error
        mixed = list(merge(merged, layer.values))
        if mixed:
            raise ConfigError([_of_mixed_kinds(merged, layer, key) for key in mixed])
    return merged, layers


def _of_mixed_kinds(base: dict[str, Any], layer: Layer, key: Key) -> str:
    """Return the message for a key that is a list in a base and a section in a file, or reverse."""
    place, name = layer.place(key), dotted(key)
    if isinstance(value_at(base, key)[1], dict):
        return f"{place}: {name} is a section in a base; give keys, not a list"
    return (
        f"{place}: {name} is a list in a base; give all of it here, or set keys of its items on "
        f"the command line: {name}.0.KEY=VALUE"
    )


def _layers_of(path: Path, bases: Bases, inheriting: tuple[Path, ...] = ()) -> Iterator[Layer]:
    """Yield the values of a file and of its bases, in the order in which they are merged.

    Args:
        path: The file.
        bases: Finds the bases.
        inheriting: Files that inherit this one, directly or not, to detect cycles.
    """
    file = read_recipe(path, bases.addresses.get(path))
    if path in inheriting:
        raise ConfigError([f"{file.defaults_place}: recipes that inherit each other"])
    for entry in file.defaults:
        if entry == SELF:
            yield file.layer
            continue
        try:
            base = bases.find(entry, path)
        except UserError as error:
            raise ConfigError([f"{file.defaults_place}: {error}"]) from error
        yield from _layers_of(base, bases, (*inheriting, path))


@dataclass(frozen=True)
class RecipeFile:
    """Content of a recipe file."""

    defaults: list[str]
    """Entries of ``defaults:``, of which exactly one is ``_self_``."""
    defaults_place: str
    """Origin of ``defaults:`` for messages."""
    layer: Layer
    """The values of the file other than ``defaults:``."""


def read_recipe(path: Path, address: str | None = None) -> RecipeFile:
    """Read a recipe file.

    Args:
        path: The file.
        address: The address that it was downloaded from, if any.

    Raises:
        ConfigError: If the file cannot be read, is not valid yaml, or not a recipe.
    """
    shown = address or show_path(path)
    try:
        text = read_bytes(path).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([f"{shown}: cannot be read: {error}"]) from error
    if path.suffix == ".py":
        raise ConfigError([f"{shown}: {_python_message(text)}"])
    if path.suffix == ".json":
        text = text.replace("\t", " ")  # JSON has tabs between tokens only; yaml allows none there
    values, node = _parse(text, shown)
    values = {} if values is None else _as_written(values, node)
    if not isinstance(values, dict):
        raise ConfigError([f"{shown}:1: a recipe is `key: value` lines; this is not"])
    if message := _foreign_message(values):
        raise ConfigError([f"{shown}: {message}"])
    marks = _read_marks(node, shown)
    if "hydra" in values:
        line = marks[("hydra",)]
        raise ConfigError([f"{line}: unknown key 'hydra': recipes have no settings of Hydra"])
    origin = f"{marks.get(('defaults',), shown)}: defaults"
    defaults = _check_defaults(values.pop("defaults", []), origin)
    return RecipeFile(defaults, origin, Layer(values, marks, shown))


def _parse(text: str, shown: str) -> tuple[Any, yaml.Node | None]:
    """Return the values of a file and its syntax tree; raise ConfigError for invalid yaml."""
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        check_size(node)
        return (None if node is None else loader.construct_document(node)), node
    except yaml.YAMLError as error:
        raise ConfigError([_explain_yaml(error, shown)]) from error
    except (ValueError, RecursionError) as error:  # such as 5,000 digits or 1,000 brackets
        reason = str(error).partition(";")[0]
        raise ConfigError([f"{shown}: cannot be read as yaml: {reason}"]) from error


def _read_marks(node: yaml.Node | None, shown: str) -> dict[Key, str]:
    """Return ``file:line`` for every key of a yaml document, with ``shown`` as the file."""
    marks: dict[Key, str] = {}

    def visit(node: yaml.Node, key: Key) -> None:
        items: list[tuple[str, yaml.Node, yaml.Node]] = []  # name, node with the line, value
        if isinstance(node, yaml.MappingNode):
            items = [(str(name.value), name, value) for name, value in node.value]
        elif isinstance(node, yaml.SequenceNode):
            items = [(str(index), value, value) for index, value in enumerate(node.value)]
        for name, marked, value in items:
            marks[(*key, name)] = f"{shown}:{marked.start_mark.line + 1}"
            visit(value, (*key, name))

    if node is not None:
        visit(node, ())
    return marks


def _as_written(values: Any, node: yaml.Node | None, key: Key = ()) -> Any:
    """Return the values, with keys and paths as text, as they are written in the file.

    yaml reads the key ``5:`` and the folder ``1e3`` as numbers; the command line does not.
    """
    if isinstance(values, dict):
        pairs = node.value if isinstance(node, yaml.MappingNode) else ()
        nodes = {str(name.value): value for name, value in pairs}
        return {
            str(name): _as_written(value, nodes.get(str(name)), (*key, str(name)))
            for name, value in values.items()
        }
    if isinstance(values, list):
        return [_as_written(item, None) for item in values]
    if isinstance(values, int | float) and isinstance(node, yaml.ScalarNode) and is_path(key):
        return node.value
    return values


def _check_defaults(entries: Any, origin: str) -> list[str]:
    """Return the entries of ``defaults:``, with ``_self_``; raise ConfigError if one is invalid."""
    if not isinstance(entries, list) or not all(map(_is_recipe_name, entries)):
        expected = "a list of recipe names, as in [/base/digits, _self_]"
        raise ConfigError([f"{origin}: {entries!r}: expected {expected}"])
    if entries.count(SELF) > 1:
        raise ConfigError([f"{origin}: {SELF} is listed twice"])
    return entries if SELF in entries else [*entries, SELF]


def _is_recipe_name(entry: Any) -> bool:
    """Return whether an entry is a plain name without Hydra's group and package syntax."""
    return isinstance(entry, str) and not re.search(r"[@\s$]", entry)


def _explain_yaml(error: yaml.YAMLError, shown: str) -> str:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    origin = f"{shown}:{mark.line + 1}" if mark else shown
    problem = getattr(error, "problem", None) or str(error).splitlines()[0]
    if "'\\t'" in problem:
        problem = "a tab where yaml wants spaces"
    context = getattr(error, "context", None)
    return f"{origin}: not valid yaml: {problem}" + (f" ({context})" if context else "")


def _foreign_message(values: Mapping[str, Any]) -> str | None:
    """Return an error message if values are a config of another framework, else None."""
    inner = values.get("config")  # of VISSL, whose files begin with `config:`
    keys = set(inner if isinstance(inner, Mapping) else values) - TOP_KEYS
    shared = {
        name: len(keys & {*typical.split(), *others.split()})
        for name, (_, typical, others) in _FRAMEWORKS.items()
        if keys & {*typical.split()}
    }
    name = max(shared, key=shared.__getitem__, default="")
    return _page_of(name) if shared.get(name, 0) >= _MANY else None


def _python_message(text: str) -> str:
    """Return an error message for a Python file, such as a config of mmselfsup."""
    if any(word in text for word in _OF_MMSELFSUP):
        return _page_of("mmselfsup")
    return "a Python file; a recipe is a yaml or JSON file"


def _page_of(name: str) -> str:
    page = _FRAMEWORKS[name].page
    return f"a config of {name}, whose keys are others: see {page}, and `selftask config simclr`"
