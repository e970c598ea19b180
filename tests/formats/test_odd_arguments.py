"""Arguments out of the ordinary: what plain JAX makes of them, quantized arrays do too."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax

from eformer.jaximus import SlicedBelowCoreError, implicit, materialize
from eformer.ops.quantization import Array1B, Array8B, ArrayNF4, quantize
from eformer.ops.quantization.kernels import export_checks

STACKS = {
    "nf4": lambda w, axis: ArrayNF4.quantize(w, 8, axis=axis),
    "int8": lambda w, axis: Array8B.quantize(w, axis=axis),
    "ternary": lambda w, axis: Array1B.quantize(jnp.sign(w), axis=axis),
}
ARRAYS = {name: lambda w, name=name: STACKS[name](w, -1) for name in STACKS}


@pytest.fixture(params=ARRAYS)
def q(request: pytest.FixtureRequest, key: jax.Array):
    return ARRAYS[request.param](jax.random.normal(key, (16, 32)))


def test_starts_outside_of_the_array(q) -> None:
    """A negative start counts from the end once, and is clamped then; so is one that is too large."""
    dense = q.materialize()
    programs = (
        lambda a, i: a[i],
        lambda a, i: lax.dynamic_index_in_dim(a, i, keepdims=False),
        lambda a, i: lax.dynamic_slice(a, (i, 0), (3, 32)),
        lambda a, i: lax.dynamic_slice_in_dim(a, i, 5),
    )
    for program in programs:
        mapped = jax.jit(implicit(program))
        for i in (-100, -17, -16, -15, -1, 0, 13, 15, 16, 100):
            np.testing.assert_array_equal(materialize(mapped(q, i)), jax.jit(program)(dense, i), err_msg=str(i))


def test_the_negative_of_a_scalar(q) -> None:
    """One value of INT8 is still an array of it, without axes."""
    np.testing.assert_array_equal(materialize(implicit(lambda a: -a[3, 2])(q)), -q.materialize()[3, 2])


def test_what_arrays_refuse_is_refused_alike(q) -> None:
    dense = q.materialize()
    for program in (
        lambda a: lax.transpose(a, (0, 0)),
        lambda a: lax.transpose(a, (0, 2)),
        lambda a: lax.concatenate([a, a], 3),
        lambda a: lax.broadcast_in_dim(a, (16, 32, 2), (0, 5)),
    ):
        with pytest.raises((TypeError, ValueError)) as plain:
            program(dense)
        with pytest.raises(plain.type) as ours:
            implicit(program)(q)
        assert str(ours.value).splitlines()[0] == str(plain.value).splitlines()[0]
    with pytest.raises(ValueError, match=r"512 values of shape \(16, 32\) cannot be reshaped to \(5, 5\)"):
        implicit(lambda a: lax.reshape(a, (5, 5)))(q)


@pytest.mark.parametrize("axis", [-1, -2, -3])
@pytest.mark.parametrize("name", ARRAYS)
def test_vmap_around_the_stored_arrays(name: str, axis: int, key: jax.Array) -> None:
    """Along any axis plain vmap gives the right values or refuses; inside implicit it is right."""
    q = STACKS[name](jax.random.normal(key, (8, 8, 8)), axis)
    dense = q.materialize()
    mapped = []
    for at in range(-3, 3):
        program = jax.vmap(lambda r: r.sum(-1), in_axes=at)
        expected = program(dense)
        assert jnp.allclose(implicit(program)(q), expected, atol=1e-5), at
        for run in (program, jax.jit(program), jax.vmap(jax.jit(lambda r: r.sum(-1)), in_axes=at)):
            try:
                got = materialize(run(q))
            except (SlicedBelowCoreError, ValueError):  # the second where JAX finds sizes that do not fit
                continue
            np.testing.assert_allclose(got, expected, atol=1e-5, err_msg=str(at))
            mapped.append(at)
    # A scale of size one cannot be mapped along that axis, so of 8-bit arrays fewer axes can.
    in_place = [at for at in range(3) if q.stores_axis_in_place(at, 3) and name != "int8"]
    assert set(in_place) <= set(mapped)
    threefold = jax.tree.map(lambda *leaves: jnp.stack(leaves), q, q, q)
    for at in in_place:
        stacked = jax.vmap(lambda r: r, out_axes=at)(threefold)
        np.testing.assert_allclose(stacked.materialize(), jnp.stack([dense] * 3, axis=at), atol=1e-5)


def test_an_axis_that_vmap_cannot_map_is_refused_at_every_use(key: jax.Array) -> None:
    q = ArrayNF4.quantize(jax.random.normal(key, (8, 8, 8)), 8, axis=-2)

    def twice(r: Any) -> jax.Array:
        for use in (lambda: r.shape, lambda: jax.tree.leaves(r), lambda: r.materialize(), lambda: r * 2.0):
            with pytest.raises(SlicedBelowCoreError, match="inside implicit"):
                use()
        return jnp.zeros(())

    assert jax.vmap(twice, in_axes=1)(q).shape == (8,)


@pytest.mark.parametrize("name", ARRAYS)
def test_arrays_made_inside_vmap_may_be_mapped_anywhere(name: str, key: jax.Array) -> None:
    """Where the tracers of computed values have their axis says nothing about the array."""
    w = jax.random.normal(key, (8, 8, 8))
    for made in (lambda v: STACKS[name](v, -1), jax.jit(lambda v: STACKS[name](v, -1))):
        got = jax.vmap(lambda v, made=made: jax.tree.map(lambda leaf: leaf, made(v)).sum(-1), in_axes=1)(w)
        expected = [STACKS[name](w[:, i], -1).materialize().sum(-1) for i in range(8)]
        np.testing.assert_allclose(got, expected, atol=1e-5)

    # Children mapped by hand, along an axis that the array could not be mapped along.
    stack, one = STACKS["nf4"](w, -1), STACKS["nf4"](w[0], -1)
    treedef = jax.tree.structure(one)
    last = [jnp.moveaxis(leaf, 0, 2) for leaf in jax.tree.leaves(stack)]
    got = jax.vmap(lambda *leaves: jax.tree.unflatten(treedef, leaves).sum(-1), in_axes=2)(*last)
    np.testing.assert_allclose(got, stack.materialize().sum(-1), atol=1e-5)


@pytest.mark.parametrize("fmt", ["nf4", "int8", "ternary", "binary"])
def test_straight_through_by_hand(fmt: str, key: jax.Array) -> None:
    """The encoder is a step function: of `w + stop_gradient(q - w)` only the first term counts."""
    w = jax.random.normal(key, (16, 32))
    rounded = quantize(w, dtype=fmt).materialize()
    grad = jax.grad(lambda w: jnp.sum((w + lax.stop_gradient(quantize(w, dtype=fmt).materialize() - w)) ** 3))(w)
    np.testing.assert_allclose(grad, 3 * rounded**2, rtol=1e-5)


@pytest.mark.parametrize("fmt", ["nf4", "int8", "ternary", "binary"])
def test_without_jit(fmt: str, key: jax.Array) -> None:
    q = quantize(jax.random.normal(key, (256, 96)), dtype=fmt)
    x, rows = jax.random.normal(key, (3, 256)), jnp.array([3, 250])
    programs = (lambda x, q: x @ q, lambda x, q: jax.grad(lambda x: (x @ q).sum())(x), lambda x, q: q[rows] * 2.0)
    expected = [program(x, q.materialize()) for program in programs]
    with jax.disable_jit():
        for program, want in zip(programs, expected, strict=True):
            np.testing.assert_allclose(materialize(program(x, q)), want, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("fmt", ["nf4", "int8", "ternary", "binary"])
def test_strict_promotion(fmt: str, kernels: bool, key: jax.Array) -> None:
    """Nothing of ours leans on the promotions that users can turn off."""
    q = dataclasses.replace(quantize(jax.random.normal(key, (192, 256)), dtype=fmt), use_kernel=kernels)
    stack = dataclasses.replace(quantize(jax.random.normal(key, (2, 64, 32)), dtype=fmt), use_kernel=kernels)
    x, xs, tokens = jnp.ones((1, 192)), jnp.ones((6, 64)), jnp.array([[1, 2], [3, 4]])
    programs = (
        lambda q: x @ q,
        lambda q: jax.grad(lambda x: (x @ q).sum())(x),
        lambda q: q[tokens] * 2.0,
        lambda q: q[:, tokens] * 2.0,
        lambda q: lax.ragged_dot(xs, stack if q is not dense else stack.materialize(), jnp.array([2, 4])),
    )
    dense = q.materialize()
    expected = [program(dense) for program in programs]
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        for program, want in zip(programs, expected, strict=True):
            np.testing.assert_allclose(materialize(implicit(program)(q)), want, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("fmt", ["nf4", "int8", "ternary", "binary"])
def test_exported_for_any_batch_size(fmt: str, key: jax.Array) -> None:
    q = quantize(jax.random.normal(key, (192, 256)), dtype=fmt)
    (batch,) = export.symbolic_shape("batch")
    x = jax.ShapeDtypeStruct((batch, 192), jnp.float32)
    program = jax.jit(lambda x, q: x @ q)
    for kernels, options in ((True, {"disabled_checks": export_checks()}), (False, {})):
        chosen = dataclasses.replace(q, use_kernel=kernels)
        exported = export.export(program, **options)(x, chosen)
        for m in (1, 5):
            some = jax.random.normal(key, (m, 192))
            np.testing.assert_allclose(exported.call(some, chosen), some @ q.materialize(), rtol=1e-5, atol=1e-4)
    # Kernels of other platforms are chosen by the number of rows: one that is not known takes XLA's path.
    assert "tpu_custom_call" not in export.export(program, platforms=("tpu",))(x, q).mlir_module()
    assert export.export(program, platforms=("cuda",))(x, q).platforms == ("cuda",)
