"""Text from a model: a key-value cache that is kept from call to call, a few tokens per program run, and dice."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eformer._core import implicit

from ._decoder import Cache, Config, Params, decode, logits_of, make_cache, states

CHUNK = 16  # tokens per program run: few enough to watch, enough for the cost of a run not to matter
_PROMPT = 32  # tokens of a prompt per run, whatever its length, so that one program is compiled
_ROOM = 128  # the room of a cache is a power of two, at least this


@dataclasses.dataclass(frozen=True)
class Model:
    """A model, what turns text into its tokens (as `Tokenizer` does), and the tokens that end a text.

    `folder` is where it came from, `defaults` what its `generation_config.json` says, `template` puts a conversation
    into words, and `special` are the tokens that it names.
    """

    config: Config
    params: Params
    tokenizer: Any = None
    end: int | Sequence[int] | None = None
    folder: Path | None = None
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    template: str | None = None
    special: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def ends(self) -> tuple[int, ...]:
        return () if self.end is None else tuple(int(token) for token in np.atleast_1d(self.end))


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How the next token is chosen. Temperature 0 takes the likeliest, others roll dice.

    `top_k` keeps the k likeliest tokens (0: all), `top_p` the fewest whose probabilities sum to p, `min_p` those that
    are at least p times as likely as the likeliest. `repetition_penalty` divides positive logits of tokens that were
    there before, and multiplies negative ones.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        allowed = {
            "temperature": (self.temperature >= 0, "0 or more"),
            "top_k": (self.top_k >= 0, "0 (all tokens) or more"),
            "top_p": (0 < self.top_p <= 1, "more than 0 and at most 1"),
            "min_p": (0 <= self.min_p < 1, "at least 0 and less than 1"),
            "repetition_penalty": (self.repetition_penalty > 0, "more than 0"),
        }
        for name, (fits, words) in allowed.items():
            if not fits:
                raise ValueError(f"{name}={getattr(self, name)!r} is not allowed; give {words}.")

    @property
    def numbers(self) -> dict[str, jax.Array]:
        """What `steps` takes; other numbers need no other program."""
        names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
        return {name: jnp.asarray(getattr(self, name)) for name in names}

    @property
    def sorts(self) -> bool:
        """Whether tokens must be put in order, which takes time."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1)

    @classmethod
    def of(cls, defaults: Mapping[str, Any], **asked: Any) -> Sampling:
        """What is asked for, and for what is None, what `generation_config.json` says."""
        names = [field.name for field in dataclasses.fields(cls)]
        said = {name: defaults[name] for name in names if defaults.get(name) is not None}
        if not defaults.get("do_sample"):
            said = {k: v for k, v in said.items() if k == "repetition_penalty"}
        elif "temperature" not in said:
            said["temperature"] = 1.0
        return cls(**{**said, **{name: value for name, value in asked.items() if value is not None}})


def chosen(logits: jax.Array, seen: jax.Array, key: jax.Array, numbers: Mapping[str, jax.Array], sorts: bool) -> Any:
    """The next token, given logits (vocabulary,) and which tokens were there before."""
    penalty, heat = numbers["repetition_penalty"], numbers["temperature"]
    logits = jnp.where(seen, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)
    likeliest = jnp.argmax(logits)
    logits = logits / jnp.where(heat > 0, heat, 1.0)
    if sorts:
        ordered = jnp.sort(logits)[::-1]
        top_k = jnp.where(numbers["top_k"] > 0, numbers["top_k"], logits.size)
        ordered = jnp.where(jnp.arange(logits.size) < top_k, ordered, -jnp.inf)
        odds = jax.nn.softmax(ordered)
        kept = jnp.sum(jnp.cumsum(odds) - odds < numbers["top_p"])  # the likeliest is always among them
        logits = jnp.where(logits >= ordered[jnp.minimum(kept, top_k) - 1], logits, -jnp.inf)
    logits = jnp.where(logits >= logits.max() + jnp.log(numbers["min_p"]), logits, -jnp.inf)
    return jnp.where(heat > 0, jax.random.categorical(key, logits), likeliest)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=3)
