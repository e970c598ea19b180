"""The one operation of the compute layer, declared once: shapes, derivative, batching, partitioning, lowering.

`qmatmul` is linear in x, so its derivative is itself and its transpose is the other form: the backward pass decodes the
codes again and nothing dense is kept between the passes.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching

from eformer._jax.avals import agree, result_type
from eformer.errors import QuantizedGradientError

from . import explicit, lowering, select
from .partition_matmul import partitioned
from .platforms import default_platform
from .problem import Options, Spec, as_operands, check_x, out_shape, problem_of, spec_of

qmatmul_p = Primitive("eformer_qmatmul")

NO_GRADIENT = """\
a gradient with respect to the {what} of a quantized {fmt} matrix was asked for: rounding has no useful derivative.
Keep the quantized array out of the differentiated arguments and train a low-rank update (LoRA) next to it, or keep the
dense weight and quantize it in the forward pass with `straight_through`."""


def qmatmul(x: Any, codes: Any, scale: Any, *, out_sharding: Any = None, **options: Unpack[Options]) -> jax.Array:
    """x @ D.T (`form="dot"`) or x @ D (`form="axpy"`) for the matrix D of `cols` columns stored in codes and scale.

    x is (..., K) for one matrix, (batch..., M, K) when the codes have batch axes. The result has dtype `out_dtype`, by
    default that of x; sums are accumulated in float32 or wider. `out_sharding` is for meshes with explicit axes:
    without it rows are sharded as those of x, columns as those of D.

    >>> codes = jnp.array([[1, -2], [3, 4]], jnp.int8)
    >>> qmatmul(jnp.array([1.0, 10.0]), codes, jnp.full((1, 1), 0.5), fmt="int8", form="dot", cols=2)
    Array([-9.5, 21.5], dtype=float32)
    """
    x, codes, scale = as_operands(x, codes, scale)
    spec = spec_of(x, codes, scale, **options)
    check_x(spec, x, codes)
    return on_floats(spec, x, lambda spec, x: _product(spec, x, codes, scale, out_sharding))


def on_floats(spec: Spec, x: jax.Array, product: Callable[[Spec, jax.Array], jax.Array]) -> jax.Array:
    """A product of floating x, for any x: integers are converted; a complex x is two products, since D is real."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        real = dataclasses.replace(spec, out_dtype=jnp.finfo(spec.out_dtype).dtype)
        return lax.complex(product(real, x.real), product(real, x.imag))
    if not jnp.issubdtype(x.dtype, jnp.floating):
        x = x.astype(jnp.result_type(x.dtype, jnp.float32))
    return product(spec, x)


def _product(spec: Spec, x: jax.Array, codes: jax.Array, scale: jax.Array | None, out_sharding: Any) -> jax.Array:
    """Bring the operands to the shapes the primitive takes."""
    batch = codes.shape[: codes.ndim - spec.core_ndim]
    if scale is not None and scale.ndim == 2 and batch:
        scale = jnp.broadcast_to(scale, (*batch, *scale.shape))
    if x.ndim > 1:  # axes of rows stay apart, so that each may be split over devices
        return bind(spec, x, codes, scale, out_sharding)
    y = bind(spec, x.reshape(1, -1), codes, scale).reshape(-1)
    return y if out_sharding is None else jax.sharding.reshard(y, out_sharding)


def bind(
    spec: Spec, x: jax.Array, codes: jax.Array, scale: jax.Array | None, out: Any = None, *, announced: bool = False
) -> jax.Array:
    """Apply the primitive, and leave a note for `explain` unless the product being transformed has left one."""
    if not announced:
        select.announce("qmatmul", select.CANDIDATES, problem_of(spec, default_platform(), x, codes, scale))
    operands = agree(x, codes) if scale is None else agree(x, codes, scale)
    product = functools.partial(qmatmul_p.bind, spec=spec)
    out = explicit.of_product(spec, x, codes) if out is None else out
    return product(*operands) if out is None else explicit.in_auto_mode(product, out, operands)


def _scale_of(operands: tuple[Any, ...]) -> Any:
    return operands[2] if len(operands) == 3 else None


@qmatmul_p.def_abstract_eval
def _abstract(*operands: Any, spec: Spec) -> Any:
    x, codes = operands[:2]
    return result_type(out_shape(spec, x, codes), spec.out_dtype, x)


# -- derivatives -------------------------------------------------------------------------------------------------------


