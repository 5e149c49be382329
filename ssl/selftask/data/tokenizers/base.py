"""The contract of tokenizers."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from selftask.config.schema import Component
from selftask.registry import TOKENIZERS

PADDING = 0  # id after the last token


class Tokenizer(ABC):
    """Base class of tokenizers, which convert a text to ``length`` ids, the same in every process.

    The fields of the nested dataclass ``Config`` are the keys of ``data.tokenizer``.
    ``__init__(config)`` raises UserError for errors that the user must fix.
    """

    length: int
    """Number of ids per text: longer texts are truncated, shorter ones padded."""
    vocab_size: int
    """Number of different ids, including 0 for padding; all ids must be below it."""

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, at most ``length`` of them, none of them 0."""

    @abstractmethod
    def describe(self) -> str:
        """Return a text that identifies the tokenizer and its vocabulary; stored in checkpoints."""

    def __call__(self, text: str) -> np.ndarray:
        """Return the token ids of a text, int64 (length,), padded with 0."""
        ids = np.full(self.length, PADDING, dtype=np.int64)
        tokens = self.encode(text)
        ids[: len(tokens)] = tokens
        return ids


def build_tokenizer(component: Component) -> Tokenizer:
    """Build the tokenizer that ``data.tokenizer`` configures; raises UserError."""
    kind = TOKENIZERS[component.name]
    return kind(kind.Config(**component.args))
