"""The documented handlers called by hand, with the arguments the functions of `jax.lax` take and no more."""

from __future__ import annotations

import importlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from eformer.jaximus import ImplicitArray
from eformer.ops import quantization as door

from .contract import normal, seeded

W = normal(seeded("handlers"), 64, 8)
MADE = {
    "nf4": lambda w=W: door.ArrayNF4.quantize(w, 16),
    "8bit": lambda w=W: door.Array8B.quantize(w),
    "1bit": lambda w=W: door.Array1B.from_float(w),
}
tags = pytest.mark.parametrize("tag", MADE)
DOT = (((1,), (0,)), ((), ()))
ROWS = lax.GatherDimensionNumbers(offset_dims=(1,), collapsed_slice_dims=(0,), start_index_map=(0,))


class Handlers:
    """The handlers of one format, called by their names less the tag."""

    def __init__(self, tag: str) -> None:
        self.tag, self.module = tag, importlib.import_module(f"eformer.ops.quantization.implicit_array_{tag}")

    def __call__(self, name: str, *args: Any, **params: Any) -> Any:
        primitive = getattr(lax, name.split("_{}")[0] + "_p", None) or lax.reduce_p
        return getattr(self.module, name.format(self.tag))(primitive, *args, **params)


def dense(value: Any) -> Any:
    return value.materialize() if isinstance(value, ImplicitArray) else value


def assert_same(got: Any, want: jax.Array, rtol: float = 0.0) -> None:
    got = dense(got)
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    np.testing.assert_allclose(np.asarray(got, "f8"), np.asarray(want, "f8"), rtol=rtol, atol=rtol)


@tags
def test_shape_handlers_take_what_lax_takes(tag: str) -> None:
    """Positional or by name, on a quantized and on a dense operand; what storage can give keeps the type."""
    call, q = Handlers(tag), MADE[tag]()
    indices = jnp.asarray([[3], [60], [3]])
    cases: list[tuple[str, Any, tuple[Any, ...], dict[str, Any], bool]] = [
        ("reshape_{}_operand", lax.reshape, ((4, 16, 8),), {}, tag == "8bit"),
        ("reshape_{}_operand", lax.reshape, ((8, 64), (1, 0)), {}, False),
        ("reshape_{}_operand", lax.reshape, (), {"new_sizes": [64, 2, 4]}, tag != "8bit"),
        ("reshape_{}_operand", lax.reshape, (), {"new_sizes": (512,)}, False),
        ("transpose_{}_operand", lax.transpose, ([1, 0],), {}, True),
        ("transpose_{}_operand", lax.transpose, (), {"permutation": np.array([1, 0])}, True),
        ("transpose_{}_operand", lax.transpose, ((0, 1),), {}, True),
        ("broadcast_in_dim_{}_operand", lax.broadcast_in_dim, ((2, 64, 8), (1, 2)), {}, True),
        ("broadcast_in_dim_{}_operand", lax.broadcast_in_dim, ((64, 8), (0, 1)), {}, True),
        ("gather_{}_operand", lax.gather, (indices, ROWS, (1, 8)), {}, False),
        ("gather_{}_operand", lax.gather, (indices, ROWS), {"slice_sizes": (1, 8), "mode": "fill"}, False),
        ("convert_element_type_{}_operand_pos", lax.convert_element_type, (jnp.bfloat16,), {}, True),
        ("convert_element_type_{}_operand_pos", lax.convert_element_type, (float,), {}, True),
        ("convert_element_type_{}_operand_kw", lax.convert_element_type, (), {"new_dtype": jnp.float16}, True),
        ("convert_element_type_{}_operand_kw", lax.convert_element_type, (), {"new_dtype": jnp.int32}, False),
    ]
    for name, public, args, params, kept in cases:
        want = public(q.materialize(), *args, **params)
        got = call(name, q, *args, **params)
        assert_same(got, want)
        if kept:
            assert type(got) is type(q), (name, args, params)
        assert_same(call(name, q.materialize(), *args, **params), want)
    for operands in ([q, q], [q, W], [W, W], [q]):
        want = lax.concatenate([dense(o) for o in operands], 0)
        assert_same(call("concatenate_{}_operands", operands, 0), want)
        assert_same(call("concatenate_{}_operands", *operands, 0), want)
        assert_same(call("concatenate_{}_operands", tuple(operands), dimension=0), want)
    assert type(call("concatenate_{}_operands", [q, q], 0 if tag == "8bit" else 1)) is type(q)


@tags
def test_products_and_reductions_take_what_lax_takes(tag: str) -> None:
    call, q = Handlers(tag), MADE[tag]()
    d, x = q.materialize(), normal(seeded("left", tag), 5, 64)
    for lhs, rhs in ((x, q), (x, d), (q, q.T), (q.T, x.T)):
        want = lax.dot_general(dense(lhs), dense(rhs), DOT)
        for args, params in (
            ((DOT,), {}),
            (((([1], [0]), ([], [])), "highest"), {}),
            ((), {"dimension_numbers": DOT}),
            ((DOT,), {"preferred_element_type": jnp.float32}),
        ):
            assert_same(call("dot_general_{}_lhs_rhs", lhs, rhs, *args, **params), want, rtol=2e-4)
            jitted = jax.jit(lambda a, b, k=(args, params): call("dot_general_{}_lhs_rhs", a, b, *k[0], **k[1]))
            assert_same(jitted(lhs, rhs), want, rtol=2e-4)
    kernel = MADE[tag](normal(seeded("kernel"), 16, 4, 3))
    image = normal(seeded("image"), 2, 4, 10)
    want = lax.conv_general_dilated(image, kernel.materialize(), (1,), "SAME")
    assert_same(call("conv_general_dilated_{}_lhs_rhs", image, kernel, (1,), "SAME"), want)
    named = {"window_strides": (1,), "padding": "SAME"}
    assert_same(call("conv_general_dilated_{}_lhs_rhs", image, kernel, **named), want)
    for init in (0.0, jnp.float32(0)):
        want = lax.reduce(d, init, lax.add, (0,))
        assert_same(call("reduce_{}_operand_init_value", q, init, lax.add, (0,)), want, rtol=1e-6)
        named = {"computation": lax.add, "dimensions": (0,)}
        assert_same(call("reduce_{}_operand_init_value", q, init, **named), want, rtol=1e-6)


