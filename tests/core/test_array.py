"""`ImplicitArray` as an array: the protocol, the operators, the methods, conversion, copying."""

from __future__ import annotations

import copy
import dataclasses
import operator
import pickle
import subprocess
import sys
import textwrap
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eformer.jaximus import ImplicitArray, implicit, register

from .toys import Block8, Plain, assert_same


@pytest.fixture
def q(key):
    a, b = jax.random.split(key)
    return Plain(jax.random.normal(a, (4, 6)) + 3, jax.random.uniform(b, (4, 6)) + 0.5)


@pytest.fixture
def w(q):
    return q.values * q.factor


# -- protocol ----------------------------------------------------------------------------------------------------------


def test_shape_and_dtype_facts(q):
    assert (q.shape, q.dtype, q.ndim, q.size, q.itemsize) == ((4, 6), np.dtype("float32"), 2, 24, 4)
    assert len(q) == 4
    assert q.aval.shape == (4, 6)
    assert jax.typeof(q).dtype == q.dtype
    assert (jnp.shape(q), jnp.ndim(q), jnp.size(q), jnp.result_type(q)) == ((4, 6), 2, 24, np.dtype("float32"))


def test_nbytes_counts_what_is_held():
    q = Block8.quantize(jnp.ones((16, 4)))
    assert q.nbytes == 16 * 4 + 2 * 4 * 4
    assert q.itemsize == 4
    assert "72" not in repr(q)
    assert "96 bytes" in repr(q)


def test_repr_says_type_shape_and_dtype(q):
    assert repr(q) == "Plain(float32[4,6], 192 bytes)"
    assert str(q) == repr(q)


def test_transposes(q, w):
    assert_same(q.T, w.T)
    assert_same(q.mT, w.mT)


def test_iteration_over_the_leading_axis(q, w):
    rows = list(q)
    assert len(rows) == 4
    for mine, theirs in zip(rows, w, strict=True):
        assert_same(mine, theirs)
    first, *rest = q
    assert_same(first, w[0])
    assert len(rest) == 3


def test_len_and_iteration_of_rank_zero_refuse():
    q = Plain(jnp.float32(2), jnp.float32(3))
    assert (q.shape, q.ndim, q.size) == ((), 0, 1)
    with pytest.raises(TypeError):
        len(q)
    with pytest.raises(TypeError):
        list(q)
    assert float(q) == 6.0
    assert int(q) == 6
    assert complex(q) == 6
    assert bool(q)
    assert q.item() == 6.0
    assert [1, 2, 3, 4, 5, 6, 7][Plain(jnp.int32(2), jnp.int32(3))] == 7  # __index__


def test_numpy_conversion(q, w):
    assert type(np.asarray(q)) is np.ndarray
    np.testing.assert_array_equal(np.asarray(q), w)
    half = np.asarray(q, dtype=np.float16)
    assert half.dtype == np.float16
    np.testing.assert_array_equal(half, np.asarray(w, dtype=np.float16))
    np.testing.assert_array_equal(np.array(q), w)
    np.testing.assert_array_equal(np.array(q, copy=True), w)


def test_jnp_conversion(q, w):
    for convert in (jnp.asarray, jnp.array, jax.device_put):
        out = convert(q)
        np.testing.assert_array_equal(np.asarray(out), w)
    assert isinstance(jnp.asarray(q), jax.Array)
    assert jnp.asarray(q, dtype=jnp.bfloat16).dtype == jnp.bfloat16


def test_readiness_and_devices(q):
    assert q.block_until_ready() is q
    assert jax.block_until_ready({"a": q})["a"].shape == q.shape
    assert q.devices() == q.values.devices()


def test_astype_returns_a_new_array(q, w):
    out = q.astype(jnp.bfloat16)
    assert out is not q
    assert (q.dtype, out.dtype) == (jnp.float32, jnp.bfloat16)
    assert_same(out, w.astype(jnp.bfloat16))
    assert q.astype(jnp.float32).dtype == jnp.float32


