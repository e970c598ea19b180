"""Zero points and biases as an operand: every implementation, every transformation, any split over devices."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import eformer as ef
from eformer._kernels import qgather, qmatmul, qragged_dot
from eformer._kernels.backends import is_kernel_available
from eformer._kernels.matmul import PRODUCT
from eformer._kernels.parameters import product_problem
from eformer.errors import QuantizedGradientError
from eformer.ops.quantization import ArrayInt

from .cases import FORMS, INTEGERS, OFFSETS, make_case, relative_error, with_offset
from .hlo_cases import SUM, collectives, compiled, mesh_of, seeded

OTHERS = [fmt for fmt in INTEGERS if fmt != "int4"]


def array_of(rng: np.random.Generator, bits: int, kind: str, shape: tuple[int, ...], axis: int, block: int) -> ArrayInt:
    """An array whose blocks have what `kind` says, biases and scales of any dtype."""
    small = list(shape)
    small[axis] = -(-shape[axis] // block)
    scale = rng.uniform(0.5, 2, small).astype(rng.choice(["float32", "float16"]))
    more: Any = {
        "zero": {"zero": rng.integers(0, 2**bits, small)},
        "float zero": {"zero": rng.uniform(0, 2**bits, small).astype(np.float32)},
        "bias": {"bias": rng.standard_normal(small).astype(rng.choice(["float32", "float16"]))},
    }[kind]
    codes = rng.integers(0, 2**bits, shape)
    return ArrayInt.from_codes(codes, scale, **more, bits=bits, block_size=block, axis=axis, dtype=jnp.float32)


@pytest.mark.thorough
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from((2, 3, 4, 5, 6, 8)),
    st.sampled_from(("zero", "float zero", "bias")),
    st.sampled_from((-2, -1)),
    st.sampled_from(("float32", "bfloat16")),
    st.tuples(st.integers(1, 70), st.integers(1, 70), st.sampled_from((1, 3, 6, 20))),
)
def test_products_and_lookups_are_those_of_dense_arrays(
    seed: int, bits: int, kind: str, axis: int, dtype: str, sizes: tuple[int, int, int]
) -> None:
    """x @ w, its gradient, vmap over both and rows of w, as for the materialized array."""
    rng, (k, n, m) = np.random.default_rng(seed), sizes
    q = array_of(rng, bits, kind, (2, k, n), axis, 16)
    x = jnp.asarray(rng.standard_normal((2, m, k)), dtype)

    def program(x: jax.Array, w: Any) -> Any:
        one = ef.implicit(lambda x, w: jnp.matmul(x, w, preferred_element_type=jnp.float32))
        y, back = jax.vjp(lambda x: one(x, w), x)
        return y, back(jnp.ones_like(y))[0], ef.implicit(lambda w: w[jnp.array([k // 2, 0])])(w)

    dense = q.materialize()
    found = jax.jit(jax.vmap(program))(x, q)
    want = jax.vmap(program)(x.astype(jnp.float32), dense)
    bound = np.abs(np.asarray(x, np.float64)) @ np.abs(np.asarray(dense, np.float64))
    assert (np.abs(np.asarray(found[0], np.float64) - np.asarray(want[0])) <= 4e-6 * bound + 1e-6).all()
    size = np.abs(np.asarray(dense)).sum(-1)[:, None] * (2**-7 if dtype == "bfloat16" else 4e-6)
    assert (np.abs(np.asarray(found[1], np.float64) - np.asarray(want[1])) <= size + 1e-6).all()
    np.testing.assert_array_equal(found[2], want[2])


@pytest.mark.parametrize("preference", ["native", "xla", "reference"])
@pytest.mark.parametrize("kind", OFFSETS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("fmt", ["int4", *(pytest.param(fmt, marks=pytest.mark.thorough) for fmt in OTHERS)])
def test_every_implementation(fmt: str, form: str, kind: str, preference: str) -> None:
    rng = seeded(fmt, form, kind, preference)
    case = with_offset(rng, make_case(rng, fmt, 130, 200, block=32), kind)
    for m in (1, 7):
        x = rng.standard_normal((m, 200 if form == "dot" else 130)).astype(np.float32)
        found = jax.jit(lambda x: case.product(x, form, preference=preference))(x)
        assert relative_error(found, case.expected(x, form)) < 3e-6, m


@pytest.mark.parametrize("activations", ["int8", "fp8"])
@pytest.mark.parametrize("form", FORMS)
def test_x_that_is_rounded(form: str, activations: str) -> None:
    """What offsets add is multiplied with the rounded x, too."""
    rng = seeded(form, activations)
    for kind in OFFSETS:
        case = with_offset(rng, make_case(rng, "int4", 130, 256, block=64), kind)
        x = rng.standard_normal((5, 256 if form == "dot" else 130)).astype(np.float32)
        how: Any = {"activations": activations, "form": form}
        want = case.product(x, preference="reference", **how)
        for preference in ("native", "xla"):
            assert relative_error(case.product(x, preference=preference, **how), want) < 3e-6
        assert relative_error(want, case.expected(x, form)) > 1e-4  # it was rounded


@pytest.mark.parametrize("kind", OFFSETS)
def test_groups(kind: str) -> None:
    rng, sizes = seeded(kind), np.array([4, 0, 3])
    case = with_offset(rng, make_case(rng, "int4", 70, 90, block=16, batch=(3,)), kind)
    x = rng.standard_normal((9, 90)).astype(np.float32)
    want = np.concatenate([x[:4] @ case.dense[0].T, x[4:7] @ case.dense[2].T, np.zeros((2, 70))])
    for preference in ("native", "xla"):
        how: Any = {"fmt": "int4", "form": "dot", "cols": 90, "preference": preference, "offset": case.offset}
        y, back = jax.vjp(lambda x, how=how: qragged_dot(x, case.codes, case.scale, sizes, **how), x)
        assert relative_error(y, want) < 3e-6
        ct = np.repeat(case.dense[[0, 2]].sum(1), [4, 3], axis=0)
        assert relative_error(back(jnp.ones_like(y))[0][:7], ct) < 3e-6


@pytest.mark.parametrize("kind", OFFSETS)
def test_vmap_over_any_operand(kind: str) -> None:
    rng = seeded(kind)
    case = with_offset(rng, make_case(rng, "int4", 20, 64, block=32, batch=(3,)), kind)
    x = rng.standard_normal((3, 5, 64)).astype(np.float32)

    def product(x: Any, codes: Any, scale: Any, offset: Any) -> Any:
        return qmatmul(x, codes, scale, offset=offset, fmt="int4", form="dot", cols=64)

    stored = (case.codes, case.scale, case.offset)
    want = case.expected(x)
    assert relative_error(jax.vmap(product)(x, *stored), want) < 3e-6
    assert relative_error(product(x, *stored), want) < 3e-6
    one = [array[0] for array in stored]
    for mapped in ((0, None, None, None), (None, None, None, 0), (None, None, 0, 0), (0, None, None, 0)):
        given = [(x, *stored)[i] if axis == 0 else (x[0], *one)[i] for i, axis in enumerate(mapped)]
        found = jax.vmap(product, in_axes=mapped)(*given)
        each = [product(*(array if axis is None else array[i] for array, axis in zip(given, mapped, strict=True)))
                for i in range(3)]  # fmt: skip
        np.testing.assert_allclose(found, jnp.stack(each), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("kind", OFFSETS)
def test_series_and_gradients(kind: str) -> None:
    """`jet` follows x, scale and bias; a gradient with respect to a stored bias is refused."""
    rng = seeded(kind)
    case = with_offset(rng, make_case(rng, "int4", 20, 64, block=32), kind)
    x, dx = rng.standard_normal((2, 3, 64)).astype(np.float32)
    ds = rng.standard_normal(case.scale.shape).astype(np.float32)
    moving = case.offset if kind == "bias" else None

    def ours(x: Any, scale: Any, bias: Any = moving) -> Any:
        offset = case.offset if bias is None else bias
        return qmatmul(x, case.codes, scale, offset=offset, fmt="int4", form="dot", cols=64)

    def dense(x: Any, scale: Any, bias: Any = moving) -> Any:
        codes = jnp.stack([case.codes >> 4, case.codes & 15], -1).reshape(20, 2, 32).astype(jnp.float32)
        zero = 0 if kind == "bias" else case.offset[..., None].astype(jnp.float32)
        d = (codes - zero) * scale[..., None] + (0 if bias is None else bias[..., None])
        return x @ d.reshape(20, 64).T

    primals, series = [x, case.scale], [[dx, dx], [ds, ds]]
    if kind == "bias":
        primals.append(case.offset)
        series.append([ds, -ds])
        with pytest.raises(QuantizedGradientError):
            jax.grad(lambda bias: ours(x, case.scale, bias).sum())(case.offset)
    from jax.experimental import jet

    for found, want in zip(
        jax.tree.leaves(jet.jet(ours, primals, series)), jax.tree.leaves(jet.jet(dense, primals, series)), strict=True
    ):
        assert relative_error(found, want) < 1e-5


SPLITS = {
    "rows of x": (P("a"), P(), ("", "")),
    "rows of D": (P(), P("a"), ("", SUM)),
    "columns of D": (P(), P(None, "a"), (SUM, "")),
    "rows and columns": (P(), P("a", "b"), (SUM, SUM)),
}


@pytest.mark.parametrize("name", SPLITS)
def test_split_over_devices(name: str) -> None:
    """Forwards in the dot form, backwards in the axpy form; sums of results are all that moves."""
    (x_spec, spec, sums), mesh, rng = SPLITS[name], mesh_of(), seeded(name)
    cases = {kind: with_offset(rng, make_case(rng, "int4", 32, 128, block=16), kind) for kind in OFFSETS}
    x, ct = rng.standard_normal((16, 128)).astype(np.float32), rng.standard_normal((16, 32)).astype(np.float32)

    def put(array: Any, spec: P) -> Any:
        return jax.device_put(array, NamedSharding(mesh, spec))

    operands = {
        kind: (put(x, x_spec), *(put(array, spec) for array in (case.codes, case.scale, case.offset)))
        for kind, case in cases.items()
    }

    def run(operands: Any, ct: Any) -> Any:
        results = {}
        for kind, (x, codes, scale, offset) in operands.items():
            how: Any = {"offset": offset, "fmt": "int4", "form": "dot", "cols": 128}
            y, back = jax.vjp(lambda x, c=codes, s=scale, how=how: qmatmul(x, c, s, **how), x)
            results[kind] = y, back(ct)[0]
        return results

    results, text = compiled(run, operands, ct)
    for kind, (y, x_bar) in results.items():
        assert relative_error(y, cases[kind].expected(x)) < 3e-6
        assert relative_error(x_bar, ct @ cases[kind].dense) < 3e-6
    assert sum(collectives(text).values()) == len(OFFSETS) * sum(map(bool, sums))
    assert ("eformer_cpu_qmatmul" in text) == is_kernel_available()


@pytest.mark.parametrize("kind", OFFSETS)
def test_groups_lookups_and_shard_map_over_devices(kind: str) -> None:
    mesh, rng, sizes = mesh_of(), seeded(kind), np.array([5, 0, 7, 3])
    case = with_offset(rng, make_case(rng, "int4", 32, 128, block=16, batch=(4,)), kind)
    x = rng.standard_normal((16, 128)).astype(np.float32)
    stored = [jax.device_put(a, NamedSharding(mesh, P("a", "b"))) for a in (case.codes, case.scale, case.offset)]
    how: Any = {"fmt": "int4", "cols": 128}

    table = [jax.device_put(a[1], NamedSharding(mesh, P("a", "b"))) for a in (case.codes, case.scale, case.offset)]

    def run(x: Any, stored: Any, table: Any) -> Any:
        groups = qragged_dot(x, *stored[:2], sizes, offset=stored[2], form="dot", **how)
        return groups, qgather(*table[:2], jnp.array([3, 31]), offset=table[2], **how)

    (groups, rows), text = compiled(run, x, stored, table)
    collectives(text)  # moves no codes, nor zero points
    owner = np.repeat(np.arange(4), sizes)
    assert relative_error(groups[:15], np.einsum("mk,mrk->mr", x[:15], case.dense[owner])) < 3e-6
    assert relative_error(rows, case.dense[1][[3, 31]]) < 1e-6

    def local(x: Any, codes: Any, scale: Any, offset: Any) -> Any:
        return qmatmul(x, codes[0], scale[0], offset=offset[0], form="dot", **how)[None]

    split = jax.shard_map(local, mesh=mesh, in_specs=(P(), *[P("a")] * 3), out_specs=P("a"))
    found = jax.jit(split)(x, case.codes, case.scale, case.offset)
    assert relative_error(found, np.einsum("mk,grk->gmr", x, case.dense)) < 3e-6


def test_what_is_chosen_and_said() -> None:
    rng = seeded("said")
    case = with_offset(rng, make_case(rng, "int4", 200, 256), "zero")
    how: Any = {"fmt": "int4", "form": "dot", "cols": 256, "offset": case.offset}
    x = np.ones((3, 256), np.float32)
    choice = PRODUCT.choice(product_problem(x, case.codes, case.scale, "cpu", preference="xla", **how))
    assert choice.name == "xla"
    assert choice.reason.endswith("what offsets add is a product of its own")
    if is_kernel_available():
        choice = PRODUCT.choice(product_problem(x, case.codes, case.scale, "cpu", **how))
        assert (choice.name, choice.reason) == ("native_cpu", "quickest implementation for int4 on cpu")
    wide = {**how, "offset": case.offset.astype(np.float64)}
    choice = PRODUCT.choice(product_problem(x, case.codes, case.scale, "cpu", **wide))
    assert "a product of its own" in choice.reason


@pytest.mark.parametrize(
    ("fmt", "offset", "error", "words"),
    [
        ("nf4", np.zeros((8, 2), np.uint8), ValueError, "an offset was given for nf4"),
        ("int4", np.zeros((8, 2), np.int32), TypeError, r"must be uint8 \(zero points\) or floating"),
        ("int4", np.zeros((8, 1), np.uint8), ValueError, r"shape \[8, 1\]; it needs that of the scale, \[8, 2\]"),
    ],
)
def test_bad_offsets(fmt: str, offset: Any, error: type[Exception], words: str) -> None:
    case = make_case(seeded(fmt), fmt, 8, 64, block=32)
    with pytest.raises(error, match=words):
        qmatmul(np.ones((2, 64), np.float32), case.codes, case.scale, offset=offset, fmt=fmt, form="dot", cols=64)
