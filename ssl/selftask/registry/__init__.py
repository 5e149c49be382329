"""Registries that map names in a config to classes and functions.

``METHODS["moco"]`` finds the file of the package that contains ``@register_method("moco")``,
imports it and returns the registered class. Names, summaries and declarations are read from
source, so listing names and checking a config do not import the files of the package. Code outside
of the package registers entries when it is imported.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from selftask.errors import UserError, nearest
from selftask.registry.class_source import ClassSource, class_source, definition, parse

T = TypeVar("T")


class UnknownName(UserError, KeyError):
    """Raised if a name is not registered."""

    def __str__(self) -> str:
        return str(self.args[0])


@dataclass(frozen=True)
class Address:
    """Module, file and line in which a name is registered."""

    module: str
    path: Path
    line: int

    def __str__(self) -> str:
        return f"{self.path}:{self.line}"


@dataclass(eq=False)
class Registry:
    """Registry of one kind of class or function.

    Args:
        kind: Name of the kind, such as method or hook.
        package: Package or module whose files register entries; other code may, too.
        declares: Name of a class attribute that every entry must set, and its allowed values, each
            with its meaning. None: no attribute is required.
        build: Signature and result of the method, such as ``build``, that every entry must have,
            for messages. Empty: no such method is required.
    """

    kind: str
    package: str
    declares: tuple[str, Mapping[str, str]] | None = None
    build: str = ""
    _registered: dict[str, Any] = field(default_factory=dict, init=False)
    _addresses: dict[str, Address] = field(default_factory=dict, init=False)

    def register(self, name: str) -> Callable[[T], T]:
        """Return a decorator that registers a class or function as ``name``.

        A class or function may replace itself, as after a reload of its module.

        Raises:
            UserError: If the name is missing. The decorator raises it if the name is taken, a
                required class attribute is missing or has another value than the allowed ones, or a
                required method is missing.
        """
        caller = sys._getframe(1)  # the line of the decorator, as in the index
        address = Address(
            caller.f_globals["__name__"], Path(caller.f_code.co_filename), caller.f_lineno
        )
        if not isinstance(name, str):  # the decorator was used without parentheses
            raise UserError(f'give a name: @register_{self.kind}("my_{self.kind}")')

        def add(entry: T) -> T:
            taken = self._taken(name, entry, address)
            if taken is not None:
                raise UserError(
                    f"the {self.kind} name {name!r} is taken: at {taken}, and again at {address}"
                )
            self._check_declaration(name, entry, address)
            self._check_build(name, entry, address)
            self._registered[name] = entry
            self._addresses[name] = address
            return entry

        return add

    def _taken(self, name: str, entry: Any, address: Address) -> Address | None:
        """Return the address of another entry with this name, or None.

        An entry of the same module and qualified name, as after a reload, is no other entry.
        """
        if name in self._registered:
            other = self._registered[name]
            same = (other.__module__, other.__qualname__) == (entry.__module__, entry.__qualname__)
            return None if same else self._addresses[name]
        indexed = self._index().get(name)
        if indexed is None or indexed.path.resolve() == address.path.resolve():
            return None
        return indexed

    def _check_declaration(self, name: str, entry: Any, address: Address) -> None:
        if self.declares is None:
            return
        attribute, words = self.declares
        value = getattr(entry, attribute, None)
        if value not in words:
            problem = "does not declare" if value is None else f"says {value!r} for"
            choices = "; ".join(f'"{word}" ({meaning})' for word, meaning in words.items())
            raise UserError(
                f"the {self.kind} {name!r} ({entry.__qualname__} at {address}) {problem} "
                f"`{attribute}`; set this class attribute to one of {choices}"
            )

    def _check_build(self, name: str, entry: Any, address: Address) -> None:
        method = self.build.partition("(")[0]
        if method and not callable(getattr(entry, method, None)):
            kind = "a class" if isinstance(entry, type) else "a function"
            raise UserError(
                f"the {self.kind} {name!r} ({entry.__qualname__} at {address}) is {kind} without a "
                f"method `{method}`; register a dataclass of its arguments with {self.build}"
            )

    def __getitem__(self, name: str) -> Any:
        """Return the entry registered as ``name``, importing its module on first use.

        Raises:
            UnknownName: If there is none.
        """
        if name not in self._registered:
            importlib.import_module(self.address(name).module)
        return self._registered[name]

    def imported(self, name: str) -> Any | None:
        """Return the entry registered as ``name``; None if unknown or not imported yet."""
        return self._registered.get(name)

    def __contains__(self, name: str) -> bool:
        return name in self._registered or name in self._index()

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def names(self) -> list[str]:
        """Return all names, sorted, without importing the modules of their entries."""
        return sorted({*self._index(), *self._registered})

    def address(self, name: str) -> Address:
        """Return the Address of ``name``; raise UnknownName, with the nearest name, if unknown."""
        address = self._addresses.get(name) or self._index().get(name)
        if address is None:
            raise UnknownName(f"no {self.kind} named {name!r}; {nearest(name, self.names())}")
        return address

    def summary(self, name: str) -> str:
        """Return the first docstring line of ``name``, or else of its module, read from source.

        For an entry that code outside of the package has registered, it is that of the object
        itself. It is empty without a docstring.

        Raises:
            UnknownName: If there is no such name.
        """
        if name in self._registered and name not in self._index():
            return (inspect.getdoc(self._registered[name]) or "").partition("\n")[0]
        module = parse(self.address(name).path)
        doc = ast.get_docstring(self.definition(name)) or ast.get_docstring(module) or ""
        return doc.partition("\n")[0]

    def declared(self, name: str, attribute: str, default: Any) -> Any:
        """Return a class attribute of ``name``, such as ``views = 2``.

        If the module is not imported, the value is read from the source of the class or a base, and
        must be a literal.

        Args:
            name: Name of a component.
            attribute: Name of the class attribute.
            default: Returned if neither the class nor a base sets the attribute, or if the name is
                unknown, such as a name of another library.

        Raises:
            UserError: If the source sets it to an expression that is not a literal.
        """
        entry = self.entry(name) if name in self else None
        if not isinstance(entry, ClassSource):
            return getattr(entry, attribute, default)
        value = entry.value_of(attribute)
        if value is None:
            return default
        path, expression = value
        try:
            return ast.literal_eval(expression)
        except ValueError as error:
            raise UserError(
                f"{path}:{expression.lineno}: `{attribute}` is read before this file is imported; "
                "write the value itself, without names"
            ) from error

    def entry(self, name: str) -> Any:
        """Return the registered class or function, or its source if its module is not imported.

        The source of a class is a ClassSource; that of a function is None.

        Raises:
            UnknownName: If there is no such name.
        """
        if name in self._registered:
            return self._registered[name]
        address = self.address(name)
        return class_source(address.module, address.path, f"register_{self.kind}({name!r})")

    def is_shipped(self, name: str) -> bool:
        """Return whether selftask itself registers ``name``, not a user or another package."""
        return name in self and self.address(name).module.startswith(f"{self.package}.")

    def definition(self, name: str) -> ast.ClassDef | ast.FunctionDef:
        """Return the syntax tree of a class or function, without importing it.

        Raises:
            UserError: If the name is unknown, or its file has no definition decorated with it.
        """
        return definition(self.address(name).path, f"register_{self.kind}({name!r})")

    @cache  # noqa: B019 - registries live as long as the process
    def _index(self) -> dict[str, Address]:
        """Return name -> address for every ``@register_<kind>("name")`` in the package's files."""
        spec = importlib.util.find_spec(self.package)
        pattern = re.compile(rf'^@register_{self.kind}\(\s*"([\w.]+)"', re.MULTILINE)
        index: dict[str, Address] = {}
        for folder in spec.submodule_search_locations or [] if spec else []:
            for path in sorted(Path(folder).rglob("*.py")):
                text = path.read_text(encoding="utf-8")
                module = ".".join(path.relative_to(folder).with_suffix("").parts)
                for match in pattern.finditer(text):
                    line = text.count("\n", 0, match.start()) + 1
                    index[match[1]] = Address(f"{self.package}.{module}", path, line)
        return index


