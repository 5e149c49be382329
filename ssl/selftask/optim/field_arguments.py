"""Base class of optimizer configs whose fields are the arguments of a torch optimizer."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, ClassVar


class FieldArguments:
    """Base class of dataclasses whose fields are the arguments of an optimizer."""

    optimizer: ClassVar[Any]
    """Optimizer class with torch's interface, called with parameter groups and fields."""
    options: ClassVar[dict[str, Any]] = {}
    """Arguments of the optimizer that are not fields."""

    def build(self, groups: list[dict[str, Any]]) -> Any:
        """Return the optimizer; a field ``sgd_momentum`` is passed as ``momentum``."""
        arguments: Any = {f.name.removeprefix("sgd_"): getattr(self, f.name) for f in fields(self)}  # type: ignore[arg-type]
        return self.optimizer(groups, **self.options, **arguments)
