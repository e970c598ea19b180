"""Logical dtypes: bf16, f16 and f32 here, f64 in a process with x64 enabled."""

from __future__ import annotations

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eformer.jaximus import implicit
from eformer.ops.quantization import Array1B

from .contract import FAST, FEW, check, dense, make, normal, seeded

DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)


def several(x, q):
    return {
        "x @ q": x @ q,
        "q.T @": q.T @ x.T,
        "einsum": jnp.einsum("mk,kn->nm", x, q),
        "neg": -q,
        "double": q * 2,
        "third": q / 3,
        "add": q + q,
        "sum": q.sum(0),
        "take": q[jnp.asarray([1, 0])],
        "row": q[1],
        "exp": jnp.exp(q),
        "weak": q * 1.5 + 1,
    }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FEW)
def test_programs(name: str, dtype) -> None:
    rng = seeded(name)
    q, x = make(name, rng, 40, 10, dtype=dtype), normal(rng, 3, 40, dtype=dtype)
    check(*jax.jit(lambda x, q: (implicit(several)(x, q), several(x, q.materialize())), compiler_options=FAST)(x, q))


@pytest.mark.parametrize("other", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["nf4", "int8", "binary-last-tensor"])
def test_promotion(name: str, dtype, other) -> None:
    """Mixed operands promote as dense ones do."""
    rng = seeded(name)
    q, x = make(name, rng, 24, 8, dtype=dtype), normal(rng, 3, 24, dtype=other)
    for f in (jnp.matmul, lambda x, q: x[:, :1] * q[:3], lambda x, q: jnp.concatenate([x[:, :8], q])):
        check(implicit(f)(x, q), f(x, dense(q)), tolerance=2e-2 if jnp.bfloat16 in (dtype, other) else 3e-3)


@pytest.mark.parametrize("name", FEW)
def test_astype_is_lazy_and_never_changes_the_original(name: str) -> None:
    q = make(name, seeded(name), 40, 10)
    half = q.astype(jnp.bfloat16)
    assert (half.dtype, q.dtype) == (jnp.bfloat16, jnp.float32)
    assert half.nbytes == q.nbytes
    assert half.itemsize == 2
    np.testing.assert_array_equal(half.materialize(), q.materialize().astype(jnp.bfloat16))
    np.testing.assert_array_equal(half.astype(jnp.float32).materialize(), q.materialize())
    assert isinstance(q.astype(jnp.int32), jax.Array)


def test_bare_codes_keep_integer_dtypes() -> None:
    from eformer.ops.quantization import Array1B

    codes = jnp.asarray(seeded("codes").integers(-1, 2, (13, 6)), jnp.int8)
    for dtype in (jnp.int8, jnp.int32):
        q = Array1B.quantize(codes.astype(dtype))
        x = jnp.arange(26, dtype=dtype).reshape(2, 13)
        for f in (
            jnp.matmul,
            lambda x, q: q * 2,
            lambda x, q: -q,
            lambda x, q: q / 2,
            lambda x, q: q + x[0, 0],
            lambda x, q: q.sum(),
        ):
            found, want = implicit(f)(x, q), f(x, codes.astype(dtype))
            assert dense(found).dtype == want.dtype
            np.testing.assert_array_equal(dense(found), want)
    np.testing.assert_array_equal(jnp.ones((2, 13)) @ Array1B.quantize(codes), jnp.ones((2, 13)) @ codes)


X64 = """
import sys, jax, jax.numpy as jnp, numpy as np
from eformer.jaximus import implicit
from tests.formats.contract import check, make, normal, seeded, dense
from tests.formats.test_contract_dtypes import several
for name in sys.argv[1:]:
    rng = seeded(name)
    q, x = make(name, rng, 40, 10, dtype=jnp.float64), normal(rng, 3, 40, dtype=jnp.float64)
    # NF4 and small floats keep their scales in f32 whatever the input, so their values are those of f32.
    tolerance = 3e-7 if "f4" in name or "fp" in name else 1e-12
    check(*jax.jit(lambda x, q: (implicit(several)(x, q), several(x, q.materialize())))(x, q), tolerance)
    assert (x @ q).dtype == jnp.float64
    mixed = x.astype(jnp.float32) @ q
    assert mixed.dtype == jnp.float64
    check(mixed, x.astype(jnp.float32) @ dense(q), 1e-6)
    low = make(name, rng, 40, 10)
    assert low.dtype == jnp.float32
    assert (x.astype(jnp.float32) @ low).dtype == jnp.float32
    assert (x @ low).dtype == jnp.float64
    g = jax.grad(lambda x: jnp.sin(x @ q).sum())(x)
    check(g, jax.grad(lambda x: jnp.sin(x @ dense(q)).sum())(x), tolerance)
print("fine")
"""


@pytest.mark.parametrize("names", [("nf4", "int8"), pytest.param(FEW, marks=pytest.mark.thorough)], ids=("few", "all"))
def test_f64_under_x64(names: tuple[str, ...]) -> None:
    environment = {**os.environ, "JAX_ENABLE_X64": "1", "PYTHONWARNINGS": "ignore"}
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    command = [sys.executable, "-c", X64, *names]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    assert done.stdout == "fine\n", done.stderr[-3000:]


WEAK = {
    "elu": jax.nn.elu,
    "leaky_relu": jax.nn.leaky_relu,
    "xlogy": lambda c: jax.scipy.special.xlogy(c, 2.0),
    "less": lambda c: c < 1.5,
    "times": lambda c: c * 0.5,
    "arctan2": lambda c: jnp.arctan2(c, 1.0),
    "half": lambda c: (c * 0.5) * jnp.ones((), jnp.bfloat16),
}


@pytest.mark.parametrize("name", WEAK)
def test_weak_types_are_those_of_dense_arrays(name: str) -> None:
    """Integer codes with a Python number give a weak float: what it meets next decides its dtype."""
    f, codes = WEAK[name], Array1B.quantize(jnp.sign(jnp.round(normal(seeded("weak"), 8, 6))).astype(jnp.int8))
    want = f(dense(codes))
    for found in (implicit(f)(codes), jax.jit(implicit(f))(codes)):
        assert (found.dtype, found.weak_type) == (want.dtype, want.weak_type)
        check(found, want)


def test_numpy_functions_of_an_array_closed_over_inside_jit() -> None:
    q, x = make("nf4", seeded("numpy"), 70, 26), np.ones((2, 70), np.float32)
    np.testing.assert_allclose(jax.jit(lambda: jnp.asarray(np.dot(x, q)))(), x @ np.asarray(dense(q)), rtol=1e-5)
    with pytest.raises(jax.errors.TracerArrayConversionError):
        jax.jit(lambda q: np.asarray(q))(q)
