"""Encoding NF4 blocks. The codec of the format brings the JAX implementation; a native one may take its place."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching

from eformer import _jax
from eformer._jax.avals import result_type

from . import cpu, lowering, select
from .platforms import default_platform
from .select import Candidate, anything

nf4_encode_p = Primitive("eformer_nf4_encode")
nf4_encode_p.multiple_results = True
# (..., cols), block -> codes (..., blocks, block / 2), absmax (..., blocks)
Twin = Callable[[jax.Array, int], tuple[jax.Array, jax.Array]]


@dataclasses.dataclass(frozen=True)
class Encoding:
    """One matrix to encode: all that choosing an implementation may depend on."""

    platform: str
    rows: int
    cols: int
    block: int
    x_dtype: np.dtype
    preference: str = "auto"
    fmt: str = "nf4"


def nf4_encode(x: jax.Array, block: int, twin: Twin) -> tuple[jax.Array, jax.Array]:
    """Codes and absmax of blocks along the last axis; `twin` is the meaning, in JAX and for any number of axes."""
    if 0 in x.shape or _jax.explicit_sharding_of(x) is not None:
        return twin(x, block)
    select.announce("nf4_encode", candidates(twin), _encoding(default_platform(), x, block))
    codes, absmax = nf4_encode_p.bind(x, block=block, twin=twin)
    return codes, absmax


def _encoding(platform: str, x: Any, block: int) -> Encoding:
    return Encoding(platform, math.prod(x.shape[:-1]), x.shape[-1], block, np.dtype(x.dtype))


def candidates(twin: Twin) -> tuple[Candidate, ...]:
    def in_jax(problem: Encoding, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return twin(x, problem.block)

    return (
        Candidate("native_cpu", "native", cpu.refuses_encode, cpu.nf4_encode),
        Candidate("xla", "xla", anything, in_jax),
    )


@nf4_encode_p.def_abstract_eval
def _abstract(x: Any, *, block: int, twin: Twin) -> list[Any]:
    del twin
    lead = (*x.shape[:-1], -(-x.shape[-1] // block))
    return [result_type((*lead, block // 2), jnp.uint8, x), result_type(lead, jnp.float32, x)]


def _jvp(primals: tuple[Any, ...], tangents: tuple[Any, ...], *, block: int, twin: Twin) -> tuple[Any, Any]:
    """Whatever derivative the JAX implementation has."""
    return jax.jvp(lambda x: twin(x, block), primals, tangents)


def _batch(operands: tuple[Any, ...], dims: tuple[Any, ...], **params: Any) -> tuple[Any, list[int]]:
    return nf4_encode_p.bind(jnp.moveaxis(operands[0], dims[0], 0), **params), [0, 0]


def _build(platform: str, split: bool, block: int, twin: Twin) -> Any:
    def eformer_nf4_encode(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        encoding = _encoding(platform, x, block)
        if split:
            select.announce_split("nf4_encode", encoding)
            return twin(x, block)
        chosen, _ = select.choose(candidates(twin), encoding)
        flat = x.reshape(encoding.rows, encoding.cols)
        codes, absmax = chosen.run(encoding, flat)
        return codes.reshape(*x.shape[:-1], *codes.shape[1:]), absmax.reshape(*x.shape[:-1], *absmax.shape[1:])

    return jax.jit(eformer_nf4_encode)


ad.primitive_jvps[nf4_encode_p] = _jvp
batching.primitive_batchers[nf4_encode_p] = _batch
lowering.register(nf4_encode_p, _build)
