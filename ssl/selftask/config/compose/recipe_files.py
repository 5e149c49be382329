"""Compose recipe files with Hydra, and keep the values of each file as a layer.

Recipes are ordinary Hydra configs (``defaults:`` lists, interpolations) with two differences. The
keys of each file are global, so no ``# @package _global_`` line is needed, and short forms are
expanded when the file is read. Both are implemented by a config source, Hydra's extension point.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from hydra import initialize
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf._utils import get_yaml_loader
from omegaconf.errors import OmegaConfBaseException

from selftask.config.compose.bases import BASES
from selftask.config.compose.endings import find_recipe, recipe_files
from selftask.config.compose.foreign_recipes import foreign_framework
from selftask.config.compose.provenance import Layer, Layers, read_marks, take_path_texts
from selftask.config.compose.short_forms import expand
from selftask.config.schema import Config
from selftask.errors import ConfigError, UserError, nearest

MAX_VALUES = 100_000  # per file, with every anchor expanded
MAX_LEVELS = 50
TOP_KEYS = frozenset({*Config.__dataclass_fields__, "defaults", "import", "image_size"})

# Settings of Hydra's own launcher, logging and help. They are not used here, so not read.
HYDRA_GROUPS = (
    *("env", "help", "hydra_help", "hydra_logging", "job_logging"),
    *("launcher", "output", "sweeper"),
)


def compose_recipe(
    path: Path, shipped: Path, *, may_fetch: bool = True
) -> tuple[DictConfig, Layers]:
    """Return the merged config of a recipe file and its layers.

    ``defaults:`` entries are looked up in the folder of the file, then among the ``shipped``
    recipes. ``Bases`` resolves entries that are paths or addresses.

    Raises:
        ConfigError: If a file is not valid yaml or a defaults list is wrong.
    """
    BASES.reset(may_fetch=may_fetch)
    _read_file.cache_clear()  # files may have changed since the last call
    name, root = _address(path, shipped)
    with _hydra(name, [root, shipped]) as primary:
        try:
            loader = GlobalHydra.instance().config_loader()
            results = loader.compute_defaults_list(primary, [], RunMode.RUN).defaults
            read = [_find(result.config_path, [root, shipped]) for result in results]
            layers = Layers(copy.deepcopy(_read_file(file)[1]) for file in read if file is not None)
            return _merge(layers), layers
        except (HydraException, OmegaConfBaseException) as error:
            raise ConfigError([_explain(error, path, [root, shipped])]) from error
        except RecursionError as error:
            place = _place_of_defaults(path)
            raise ConfigError([f"{place}: defaults: recipes that inherit each other"]) from error


def _merge(layers: Layers) -> DictConfig:
    """Merge the values of all files, later ones over earlier ones, without resolving references."""
    merged = OmegaConf.create()
    for layer in layers:
        merged.merge_with(layer.values)
    return merged


class _Recipes(ConfigSource):
    """Config source for a folder of recipes, with global keys and expanded short forms.

    Folders are not Hydra groups. Otherwise a folder ``data/`` next to a recipe would turn
    ``data=DIR`` into the choice of a group.
    """

    @staticmethod
    def scheme() -> str:
        return "recipes"

    def load_config(self, config_path: str) -> ConfigResult:
        file = _file(Path(self.path), config_path)
        assert file is not None  # Hydra calls is_config first
        defaults, _ = _read_file(file)
        return ConfigResult(
            provider=self.provider,
            path=self.full_path(),
            config=OmegaConf.create(defaults),
            header={"package": "_global_"},
        )

    def is_config(self, config_path: str) -> bool:
        return _file(Path(self.path), config_path) is not None

    def is_group(self, config_path: str) -> bool:
        return False

    def available(self) -> bool:
        return Path(self.path).is_dir()

    def list(self, config_path: str, results_filter: Any) -> list[str]:
        return []


@contextmanager
def _hydra(recipe: str, folders: list[Path]) -> Iterator[str]:
    """Initialize Hydra for one composition; yield the name of the config to compose.

    That config only refers to the recipe and its folders. Hydra's global state is restored
    afterwards.
    """
    search = [f"{_Recipes.scheme()}://{folder}" for folder in folders]
    unused = [{f"override hydra/{group}": None} for group in HYDRA_GROUPS]
    pointer = {"defaults": [f"/{recipe}", "_self_", *unused], "hydra": {"searchpath": search}}
    Plugins.instance().register(_Recipes)
    ConfigStore.instance().store(name="selftask_recipe", node=pointer)
    backup = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        with initialize(config_path=None, job_name="selftask", version_base="1.3"):
            yield "selftask_recipe"
    finally:
        GlobalHydra.instance().hydra = backup


def _address(path: Path, shipped: Path) -> tuple[str, Path]:
    """Return a recipe's name for Hydra and the folder that the name is relative to."""
    path = path.resolve()
    if path.is_relative_to(shipped):
        return path.relative_to(shipped).with_suffix("").as_posix(), shipped
    return BASES.add(path), path.parent


def _file(folder: Path, config_path: str) -> Path | None:
    return BASES.files.get(config_path) or find_recipe(folder / config_path)


