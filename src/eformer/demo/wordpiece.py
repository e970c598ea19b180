"""WordPiece, as BERT has it: text without case and accents, cut into the longest pieces of a vocabulary."""

from __future__ import annotations

import json
import os
import unicodedata
from collections.abc import Iterator, Mapping
from pathlib import Path

from eformer.errors import CheckpointError

_LONGEST = 100  # characters of a word; longer ones are unknown
_IDEOGRAPHS = ((0x4E00, 0x9FFF), (0x3400, 0x4DBF), (0xF900, 0xFAFF), (0x20000, 0x2CEAF), (0x2F800, 0x2FA1F))


class WordPieceTokenizer:
    """Text to tokens.

    >>> tokenizer = WordPieceTokenizer({"[UNK]": 0, "[CLS]": 1, "[SEP]": 2, "quant": 3, "##ized": 4, "!": 5})
    >>> tokenizer.encode("Quantized!")
    [1, 3, 4, 5, 2]
    """

    def __init__(self, vocabulary: Mapping[str, int]):
        missing = [name for name in ("[UNK]", "[CLS]", "[SEP]") if name not in vocabulary]
        if missing:
            raise CheckpointError(f"has no token {missing[0]} in its vocabulary.")
        self._ids = dict(vocabulary)

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> WordPieceTokenizer:
        """From a tokenizer.json, or from a vocab.txt with a token per line."""
        text = Path(path).read_text("utf-8")
        if Path(path).suffix != ".json":
            return cls({token: number for number, token in enumerate(text.splitlines())})
        model = json.loads(text).get("model", {})
        if not isinstance(model.get("vocab"), dict) or model.get("type", "WordPiece") != "WordPiece":
            raise CheckpointError("describes no WordPiece tokenizer.", file=path)
        return cls(model["vocab"])

    def encode(self, text: str, longest: int = 256) -> list[int]:
        """Tokens of a text between [CLS] and [SEP], cut to `longest`."""
        found = [number for word in _words(text) for number in self._pieces(word)]
        return [self._ids["[CLS]"], *found[: longest - 2], self._ids["[SEP]"]]

    def _pieces(self, word: str) -> list[int]:
        found: list[int] = []
        begin = 0
        while begin < len(word) and len(word) <= _LONGEST:
            mark = "##" if begin else ""
            ends = range(len(word), begin, -1)
            end = next((end for end in ends if mark + word[begin:end] in self._ids), None)
            if end is None:
                return [self._ids["[UNK]"]]
            found.append(self._ids[mark + word[begin:end]])
            begin = end
        return found or [self._ids["[UNK]"]]


def _words(text: str) -> Iterator[str]:
    """Words in lower case without accents; punctuation marks and ideographs are words of their own."""
    plain = unicodedata.normalize("NFD", "".join(map(_cleaned, text)))
    plain = "".join(char for char in plain if unicodedata.category(char) != "Mn").lower()
    for run in plain.split():
        word = ""
        for char in run:
            if _is_punctuation(char):
                yield from filter(None, (word, char))
                word = ""
            else:
                word += char
        if word:
            yield word


def _cleaned(char: str) -> str:
    if char in "\t\n\r" or char.isspace():
        return " "
    if char in "\x00�" or unicodedata.category(char) in ("Cc", "Cf", "Co", "Cs"):
        return ""
    return f" {char} " if any(low <= ord(char) <= high for low, high in _IDEOGRAPHS) else char


def _is_punctuation(char: str) -> bool:
    return char in "$+<=>^`|~" or unicodedata.category(char).startswith("P")
