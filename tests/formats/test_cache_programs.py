"""Quantized caches as values of programs: in loops, mapped, donated, sharded, saved."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import eformer as ef
from eformer import QuantizedCache, implicit, materialization_policy

# -- as a value of programs --------------------------------------------------------------------------------------------
from .caches import KINDS, attention, check_write, filled, random


@pytest.mark.parametrize("kind", KINDS)
def test_carried_by_loops(kind: str):
    cache, rows = filled(kind), random((6, 2, 3, 40))
    scanned = jax.jit(lambda c, xs: lax.scan(lambda c, ix: (c.at[:, ix[0]].set(ix[1]), None), c, (jnp.arange(6), xs)))
    check_write(cache, scanned(cache, rows)[0], np.s_[:], jnp.moveaxis(rows, 0, 1))

    @implicit
    def several(c: Any, count: Any) -> Any:
        def body(state: Any) -> Any:
            i, c = state
            return i + 1, lax.dynamic_update_slice(c, rows[i][:, None], (0, i, 0, 0))

        return lax.while_loop(lambda state: state[0] < count, body, (0, c))[1]

    with materialization_policy("error"):
        check_write(cache, jax.jit(several)(cache, 4), np.s_[:, :4], jnp.moveaxis(rows[:4], 0, 1))
        chosen = jax.jit(lambda p, c: lax.cond(p, lambda c: c.at[:, 0].set(rows[0]), lambda c: c, c))
        check_write(cache, chosen(True, cache), np.s_[:, 0], rows[0])
        np.testing.assert_array_equal(chosen(False, cache).packed, cache.packed)


@pytest.mark.parametrize("kind", KINDS)
def test_mapped(kind: str):
    cache, rows, places = filled(kind), random((2, 3, 40)), jnp.array([5, 2])
    written = jax.vmap(lambda c, x, i: c.at[i].set(x))(cache, rows, places)
    check_write(cache, written, np.s_[[0, 1], [5, 2]], rows)
    put = implicit(jax.vmap(lambda c, x, i: lax.dynamic_update_slice(c, x[None], (i, 0, 0))))
    check_write(cache, put(cache, rows, places), np.s_[[0, 1], [5, 2]], rows)
    over_heads = jax.vmap(lambda c, x: c.at[:, 1].set(x), in_axes=(2, 1), out_axes=2)(cache, rows)
    check_write(cache, over_heads, np.s_[:, 1], rows)


def test_donated():
    """The new cache takes the memory of the old one."""
    cache, rows = filled("int8", (2, 64, 3, 64)), random((2, 3, 64))
    expected = cache.at[:, 7].set(rows)
    step = jax.jit(lambda c, x, i: c.at[:, i].set(x), donate_argnums=0)
    aliased = step.lower(cache, rows, 7).compile().memory_analysis().alias_size_in_bytes
    assert aliased == cache.nbytes
    held = cache.packed.unsafe_buffer_pointer()
    after = step(cache, rows, 7)
    assert after.packed.unsafe_buffer_pointer() == held
    assert cache.packed.is_deleted()
    np.testing.assert_array_equal(after.packed, expected.packed)
    np.testing.assert_array_equal(after.scale, expected.scale)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("kind", KINDS)
def test_sharded(kind: str, axis_type: Any):
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(axis_type, axis_type))
    spec = P("a", None, "b")
    plain = filled(kind, (4, 8, 2, 40))
    cache = plain.with_sharding(NamedSharding(mesh, spec))
    rows, q = random((4, 2, 40)), random((4, 1, 2, 40))
    rows, q = (jax.device_put(x, NamedSharding(mesh, s)) for x, s in ((rows, P("a", "b")), (q, spec)))

    @jax.jit
    @implicit
    def step(cache: Any, rows: Any, q: Any, i: Any) -> Any:
        cache = lax.dynamic_update_slice(cache, rows[:, None], (0, i, 0, 0))
        return attention(q, cache, cache), cache

    with jax.set_mesh(mesh), materialization_policy("error"):
        out, after = step(cache, rows, q, 5)
        text = step.lower(cache, rows, q, 5).compile().as_text()
    check_write(plain, after.with_sharding(None), np.s_[:, 5], rows)
    assert after.packed.sharding.is_equivalent_to(cache.packed.sharding, after.packed.ndim)
    assert after.sharding == cache.sharding
    assert not re.search("all-gather|all-reduce|all-to-all", text)
    dense = after.with_sharding(None).materialize()
    np.testing.assert_allclose(out, attention(*map(np.asarray, (q, dense, dense))), rtol=1e-5, atol=1e-6)
    empty = QuantizedCache.zeros((4, 8, 2, 40), format=kind, sharding=NamedSharding(mesh, spec))
    assert empty.packed.sharding.is_equivalent_to(cache.packed.sharding, empty.packed.ndim)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wrap", [lambda f: f, implicit], ids=["plain", "implicit"])
def test_written_in_shard_map(kind: str, wrap: Any):
    mesh, spec = jax.make_mesh((4, 2), ("a", "b")), P("a", None, "b")
    plain, rows = filled(kind, (4, 8, 2, 40)), random((4, 1, 2, 40))

    def write(cache: Any, rows: Any, i: Any) -> Any:
        return lax.dynamic_update_slice(cache, rows, (0, i, 0, 0)), rows.sum(keepdims=True)

    step = wrap(jax.shard_map(implicit(write), mesh=mesh, in_specs=(spec, spec, P()), out_specs=spec))
    split = NamedSharding(mesh, spec)
    with ef.materialization_policy("error"):
        after, sums = jax.jit(step)(plain.with_sharding(split), jax.device_put(rows, split), 5)
    check_write(plain, after.with_sharding(None), np.s_[:, 5:6], rows)
    np.testing.assert_allclose(sums, rows.reshape(4, 1, 2, 1, 40).sum(-1), rtol=1e-5)


def test_derivatives():
    cache, q = filled("int8"), random((2, 2, 3, 40))
    dense = cache.materialize()
    loss = implicit(lambda q, c: jnp.sum(jnp.square(attention(q, c, c))))
    np.testing.assert_allclose(jax.grad(loss)(q, cache), jax.grad(loss)(q, dense), rtol=1e-4, atol=1e-6)
    with pytest.raises(ef.errors.QuantizedGradientError, match=r"write `jax.lax.stop_gradient\(rows\)`"):
        jax.grad(lambda x: loss(q, cache.at[:, 0].set(x)))(random((2, 3, 40)))


@pytest.mark.parametrize("kind", KINDS)
def test_saved_and_reported(kind: str, tmp_path: Any):
    caches = {"keys": filled(kind, dtype=jnp.bfloat16), "values": QuantizedCache.zeros((2, 64), format=kind)}
    loaded = ef.load(ef.save(tmp_path / "cache.safetensors", caches))
    assert jax.tree.structure(loaded) == jax.tree.structure(caches)
    for a, b in zip(jax.tree.leaves(loaded), jax.tree.leaves(caches), strict=True):
        np.testing.assert_array_equal(a, b)
    assert [(leaf.path, leaf.format, leaf.nbytes) for leaf in ef.report(caches).leaves] == [
        (name, kind, cache.nbytes) for name, cache in caches.items()
    ]


def test_a_scale_per_row_is_what_int8_kernels_read():
    for shape in ((2, 64), (3, 2, 64), (1, 64)):
        whole, blocks = QuantizedCache.zeros(shape), QuantizedCache.zeros(shape, block_size=32)
        assert [part.shape for part in whole.kernel_operands()] == [shape, (*shape[:-1], 1)]
        assert (whole.kernel_format == "int8", blocks.kernel_format == "int8") == (True, False)
        assert blocks.kernel_operands()[0].shape == (*shape[:-1], 2, 32)
