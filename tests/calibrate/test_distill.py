"""`distill`: scales follow the dense model, codes stay, and nothing dense is formed on the way."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eformer as ef
from eformer._calibrate.distill import divergence
from eformer._calibrate.trained_scales import changed, first_changes, settled
from eformer._formats.permuted.array import PermutedArray
from eformer.errors import CalibrationWarning, QuantizedGradientError
from eformer.ops.quantization import ArrayInt

WIDTH, VOCABULARY = 128, 32


def model(seed: int = 0) -> dict[str, Any]:
    keys = jax.random.split(jax.random.key(seed), 4)
    normal = jax.random.normal
    return {
        "embedding": normal(keys[0], (VOCABULARY, WIDTH)),
        "layers": {"up": normal(keys[1], (2, WIDTH, 192)) / 11, "down": normal(keys[2], (2, 192, WIDTH)) / 14},
        "norm": jnp.ones(WIDTH),
        "head": normal(keys[3], (WIDTH, VOCABULARY)) / 11,
    }


def forward(params: Any, tokens: jax.Array) -> jax.Array:
    x = ef.materialize(params["embedding"][tokens])

    def layer(x: Any, w: Any) -> tuple[Any, None]:
        return x + jax.nn.silu(x @ w["up"]) @ w["down"], None

    x, _ = jax.lax.scan(layer, x, params["layers"])
    x = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True)) * params["norm"]
    return x @ params["head"]


def batches(count: int = 4, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCABULARY, (4, 16)).astype(np.int32) for _ in range(count)]


def distance(dense: Any, packed: Any) -> float:
    tokens = batches(1, seed=9)[0]
    return float(divergence(ef.implicit(forward)(packed, tokens), forward(dense, tokens)))


def codes_of(params: Any) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(params) if leaf.dtype in (jnp.uint8, jnp.int8)]


CASES = {
    "nf4": "nf4",
    "double": {"dtype": "nf4", "double_quant": True},
    "zeros": {"dtype": "int3", "symmetric": False},
    "int8": "int8",
    "ternary": "ternary",
    "fp8 tiles": {"dtype": "fp8", "block_size": 128},
    "iq4_nl": "iq4_nl",
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[] if n in ("zeros", "ternary") else [pytest.mark.thorough]) for n in CASES],
)
def test_scales_follow_the_dense_model(name: str) -> None:
    dense = model()
    packed = ef.quantize_tree(dense, default=CASES[name], min_size=0, donate=False)
    told: list[tuple[int, float]] = []
    rate, limit = {"int8": (2e-4, 0.99), "fp8 tiles": (1e-3, 0.99), "ternary": (1e-2, 0.9)}.get(name, (1e-2, 0.8))
    trained = ef.distill(
        forward, dense, packed, batches(), steps=12, learning_rate=rate, progress=lambda *now: told.append(now)
    )
    assert [number for number, _ in told] == list(range(1, 13))
    assert jax.tree.structure(trained) == jax.tree.structure(packed)
    types = lambda tree: [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(tree)]  # noqa: E731
    assert types(trained) == types(packed)
    if name != "double":
        for old, new in zip(codes_of(packed), codes_of(trained), strict=True):
            np.testing.assert_array_equal(old, new)
    assert distance(dense, trained) < limit * distance(dense, packed)


def test_gradients_are_those_of_the_dense_program() -> None:
    """With respect to the scale and the bias of every block, through scan, lookup and products in both forms."""
    rng = np.random.default_rng(2)
    dense = model()
    q = ArrayInt.from_codes(
        rng.integers(0, 16, (WIDTH, VOCABULARY)), rng.uniform(0.05, 0.1, (2, VOCABULARY)).astype("f4"),
        bias=rng.uniform(-1, 0, (2, VOCABULARY)).astype("f4"), bits=4, block_size=64, axis=0,
    )  # fmt: skip
    packed = {**ef.quantize_tree(dense, default="nf4", min_size=0, donate=False), "head": q}
    tokens = batches(1)[0]
    arrays = {"head": packed["head"], "embedding": packed["embedding"], "up": packed["layers"]["up"]}
    start = {name: first_changes(a) for name, a in arrays.items()}

    def loss(changes: Any, make: Any) -> jax.Array:
        w = {name: make(changed(a, changes[name])) for name, a in arrays.items()}
        params = {**packed, "head": w["head"], "embedding": w["embedding"]}
        params["layers"] = {**packed["layers"], "up": w["up"]}
        return divergence(ef.implicit(forward)(params, tokens), forward(dense, tokens))

    found = jax.jit(jax.grad(lambda c: loss(c, lambda q: q)))(start)
    wanted = jax.jit(jax.grad(lambda c: loss(c, lambda q: q.materialize())))(start)
    assert set(found["head"]) == {"scale", "bias"}
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert np.abs(a).max() > 0
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-6)


def test_no_dense_copy_is_formed() -> None:
    """Nothing is materialized while the loss is differentiated, and no array of the program has a matrix's size."""
    size = 2048
    q = ef.quantize(jax.random.normal(jax.random.key(0), (size, size)), dtype="nf4")
    x = jnp.ones((4, size))

    def gradient(changes: Any, q: Any) -> Any:
        return jax.grad(lambda c: jnp.sum(jnp.sin(x @ changed(q, c) @ changed(q, c).T)))(changes)

    start = first_changes(q)
    with ef.materialization_policy("error"):
        lowered = jax.jit(gradient).lower(start, q)
    held = lowered.compile().memory_analysis().temp_size_in_bytes
    assert held < size * size * 4 / 2, f"{held:,} bytes, of {size * size * 4:,} dense"


