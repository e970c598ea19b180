"""`shard_map` over quantized arrays with every spec, those that cut a block or a byte included, as on dense arrays."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from eformer import LoraArray
from eformer.errors import MaterializationError, MaterializationWarning, ShardingError, SlicedBelowCoreError
from eformer.jaximus import explain, implicit, materialization_policy
from eformer.ops.quantization import Array1B, Array8B, ArrayFloat, ArrayInt, ArrayNF4, quantize

from .contract import FAST, check, dense, normal, seeded

# 64 × 32 values: over eight devices the last block, or byte, of most of these is cut; over two of few.
MAKE = {
    "nf4": lambda w: ArrayNF4.quantize(w, 64),
    "nf4-16": lambda w: ArrayNF4.quantize(w, 16),
    "nf4-last": lambda w: ArrayNF4.quantize(w, 16, axis=-1),
    "nf4-double": lambda w: ArrayNF4.quantize(w, 4, double_quant=True),
    "nf4-double-last": lambda w: ArrayNF4.quantize(w, 8, axis=-1, double_quant=True),
    "int8": lambda w: Array8B.quantize(w),
    "int8-columns": lambda w: Array8B.quantize(w, axis=-2),
    "int8-matrix": lambda w: Array8B.quantize(w, axis=(-2, -1)),
    "ternary": lambda w: Array1B.from_float(w, "ternary"),
    "ternary-last": lambda w: Array1B.from_float(w, "ternary", axis=-1, scale=None),
    "binary": lambda w: Array1B.from_float(w, "binary", scale="tensor"),
    "binary-last": lambda w: Array1B.from_float(w, "binary", axis=-1),
    "int8-blocks": lambda w: ArrayInt.quantize(w, 8, 32),
    "lora": lambda w: LoraArray(w, w[:, :3] / 8, w[:3] / 8, 0.5),
    "lora-nf4": lambda w: LoraArray(ArrayNF4.quantize(w, 64), w[:, :3] / 8, w[:3] / 8, 0.5),
    "lora-nf4-double": lambda w: LoraArray(ArrayNF4.quantize(w, 16, double_quant=True), w[:, :3], w[:3]),
}
SPECS = [P("t"), P(None, "t"), P("t", "u"), P("u", "t"), P(("t", "u")), P(None, ("t", "u")), P()]
MESHES = {2: (2, 1), 4: (2, 2), 8: (4, 2)}
SHAPE = (64, 32)


def mesh_of(devices: int) -> jax.sharding.Mesh:
    shape = MESHES[devices]
    return jax.make_mesh(shape, ("t", "u"), (AxisType.Auto,) * 2, devices=jax.devices()[:devices])


def program(mesh, spec: P):
    """A sum, a product, an elementwise function and a reduction of one axis."""
    rows, columns = (*spec, None, None)[:2]
    axes = tuple(a for entry in (rows, columns) if entry for a in ((entry,) if isinstance(entry, str) else entry))
    over = lambda reduce, x, names: reduce(x, names) if names else x  # noqa: E731

    def body(x, w):
        total = over(lax.psum, w.sum(), axes)
        product = over(lax.psum, x @ w, rows)
        return total, product, jnp.tanh(w) * 2, over(lax.pmax, jnp.max(jnp.abs(w), axis=0), rows)

    out_specs = (P(), P(None, columns), spec, P(columns))
    return jax.shard_map(body, mesh=mesh, in_specs=(P(None, rows), spec), out_specs=out_specs)


FEW = ("nf4", "nf4-double", "int8", "ternary", "lora-nf4")
CASES = [
    pytest.param(kind, devices, marks=() if kind in FEW and devices == 4 else pytest.mark.thorough)
    for kind in MAKE
    for devices in MESHES
]


@pytest.mark.parametrize(("kind", "devices"), CASES)
def test_every_spec(kind: str, devices: int) -> None:
    rng = seeded(kind, devices)
    q, x, mesh = MAKE[kind](normal(rng, *SHAPE)), normal(rng, 3, SHAPE[0]), mesh_of(devices)
    f = lambda x, w: [program(mesh, spec)(x, w) for spec in SPECS]  # noqa: E731
    run = functools.partial(jax.jit, compiler_options=FAST)
    check(run(implicit(f))(x, q), run(f)(x, dense(q)), 3e-5)


def test_a_cut_block_is_announced_and_not_multiplied() -> None:
    mesh = mesh_of(4)
    q = ArrayNF4.quantize(normal(seeded("cut"), 64, 16), 64)
    f = jax.shard_map(lambda w: lax.psum(w.sum(), ("t", "u")), mesh=mesh, in_specs=P(("t", "u")), out_specs=P())
    with pytest.warns(MaterializationWarning, match=r"for shard_map\. The spec .*'t', 'u'.* cuts a block"):
        total = implicit(f)(q)
    np.testing.assert_allclose(total, dense(q).sum(), rtol=1e-5)
    with materialization_policy("error"), pytest.raises(MaterializationError, match="shard_map"):
        implicit(f)(q)
    whole = jax.shard_map(lambda w: w @ w.T, mesh=mesh, in_specs=P(None, "t"), out_specs=P(None, None), check_vma=False)
    assert not [e for e in explain(implicit(whole))(q).materializations if "shard_map" in e.primitive]


RAGGED = [
    kind if kind in ("nf4", "ternary") else pytest.param(kind, marks=pytest.mark.thorough)
    for kind in ("nf4", "nf4-16", "int8", "ternary", "binary", "lora-nf4")
]


@pytest.mark.parametrize("kind", RAGGED)
def test_ragged_dot(kind: str) -> None:
    """Experts, rows or columns of a stack of matrices over four devices."""
    mesh, rng = mesh_of(4), seeded(kind, "ragged")
    experts = [MAKE[kind](normal(rng, *SHAPE)) for _ in range(4)]
    q = jax.tree.map(lambda *leaves: jnp.stack(leaves), *experts)
    x, sizes = normal(rng, 10, SHAPE[0]), jnp.array([3, 0, 5, 2], jnp.int32)
    for spec, x_spec, out in [
        (P(None, ("t", "u")), P(None, ("t", "u")), P()),
        (P(None, None, "t"), P(), P(None, "t")),
        (P(None, "u", "t"), P(None, "u"), P(None, "t")),
    ]:

        def body(x, w, sizes, rows=x_spec[1:]):
            y = lax.ragged_dot(x, w, sizes)
            return lax.psum(y, *rows) if rows else y

        f = jax.shard_map(body, mesh=mesh, in_specs=(x_spec, spec, P()), out_specs=out)
        check(jax.jit(implicit(f))(x, q, sizes), f(x, dense(q), sizes), 3e-5)


@pytest.mark.parametrize("kind", ["nf4", "ternary"])
def test_device_put_and_jit_decode_what_they_cannot_split(kind: str) -> None:
    q, mesh = MAKE[kind](normal(seeded(kind, "put"), 4, 16)), mesh_of(4)
    split = NamedSharding(mesh, P(("t", "u")))
    put = implicit(lambda q: jax.device_put(q, split))(q)
    check(put, dense(q))
    assert put.sharding.is_equivalent_to(split, 2)
    check(implicit(jax.jit(lambda q: q * 2, in_shardings=split))(q), dense(q) * 2)


def test_specs_by_storage_of_a_double_quantized_array_say_what_to_do() -> None:
    q = ArrayNF4.quantize(normal(seeded("double"), 256, 64), 16, double_quant=True)
    f = functools.partial(jax.shard_map, jnp.tanh, mesh=mesh_of(4), out_specs=P(None, "t"))
    with pytest.raises(ValueError, match=r"dataclasses.replace\(q, absmax=q.absmax.expanded\(\)\)"):
        f(in_specs=(q.child_specs(P(None, "t")),))(q)
    plain = dataclasses.replace(q, absmax=q.absmax.expanded())
    check(f(in_specs=(plain.child_specs(P(None, "t")),))(plain), jnp.tanh(dense(q)))


@pytest.mark.parametrize("axis", [-2, -1])
def test_scales_of_tiles_are_split_with_their_rows(axis: int) -> None:
    """Also where a device gets a part of a tile."""
    rng = seeded("tiles", axis)
    sizes = jnp.repeat(jnp.array([1.0, 8.0]), 128)
    w = normal(rng, 256, 256) * sizes * sizes[:, None] ** 2
    q, x, mesh = ArrayFloat.quantize(w, "fp8", block_size=128, axis=axis), normal(rng, 3, 256), mesh_of(8)
    spec = P(None, ("t", "u")) if axis == -2 else P(("t", "u"))
    with materialization_policy("error"):
        product = jax.shard_map(lambda x, w: x @ w, mesh=mesh, in_specs=(P(), spec), out_specs=spec)
        turned = jax.shard_map(lambda x, w: x @ w.T, mesh=mesh, in_specs=(P(), spec), out_specs=P(None, *spec))
        check(implicit(product if axis == -2 else turned)(x, q), x @ (dense(q) if axis == -2 else dense(q).T), 3e-5)
    by_storage = jax.shard_map(jnp.tanh, mesh=mesh, in_specs=(q.child_specs(spec),), out_specs=spec)
    with pytest.raises(ValueError, match="codes of 32 rows do not go with scales of 2 tiles"):
        by_storage(q)


@pytest.mark.parametrize("kind", ["nf4-16", "ternary"])
def test_one_spec_for_what_an_array_stores_is_refused(kind: str) -> None:
    """Outside of implicit, and under `with implicit:`, JAX splits the stored arrays."""
    q = MAKE[kind](normal(seeded(kind, "raw"), 64, 64))
    mapped = functools.partial(jax.shard_map, lambda x, w: jnp.tanh(w), mesh=mesh_of(4), out_specs=P("t"))
    for call in (mapped(in_specs=(P(), P("t"))), jax.jit(mapped(in_specs=(P(), P("t")), check_vma=False))):
        with pytest.raises(ShardingError, match=r"implicit\(jax.shard_map\(f, in_specs=...\)\)\(q\)"), implicit:
            call(1.0, q)
        with pytest.raises(ShardingError, match=r"in_specs=q.child_specs\(P"):
            call(1.0, q)
    by_storage = mapped(in_specs=(P(), q.child_specs(P("t"))))
    with implicit:
        check(by_storage(1.0, q), jnp.tanh(dense(q)))
    check(implicit(mapped(in_specs=(P(), P("t"))))(1.0, q), jnp.tanh(dense(q)))


def test_one_spec_that_cannot_cut_the_scales_says_so() -> None:
    q = MAKE["int8"](normal(seeded("rows"), 64, 64))  # a scale for each row
    mapped = functools.partial(jax.shard_map, jnp.tanh, in_specs=P(None, "t"), out_specs=P(None, "t"))
    with pytest.raises(ShardingError, match=r"in_specs=q.child_specs\(P"):
        mapped(mesh=mesh_of(4))(q)
    alone = jax.make_mesh((1,), ("t",), (AxisType.Auto,), devices=jax.devices()[:1])
    check(mapped(mesh=alone)(q), jnp.tanh(dense(q)))


def test_one_spec_is_right_for_batch_axes() -> None:
    q = ArrayNF4.quantize(normal(seeded("stack"), 4, 64, 16), 64, double_quant=True)
    f = jax.shard_map(jnp.tanh, mesh=mesh_of(4), in_specs=P(("t", "u")), out_specs=P(("t", "u")))
    check(f(q), jnp.tanh(dense(q)))


@pytest.mark.parametrize("kind", ["int8", "int8-columns", "nf4"])
def test_associative_scan(kind: str) -> None:
    q = MAKE[kind](normal(seeded(kind, "scan"), *SHAPE))
    with pytest.raises(SlicedBelowCoreError, match="associative_scan"), implicit:
        lax.associative_scan(jnp.add, q)
    check(implicit(lambda q: lax.associative_scan(jnp.add, q))(q), lax.associative_scan(jnp.add, dense(q)), 3e-5)


@pytest.mark.parametrize("kind", ["nf4", "int8", "int4-points", "rounded"])
def test_products_where_a_shard_map_leaves_explicit_axes(kind, key):
    """JAX refuses to make all axes of such a mesh automatic, since some are manual."""
    mesh, w = jax.make_mesh((2, 4), ("t", "u"), (AxisType.Explicit,) * 2), jax.random.normal(key, SHAPE)
    options = {
        "int4-points": {"dtype": "int4", "symmetric": False},
        "rounded": {"dtype": "int8", "activations": "int8"},
    }
    q = quantize(w, axis=0, **options.get(kind, {"dtype": kind}))
    x = jax.random.normal(key, (8, 64))

    program = jax.shard_map(lambda x, w: x @ w, mesh=mesh, in_specs=(P("t"), P()), out_specs=P("t"), axis_names={"t"})
    placed = jax.device_put(x, NamedSharding(mesh, P("t"))), q.with_sharding(NamedSharding(mesh, P()))
    np.testing.assert_allclose(jax.jit(implicit(program))(*placed), x @ q, rtol=1e-4, atol=1e-4)


# -- results -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrap", [lambda f: f, implicit, jax.jit], ids=["plain", "implicit", "jit"])
@pytest.mark.parametrize("spec", [P("t"), P(None, "t")], ids=str)
def test_a_result_is_joined_along_its_own_axes_or_refused(key, wrap, spec):
    """One spec for all that an array stores joins other axes than those of the array."""
    mesh, w = mesh_of(2), jax.random.normal(key, SHAPE)

    def run(make, specs):
        return wrap(jax.shard_map(make, mesh=mesh, in_specs=spec, out_specs=specs))(w)

    make = functools.partial(ArrayNF4.quantize, block_size=16)
    for wrong in (make, MAKE["binary"]) if spec == P("t") else (make, MAKE["int8"]):
        with pytest.raises(ShardingError, match="one_part"):
            run(wrong, spec)
        with pytest.raises(ShardingError, match="one_part"):
            run(lambda x, wrong=wrong: {"x": x, "q": wrong(x)}, {"x": spec, "q": spec})
    part = jax.ShapeDtypeStruct((32, 32) if spec == P("t") else (64, 16), w.dtype)
    found = run(make, jax.eval_shape(make, part).child_specs(spec))
    assert found.shape == SHAPE
    np.testing.assert_array_equal(found.materialize(), make(w).materialize())


def test_results_along_batch_axes_and_dense_ones_stay(key):
    mesh, w = mesh_of(2), jax.random.normal(key, (4, *SHAPE))
    make = functools.partial(ArrayNF4.quantize, block_size=16)
    found = jax.shard_map(make, mesh=mesh, in_specs=P("t"), out_specs=P("t"))(w)
    np.testing.assert_array_equal(found.materialize(), make(w).materialize())
    found = jax.shard_map(lambda w: make(w).materialize(), mesh=mesh, in_specs=P(None, "t"), out_specs=P(None, "t"))(w)
    np.testing.assert_array_equal(found, make(w).materialize())


@pytest.mark.parametrize("mapped", [lambda f: f, jax.vmap], ids=["one", "vmap"])
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_results_under_implicit_stay_packed_where_they_can_be_joined(key, wrap, mapped):
    """As without implicit: along axes that codes and scales have, too. Along others they leave dense."""
    mesh, w = mesh_of(2), jax.random.normal(key, (4, 2, *SHAPE))
    q = ArrayNF4.quantize(w, 16)
    body = lambda q: {"q": q, "none": None, "two": [q[..., :32, :], q @ jnp.ones(SHAPE[1])]}  # noqa: E731
    program = jax.shard_map(body, mesh=mesh, in_specs=P("t"), out_specs={"q": P("t"), "none": None, "two": P("t")})
    q = q if mapped is jax.vmap else q[:, 0]
    with materialization_policy("error"):
        found = wrap(implicit(mapped(program)))(q)
    assert isinstance(found["q"], ArrayNF4)
    assert isinstance(found["two"][0], ArrayNF4)
    np.testing.assert_array_equal(found["q"].materialize(), q.materialize())
    check(found["two"][1], dense(q) @ jnp.ones(SHAPE[1]), 3e-5)

    rows = jax.shard_map(lambda q: q, mesh=mesh, in_specs=P("t"), out_specs=P("t"))
    with materialization_policy("error"), pytest.raises(MaterializationError, match="for shard_map"):
        wrap(implicit(rows))(q[(0,) * (q.ndim - 2)])


@pytest.mark.parametrize(
    "specs", [{"q": P("t")}, {"q": P("t"), "y": P("t")}, {"q": P(), "y": P()}, P("t", None, None, None)], ids=str
)
def test_specs_of_results_under_implicit_are_checked_as_those_of_dense_ones(key, specs):
    mesh, q = mesh_of(2), ArrayNF4.quantize(jax.random.normal(key, (4, *SHAPE)), 16)
    program = jax.shard_map(lambda q: {"q": q, "y": q.sum()}, mesh=mesh, in_specs=P("t"), out_specs=specs)
    with pytest.raises(ValueError, match="out_specs"):
        program(dense(q))
    with pytest.raises(ValueError, match="out_specs"):
        implicit(program)(q)


@pytest.mark.parametrize("kind", ["nf4", "int8", "lora-nf4"])
def test_a_gradient_inside_of_the_body(kind):
    """JAX's rules state the sharding of products there, which says nothing inside of a shard_map."""
    q = MAKE[kind](jax.random.normal(jax.random.key(0), (64, 32)))
    x, mesh = jnp.ones((2, 64)), jax.make_mesh((2,), ("t",), devices=jax.devices()[:2])

    def gradient(w):
        return jax.grad(lambda x: jnp.tanh(x @ w).sum())(x)

    f = jax.shard_map(gradient, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    with materialization_policy("error"):
        found = implicit(f)(q)
    np.testing.assert_allclose(found, f(q.materialize()), 1e-5, 1e-5)
