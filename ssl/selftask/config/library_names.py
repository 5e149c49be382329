"""Names of the models of timm and torchvision, without importing them or torch."""

from __future__ import annotations

import importlib.util
import re
import sys
from functools import cache
from pathlib import Path

from selftask.errors import check_known

LIBRARIES = ("timm", "torchvision")

_REGISTERED = re.compile(r"^@register_model\b.*\n(?:[@ )].*\n)*?def (\w+)\(", re.MULTILINE)
_DEPRECATED = re.compile(
    r"^register_model_deprecations\(__name__, \{(.*?)^\}\)", re.MULTILINE | re.DOTALL
)
_KEY = re.compile(r"""['"](\w+)['"]\s*:""")


def split_address(address: str) -> tuple[str, str]:
    """Split ``timm:NAME`` into ("timm", NAME), and a path into ("", path)."""
    library, colon, name = address.partition(":")
    return (library, name) if colon and library in LIBRARIES else ("", address)


def check_name(library: str, model: str) -> None:
    """Raise UserError, with the nearest name, if the library has no such model.

    A tag of timm's weights, as in ``resnet50.a1_in1k``, is not checked.
    """
    names = _imported_names(library) if f"{library}.models" in sys.modules else _read_names(library)
    architecture = model.partition(".")[0] if library == "timm" else model  # NAME.TAG: weights
    check_known(architecture, names, f"{library} has no model named {model!r}")


def _imported_names(library: str) -> set[str]:
    """Return the model names of the imported library, including those that users registered."""
    if library == "timm":
        from timm.models import _registry

        return set(_registry._model_entrypoints)
    import torchvision

    return set(torchvision.models.list_models(module=torchvision.models))


@cache
def _read_names(library: str) -> set[str]:
    """Return the model names in the library's source; import it only if none are found there."""
    spec = importlib.util.find_spec(library)
    origin = spec.origin if spec is not None else None
    names: set[str] = set()
    for path in Path(origin).parent.glob("models/*.py") if origin else ():
        text = path.read_text(encoding="utf-8")
        names.update(_REGISTERED.findall(text))
        for renamed in _DEPRECATED.findall(text):
            names.update(_KEY.findall(renamed))
    return names or _imported_names(library)  # installed without source, as in a zip file
