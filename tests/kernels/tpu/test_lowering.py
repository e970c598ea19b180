"""Lowered for a TPU on a machine without one: the Mosaic kernel is there, the dense matrix is not."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from eformer._kernels import explain, qgather, qmatmul, qragged_dot, tpu
from eformer._kernels.tpu._pallas import precision

from ..cases import FORMATS, FORMS, MORE, make_case
from .calls import kernels_in, lowered, problem, tensors_in

ROWS, COLS = 640, 2304
RNG = np.random.default_rng(11)
CASES = {fmt: make_case(RNG, fmt, ROWS, COLS) for fmt in FORMATS}
MORE_TAKEN = [fmt for fmt in MORE if fmt in tpu.TAKES]
EVERY = [*FORMATS, *(pytest.param(fmt, marks=pytest.mark.thorough) for fmt in MORE_TAKEN)]
EXPERTS = {fmt: make_case(RNG, fmt, 256, 384, batch=(4,)) for fmt in FORMATS}


def forbidden(rows: int, cols: int) -> set[tuple[int, ...]]:
    """Dense shapes, in either orientation and with the blocks apart."""
    return {(rows, cols), (cols, rows), (rows, cols // 64, 64), (rows, cols // 32, 32)}


def aval(*shape: int, dtype=jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("fmt", EVERY)
def test_products(fmt: str, form: str) -> None:
    case = CASES.get(fmt) or make_case(RNG, fmt, ROWS, COLS, block=32)
    for m, dtype in ((1, jnp.bfloat16), (1000, jnp.float32)):
        x = aval(m, COLS if form == "dot" else ROWS, dtype=dtype)
        text = lowered(lambda x, c, s: case.product(x, form, codes=c, scale=s), x, case.codes, case.scale)
        assert kernels_in(text) == 1
        assert not tensors_in(text) & forbidden(ROWS, COLS), (m, dtype)


@pytest.mark.parametrize("fmt", FORMATS)
def test_gradient_and_batching(fmt: str) -> None:
    case, experts = CASES[fmt], EXPERTS[fmt]

    def backward(x, ct, codes, scale):
        return jax.vjp(lambda x: case.product(x, codes=codes, scale=scale), x)[1](ct)[0]

    text = lowered(backward, aval(3, COLS), aval(3, ROWS), case.codes, case.scale)
    assert kernels_in(text) == 1  # that of the other form; the product itself is dead code
    assert f"eformer_{fmt}_axpy" in text
    assert not tensors_in(text) & forbidden(ROWS, COLS)
    mapped = jax.vmap(lambda x, c, s: qmatmul(x, c, s, fmt=fmt, form="dot", cols=384))
    text = lowered(mapped, aval(4, 2, 384), experts.codes, experts.scale)
    assert kernels_in(text) == 1
    assert not any(shape[-2:] in forbidden(256, 384) for shape in tensors_in(text))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("fmt", FORMATS)
def test_groups(fmt: str, form: str) -> None:
    case = EXPERTS[fmt]

    def product(x, codes, scale, sizes):
        return qragged_dot(x, codes, scale, sizes, fmt=fmt, form=form, cols=384)

    for dtype in (jnp.float32, jnp.bfloat16):
        x = aval(40, 384 if form == "dot" else 256, dtype=dtype)
        text = lowered(product, x, case.codes, case.scale, aval(4, dtype=jnp.int32))
        assert kernels_in(text) == 1
        assert not any(shape[-2:] in forbidden(256, 384) for shape in tensors_in(text))


@pytest.mark.parametrize("fmt", FORMATS)
def test_lookup(fmt: str) -> None:
    case = CASES[fmt]

    def gather(codes, scale, indices, preference):
        return qgather(codes, scale, indices, fmt=fmt, cols=COLS, dtype=jnp.bfloat16, preference=preference)

    operands = case.codes, case.scale, aval(5, dtype=jnp.int32)
    text = lowered(lambda *o: gather(*o, "native"), *operands)
    assert kernels_in(text) == 1
    assert not tensors_in(text) & forbidden(ROWS, COLS)
    assert kernels_in(lowered(lambda *o: gather(*o, "auto"), *operands)) == (fmt == "nf4")


def test_inside_shard_map() -> None:
    case = CASES["nf4"]
    mesh = jax.make_mesh((4,), ("a",), devices=jax.devices()[:4], axis_types=(AxisType.Auto,))
    local = jax.shard_map(
        lambda x, c, s: case.product(x, codes=c, scale=s),
        mesh=mesh,
        in_specs=(P(), P("a"), P("a")),
        out_specs=P(None, "a"),
    )
    assert kernels_in(lowered(local, aval(3, COLS), case.codes, case.scale)) == 1


def test_a_program_can_be_exported() -> None:
    case = CASES["int8"]
    exported = export.export(jax.jit(lambda x: case.product(x)), platforms=["tpu"])(aval(2, COLS, dtype=jnp.bfloat16))
    assert "tpu_custom_call" in exported.mlir_module()
    assert exported.out_avals[0].shape == (2, ROWS)


def test_explain_names_the_kernel_and_why_not() -> None:
    case = CASES["nf4"]
    x = aval(4, COLS)
    assert explain(problem(case, "dot", x)).name == "pallas_tpu"

    def refusal(case, x, **options):
        return dict(explain(problem(case, "dot", x, **options)).rejected)["pallas_tpu"]

    assert "float16" in refusal(case, aval(4, COLS, dtype=jnp.float16))
    assert "blocks of 48" in refusal(make_case(RNG, "nf4", 16, 64, block=48), aval(4, 64))
    assert "per value" in refusal(make_case(RNG, "int8", 16, 64, scale="full"), aval(4, 64))
    assert "algorithm" in refusal(case, x, precision=jax.lax.DotAlgorithmPreset.F32_F32_F32)
    assert "ranked after" in refusal(case, x, preference="xla")
    assert (
        "not on rocm"
        in dict(explain(dataclasses.replace(problem(case, "dot", x), platform="rocm")).rejected)["pallas_tpu"]
    )


def test_generations(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = problem(CASES["nf4"], "dot", aval(4, COLS))
    for kind, name in (("TPU v3", "xla"), ("TPU v4", "pallas_tpu"), ("TPU v5 lite", "pallas_tpu"), ("", "pallas_tpu")):
        monkeypatch.setattr(tpu, "chip_kind", lambda kind=kind: kind)
        choice = explain(asked)
        assert choice.name == name
        assert name != "xla" or "not TPU v3" in dict(choice.rejected)["pallas_tpu"]


def test_precision() -> None:
    """Mosaic knows two levels; whatever asks for more than the first gets the second."""
    lowest, highest = jax.lax.Precision.DEFAULT, jax.lax.Precision.HIGHEST
    assert [precision(p) for p in (None, "default", lowest, (lowest, lowest))] == [lowest] * 4
    assert [precision(p) for p in ("high", "highest", jax.lax.Precision.HIGH, (lowest, highest))] == [highest] * 4
    with jax.default_matmul_precision("float32"):
        assert precision(None) == highest
