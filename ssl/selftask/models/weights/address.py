"""Addresses of models and files of weights, checked without importing torch."""

from __future__ import annotations

from pathlib import Path

from selftask.checkpoint.kept import named_checkpoint
from selftask.config.library_names import check_name, split_address
from selftask.errors import UserError, close_path, join_some, nearest_path
from selftask.files.addresses import fetch, is_remote
from selftask.files.paths import exists, expand_user, is_file, is_folder, names_in

PRETRAINED = "pretrained"
NONE = "none"


def check_model(address: str, weights: str | None = None) -> None:
    """Raise UserError if there is no model at an address, or ``weights`` do not exist or apply.

    The existence of a remote ``address`` is not checked. A remote file of ``weights`` is
    downloaded.

    Args:
        address: As in ``open_model``.
        weights: ``pretrained``, ``none`` (random), or a file for a library's model. None:
            ``pretrained``. For a file or run, which has its own weights, only ``pretrained`` and
            None are accepted.
    """
    library, name = split_address(address)
    if library:
        check_name(library, name)
        if weights not in (None, PRETRAINED, NONE):
            _check_file(weights)
    elif weights not in (None, PRETRAINED):
        raise UserError(
            f"weights={weights}: is for timm:NAME and torchvision:NAME; {address} has its own"
        )
    elif not (
        is_remote(address) or exists(path := expand_user(address)) or named_checkpoint(address)
    ):
        raise no_model(path)


def _check_file(weights: str) -> None:
    try:
        if not is_folder(path := fetch(weights)):  # a folder may be a sharded checkpoint
            existing_file(path)
    except UserError as error:
        raise UserError(f"weights={error}") from error


def no_model(path: Path) -> UserError:
    """Return the error for a missing model, with the nearest path or the accepted addresses."""
    close = close_path(path)
    hint = "a model is a run's folder, a file, timm:NAME or torchvision:NAME"
    if close is not None:
        hint = f"did you mean {str(close)!r}?"
    return UserError(f"{path}: there is no such file or run; {hint}")


def existing_file(path: str | Path) -> Path:
    """Return the local copy of a file of weights.

    Raises:
        UserError: If the file is missing or empty, or is a folder.
    """
    file = fetch(path)
    if is_folder(file):
        raise UserError(
            f"{file}: there is no such file, it is a folder with {join_some(names_in(file))}"
        )
    if not is_file(file):
        raise UserError(f"{file}: there is no such file; {nearest_path(file)}")
    if file.stat().st_size == 0:
        raise UserError(f"{file}: the file is empty (0 bytes), so writing it was cut short")
    return file