@tags
def test_numbers_are_weak(tag: str) -> None:
    """A Python number takes the dtype it would have beside the dense array, and keeps that of the array."""
    call, q = Handlers(tag), MADE[tag]()
    for dtype in (jnp.float32, jnp.bfloat16):
        a = q.astype(dtype)
        d, rtol = a.materialize(), 1e-6 if dtype == jnp.float32 else 1e-2
        for number in (2, 2.5, True):
            for name, same_as in (("add", jnp.add), ("lt", jnp.less), ("max", jnp.maximum), ("mul", jnp.multiply)):
                for pair in ((a, number), (number, a), (d, number)):
                    assert_same(call(name + "_{}_xy", *pair), same_as(*map(dense, pair)), rtol)
            assert_same(call("div_{}_xy", a, number), d / number, rtol)
            assert_same(call("div_{}_xy", number, d + 9), number / (d + 9), rtol)
            for name in ("mul_{}_xy", "div_{}_xy"):
                out = call(name, a, number)
                assert (type(out), out.dtype) == (type(q), dtype)
    codes = door.Array1B.quantize(jnp.asarray(np.sign(W), jnp.int8))
    ones = Handlers("1bit")
    for number in (2, 2.5):
        assert_same(ones("add_{}_xy", codes, number), codes.materialize() + number)
        assert_same(ones("mul_{}_xy", codes, number), codes.materialize() * number)


@tags
def test_powers(tag: str) -> None:
    call, q = Handlers(tag), MADE[tag]()
    d = q.materialize()
    exponents = jnp.arange(8)
    for y in (3, np.int32(3), jnp.asarray(3), exponents, jnp.broadcast_to(exponents, d.shape)):
        assert_same(call("integer_pow_{}_xy", q, y), d**y, rtol=1e-5)
        assert_same(call("integer_pow_{}_x", q, y=y), d**y, rtol=1e-5)
    positive = MADE[tag](abs(W) + 1)
    for y in (2.5, positive):
        assert_same(call("integer_pow_{}_xy", positive, y), positive.materialize() ** dense(y), rtol=1e-5)
    assert_same(call("integer_pow_{}_x", q), d * d, rtol=1e-6)


@tags
def test_what_lax_refuses_is_refused(tag: str) -> None:
    """The handler raises what the function of `jax.lax` raises for the dense array."""
    call, q = Handlers(tag), MADE[tag]()
    for name, public, args in (
        ("transpose", lax.transpose, ((0, 0),)),
        ("transpose", lax.transpose, ((0,),)),
        ("reshape", lax.reshape, ((65, 8),)),
        ("reshape", lax.reshape, ((64, 4, 4),)),
        ("reshape", lax.reshape, ((-1,),)),
        ("broadcast_in_dim", lax.broadcast_in_dim, ((2, 64, 8), (0, 1))),
        ("broadcast_in_dim", lax.broadcast_in_dim, ((2, 64, 8), (1,))),
    ):
        with pytest.raises((TypeError, ValueError)) as dense_error:
            public(q.materialize(), *args)
        with pytest.raises(dense_error.type):
            call(name + "_{}_operand", q, *args)
    with pytest.raises(ValueError, match="512 values"):
        call("reshape_{}_operand", q, new_sizes=(65, 8), dimensions=None, sharding=None)
    with pytest.raises(TypeError, match="contracting"):
        call("dot_general_{}_lhs_rhs", W, q, DOT)
    with pytest.raises(TypeError, match="dimension"):
        call("concatenate_{}_operands", [q, q], 2)
    with pytest.raises(TypeError, match="dimension"):
        call("concatenate_{}_operands", [q, q])


@tags
def test_parameters_of_the_primitive_still_do(tag: str) -> None:
    """All that the registry hands to a handler, some of which no function of `jax.lax` takes."""
    call, q = Handlers(tag), MADE[tag]()
    d = q.materialize()
    equations = jax.make_jaxpr(lambda d: lax.reduce(d, 0.0, lambda a, b: a + 2 * b, (0,)))(d).eqns
    (out,) = call("reduce_{}_operand_init_value", q, jnp.float32(0), **equations[-1].params)
    assert_same(out, jax.jit(lambda d: lax.reduce(d, 0.0, lambda a, b: a + 2 * b, (0,)))(d), rtol=1e-5)
    params = {"new_dtype": jnp.dtype("float16"), "weak_type": True, "sharding": None}
    assert call("convert_element_type_{}_operand_kw", q, **params).dtype == jnp.float16
