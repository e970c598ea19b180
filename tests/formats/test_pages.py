"""Every documented name, its parameters, and every documented example."""

from __future__ import annotations

import enum
import importlib
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eformer.jaximus import ImplicitArray, implicit
from eformer.ops import quantization as door

from .contract import normal, seeded

BASE = "eformer.ops.quantization."
# handler, with {} for the format: its parameters behind `primitive`
HANDLERS = {
    "add_{}_xy": ("x", "y"),
    "div_{}_xy": ("x", "y"),
    "lt_{}_xy": ("x", "y"),
    "max_{}_xy": ("x", "y"),
    "mul_{}_xy": ("x", "y"),
    "exp_{}_x": ("x",),
    "log_{}_x": ("x",),
    "sqrt_{}_x": ("x",),
    "integer_pow_{}_x": ("x",),
    "integer_pow_{}_xy": ("x", "y"),
    "broadcast_in_dim_{}_operand": ("operand",),
    "gather_{}_operand": ("operand",),
    "reshape_{}_operand": ("operand",),
    "transpose_{}_operand": ("operand",),
    "concatenate_{}_operands": ("operands",),
    "conv_general_dilated_{}_lhs_rhs": ("lhs", "rhs"),
    "dot_general_{}_lhs_rhs": ("lhs", "rhs"),
    "reduce_{}_operand_init_value": ("operand", "init_value"),
    "convert_element_type_{}_operand_kw": ("operand",),
    "convert_element_type_{}_operand_pos": ("operand", "new_dtype"),
}
# documented function or method: its documented parameters, in order; ours may have more behind them
SIGNATURES = {
    "implicit_array_nf4.ArrayNF4": ("packed", "absmax", "block_size", "sharding", "shape", "dtype"),
    "implicit_array_nf4.ArrayNF4.quantize": ("array", "block_size"),
    "implicit_array_nf4.ArrayNF4.materialize": ("self",),
    "implicit_array_nf4.ArrayNF4.dequantize": ("self",),
    "implicit_array_nf4.ArrayNF4.delete": ("self",),
    "implicit_array_nf4.ArrayNF4.with_sharding": ("self", "sharding"),
    "implicit_array_nf4.ArrayNF4.reshard": ("self", "sharding"),
    "implicit_array_nf4.ArrayNF4.with_mesh_and_axis": ("self", "mesh_and_axis"),
    "implicit_array_nf4.safe_materialize": ("arr",),
    "implicit_array_nf4.safe_delete": ("arr", "materialized"),
    "implicit_array_nf4.straight_through_nf4": ("weights", "block_size"),
    "implicit_array_8bit.Array8B": ("scale", "weight", "axis", "sharding", "shape", "dtype"),
    "implicit_array_8bit.Array8B.quantize": ("array", "dtype", "axis"),
    "implicit_array_8bit.Array8B.materialize": ("self",),
    "implicit_array_8bit.Array8B.delete": ("self",),
    "implicit_array_8bit.Array8B.with_sharding": ("self", "sharding"),
    "implicit_array_8bit.Array8B.reshard": ("self", "sharding"),
    "implicit_array_8bit.Array8B.with_mesh_and_axis": ("self", "mesh_and_axis"),
    "implicit_array_8bit.matmul_bf16_int8_weight_only": ("lhs_bf16", "rhs_q_int8", "rhs_scale"),
    "implicit_array_8bit.straight_through_8bit": ("weights",),
    "implicit_array_1bit.Array1B": ("weight", "shape", "dtype"),
    "implicit_array_1bit.Array1B.quantize": ("array", "dtype", "axis"),
    "implicit_array_1bit.Array1B.materialize": ("self",),
    "implicit_array_1bit.Array1B.delete": ("self",),
    "implicit_array_1bit.straight_through_1bit": ("weights",),
    "_config.QuantizationConfig": ("dtype", "block_size", "simulate", "use_kernel"),
    "_config.quantize": ("array", "config", "dtype", "block_size", "simulate"),
    "_config.straight_through": ("array", "config", "dtype", "block_size"),
}


