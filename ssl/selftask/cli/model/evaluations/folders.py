"""Parse ``data=DIR`` and ``data.val=DIR`` for folders of images with masks or depth maps."""

from __future__ import annotations

from selftask.cli.options import take
from selftask.errors import UserError


def take_folders(words: list[str], second: str, example: str) -> tuple[dict[str, str], list[str]]:
    """Return the folders of ``data`` and ``data.val`` by key, and words that open their images.

    Args:
        words: ``key=value`` words of the command.
        second: Name of the second folder, next to ``images``.
        example: Name of a file in the second folder, for messages.

    Raises:
        UserError: If a folder is not given, or lacks images or ``second``.
    """
    from selftask.evaluate.dense.masks import folder_problem, images_in

    roots: dict[str, str] = {}
    for key in ("data", "data.val"):
        root, words = take(key, words)
        if root is None:
            raise UserError(f"{key} is missing: give a folder with images and {second}, {key}=DIR")
        if problem := folder_problem(root, second, example):
            raise UserError(f"{key}: {problem}")
        roots[key] = root
        words = [
            *words,
            *(f"{key}.name=folder", f"{key}.path={images_in(root)}", f"{key}.labels=false"),
        ]
    return roots, words