def refuse_tangents(spec: Spec, **tangents: Any) -> None:
    """Only x of a product may be differentiated."""
    for what, tangent in tangents.items():
        if not isinstance(tangent, ad.Zero):
            raise QuantizedGradientError(NO_GRADIENT.format(what=what, fmt=spec.fmt))


def _jvp(primals: tuple[Any, ...], tangents: tuple[Any, ...], *, spec: Spec) -> tuple[Any, Any]:
    refuse_tangents(spec, **dict(zip(("codes", "scale"), tangents[1:], strict=False)))
    x, codes = primals[:2]
    scale = _scale_of(primals)
    y = bind(spec, x, codes, scale, announced=True)
    if isinstance(tangents[0], ad.Zero):
        return y, ad.Zero(jax.typeof(y).to_tangent_aval())
    return y, bind(spec, tangents[0], codes, scale, announced=True)


def _transpose(ct: Any, *operands: Any, spec: Spec) -> list[Any]:
    x, codes = operands[:2]
    nothing = [None] * (len(operands) - 1)
    if isinstance(ct, ad.Zero):
        return [ad.Zero(x.aval), *nothing]
    other = dataclasses.replace(spec, form=spec.transposed, out_dtype=np.dtype(x.aval.dtype))
    return [bind(other, ct, codes, _scale_of(operands)), *nothing]


ad.primitive_jvps[qmatmul_p] = _jvp
ad.primitive_transposes[qmatmul_p] = _transpose


# -- batching ----------------------------------------------------------------------------------------------------------


def _batch(operands: tuple[Any, ...], dims: tuple[Any, ...], *, spec: Spec) -> tuple[Any, int]:
    call = functools.partial(bind, spec, announced=True)
    size = next(o.shape[d] for o, d in zip(operands, dims, strict=True) if d is not None)
    front = [o if d is None else jnp.moveaxis(o, d, 0) for o, d in zip(operands, dims, strict=True)]
    x, codes, scale = front[0], front[1], _scale_of(tuple(front))
    if all(d is None for d in dims[1:]):
        has_batch = codes.ndim > spec.core_ndim
        return _fold_into_rows(call, x, codes, scale) if has_batch else (call(x, codes, scale), 0)
    if dims[1] is None:
        # Only the scale (and perhaps x) is mapped: a loop, because repeating the codes would multiply their memory.
        if dims[0] is None:
            return lax.map(lambda s: call(x, codes, s), scale), 0
        return lax.map(lambda xs: call(xs[0], codes, xs[1]), (x, scale)), 0
    if dims[0] is None:
        x = jnp.broadcast_to(x, (size, *x.shape))
    if scale is not None and dims[2] is None:
        scale = jnp.broadcast_to(scale, (size, *scale.shape))
    batch = codes.ndim - spec.core_ndim
    flat = x.reshape(*x.shape[:batch], math.prod(x.shape[batch:-1]), x.shape[-1])  # matrices have one axis of rows
    return call(flat, codes, scale).reshape(out_shape(spec, x, codes)), 0


def _fold_into_rows(call: Any, x: jax.Array, codes: jax.Array, scale: Any) -> tuple[jax.Array, int]:
    """Only x is mapped: its new axis becomes part of M. (b, batch..., M, K) -> (batch..., b * M, K) and back."""
    m_axis = x.ndim - 2
    moved = jnp.moveaxis(x, 0, m_axis - 1)
    size, m = moved.shape[m_axis - 1 : m_axis + 1]
    y = call(moved.reshape(*moved.shape[: m_axis - 1], size * m, moved.shape[-1]), codes, scale)
    return y.reshape(*y.shape[:-2], size, m, y.shape[-1]), y.ndim - 2


batching.primitive_batchers[qmatmul_p] = _batch


# -- evaluation and lowering -------------------------------------------------------------------------------------------


def _build(platform: str, split: bool, spec: Spec) -> Any:
    """A jitted function, so that equal products in one program share one computation."""

    def eformer_qmatmul(x: jax.Array, codes: jax.Array, scale: jax.Array | None) -> jax.Array:
        problem = problem_of(spec, platform, x, codes, scale)
        if split and 0 not in (*problem.batch, problem.m, problem.rows, problem.cols):
            return partitioned(problem, x, codes, scale)
        return select.compute_rows(problem, x, codes, scale)

    jitted = jax.jit(eformer_qmatmul)
    return lambda *operands: jitted(operands[0], operands[1], _scale_of(operands))


lowering.register(qmatmul_p, _build)
