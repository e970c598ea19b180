"""`QuantizedCache`: what is written, what is left alone, and what attention reads."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

import eformer as ef
from eformer import QuantizedCache, implicit, materialization_policy

from .caches import KINDS, SHAPE, attention, check_write, filled, random, twin

TOLERANCE = {"float32": 2e-6, "bfloat16": 1e-2}


# -- making one --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "bits"), [("int8", 8.25), ("int4", 4.25)])
def test_zeros(kind: str, bits: float):
    cache = QuantizedCache.zeros((2, 16, 4, 128), jnp.bfloat16, kind)
    assert (cache.shape, cache.dtype, cache.format) == ((2, 16, 4, 128), jnp.bfloat16, kind)
    assert cache.bits_per_weight == bits
    assert repr(cache) == f"QuantizedCache(bfloat16[2,16,4,128], {kind}, {bits} bits per weight)"
    np.testing.assert_array_equal(cache.materialize(), np.zeros(cache.shape, jnp.bfloat16))
    jax.tree.map(np.testing.assert_array_equal, cache, QuantizedCache.quantize(cache.materialize(), kind))
    assert isinstance(cache, ef.QuantizedArray)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 20, 40, 64, 72])
def test_quantize_is_the_twin(kind: str, size: int):
    rows = random((3, 5, size), jnp.bfloat16)
    cache = QuantizedCache.quantize(rows, kind)
    packed, scale = twin(cache, rows)
    np.testing.assert_array_equal(cache.packed, packed)
    np.testing.assert_array_equal(cache.scale, scale)
    assert cache.dtype == jnp.bfloat16
    steps = 2.0 ** (cache.bits - 1)
    error = np.abs(np.asarray(cache.materialize() - rows, np.float32))
    assert error.max() <= 1.02 * np.abs(rows).max() / steps


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"format": "int3"}, "format='int3' is not a format of caches; allowed are 'int8', 'int4'"),
        ({"block_size": 20}, "block_size=20 is not allowed"),
        ({"scale_dtype": "int32"}, "a scale of dtype int32 is not allowed"),
        ({"dtype": jnp.int8}, "How they are stored is format='int8'"),
        ({"dtype": "int4"}, "dtype=int4 is not allowed: it is what values are read as, a floating type"),
        ({"dtype": jnp.int32}, "dtype=int32 is not allowed"),
        ({"bits": 4}, 'zeros() has no argument bits=: the format is format="int4"'),
        ({"shape": ()}, "a cache has rows"),
        ({"shape": (2, -1)}, "of sizes from 0"),
        ({"shape": (2, 1.5)}, "must be an integer"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str):
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        QuantizedCache.zeros(**{"shape": SHAPE, **options})


def test_a_cache_is_symmetric():
    cache = QuantizedCache.zeros((4, 64))
    with pytest.raises(ValueError, match="no zero points and no bias"):
        QuantizedCache(cache.packed, cache.scale, zero=jnp.zeros_like(cache.scale), bits=8, block_size=64)


# -- writing -----------------------------------------------------------------------------------------------------------

WRITES: dict[str, Any] = {
    "a position": (np.s_[:, 3], lambda c, x: c.at[:, 3].set(x)),
    "a slice": (np.s_[:, 2:5], lambda c, x: c.at[:, 2:5].set(x)),
    "a row": (np.s_[1, 4, 2], lambda c, x: c.at[1, 4, 2].set(x)),
    "a computed position": (np.s_[:, 3], lambda c, x: c.at[:, jnp.asarray(3)].set(x)),
    "a position per text": (np.s_[[0, 1], [5, 2]], lambda c, x: c.at[jnp.arange(2), jnp.array([5, 2])].set(x)),
    "a position per text and head": (
        np.s_[[[0], [1]], [[5, 0, 1], [2, 2, 4]], [[0, 1, 2]]],
        lambda c, x: c.at[jnp.arange(2)[:, None], jnp.array([[5, 0, 1], [2, 2, 4]]), jnp.arange(3)].set(x),
    ),
    "heads": (np.s_[:, :, [2, 0]], lambda c, x: c.at[:, :, jnp.array([2, 0])].set(x)),
    "everything": (np.s_[:], lambda c, x: c.at[:].set(x)),
    "dynamic_update_slice": (np.s_[:, 2:4], lambda c, x: lax.dynamic_update_slice(c, x, (0, 2, 0, 0))),
    "clamped": (np.s_[:, 4:], lambda c, x: lax.dynamic_update_slice(c, x, (7, 9, 7, 7))),
    "from the end": (np.s_[:, 3:5], lambda c, x: lax.dynamic_update_slice(c, x, (0, -3, 0, 0))),
    "in front of the front": (np.s_[:, :2], lambda c, x: lax.dynamic_update_slice(c, x, (-3, -8, -4, -50))),
    "dynamic_update_index_in_dim": (np.s_[:, 1:2], lambda c, x: lax.dynamic_update_index_in_dim(c, x, 1, 1)),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", WRITES)
def test_writes(kind: str, name: str):
    index, write = WRITES[name]
    before = filled(kind, dtype=jnp.bfloat16)
    rows = random(np.zeros(SHAPE)[index].shape, jnp.bfloat16)
    with materialization_policy("error"):
        check_write(before, jax.jit(implicit(write))(before, rows), index, rows)
        check_write(before, implicit(write)(before, rows), index, rows)


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_wrapper(kind: str):
    before, rows = filled(kind), random((2, 3, 40))
    after = jax.jit(lambda c, x, i: c.at[:, i].set(x))(before, rows, 4)
    check_write(before, after, np.s_[:, 4], rows)


def test_indices_out_of_range_are_dropped_or_clipped():
    before, rows = filled("int8"), random((2, 3, 40))
    where = jnp.array([6, 1])
    dropped = before.at[jnp.arange(2), where].set(rows)
    check_write(before, dropped, np.s_[[1], [1]], rows[1:])
    clipped = before.at[jnp.arange(2), where].set(rows, mode="clip")
    check_write(before, clipped, np.s_[[0, 1], [5, 1]], rows)


def test_numbers_are_spread_over_rows():
    before = filled("int8")
    check_write(before, before.at[:, 2].set(0.5), np.s_[:, 2], jnp.full((2, 3, 40), 0.5))


@given(st.data())
def test_any_slice(data: st.DataObject):
    kind = data.draw(st.sampled_from(KINDS))
    lead = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    size = data.draw(st.sampled_from([8, 24, 64]))
    lengths = [data.draw(st.integers(1, n)) for n in lead]
    starts = [data.draw(st.integers(-3 * n, 3 * n)) for n in lead]
    sizes = zip(starts, lead, lengths, strict=True)
    index = tuple(slice(a, a + m) for a, m in ((np.clip(a + n * (a < 0), 0, n - m), m) for a, n, m in sizes))
    before, rows = filled(kind, (*lead, size), block_size=16), random((*lengths, size))
    check_write(before, before.at[index].set(rows), index, rows)
    put = implicit(lambda c, x: lax.dynamic_update_slice(c, x, (*starts, 0)))
    check_write(before, put(before, rows), index, rows)


@given(st.data())
def test_any_rows(data: st.DataObject):
    kind = data.draw(st.sampled_from(KINDS))
    places = data.draw(st.lists(st.integers(0, 11), min_size=1, max_size=12, unique=True))
    axis = data.draw(st.integers(0, 1))
    shape = (12, 2, 24) if axis == 0 else (2, 12, 24)
    index = (np.array(places),) if axis == 0 else (slice(None), np.array(places))
    before, rows = filled(kind, shape), random(np.zeros(shape)[index].shape)
    check_write(before, before.at[tuple(jnp.asarray(i) if axis == 0 else i for i in index)].set(rows), index, rows)


def test_not_a_number_stays_in_its_row():
    rows = random((2, 3, 40)).at[0, 1, 7].set(jnp.nan).at[1, 2, 0].set(jnp.inf)
    found = np.asarray(filled("int8").at[:, 3].set(rows).materialize())
    assert np.isnan(found).sum() == 80
    assert np.isnan(found[0, 3, 1]).all()
    assert np.isnan(found[1, 3, 2]).all()


@pytest.mark.parametrize(
    "write",
    [
        lambda c: c.at[0, 0, 0, 3].set(1.0),
        lambda c: c.at[..., :8].set(1.0),
        lambda c: c.at[:, :, :, jnp.array([1, 2])].set(1.0),
        lambda c: implicit(lax.dynamic_update_slice)(c, jnp.ones((1, 1, 1, 8)), (0, 0, 0, 0)),
    ],
)
def test_part_of_a_row_is_refused(write: Any):
    with pytest.raises(ValueError, match="part of a row: rows of this QuantizedCache are the 40 values along axis 3"):
        write(filled("int8"))


def test_other_updates_are_dense_and_said_to_be():
    with materialization_policy("error"), pytest.raises(ef.errors.MaterializationError, match="scatter-add"):
        filled("int8").at[:, 0].add(1.0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_in_a_cache(kind: str):
    """Rows that are quantized are copied, not quantized again."""
    long, short = QuantizedCache.zeros((2, 9, 3, 40), format=kind), filled(kind)
    moved = implicit(lambda a, b: lax.dynamic_update_slice(a, b, (0, 2, 0, 0)))(long, short)
    np.testing.assert_array_equal(moved.packed[:, 2:8], short.packed)
    np.testing.assert_array_equal(moved.scale[:, 2:8], short.scale)
    assert not np.asarray(moved[:, :2].materialize()).any()
    other = filled("int4" if kind == "int8" else "int8")
    with pytest.raises(ValueError, match="never silently quantized twice"):
        implicit(lambda a, b: lax.dynamic_update_slice(a, b, (0, 2, 0, 0)))(long, other)


# -- reading -----------------------------------------------------------------------------------------------------------


def grouped(q: Any, keys: Any, values: Any) -> Any:
    """Heads in front of positions, several queries per head."""
    keys, values = (jnp.swapaxes(part, 1, 2) for part in (keys, values))
    q = q.reshape(*q.shape[:2], keys.shape[1], -1, q.shape[-1])
    scores = jnp.einsum("btkgd,bksd->bkgts", q, keys).astype(jnp.float32)
    return jnp.einsum("bkgts,bksd->btkgd", jax.nn.softmax(scores).astype(q.dtype), values)


PROGRAMS: dict[str, Any] = {
    "attention": attention,
    "grouped": grouped,
    "jax.nn": jax.nn.dot_product_attention,
    "one text": lambda q, keys, _: jnp.tensordot(q[0], keys[0], ((2,), (2,))),
    "mapped": lambda q, keys, values: jax.vmap(lambda q, k, v: attention(q[None], k[None], v[None])[0])(
        q, keys, values
    ),
}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=lambda t: t.__name__)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_reads(name: str, kind: str, dtype: Any):
    keys, values = (QuantizedCache.quantize(random((2, 24, 3, 40), dtype, seed), kind) for seed in (1, 2))
    q, program = random((2, 4, 3, 40), dtype), implicit(PROGRAMS[name])
    with materialization_policy("error"):
        found = jax.jit(program)(q, keys, values)
    expected = program(*(part.astype(jnp.float32) for part in (q, keys.materialize(), values.materialize())))
    assert found.dtype == dtype
    error = np.linalg.norm(np.asarray(found, np.float32) - expected) / np.linalg.norm(expected)
    assert error < TOLERANCE[jnp.dtype(dtype).name]


def test_attention_makes_no_dense_copy():
    cache = QuantizedCache.zeros((2, 3, 2048, 64), jnp.bfloat16)
    q = random((2, 1, 3, 64), jnp.bfloat16)
    program = jax.jit(implicit(lambda q, k, v: grouped(q, jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2))))
    assert not ef.explain(program)(q, cache, cache).materializations
    temporary = program.lower(q, cache, cache).compile().memory_analysis().temp_size_in_bytes
    assert temporary < cache.size / 2  # a dense copy would take two bytes for each value, or four


@pytest.mark.parametrize("kind", KINDS)
def test_whole_rows_can_be_taken_out(kind: str):
    cache = filled(kind)
    dense = np.asarray(cache.materialize())
    for index in (np.s_[1], np.s_[:, 2:4], np.s_[:, -1], np.s_[:, ::2], np.s_[:, np.array([4, 0])]):
        found = cache[index]
        assert type(found) is QuantizedCache
        np.testing.assert_array_equal(found.materialize(), dense[index])
    np.testing.assert_array_equal(cache[1, 2, 0], dense[1, 2, 0])
    beams = jax.jit(lambda c, i: c[i])(cache, jnp.array([1, 1, 0]))
    assert type(beams) is QuantizedCache
    np.testing.assert_array_equal(beams.materialize(), dense[[1, 1, 0]])
    longer = implicit(lambda a: jnp.concatenate([a[:, 2:], a[:, :2]], axis=1))(cache)
    assert type(longer) is QuantizedCache
    np.testing.assert_array_equal(longer.materialize(), np.roll(dense, -2, axis=1))
