"""Unpickling of untrusted files, restricted to listed constructors and forms of their arguments."""

from __future__ import annotations

import io
import mmap
import pickle
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch

_MOST_LEVELS = 100  # of nested containers; checkpoints of all known frameworks have fewer than 20
_MOST_CONTAINERS = 1_000_000  # at one level of nesting
_CONTAINERS = (dict, list, tuple, set, frozenset)
_ZIP = b"PK\x03\x04"
_PARTS_OF_LEGACY_FILES = 4  # torch.save before 1.6: magic number, version, system, content


class RefusedContent(pickle.UnpicklingError):
    """Raised for content that does not belong in a file of weights; users see its message."""


class Constructor:
    """Function that a pickle may call. It must raise for arguments that no library writes."""

    __slots__ = ("call",)

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call


_PythonUnpickler: Any = pickle._Unpickler  # its instructions are methods, unknown to type checkers


_CHECKS: dict[str, Callable[[Any], None]] = {
    "BUILD": lambda self: self.check(self.stack[-2], self.objects),
    "APPEND": lambda self: self.check(self.stack[-2], self.containers),
    "SETITEM": lambda self: self.check(self.stack[-3], self.containers, self.stack[-2:-1]),
    "APPENDS": lambda self: self.check(self.metastack[-1][-1], self.containers),
    "SETITEMS": lambda self: self.check(self.metastack[-1][-1], self.containers, self.stack[::2]),
    "ADDITEMS": lambda self: self.check(self.metastack[-1][-1], self.containers, self.stack),
    "FROZENSET": lambda self: check_nesting(self.stack),
    "DICT": lambda self: check_nesting(self.stack[::2]),
    "BINPERSID": lambda self: check_nesting(self.stack[-1]),
}
"""What an unpickler checks before it runs a pickle instruction, by name of the instruction."""


def _checked(instruction: str) -> Callable[[Any], None]:
    """Return a function that runs an instruction after its check."""
    check, run = _CHECKS[instruction], _PythonUnpickler.dispatch[getattr(pickle, instruction)[0]]

    def checked(unpickler: Any) -> None:
        check(unpickler)
        run(unpickler)

    return checked


class RestrictedUnpickler(_PythonUnpickler):
    """Unpickler that calls only ``Constructor`` objects and changes only objects of listed types.

    It extends the unpickler written in Python, since the one in C cannot be restricted in this way.
    ``load`` raises pickle.UnpicklingError for other names and for deep nesting. For damaged files
    it may raise any error.

    Args:
        file: The pickle, opened for reading.
        names: ``"module.name"`` -> Constructor, or a value that a pickle may name but not call.
        **options: Arguments of ``pickle.Unpickler``.
    """

    containers: tuple[type, ...] = (dict, list, set)
    """Types that may be filled with items."""

    objects: tuple[type, ...] = ()
    """Types whose state may be set."""

    def __init__(self, file: Any, names: Mapping[str, Any], **options: Any) -> None:
        super().__init__(file, **options)
        self._names = names

    def load(self) -> Any:
        """Return the content of the file."""
        content = super().load()
        check_nesting(content)
        return content

    def find_class(self, module: str, name: str) -> Any:
        """Return the listed object for ``module.name``; import nothing."""
        full = f"{module}.{name}"
        return self._names[full] if full in self._names else self.unlisted(full)

    def unlisted(self, name: str) -> Any:
        """Return the object for a name that is not listed, or raise UnpicklingError."""
        raise RefusedContent(f"names {name}, which has no business there; nothing was run")

    def call(self, function: Any, arguments: Any) -> Any:
        """Call a Constructor; raise UnpicklingError for any other object."""
        if not isinstance(function, Constructor):
            raise RefusedContent(f"calls an object ({type(function).__name__}); nothing was run")
        check_nesting(arguments)
        return function.call(*arguments)

    def check(self, target: Any, types: tuple[type, ...], keys: Any = ()) -> None:
        """Raise UnpicklingError for a ``target`` not of ``types`` or deeply nested ``keys``."""
        if not isinstance(target, types):
            raise RefusedContent(f"changes an object ({type(target).__name__}); nothing was run")
        check_nesting(keys)

    # Overrides of the base class's methods, each of which runs one pickle instruction.

    def _create(self) -> None:
        arguments, function = self.stack.pop(), self.stack.pop()
        self.append(self.call(function, arguments))

    def _create_with_options(self) -> None:
        if self.stack.pop():
            raise RefusedContent("calls with names of arguments; nothing was run")
        self._create()

    def _instantiate(self, function: Any, arguments: list[Any]) -> None:
        self.append(self.call(function, arguments))

    def get_extension(self, code: int) -> None:
        """Refuse an object that is given by its number in ``copyreg``."""
        raise RefusedContent(f"names the extension {code}; nothing was run")

    def load_bytearray8(self) -> None:  # the base class allocates the stated length before it reads
        (length,) = struct.unpack("<Q", self.read(8))
        self.append(bytearray(self.read(length)))

    dispatch: ClassVar[dict[int, Callable[..., None]]] = {
        **_PythonUnpickler.dispatch,
        **{getattr(pickle, name)[0]: _checked(name) for name in _CHECKS},
        pickle.REDUCE[0]: _create,
        pickle.NEWOBJ[0]: _create,
        pickle.NEWOBJ_EX[0]: _create_with_options,
        pickle.BYTEARRAY8[0]: load_bytearray8,
    }


