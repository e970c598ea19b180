"""The rows of the table beyond NF4, INT8, ternary and binary: products, lookups, groups, gradients, sharding in JAX."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from eformer._kernels import qgather, qragged_dot, xla
from eformer._kernels.formats import FORMATS, unpack
from eformer._kernels.native import FLOATS
from eformer._kernels.parameters import product_problem

from .cases import FORMS, MORE, SCALES, Case, make_case, relative_error
from .hlo_cases import mesh_of

USUAL = ("int4", "int3", "fp8_e4m3_block")
EVERY = [pytest.param(fmt, marks=() if fmt in USUAL else pytest.mark.thorough) for fmt in MORE]
ROWS, COLS = 264, 200  # more than one panel of one row, a ragged last block


def case_of(fmt: str, seed: int = 0, scale: str | None = None, **sizes: object) -> Case:
    return make_case(np.random.default_rng(seed), fmt, ROWS, COLS, block=32, scale=scale, **sizes)  # pyright: ignore


def x_of(case: Case, m: int, form: str) -> np.ndarray:
    width = COLS if form == "dot" else ROWS
    return np.random.default_rng(m).standard_normal((m, width)).astype(np.float32)


def test_rows_have_names_and_numbers_of_their_own() -> None:
    assert set(MORE) < set(FORMATS)
    assert len({row.number for row in FORMATS.values()}) == len(FORMATS)
    assert {name: row.bits for name, row in FORMATS.items() if row.zero and row.blocked} == {
        f"int{bits}": bits for bits in (2, 3, 4, 5, 6)
    }


@pytest.mark.parametrize("fmt", EVERY)
@pytest.mark.parametrize("form", FORMS)
def test_products(fmt: str, form: str) -> None:
    for scale in SCALES[fmt]:
        case = case_of(fmt, scale=None if scale == "block" else scale)
        for m in (1, 3):
            x = x_of(case, m, form)
            assert relative_error(case.product(x, form, preference="xla"), case.expected(x, form)) < 3e-6
        assert relative_error(case.product(x, form, preference="reference"), case.expected(x, form)) < 3e-6


@pytest.mark.parametrize("fmt", EVERY)
def test_products_as_a_gpu_without_kernels_computes_them(fmt: str) -> None:
    case = case_of(fmt)
    for form, m in (("dot", 1), ("dot", 20), ("axpy", 1), ("axpy", 3)):
        x = x_of(case, m, form)
        problem = product_problem(x, case.codes, case.scale, "cuda", fmt=fmt, form=form, cols=COLS)
        y = jax.jit(lambda x, *rest, problem=problem: xla.qmatmul(problem, x, *rest))(x, case.codes, case.scale)
        assert relative_error(y, case.expected(x, form)) < 3e-6


@pytest.mark.parametrize("fmt", EVERY)
def test_lookups_groups_and_gradients(fmt: str) -> None:
    case, stack = case_of(fmt), case_of(fmt, batch=(2,))
    ids = np.array([[3, 0], [ROWS - 1, 3]])
    assert relative_error(qgather(case.codes, case.scale, ids, fmt=fmt, cols=COLS), case.dense[ids]) < 1e-6
    x = x_of(case, 5, "dot")
    y = qragged_dot(x, stack.codes, stack.scale, np.array([2, 3]), fmt=fmt, form="dot", cols=COLS)
    expected = [x[:2] @ stack.dense[0].T, x[2:] @ stack.dense[1].T]
    assert relative_error(y, np.concatenate(expected)) < 3e-6
    gradient = jax.grad(lambda x: (case.product(x) ** 2).sum())(x)
    assert relative_error(gradient, 2 * (x @ case.dense.T) @ case.dense) < 1e-5


@pytest.mark.parametrize("fmt", EVERY)
@pytest.mark.parametrize("spec", [("b", "a"), ("a", "b"), (None, "a")])
def test_split_over_devices(fmt: str, spec: tuple[str | None, ...]) -> None:
    """Whole blocks, or values, on every device: codes are never gathered."""
    case = make_case(np.random.default_rng(7), fmt, 64, 256, block=32)
    mesh = mesh_of()
    wide = spec if FORMATS[fmt].blocked else (spec[0], None)
    codes = jax.device_put(case.codes, NamedSharding(mesh, PartitionSpec(*spec)))
    scale = jax.device_put(case.scale, NamedSharding(mesh, PartitionSpec(*wide)))
    x = jnp.asarray(np.random.default_rng(8).standard_normal((4, 256)), jnp.float32)
    program = (
        jax.jit(lambda x, codes, scale: case.product(x, codes=codes, scale=scale)).lower(x, codes, scale).compile()
    )
    assert relative_error(program(x, codes, scale), case.expected(x)) < 3e-6
    assert "all-gather" not in program.as_text()


@pytest.mark.parametrize("fmt", ["fp8_e4m3", "fp8_e5m2"])
def test_every_bit_pattern_of_fp8(fmt: str) -> None:
    """Against `ml_dtypes`, NaN and infinities included."""
    every = np.arange(256, dtype=np.uint8)
    row = FORMATS[fmt]
    for dtype in FLOATS:
        expected = every.view(row.bits_of).astype(dtype)
        found = np.asarray(row.values(jnp.asarray(every), dtype))
        np.testing.assert_array_equal(found.astype(np.float64), expected.astype(np.float64))


@pytest.mark.parametrize("fmt", ["int2", "int3", "int5", "int6", "int4"])
def test_bits_follow_each_other(fmt: str) -> None:
    """numpy's `packbits` is the definition."""
    row = FORMATS[fmt]
    numbers = np.random.default_rng(1).integers(0, 2**row.bits, (3, 16)).astype(np.uint8)
    each = np.unpackbits(numbers[..., None], axis=-1)[..., 8 - row.bits :]
    packed = np.packbits(each.reshape(3, -1), axis=-1)
    assert packed.shape[-1] == row.stored_shape(3, 16, 16)[-1]
    np.testing.assert_array_equal(unpack(jnp.asarray(packed), fmt), numbers)