# -- operators ---------------------------------------------------------------------------------------------------------

BINARY = [
    operator.add,
    operator.sub,
    operator.mul,
    operator.truediv,
    operator.floordiv,
    operator.mod,
    operator.pow,
    operator.lt,
    operator.le,
    operator.gt,
    operator.ge,
    operator.eq,
    operator.ne,
]
OTHERS = {
    "jax": lambda w: jnp.flip(w) * 0.5 + 0.1,
    "numpy": lambda w: np.asarray(jnp.flip(w)),
    "row": lambda w: np.asarray(w)[0],
    "int": lambda w: 2,
    "float": lambda w: 1.5,
    "bool": lambda w: True,
    "numpy scalar": lambda w: np.float32(2.5),
    "itself": lambda w: w,
}


EVERY_OP = [(op, other) for op in BINARY for other in ("jax", "numpy", "int")]
EVERY_OTHER = [(op, other) for op in (operator.sub, operator.pow, operator.lt) for other in OTHERS]


@pytest.mark.parametrize(
    ("op", "other"), dict.fromkeys([*EVERY_OP, *EVERY_OTHER]), ids=lambda p: getattr(p, "__name__", p)
)
def test_binary_operators_on_both_sides(op, other, q, w):
    y = OTHERS[other](w)
    mine = q if other == "itself" else y
    assert_same(op(q, mine), op(w, y))
    assert_same(op(mine, q), op(y, w))


@pytest.mark.parametrize("op", [operator.and_, operator.or_, operator.xor, operator.lshift, operator.rshift])
def test_integer_operators(op):
    ints = jnp.arange(6, dtype=jnp.int32).reshape(2, 3)
    q, w = Plain(ints, ints + 1), ints * (ints + 1)
    for other in (3, np.full((2, 3), 3, np.int32), jnp.full((2, 3), 3, jnp.int32)):
        assert_same(op(q, other), op(w, other))
        assert_same(op(other, q), op(other, w))
    assert_same(~q, ~w)


def test_unary_operators_and_builtins(q, w):
    assert_same(-q, -w)
    assert_same(+q, +w)
    assert_same(abs(-q), abs(-w))
    assert_same(round(q, 1), round(w, 1))
    assert_same(divmod(q, 2.0), divmod(w, 2.0))
    assert_same(divmod(2.0, q), divmod(2.0, w))
    assert_same(pow(q, 2), pow(w, 2))


def test_matmul_with_every_kind_of_operand(q, w, key):
    x = jax.random.normal(key, (3, 4))
    assert_same(x @ q, x @ w)
    assert_same(np.asarray(x) @ q, x @ w)
    assert_same(q.T @ x.T, w.T @ x.T)
    assert_same(q.T @ np.asarray(x).T, w.T @ x.T)
    assert_same(q @ q.T, w @ w.T)


def test_augmented_assignment_rebinds(q, w):
    before = q
    q += 1
    assert_same(q, w + 1)
    assert_same(before, w)


def test_comparison_is_elementwise_and_instances_are_unhashable(q):
    assert (q == q).shape == q.shape
    assert bool((q == q).all())
    assert not bool((q != q).any())
    with pytest.raises(TypeError):
        hash(q)
    with pytest.raises((TypeError, ValueError)):
        bool(q)


def test_foreign_operands_are_refused_as_by_arrays(q):
    for bad in ([1, 2], (1,), "a", None, {}):
        with pytest.raises(TypeError):
            q + bad
        with pytest.raises(TypeError):
            bad + q
    assert (q == None) is False  # noqa: E711 - what identity comparison falls back to
    assert (q != None) is True  # noqa: E711


@pytest.mark.parametrize("ufunc", [np.add, np.multiply, np.maximum, np.subtract], ids=lambda f: f.__name__)
def test_binary_numpy_ufuncs(ufunc, q, w):
    y = np.asarray(w)[::-1]
    assert_same(ufunc(q, y), getattr(jnp, ufunc.__name__)(w, y))
    assert_same(ufunc(y, q), getattr(jnp, ufunc.__name__)(y, w))