def check_nesting(content: Any) -> None:
    """Raise UnpicklingError for containers that are nested too deeply for recursive functions.

    Hashing a tuple that is nested a million levels deep overflows the stack and kills the process.
    """
    level: list[Any] = [[content]]
    for _ in range(_MOST_LEVELS):
        values = (value.values() if isinstance(value, dict) else value for value in level)
        level = [item for items in values for item in items if isinstance(item, _CONTAINERS)]
        if not level:
            return
        if len(level) > _MOST_CONTAINERS:  # a small file can refer to one container many times
            break
    raise RefusedContent("nests its content too deeply for a file of weights")


def size(numbers: Any) -> torch.Size:
    """Convert a tuple of non-negative integers to torch.Size; refuse anything else."""
    if type(numbers) is not tuple or any(type(n) is not int or n < 0 for n in numbers):
        raise RefusedContent("has a shape of other things than whole numbers")
    return torch.Size(numbers)


class Placeholder:
    """Stand-in for an object whose class is not loaded. It accepts any state and items."""

    def __setstate__(self, state: Any) -> None: ...
    def __setitem__(self, key: Any, value: Any) -> None: ...
    def append(self, item: Any) -> None: ...
    def extend(self, items: Any) -> None: ...
    def add(self, item: Any) -> None: ...


class StateDict(dict[Any, Any]):
    """Plain dict in place of an OrderedDict; ignores attributes such as ``_metadata``."""

    def __init__(self, items: Any = ()) -> None:
        if type(items) not in (list, tuple):
            raise RefusedContent("makes a dict of no list")
        super().__init__(items)

    def __setstate__(self, state: Any) -> None: ...


class Outline(RestrictedUnpickler):
    """Unpickler of containers, numbers and strings; all other objects become placeholders."""

    names: ClassVar[Mapping[str, Any]] = {"collections.OrderedDict": Constructor(StateDict)}
    containers = (dict, list, set, Placeholder)
    objects: tuple[type, ...] = (StateDict, Placeholder)

    def __init__(self, file: Any, **options: Any) -> None:
        super().__init__(file, self.names, **options)
        self.skipped: dict[str, None] = {}

    def unlisted(self, name: str) -> Any:
        """Record the name and return a placeholder."""
        self.skipped[name] = None
        return Placeholder()

    def call(self, function: Any, arguments: Any) -> Any:
        """Call a Constructor; calling a placeholder returns another placeholder."""
        if not isinstance(function, Placeholder):
            return super().call(function, arguments)
        check_nesting(arguments)
        return Placeholder()

    def persistent_load(self, pid: Any) -> Any:
        """Return a placeholder for the storage of a tensor."""
        return Placeholder()


def is_zip(path: Path) -> bool:
    """Return True if torch.load reads a file as a zip archive."""
    with path.open("rb") as file:
        return file.read(len(_ZIP)) == _ZIP


def check_file(path: Path) -> None:
    """Raise UnpicklingError if torch.load(weights_only=True) would overflow the stack.

    torch.load hashes dict keys of any depth. For a file that is neither a zip archive nor a pickle,
    any error may be raised.
    """
    if is_zip(path):
        record = torch._C.PyTorchFileReader(str(path)).get_record("data.pkl")
        Outline(io.BytesIO(record), encoding="latin1").load()
        return
    with open_pickle(path) as file:
        if Outline(file, encoding="latin1").load() == torch.serialization.MAGIC_NUMBER:
            for _ in range(_PARTS_OF_LEGACY_FILES - 1):
                Outline(file, encoding="latin1").load()


def open_pickle(path: Path) -> mmap.mmap:
    """Memory-map a file, so that wrong lengths in it cannot make a read allocate memory."""
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
