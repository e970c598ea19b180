"""What keeps the type: storage moves, nothing is decoded, and the values stay those of the dense program."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any, ClassVar

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from eformer import Part, QuantizedArray
from eformer._formats.floating.array import ArrayFloat
from eformer.jaximus import MaterializationError, aux_field, implicit, materialization_policy
from eformer.ops.quantization import Array8B

from .contract import EVERY, FAST, FEW, FORMATS, check, dense, make, normal, seeded

I = jnp.asarray([3, 0, 1])  # noqa: E741
# operation on a (128, 64) matrix: the axes it needs to be free of packing (it may use the others as it likes)
KEEP = {
    "transpose": (lambda q: q.T, ()),
    "transpose twice": (lambda q: q.T.T, ()),
    "expand": (lambda q: [jnp.expand_dims(q, i) for i in range(3)], ()),
    "squeeze": (lambda q: jnp.squeeze(q[None, :, None]), ()),
    "broadcast": (lambda q: jnp.broadcast_to(q, (2, *q.shape)), ()),
    "copy": (lambda q: lax.optimization_barrier(jnp.copy(q)), ()),
    "astype": (lambda q: q.astype(jnp.bfloat16), ()),
    "neg": (lambda q: -q, ()),
    "times scalar": (lambda q: [q * 2.0, 3.0 * q, q * jnp.float32(2), q / 4], ()),
    "stack": (lambda q: jnp.stack([q, q]), ()),
    "stack last": (lambda q: jnp.stack([q, q], 2), ()),
    "where": (lambda q: jnp.where(jnp.asarray(True), q, -q), ()),
    "reshape ones": (lambda q: q.reshape(1, 128, 1, 64), ()),
    "split rows": (lambda q: q.reshape(4, 32, 64), (0,)),
    "split columns": (lambda q: q.reshape(128, 4, 16), (1,)),
    "row": (lambda q: q[3], (0,)),
    "column": (lambda q: q[:, 3], (1,)),
    "rows": (lambda q: [q[3:9], q[::2], q[-5:]], (0,)),
    "columns": (lambda q: [q[:, 3:9], q[:, ::3]], (1,)),
    "blocks of rows": (lambda q: [q[64:], q[:64]], ()),
    "blocks of columns": (lambda q: [q[:, 32:], q[:, :32]], ()),
    "flip rows": (lambda q: jnp.flip(q, 0), (0,)),
    "flip columns": (lambda q: jnp.flip(q, 1), (1,)),
    "take matrices": (lambda q: [jnp.stack([q, -q])[I % 2], jnp.stack([q, q]).at[I % 2].get(mode="clip")], ()),
    "dynamic rows": (lambda q: lax.dynamic_slice_in_dim(q, I[0], 5, 0), (0,)),
    "dynamic columns": (lambda q: lax.dynamic_slice_in_dim(q, I[0], 5, 1), (1,)),
    "split": (lambda q: jnp.split(q, 4, 0), (0,)),
    "split across": (lambda q: jnp.split(q, [10, 20], 1), (1,)),
}


def keeps(name: str, free: tuple[int, ...]) -> bool:
    packed = FORMATS[name].axis
    if "scalar" in name or packed is None:
        return True
    return 2 + packed not in free


@pytest.mark.parametrize("name", EVERY)
def test_exact_operations_keep_the_type(name: str) -> None:
    """Traced under the policy that refuses to decode; compared as one compiled program."""
    q = make(name, seeded(name), 128, 64)
    table = {op: f for op, (f, free) in KEEP.items() if keeps(name, free) and not ("tiles" in name and "blocks" in op)}
    kind = FORMATS[name].kind
    with materialization_policy("error"):
        for op, f in table.items():
            out = jax.eval_shape(implicit(f), q)
            pieces = jax.tree.leaves(out, is_leaf=lambda x: isinstance(x, kind))
            assert all(isinstance(piece, kind) for piece in pieces), op

    def both(q):
        return [{op: f(array) for op, f in table.items()} for array in (q, q.materialize())]

    check(*jax.jit(lambda q: dense(implicit(both)(q)), compiler_options=FAST)(q))


def join(p, q, axis: int):
    return implicit(lambda p, q: jnp.concatenate([p, q], axis))(p, q)


def test_concatenate_keeps_the_type_along_free_axes_and_whole_blocks() -> None:
    rng = seeded("concatenate")
    for name in FEW:
        shared = FORMATS[name].shared
        p, q = make(name, rng, 128, 64), make(name, rng, 128, 64)
        for axis in (0, 1):
            if FORMATS[name].in_blocks or axis - 2 not in shared:
                with materialization_policy("error"):
                    out = join(p, q, axis)
                assert type(out) is type(q)
            else:
                out = join(p, q, axis)
            check(out, jnp.concatenate([dense(p), dense(q)], axis))


def test_concatenate_of_differently_scaled_stacks() -> None:
    w = normal(seeded("scaled"), 2, 3, 4)
    p, q = Array8B.quantize(w, axis=-1), Array8B.quantize(w, axis=-2)
    for axis in range(3):
        check(join(p, q, axis), jnp.concatenate([dense(p), dense(q)], axis))


def test_concatenate_of_codes_that_mean_different_numbers() -> None:
    """Storage of the same shapes, whose settings differ: what decodes differently is not joined, the rest is."""
    rng = seeded("zero")
    codes = jnp.asarray(rng.integers(0, 64, (3, 16)), jnp.uint8)
    scale = jnp.abs(normal(rng, 3, 1)) + 1
    p, q = (ArrayFloat(codes, scale, kind=kind) for kind in ("fp8", "fp8_e5m2"))
    check(join(p, q, 0), jnp.concatenate([dense(p), dense(q)]))
    with materialization_policy("error"):
        assert isinstance(join(p, p.replaced(use_kernel=False), 0), ArrayFloat)


@pytest.mark.parametrize(
    "name", ["nf4", "nf4-double", "ternary", "binary", "int8-columns", "int8-matrix", "codes", "nvfp4"]
)
def test_per_channel_factors_fold_into_the_scale(name: str) -> None:
    """`q * v` with one factor per output column of `x @ q`, wherever it stands: type and values are kept."""
    rng = seeded(name)
    q, v = make(name, rng, 64, 10), normal(rng, 10) + 3

    def several(q, v):
        return [q * v, v * q, q / v, (q.T * v[:, None]).T, jnp.multiply(q, v[None]), q * v[0], q * v * 2]

    for way in (implicit(several), jax.jit(implicit(several)), implicit(jax.jit(several)), jax.jit(_operators)):
        with materialization_policy("error"):
            folded = way(q, v)
        assert {type(out) for out in folded} == {type(q)}
        check(folded, several(dense(q), v)[: len(folded)])


def _operators(q, v):
    return [q * v, v * q, q / v]


def test_factors_that_do_not_fold() -> None:
    """One per row where rows are packed, one per value: the result is dense, and right."""
    rng = seeded("factors")
    for name in FEW:
        q = make(name, rng, 64, 10)
        for factor in (normal(rng, 64, 1), normal(rng, 10), normal(rng, 64, 10), normal(rng, 3, 1, 1)):
            check(implicit(jnp.multiply)(q, factor), dense(q) * factor)
            check(implicit(jnp.multiply)(q[:1], factor), dense(q)[:1] * factor)


def transpose(q, order):
    return implicit(lambda q: jnp.transpose(q, order))(q)


@pytest.mark.parametrize("name", EVERY)
def test_all_permutations(name: str) -> None:
    q = make(name, seeded(name), 2, 3, 18, 5)
    d = np.asarray(dense(q))
    with materialization_policy("error"):
        for order in itertools.permutations(range(4)):
            moved = jax.eval_shape(lambda q, order=order: transpose(q, order), q)
            assert type(moved) is type(q)
            assert moved.shape == d.transpose(order).shape
        orders = [(3, 0, 2, 1), (1, 3, 0, 2), (2, 1, 3, 0), (0, 2, 1, 3)]
        moved = jax.jit(lambda q: [transpose(q, order) for order in orders], compiler_options=FAST)(q)
        back = [transpose(array, np.argsort(order)) for order, array in zip(orders, moved, strict=True)]
    for order, array, again in zip(orders, moved, back, strict=True):
        np.testing.assert_array_equal(array.materialize(), d.transpose(order))
        assert_same_storage(dense_scales(again), dense_scales(q))


def assert_same_storage(p, q) -> None:
    assert jax.tree.structure(p) == jax.tree.structure(q)
    for a, b in zip(jax.tree.leaves(p), jax.tree.leaves(q), strict=True):
        np.testing.assert_array_equal(a, b)


@st.composite
def reshapes(draw):
    factors = draw(st.lists(st.sampled_from([1, 2, 3, 4, 5]), min_size=2, max_size=5))

    def grouped():
        cuts = sorted(draw(st.sets(st.integers(1, len(factors)), max_size=3)) | {len(factors)})
        starts = [0, *cuts[:-1]]
        shape = [math.prod(factors[a:b]) for a, b in zip(starts, cuts, strict=True)]
        return tuple(draw(st.permutations(shape)) if draw(st.booleans()) else shape)

    return grouped(), grouped()


@pytest.mark.parametrize("name", ["nf4-double", "nf4-32-last", "int8", "int8-matrix", "ternary", "codes-last", "nvfp4"])
@hypothesis.settings(max_examples=12, suppress_health_check=[hypothesis.HealthCheck.too_slow], derandomize=True)
@hypothesis.given(case=reshapes())
def test_any_reshape(name: str, case) -> None:
    old, new = case
    q = make(name, seeded(name, old), *old)
    moved = jax.jit(implicit(lambda q: q.reshape(new)), compiler_options=FAST)(q)
    np.testing.assert_array_equal(dense(moved), np.asarray(dense(q)).reshape(new))
    if isinstance(moved, type(q)):
        back = implicit(lambda q: q.reshape(old))(moved)
        assert isinstance(back, type(q))
        assert_same_storage(dense_scales(back), dense_scales(q))


def dense_scales(q):
    """A moved array has its compressed absmax, or its scales of tiles, expanded."""
    return q.replaced(**{q.scale_part.field: q.part(q.scale_part)})


@hypothesis.settings(max_examples=25, derandomize=True)
@hypothesis.given(st.sampled_from(["nf4", "nf4-32-last", "int8", "int8-columns", "int8-matrix"]), st.integers(0, 2**31))
def test_quantizing_twice_changes_nothing(name: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    w = normal(rng, 33, 9) * 10.0 ** rng.integers(-6, 7)
    q = FORMATS[name].make(w)
    assert_same_storage(FORMATS[name].make(q.materialize()), q)


EDGES = [(0,), (0, 5), (5, 0), (2, 0, 3), (1,), (1, 1), (1, 7), (7, 1), (1, 1, 1, 1), (2, 1, 3, 1, 9)]


@pytest.mark.parametrize("name", FEW)
def test_empty_and_single(name: str) -> None:
    def several(a):
        return [a, a[None], jnp.transpose(a), jnp.ravel(a), a * 2, a.sum(0), a[:1], jnp.stack([a, a])]

    def both(w):
        q = FORMATS[name].make(w)
        return dense(implicit(several)(q)), several(q.materialize())

    rng = seeded(name)
    ws = [rng.standard_normal(shape).astype(np.float32) for shape in EDGES]
    results = jax.jit(lambda ws: [both(w) for w in ws], compiler_options=FAST)(ws)
    for shape, (found, expected) in zip(EDGES, results, strict=True):
        assert found[0].shape == shape
        assert not np.isnan(found[0]).any()
        check(found, expected, tolerance=1e-6)
    for i in (1, 7):  # eager
        check(implicit(several)(FORMATS[name].make(jnp.asarray(ws[i]))), results[i][1], tolerance=1e-6)


@pytest.mark.parametrize("rank", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("name", FEW)
def test_ranks(name: str, rank: int) -> None:
    shape = (2, 3, 2, 37, 10)[-rank:] if rank > 1 else (37,)
    rng = seeded(name, rank)
    q = make(name, rng, *shape)
    x = normal(rng, 4, 37)
    check(implicit(jnp.matmul)(x, q), x @ dense(q), None)
    assert (q.ndim, q.size, len(q)) == (rank, math.prod(shape), shape[0])
    np.testing.assert_array_equal(np.asarray(q), dense(q))


@pytest.mark.parametrize("axis", [None, -1, -2])
@pytest.mark.parametrize("kind", ["nf4", "int8", "ternary", "binary"])
def test_lookup_never_decodes_the_table(kind: str, axis: int | None) -> None:
    """Whatever axis the table is packed along, only the rows asked for are decoded."""
    from eformer.ops.quantization import quantize

    rng = seeded(kind)
    table = quantize(normal(rng, 256, 32), dtype=kind, axis=axis)
    ids = jnp.asarray([[3, 255], [0, 17]])
    with materialization_policy("error"):
        rows = [implicit(lambda t, i: jnp.take(t, i, axis=0))(table, ids), implicit(lambda t, i: t[i])(table, ids)]
    for found in rows:
        np.testing.assert_array_equal(dense(found), dense(table)[ids])


def test_refusal_names_type_and_place() -> None:
    q = make("nf4", seeded("refusal"), 8, 8)
    with (
        materialization_policy("error"),
        pytest.raises(MaterializationError, match=r"Refusing.*ArrayNF4.*float32\[8,8\]"),
    ):
        jnp.exp(q)


@dataclasses.dataclass
class Levels(QuantizedArray):
    """A type of somebody's own, whose codes are the values."""

    codes: Any
    sharding: Any = aux_field(default=None)

    format: ClassVar[str] = "levels"
    parts: ClassVar[tuple[Part, ...]] = (Part("codes"),)
    blocked: ClassVar[None] = None  # pyright: ignore[reportIncompatibleMethodOverride]

    def materialize(self) -> Any:
        return self.codes.astype(self.dtype)


def test_types_without_scales_are_joined_and_carried() -> None:
    q = Levels(jnp.arange(6, dtype=jnp.int8).reshape(2, 3), dtype=jnp.float32)
    d = np.arange(6, dtype=np.float32).reshape(2, 3)
    joined = join(q, q, 0)
    assert type(joined) is Levels
    np.testing.assert_array_equal(joined.materialize(), np.concatenate([d, d]))
    turned = implicit(lambda q: lax.scan(lambda q, _: (jnp.flip(q, 0), q), q, None, length=3)[0])(q)
    np.testing.assert_array_equal(turned.materialize(), d[::-1])
