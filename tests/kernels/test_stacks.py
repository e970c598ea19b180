"""Products with an entry of a stack: what the same product of the entry, taken out, gives; and nothing is copied."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import eformer as ef
from eformer import _stacks, implicit
from eformer._kernels import cpu, qmatmul
from eformer._kernels.backends import export_checks
from eformer._kernels.formats import FORMATS
from eformer._kernels.matmul import IN_STACK
from eformer._kernels.parameters import parameters_of

LAYERS, ROWS, COLS = 3, 48, 128


@pytest.fixture
def kernels() -> None:
    if cpu.loaded().reason is not None:
        pytest.skip("there are no native kernels")


def stack_of(
    key: jax.Array, fmt: str, form: str = "dot", *, along_columns: bool = False, rows: int = ROWS, cols: int = COLS
) -> tuple[Any, Any, dict[str, Any]]:
    """Codes and scales of `LAYERS` random matrices, and the options of a product with one."""
    row = FORMATS[fmt]
    block = 64 if row.blocked else None
    held = (cols // 64, 64 // row.per_code) if row.blocked else (cols // row.per_code,)
    codes = jax.random.bits(key, (LAYERS, rows, *held), jnp.uint8) & jnp.uint8(0x55 if fmt == "ternary" else 0x7B)
    codes = jax.lax.bitcast_convert_type(codes, jnp.int8) if row.code_dtype == np.int8 else codes
    shape = (rows, cols // 64) if row.blocked else (1, cols) if along_columns else (rows, 1)
    scale = jax.random.uniform(key, (LAYERS, *shape), minval=0.5)
    return codes, scale, {"fmt": fmt, "form": form, "cols": cols, "block": block}


def in_stack(x: jax.Array, codes: jax.Array, scale: jax.Array, index: Any, **how: Any) -> jax.Array:
    parameters = parameters_of(x, codes[0], scale[0], **how)
    return IN_STACK.bind(parameters, x, codes, jnp.asarray(index, jnp.int32), scale)


def check_entries(
    key: jax.Array, m: int, stored: tuple[Any, Any, dict[str, Any]], activations: str | None = None
) -> None:
    """Every entry is multiplied as if it were alone, bit for bit."""
    codes, scale, how = stored
    rows, cols = codes.shape[1], how["cols"]
    x = jax.random.normal(key, (m, cols if how["form"] == "dot" else rows), jnp.bfloat16)
    multiply = jax.jit(lambda i: in_stack(x, codes, scale, i, activations=activations, **how))
    alone = jax.jit(lambda codes, scale: qmatmul(x, codes, scale, activations=activations, **how))
    for index in range(LAYERS):
        np.testing.assert_array_equal(multiply(index), alone(codes[index], scale[index]))
    np.testing.assert_array_equal(multiply(LAYERS + 5), multiply(LAYERS - 1))  # as JAX, which clamps


@pytest.mark.parametrize("fmt", ["nf4", "int8", "ternary", "fp8_e4m3"])
@pytest.mark.parametrize("form", ["dot", "axpy"])
def test_an_entry_of_a_stack_is_multiplied_as_if_it_were_alone(key, fmt: str, form: str) -> None:
    check_entries(key, 3, stack_of(key, fmt, form))


@pytest.mark.parametrize("form", ["dot", "axpy"])
def test_scales_along_either_axis_and_x_that_is_rounded(key, form: str) -> None:
    along_columns = form == "axpy"
    check_entries(key, 8, stack_of(key, "int8", form, along_columns=along_columns), "int8")
    check_entries(key, 8, stack_of(key, "int8", form, along_columns=not along_columns))


def test_implementations_that_know_no_stacks_get_the_entry(key) -> None:
    codes, scale, how = stack_of(key, "nf4")
    check_entries(key, 3, (codes, scale, {**how, "preference": "xla"}))


def layers_of(key: jax.Array, *, biased: bool = False, **options: Any) -> tuple[list[Any], Any]:
    keys = jax.random.split(key, LAYERS)
    layers = [ef.quantize(jax.random.normal(k, (COLS, COLS)) * COLS**-0.5, **options) for k in keys]
    if biased:
        layers = [q.replaced(zero=None, bias=-q.zero.astype(jnp.float32) * q.scale) for q in layers]
    return layers, jax.tree.map(lambda *parts: jnp.stack(parts), *layers)


@implicit
def one_after_the_other(x: jax.Array, layers: list[Any]) -> jax.Array:
    for w in layers:
        x = jnp.tanh(x @ w)
    return x


@implicit
def scanned(x: jax.Array, stack: Any, remat: bool = False) -> jax.Array:
    def layer(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
        return jax.jit(lambda x, w: jnp.tanh(x @ w))(x, w), None

    return jax.lax.scan(jax.checkpoint(layer) if remat else layer, x, stack)[0]


def copies_of_codes(compiled: Any) -> list[str]:
    """Instructions that make an array of bytes, inside fusions or not."""
    lines = re.findall(r"= (?:[us]8|f8e4m3fn)\[[\d,]+\]\S* (?:copy|dynamic-slice|fusion|slice)\(.*", compiled.as_text())
    return [line for line in lines if "[]" not in line]


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "nf4"},
        {"dtype": "int8", "axis": 0, "activations": "int8"},
        {"dtype": "int4", "symmetric": False},
        {"dtype": "int4", "symmetric": False, "biased": True},
        {"dtype": "mxfp4"},
        {"dtype": "mxfp8"},
        {"dtype": "nvfp4", "activations": "int8"},
    ],
    ids=str,
)
def test_scanned_layers_are_read_in_place_forwards_and_backwards(key, options: dict[str, Any]) -> None:
    layers, stack = layers_of(key, **options)
    x = jax.random.normal(key, (5, COLS))
    run = jax.jit(scanned, static_argnums=2)
    want = jax.jit(one_after_the_other)(x, layers)
    np.testing.assert_allclose(run(x, stack), want, rtol=1e-6, atol=1e-6)  # tanh is fused differently in loops
    assert not copies_of_codes(run.lower(x, stack).compile())
    want = jax.grad(lambda x: one_after_the_other(x, layers).sum())(x)
    for remat in (False, True):
        gradient = jax.jit(jax.grad(lambda x, stack, remat=remat: scanned(x, stack, remat).sum()))
        np.testing.assert_allclose(gradient(x, stack), want, rtol=1e-5, atol=1e-6)
        assert not copies_of_codes(gradient.lower(x, stack).compile())


def test_scanned_layers_under_vmap_reversed_and_in_a_nested_scan(key) -> None:
    layers, stack = layers_of(key, dtype="nf4")
    xs = jax.random.normal(key, (4, 2, COLS))
    want = jnp.stack([one_after_the_other(x, layers) for x in xs])
    np.testing.assert_allclose(jax.vmap(scanned, in_axes=(0, None))(xs, stack), want, rtol=1e-5, atol=1e-6)
    many = jax.tree.map(lambda part: jnp.stack([part] * 4), stack)
    np.testing.assert_allclose(jax.vmap(scanned)(xs, many), want, rtol=1e-5, atol=1e-6)

    @implicit
    def twice_each(x: jax.Array, stack: Any) -> jax.Array:
        def layer(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
            return jax.lax.fori_loop(0, 2, lambda _, x: jnp.tanh(x @ w), x), None

        return jax.lax.scan(layer, x, stack, reverse=True)[0]

    again = [w for w in reversed(layers) for _ in range(2)]
    np.testing.assert_allclose(twice_each(xs[0], stack), one_after_the_other(xs[0], again), rtol=1e-5, atol=1e-6)


def test_scanned_layers_in_shard_map_and_exported(key) -> None:
    layers, stack = layers_of(key, dtype="nf4")
    x = jax.random.normal(key, (4, COLS))
    want = one_after_the_other(x, layers)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("data",))
    rows, whole = PartitionSpec("data"), PartitionSpec()
    split = jax.shard_map(lambda x, stack: scanned(x, stack), mesh=mesh, in_specs=(rows, whole), out_specs=rows)
    np.testing.assert_allclose(jax.jit(implicit(split))(x, stack), want, rtol=1e-5, atol=1e-6)
    sharded = jax.device_put(x, jax.NamedSharding(mesh, rows))
    np.testing.assert_allclose(jax.jit(scanned)(sharded, stack), want, rtol=1e-5, atol=1e-6)
    program = jax.export.export(jax.jit(scanned), disabled_checks=export_checks())(x, stack)
    np.testing.assert_allclose(program.call(x, stack), want, rtol=1e-5, atol=1e-6)


def test_what_is_noted_is_known_inside_of_the_block_alone() -> None:
    one, other = jnp.ones(2), jnp.ones(2)
    with _stacks.noted([_stacks.Place(one, "stack", "index")]):
        assert _stacks.place_of(one) == (one, "stack", "index")
        assert _stacks.place_of(other) is None
        with _stacks.passed_on([one, other], [other, one]):
            assert _stacks.place_of(other).stack == "stack"
    assert _stacks.place_of(one) is None
