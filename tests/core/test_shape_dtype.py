"""Fields, shapes and dtypes: what a class may declare, what is derived, and what is never stale."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest

from eformer.jaximus import (
    AvalMismatchError,
    ImplicitArray,
    InvalidImplicitArrayError,
    SlicedBelowCoreError,
    UninitializedAval,
    aux_field,
    implicit,
    materialize,
)

from .toys import Block8, Const, FlatCodes, Lora, Plain, Transposed, assert_same

# -- declared shape and dtype ------------------------------------------------------------------------------------------


def test_declared_shape_and_dtype_are_needed_by_a_childless_array():
    q = Const(2.5, shape=(2, 3), dtype=jnp.bfloat16)
    assert (q.shape, q.dtype) == ((2, 3), jnp.bfloat16)
    assert jax.tree.leaves(q) == []
    assert_same(q + 0, jnp.full((2, 3), 2.5, jnp.bfloat16))
    assert_same(jax.jit(lambda q: q * 2)(q), jnp.full((2, 3), 5, jnp.bfloat16))
    assert_same(dataclasses.replace(q, value=1.0), jnp.ones((2, 3), jnp.bfloat16))
    assert_same(dataclasses.replace(q, shape=(4,)), jnp.full((4,), 2.5, jnp.bfloat16))


@pytest.mark.parametrize("missing", ["shape", "dtype"])
def test_a_declaration_that_materialize_needs_is_asked_for(missing):
    given = {"shape": (2,), "dtype": jnp.float32}
    del given[missing]
    q = Const(1.0, **given)
    with pytest.raises(UninitializedAval, match=rf"Pass {missing}="):
        q.shape, q.dtype
    with pytest.raises(UninitializedAval):
        q + 1


def test_declarations_that_agree_are_accepted_and_follow_the_children():
    q = Plain(jnp.ones((2, 3)), jnp.ones((2, 3)), shape=(2, 3), dtype=jnp.float32)
    assert q.shape == (2, 3)
    stacked = jax.tree.map(lambda *a: jnp.stack(a), q, q)
    assert stacked.shape == (2, 2, 3)
    assert dataclasses.replace(q, values=jnp.ones((5, 3)), factor=jnp.ones(3)).shape == (5, 3)


@pytest.mark.parametrize(
    "declared", [{"shape": (3, 2)}, {"shape": (6,)}, {"dtype": jnp.int32}, {"shape": (2, 3), "dtype": jnp.float16}]
)
def test_declarations_that_disagree_are_refused(declared):
    with pytest.raises(AvalMismatchError, match=r"declared with .*materialize"):
        Plain(jnp.ones((2, 3)), jnp.ones((2, 3)), **declared)


def test_dtype_may_be_redeclared_with_a_default():
    @dataclasses.dataclass
    class Typed(ImplicitArray):
        codes: jax.Array
        dtype: Any = aux_field(default=jnp.float32)

        def materialize(self):
            return self.codes.astype(self.dtype)

    codes = jnp.arange(6, dtype=jnp.int8).reshape(2, 3)
    assert (Typed(codes).dtype, Typed(codes).shape) == (jnp.float32, (2, 3))
    half = Typed(codes, dtype=jnp.bfloat16)
    assert half.dtype == jnp.bfloat16
    assert_same(jax.jit(lambda q: q + 0)(half), codes.astype(jnp.bfloat16))
    assert_same(half @ jnp.ones((3, 1)), codes.astype(jnp.float32) @ jnp.ones((3, 1)))


def test_class_defaults_for_shape_and_dtype():
    @dataclasses.dataclass
    class Zeros(ImplicitArray):
        default_shape: ClassVar[Any] = (2, 2)
        default_dtype: ClassVar[Any] = jnp.float16

        def materialize(self):
            return jnp.zeros(self.shape, self.dtype)

    q = Zeros()
    assert (q.shape, q.dtype) == ((2, 2), jnp.float16)
    assert_same(q + 1, jnp.ones((2, 2), jnp.float16))
    assert Zeros(shape=(3,)).shape == (3,)


def test_compute_shape_and_dtype_spare_materialize():
    @dataclasses.dataclass
    class Silent(ImplicitArray):
        codes: jax.Array

        def compute_shape(self):
            return (*self.codes.shape[:-1], 2 * self.codes.shape[-1])

        def compute_dtype(self):
            return jnp.bfloat16

        def materialize(self):
            raise RuntimeError("unused")

    q = Silent(jnp.ones((3, 4), jnp.int8))
    assert (q.shape, q.dtype, q.size, q.nbytes) == ((3, 8), jnp.bfloat16, 24, 12)


def test_materialize_must_keep_its_promise():
    @dataclasses.dataclass
    class Liar(ImplicitArray):
        codes: jax.Array

        def compute_shape(self):
            return (7,)

        def compute_dtype(self):
            return jnp.float32

        def materialize(self):
            return self.codes

    with pytest.raises(AvalMismatchError, match=r"shape=\(7,\)"):
        Liar(jnp.ones(3)).materialize()
    with pytest.raises(AvalMismatchError):
        Liar(jnp.ones(3)) + 1


# -- dtypes, ranks and sizes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype", ["bfloat16", "float16", "float32", "int8", "uint8", "int32", "complex64", "float8_e4m3fn"]
)
def test_every_dtype(dtype):
    values = jnp.array([[1, 2], [3, 0]]).astype(dtype)
    q = Plain(values, values)
    assert (q.dtype, q.itemsize) == (jnp.dtype(dtype), jnp.dtype(dtype).itemsize)
    assert_same(q.T, (values * values).T)
    assert_same(implicit(lambda q: q.astype(jnp.complex64))(q), (values * values).astype(jnp.complex64))


def test_booleans():
    @dataclasses.dataclass
    class Mask(ImplicitArray):
        bits: jax.Array

        def materialize(self):
            return ~self.bits

    q = Mask(jnp.array([True, False, True]))
    assert q.dtype == bool
    assert_same(~q, jnp.array([True, False, True]))
    assert_same(q & True, jnp.array([False, True, False]))
    assert_same(implicit(jnp.where)(q, 1.0, 2.0), jnp.array([2.0, 1.0, 2.0]))
    assert int(q.sum()) == 1


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0), (2, 0, 4)])
def test_zero_size(shape):
    q, w = Plain(jnp.ones(shape), jnp.ones(shape)), jnp.ones(shape)
    assert (q.shape, q.size, q.nbytes) == (shape, 0, 0)
    assert_same(q * 2, w * 2)
    assert_same(q.sum(), w.sum())
    assert_same(jax.jit(lambda q: q.T)(q), w.T)
    assert len(list(q)) == shape[0]


def test_python_and_numpy_children():
    q = Plain(np.ones((2, 2), np.float32), 2.0)
    assert (q.shape, q.dtype) == ((2, 2), jnp.float32)
    assert_same(q + 1, jnp.full((2, 2), 3.0))
    assert_same(jax.jit(lambda q: q + 1)(q), jnp.full((2, 2), 3.0))


# -- batch axes --------------------------------------------------------------------------------------------------------


def test_a_vmapped_constructor_makes_a_stack():
    stored = jnp.arange(24.0).reshape(2, 3, 4)
    q = jax.vmap(lambda s: Transposed(s, jnp.float32(2.0)))(stored)
    assert q.shape == (2, 4, 3)
    assert_same(materialize(q), 2 * jnp.swapaxes(stored, 1, 2))
    assert_same(jax.vmap(lambda q: q.T)(q), 2 * stored)
    deeper = jax.vmap(jax.vmap(lambda s: Transposed(s, s[0, 0])))(stored[None])
    assert deeper.shape == (1, 2, 4, 3)
    assert_same(materialize(deeper)[0, 1], (stored[1] * stored[1, 0, 0]).T)


def test_stacking_by_tree_map_and_scan():
    one = [Transposed(jnp.full((3, 4), float(i)), jnp.float32(i)) for i in range(3)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *one)
    assert stacked.shape == (3, 4, 3)
    assert_same(stacked, jnp.stack([materialize(q) for q in one]))
    _, ys = jax.lax.scan(lambda c, s: (c, Transposed(s, c)), jnp.float32(3), jnp.ones((5, 2, 4)))
    assert_same(ys, jnp.full((5, 4, 2), 3.0))


def test_slicing_below_the_built_rank_raises_and_says_what_to_declare():
    q = Transposed(jnp.ones((3, 3)), jnp.ones((3, 3)))
    with pytest.raises(SlicedBelowCoreError, match="core_ndim"):
        jax.vmap(lambda q: q * 1)(q)
    with pytest.raises(SlicedBelowCoreError):
        jax.tree.map(lambda leaf: leaf[0], q).shape


def test_slicing_unevenly_raises():
    q = Plain(jnp.ones((2, 3)), jnp.ones((2, 3)))
    uneven = Plain.tree_unflatten(jax.tree.structure(q).node_data()[1], (jnp.ones((4, 2, 3)), jnp.ones((2, 3))))
    with pytest.raises(SlicedBelowCoreError, match="different numbers"):
        uneven.shape


def test_core_ndim_allows_slicing_down_to_the_core():
    stack = Block8.quantize(jnp.ones((4, 8, 3)))
    assert stack.shape == (4, 8, 3)
    assert jax.tree.map(lambda leaf: leaf[0], stack).shape == (8, 3)
    with pytest.raises(SlicedBelowCoreError, match="core_ndim=2"):
        jax.tree.map(lambda leaf: leaf[0, 0], stack).shape


def test_flat_storage_follows_its_batch():
    ws = jnp.arange(24.0).reshape(2, 3, 4)
    q = jax.vmap(FlatCodes.quantize)(ws)
    assert q.shape == (2, 3, 4)
    assert_same(materialize(q)[1], materialize(FlatCodes.quantize(ws[1])))


# -- the pytree --------------------------------------------------------------------------------------------------------


def test_treedefs_hash_and_compare_by_value():
    make = lambda value, block: jax.tree.structure(Block8(jnp.full((8, 2), value), jnp.ones((1, 2)), block))  # noqa: E731
    assert make(1, 8) == make(2, 8)
    assert hash(make(1, 8)) == hash(make(2, 8))
    assert make(1, 8) != make(1, 4)


def test_structures_are_stable_through_a_round_trip():
    for q in (
        Plain(jnp.ones(2), jnp.ones(2)),
        Const(1.0, shape=(2,), dtype=jnp.float32),
        Block8.quantize(jnp.ones((8, 2))),
    ):
        leaves, treedef = jax.tree.flatten(q)
        again = jax.tree.unflatten(treedef, leaves)
        assert jax.tree.structure(again) == treedef
        assert jax.tree.structure(jax.jit(lambda q: q)(q)) == treedef
        assert jax.tree.structure(jax.tree.map(lambda x: x, q)) == treedef


def test_paths_name_the_fields():
    q = Lora(Block8.quantize(jnp.ones((8, 2))), jnp.ones((8, 1)), jnp.ones((1, 2)))
    paths = [jtu.keystr(path) for path, _ in jtu.tree_flatten_with_path({"w": q})[0]]
    assert paths == ["['w'].base.codes", "['w'].base.scale", "['w'].a", "['w'].b"]


def test_placeholders_may_stand_for_children():
    q = Plain(jnp.ones(2), jnp.ones(2))
    specs = jax.tree.map(lambda _: jax.P("x"), q)
    assert isinstance(specs, Plain)
    assert repr(specs).startswith("Plain(values=P")
    assert jax.tree.map(lambda _: None, q).values is None
    assert jax.tree.structure(jax.tree.map(lambda _: 0, q)) == jax.tree.structure(q)
    shapes = jax.eval_shape(lambda: q)
    assert (shapes.shape, shapes.dtype) == ((2,), jnp.float32)


def test_unhashable_static_data_is_refused_by_name():
    @dataclasses.dataclass
    class Listed(ImplicitArray):
        values: jax.Array
        sizes: Any = aux_field()

        def materialize(self):
            return self.values

    with pytest.raises(InvalidImplicitArrayError, match=r"'sizes'.*unhashable list"):
        Listed(jnp.ones(2), [1, 2]).shape
    assert Listed(jnp.ones(2), (1, 2)).shape == (2,)


def test_nested_arrays_derive_through_every_layer():
    inner = Block8.quantize(jnp.ones((8, 2), jnp.bfloat16))
    q = Lora(Lora(inner, jnp.ones((8, 1)), jnp.ones((1, 2))), jnp.ones((8, 1)), jnp.ones((1, 2)))
    assert (q.shape, q.dtype) == ((8, 2), jnp.bfloat16)

    @dataclasses.dataclass
    class Wrap(ImplicitArray):
        inner: Any

        def materialize(self):
            return self.inner  # one layer only

    wrapped = Wrap(inner)
    assert (wrapped.shape, wrapped.dtype) == ((8, 2), jnp.bfloat16)
    assert_same(wrapped * 1, materialize(inner))


def test_inheritance_keeps_fields_and_adds_methods():
    class Named(Plain):
        label: ClassVar[str] = "named"

        def doubled(self):
            return self * 2

    q = Named(jnp.ones(3), jnp.ones(3))
    assert_same(q.doubled(), jnp.full(3, 2.0))

    @dataclasses.dataclass
    class More(Plain):
        offset: jax.Array

        def materialize(self):
            return super().materialize() + self.offset

    more = More(jnp.ones(3), jnp.ones(3), jnp.ones(3))
    assert_same(more * 1, jnp.full(3, 2.0))
    assert len(jax.tree.leaves(more)) == 3


# -- copying -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "clone",
    [copy.copy, copy.deepcopy, lambda q: pickle.loads(pickle.dumps(q)), dataclasses.replace],
    ids=["copy", "deepcopy", "pickle", "replace"],
)
def test_clones_are_equal_and_usable(clone):
    q, w = Plain(jnp.ones((4, 6)), jnp.full((4, 6), 3.0)), jnp.full((4, 6), 3.0)
    q.shape  # fill the caches first
    jax.tree.leaves(q)
    other = clone(q)
    assert type(other) is Plain
    assert jax.tree.structure(other) == jax.tree.structure(q)
    assert_same(other @ w.T, w @ w.T)
    nested = clone(Block8.quantize(jnp.ones((8, 2))))
    assert nested.shape == (8, 2)


def test_replace_follows_the_new_children():
    q = Plain(jnp.ones((4, 6)), jnp.ones((4, 6)))
    wider = dataclasses.replace(q, values=jnp.ones((2, 3)), factor=jnp.ones((2, 3)))
    assert wider.shape == (2, 3)
    assert q.shape == (4, 6)


def test_frozen_classes_refuse_assignment():
    @dataclasses.dataclass
    class Frozen(ImplicitArray, frozen=True):
        values: jax.Array
        step: int = aux_field(default=1)

        def materialize(self):
            return self.values * self.step

    q = Frozen(jnp.ones(3), 2)
    for name in ("values", "step", "other"):
        with pytest.raises(dataclasses.FrozenInstanceError, match=name):
            setattr(q, name, 1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        del q.values
    assert_same(dataclasses.replace(q, step=5), jnp.full(3, 5.0))
    assert_same(jax.jit(lambda q: q * 1.0)(q), jnp.full(3, 2.0))


def test_assignment_on_a_plain_class_refreshes_the_shape():
    q = Plain(jnp.ones((4, 6)), jnp.ones((4, 6)))
    assert q.shape == (4, 6)
    q.values, q.factor = jnp.ones((2, 2)), jnp.ones((2, 2))
    assert q.shape == (2, 2)
    assert_same(q, jnp.ones((2, 2)))