@pytest.mark.parametrize("ufunc", [np.exp, np.sqrt, np.negative, np.isfinite], ids=lambda f: f.__name__)
def test_unary_numpy_ufuncs(ufunc, q, w):
    assert_same(ufunc(q), getattr(jnp, ufunc.__name__)(w))


def test_numpy_ufuncs_with_options_give_numpy_arrays(q, w):
    np.testing.assert_allclose(np.add.reduce(q, axis=0), np.add.reduce(np.asarray(w), axis=0))
    out = np.zeros((4, 6), np.float32)
    np.testing.assert_allclose(np.add(q, 1, out=out), w + 1)
    np.testing.assert_allclose(out, w + 1)


# -- methods -----------------------------------------------------------------------------------------------------------

METHODS: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    ("all", (), {}),
    ("any", (), {"axis": 0}),
    ("argmax", (), {"axis": 1}),
    ("argmin", (), {}),
    ("argsort", (), {"axis": 0}),
    ("clip", (1.0, 2.0), {}),
    ("conj", (), {}),
    ("copy", (), {}),
    ("cumprod", (1,), {}),
    ("cumsum", (), {"axis": 0}),
    ("diagonal", (), {}),
    ("flatten", (), {}),
    ("max", (), {"axis": -1, "keepdims": True}),
    ("mean", (), {}),
    ("min", (0,), {}),
    ("prod", (), {}),
    ("ptp", (), {}),
    ("ravel", (), {}),
    ("repeat", (2,), {"axis": 0}),
    ("reshape", (3, 8), {}),
    ("reshape", ((2, -1),), {}),
    ("round", (1,), {}),
    ("sort", (), {"axis": 1}),
    ("squeeze", (), {}),
    ("std", (), {"axis": 0}),
    ("sum", (), {"axis": (0, 1)}),
    ("swapaxes", (0, 1), {}),
    ("take", (jnp.array([1, 0]),), {"axis": 0}),
    ("tolist", (), {}),
    ("trace", (), {}),
    ("transpose", (), {}),
    ("transpose", (1, 0), {}),
    ("var", (), {}),
    ("view", (jnp.int32,), {}),
    ("dot", (jnp.ones((6, 2)),), {}),
    ("astype", (jnp.int32,), {}),
    ("item", (3,), {}),
    ("nonzero", (), {}),
]


@pytest.mark.parametrize(("name", "args", "kwargs"), METHODS, ids=[f"{i}-{m[0]}" for i, m in enumerate(METHODS)])
def test_methods_agree_with_the_dense_array(name, args, kwargs, q, w):
    assert_same(getattr(q, name)(*args, **kwargs), getattr(w, name)(*args, **kwargs))


def test_methods_take_implicit_arguments(q, w):
    assert_same(w.T.dot(q), w.T @ w)
    assert_same(q.T.dot(q), w.T @ w)
    assert_same(q.clip(min=q), w)


def test_real_and_imag():
    q = Plain(jnp.array([1 + 2j, 3j]), jnp.array([2.0, 1.0]))
    assert q.dtype == jnp.complex64
    assert_same(q.real, jnp.array([2.0, 0.0]))
    assert_same(q.imag, jnp.array([4.0, 3.0]))
    assert_same(q.conj(), jnp.array([2 - 4j, -3j]))


INDICES = {
    "int": 0,
    "negative": -1,
    "slice": slice(1, 3),
    "step": slice(None, None, -2),
    "pair": (1, 2),
    "ellipsis": (..., 0),
    "newaxis": (None, slice(None), 1),
    "list of arrays": (np.array([0, 2]), np.array([1, 1])),
    "mask": np.array([True, False, True, False]),
    "array": jnp.array([3, 3, 0]),
}