def _read(config: Config, params: Params, tokens: jax.Array, cache: Any, start: Any, last: Any) -> tuple[Any, Cache]:
    """Fill in the cache; the logits after the token number `last` of these. No logits are made of the others."""
    x, cache = states(config, params, tokens, cache, start)
    return logits_of(config, params, x[0, last]).astype(jnp.float32), cache


@functools.partial(jax.jit, static_argnums=(0, 7, 8), donate_argnums=2)
def steps(
    config: Config, params: Params, cache: Any, state: Any, seen: Any, key: Any, numbers: Any, count: int, sorts: bool
) -> Any:
    """`count` more tokens; `state` is the position and the logits of what comes there."""

    def step(carry: Any, _: None) -> tuple[Any, jax.Array]:
        cache, (place, logits), seen = carry
        token = chosen(logits, seen, jax.random.fold_in(key, place), numbers, sorts)
        logits, cache = decode(config, params, token[None, None], cache, place)
        return (cache, (place + 1, logits[0, 0].astype(jnp.float32)), seen.at[token].set(True)), token

    (cache, state, seen), tokens = jax.lax.scan(step, (cache, state, seen), None, length=count)
    return cache, state, seen, tokens


class Memory:
    """The cache of a conversation: tokens that a new prompt shares with the last one are not read again."""

    def __init__(self, cache: str | None = None) -> None:
        """`cache` is the format of keys and values, as for `make_cache`."""
        self.format = cache
        self.tokens: list[int] = []
        self.cache: Cache | None = None

    @property
    def room(self) -> int:
        """How many tokens the cache holds."""
        return 0 if self.cache is None else jax.tree.leaves(self.cache, is_leaf=_has_shape)[0].shape[-2]

    def read(self, model: Model, prompt: Sequence[int] | np.ndarray, room: int) -> Any:
        """Logits after the prompt, with room for so many more tokens."""
        tokens, config = _numbers(prompt, model.config.vocabulary), model.config
        shared = 0
        while shared < min(len(tokens) - 1, len(self.tokens)) and tokens[shared] == self.tokens[shared]:
            shared += 1
        need = len(tokens) + max(room, _PROMPT)
        if need > self.room:
            size, listed = max(_ROOM, 1 << (need - 1).bit_length()), not isinstance(model.params["layers"], Mapping)
            dtype = model.params["embedding"].dtype
            fresh = make_cache(config, 1, size, dtype, format=self.format, listed=listed)
            self.cache = fresh if self.cache is None else self._moved(self.cache, fresh)
        self.tokens, logits = tokens, None
        for start in range(shared, len(tokens), _PROMPT):
            piece = tokens[start : start + _PROMPT]
            # What pads the last piece is overwritten before anything attends to it.
            padded = jnp.asarray([piece + [0] * (_PROMPT - len(piece))], jnp.int32)
            at, last = jnp.asarray(start), jnp.asarray(len(piece) - 1)
            logits, self.cache = _read(config, model.params, padded, self.cache, at, last)
        return logits

    @staticmethod
    @implicit
    def _moved(old: Cache, new: Cache) -> Any:
        put = lambda a, b: jax.lax.dynamic_update_slice(b, a, (0,) * a.ndim)  # noqa: E731
        return jax.tree.map(put, old, new, is_leaf=_has_shape)


