"""Bytes as tokens: needs no vocabulary file and covers every language."""

from __future__ import annotations

from dataclasses import dataclass

from selftask.config.fields import setting
from selftask.data.tokenizers.base import Tokenizer
from selftask.registry import register_tokenizer

NUM_BYTES = 256
START, END = NUM_BYTES + 1, NUM_BYTES + 2  # 0 is padding, 1 + b the byte b


@register_tokenizer("bytes")
class Bytes(Tokenizer):
    """UTF-8 bytes of a text between a start and an end token (default)."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        length: int = setting(77, min=3)
        """Number of tokens of a text, including start and end; longer texts are truncated before
        the end token."""
        lower: bool = True
        """Whether texts are converted to lower case, as in CLIP."""

    vocab_size = END + 1

    def __init__(self, config: Config) -> None:
        self.length = config.length
        self.lower = config.lower

    def encode(self, text: str) -> list[int]:
        """Return start token, bytes and end token.

        Runs of white space become one space, and white space at both ends is removed.
        """
        clean = " ".join((text.lower() if self.lower else text).split())
        content = clean.encode("utf-8", "surrogateescape")[: self.length - 2]
        return [START, *(byte + 1 for byte in content), END]

    def describe(self) -> str:
        return f"bytes, {'lower case, ' if self.lower else ''}{self.length} tokens"
