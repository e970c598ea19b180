"""What the processes of one program tell each other while they save and load: a word each, within a time limit."""

from __future__ import annotations

import collections
import hashlib
import itertools
import json
from collections.abc import Iterator
from typing import Any

import jax

from eformer import _jax as compat
from eformer.errors import ProcessError

# Words stay with the service until the program ends, so every exchange has a number. The order is the program's own.
_numbers: dict[str, Iterator[int]] = collections.defaultdict(itertools.count)


def exchange(what: str, word: str, timeout: float) -> list[str]:
    """What every process sent, in order. Raises if one has sent nothing after `timeout` seconds.

    >>> exchange("greet", "hello", timeout=1)
    ['hello']
    """
    count, me = jax.process_count(), jax.process_index()
    if count == 1:
        return [word]
    client = compat.distributed_client()
    if client is None:
        raise ProcessError(f"there are {count} processes, but no service joins them: call jax.distributed.initialize.")
    key = f"eformer/{what}/{next(_numbers[what])}"
    client.key_value_set(f"{key}/{me}", word)
    return [_word(client, f"{key}/{i}", what, i, timeout) for i in range(count)]


def _word(client: object, key: str, what: str, process: int, timeout: float) -> str:
    try:
        return client.blocking_key_value_get(key, int(1000 * timeout))  # pyright: ignore[reportAttributeAccessIssue]
    except jax.errors.JaxRuntimeError as err:
        raise ProcessError(
            f"process {process} of {jax.process_count()} did not come to {what!r} within {timeout:g} seconds: it has "
            "ended, is stuck, or runs another program. See its own output; raise timeout= if it is only slow."
        ) from err


def digest(value: Any) -> str:
    """A short word that tells plain data from other data."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]


def agree(what: str, words: list[str]) -> None:
    """Raise unless all processes sent the same."""
    for process, word in enumerate(words):
        if word != words[0]:
            raise ProcessError(f"{what} differ: process 0 has {words[0]:.300}, process {process} has {word:.300}.")
