"""Arrays around a weight: parts, stacks, lookups and devices are the same for all of them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import eformer as ef
from eformer._formats.permuted.array import PermutedArray
from eformer._formats.scaled.array import ScaledArray

KINDS = ("scaled", "shared", "permuted", "activations", "lora", "dora")


def around(kind: str, q: Any, rng: Any) -> Any:
    lead, (rows, columns) = q.shape[:-2], q.shape[-2:]
    if kind in ("scaled", "shared"):
        shape = (*lead, rows, 1) if kind == "scaled" else (*[1] * len(lead), rows, columns)
        return ScaledArray(q, jnp.asarray(rng.uniform(1, 2, shape), jnp.float32))
    if kind == "permuted":
        order = [rng.permutation(rows) for _ in range(int(np.prod(lead)))]
        return PermutedArray(q, jnp.asarray(np.reshape(order, (*lead, rows)), jnp.int32), axis=-2)
    if kind == "activations":
        return ef.ActivationArray(q, jnp.asarray(rng.uniform(1, 2, (*lead, 1, 1)), jnp.float32), activations="int8")
    made = ef.add_lora({"kernel": q}, "*", rank=2, key=jax.random.key(0), dora=kind == "dora")["kernel"]
    b = jnp.asarray(rng.normal(size=(*lead, 2, columns)), jnp.float32)
    inner = made.v if kind == "dora" else made
    inner = inner.around(inner.w, b=b)
    return made.around(inner) if kind == "dora" else inner


def stack(kind: str) -> Any:
    rng = np.random.default_rng(KINDS.index(kind))
    w = jnp.asarray(rng.normal(size=(3, 16, 8)), jnp.float32)
    return around(kind, ef.quantize(w, dtype="int8", axis=-2), rng)


def parts(q: Any) -> Any:
    return q[1], q[1:], jnp.stack([q[0], q[2]]), jnp.concatenate([q[:1], q]), q[None], q[2].astype(jnp.float16)


@pytest.mark.parametrize("kind", KINDS)
def test_parts_and_stacks_stay_packed(kind: str) -> None:
    q = stack(kind)
    with ef.materialization_policy("error"):
        found = ef.implicit(parts)(q)
    for piece, expected in zip(found, parts(q.materialize()), strict=True):
        assert type(piece) is type(q)
        assert piece.format == q.format
        if kind == "activations":
            assert piece.x_scale.shape == (*piece.shape[:-2], 1, 1)
        dense = piece.materialize()
        assert dense.dtype == expected.dtype
        np.testing.assert_allclose(dense, expected, rtol=1e-2 if dense.dtype == jnp.float16 else 1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_parts_of_it_are_split_over_devices_with_the_weight(kind: str) -> None:
    q = stack(kind)
    mesh = Mesh(np.array(jax.devices()[:2]), "d")
    split = q.with_sharding(NamedSharding(mesh, PartitionSpec(None, None, "d")))
    np.testing.assert_array_equal(split.materialize(), q.materialize())
    for name, axes in q.beside().items():
        array = getattr(split, name)
        spec = [*array.sharding.spec, *[None] * (array.ndim - len(array.sharding.spec))]
        assert spec == ["d" if axis == 2 and n > 1 else None for axis, n in zip(axes, array.shape, strict=True)]
    whole = PartitionSpec(None, "d", None)
    assert (q.child_specs(whole) is None) == (kind == "permuted")


@pytest.mark.parametrize("factor", [(16, 1), (1, 8), (16, 8)])
def test_rows_of_scaled_weights_are_looked_up(factor: tuple[int, ...]) -> None:
    rng = np.random.default_rng(sum(factor))
    w = jnp.asarray(rng.normal(size=(16, 8)), jnp.float32)
    q = ScaledArray(ef.quantize(w, dtype="nf4", axis=-1, block_size=8), jnp.asarray(rng.uniform(1, 2, factor), "f4"))
    ids = jnp.array([[3, 15, 0], [-1, 7, 3]])

    def lookups(q: Any, ids: jax.Array) -> Any:
        outside = q.at[jnp.array([2, 40])]
        return q[ids], q[ids[0, 1]], outside.get(mode="fill", fill_value=0), outside.get(mode="fill"), q[ids, ids % 8]

    with ef.materialization_policy("error"):
        found = ef.implicit(lookups)(q, ids)
    for rows, expected in zip(found, lookups(q.materialize(), ids), strict=True):
        assert isinstance(rows, jax.Array)
        np.testing.assert_allclose(rows, expected, rtol=1e-6)


@pytest.mark.parametrize("kind", ["scaled", "shared", "activations"])
def test_matrices_of_a_stack_are_looked_up(kind: str) -> None:
    q, ids = stack(kind), jnp.array([2, 0, 2, 1])
    with ef.materialization_policy("error"):
        some, one = ef.implicit(lambda q, ids: (q[ids], q[ids[0]]))(q, ids)
    assert type(some) is type(one) is type(q)
    np.testing.assert_allclose(some.materialize(), q.materialize()[ids], rtol=1e-6)
    np.testing.assert_allclose(one.materialize(), q.materialize()[2], rtol=1e-6)


@pytest.mark.parametrize("kind", ["rows", "columns", "order of rows", "order of columns"])
def test_products_from_both_sides(kind: str) -> None:
    rng = np.random.default_rng(len(kind))
    w = ef.quantize(jnp.asarray(rng.normal(size=(16, 8)), jnp.float32), dtype="int8")
    axis = 0 if "rows" in kind else 1
    if kind.startswith("order"):
        q: Any = PermutedArray(w, jnp.asarray(rng.permutation(w.shape[axis]), jnp.int32), axis=axis - 2)
    else:
        shape = (16, 1) if axis == 0 else (1, 8)
        q = ScaledArray(w, jnp.asarray(rng.uniform(1, 2, shape), jnp.float32))
    for contracted in (0, 1):
        x = jnp.asarray(rng.normal(size=(3, q.shape[contracted])), jnp.float32)
        for left, right, axes in ((x, q, (1, contracted)), (q, x, (contracted, 1))):
            dense = [np.asarray(ef.materialize(side)) for side in (left, right)]
            with ef.materialization_policy("error"):
                found = ef.implicit(lambda a, b, axes=axes: jnp.tensordot(a, b, axes=axes))(left, right)
            np.testing.assert_allclose(found, np.tensordot(*dense, axes=axes), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("factor", [jnp.ones((5, 1)), jnp.ones(16), jnp.ones((16, 1), jnp.int32)])
def test_factors_that_do_not_fit_are_refused(factor: jax.Array) -> None:
    with pytest.raises(ValueError, match=r"does not fit w of shape \[16, 8\]: it must be floating"):
        ScaledArray(ef.quantize(jnp.ones((16, 8)), dtype="int8"), factor)


def test_branches_agree_on_the_weight_inside() -> None:
    """A factor changes what the weight stores; the other branch follows, and nothing becomes dense."""
    q, x = ef.quantize(jnp.ones((16, 8)), dtype="int8", axis=0, activations="int8"), jnp.ones(16)

    def product(q: Any, factor: jax.Array) -> Any:
        return x @ jax.lax.cond(factor > 0, lambda q: q * factor, lambda q: q, q)

    with ef.materialization_policy("error"):
        for factor, expected in ((2.0, 32.0), (-1.0, 16.0)):
            found = jax.jit(ef.implicit(product))(q, jnp.float32(factor))
            np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_scales_of_inputs_follow_a_reshape() -> None:
    q = stack("activations")
    with ef.materialization_policy("error"):
        more, fewer = ef.implicit(lambda q: (q.reshape(3, 1, 16, 8), q.reshape(3, 1, 16, 8).reshape(3, 16, 8)))(q)
    assert more.x_scale.shape == (3, 1, 1, 1)
    np.testing.assert_array_equal(fewer.x_scale, q.x_scale)
