"""Text to tokens and back, by the package `tokenizers` (the extra `models`), which is imported when it is needed."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from eformer.errors import CheckpointError

_CONTROL, _USER = 3, 4  # kinds of tokens in GGUF files that a text may name
_SINGLE_DIGITS = ("smollm", "starcoder", "refact", "command-r")


class Tokenizer:
    """A tokenizer of the package, with the two functions that models need."""

    def __init__(self, inner: Any, missing: frozenset[str] = frozenset()):
        self._inner, self._missing = inner, missing

    @classmethod
    def byte_pairs(
        cls,
        tokens: Mapping[str, int],
        merges: Iterable[str],
        *,
        special: Sequence[str] = (),
        single_digits: bool = False,
    ) -> Tokenizer:
        """Byte-level byte-pair encoding, from a vocabulary and its merges.

        >>> tokens = {"a": 0, "b": 1, "ab": 2, "Ġ": 3, "Ġab": 4}
        >>> tokenizer = Tokenizer.byte_pairs(tokens, ["a b", "Ġ ab"])
        >>> tokenizer.encode("ab ab b").tolist()
        [2, 4, 3, 1]
        >>> tokenizer.decode([2, 4, 3, 1])
        'ab ab b'
        """
        lib = _library()
        pairs = [(first, second) for first, _, second in (merge.partition(" ") for merge in merges)]
        unknown = [token for a, b in pairs for token in (a, b, a + b) if token not in tokens]
        if unknown:
            raise CheckpointError(f"has a merge with {unknown[0]!r}, which is not in its vocabulary.")
        inner = lib.Tokenizer(lib.models.BPE(vocab=dict(tokens), merges=pairs))
        split = lib.pre_tokenizers.ByteLevel(add_prefix_space=False)
        digits = [lib.pre_tokenizers.Digits(individual_digits=True)] if single_digits else []
        inner.pre_tokenizer = lib.pre_tokenizers.Sequence([*digits, split])
        inner.decoder = lib.decoders.ByteLevel()
        inner.add_special_tokens([lib.AddedToken(name, normalized=False, special=True) for name in special])
        return cls(inner, frozenset(lib.pre_tokenizers.ByteLevel.alphabet()) - tokens.keys())

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """The tokenizer that a GGUF file describes."""
        kind = metadata.get("tokenizer.ggml.model")
        if kind != "gpt2":
            raise CheckpointError(f"has a tokenizer of the kind {kind!r}; only 'gpt2' (byte-level BPE) is read here.")
        tokens, kinds = metadata["tokenizer.ggml.tokens"], metadata.get("tokenizer.ggml.token_type", ())
        return cls.byte_pairs(
            {token: number for number, token in enumerate(tokens)},
            metadata["tokenizer.ggml.merges"],
            special=[token for token, kind in zip(tokens, kinds, strict=False) if kind in (_CONTROL, _USER)],
            single_digits=metadata.get("tokenizer.ggml.pre") in _SINGLE_DIGITS,
        )

    @classmethod
    def from_file(cls, path: str | os.PathLike[str], longest: int | None = None) -> Tokenizer:
        """The tokenizer of a tokenizer.json; texts are cut to `longest` tokens."""
        lib = _library()
        try:
            inner = lib.Tokenizer.from_file(os.fspath(path))
        except Exception as err:  # the package has no kind of its own
            raise CheckpointError(f"is not a tokenizer: {err}.", file=path, fix="Fetch it again.") from err
        inner.no_padding()
        inner.no_truncation() if longest is None else inner.enable_truncation(longest)
        return cls(inner)

    def encode(self, text: str, *, bare: bool = False) -> np.ndarray:
        """Tokens of a text; names of special tokens in it become these tokens. `bare` adds none at its beginning."""
        text = text.encode("utf-8", "replace").decode()  # what was not text on the command line becomes "?"
        if self._missing:
            self._check(text)
        return np.array(self._inner.encode(text, add_special_tokens=not bare).ids, np.int32)

    def decode(self, tokens: Sequence[int] | np.ndarray) -> str:
        """The text of tokens; bytes that are not valid UTF-8, as at a cut, become U+FFFD."""
        return self._inner.decode([int(token) for token in tokens], skip_special_tokens=False)

    def token(self, name: str) -> int | None:
        """The number of a token."""
        return self._inner.token_to_id(name)

    def _check(self, text: str) -> None:
        """The package would drop bytes that the vocabulary has no token for."""
        special = [re.escape(token.content) for token in self._inner.get_added_tokens_decoder().values()]
        plain = re.sub("|".join(special), "", text) if special else text
        written = _library().pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(plain)
        lost = [char for piece, _ in written for char in piece if char in self._missing]
        if lost:
            raise CheckpointError(f"has no token for {lost[0]!r}, which {text!r} needs.")


def _library() -> Any:
    try:
        import tokenizers  # pyright: ignore[reportMissingImports]
        import tokenizers.decoders  # pyright: ignore[reportMissingImports]
        import tokenizers.models  # pyright: ignore[reportMissingImports]
        import tokenizers.pre_tokenizers  # pyright: ignore[reportMissingImports]
    except ImportError as err:
        raise ImportError(
            "Tokenizers are read by the package `tokenizers`, which is not installed: pip install 'eformer[models]'."
        ) from err
    return tokenizers
