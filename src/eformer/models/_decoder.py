"""A decoder-only transformer of the LLaMA family in plain JAX, for weights of any kind: `x @ w`, whatever `w` is.

What a model has is seen in its parameters: biases, norms of queries and keys, norms after a block, experts, a head of
its own. The numbers that parameters do not show are in `Config`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from eformer._core import implicit, materialize
from eformer._formats.cache.array import QuantizedCache
from eformer._kernels.attention import attend, attend_joined, put, turn

Params = dict[str, Any]
# Keys and values, (layers, batch, heads, context, size) each; or a list of such pairs, one for every layer.
Cache = tuple[Any, Any] | list[tuple[Any, Any]]
# What a cache is called -> the formats of keys and of values; keys lose more by four bits.
CACHES = {"int8": ("int8", "int8"), "int8+int4": ("int8", "int4"), "int4": ("int4", "int4")}
ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
}


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary positions: the base of the frequencies, and how they are stretched for longer texts.

    `kind` is "default", "linear", "llama3" or "yarn"; `numbers` are the further ones it needs, as pairs.
    """

    base: float = 10000.0
    kind: str = "default"
    numbers: tuple[tuple[str, float], ...] = ()

    def frequencies(self, size: int) -> tuple[np.ndarray, float]:
        """The angle per position of every pair in a head, and a factor for sines and cosines."""
        given = dict(self.numbers)
        plain = self.base ** (-np.arange(0, size, 2) / size)
        if self.kind == "linear":
            return plain / given["factor"], 1.0
        if self.kind == "llama3":
            turns = given["original_max_position_embeddings"] * plain / (2 * math.pi)
            low, high = given["low_freq_factor"], given["high_freq_factor"]
            kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
            return plain * (kept + (1 - kept) / given["factor"]), 1.0
        if self.kind == "yarn":
            return self._yarn(plain, size, given)
        return plain, 1.0

    def _yarn(self, plain: np.ndarray, size: int, given: Mapping[str, float]) -> tuple[np.ndarray, float]:
        factor, length = given["factor"], given["original_max_position_embeddings"]
        ends = [
            size * math.log(length / (given.get(name, beta) * 2 * math.pi)) / (2 * math.log(self.base))
            for name, beta in (("beta_fast", 32.0), ("beta_slow", 1.0))
        ]
        if given.get("truncate", 1.0):
            ends = [math.floor(ends[0]), math.ceil(ends[1])]
        low, high = max(ends[0], 0), min(ends[1], size - 1)
        slowed = np.clip((np.arange(size // 2) - low) / (high - low if high != low else 0.001), 0.0, 1.0)

        def grown(weight: float) -> float:
            return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

        both = given.get("mscale", 0.0) and given.get("mscale_all_dim", 0.0)
        usual = grown(given["mscale"]) / grown(given["mscale_all_dim"]) if both else grown(1.0)
        return plain * (1 - slowed + slowed / factor), given.get("attention_factor", usual)


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes of a model, and what cannot be read from its weights.

    `windows` and `ropes` are per layer: how many positions a token sees (None: all before it), and its rotary positions
    (None: it has none); empty tuples stand for None and for `rope_base` in every layer.
    """

    vocabulary: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    hidden: int
    rope_base: float = 10000.0
    epsilon: float = 1e-5
    head_size: int = 0  # 0: width / heads
    ropes: tuple[Rope | None, ...] = ()
    windows: tuple[int | None, ...] = ()
    rope_halves: bool = False  # a pair is (i, i + size / 2), as Hugging Face has it, not (2i, 2i + 1)
    activation: str = "silu"
    norm_offset: float = 0.0
    embedding_scale: float = 1.0
    attention_scale: float | None = None  # None: head_size ** -0.5
    attention_cap: float | None = None
    logit_cap: float | None = None
    experts_per_token: int = 0
    normalize_experts: bool = True
    positions: int = 0  # how many the model was trained for, where that is known

    def __post_init__(self) -> None:
        for name in ("layers", "heads", "kv_heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} is not allowed; give at least 1.")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads={self.heads} is not a multiple of kv_heads={self.kv_heads}.")
        if not self.head_size:
            object.__setattr__(self, "head_size", self.width // self.heads)
        for name in ("windows", "ropes"):
            if len(getattr(self, name)) not in (0, self.layers):
                raise ValueError(
                    f"{name} has {len(getattr(self, name))} entries for {self.layers} layers; give each its own."
                )
        if any(window is not None and window < 1 for window in self.windows):
            raise ValueError(f"windows={self.windows} hides every token from some layers; give 1 or more, or None.")
        if self.head_size % 2 and (not self.ropes or any(self.ropes)):
            raise ValueError(f"head_size={self.head_size} is odd, and rotary positions turn pairs of values.")
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"activation={self.activation!r} is unknown; allowed are {', '.join(ACTIVATIONS)}.")

    def rope(self, layer: int) -> Rope | None:
        return self.ropes[layer] if self.ropes else Rope(self.rope_base)

    def window(self, layer: int) -> int | None:
        return self.windows[layer] if self.windows else None


class Places(NamedTuple):
    """The positions of tokens, and for every kind of rotary positions cosines and sines of (2, time, 1, size / 2)."""

    numbers: jax.Array
    turns: dict[Rope, jax.Array]

    @classmethod
    def of(cls, config: Config, numbers: jax.Array) -> Places:
        def turned(rope: Rope) -> jax.Array:
            frequencies, factor = rope.frequencies(config.head_size)
            angle = numbers[:, None, None] * jnp.asarray(frequencies, jnp.float32)
            return jnp.stack((jnp.cos(angle) * factor, jnp.sin(angle) * factor))

        ropes = {config.rope(layer) for layer in range(config.layers)}
        return cls(numbers, {rope: turned(rope) for rope in ropes if rope is not None})


def init(config: Config, key: jax.Array) -> Params:
    """Random weights, (in, out) each, with the layers stacked."""
    inner, kv = config.heads * config.head_size, config.kv_heads * config.head_size
    sizes = {"q": (config.width, inner), "k": (config.width, kv), "v": (config.width, kv), "o": (inner, config.width)}
    sizes |= {"gate": (config.width, config.hidden), "up": (config.width, config.hidden)}
    sizes |= {"down": (config.hidden, config.width)}
    first, *keys = jax.random.split(key, 1 + len(sizes))
    layers = {
        name: jax.random.normal(k, (config.layers, *size)) * size[0] ** -0.5
        for k, (name, size) in zip(keys, sizes.items(), strict=True)
    }
    norms = {name: jnp.ones((config.layers, config.width)) for name in ("norm_attention", "norm_mlp")}
    embedding = jax.random.normal(first, (config.vocabulary, config.width)) * config.width**-0.5
    return {"embedding": embedding, "layers": {**layers, **norms}, "norm": jnp.ones(config.width)}


def make_cache(
    config: Config,
    batch: int,
    context: int,
    dtype: Any = jnp.float32,
    *,
    format: str | None = None,
    listed: bool = False,
) -> Cache:
    """Room for `context` tokens.

    Args:
        config: of the model.
        batch: how many texts.
        context: how many tokens each.
        dtype: of keys and values.
        format: "int8", "int4", or "int8+int4" for keys in the first and values in the second; None keeps them dense.
        listed: a pair of arrays for every layer, which models with a list of layers read without a copy.
    """
    if format is not None and format not in CACHES:
        raise ValueError(f"{format=} is not a format of caches; allowed are {', '.join(map(repr, CACHES))} and None.")
    size = (batch, config.kv_heads, context, config.head_size)

    def empty(*lead: int) -> tuple[Any, Any]:
        shape = (*lead, *size)
        if format is None:
            return jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)
        keys, values = CACHES[format]
        return QuantizedCache.zeros(shape, dtype, keys), QuantizedCache.zeros(shape, dtype, values)

    return [empty() for _ in range(config.layers)] if listed else empty(config.layers)


def forward(config: Config, params: Params, tokens: jax.Array) -> jax.Array:
    """Logits (batch, time, vocabulary) of whole texts."""
    return decode(config, params, tokens, None, jnp.asarray(0))[0]


@implicit
def decode(config: Config, params: Params, tokens: jax.Array, cache: Cache | None, start: jax.Array) -> tuple[Any, Any]:
    """Logits of tokens (batch, time) that begin at position `start`, and the cache with them filled in."""
    x, cache = states(config, params, tokens, cache, start)
    return logits_of(config, params, x), cache


@implicit
def states(config: Config, params: Params, tokens: jax.Array, cache: Cache | None, start: jax.Array) -> tuple[Any, Any]:
    """What `decode` makes logits of: a vector per token.

    `params["layers"]` is a list of layers, or one dict of stacked ones, which are scanned: quick to compile.
    Native kernels read packed layers where they lie in the stack; dense ones are copied out of it first.
    """
    places = Places.of(config, start + jnp.arange(tokens.shape[1]))
    # Explicit on purpose: only the rows that were looked up are decoded, not the table.
    x = materialize(params["embedding"][tokens])
    if config.embedding_scale != 1.0:
        x = x * jnp.asarray(config.embedding_scale, x.dtype)
    layers: Any = params["layers"]
    if isinstance(layers, Mapping):
        if len({*config.windows}) > 1 or len({*config.ropes}) > 1:
            raise ValueError("layers that differ in their windows or positions cannot be stacked; give a list of them.")

        def layer(carry: Any, given: Any) -> tuple[Any, None]:
            return _layer(config, given[0], carry[0], carry[1], given[1], 0, places), None

        if isinstance(cache, list):
            raise ValueError("stacked layers take a cache of stacked layers; make it without listed=True.")
        stacked: Any = (layers, jnp.arange(config.layers))
        (x, cache), _ = jax.lax.scan(layer, (x, cache), stacked)
    elif isinstance(cache, list):
        if len(cache) != len(layers):
            raise ValueError(f"the cache is one of {len(cache)} layers, the model has {len(layers)}.")
        cache = [*cache]
        for number, weights in enumerate(layers):
            x, cache[number] = _layer(config, weights, x, cache[number], None, number, places)
    else:
        for number, weights in enumerate(layers):
            x, cache = _layer(config, weights, x, cache, number, number, places)
    return _norm(config, x, params["norm"]), cache


@implicit
def logits_of(config: Config, params: Params, x: jax.Array) -> jax.Array:
    """The last step of `decode`. The head is the embedding, transposed, where there is none of its own."""
    logits = x @ params["head"] if "head" in params else x @ params["embedding"].T
    return _capped(logits, config.logit_cap)


def _layer(
    config: Config, w: Params, x: jax.Array, cache: Any, number: Any, kind: int, places: Places
) -> tuple[jax.Array, Any]:
    """One layer: number `number` of the layers in the cache (None: it is this layer's own), `kind` of `config`."""
    h, cache = _attention(config, w, _norm(config, x, w["norm_attention"]), cache, number, kind, places)
    x = x + (_norm(config, h, w["norm_attention_out"]) if "norm_attention_out" in w else h)
    h = _norm(config, x, w["norm_mlp"])
    if "router" in w:
        h = _experts(config, w, h)
    else:
        gate, up = _several(w, "gate_up", {"gate": config.hidden, "up": config.hidden}, h)
        h = _linear(w, "down", ACTIVATIONS[config.activation](gate) * up)
    return x + (_norm(config, h, w["norm_mlp_out"]) if "norm_mlp_out" in w else h), cache


def _linear(w: Params, name: str, x: jax.Array) -> jax.Array:
    y = x @ w[name]
    return y + w[f"{name}_bias"] if f"{name}_bias" in w else y


def _several(w: Params, joined: str, sizes: Mapping[str, int], x: jax.Array) -> list[jax.Array]:
    """Products of one x: of matrices of their own, or of one that `fuse` made of them."""
    if joined not in w:
        return [_linear(w, name, x) for name in sizes]
    ends = np.cumsum(list(sizes.values()))[:-1]
    return jnp.split(_linear(w, joined, x), ends, axis=-1)


def _attention(
    config: Config, w: Params, x: jax.Array, cache: Any, number: Any, kind: int, places: Places
) -> tuple[jax.Array, Any]:
    def heads(name: str, y: jax.Array) -> jax.Array:
        y = y.reshape(*x.shape[:-1], -1, config.head_size)
        return _norm(config, y, w[f"norm_{name}"]) if f"norm_{name}" in w else y

    rope, window = config.rope(kind), config.window(kind)
    scale = config.head_size**-0.5 if config.attention_scale is None else config.attention_scale
    how = {"factor": scale, "cap": config.attention_cap, "window": window}
    kv = config.kv_heads * config.head_size
    sizes = {"q": config.heads * config.head_size, "k": kv, "v": kv}
    if cache is not None and x.shape[1] == 1 and "qkv" in w and not {"norm_q", "norm_k"} & set(w):
        how |= {"size": config.head_size, "turns": None if rope is None else places.turns[rope][:, 0, 0]}
        joined = _linear(w, "qkv", x)[:, 0]
        mixed, *cache = attend_joined(
            joined, cache[0], cache[1], places.numbers[0], number, halves=config.rope_halves, **how
        )
        return _linear(w, "o", mixed.reshape(*x.shape[:-1], -1)), tuple(cache)
    q, keys, values = (heads(*pair) for pair in zip(sizes, _several(w, "qkv", sizes, x), strict=True))
    if rope is not None:
        q, keys = (turn(part, places.turns[rope], config.rope_halves) for part in (q, keys))
    numbers = there = places.numbers
    keys, values = (jnp.swapaxes(part, 1, 2) for part in (keys, values))  # (batch, heads, time, size)
    if cache is not None and x.shape[1] == 1:
        q = q.reshape(x.shape[0], config.kv_heads, -1, config.head_size)
        new = (keys[:, :, 0], values[:, :, 0])
        mixed, *cache = attend(q, cache[0], cache[1], numbers[0], number, new=new, **how)
        return _linear(w, "o", mixed.reshape(*x.shape[:-1], -1)), tuple(cache)
    if cache is not None:
        cache = tuple(put(old, new, numbers[0], number) for old, new in zip(cache, (keys, values), strict=True))
        keys, values = cache if number is None else (part[number] for part in cache)
        keys, values, there = keys.astype(x.dtype), values.astype(x.dtype), jnp.arange(keys.shape[2])
    q = q.reshape(*q.shape[:2], config.kv_heads, -1, config.head_size)  # queries share keys in groups
    scores = _capped(jnp.einsum("btkgd,bksd->bkgts", q, keys) * scale, config.attention_cap)
    seen = there <= numbers[:, None]
    if window is not None:
        seen &= there > numbers[:, None] - window
    scores = jnp.where(seen, scores.astype(jnp.float32), -jnp.inf)
    mixed = jnp.einsum("bkgts,bksd->btkgd", jax.nn.softmax(scores).astype(x.dtype), values)
    return _linear(w, "o", mixed.reshape(*x.shape[:-1], -1)), cache


def _experts(config: Config, w: Params, x: jax.Array) -> jax.Array:
    """A few of many MLPs per token: rows are sorted by expert, so that each expert is one product."""
    flat, count = x.reshape(-1, x.shape[-1]), config.experts_per_token
    scores, chosen = jax.lax.top_k(jax.nn.softmax((flat @ w["router"]).astype(jnp.float32)), count)
    if config.normalize_experts:
        scores = scores / scores.sum(-1, keepdims=True)
    order = jnp.argsort(chosen.reshape(-1))
    sizes = jnp.bincount(chosen.reshape(-1), length=w["router"].shape[-1]).astype(jnp.int32)
    rows = flat[order // count]
    h = ACTIVATIONS[config.activation](jax.lax.ragged_dot(rows, w["gate"], sizes))
    made = jax.lax.ragged_dot(h * jax.lax.ragged_dot(rows, w["up"], sizes), w["down"], sizes)
    made = made[jnp.argsort(order)].reshape(*scores.shape, -1) * scores[..., None].astype(x.dtype)
    return made.sum(1).reshape(x.shape)


def _norm(config: Config, x: jax.Array, weight: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + config.epsilon)
    return (wide * (config.norm_offset + weight.astype(jnp.float32))).astype(x.dtype)


def _capped(x: jax.Array, limit: float | None) -> jax.Array:
    return x if limit is None else jnp.tanh(x / limit) * limit
