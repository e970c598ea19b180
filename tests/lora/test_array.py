"""`LoraArray`: products that never form the update, transposes, dtypes, transforms, gradients, residuals."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from eformer.jaximus import implicit, materialization_policy, materialize
from eformer.ops.quantization import DoraArray, LoraArray, quantize

DIMS = {"b": 2, "c": 3, "k": 8, "h": 4, "d": 6, "n": 10, "m": 5}


def normal(seed: int, *shape: int, dtype: Any = jnp.float32) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def lora(shape: tuple[int, ...], left: int = 1, right: int = 1, fmt: str | None = "nf4", rank: int = 2, **options: Any):
    batch = len(shape) - left - right
    w = normal(1, *shape)
    if fmt is not None:
        axis = options.pop("axis", -2 if fmt != "int8" else -1)
        w = quantize(w, dtype=fmt, axis=axis, **({"block_size": 4} if fmt == "nf4" else {}))
    a = normal(2, *shape[: batch + left], rank)
    b = normal(3, *shape[:batch], rank, *shape[batch + left :])
    return LoraArray(w, a, b, 0.5, left, right)


def close(found: Any, expected: Any, tol: float = 2e-5) -> None:
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    np.testing.assert_allclose(found, expected, rtol=tol, atol=tol * np.abs(expected).max())


# (x, w, left, right, result): einsums that are one dot_general. Which side w stands on is tried both ways.
PRODUCTS = [
    ("mk", "kn", 1, 1, "mn"),
    ("k", "kn", 1, 1, "n"),
    ("mn", "kn", 1, 1, "mk"),  # contracted on the right: b goes first
    ("cmk", "kn", 1, 1, "cmn"),
    ("bmk", "bkn", 1, 1, "bmn"),
    ("bmn", "bkn", 1, 1, "bmk"),
    ("mk", "bkn", 1, 1, "mbn"),  # a stack kept by the product
    ("mbk", "bkn", 1, 1, "mn"),  # a stack summed over
    ("cbmk", "cbkn", 1, 1, "cbmn"),
    ("mk", "khd", 1, 2, "mhd"),
    ("mhd", "hdk", 2, 1, "mk"),
    ("mhd", "khd", 1, 2, "mk"),
    ("bmk", "bkhd", 1, 2, "bmhd"),
    ("mkn", "kn", 1, 1, "m"),  # both sides contracted
    ("mh", "khd", 1, 2, "mkd"),  # a part of one side
]


def product(names: str, w_names: str, out: str) -> Any:
    """The dot_general of an einsum, with the order of operands kept."""

    def run(x: Any, w: Any, w_first: bool) -> Any:
        batch = [n for n in w_names if n in names and n in out]
        contracted = [n for n in w_names if n in names and n not in out]
        axes = lambda s, group: tuple(s.index(n) for n in group)  # noqa: E731
        pairs = [(names, x), (w_names, w)][:: -1 if w_first else 1]
        numbers = tuple(tuple(axes(s, group) for s, _ in pairs) for group in (contracted, batch))
        return lax.dot_general(pairs[0][1], pairs[1][1], numbers)

    return run


@pytest.mark.parametrize("fmt", [None, "nf4", "int8"])
def test_products(fmt: str | None):
    """All in two programs: low-rank, and on dense arrays."""
    cases = []
    for names, w_names, left, right, out in PRODUCTS:
        blocked = next(i for i, n in enumerate(w_names) if n not in "bc") - len(w_names)
        w = lora(tuple(DIMS[n] for n in w_names), left, right, fmt, axis=blocked)
        cases.append((product(names, w_names, out), normal(7, *(DIMS[n] for n in names)), w))

    def run(xs: Any, ws: Any) -> Any:
        return [f(x, w, first) for (f, _, _), x, w in zip(cases, xs, ws, strict=True) for first in (False, True)]

    xs, ws = [x for _, x, _ in cases], [w for _, _, w in cases]
    with materialization_policy("error"):
        found = jax.jit(implicit(run))(xs, ws)
    expected = jax.jit(run)(xs, [w.materialize() for w in ws])
    assert len(found) == 2 * len(PRODUCTS)
    jax.tree.map(close, found, expected)


def test_materialize_is_what_it_says():
    for q, subscripts in ((lora((8, 10)), "kr,rn->kn"), (lora((2, 8, 4, 6), 1, 2), "bkr,brhd->bkhd")):
        expected = q.w.materialize() + 0.5 * jnp.einsum(subscripts, q.a, q.b)
        close(q.materialize(), expected)
        assert q.shape == expected.shape
        assert materialize(q).dtype == q.dtype == jnp.float32


def test_half_precision_follows_the_activations():
    q = implicit(lambda q: q.astype(jnp.bfloat16))(lora((64, 32)))
    assert isinstance(q, LoraArray)
    assert (q.dtype, q.w.dtype, q.a.dtype) == (jnp.bfloat16, jnp.bfloat16, jnp.float32)
    x = normal(0, 4, 64, dtype=jnp.bfloat16)
    with materialization_policy("error"):
        y = x @ q
    assert y.dtype == jnp.bfloat16
    close(y, (x @ lora((64, 32)).materialize().astype(jnp.bfloat16)), tol=3e-2)
    integers = jnp.arange(8).reshape(1, 8)
    close(integers @ lora((8, 10)), integers @ lora((8, 10)).materialize())


def test_wide_adapters_are_not_rounded_to_narrow_activations(key: jax.Array):
    """bf16 times f32 gives f32, and f32 numbers."""
    keys = jax.random.split(key, 4)
    x = jax.random.normal(keys[0], (4, 64)).astype(jnp.bfloat16)
    q = LoraArray(*(jax.random.normal(k, s) for k, s in zip(keys[1:], ((64, 32), (64, 5), (5, 32)), strict=True)))
    w, a, b = (np.asarray(part, np.float64) for part in (q.w, q.a, q.b))
    expected = np.asarray(x, np.float64) @ (w + a @ b)
    for y in (x @ q, jax.jit(jnp.matmul)(x, q), jax.jit(jax.checkpoint(lambda x, q: x @ q))(x, q)):
        assert y.dtype == jnp.float32
        assert np.abs(y - expected).max() <= 1e-6 * np.abs(expected).max()


def test_transposes_keep_the_rank_where_they_can():
    for q, kept, lost in (
        (lora((8, 10)), [(1, 0)], []),
        (lora((2, 8, 10)), [(0, 2, 1)], [(1, 0, 2), (2, 1, 0)]),
        (lora((8, 4, 6), 1, 2), [(1, 2, 0), (0, 2, 1), (2, 1, 0)], [(1, 0, 2)]),
        (lora((2, 3, 8, 10)), [(1, 0, 3, 2)], []),
    ):
        dense = q.materialize()
        for order in kept + lost:
            moved = implicit(lambda q, order=order: jnp.transpose(q, order))(q)
            assert isinstance(moved, LoraArray) == (order in kept)
            close(materialize(moved), dense.transpose(order), tol=1e-6)
    assert isinstance(lora((8, 10)).T, LoraArray)


def test_other_operations_obey_the_policy():
    q = lora((8, 10))
    with materialization_policy("error"), pytest.raises(RuntimeError, match=r"(?s)LoraArray.*nf4 \+ lora 2.*add"):
        q + 1.0
    with materialization_policy("allow"):
        close(q + 1.0, q.materialize() + 1.0)


def grouped(x: Any, stack: Any, axis: int) -> Any:
    numbers = lax.RaggedDotDimensionNumbers((((1,), (axis,)), ((), ())), [0], [0])
    return lax.ragged_dot_general(x, stack, jnp.asarray([3, 0, 2]), numbers)


@pytest.mark.parametrize("fmt", [None, "nf4", "int8"])
def test_parts_and_grouped_products(fmt: str | None):
    """Static slices, matrices of a stack, and rows in groups: never dense, and gradients reach the factors."""
    table, stack = lora((12, 8), fmt=fmt, axis=-1), lora((3, 8, 10), fmt=fmt)
    x, y = normal(4, 5, 8), normal(5, 5, 10)

    def vectors(q: Any, s: Any) -> Any:
        products = x @ s[1], x @ s[1:][0], grouped(x, s, 1), grouped(y, s, 2)
        return q[3], q[5:6], q[:, 2], q[4:], q[::3, 4:], *products

    with materialization_policy("error"):
        found = jax.jit(implicit(vectors))(table, stack)
    assert [isinstance(part, LoraArray) for part in found] == [False] * 3 + [True] * 2 + [False] * 4
    jax.tree.map(close, [materialize(part) for part in found], list(vectors(table.materialize(), stack.materialize())))

    def loss(factors: Any) -> Any:
        parts = [dataclasses.replace(q, a=a, b=b) for q, (a, b) in zip((table, stack), factors, strict=True)]
        row, *_, first, second = vectors(*parts)
        return jnp.sum(jnp.sin(row)) + jnp.sum(jnp.sin(first)) + jnp.sum(jnp.sin(second))

    def dense_loss(factors: Any) -> Any:
        bases = [materialize(q.w) for q in (table, stack)]
        row, *_, first, second = vectors(*(w + 0.5 * a @ b for w, (a, b) in zip(bases, factors, strict=True)))
        return jnp.sum(jnp.sin(row)) + jnp.sum(jnp.sin(first)) + jnp.sum(jnp.sin(second))

    factors = [(table.a, table.b), (stack.a, stack.b)]
    with materialization_policy("error"):
        gradients = jax.jit(jax.grad(implicit(loss)))(factors)
    jax.tree.map(close, gradients, jax.jit(jax.grad(dense_loss))(factors))


def test_scan_vmap_and_remat():
    stack, x = lora((3, 8, 8)), normal(5, 4, 8)
    dense = stack.materialize()

    def forward(x: Any, ws: Any) -> Any:
        body = jax.checkpoint(lambda x, w: (jnp.tanh(x @ w), None))
        return lax.scan(body, x, ws)[0]

    def each(x: Any, ws: Any) -> Any:
        return jax.vmap(lambda w: x @ w)(ws)

    for f in (forward, each):
        with materialization_policy("error"):
            found = jax.jit(jax.value_and_grad(lambda x, ws, f=f: jnp.sum(f(x, ws) ** 2)))(x, stack)
        jax.tree.map(close, found, jax.value_and_grad(lambda x, ws, f=f: jnp.sum(f(x, ws) ** 2))(x, dense))


@pytest.mark.parametrize("fmt", [None, "nf4", "ternary"])
def test_gradients_reach_the_factors_only(fmt: str | None):
    q, x = lora((8, 10), fmt=fmt), normal(4, 5, 8)

    def loss(q: Any, x: Any) -> Any:
        return jnp.sum(jnp.sin(x @ q))

    found, wrt_x = jax.grad(loss, argnums=(0, 1), allow_int=True)(q, x)
    base = materialize(q.w)
    expected = jax.grad(lambda f, x: jnp.sum(jnp.sin(x @ (base + 0.5 * f[0] @ f[1]))), (0, 1))((q.a, q.b), x)
    close(found.a, expected[0][0])
    close(found.b, expected[0][1])
    close(wrt_x, expected[1])
    floating = [leaf for leaf in jax.tree.leaves(found.w) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    assert floating
    assert not any(np.any(leaf) for leaf in floating)


@pytest.mark.parametrize("fmt", ["nf4", "int8", "ternary"])
def test_no_dense_residual_and_no_dense_temporary(fmt: str):
    """What the backward pass keeps: activations, factors and codes; and XLA's own account of both passes."""
    size, rank, m = 4096, 8, 4
    dense = size * size * 4
    w = jax.eval_shape(lambda w: quantize(w, dtype=fmt), jax.ShapeDtypeStruct((size, size), jnp.float32))
    factors = (jnp.zeros((size, rank)), jnp.zeros((rank, size)))

    def loss(factors: Any, w: Any, x: Any) -> Any:
        return jnp.sum(jnp.sin(x @ LoraArray(w, *factors)))

    x = jax.ShapeDtypeStruct((m, size), jnp.float32)
    kept = jax.eval_shape(lambda f, w, x: jax.vjp(lambda f, x: loss(f, w, x), f, x)[1], factors, w, x)
    assert not any(leaf.shape == (size, size) and leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(kept))
    nbytes = lambda tree: sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))  # noqa: E731
    assert nbytes(w) < nbytes(kept) <= nbytes(w) + 4 * (2 * size * rank + 8 * m * size)
    with materialization_policy("error"):
        compiled = jax.jit(jax.grad(loss, argnums=(0, 2))).lower(factors, w, x).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < dense / 4