def _find(config_path: str | None, roots: Sequence[Path]) -> Path | None:
    if config_path is None:
        return None
    return next(filter(None, (_file(root, config_path) for root in roots)), None)


@cache
def _read_file(path: Path) -> tuple[dict[str, Any], Layer]:
    """Return a file's ``defaults:`` and its other values; raise ConfigError for invalid yaml."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([f"{BASES.show(path)}: cannot be read: {error}"]) from error
    if path.suffix == ".json":
        text = text.replace("\t", " ")  # JSON has tabs between tokens only; yaml allows none there
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        _check_size(node, path)
        values = yaml.load(text, Loader=get_yaml_loader())
    except yaml.YAMLError as error:
        raise ConfigError([_explain_yaml(error, path)]) from error
    except (ValueError, RecursionError) as error:  # such as 5,000 digits or 1,000 brackets
        reason = str(error).partition(";")[0]
        raise ConfigError([f"{BASES.show(path)}: cannot be read as yaml: {reason}"]) from error
    values = {} if values is None else take_path_texts(values, node)
    if not isinstance(values, dict):
        raise ConfigError([f"{BASES.show(path)}:1: a recipe is `key: value` lines; this is not"])
    if message := foreign_framework(values, TOP_KEYS):
        raise ConfigError([f"{BASES.show(path)}: {message}"])
    marks = read_marks(node, BASES.show(path))
    if "hydra" in values:
        line = marks[("hydra",)]
        raise ConfigError(
            [f"{line}: unknown key 'hydra': Hydra only composes here, it does not run"]
        )
    defaults = {}
    if "defaults" in values:
        place = f"{marks[('defaults',)]}: defaults"
        defaults["defaults"] = _bases(values.pop("defaults"), path, place)
    try:
        return defaults, Layer(expand(_texts(values)), marks)
    except UserError as error:  # from the catalog, or an inaccessible path
        raise ConfigError([f"{BASES.show(path)}: {error}"]) from error


def _bases(names: Any, path: Path, place: str) -> list[str]:
    """Return the ``defaults:`` of a file as names for Hydra."""
    if not isinstance(names, list) or not all(map(_is_recipe_name, names)):
        wanted = "a list of recipe names, as in [/base/digits, _self_]"
        raise ConfigError([f"{place}: {names!r}: expected {wanted}"])
    try:
        return [BASES.name(name, path) for name in names]
    except UserError as error:
        raise ConfigError([f"{place}: {error}"]) from error


def _check_size(document: yaml.Node | None, path: Path) -> None:
    """Raise ConfigError if anchors expand to too many values or sections nest too deeply."""
    known: dict[int, tuple[float, float]] = {}

    def measure(node: yaml.Node | None) -> tuple[float, float]:
        """Return the number of values and of levels."""
        if not isinstance(node, yaml.CollectionNode):
            return 1, 1
        if id(node) not in known:
            known[id(node)] = (math.inf, math.inf)  # in case the node contains itself
            pairs = isinstance(node, yaml.MappingNode)
            inner = [item for pair in node.value for item in pair] if pairs else node.value
            values, levels = zip((0, 0), *map(measure, inner), strict=True)
            known[id(node)] = (1 + sum(values), 1 + max(levels))
        return known[id(node)]

    values, levels = measure(document)
    if values > MAX_VALUES or levels > MAX_LEVELS:
        text = f"holds more than {MAX_VALUES:,} values, anchors written out, or {MAX_LEVELS} levels"
        raise ConfigError([f"{BASES.show(path)}: {text}"])


def _is_recipe_name(entry: Any) -> bool:
    """Return whether an entry is a plain name without Hydra's group and package syntax."""
    return isinstance(entry, str) and not re.search(r"[@\s$]", entry)


def _texts(value: Any) -> Any:
    """Convert keys to strings, as on the command line; yaml reads ``5:`` as a number."""
    if isinstance(value, dict):
        return {str(key): _texts(item) for key, item in value.items()}
    return [_texts(item) for item in value] if isinstance(value, list) else value


def _explain_yaml(error: yaml.YAMLError, path: Path) -> str:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    place = f"{BASES.show(path)}:{mark.line + 1}" if mark else BASES.show(path)
    problem = getattr(error, "problem", None) or str(error).splitlines()[0]
    if "'\\t'" in problem:
        problem = "a tab where yaml wants spaces"
    context = getattr(error, "context", None)
    return f"{place}: not valid yaml: {problem}" + (f" ({context})" if context else "")


def _explain(error: Exception, path: Path, roots: Sequence[Path]) -> str:
    """Return one line for an error of Hydra or OmegaConf."""
    text = " ".join((str(error) or str(error.__cause__)).split())
    missing = re.search(r"Could not (?:load|find) '/?([^']+)'", text)
    if not missing:
        return f"{_place_of_defaults(path)}: {text}"
    asking = re.match(r"In '([^']+)'", text)
    file = (asking and _find(asking[1], roots)) or path
    hint = nearest(missing[1], [name for name, _ in recipe_files(roots[-1])])
    return f"{_place_of_defaults(file)}: defaults: there is no recipe {missing[1]!r}; {hint}"


def _place_of_defaults(path: Path) -> str:
    return _read_file(path)[1].marks.get(("defaults",), BASES.show(path))
