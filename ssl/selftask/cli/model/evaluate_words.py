"""The ``key=value`` words that commands of ``selftask eval`` accept."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from selftask.errors import UserError, nearest

SECTIONS = ("data", "eval", "image_size", "import", "train")  # train: device, seed, threads
OTHERS = ("weights", "prefix", "trust")


def check_words(name: str, words: Iterable[str], keys: Collection[str]) -> None:
    """Raise UserError for a word that has no effect, such as a setting of the optimizer.

    Args:
        name: Name of the evaluation, for the message.
        words: ``key=value`` words.
        keys: Keys of the evaluation itself.
    """
    short = {*keys, *OTHERS}
    for key in sorted({word.partition("=")[0] for word in words} - short):
        if key.partition(".")[0] not in SECTIONS:
            raise UserError(
                f"eval {name}: there is no {key!r}; {nearest(key, {*short, *SECTIONS})}"
            )