def test_bad_parts_are_refused():
    w = jnp.ones((8, 10))
    with pytest.raises(ValueError, match=r"factors of shapes \(8, 2\) and \(3, 10\) do not fit"):
        LoraArray(w, jnp.ones((8, 2)), jnp.ones((3, 10)))
    with pytest.raises(ValueError, match="left=2 and right=1 do not fit"):
        LoraArray(w, jnp.ones((8, 2)), jnp.ones((2, 10)), left=2)
    with pytest.raises(TypeError, match="must be floating, got int32"):
        LoraArray(w.astype(int), jnp.ones((8, 2)), jnp.ones((2, 10)))
    q = LoraArray(w, jnp.ones((8, 2)), jnp.ones((2, 10)))
    with pytest.raises(dataclasses.FrozenInstanceError):
        q.scale = 2.0
    assert "float32 + lora 2" in repr(q)


def test_an_infinity_never_gives_a_finite_result():
    """Nor does NaN. Dense gives ±inf where an adapter gives NaN: see the FAQ."""
    w = normal(0, 64, 32)
    adapter = LoraArray(quantize(w, dtype="nf4"), w[:, :3] / 8, w[:3] / 8)
    for q in (adapter, DoraArray.over(adapter)):
        for bad in (jnp.inf, -jnp.inf, jnp.nan):
            found = jnp.ones((3, 64)).at[1, 5].set(bad) @ q
            assert not jnp.isfinite(found[1]).any()
            assert jnp.isfinite(found[::2]).all()


def test_both_factors_are_multiplied_with_the_precision_of_the_product():
    """Sums of narrow factors are f32, and what the caller asks of the product holds for all three."""
    w, x = jnp.ones((16, 8), jnp.bfloat16), jnp.ones((4, 16), jnp.bfloat16)
    q = LoraArray(w, jnp.ones((16, 2), jnp.bfloat16), jnp.ones((2, 8), jnp.bfloat16))
    program = str(jax.make_jaxpr(implicit(lambda x, q: jnp.dot(x, q, precision="highest")))(x, q))
    assert program.count("preferred_element_type=float32") == 2
    assert program.count("HIGHEST") == 3 * 2