def lookup(path: str):
    module, *names = path.split(".")
    found = importlib.import_module(BASE + module)
    for name in names:
        found = getattr(found, name)
    return found


def parameters(function) -> list[str]:
    return list(inspect.signature(function).parameters)


@pytest.mark.parametrize("path", SIGNATURES)
def test_signature(path: str) -> None:
    documented, found = SIGNATURES[path], lookup(path)
    if path.rsplit(".", 1)[-1] == "quantize" and path.count(".") > 1:
        assert inspect.ismethod(found)
    names = parameters(found)
    if inspect.isclass(found) and issubclass(found, ImplicitArray):
        # shape= and dtype= are keywords of every implicit array
        documented = documented[:-2]
        if "shape" in names:
            names = [n for n in names if n not in ("shape", "dtype")]
    assert tuple(names[: len(documented)]) == documented


@pytest.mark.parametrize("template", HANDLERS)
@pytest.mark.parametrize(("tag", "module"), [("nf4", "nf4"), ("8bit", "8bit"), ("1bit", "1bit")])
def test_handler_names(tag: str, module: str, template: str) -> None:
    handler = lookup(f"implicit_array_{module}.{template.format(tag)}")
    assert handler.__name__ == template.format(tag)
    assert handler.__module__.endswith(f"implicit_array_{module}")
    assert tuple(parameters(handler)[: 1 + len(HANDLERS[template])]) == ("primitive", *HANDLERS[template])


def test_handlers_of_one_format_only() -> None:
    assert callable(lookup("implicit_array_1bit.div_1bit_xy_fallback"))


def test_public_names_have_one_door() -> None:
    for path in SIGNATURES:
        _, name, *rest = path.split(".")
        if not rest and name not in ("safe_materialize", "safe_delete"):
            assert getattr(door, name) is lookup(path)
    assert issubclass(door.QuantizationType, enum.StrEnum)


@pytest.mark.parametrize("cls", [door.ArrayNF4, door.Array8B, door.Array1B])
def test_class_variables_and_properties(cls: type) -> None:
    assert cls.commute_ops is True
    assert cls.warn_on_materialize is True
    assert isinstance(cls.is_sharded, property)
    assert issubclass(cls, ImplicitArray)


W = normal(seeded("pages"), 64, 8)
MADE = {
    "nf4": lambda w=W: door.ArrayNF4.quantize(w, 16),
    "8bit": lambda w=W: door.Array8B.quantize(w),
    "1bit": lambda w=W: door.Array1B.from_float(w),
}
P = jax.lax
NUMBERS = (((1,), (0,)), ((), ()))


