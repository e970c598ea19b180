"""Text that comes with every Python: the topics of `help()`, split into a part to train on and one to judge by."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import numpy as np

VOCABULARY = 128
_OTHER = 127  # stands for every character that is not ASCII
# Most topics repeat parts of others; these have hardly a line in common with the rest.
_HELD_OUT = ("calls", "debugger", "import", "objects", "strings", "typesmapping")


def topics(*, held_out: bool) -> str:
    """The texts of all topics of one part, in alphabetical order.

    >>> len(topics(held_out=True)) > 20_000
    True
    """
    from pydoc_data.topics import topics as found

    mine = [name for name in sorted(found) if (name in _HELD_OUT) == held_out]
    return "\n\n".join(found[name] for name in mine)


def library() -> str:
    """The modules of the standard library, a far larger text of the same kind to train on."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return "\n\n".join(file.read_text("utf-8", "replace") for file in files)


def encode(text: str) -> np.ndarray:
    """One token per character.

    >>> encode("a é").tolist()
    [97, 32, 127]
    """
    return np.array([code if (code := ord(c)) < _OTHER else _OTHER for c in text], np.int32)


def decode(tokens: object) -> str:
    """The text of tokens.

    >>> decode([97, 98])
    'ab'
    """
    return "".join(chr(token) if token < _OTHER else "�" for token in np.asarray(tokens).tolist())


def windows(tokens: np.ndarray, length: int, count: int) -> np.ndarray:
    """`count` pieces of `length + 1` tokens, spread over the text: inputs and, one further, what follows them."""
    starts = np.linspace(0, len(tokens) - length - 1, count).astype(int)
    return np.stack([tokens[start : start + length + 1] for start in starts])
