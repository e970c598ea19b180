"""The rows of a quantized embedding are activations: decoded when they are needed, and no materialization."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eformer.errors import QuantizedGradientError
from eformer.jaximus import MaterializationError, explain, implicit, materialization_policy, materialize
from eformer.ops.quantization import LoraArray, dequantize_tree, is_kernel_available, quantize, quantize_tree

WORDS, SIZE, HEADS, LAYERS = 80, 64, 4, 2
FORMATS = ("nf4", "int8", "ternary", "binary")


def transformer(params: Any, tokens: jax.Array) -> jax.Array:
    """Tied embedding, scanned layers with attention, as plain functions of `jnp`."""
    x = jnp.take(params["embed"], tokens, axis=0) * SIZE**0.5

    def layer(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
        h = x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)
        q, k, v = (jnp.einsum("btd,dhs->bths", h, w[name].reshape(SIZE, HEADS, -1)) for name in "qkv")
        scores = jax.nn.softmax(jnp.einsum("bths,bchs->bhtc", q, k) / 4)
        x = x + jnp.einsum("bhtc,bchs->bths", scores, v).reshape(x.shape) @ w["o"]
        return x + jax.nn.gelu(x @ w["up"]) @ w["down"], None

    x, _ = jax.lax.scan(layer, x, params["layers"])
    return x @ params["embed"].T


def model(rng: np.random.Generator) -> Any:
    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape) / shape[-2] ** 0.5, jnp.float32)

    layers = {name: normal(LAYERS, SIZE, SIZE) for name in "qkvo"}
    layers |= {"up": normal(LAYERS, SIZE, 2 * SIZE), "down": normal(LAYERS, 2 * SIZE, SIZE)}
    return {"embed": normal(WORDS, SIZE), "layers": layers}


def table(kind: str = "nf4", *shape: int, axis: int | None = -1) -> Any:
    rng = np.random.default_rng(len(shape))
    return quantize(jnp.asarray(rng.standard_normal(shape or (WORDS, SIZE)), jnp.float32), dtype=kind, axis=axis)


def test_a_whole_model_runs_where_nothing_may_go_dense():
    rng = np.random.default_rng(0)
    tokens = jnp.asarray(rng.integers(0, WORDS, (2, 9)))
    models = {kind: quantize_tree(model(rng), kind, donate=False) for kind in FORMATS}
    assert all(type(m["embed"]) is not jax.Array for m in models.values())

    def every(models: Any) -> Any:
        return {kind: transformer(params, tokens) for kind, params in models.items()}

    wanted = jax.jit(every)({kind: dequantize_tree(params) for kind, params in models.items()})
    with materialization_policy("error"):
        compiled = jax.jit(implicit(every))(models)
        found = explain(implicit(transformer))(models["nf4"], tokens)
    for kind in FORMATS:
        np.testing.assert_allclose(compiled[kind], wanted[kind], rtol=2e-4, atol=2e-3, err_msg=kind)
    np.testing.assert_allclose(found.result, wanted["nf4"], rtol=2e-4, atol=2e-3)
    assert found.materializations == ()
    decoded = {event.shape for event in found.events if event.kind == "decode"}
    assert decoded == {(2, 9, SIZE)}
    assert "decoded float32[2,9,64] of ArrayNF4(float32[80,64]" in str(found)


WAYS = {
    "operators": lambda t, i: t[i] + 1,
    "moved": lambda t, i: (t[i].astype(jnp.bfloat16) * 2).reshape(3, 4, -1).transpose(1, 0, 2) + 1,
    "one row": lambda t, i: jnp.sin(t[i[0]]),
    "mapped": lambda t, i: jax.vmap(lambda j: jnp.sin(t[j]))(i),
    "joined": lambda t, i: jnp.concatenate([t[i], t[i[:2]]]) + 1,
    "chosen": lambda t, i: jnp.where(i[0] > 2, t[i], t[i[::-1]]) + 1,
    "loop": lambda t, i: jax.lax.scan(lambda c, x: (c + x, None), t[i[0]], jnp.ones((3, SIZE)))[0],
    "function": lambda t, i: jax.jit(lambda rows: jax.nn.gelu(rows))(t[i]),
}


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_rows_may_be_used_however_they_were_looked_up(kind):
    t, ids = table(kind), jnp.asarray([5, 0, 79, 5, 7, 1, 2, 3, 4, 6, 8, 9])

    def every(t: Any) -> Any:
        return {name: way(t, ids) for name, way in WAYS.items()}

    wanted = jax.jit(every)(t.materialize())
    with materialization_policy("error"):
        several = jax.jit(implicit(every))(t), implicit(every)(t)
    for found in several:
        for name, value in found.items():
            np.testing.assert_allclose(
                materialize(value).astype(jnp.float32), wanted[name].astype(jnp.float32), rtol=1e-5, err_msg=name
            )


@pytest.mark.parametrize("kind", FORMATS)
def test_one_row_of_a_table_packed_along_its_words(kind):
    """Its words share blocks, and still one of them is decoded, not the table."""
    t = table(kind, 70, SIZE, axis=-2)
    with materialization_policy("error"):
        found = jax.jit(implicit(lambda t, i: [jnp.sin(t[i]), t[i]]))(t, 69)
    wanted = t.materialize()[69]
    np.testing.assert_array_equal(materialize(found[1]), wanted)
    np.testing.assert_allclose(found[0], jnp.sin(wanted), rtol=1e-6)


@pytest.mark.parametrize("kind", FORMATS)
def test_rows_are_dense_and_exact(kind):
    """The same bits as the rows of the dense table, in every dtype, wherever the index points."""
    ids = jnp.asarray([[1, -2], [79, 300]])
    ways = {
        "take": lambda t: jnp.take(t, ids, axis=0),
        "clip": lambda t: jnp.take(t, ids, axis=0, mode="clip"),
        "wrap": lambda t: jnp.take(t, ids, axis=0, mode="wrap"),
        "filled": lambda t: jnp.take(t, ids, axis=0, mode="fill", fill_value=7.0),
        "columns": lambda t: jnp.take(t, ids, axis=1),
        "pairs": lambda t: jnp.stack([t, t])[ids % 2, ids % 80],
        "mapped tables": lambda t: jax.vmap(lambda t, i: t[i])(jnp.stack([t, t]), ids % 80),
        "small indices": lambda t: t[ids.astype(jnp.int8)],
        "none": lambda t: t[ids[:0]],
        "single entries": lambda t: t[ids[0], ids[1] % SIZE],
    }
    for dtype, axis in ((jnp.float32, -1), (jnp.bfloat16, -1), (jnp.float32, -2)):
        t = table(kind, axis=axis).astype(dtype)
        dense = t.materialize()
        with materialization_policy("error"):
            found = {name: implicit(way)(t) for name, way in ways.items()}
        for name, rows in found.items():
            assert isinstance(rows, jax.Array), name
            both = (a.astype(jnp.float32) for a in (rows, ways[name](dense)))
            np.testing.assert_array_equal(*both, err_msg=f"{name} {dtype.__name__} {axis}")


def test_rows_seen_by_plain_programs():
    """Outside `implicit` too: an activation that comes from a table may be carried through a loop."""
    t, w = table(), table("nf4", 2, SIZE, SIZE, axis=-2)

    def program(t: Any, w: Any, token: Any) -> Any:
        return jax.lax.scan(lambda h, layer: (jnp.tanh(h @ layer), None), t[token], w)[0]

    with materialization_policy("error"):
        found = [f(t, w, jnp.int32(5)) for f in (program, jax.jit(program), jax.jit(implicit(program)))]
        found.append(jax.vmap(program, (None, None, 0))(t, w, jnp.asarray([5, 6]))[0])
    for one in found:
        np.testing.assert_allclose(one, program(t.materialize(), w.materialize(), 5), rtol=1e-4, atol=1e-5)


def test_explain_says_what_was_decoded_and_by_what():
    t, ids = table("nf4", WORDS, 64), jnp.asarray([3, 4])
    found = explain(lambda t: t[ids])(t)
    assert found.materializations == ()
    assert [(e.shape, e.dense_bytes, e.primitive) for e in found.events if e.kind == "decode"] == [
        ((2, 64), 2 * 64 * 4, "gather")
    ]
    assert [e.name for e in found.kernels] == ["native_cpu" if is_kernel_available() else "xla"]
    plain = explain(lambda t: t[ids])(dataclasses.replace(t, use_kernel=False))
    assert [e.name for e in plain.kernels] == ["xla"]
    np.testing.assert_array_equal(found.result, plain.result)


def test_tables_are_not_differentiated():
    for kind, axis in (("nf4", -1), ("int8", -1), ("ternary", -2)):
        t = table(kind, axis=axis)
        with pytest.raises(QuantizedGradientError, match=r"(?s)LoRA.*straight_through"):
            jax.grad(lambda t: t[jnp.arange(3)].sum(), allow_int=True)(t)


@pytest.mark.parametrize("axis_type", [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit])
@pytest.mark.parametrize("spec", [("x", None), (None, "x"), ("x", "y"), (None, None)])
def test_tables_on_several_devices(axis_type, spec):
    """Rows or columns of the table on different devices: the same rows, and never the table on one device."""
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(axis_type,) * 2)
    ids = jnp.asarray([[5, 0, 79, 5], [7, 1, 2, 3]])
    dense = table("nf4", WORDS, 512)
    with jax.set_mesh(mesh):
        t = dense.with_sharding(jax.NamedSharding(mesh, jax.P(*spec)))
        with materialization_policy("error"):
            rows = jax.jit(lambda t, ids: t[ids] + 1)(t, ids)
    np.testing.assert_array_equal(rows, dense.materialize()[ids] + 1)


def test_a_product_decodes_the_rows_and_not_the_weight():
    """Although the rows are more than the weight."""
    t, w = table(), table("nf4", SIZE, 8, axis=-2)
    ids = jnp.arange(WORDS)
    with materialization_policy("error"):
        found = explain(implicit(lambda t, w: t[ids] @ w))(t, w)
    assert [event.shape for event in found.events if event.kind == "decode"] == [(WORDS, SIZE)]
    np.testing.assert_allclose(found.result, t.materialize() @ w.materialize(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "use",
    [
        lambda t, experts: t + 1,
        lambda t, experts: t[3:9] + 1,
        lambda t, experts: experts[jnp.asarray([1, 0])] + 1,  # matrices, not vectors
        lambda t, experts: jnp.concatenate([t[jnp.arange(3)], t]) + 1,
        lambda t, experts: jax.lax.dynamic_slice_in_dim(t, jnp.int32(3), 5, 0) + 1,
    ],
)
def test_stored_arrays_are_still_refused(use):
    t, experts = table(), table("nf4", 3, SIZE, 32, axis=-2)
    with materialization_policy("error"), pytest.raises(MaterializationError, match="Refusing to materialize ArrayNF4"):
        implicit(use)(t, experts)


def adapted(base: Any) -> LoraArray:
    rng = np.random.default_rng(9)
    a, b = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((WORDS, 3), (3, SIZE)))
    return LoraArray(base, a, b, scale=0.5)


@pytest.mark.parametrize("kind", ["nf4", None])
def test_rows_of_a_weight_with_an_adapter(kind):
    """Rows and columns, by index arrays and by single indices; out of range gives NaN; factors have gradients."""
    q = adapted(table(kind) if kind else table().materialize())
    ids = jnp.asarray([[5, 0, 79], [5, 7, 1]])
    ways = {
        "rows": lambda q: q[ids] + 1,
        "columns": lambda q: jnp.take(q, ids[0] % SIZE, axis=1) + 1,
        "row": lambda q: q[ids[0, 0]] * 2,
        "column": lambda q: jax.lax.dynamic_index_in_dim(q, ids[0, 0], 1) * 2,
        "mapped": lambda q: jax.vmap(lambda i: jnp.sin(q[i]))(ids[0]),
        "outside": lambda q: jnp.take(q, ids + 3, axis=0),
        "tied": lambda q: q[ids] @ q.T,
    }

    def every(q: Any) -> Any:
        return {name: way(q) for name, way in ways.items()}

    with materialization_policy("error"):
        found = jax.jit(implicit(every))(q)
        grads = jax.grad(lambda a: implicit(lambda a: (LoraArray(q.w, a, q.b, scale=0.5)[ids] ** 2).sum())(a))(q.a)
    dense = q.materialize()
    for name, wanted in jax.jit(every)(dense).items():
        np.testing.assert_allclose(found[name], wanted, rtol=1e-4, atol=1e-4, err_msg=name)
    assert jnp.isnan(found["outside"][0, 2]).all()
    wanted = jax.grad(lambda a: ((dense - q.update() + 0.5 * a @ q.b)[ids] ** 2).sum())(q.a)
    np.testing.assert_allclose(grads, wanted, rtol=1e-4, atol=1e-4)