@pytest.mark.parametrize("tag", MADE)
def test_handlers_by_hand(tag: str) -> None:
    """Each documented handler, called as documented, gives what JAX gives on the dense array."""
    q = MADE[tag]()
    d, module = q.materialize(), importlib.import_module(f"{BASE}implicit_array_{tag}")

    def call(name: str, primitive, *args, **params):
        out = getattr(module, name.format(tag))(primitive, *args, **params)
        return np.asarray(out.materialize() if isinstance(out, ImplicitArray) else out)

    x = normal(seeded(tag), 64, 8)
    close = np.testing.assert_allclose
    close(call("add_{}_xy", P.add_p, q, x), d + x, rtol=1e-6)
    close(call("add_{}_xy", P.add_p, q, q), d + d, rtol=1e-6)
    close(call("mul_{}_xy", P.mul_p, q, x), d * x, rtol=1e-6)
    close(call("mul_{}_xy", P.mul_p, x, q), d * x, rtol=1e-6)
    close(call("mul_{}_xy", P.mul_p, q, jnp.float32(2)), d * 2, rtol=1e-6)
    close(call("div_{}_xy", P.div_p, q, x), d / x, rtol=1e-6)
    close(call("div_{}_xy", P.div_p, x, q + 5), x / (d + 5), rtol=1e-6)
    np.testing.assert_array_equal(call("lt_{}_xy", P.lt_p, q, x), d < x)
    np.testing.assert_array_equal(call("max_{}_xy", P.max_p, q, x), jnp.maximum(d, x))
    close(call("exp_{}_x", P.exp_p, q, accuracy=None), jnp.exp(d), rtol=1e-6)
    close(call("log_{}_x", P.log_p, q, accuracy=None), jnp.log(d), rtol=1e-6)
    close(call("sqrt_{}_x", P.sqrt_p, q, accuracy=None), jnp.sqrt(d), rtol=1e-6)
    close(call("integer_pow_{}_x", P.integer_pow_p, q, y=3), d**3, rtol=1e-5)
    close(call("integer_pow_{}_x", P.integer_pow_p, q), d**2, rtol=1e-5)
    close(call("integer_pow_{}_xy", P.integer_pow_p, q, 3), d**3, rtol=1e-5)
    np.testing.assert_array_equal(call("transpose_{}_operand", P.transpose_p, q, permutation=(1, 0)), d.T)
    reshaped = call("reshape_{}_operand", P.reshape_p, q, new_sizes=(8, 64), dimensions=None, sharding=None)
    np.testing.assert_array_equal(reshaped, d.reshape(8, 64))
    wide = call(
        "broadcast_in_dim_{}_operand",
        P.broadcast_in_dim_p,
        q,
        shape=(2, 64, 8),
        broadcast_dimensions=(1, 2),
        sharding=None,
    )
    np.testing.assert_array_equal(wide, jnp.broadcast_to(d, (2, 64, 8)))
    for operands in ([q, q], [q, x]):
        np.testing.assert_array_equal(
            call("concatenate_{}_operands", P.concatenate_p, operands, dimension=0),
            jnp.concatenate([d, d if operands[1] is q else x]),
        )
    dot = call(
        "dot_general_{}_lhs_rhs", P.dot_general_p, x.T, q, dimension_numbers=NUMBERS, precision=None,
        preferred_element_type=None, out_sharding=None,
    )  # fmt: skip
    close(dot, x.T @ d, rtol=1e-4, atol=1e-4)
    low = call("convert_element_type_{}_operand_pos", P.convert_element_type_p, q, jnp.bfloat16)
    np.testing.assert_array_equal(low, d.astype(jnp.bfloat16))
    low = call(
        "convert_element_type_{}_operand_kw", P.convert_element_type_p, q, new_dtype=jnp.dtype("float16"),
        weak_type=False, sharding=None,
    )  # fmt: skip
    np.testing.assert_array_equal(low, d.astype(jnp.float16))


@pytest.mark.parametrize("tag", MADE)
def test_remaining_handlers_inside_programs(tag: str) -> None:
    """gather, reduce and the convolution have many parameters: let JAX write them."""
    q, d = MADE[tag](), MADE[tag]().materialize()
    for f in (
        lambda q: q[jnp.asarray([1, 5])],
        lambda q: P.reduce(q, jnp.float32(0), P.add, (0,)),
        lambda q: P.conv(jnp.ones((2, 8, 4)), q[:, :, None], (1,), "SAME"),
    ):
        out = implicit(f)(q)
        out = out.materialize() if isinstance(out, ImplicitArray) else out
        np.testing.assert_allclose(out, f(d), rtol=1e-5, atol=1e-5)


def test_example_nf4() -> None:
    quantized = door.ArrayNF4.quantize(jnp.ones((128, 256), dtype=jnp.float32), block_size=64)
    output = jnp.ones((32, 128)) @ quantized
    np.testing.assert_array_equal(output, np.full((32, 256), 128.0))


def test_example_8bit() -> None:
    quantized = door.Array8B.quantize(jnp.ones((128, 256), dtype=jnp.float32), axis=(-1,))
    output = jnp.ones((32, 128), dtype=jnp.bfloat16) @ quantized
    assert output.dtype == jnp.float32  # bf16 and f32 promote to f32, as for dense arrays
    np.testing.assert_allclose(output, np.full((32, 256), 128.0), rtol=1e-2)