@pytest.mark.parametrize("name", INDICES)
def test_indexing(name, q, w):
    assert_same(q[INDICES[name]], w[INDICES[name]])


def test_indexing_with_an_implicit_index(w):
    index = Plain(jnp.array([1, 0]), jnp.array([2, 1]))
    assert_same(implicit(lambda w, i: w[i])(w, index), w[jnp.array([2, 0])])


def test_at_reads_and_updates(q, w):
    assert_same(q.at[1:3, 0].get(), w.at[1:3, 0].get())
    assert_same(q.at[7].get(mode="fill", fill_value=-1), w.at[7].get(mode="fill", fill_value=-1))
    for update in ("set", "add", "multiply", "min", "max", "divide", "power"):
        assert_same(getattr(q.at[0], update)(2.0), getattr(w.at[0], update)(2.0))
    assert_same(w.at[0].set(q[1]), w.at[0].set(w[1]))
    assert_same(q.at[0].set(q[1]), w.at[0].set(w[1]))
    assert_same(q.at[0].apply(jnp.exp), w.at[0].apply(jnp.exp))


def test_operators_dispatch_without_a_wrapper():
    @dataclasses.dataclass
    class Counted(ImplicitArray):
        values: jax.Array

        def materialize(self):
            raise AssertionError("must not be materialized")

        def compute_shape(self):
            return self.values.shape

        def compute_dtype(self):
            return self.values.dtype

    @register("dot_general")
    def _(x: jax.Array, y: Counted, **params):
        return jax.lax.dot_general(x, y.values, **params)

    @register("mul")
    def _(x: Counted, y: jax.Array, **params):
        return Counted(x.values * y)

    q, x = Counted(jnp.eye(3)), jnp.arange(6.0).reshape(2, 3)
    assert_same(x @ q, x)
    assert_same(np.asarray(x) @ q, x)
    assert isinstance(q * 2, Counted)
    assert isinstance(2 * q, Counted)
    assert isinstance(np.float32(2) * q, Counted)
    assert isinstance(implicit(lambda q: q * 2)(q), Counted)
    assert_same(jax.jit(lambda x, q: x @ q)(x, q), x)
    assert_same(jax.vmap(lambda row: row @ q)(x), x)


def test_x64_in_a_fresh_process():
    program = """
        import dataclasses, jax, jax.numpy as jnp, numpy as np
        jax.config.update("jax_enable_x64", True)
        from tests.core.toys import Plain, Const
        from eformer.jaximus import implicit
        q = Plain(np.arange(6.0).reshape(2, 3), jnp.float64(0.1))
        assert (q.dtype, q.itemsize) == (np.dtype("float64"), 8), q.dtype
        assert (q @ jnp.ones((3, 1))).dtype == np.float64
        assert implicit(jnp.sin)(q).dtype == np.float64
        assert (q * 2).dtype == np.float64 and (q + np.float32(1)).dtype == np.float64
        ints = Plain(jnp.arange(3), jnp.int64(2**40))
        assert ints.dtype == np.int64 and int(ints.sum()) == 3 * 2**40
        c = Const(0.1, shape=(2,), dtype=np.float64)
        assert np.asarray(c)[0] == 0.1
        g = jax.grad(lambda v: (Plain(v, q.factor) ** 2).sum())(q.values)
        np.testing.assert_allclose(g, 0.02 * q.values, rtol=1e-14)
    """
    out = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=False)
    assert out.returncode == 0, out.stderr


def test_treedefs_can_be_stored_and_copied(q):
    """What is built from static data that went through a file is as good as any other."""
    leaves, treedef = jax.tree.flatten(q)
    for again in (pickle.loads(pickle.dumps(treedef)), copy.deepcopy(treedef)):
        assert again == treedef
        assert hash(again) == hash(treedef)
        assert_same(jax.tree.unflatten(again, leaves) @ jnp.ones((6, 2)), q @ jnp.ones((6, 2)))