def _numbers(prompt: Sequence[int] | np.ndarray, vocabulary: int) -> list[int]:
    """The tokens of a prompt; JAX would take the nearest row of the embedding for those that have none."""
    found = np.asarray(prompt)
    if found.ndim != 1 or not np.issubdtype(found.dtype, np.integer):
        raise TypeError(
            f"the prompt is {found.dtype}{list(found.shape)}, but must be a list of whole numbers: the tokens of one "
            "text, as model.tokenizer.encode gives them."
        )
    if found.size and not 0 <= found.min() <= found.max() < vocabulary:
        raise ValueError(
            f"the prompt holds the tokens {found.min()} to {found.max()}; the model has 0 to {vocabulary - 1}. "
            "Was it encoded by the tokenizer of another model?"
        )
    return found.tolist()


def _has_shape(leaf: Any) -> bool:
    return hasattr(leaf, "shape")


def generate(
    model: Model,
    prompt: Sequence[int] | np.ndarray,
    count: int,
    *,
    temperature: float = 0.0,
    seed: int = 0,
    sampling: Sampling | None = None,
    chunk: int = CHUNK,
    memory: Memory | None = None,
    cache: str | None = None,
) -> Iterator[np.ndarray]:
    """Up to `count` tokens that continue the prompt, in pieces of `chunk`; the token that ends a text is left out.

    Args:
        model: what `load` gave.
        prompt: tokens, at least one.
        count: the most tokens to make.
        temperature: 0 takes the likeliest token.
        seed: of the dice.
        sampling: all of it, in place of the two.
        chunk: how many tokens come at a time.
        memory: of an earlier call, whose beginning need not be read again.
        cache: the format of keys and values, as for `make_cache`; None keeps them dense, or as the memory has them.
    """
    if not len(prompt):
        raise ValueError("the prompt is empty; give at least one token.")
    if count < 0 or chunk < 1:
        raise ValueError(f"{count=} and {chunk=} are not allowed; give 0 or more, and at least 1.")
    how = Sampling(temperature, seed=seed) if sampling is None else sampling
    memory = Memory(cache) if memory is None else memory
    if cache is not None and cache != memory.format:
        raise ValueError(f"{cache=} contradicts the memory, which was made with cache={memory.format!r}. Give it once.")
    logits = memory.read(model, prompt, -(-count // chunk) * chunk)
    state, key = (jnp.asarray(len(prompt)), logits), jax.random.key(how.seed)
    seen = jnp.zeros(model.config.vocabulary, bool).at[jnp.asarray(memory.tokens)].set(how.repetition_penalty != 1)
    for done in range(0, count, chunk):
        memory.cache, state, seen, tokens = steps(
            model.config, model.params, memory.cache, state, seen, key, how.numbers, chunk, how.sorts
        )
        piece = np.asarray(tokens)[: count - done]
        ended = np.flatnonzero(np.isin(piece, model.ends))
        piece = piece[: ended[0]] if len(ended) else piece
        memory.tokens += piece.tolist()
        yield piece
        if len(ended):
            return


def stream(
    model: Model, prompt: Sequence[int] | np.ndarray, count: int, *, stop: Iterable[str] = (), **options: Any
) -> Iterator[tuple[str, list[int]]]:
    """Pieces of text as they come, each with its tokens; the text ends before the first of the strings `stop`.

    A character whose bytes are not complete, and what may be the beginning of a stop, wait for the next piece. Options
    are those of `generate`.
    """
    if model.tokenizer is None:
        raise ValueError(
            "the model has no tokenizer, which makes text of tokens; `generate` gives the tokens themselves."
        )
    stops = [text for text in stop if text]
    made: list[int] = []
    said = 0
    for piece in generate(model, prompt, count, **options):
        made += piece.tolist()
        text = model.tokenizer.decode(made)
        cut = min((at for s in stops if (at := text.find(s)) >= 0), default=None)
        whole = len(text.rstrip("�")) if cut is None else cut
        if cut is None:
            whole = max(said, whole - max((_overlap(text[:whole], s) for s in stops), default=0))
        yield text[said:whole], piece.tolist()
        said = whole
        if cut is not None:
            return
    if said < len(text := model.tokenizer.decode(made)):
        yield text[said:], []


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of the text may be the beginning of a stop."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
