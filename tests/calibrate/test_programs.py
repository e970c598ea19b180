"""Every way in which a program may hold a product: the inputs that are recorded are those that the program computes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from eformer._calibrate import calibrate
from eformer.errors import CalibrationWarning

from .references import check

L, T, K, N = 3, 5, 4, 6


@pytest.fixture
def rng(request):
    return np.random.default_rng(len(request.node.name))


def normal(rng, *shape):
    return jnp.asarray(rng.standard_normal(shape), jnp.float32)


# -- one product -------------------------------------------------------------------------------------------------------

W = {
    "matmul": ((K, N), lambda w, x: x @ w),
    "transposed": ((N, K), lambda w, x: x @ w.T),
    "left": ((N, K), lambda w, x: w @ x.T),
    "einsum": ((K, N), lambda w, x: jnp.einsum("kn,tk->nt", w, x)),
    "cast": ((K, N), lambda w, x: x.astype(jnp.float32) @ w.astype(jnp.bfloat16).astype(jnp.float32)),
    "jit": ((K, N), lambda w, x: jax.jit(jnp.dot)(x, w)),
    "remat": ((K, N), lambda w, x: jax.checkpoint(lambda x: jnp.tanh(x @ w))(x)),
    "vmap over tokens": ((K, N), lambda w, x: jax.vmap(lambda row: row @ w)(x)),
    "one row at a time": ((K, N), lambda w, x: lax.map(lambda row: row @ w, x)),
    "gradient": ((K, N), lambda w, x: jax.value_and_grad(lambda b: jnp.sum(x @ w + b))(0.0)),
    "stop_gradient": ((K, N), lambda w, x: jnp.argmax(lax.stop_gradient(x @ w), axis=-1)),
    "merged axes": ((K, 2, 3), lambda w, x: x @ w.reshape(K, 6)),
    "split axes": ((K, N), lambda w, x: jnp.einsum("tab,abn->tn", x.reshape(T, 2, 2), w.reshape(2, 2, N))),
    "fused": ((K, N), lambda w, x: x @ jnp.concatenate([w, 2 * w], axis=1)),
    "columns": ((K, N), lambda w, x: (x @ w[:, :2], None)),
    "split": ((K, N), lambda w, x: x @ jnp.split(w, 2, axis=1)[1]),
    "broadcast": ((K, N), lambda w, x: jnp.matmul(x[:, None], jnp.broadcast_to(w, (T, K, N)))),
}


@pytest.mark.parametrize("name", W)
def test_one_product(rng, name):
    shape, f = W[name]
    x = normal(rng, T, K)
    stats = calibrate(lambda p, x: f(p["w"], x), {"w": normal(rng, *shape)}, [x])
    check(stats["w"], x, [shape.index(K)])


def test_several_contracted_axes(rng):
    x = normal(rng, T, 2, 3)
    w = normal(rng, 3, N, 2)
    stats = calibrate(lambda p, x: jnp.einsum("tab,bna->tn", x, p), w, [x])
    check(stats[""], jnp.swapaxes(x, 1, 2).reshape(T, 6), [0, 2])


@pytest.mark.parametrize("beside", [0, 2], ids=lambda more: f"beside {more} columns")
def test_part_of_the_contracted_axis(rng, beside):
    """Two halves are multiplied with inputs of their own: nothing is known of products across them."""
    x, w = normal(rng, T, K), normal(rng, K, N)

    def forward(p, x):
        p = jnp.concatenate([p, jnp.ones((K, beside))], axis=1)
        return x[:, :2] @ p[:2], (2 * x[:, 2:]) @ p[2:]

    stats = calibrate(forward, w, [x])
    first, second = np.array(x), np.array(2 * x)
    first[:, 2:] = second[:, :2] = 0
    moment = first.T @ first + second.T @ second
    np.testing.assert_allclose(stats[""].moment, moment, rtol=1e-4, atol=1e-5)


# -- stacks ------------------------------------------------------------------------------------------------------------


def deep(w, x):
    """The inputs of every layer, (L, T, K)."""
    inputs = []
    for one in np.asarray(w):
        inputs.append(np.asarray(x))
        x = np.tanh(np.asarray(x) @ one)
    return np.stack(inputs)


def scanned(w, x):
    return lax.scan(lambda x, one: (jnp.tanh(x @ one), None), x, w)[0]


STACKS = {
    "scan": scanned,
    "scan in jit": jax.jit(scanned),
    "remat in scan": lambda w, x: lax.scan(jax.checkpoint(lambda x, one: (jnp.tanh(x @ one), None)), x, w)[0],
    "unrolled": lambda w, x: [x := jnp.tanh(x @ w[i]) for i in range(L)],
    "loop by number": lambda w, x: lax.fori_loop(0, L, lambda i, x: jnp.tanh(x @ w[i]), x),
    "while": lambda w, x: lax.while_loop(
        lambda s: s[0] < L, lambda s: (s[0] + 1, jnp.tanh(s[1] @ lax.dynamic_index_in_dim(w, s[0], 0, False))), (0, x)
    ),
    "carried": lambda w, x: lax.fori_loop(0, L, lambda i, s: (jnp.tanh(s[0] @ s[1][i]), s[1]), (x, w))[0],
    "scan of transposed": lambda w, x: lax.scan(lambda x, one: (jnp.tanh(x @ one.T), None), x, w.mT)[0],
    "two scans": lambda w, x: scanned(w[1:], scanned(w[:1], x)),
    "split and stacked": lambda w, x: scanned(jnp.stack([w[i] for i in range(L)]), x),
    "cond": lambda w, x: lax.scan(
        lambda x, one: (lax.cond(x.sum() < 1e9, lambda x: jnp.tanh(x @ one), lambda x: x, x), None), x, w
    )[0],
}  # fmt: skip


@pytest.mark.parametrize("name", STACKS)
def test_stack(rng, name):
    w, x, y = normal(rng, L, K, K), normal(rng, T, K), normal(rng, T, K)
    stats = calibrate(lambda p, x: STACKS[name](p["w"], x), {"w": w}, [x, y])
    check(stats["w"], [deep(w, x), deep(w, y)], [1], [0])


def test_recurrent_weights_are_summed_over_time(rng):
    w, x = normal(rng, K, K), normal(rng, 7, T, K)
    stats = calibrate(lambda p, x: lax.scan(lambda h, x: (jnp.tanh(h @ p + x), None), jnp.zeros((T, K)), x), w, [x])
    state, states = np.zeros((T, K)), []
    for step in np.asarray(x):
        states.append(state)
        state = np.tanh(state @ np.asarray(w) + step)
    check(stats[""], np.concatenate(states), [0])


def test_reversed_scan_and_scan_in_scan(rng):
    w, x = normal(rng, 2, L, K, K), normal(rng, T, K)

    def forward(p, x):
        def group(x, ws):
            return lax.scan(lambda x, one: (jnp.tanh(x @ one), None), x, ws)[0], None

        return lax.scan(group, x, p, reverse=True)[0]

    stats = calibrate(forward, w, [x])
    second = deep(w[1], x)
    first = deep(w[0], np.tanh(second[-1] @ np.asarray(w[1, -1])))
    check(stats[""], np.stack([first, second]), [2], [0, 1])


def test_branch_not_taken_counts_nothing(rng):
    w, x = {"a": normal(rng, K, N), "b": normal(rng, K, N)}, normal(rng, T, K)
    stats = calibrate(lambda p, x: lax.cond(x[0, 0] > 1e9, lambda x: x @ p["a"], lambda x: x @ p["b"], x), w, [x])
    assert stats["a"].count == 0
    check(stats["b"], x, [0])


def test_mapped_stack(rng):
    w, x = normal(rng, L, K, N), normal(rng, L, T, K)
    check(calibrate(lambda p, x: jax.vmap(jnp.dot)(x, p), w, [x])[""], x, [1], [0])
    check(calibrate(lambda p, x: jnp.einsum("ltk,lkn->tln", x, p), w, [x])[""], x, [1], [0])
    last = jnp.moveaxis(w, 0, -1)
    check(calibrate(lambda p, x: jax.vmap(jnp.dot, in_axes=(0, 2))(x, p), last, [x])[""], x, [0], [2])


# -- experts and convolutions ------------------------------------------------------------------------------------------


def test_grouped_products_are_per_expert(rng):
    sizes, w, x = np.array([2, 0, 300, 7]), normal(rng, 4, K, N), normal(rng, 320, K)
    stats = calibrate(lambda p, b: lax.ragged_dot(b[0], p, b[1]), w, [(x, jnp.asarray(sizes))])
    start = 0
    for expert, size in enumerate(sizes):
        rows = np.asarray(x[start : start + size], np.float64)
        np.testing.assert_allclose(stats[""].moment[expert], rows.T @ rows, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(stats[""].absmax[expert], abs(rows).max(0, initial=0), rtol=1e-4)
        start += size
    assert (stats[""].axes, stats[""].stack) == ((1,), (0,))
    np.testing.assert_array_equal(stats[""].count, sizes)


def test_experts_in_a_scanned_stack(rng):
    """Layers and experts, both numbered; each layer sends the rows elsewhere."""
    w, x, sizes = normal(rng, L, 2, K, K), normal(rng, T, K), np.array([[5, 0], [2, 3], [1, 4]])

    def forward(p, b):
        def layer(x, one):
            return jnp.tanh(lax.ragged_dot(x, one[0], one[1])), None

        return lax.scan(layer, b[0], (p, b[1]))[0]

    stats = calibrate(forward, w, [(x, jnp.asarray(sizes, jnp.int32))])[""]
    assert (stats.axes, stats.stack) == ((2,), (0, 1))
    np.testing.assert_array_equal(stats.count, sizes)
    x = np.asarray(x, np.float64)
    for i, (cut, _) in enumerate(sizes):
        parts = x[:cut], x[cut:]
        for j, rows in enumerate(parts):
            np.testing.assert_allclose(stats.moment[i, j], rows.T @ rows, rtol=1e-4, atol=1e-5)
        x = np.tanh(np.concatenate([rows @ np.asarray(one) for rows, one in zip(parts, w[i], strict=True)]))


def test_experts_gathered_per_token(rng):
    w, x, ids = normal(rng, 3, K, N), normal(rng, T, K), np.array([2, 0, 2, 2, 1])
    stats = calibrate(lambda p, b: jnp.einsum("tk,tkn->tn", b[0], p[b[1]]), w, [(x, jnp.asarray(ids))])
    for expert in range(3):
        rows = np.asarray(x, np.float64)[ids == expert]
        np.testing.assert_allclose(stats[""].moment[expert], rows.T @ rows, rtol=1e-4, atol=1e-5)
        assert stats[""].count[expert] == len(rows)


@pytest.mark.parametrize("layout", [("NHWC", "HWIO", "NHWC"), ("NCHW", "OIHW", "NCHW")])
def test_convolution_is_a_product_with_patches(rng, layout):
    x, w = rng.standard_normal((2, 6, 5, 3)), rng.standard_normal((2, 3, 3, 4))
    patches = np.stack([x[:, i : i + 5, j : j + 3] for i in range(2) for j in range(3)], 3)  # (batch, h, w, window, in)
    if layout[0] == "NCHW":
        x, w = np.moveaxis(x, 3, 1), np.transpose(w, (3, 2, 0, 1))
        patches = np.swapaxes(patches, 3, 4)
    stats = calibrate(
        lambda p, x: lax.conv_general_dilated(x, p, (1, 1), "VALID", dimension_numbers=layout),
        jnp.asarray(w, jnp.float32), [jnp.asarray(x, jnp.float32)],
    )  # fmt: skip
    axes = [0, 1, 2] if layout[0] == "NHWC" else [1, 2, 3]
    check(stats[""], patches.reshape(-1, 18), axes)


def test_convolution_in_groups_is_named(rng):
    x, w = normal(rng, 1, 5, 5, 4), {"depthwise": normal(rng, 2, 2, 1, 4)}
    with pytest.warns(CalibrationWarning, match="'depthwise': not observed in a convolution in groups"):
        stats = calibrate(
            lambda p, x: lax.conv_general_dilated(
                x, p["depthwise"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=4
            ),
            w, [x],
        )  # fmt: skip
    assert len(stats) == 0


# -- uses --------------------------------------------------------------------------------------------------------------


def test_tied_weights_have_an_entry_per_use(rng):
    w, ids, x = normal(rng, N, K), jnp.array([1, 3, 3]), normal(rng, T, N)
    stats = calibrate(lambda p, b: (p[b[0]] @ p.T, b[1] @ p), w, [(ids, x)])
    assert len(stats[""].uses) == 2
    check(stats[""].along(1), np.asarray(w)[np.asarray(ids)], [1])
    check(stats[""].along(0), x, [0])


def test_the_same_array_in_two_places(rng):
    w, x = normal(rng, N, K), normal(rng, T, K)
    stats = calibrate(lambda p, x: (p["embed"][jnp.array([0])], x @ p["head"].T), {"embed": w, "head": w}, [x])
    check(stats["head"], x, [1])
    check(stats["embed"], x, [1])


def test_used_twice_is_summed(rng):
    w, x = normal(rng, K, K), normal(rng, T, K)
    stats = calibrate(lambda p, x: (x @ p) @ p, w, [x])
    check(stats[""], np.concatenate([x, np.asarray(x) @ np.asarray(w)]), [0])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn", "int8"])
def test_narrow_inputs_are_multiplied_exactly(rng, dtype):
    x = (10 * normal(rng, 512, K)).astype(dtype)
    stats = calibrate(lambda p, x: jnp.dot(x.astype(jnp.float32), p) if dtype == "int8" else x @ p.astype(dtype),
                      normal(rng, K, N), [x])  # fmt: skip
    check(stats[""], np.asarray(x, np.float64), [0])


def test_custom_derivatives_are_looked_into(rng):
    f = jax.custom_vjp(lambda x, w: x @ w)
    f.defvjp(lambda x, w: (x @ w, None), lambda _, g: (g, g))
    g = jax.custom_jvp(lambda x, w: x @ w)
    g.defjvp(lambda primals, tangents: (g(*primals), tangents[0] @ primals[1]))
    x = normal(rng, T, K)
    check(calibrate(lambda p, x: f(x, p), normal(rng, K, N), [x])[""], x, [0])
    check(calibrate(lambda p, x: g(x, p), normal(rng, K, N), [x])[""], x, [0])
