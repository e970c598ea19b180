"""Page 000 of the documentation, held to its word: every name, every parameter, every example."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eformer.jaximus as jaximus
from eformer.jaximus import ImplicitArray, aux_field, implicit, register, ste, use_implicit

imus = importlib.import_module("eformer.jaximus._imus")

NO_DEFAULT = inspect.Parameter.empty

# name -> documented parameters with their defaults, in order
FUNCTIONS: dict[str, dict[str, Any]] = {
    "aux_field": {"metadata": None, "**kwargs": NO_DEFAULT},
    "combine_leaf_predicate": {"base_fn": NO_DEFAULT, "is_leaf": NO_DEFAULT},
    "default_handler": {"primitive": NO_DEFAULT, "*args": NO_DEFAULT, "**params": NO_DEFAULT},
    "flatten_one_implicit_layer": {"tree": NO_DEFAULT},
    "implicit": {"fn": NO_DEFAULT},
    "implicit_depth": {"tree": NO_DEFAULT},
    "is_array": {"element": NO_DEFAULT},
    "leaf_predicate": {"x": NO_DEFAULT},
    "materialize_handler": {"primitive": NO_DEFAULT, "*vals": NO_DEFAULT, "params": NO_DEFAULT},
    "materialize_nested": {"implicit_arr": NO_DEFAULT, "full": False},
    "register": {"primitive": NO_DEFAULT, "precedence": 0},
    "ste": {"func": NO_DEFAULT},
    "tree_flatten_with_implicit": {"tree": NO_DEFAULT, "is_leaf": None},
    "tree_flatten_with_path_with_implicit": {"tree": NO_DEFAULT, "is_leaf": None, "is_leaf_takes_path": False},
    "tree_leaves_with_implicit": {"tree": NO_DEFAULT, "is_leaf": None},
    "tree_map_with_implicit": {"f": NO_DEFAULT, "tree": NO_DEFAULT, "*rest": NO_DEFAULT, "is_leaf": None},
    "tree_map_with_path_with_implicit": {
        "f": NO_DEFAULT,
        "tree": NO_DEFAULT,
        "*rest": NO_DEFAULT,
        "is_leaf": None,
        "is_leaf_takes_path": False,
    },
    "tree_structure_with_implicit": {"tree": NO_DEFAULT, "is_leaf": None},
    "use_implicit": {"fn": NO_DEFAULT},
}
METHODS: dict[str, dict[str, Any]] = {
    "astype": {"new_dtype": NO_DEFAULT},
    "compute_dtype": {},
    "compute_shape": {},
    "default_handler": {"primitive": NO_DEFAULT, "*args": NO_DEFAULT, "params": None},
    "materialize": {},
    "tree_flatten_with_keys": {},
    "tree_unflatten": {"aux_data": NO_DEFAULT, "children": NO_DEFAULT},
}
CLASSES = ["ImplicitArray", "OrginArray", "UninitializedAval"]


def parameters(f: Any) -> dict[str, Any]:
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    found = inspect.signature(f).parameters.values()
    return {stars.get(p.kind, "") + p.name: p.default for p in found if p.name != "self"}


@pytest.mark.parametrize("module", [imus, jaximus], ids=["_imus", "jaximus"])
@pytest.mark.parametrize("name", [*FUNCTIONS, *CLASSES])
def test_every_documented_name_is_at_both_doors(module, name):
    assert getattr(module, name) is getattr(imus, name)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_take_the_documented_parameters(name):
    found, documented = parameters(getattr(imus, name)), FUNCTIONS[name]
    assert {k: found.get(k, "missing") for k in documented} == documented
    extra = [k for k in found if k not in documented]
    assert all(found[k] is not NO_DEFAULT for k in extra), f"{extra} must be optional"


@pytest.mark.parametrize("name", METHODS)
def test_methods_take_the_documented_parameters(name):
    found, documented = parameters(getattr(ImplicitArray, name)), METHODS[name]
    assert {k: found.get(k, "missing") for k in documented} == documented


def test_the_base_class_is_built_with_shape_and_dtype_keywords():
    found = inspect.signature(ImplicitArray).parameters
    assert [found[n].kind for n in ("shape", "dtype")] == [inspect.Parameter.KEYWORD_ONLY] * 2
    assert [found[n].default for n in ("shape", "dtype")] == [None, None]


def test_classes_are_what_the_page_says():
    assert issubclass(imus.UninitializedAval, Exception)
    assert issubclass(jax.Array, imus.OrginArray)
    assert isinstance(jnp.ones(2), imus.OrginArray)
    assert not isinstance(np.ones(2), imus.OrginArray)
    assert isinstance(inspect.getattr_static(ImplicitArray, "aval"), property)
    with pytest.raises(TypeError):
        ImplicitArray()


def test_register_takes_precedence_by_keyword_only():
    assert inspect.signature(register).parameters["precedence"].kind is inspect.Parameter.KEYWORD_ONLY


# -- the examples; functions the page leaves undefined are defined here ------------------------------------------------

CALLED: list[str] = []


def forget() -> None:
    """Handlers run while tracing; a trace kept from another test would call none."""
    jax.clear_caches()
    CALLED.clear()


def dequantize_nf4(packed: jax.Array, absmax: jax.Array, block_size: int) -> jax.Array:
    return (packed.astype(jnp.float32) - 8) * jnp.repeat(absmax, block_size, axis=0)


def nf4_kernel(lhs: jax.Array, packed: jax.Array, absmax: jax.Array) -> jax.Array:
    CALLED.append("nf4_kernel")
    return lhs @ dequantize_nf4(packed, absmax, packed.shape[0] // absmax.shape[0])


def nf4_transpose_kernel(rhs: jax.Array, packed: jax.Array, absmax: jax.Array) -> jax.Array:
    CALLED.append("nf4_transpose_kernel")
    return dequantize_nf4(packed, absmax, packed.shape[0] // absmax.shape[0]) @ rhs


def optimized_nf4_add(x: Any, y: Any) -> jax.Array:
    CALLED.append("optimized_nf4_add")
    return x.materialize() + y.materialize()


@dataclasses.dataclass
class ArrayNF4(ImplicitArray):
    packed: jax.Array
    absmax: jax.Array
    block_size: int = aux_field()

    def materialize(self):
        return dequantize_nf4(self.packed, self.absmax, self.block_size)

    @classmethod
    def quantize(cls, w, block_size=64):
        blocks = w.reshape(-1, block_size, w.shape[-1])
        absmax = jnp.abs(blocks).max(1) / 7
        codes = jnp.round(blocks / absmax[:, None]) + 8
        return cls(codes.astype(jnp.uint8).reshape(w.shape), absmax, block_size)


@register("dot_general")
def nf4_matmul(lhs: jax.Array, rhs: ArrayNF4, **kwargs):
    return nf4_kernel(lhs, rhs.packed, rhs.absmax)


@register("dot_general")
def nf4_lhs_matmul(lhs: ArrayNF4, rhs: jax.Array, **kwargs):
    return nf4_transpose_kernel(rhs, lhs.packed, lhs.absmax)


@register("add")
def low_priority_add(x: ArrayNF4, y: ArrayNF4, **kwargs):
    CALLED.append("low_priority_add")
    return x.materialize() + y.materialize()


@register("add", precedence=10)
def high_priority_add(x: ArrayNF4, y: ArrayNF4, **kwargs):
    return optimized_nf4_add(x, y)


@pytest.fixture
def weight(key):
    return jax.random.normal(key, (128, 64))


@pytest.fixture
def inputs(key):
    return jax.random.normal(jax.random.fold_in(key, 1), (4, 128))


def close(a, b):
    np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-4)


@pytest.mark.parametrize("door", [implicit, use_implicit], ids=["implicit", "use_implicit"])
def test_example_linear(door, weight, inputs):
    nf4_weight = ArrayNF4.quantize(weight, block_size=64)
    forget()

    @door
    def linear(x, w):
        return x @ w

    close(linear(inputs, nf4_weight), inputs @ nf4_weight.materialize())
    assert CALLED == ["nf4_kernel"]


def test_example_with_block(weight, inputs):
    nf4_weights = ArrayNF4.quantize(weight)
    forget()
    with implicit:
        output = inputs @ nf4_weights
    assert CALLED == ["nf4_kernel"]
    close(output, inputs @ nf4_weights.materialize())


def test_example_multiple_dispatch(weight, inputs):
    nf4_weight = ArrayNF4.quantize(weight)
    forget()
    close(inputs @ nf4_weight, inputs @ nf4_weight.materialize())
    close(nf4_weight @ inputs[:, :64].T, nf4_weight.materialize() @ inputs[:, :64].T)
    assert CALLED == ["nf4_kernel", "nf4_transpose_kernel"]


def test_example_precedence(weight):
    q = ArrayNF4.quantize(weight)
    forget()
    close(q + q, 2 * q.materialize())
    assert CALLED == ["optimized_nf4_add"]


def test_example_straight_through(weight):
    @ste
    def quantize_nf4(weights, block_size=64):
        return ArrayNF4.quantize(weights, block_size)

    np.testing.assert_array_equal(quantize_nf4(weight), ArrayNF4.quantize(weight).materialize())
    g = jax.grad(lambda w: (quantize_nf4(w, block_size=32) * weight).sum())(weight)
    np.testing.assert_array_equal(g, weight)


def test_example_aux_field(weight):
    @dataclasses.dataclass
    class WithAux(ImplicitArray):
        packed: jax.Array
        absmax: jax.Array

        block_size: int = aux_field()
        dtype: jnp.dtype = aux_field(default=jnp.float32)
        mesh_config: tuple | None = aux_field(default=None)

        def materialize(self):
            return dequantize_nf4(self.packed, self.absmax, self.block_size)

    plain = ArrayNF4.quantize(weight)
    q = WithAux(plain.packed, plain.absmax, 64)
    assert len(jax.tree.leaves(q)) == 2
    assert dataclasses.fields(ArrayNF4)[-1].metadata["implicit_array_aux"] is True
    assert (q.dtype, q.shape, q.mesh_config) == (jnp.float32, weight.shape, None)
    doubled = jax.jit(lambda q: dataclasses.replace(q, absmax=q.absmax * 2))(q)
    assert (doubled.block_size, doubled.dtype) == (64, jnp.float32)
    close(doubled.materialize(), 2 * plain.materialize())


def test_aux_field_keeps_metadata_and_forwards_keywords():
    field = aux_field(metadata={"unit": "rows"}, default=3, repr=False)
    assert dict(field.metadata) == {"unit": "rows", "implicit_array_aux": True}
    assert (field.default, field.repr) == (3, False)


def test_default_and_materialize_handlers_bind(weight):
    q = ArrayNF4.quantize(weight)
    out = imus.default_handler(jax.lax.add_p, weight, weight)
    np.testing.assert_array_equal(out, weight + weight)
    params = {"accuracy": None}
    np.testing.assert_array_equal(imus.materialize_handler(jax.lax.exp_p, q, params=params), jnp.exp(q.materialize()))
    np.testing.assert_array_equal(ArrayNF4.default_handler(jax.lax.exp_p, q, params=params), jnp.exp(q.materialize()))
