"""Products split over eight devices: all shapes of scales and sizes. test_sharded_hlo.py reads the programs."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from .cases import FORMATS, FORMS, Case, make_case, relative_error
from .hlo_cases import mesh_of

ROWS, COLS, M = 64, 256, 8


def put(mesh: jax.sharding.Mesh, case: Case, x: np.ndarray, x_spec: P, codes_spec: P) -> list[jax.Array]:
    """Place x, and codes and scale alike (the scale of one column is not split along it)."""
    along = tuple(codes_spec) + (None,) * (case.codes.ndim - len(codes_spec))
    scale_spec = P(*(axis if size > 1 else None for axis, size in zip(along, case.scale.shape, strict=False)))
    placed = ((x, x_spec), (case.codes, codes_spec), (case.scale, scale_spec))
    return [jax.device_put(value, NamedSharding(mesh, spec)) for value, spec in placed]


def random_x(rng: np.random.Generator, form: str) -> np.ndarray:
    return rng.standard_normal((M, COLS if form == "dot" else ROWS)).astype(np.float32)


def run(case: Case, form: str, operands: list[jax.Array]) -> tuple[jax.Array, str]:
    """The product under jit, and the text of the compiled program."""
    product = jax.jit(lambda x, c, s: case.product(x, form, codes=c, scale=s, preference="xla"))
    return product(*operands), product.lower(*operands).compile().as_text()


def entries(spec: P, ndim: int = 2) -> tuple:
    return tuple(spec) + (None,) * (ndim - len(spec))


@pytest.mark.parametrize("scale", ["column", "full", "one", "none"])
@pytest.mark.parametrize("form", FORMS)
def test_scales_of_every_shape(form: str, scale: str, rng: np.random.Generator) -> None:
    case = make_case(rng, "ternary", ROWS, COLS, scale=scale)
    x = random_x(rng, form)
    mesh = mesh_of()
    codes = jax.device_put(case.codes, NamedSharding(mesh, P("a", "b")))
    y = jax.jit(lambda x, c: case.product(x, form, codes=c, preference="xla"))(x, codes)
    assert relative_error(y, case.expected(x, form)) < 3e-6


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("fmt", FORMATS)
def test_sizes_that_do_not_divide(fmt: str, form: str, rng: np.random.Generator) -> None:
    """Ragged columns and rows that the mesh does not divide are right, whatever XLA has to move for them."""
    case = make_case(rng, fmt, 62, 250, block=32, scale="column" if fmt != "nf4" else None)
    x = rng.standard_normal((6, 250 if form == "dot" else 62)).astype(np.float32)
    mesh = mesh_of()
    operands = [jax.device_put(v, NamedSharding(mesh, P(s))) for v, s in ((x, "b"), (case.codes, "b"))]
    y = jax.jit(lambda x, c: case.product(x, form, codes=c, preference="xla"))(*operands)
    assert relative_error(y, case.expected(x, form)) < 3e-6


@pytest.mark.parametrize("spec", [P("a"), P(None, "a"), P("a", "b")], ids=str)
@pytest.mark.parametrize("fmt", FORMATS)
def test_one_row_of_x(fmt: str, spec: P, rng: np.random.Generator) -> None:
    """The loops for one row of x leave the codes where they are, too."""
    case = make_case(rng, fmt, 64, 2048)
    x = rng.standard_normal((1, 2048)).astype(np.float32)
    columns = spec[1] if len(spec) > 1 else None
    y, text = run(case, "dot", put(mesh_of(), case, x, P(None, columns), spec))
    assert relative_error(y, case.expected(x)) < 3e-6
    assert entries(y.sharding.spec) == (None, spec[0])
    moved = [op for op in ("all-gather", "all-to-all", "collective-permute") if op in text]
    assert not moved, moved
    assert ("all-reduce" in text) == (columns is not None)


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_single_group_of_columns(fmt: str, rng: np.random.Generator) -> None:
    """Columns that fill one block (or one byte), or not even that, are an axis of size 1 in storage."""
    mesh = mesh_of()
    for form, cols in (("dot", 16), ("axpy", 16), ("dot", 3), ("axpy", 1)):
        case = make_case(rng, fmt, 8, cols, block=16)
        x = rng.standard_normal((8, cols if form == "dot" else 8)).astype(np.float32)
        operands = [jax.device_put(v, NamedSharding(mesh, P(s))) for v, s in ((x, "b"), (case.codes, "a"))]
        y = jax.jit(lambda x, c, case=case, form=form: case.product(x, form, codes=c))(*operands)
        assert relative_error(y, case.expected(x, form)) < 3e-6


@pytest.mark.parametrize("m", [1, M])
@pytest.mark.parametrize("fmt", ["nf4", "ternary"])
def test_shard_map(fmt: str, m: int, rng: np.random.Generator) -> None:
    case = make_case(rng, fmt, ROWS, COLS, block=32)
    x = random_x(rng, "dot")[:m]
    mesh = mesh_of()

    def product(x, c, s):
        return case.product(x, codes=c, scale=s, preference="xla")

    rows = jax.shard_map(product, mesh=mesh, in_specs=(P(), P("a"), P("a")), out_specs=P(None, "a"))
    for function in (rows, jax.jit(rows)):
        assert relative_error(function(x, case.codes, case.scale), case.expected(x)) < 3e-6
    gradient = jax.jit(jax.grad(lambda x: rows(x, case.codes, case.scale).sum()))(x)
    assert relative_error(gradient, np.broadcast_to(case.dense.sum(0), x.shape)) < 1e-5

    def columns(x, c, s):
        local = COLS // 4
        y = case.__class__(fmt, local, c, s, case.dense).product(x, preference="xla")
        return jax.lax.psum(y, "a")

    along, scale = P(None, "a"), P(None, "a" if fmt == "nf4" else None)
    split = jax.shard_map(columns, mesh=mesh, in_specs=(along, along, scale), out_specs=P())
    assert relative_error(jax.jit(split)(x, case.codes, case.scale), case.expected(x)) < 3e-6


def test_shard_map_over_some_axes(rng: np.random.Generator) -> None:
    case = make_case(rng, "int8", ROWS, COLS)
    x = random_x(rng, "dot")
    product = jax.shard_map(
        lambda x, c, s: case.product(x, codes=c, scale=s, preference="xla"),
        mesh=mesh_of(), in_specs=(P(), P("a"), P("a")), out_specs=P(None, "a"), axis_names={"a"},
    )  # fmt: skip
    assert relative_error(jax.jit(product)(x, case.codes, case.scale), case.expected(x)) < 3e-6


@pytest.mark.parametrize("fmt", ["nf4", "int8"])
def test_explicit_meshes(fmt: str, rng: np.random.Generator) -> None:
    """With explicit axes the result's type carries the sharding."""
    case = make_case(rng, fmt, ROWS, COLS, block=32)
    x = random_x(rng, "dot")
    mesh = mesh_of(AxisType.Explicit)
    with jax.set_mesh(mesh):
        operands = put(mesh, case, x, P("b"), P("a"))
        y, _ = run(case, "dot", operands)
        assert jax.typeof(y).sharding.spec == P("b", "a")
        assert relative_error(y, case.expected(x)) < 3e-6
        gradient = jax.jit(jax.grad(lambda x, c, s: case.product(x, codes=c, scale=s, preference="xla").sum()))
        assert relative_error(gradient(*operands), np.broadcast_to(case.dense.sum(0), x.shape)) < 1e-5


def test_eager_operands_on_many_devices(rng: np.random.Generator) -> None:
    case = make_case(rng, "nf4", ROWS, COLS, block=32)
    x = random_x(rng, "dot")
    _, codes, scale = put(mesh_of(), case, x, P(), P("a"))
    y = case.product(jnp.asarray(x), codes=codes, scale=scale, preference="xla")
    assert relative_error(y, case.expected(x)) < 3e-6
    assert entries(y.sharding.spec) == (None, "a")


def test_programs_of_formats_that_look_alike_differ_without_what_jax_removes(rng: np.random.Generator) -> None:
    """JAX's cache on disk keys programs by their text without the configuration of computations that XLA splits."""
    texts = set()
    for fmt in ("nf4", "int4", "iq4_nl", "fp4"):
        case = make_case(rng, fmt, ROWS, COLS)
        operands = put(mesh_of(), case, random_x(rng, "dot"), P(), P("a"))
        product = jax.jit(lambda x, c, s, case=case: case.product(x, "dot", codes=c, scale=s, preference="xla"))
        text = re.sub(r'backend_config = "[^"]*"', "", product.lower(*operands).as_text())
        assert "CustomSPMDPartitioning" in text
        texts.add(text)
    assert len(texts) == 4
