"""The same Flax model, text and bits, quantized by qwix and by eformer, in one run.

The character model of `demo` as a Flax Linen module, its dense layers in int4 with a scale for every 64 inputs, the
embedding as it is. qwix rounds, and its GPTQ (`qwix.contrib.gptq`) is calibrated on the batches eformer gets; its own
model judges its parameters. Needs `pip install --no-deps qwix`.

qwix's GPTQ walks through the columns of a matrix outside `jit` and writes each into a `jax.Ref`. That compiles hundreds
of programs for every matrix, and again for the next one of the same shape: too long to wait for. Here its references
are NumPy arrays: the same code and the same bits, as `--check` shows on one matrix.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from _timing import write_json

if importlib.util.find_spec("qwix") is None:
    print("qwix is not installed: pip install --no-deps qwix")
    raise SystemExit(0)
import qwix
from qwix.contrib import gptq, gptq_core

import eformer as ef
from demo import char, text
from eformer.models import _decoder as decoder

BLOCK = 64


class Layer(nn.Module):
    """A layer of `eformer.models` in Flax."""

    config: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        c, places = self.config, jnp.arange(x.shape[1])

        def dense(name: str, size: int, x: jax.Array) -> jax.Array:
            return nn.Dense(size, use_bias=False, name=name)(x)

        h = nn.RMSNorm(epsilon=c.epsilon, name="norm_attention")(x)
        q, k, v = (dense(name, c.width, h).reshape(*h.shape[:2], c.heads, -1) for name in "qkv")
        q, k = (decoder._rotate(part, places, c.rope(0), c.rope_halves) for part in (q, k))
        scores = jnp.einsum("bthd,bshd->bhts", q, k) * c.head_size**-0.5
        odds = jax.nn.softmax(jnp.where(places <= places[:, None], scores, -jnp.inf))
        x = x + dense("o", c.width, jnp.einsum("bhts,bshd->bthd", odds, v).reshape(x.shape))
        h = nn.RMSNorm(epsilon=c.epsilon, name="norm_mlp")(x)
        h = jax.nn.silu(dense("gate", c.hidden, h)) * dense("up", c.hidden, h)
        return x + dense("down", c.width, h)


class Char(nn.Module):
    config: Any

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        table = self.param("embedding", nn.initializers.zeros, (self.config.vocabulary, self.config.width))
        x = table[tokens]
        for number in range(self.config.layers):
            x = Layer(self.config, name=f"layers_{number}")(x)
        return nn.RMSNorm(epsilon=self.config.epsilon, name="norm")(x) @ table.T


def flax_params(params: Any) -> Any:
    """The demo's weights under the names Flax has for them."""
    made = {"embedding": params["embedding"], "norm": {"scale": params["norm"]}}
    for number in range(char.CONFIG.layers):
        layer = {name: value[number] for name, value in params["layers"].items()}
        made[f"layers_{number}"] = {
            name: {"scale" if name.startswith("norm") else "kernel": value} for name, value in layer.items()
        }
    return made


def quick_references() -> Any:
    return mock.patch.object(jax, "new_ref", np.array)


def check() -> None:
    """One matrix by qwix as it is, and with quick references."""
    from qwix._src.core import qarray

    rng = np.random.default_rng(0)
    w, x = (jnp.asarray(rng.normal(size=(BLOCK, count)), jnp.float32) for count in (BLOCK, 4 * BLOCK))
    how = qarray.HowToQuantize(qtype=jnp.int4, channelwise_axes=[0], tiled_axes={1: BLOCK})
    given = w, gptq_core.compute_hessian(x), how
    begun = time.perf_counter()
    plain = gptq_core.quantize_weight(*given)
    between = time.perf_counter()
    with quick_references():
        quick = gptq_core.quantize_weight(*given)
    print(f"as it is {between - begun:.1f} s, with quick references {time.perf_counter() - between:.1f} s")
    jax.tree.map(np.testing.assert_array_equal, plain, quick)


def by_qwix(model: Char, params: Any, batches: list[Any]) -> dict[str, Any]:
    """A function of tokens for every method of qwix."""
    rule = gptq.GptqRule(module_path=r"layers_.*", weight_qtype=jnp.int4, tile_size=BLOCK)
    watched = qwix.quantize_model(model, gptq.GptqCalibrationProvider([rule]))
    watch = jax.jit(lambda variables, batch: watched.apply(variables, batch, mutable="quant_stats")[1])
    variables: Any = {"params": params}
    for batch in batches:
        variables = {"params": params, **watch(variables, batch)}
    ready = qwix.quantize_model(model, qwix.PtqProvider([rule]))
    shapes = jax.eval_shape(ready.init, jax.random.key(0), batches[0])["params"]
    made = {"qwix, rounded": qwix.quantize_params(params, shapes)}
    with quick_references():  # blocks as long as groups: scales of a group then know all errors before it
        made["qwix, gptq"] = gptq.quantize_params(params, shapes, variables["quant_stats"], gptq_block_size=BLOCK)
    run = jax.jit(lambda p, tokens: ready.apply({"params": p}, tokens))
    return {name: (run, found) for name, found in made.items()}


def by_eformer(forward: Any, params: Any, batches: list[Any], training: list[Any], steps: int) -> dict[str, Any]:
    stats = ef.calibrate(forward, params, batches)
    how: Any = {"rules": {"layers_*": {"dtype": "int4", "block_size": BLOCK}}, "default": None, "donate": False}
    made = {"eformer, rounded": ef.quantize_tree(params, **how)}
    made["eformer, gptq"] = ef.quantize_tree(params, calibration=stats, method="gptq", **how)
    if steps:
        made[f"eformer, gptq, distilled in {steps} steps"] = ef.distill(
            forward, params, made["eformer, gptq"], training, steps=steps, learning_rate=1e-2, norms=True
        )
    return {name: (forward, found) for name, found in made.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, metavar="PATH")
    parser.add_argument("--quick", action="store_true", help="a little of the text")
    parser.add_argument("--steps", type=int, help="of distillation (default: 128, quick: 2); 0 leaves it out")
    parser.add_argument(
        "--check", action="store_true", help="compare qwix's GPTQ with how it is run here, on one matrix"
    )
    options = parser.parse_args()
    if options.check:
        check()
        return
    count, steps = (4, 2) if options.quick else (64, 128)
    steps = steps if options.steps is None else options.steps
    model, params = Char(char.CONFIG), flax_params(char.load_params())
    forward = lambda p, tokens: model.apply({"params": p}, tokens)  # noqa: E731
    known, held_out = (text.encode(text.topics(held_out=held)) for held in (False, True))
    batches = list(jnp.asarray(text.windows(known, char.LENGTH, count)[:, :-1]).reshape(-1, 4, char.LENGTH))
    training = list(
        jnp.asarray(
            text.windows(known, char.LENGTH, 8 * max(steps, 1))[:, :-1].reshape(8, -1, char.LENGTH).swapaxes(0, 1)
        )
    )
    judged = text.windows(held_out, char.LENGTH, 4 if options.quick else 64)
    found = {}
    models = by_qwix(model, params, batches) | by_eformer(forward, params, batches, training, steps)
    for name, (run, packed) in models.items():
        result = ef.evaluate(run, packed, judged, against=(forward, params), batch=4)
        found[name] = result.to_dict()
        print(f"{name:40s} perplexity {result.change}, KL {result.divergence}", flush=True)
    write_json(options.json, block=BLOCK, rows=found)


if __name__ == "__main__":
    main()
