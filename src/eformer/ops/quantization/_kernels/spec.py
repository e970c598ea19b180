"""The one operation of the compute layer, declared once: shapes, derivative, batching, partitioning, lowering.

`qmatmul` is linear in x, so its derivative is itself and its transpose is the other form: the backward pass decodes the
codes again and nothing dense is kept between the passes.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import PartitionSpec

from eformer import _jax_compat
from eformer._errors import QuantizedGradientError

from . import explicit, select
from .avals import agree, varying_axes_of_type
from .partition import partitioned
from .problem import Spec, check_names, check_storage, check_x, out_shape, problem_of

qmatmul_p = Primitive("eformer_qmatmul")

NO_GRADIENT = """\
a gradient with respect to the {what} of a quantized {fmt} matrix was asked for: rounding has no useful derivative.
Keep the quantized array out of the differentiated arguments and train a low-rank update (LoRA) next to it, or keep the
dense weight and quantize it in the forward pass with `straight_through`."""


def qmatmul(
    x: Any,
    codes: Any,
    scale: Any,
    *,
    fmt: str,
    form: str,
    cols: int,
    block: int | None = None,
    out_dtype: Any = None,
    precision: Any = None,
    preference: str = "auto",
) -> jax.Array:
    """x @ D.T (`form="dot"`) or x @ D (`form="axpy"`) for the matrix D of `cols` columns stored in codes and scale.

    x is (..., K) for one matrix, (batch..., M, K) when the codes have batch axes. The result has dtype `out_dtype`, by
    default that of x; sums are accumulated in float32 or wider.

    >>> codes = jnp.array([[1, -2], [3, 4]], jnp.int8)
    >>> qmatmul(jnp.array([1.0, 10.0]), codes, jnp.full((1, 1), 0.5), fmt="int8", form="dot", cols=2)
    Array([-9.5, 21.5], dtype=float32)
    """
    check_names(fmt, form, preference)
    x, codes, scale = jnp.asarray(x), jnp.asarray(codes), None if scale is None else jnp.asarray(scale)
    block = check_storage(fmt, codes, scale, cols, block)
    core = 3 if fmt == "nf4" else 2
    check_x(x, codes, form, core, cols)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return _complex(x, codes, scale, fmt, form, cols, block, out_dtype, precision, preference)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        x = x.astype(jnp.result_type(x.dtype, jnp.float32))
    out = np.dtype(x.dtype if out_dtype is None else out_dtype)
    spec = Spec(fmt, form, cols, block, out, _hashable(precision), preference)
    batch = codes.shape[: codes.ndim - core]
    if scale is not None and scale.ndim == 2 and batch:
        scale = jnp.broadcast_to(scale, (*batch, *scale.shape))
    lead = x.shape[:-1]
    flat = x if batch else x.reshape(math.prod(lead), x.shape[-1])
    y = bind(spec, flat, codes, scale)
    return y if batch else y.reshape(*lead, y.shape[-1])


def _complex(x: jax.Array, codes: Any, scale: Any, fmt: str, form: str, cols: int, block: Any, *rest: Any) -> jax.Array:
    """D is real, so real and imaginary parts are separate products."""
    out_dtype, precision, preference = rest
    wide = jnp.finfo(x.dtype if out_dtype is None else out_dtype).dtype
    product = functools.partial(
        qmatmul, codes=codes, scale=scale, fmt=fmt, form=form, cols=cols, block=block, out_dtype=wide,
        precision=precision, preference=preference,
    )  # fmt: skip
    return lax.complex(product(x.real), product(x.imag))


def _hashable(precision: Any) -> Any:
    return tuple(precision) if isinstance(precision, list) else precision


def bind(spec: Spec, x: jax.Array, codes: jax.Array, scale: jax.Array | None, *, announced: bool = False) -> jax.Array:
    """Apply the primitive, and leave a note for `explain` unless the product being transformed has left one."""
    if not announced:
        select.announce(problem_of(spec, jax.default_backend(), x, codes, scale))
    operands = agree(x, codes) if scale is None else agree(x, codes, scale)
    product = functools.partial(qmatmul_p.bind, spec=spec)
    out = explicit.result_sharding(spec, x, codes)
    return product(*operands) if out is None else explicit.in_auto_mode(product, out, operands)


def _scale_of(operands: tuple[Any, ...]) -> Any:
    return operands[2] if len(operands) == 3 else None


# -- evaluation and shapes ---------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1024)
def _jitted(spec: Spec) -> Any:
    return jax.jit(lambda *operands: qmatmul_p.bind(*operands, spec=spec))


@qmatmul_p.def_impl
def _eager(*operands: Any, spec: Spec) -> Any:
    return _jitted(spec)(*operands)


@qmatmul_p.def_abstract_eval
def _abstract(*operands: Any, spec: Spec) -> Any:
    x, codes = operands[:2]
    shape = out_shape(spec, x, codes)
    if not varying_axes_of_type(x):
        return _jax_compat.ShapedArray(shape, spec.out_dtype)
    sharding = x.sharding.update(spec=PartitionSpec(*[None] * len(shape)))
    return x.update(shape=shape, dtype=spec.out_dtype, weak_type=False, sharding=sharding)


# -- derivatives -------------------------------------------------------------------------------------------------------


def _jvp(primals: tuple[Any, ...], tangents: tuple[Any, ...], *, spec: Spec) -> tuple[Any, Any]:
    for what, tangent in zip(("codes", "scale"), tangents[1:], strict=False):
        if not isinstance(tangent, ad.Zero):
            raise QuantizedGradientError(NO_GRADIENT.format(what=what, fmt=spec.fmt))
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
        return _fold_into_rows(call, x, codes, scale)
    if dims[1] is None:
        # Only the scale (and perhaps x) is mapped: a loop, because repeating the codes would multiply their memory.
        if dims[0] is None:
            return lax.map(lambda s: call(x, codes, s), scale), 0
        return lax.map(lambda xs: call(xs[0], codes, xs[1]), (x, scale)), 0
    if dims[0] is None:
        x = jnp.broadcast_to(x, (size, *x.shape))
    if scale is not None and dims[2] is None:
        scale = jnp.broadcast_to(scale, (size, *scale.shape))
    return call(x, codes, scale), 0


def _fold_into_rows(call: Any, x: jax.Array, codes: jax.Array, scale: Any) -> tuple[jax.Array, int]:
    """Only x is mapped: its new axis becomes part of M. (b, batch..., M, K) -> (batch..., b * M, K) and back."""
    m_axis = x.ndim - 2
    moved = jnp.moveaxis(x, 0, m_axis - 1)
    size, m = moved.shape[m_axis - 1 : m_axis + 1]
    y = call(moved.reshape(*moved.shape[: m_axis - 1], size * m, moved.shape[-1]), codes, scale)
    return y.reshape(*y.shape[:-2], size, m, y.shape[-1]), y.ndim - 2


batching.primitive_batchers[qmatmul_p] = _batch


# -- lowering ----------------------------------------------------------------------------------------------------------


def _splits_over_devices(ctx: Any) -> bool:
    """Is this part of a program XLA will partition? Inside shard_map, or when exporting, it is not (or must not be)."""
    context = ctx.module_context
    if context.lowering_parameters.for_export or hasattr(context.axis_context, "manual_axes"):
        return False
    return context.axis_context.num_devices > 1 and context.axis_context.device_assignment is not None


@functools.lru_cache(maxsize=1024)
def _implementation(spec: Spec, platform: str, split: bool) -> Any:
    """A jitted function, so that equal products in one program share one computation."""

    def eformer_qmatmul(x: jax.Array, codes: jax.Array, scale: jax.Array | None) -> jax.Array:
        problem = problem_of(spec, platform, x, codes, scale)
        split_it = split and 0 not in (*problem.batch, problem.m, problem.rows, problem.cols)
        return (partitioned if split_it else select.compute)(problem, x, codes, scale)

    return jax.jit(eformer_qmatmul)


def _lower(ctx: Any, *operands: Any, spec: Spec, platform: str) -> Any:
    implementation = _implementation(spec, platform, _splits_over_devices(ctx))

    def run(*values: jax.Array) -> jax.Array:
        return implementation(values[0], values[1], _scale_of(values))

    return mlir.lower_fun(run, multiple_results=False)(ctx, *operands)


for _platform in ("cpu", "cuda", "rocm", "tpu"):
    mlir.register_lowering(qmatmul_p, functools.partial(_lower, platform=_platform), platform=_platform)
_jax_compat.lower_with_devices(qmatmul_p)
