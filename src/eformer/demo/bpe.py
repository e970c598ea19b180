"""Byte-level byte-pair encoding, with the vocabulary and the merges of a GGUF file."""

from __future__ import annotations

import functools
import itertools
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from eformer.errors import CheckpointError

_CONTROL, _USER = 3, 4  # kinds of tokens that stand for themselves in a text
_ENDINGS = ("'s", "'t", "'re", "'ve", "'m", "'ll", "'d")
# Over classes of characters: L letter, N number, S space, W other white space, O anything else.
_PIECE = re.compile(r"S?L+|S?N+|S?O+|[SW]+(?![LNO])|[SW]+")
_SINGLE_DIGITS = ("smollm", "starcoder", "refact", "command-r")


def _alphabet() -> dict[int, str]:
    """A visible character for every byte: itself where it has one, else one from U+0100 on."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in visible]
    return {**{b: chr(b) for b in visible}, **{b: chr(256 + i) for i, b in enumerate(others)}}


_TO_TEXT = _alphabet()
_TO_BYTE = {char: byte for byte, char in _TO_TEXT.items()}


class BytePairTokenizer:
    """Text to tokens and back.

    >>> tokens = {"a": 0, "b": 1, "ab": 2, "Ġ": 3, "Ġab": 4}
    >>> tokenizer = BytePairTokenizer(tokens, ["a b", "Ġ ab"])
    >>> tokenizer.encode("ab ab b").tolist()
    [2, 4, 3, 1]
    >>> tokenizer.decode([2, 4, 3, 1])
    'ab ab b'
    """

    def __init__(
        self,
        tokens: Mapping[str, int],
        merges: Iterable[str],
        *,
        special: Iterable[str] = (),
        single_digits: bool = False,
    ):
        self._ids = dict(tokens)
        self._names = {number: token for token, number in tokens.items()}
        self._ranks = {tuple(merge.split(" ", 1)): rank for rank, merge in enumerate(merges)}
        self._single_digits = single_digits
        names = sorted(special, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, names))) if names else None
        self.word = functools.lru_cache(65536)(self._word)

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> BytePairTokenizer:
        """The tokenizer a GGUF file describes."""
        kind = metadata.get("tokenizer.ggml.model")
        if kind != "gpt2":
            raise CheckpointError(f"has a tokenizer of the kind {kind!r}; only 'gpt2' (byte-level BPE) is read here.")
        tokens, kinds = metadata["tokenizer.ggml.tokens"], metadata.get("tokenizer.ggml.token_type", ())
        special = [token for token, kind in zip(tokens, kinds, strict=False) if kind in (_CONTROL, _USER)]
        return cls(
            {token: number for number, token in enumerate(tokens)},
            metadata["tokenizer.ggml.merges"],
            special=special,
            single_digits=metadata.get("tokenizer.ggml.pre") in _SINGLE_DIGITS,
        )

    def encode(self, text: str) -> np.ndarray:
        """Tokens of a text; names of special tokens in it become these tokens."""
        found: list[int] = []
        for piece, is_special in self._split(text):
            found += [self._ids[piece]] if is_special else [n for w in self._words(piece) for n in self.word(w)]
        return np.array(found, np.int32)

    def decode(self, tokens: Sequence[int] | np.ndarray) -> str:
        """The text of tokens; bytes that are no text, as at the end of a cut one, are shown as U+FFFD."""
        raw = b"".join(self._bytes(self._names[int(number)]) for number in tokens)
        return raw.decode("utf-8", "replace")

    def _bytes(self, token: str) -> bytes:
        if all(char in _TO_BYTE for char in token):
            return bytes(_TO_BYTE[char] for char in token)
        return token.encode()

    def _split(self, text: str) -> Iterator[tuple[str, bool]]:
        place = 0
        for match in self._special.finditer(text) if self._special else ():
            yield text[place : match.start()], False
            yield match.group(), True
            place = match.end()
        yield text[place:], False

    def _words(self, text: str) -> Iterator[str]:
        """The pieces that merges do not cross: words and their leading space, numbers, punctuation, white space."""
        for begin, end in self._runs(text):
            piece, classes = text[begin:end], "".join(map(_class, text[begin:end]))
            place = 0
            while place < len(piece):
                ending = next((e for e in _ENDINGS if piece.startswith(e, place)), "")
                # Every character has a class that the pattern knows, so it always matches.
                stop = place + len(ending) if ending else _PIECE.match(classes, place).end()  # pyright: ignore[reportOptionalMemberAccess]
                yield piece[place:stop]
                place = stop

    def _runs(self, text: str) -> Iterator[tuple[int, int]]:
        """The text, with every digit on its own if the tokenizer wants that."""
        place = 0
        if self._single_digits:
            for number, char in enumerate(text):
                if _class(char) == "N":
                    yield place, number
                    yield number, number + 1
                    place = number + 1
        yield place, len(text)

    def _word(self, word: str) -> tuple[int, ...]:
        parts = [_TO_TEXT[byte] for byte in word.encode("utf-8", "surrogatepass")]
        while len(parts) > 1:
            pairs = [self._ranks.get(pair, len(self._ranks)) for pair in itertools.pairwise(parts)]
            best = min(pairs)
            if best == len(self._ranks):
                break
            place = pairs.index(best)
            parts[place : place + 2] = [parts[place] + parts[place + 1]]
        missing = [part for part in parts if part not in self._ids]
        if missing:
            raise CheckpointError(f"has no token for {missing[0]!r}, which {word!r} needs.")
        return tuple(self._ids[part] for part in parts)


@functools.lru_cache(4096)
def _class(char: str) -> str:
    if char == " ":
        return "S"
    if char.isspace():
        return "W"
    kind = unicodedata.category(char)[0]
    return kind if kind in "LN" else "O"
