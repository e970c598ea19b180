"""`register`: every kind of primitive and of name for it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import Primitive

from eformer.jaximus import implicit, register

from .toys import Doubled, assert_same

X = jnp.arange(1.0, 4.0)

ALL_NAMES = """
    jit pjit scan while while_loop cond switch custom_jvp_call custom_jvp custom_vjp_call custom_vjp_call_jaxpr
    custom_vjp shard_map remat checkpoint reduce_sum reduce dot_general conv_general_dilated add_any copy
    pallas_call ffi_call pure_callback io_callback custom_vmap_call sort top_k cumsum rng_bit_generator
    random_bits psum all_gather sharding_constraint device_put optimization_barrier select_n select gather
    scatter-add dynamic_slice erf_inv ragged_dot custom_lin triangular_solve lu
"""


@pytest.mark.parametrize("name", ALL_NAMES.split())
def test_every_kind_of_name_is_known(name, kind):
    @register(name)
    def handler(*operands: kind, **params):
        return NotImplemented

    assert callable(handler)


@pytest.mark.parametrize(
    "primitive", [jax.lax.add_p, "add", jax.extend.core.primitives.add_p], ids=["lax", "name", "ext"]
)
def test_primitive_objects_and_names_file_together(primitive, kind):
    @register(primitive)
    def _(x: kind, y: kind, **params):
        return x.values

    q = kind(X)
    assert_same(q + q, X)


def test_a_primitive_of_ones_own(kind):
    mine = Primitive("mine_of_test_registry")
    mine.def_impl(lambda x: x + 1)
    mine.def_abstract_eval(lambda x: x)

    @register(mine)
    def _(x: kind, **params):
        return x.values - 1

    assert_same(implicit(mine.bind)(kind(X)), X - 1)
    assert_same(implicit(mine.bind)(X), X + 1)
    assert_same(implicit(mine.bind)(Doubled(X)), 2 * X + 1)