def test_example_1bit() -> None:
    array = jax.random.normal(jax.random.key(0), (256, 64), "f2")
    for made in (door.Array1B(array), door.ArrayNF4(array)):
        assert (made.shape, made.dtype) == ((256, 64), jnp.float16)

        def power(x):
            return x**2

        out = jax.jit(implicit(power))(made)
        np.testing.assert_allclose(out, np.asarray(made.materialize()) ** 2, rtol=2e-3)
        assert "float16[256,64]" in repr(made)


def test_example_codes() -> None:
    weights = jnp.array([[-1, 0, 1, 1], [1, -1, 0, 0]])
    quantized = door.Array1B.quantize(weights.astype(jnp.int8))
    np.testing.assert_array_equal(quantized.materialize(), weights)
    assert quantized.materialize().dtype == jnp.int8


def test_example_config() -> None:
    for config in (
        door.QuantizationConfig(dtype=door.QuantizationType.NF4, block_size=64),
        door.QuantizationConfig(dtype=door.QuantizationType.INT8, block_size=64),
        door.QuantizationConfig(dtype=door.QuantizationType.BINARY),
    ):
        assert door.quantize(W, config=config).shape == W.shape
    config = door.QuantizationConfig(dtype=door.QuantizationType.NF4, simulate=True)
    assert isinstance(door.quantize(W, config=config), jax.Array)
    assert isinstance(door.quantize(W, dtype=door.QuantizationType.NF4, block_size=64), door.ArrayNF4)


def test_example_training_step() -> None:
    @jax.jit
    def train_step(params, inputs, targets):
        def loss_fn(params):
            quant_w = door.straight_through(params["weight"], dtype=door.QuantizationType.NF4)
            return jnp.mean((inputs @ quant_w - targets) ** 2)

        return jax.value_and_grad(loss_fn)(params)

    loss, grads = train_step({"weight": W}, jnp.ones((3, 64)), jnp.zeros((3, 8)))
    dense = door.quantize(W).materialize()
    want = jax.grad(lambda w: jnp.mean((jnp.ones((3, 64)) @ w) ** 2))(dense)
    assert loss > 0
    np.testing.assert_allclose(grads["weight"], want, rtol=1e-5, atol=1e-6)


def test_storage_round_trip_through_the_constructors() -> None:
    nf4, int8, onebit = MADE["nf4"](), MADE["8bit"](), MADE["1bit"]()
    again = door.ArrayNF4(nf4.packed, nf4.absmax, nf4.block_size)
    np.testing.assert_array_equal(again.materialize(), nf4.materialize())
    again = door.ArrayNF4(nf4.packed, nf4.absmax, nf4.block_size, None, shape=(63, 8), dtype=jnp.bfloat16)
    np.testing.assert_array_equal(again.materialize(), nf4.materialize()[:63].astype(jnp.bfloat16))
    np.testing.assert_array_equal(door.Array8B(int8.scale, int8.weight).materialize(), int8.materialize())
    np.testing.assert_array_equal(door.Array8B(int8.scale, int8.weight, (-1,)).materialize(), int8.materialize())
    bare = door.Array1B(onebit.weight)
    np.testing.assert_array_equal(bare.materialize(), np.sign(onebit.materialize()))
    np.testing.assert_array_equal(door.Array1B(onebit.weight, shape=(62, 8)).materialize(), bare.materialize()[:62])


def test_safe_materialize_and_delete() -> None:
    module = importlib.import_module(BASE + "implicit_array_nf4")
    q = MADE["nf4"]()
    dense, was = module.safe_materialize(q)
    assert was
    np.testing.assert_array_equal(dense, q.materialize())
    same, was = module.safe_materialize(dense)
    assert same is dense
    assert not was
    assert module.safe_delete(dense, True) is None
    assert dense.shape == q.shape


@pytest.mark.parametrize("tag", MADE)
def test_delete_and_dequantize(tag: str) -> None:
    q = MADE[tag](normal(seeded("delete", tag), 64, 8))
    np.testing.assert_array_equal(q.dequantize(), q.materialize())
    q.delete()
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(q))
