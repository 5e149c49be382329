"""Evaluation of frozen features, during and after a run: k-NN, linear probe, SVM, retrieval.

The package can be called as a function of the Python API: ``selftask.evaluate("runs/a", "knn")``.
"""

import sys
from types import ModuleType
from typing import Any

import selftask


class _CallablePackage(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Call ``selftask.api.evaluation.evaluate``, and return its metrics by name."""
        return selftask.__getattr__("evaluate")(*args, **kwargs)


sys.modules[__name__].__class__ = _CallablePackage
