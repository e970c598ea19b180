"""The contract of every quantized array: a program on one gives what it gives on its `materialize()`.

`FORMATS` lists the arrays under test, `make` makes one, and `check` compares trees of results with the dense ones. What
is done with them stands in `contract_programs`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eformer._formats.floating.array import ArrayFloat
from eformer.jaximus import ImplicitArray
from eformer.ops.quantization import Array1B, Array8B, ArrayInt, ArrayNF4, QuantizationType

# No multiple of a block, of 8 or of 4, so every format pads its storage in both orientations.
K, N = 70, 26
TOLERANCE = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 2e-2, "float16": 3e-3, "complex64": 1e-5}


@dataclasses.dataclass(frozen=True)
class Format:
    """A way to quantize. `axis` is where values are packed (None: nowhere), `shared` where one scale serves many.

    `in_blocks`: does every block of that axis have all its scales, so that others may follow?
    """

    name: str
    make: Callable[[Any], Any]
    kind: type
    axis: int | None
    shared: tuple[int, ...]
    in_blocks: bool = False


def _at(axis: int, w: Any) -> int:
    return max(axis, -w.ndim)


def _nf4(name: str, block: int, axis: int, **options: Any) -> Format:
    make = lambda w: ArrayNF4.quantize(w, block, axis=_at(axis, w), **options)  # noqa: E731
    return Format(name, make, ArrayNF4, axis, (axis,), in_blocks=True)


def _integer(name: str, bits: int, axis: int, block: int | None = 32, **options: Any) -> Format:
    make = lambda w: ArrayInt.quantize(w, bits, block, axis=_at(axis, w), **options)  # noqa: E731
    return Format(name, make, ArrayInt, axis, (axis,), in_blocks=block is not None)


def _biased(name: str, bits: int, axis: int) -> Format:
    """The values of a quantized array, its zero points as biases."""

    def make(w: Any) -> ArrayInt:
        q = ArrayInt.quantize(w, bits, 32, axis=_at(axis, w), symmetric=False)
        return q.replaced(zero=None, bias=-q.zero.astype(jnp.float32) * q.scale)

    return Format(name, make, ArrayInt, axis, (axis,))


def _int8(name: str, *axes: int) -> Format:
    make = lambda w: Array8B.quantize(w, axis=tuple({_at(a, w): None for a in axes}))  # noqa: E731
    return Format(name, make, Array8B, None, axes)


def _onebit(name: str, kind: Any, axis: int, scale: Any) -> Format:
    make = lambda w: Array1B.from_float(w, kind, axis=_at(axis, w), scale=scale)  # noqa: E731
    return Format(name, make, Array1B, axis, (axis,))


def _float(name: str, kind: str, *axes: int, **options: Any) -> Format:
    """With one axis blocks run along it; FP8 with none in blocks shares scales along these axes."""
    whole = kind.startswith("fp8") and not options

    def make(w: Any) -> Any:
        at = tuple({_at(a, w): None for a in axes}) if whole else _at(axes[0], w)
        return ArrayFloat.quantize(w, kind, axis=at, **options)

    shared = (-2, -1) if kind == "nvfp4" else axes
    return Format(name, make, ArrayFloat, None if whole else axes[0], shared, in_blocks=not whole and kind != "nvfp4")


def _codes(name: str, axis: int) -> Format:
    make = lambda w: Array1B.quantize(jnp.sign(jnp.round(w)), axis=_at(axis, w))  # noqa: E731
    return Format(name, make, Array1B, axis, (axis,))


FORMATS = {
    f.name: f
    for f in (
        _nf4("nf4", 64, -2),
        _nf4("nf4-32-last", 32, -1),
        _nf4("nf4-double", 32, -2, double_quant=True),
        _nf4("nf4-double-last", 16, -1, double_quant=True),
        _integer("int4", 4, -2),
        _integer("int4-zero", 4, -2, symmetric=False),
        _integer("int4-zero-last", 4, -1, 16, symmetric=False),
        _biased("int4-bias", 4, -2),
        _integer("int4-f16", 4, -2, 64, scale_dtype=jnp.float16),
        _integer("int2", 2, -2),
        _integer("int3-zero", 3, -2, symmetric=False),
        _integer("int5-last", 5, -1, 16),
        _integer("int6-bf16", 6, -2, scale_dtype=jnp.bfloat16),
        _integer("int8-blocks", 8, -2),
        _integer("int8-blocks-zero", 8, -1, symmetric=False),
        _int8("int8", -1),
        _int8("int8-columns", -2),
        _int8("int8-matrix", -2, -1),
        _onebit("ternary", "ternary", -2, "channel"),
        _onebit("ternary-last", "ternary", -1, "channel"),
        _onebit("ternary-tensor", "ternary", -2, "tensor"),
        _onebit("ternary-bare", "ternary", -2, None),
        _onebit("binary", "binary", -2, "channel"),
        _onebit("binary-last-tensor", "binary", -1, "tensor"),
        _onebit("binary-bare", "binary", -1, None),
        _float("nvfp4", "nvfp4", -2),
        _float("nvfp4-last", "nvfp4", -1),
        _float("mxfp4-last", "mxfp4", -1),
        _float("mxfp8", "mxfp8", -2),
        _float("mxfp8_e5m2", "mxfp8_e5m2", -2),
        _float("iq4_nl", "iq4_nl", -2),
        _float("fp8", "fp8", -2),
        _float("fp8_e5m2-matrix", "fp8_e5m2", -2, -1),
        _float("fp8-tiles", "fp8", -2, block_size=128),
        _codes("codes", -2),
        _codes("codes-last", -1),
    )
}
# Programs here are compiled more often than run.
FAST = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
# One of each layout that behaves differently under transformations.
FEW = (
    "nf4", "nf4-double-last", "int4", "int4-zero", "int8", "int8-matrix", "nvfp4", "ternary", "binary-last-tensor",
    "codes",
)  # fmt: skip

# Every format; the layouts that behave like one of FEW are left to `make test-all`.
EVERY = [name if name in FEW else pytest.param(name, marks=pytest.mark.thorough) for name in FORMATS]


# By name; what is of the same class as another one is left to `make test-all`.
_OFTEN = ("nf4", "int8", "ternary", "binary", "int4", "mxfp4")
EVERY_KIND = [k.value if k in _OFTEN else pytest.param(k.value, marks=pytest.mark.thorough) for k in QuantizationType]


def seeded(*key: Any) -> np.random.Generator:
    return np.random.default_rng([sum(map(ord, str(k))) for k in key])


def normal(rng: np.random.Generator, *shape: int, dtype: Any = jnp.float32) -> jax.Array:
    return jnp.asarray(rng.standard_normal(shape), dtype)


def make(name: str, rng: np.random.Generator, *shape: int, dtype: Any = jnp.float32) -> Any:
    q = FORMATS[name].make(normal(rng, *shape, dtype=dtype))
    assert q.shape == shape
    assert q.dtype == dtype
    return q


def dense(tree: Any) -> Any:
    """`tree` with every implicit array materialized."""
    return jax.tree.map(
        lambda x: x.materialize() if isinstance(x, ImplicitArray) else x,
        tree,
        is_leaf=lambda x: isinstance(x, ImplicitArray),
    )


def check(found: Any, expected: Any, tolerance: float | None = None) -> None:
    """Compare trees of results: shapes, dtypes, values within a fraction of the largest."""
    found = jax.tree.map(
        lambda x: x.materialize() if isinstance(x, ImplicitArray) else x,
        found,
        is_leaf=lambda x: isinstance(x, ImplicitArray),
    )
    got, want = jax.tree_util.tree_leaves_with_path(found), jax.tree_util.tree_leaves_with_path(expected)
    assert [p for p, _ in got] == [p for p, _ in want]
    wrong = [
        f"{jax.tree_util.keystr(path)}: {why}"
        for (path, a), (_, b) in zip(got, want, strict=True)
        if (why := difference(a, b, tolerance))
    ]
    assert not wrong, "\n".join(wrong)


def difference(a: Any, b: Any, tolerance: float | None) -> str | None:
    """What is wrong with `a`, or None."""
    if (jnp.shape(a), jnp.result_type(a)) != (jnp.shape(b), jnp.result_type(b)):
        return f"{jnp.result_type(a)}{jnp.shape(a)} instead of {jnp.result_type(b)}{jnp.shape(b)}"
    inexact = jnp.issubdtype(jnp.result_type(b), jnp.inexact)
    limit = tolerance or TOLERANCE.get(jnp.result_type(b).name, 0.0)
    if inexact:
        wide = np.complex128 if jnp.iscomplexobj(b) else np.float64
        a, b = np.asarray(a).astype(wide), np.asarray(b).astype(wide)
        odd = ~np.isfinite(b)
        if not np.array_equal(a[odd], b[odd], equal_nan=True):
            return "infinities or NaN differ"
        a, b = a[~odd], b[~odd]
        worst = np.max(np.abs(a - b), initial=0)
        return (
            None if worst <= limit * np.max(np.abs(b), initial=1e-30) else f"off by {worst}, largest {np.abs(b).max()}"
        )
    return None if np.array_equal(np.asarray(a), np.asarray(b)) else "values differ"
