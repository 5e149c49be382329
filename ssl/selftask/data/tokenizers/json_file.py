"""Vocabularies of Hugging Face's tokenizers library."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from selftask.config.fields import setting
from selftask.data.tokenizers.base import Tokenizer
from selftask.errors import UserError, explained, nearest_path, require
from selftask.files.paths import expand_user, is_file
from selftask.registry import register_tokenizer


@register_tokenizer("file")
class TokenizerFile(Tokenizer):
    """A ``tokenizer.json`` of Hugging Face's tokenizers, such as that of a published CLIP.

    Ids are the file's ids plus one, since 0 is padding here. Start and end tokens are added if the
    file's post-processor adds them.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config:
        path: str
        """Path of the ``tokenizer.json`` file."""
        length: int = setting(77, min=3)
        """Number of tokens of a text, including start and end; longer texts are truncated."""

    def __init__(self, config: Config) -> None:
        require("tokenizers", "text", "files of tokenizers", key="data.tokenizer")
        from tokenizers import Tokenizer as Library

        file = expand_user(config.path)
        if not is_file(file):
            raise UserError(f"data.tokenizer.path: no such file: {file}; {nearest_path(file)}")
        content = file.read_bytes()
        with explained(f"data.tokenizer.path: {file} is no tokenizer.json"):
            self.library = Library.from_buffer(content)
        self.library.no_padding()
        self.library.enable_truncation(config.length)
        self.length = config.length
        self.vocab_size = self.library.get_vocab_size() + 1
        self.digest = hashlib.sha256(content).hexdigest()[:16]

    def encode(self, text: str) -> list[int]:
        return [number + 1 for number in self.library.encode(text).ids]

    def describe(self) -> str:
        return f"tokenizer.json {self.digest}, {self.length} tokens"
