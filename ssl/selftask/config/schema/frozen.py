"""A trained module that a method uses but does not train, such as a teacher or tokenizer."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from selftask.config.fields import setting
from selftask.config.library_names import split_address


@dataclass(frozen=True, kw_only=True)
class FrozenModule:
    """Config of a frozen module; a plain string is short for its ``model``.

    A method's ``Config`` declares one as ``teacher: FrozenModule = setting(missing="...")``, and
    ``Method.open_frozen("teacher", task)`` returns it.
    """

    model: str = setting(
        missing="give a run, an exported backbone.pt, timm:NAME or package.module:Class",
        path=True,
    )
    """A run, ``RUN@best``, ``RUN@STEP``, an exported backbone.pt, ``timm:NAME``,
    ``torchvision:NAME``, or your own class or function ``package.module:Class``.
    """
    weights: str | None = setting(None, path=True)
    """Weights of ``timm:`` and ``torchvision:`` models, which must be given: a file, ``pretrained``
    to download the library's weights, or ``none`` for random ones. For your own class: a file, or
    null for the weights with which it is built. null for a run or an export, which has its own.
    """
    args: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of your own class or function."""
    trust: bool = False
    """Whether code named in the files of a run or an export may be imported."""

    @classmethod
    def of(cls, value: str | FrozenModule) -> FrozenModule:
        """Return a config value as a section; a string becomes its ``model``."""
        return cls(model=value) if isinstance(value, str) else value

    @property
    def library(self) -> str | None:
        """``timm`` or ``torchvision`` if the model is one of theirs, else None."""
        return split_address(self.model)[0] or None

    @property
    def is_code(self) -> bool:
        """True for ``package.module:Class``."""
        return self.library is None and is_code(self.model)

    def problems(self, key: str) -> Iterator[str]:
        """Yield a text ``KEY.weights: ...`` for each problem of the module at this key."""
        if self.library and self.weights is None:
            yield (
                f"{key}.weights: {self.model} needs a file of weights, 'pretrained' to fetch the "
                "library's own, or 'none' for random ones"
            )
        if not self.library and not self.is_code and self.weights is not None:
            yield f"{key}.weights: is for timm:NAME and torchvision:NAME; {self.model} has its own"
        if self.args and not self.is_code:
            yield f"{key}.args: is for package.module:Class; {self.model} takes none"


def is_code(text: str) -> bool:
    """Return whether a text is an address of code, ``package.module:name``."""
    return re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", text) is not None