def test_ties_adapters_norms_and_what_is_kept() -> None:
    dense = model()
    dense["head"] = dense["embedding"] = dense["embedding"] / 11  # of larger logits there is no gradient to speak of

    def tied(params: Any, tokens: jax.Array) -> jax.Array:
        return forward({**params, "head": params["head"].T}, tokens)

    packed = ef.quantize_tree(dense, default="nf4", min_size=0, donate=False)
    up, down = packed["layers"]["up"], packed["layers"]["down"]
    adapter = ef.LoraArray(down, jnp.zeros((2, 192, 4)), jnp.zeros((2, 4, WIDTH)), 1.0)
    packed["layers"] = {"up": PermutedArray(up, jnp.tile(jnp.arange(WIDTH)[::-1], (2, 1)), axis=-2), "down": adapter}
    assert packed["head"] is packed["embedding"]
    with pytest.warns(CalibrationWarning, match="'layers/down' stays as it is, because it is the frozen weight"):
        trained = ef.distill(tied, dense, packed, iter(batches(2)), steps=3, norms=True)
    assert trained["head"] is trained["embedding"]
    assert isinstance(trained["layers"]["up"], PermutedArray)
    assert not np.array_equal(trained["layers"]["up"].w.absmax, packed["layers"]["up"].w.absmax)
    assert not np.array_equal(trained["norm"], packed["norm"])
    np.testing.assert_array_equal(trained["layers"]["down"].w.absmax, down.absmax)
    packed["layers"]["down"] = down
    unchanged = ef.distill(tied, lambda tokens: tied(dense, tokens), packed, batches(1), steps=1)
    np.testing.assert_array_equal(unchanged["norm"], packed["norm"])
    with pytest.raises(QuantizedGradientError):  # outside of distill, a scale is still no parameter
        jax.grad(lambda p: tied(p, batches(1)[0]).sum(), allow_int=True)(packed)


def test_a_change_of_nothing_is_nothing() -> None:
    w = jax.random.normal(jax.random.key(1), (128, 64))
    for kind in CASES.values():
        q = ef.quantize(w, **({"dtype": kind} if isinstance(kind, str) else kind))
        same = settled(q, first_changes(q))
        np.testing.assert_allclose(same.materialize(), q.materialize(), rtol=1e-2 if kind == CASES["double"] else 0)


def test_what_cannot_be_trained() -> None:
    dense = model()
    coarse = ef.quantize_tree(dense, default="mxfp4", min_size=0, donate=False)
    with pytest.raises(ValueError, match=r"no scales that can be trained(?s:.*)e8m0"):
        ef.distill(forward, dense, coarse, batches(), steps=1)
    with pytest.raises(ValueError, match="holds no quantized array"):
        ef.distill(forward, dense, dense, batches(), steps=1)
    mixed = ef.quantize_tree(dense, {"head": "nvfp4"}, default="nf4", min_size=0, donate=False)
    with pytest.warns(CalibrationWarning, match="'head' stays as it is, because its scales are float8_e4m3fn"):
        trained = ef.distill(forward, dense, mixed, batches(), steps=1)
    assert jax.tree.structure(trained) == jax.tree.structure(mixed)


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"steps": 0}, "steps=0"), ({"learning_rate": -1.0}, "learning_rate=-1.0"), ({"batches": []}, "batches is empty")],
)
def test_bad_input(changes: dict[str, Any], said: str) -> None:
    dense = model()
    packed = ef.quantize_tree(dense, min_size=0, donate=False)
    given = {"batches": batches(), "steps": 1} | changes
    with pytest.raises(ValueError, match=said):
        ef.distill(forward, dense, packed, given.pop("batches"), **given)


def test_a_loss_that_is_not_finite_is_told() -> None:
    dense = model()
    packed = ef.quantize_tree(dense, min_size=0, donate=False)
    dense["head"] = dense["head"].at[0, 0].set(jnp.nan)
    with pytest.raises(ValueError, match="the loss of step 1 is nan"):
        ef.distill(forward, dense, packed, batches(), steps=2)
