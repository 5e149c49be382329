"""Captions become ids: bytes, or a vocabulary of the tokenizers library."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from clips import Clips, config

from selftask.data.data_module import DataModule
from selftask.data.fingerprint import differences
from selftask.data.loading.open_data import Sources
from selftask.data.tokenizers.byte_level import Bytes
from selftask.distributed.world import World
from selftask.errors import UserError
from selftask.registry import TOKENIZERS


def test_bytes_are_cut_and_cleaned() -> None:
    encode = Bytes(Bytes.Config(length=6)).encode
    assert encode("  AB\n c ") == [257, 98, 99, 33, 100, 258]
    assert encode("Äbcdef") == [257, 0xC3 + 1, 0xA4 + 1, 99, 100, 258]
    assert Bytes(Bytes.Config(length=6, lower=False)).encode("AB") == [257, 66, 67, 258]


def test_a_vocabulary_of_the_tokenizers_library(tmp_path: Path) -> None:
    library = pytest.importorskip("tokenizers")
    words = {"[start]": 0, "[end]": 1, "[unk]": 2, "a": 3, "barn": 4, "red": 5}
    made = library.Tokenizer(library.models.WordLevel(words, unk_token="[unk]"))
    made.pre_tokenizer = library.pre_tokenizers.Whitespace()
    ends = [("[start]", 0), ("[end]", 1)]
    made.post_processor = library.processors.TemplateProcessing("[start] $A [end]", None, ends)
    file = tmp_path / "tokenizer.json"
    made.save(str(file))
    cls = TOKENIZERS["file"]
    tokenizer = cls(cls.Config(path=str(file), length=5))
    assert tokenizer.vocab_size == 7
    assert tokenizer("a red barn").tolist() == [1, 4, 6, 5, 2]  # ids plus one: 0 is padding
    assert tokenizer("a red red red barn").tolist() == [1, 4, 6, 6, 2]
    assert tokenizer("blue").tolist() == [1, 3, 2, 0, 0]
    file.write_text("{}")
    with pytest.raises(UserError, match=r"data\.tokenizer\.path: .* is no tokenizer\.json"):
        cls(cls.Config(path=str(file)))
    with pytest.raises(UserError, match=r"data\.tokenizer\.path: no such file"):
        cls(cls.Config(path=str(tmp_path / "tokenizers.json")))


def test_another_vocabulary_is_told_on_resume() -> None:
    short, long = (config(Path(), f"data.tokenizer.length={length}") for length in (9, 10))
    known = [
        DataModule(loaded, Sources(Clips(), None), World(), torch.device("cpu")).fingerprint
        for loaded in (short, long)
    ]
    (difference,) = differences(*known)
    assert difference == (
        "tokens: bytes, lower case, 9 tokens before, bytes, lower case, 10 tokens now"
    )