REDUCTIONS = {
    "samples": "the loss is a mean over samples, each independent of the others",
    "gathered": "the loss compares samples with those of all ranks, gathered with gradient",
    "statistics": "sums over the samples of all ranks enter the loss",
}
"""Values of ``Method.loss_reduction`` and their meanings; ``selftask check`` verifies them."""

REQUIREMENTS = {
    # of the backbone, see ``models.features``
    "tokens": "patch tokens of a transformer",
    "subset": "patch tokens that can be left out",
    "attention": "patch tokens whose attention can be limited",
    "groups": "patch tokens that can attend within groups of patches only",
    "sparse": "convolutions that can leave out hidden patches",
    "dense": "dense feature maps",
    "hidden": "hidden layers",
    # of the data
    "labels": "labels",
    "index": "the number of each image in the data set",
    "boxes": "the crop boxes of views",
    "captions": "captions",
    "numbers": "the numbers named by `method.targets`",
}
"""Values of ``Method.requires`` and their meanings; see ``config.checks.requirements``."""

METHODS = Registry("method", "selftask.methods", declares=("loss_reduction", REDUCTIONS))
TASKS = Registry("task", "selftask.task")
TRAIN_STEPS = Registry("train_step", "selftask.train_steps")
HOOKS = Registry("hook", "selftask.hooks")
BACKBONES = Registry(
    "backbone",
    "selftask.models.backbones",
    build="build(self, channels=3), which returns the module",
)
HEAD_BLOCKS = Registry(
    "head_block",
    "selftask.models.classifier",
    build="build(self, width, num_classes), which returns the module and its width",
)
SOURCES = Registry("source", "selftask.data.sources")
SAMPLERS = Registry("sampler", "selftask.data.sampling")
TOKENIZERS = Registry("tokenizer", "selftask.data.tokenizers")
TRANSFORMS = Registry("transform", "selftask.data.transforms")
BATCHED_TRANSFORMS = Registry(
    "batched_transform", "selftask.data.device.transforms"
)  # registered under the names of the transforms
OPTIMIZERS = Registry(
    "optimizer",
    "selftask.optim.optimizers",
    build="build(self, groups), which returns a torch.optim.Optimizer",
)
SCHEDULES = Registry(
    "schedule",
    "selftask.optim",
    build="curve(self, start, end, span), which returns a function of progress in [0, 1), and with "
    "the base class selftask.optim.schedules.ScheduleConfig",
)
METERS = Registry("meter", "selftask.meters")
EVALUATIONS = Registry("evaluation", "selftask.evaluate")

REGISTRIES: dict[str, Registry] = {
    f"{registry.kind}s": registry
    for registry in (
        *(METHODS, TASKS, TRAIN_STEPS, HOOKS, BACKBONES, HEAD_BLOCKS, SOURCES, SAMPLERS),
        *(TOKENIZERS, TRANSFORMS, OPTIMIZERS, SCHEDULES, METERS, EVALUATIONS),
    )
}
"""Registries by the plural of their kind, as in ``selftask list``; all but BATCHED_TRANSFORMS."""

register_method = METHODS.register
register_task = TASKS.register
register_train_step = TRAIN_STEPS.register
register_hook = HOOKS.register
register_backbone = BACKBONES.register
register_head_block = HEAD_BLOCKS.register
register_source = SOURCES.register
register_sampler = SAMPLERS.register
register_tokenizer = TOKENIZERS.register
register_transform = TRANSFORMS.register
register_batched_transform = BATCHED_TRANSFORMS.register
register_optimizer = OPTIMIZERS.register
register_schedule = SCHEDULES.register
register_meter = METERS.register
register_evaluation = EVALUATIONS.register
