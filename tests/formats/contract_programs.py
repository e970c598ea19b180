"""What the contract suite does with quantized arrays: `PROGRAMS`, in groups that compile together.

A test takes a format, a group and a way to run it; the results of a group have names.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .contract import FAST, K, N, normal


def operands(rng: np.random.Generator, dtype: Any = jnp.float32) -> Any:
    """The dense operands the programs use."""
    shapes = {"x": (5, K), "y": (N, 6), "b": (3, 5, K), "v": (K,), "u": (N,), "d": (K, N), "bn": (5, N), "one": ()}
    made = {name: normal(rng, *shape, dtype=dtype) for name, shape in shapes.items()}
    return made | {"i": jnp.asarray([3, 0, 25, 3]), "far": jnp.asarray([1, 200, -1, -300]), "true": jnp.asarray(True)}


def stack_operands(rng: np.random.Generator, dtype: Any = jnp.float32) -> Any:
    """For programs on a stack of three matrices."""
    shapes = {
        "bx": (3, 5, K),
        "x": (5, K),
        "bv": (3, K),
        "mhk": (5, 3, K),
        "mhn": (5, 3, N),
        "mkn": (2, K, N),
        "h": (3,),
    }
    return {name: normal(rng, *shape, dtype=dtype) for name, shape in shapes.items()}


def _e(spec: str, *names: str) -> Callable[[Any, Any], Any]:
    """An einsum over operands by name; "q" is the quantized one."""
    return lambda q, a: jnp.einsum(spec, *(q if n == "q" else getattr(a, n) for n in names))


def _dg(contract: Any, batch: Any, flip: bool = False, name: str = "d", **options: Any) -> Callable[[Any, Any], Any]:
    def run(q: Any, a: Any) -> Any:
        pair = (getattr(a, name), q) if flip else (q, getattr(a, name))
        return lax.dot_general(*pair, (contract, batch), **options)

    return run


PRODUCTS: dict[str, Callable[[Any, Any], Any]] = {
    "x @ q": lambda q, a: a.x @ q,
    "q @ y": lambda q, a: q @ a.y,
    "v @ q": lambda q, a: a.v @ q,
    "q @ u": lambda q, a: q @ a.u,
    "b @ q": lambda q, a: a.b @ q,
    "d.T @ q": lambda q, a: a.d.T @ q,
    "q.T @ x.T": lambda q, a: q.T @ a.x.T,
    "bn @ q.T": lambda q, a: a.bn @ q.T,
    "q @ q.T": lambda q, a: q @ q.T,
    "q.T @ q": lambda q, a: q.T @ q,
    "matmul": lambda q, a: jnp.matmul(a.x, q, precision="highest"),
    "matmul bf16": lambda q, a: jnp.matmul(a.x, q, preferred_element_type=jnp.bfloat16),
    "dot": lambda q, a: jnp.dot(a.b, q),
    "dot left": lambda q, a: jnp.dot(q, a.y),
    "dot vectors": lambda q, a: jnp.dot(q[:, 0], a.v) + jnp.dot(a.u, q[3]),
    "tensordot": lambda q, a: jnp.tensordot(a.b, q, ((2,), (0,))),
    "tensordot 2": lambda q, a: jnp.tensordot(q, a.d, 2),
    "tensordot 0": lambda q, a: jnp.tensordot(a.u[:3], q, 0),
    "vdot": lambda q, a: jnp.vdot(q, a.d) + jnp.vdot(a.d, q) + jnp.vdot(q, q),
    "inner": lambda q, a: jnp.inner(a.bn, q),
    "outer": lambda q, a: jnp.outer(q[1], a.u),
    "vecdot": lambda q, a: jnp.vecdot(q, a.d),
    "multi_dot": lambda q, a: jnp.linalg.multi_dot([a.x, q, a.y]),
    "mk,kn->nm": _e("mk,kn->nm", "x", "q"),
    "kn,mk->mn": _e("kn,mk->mn", "q", "x"),
    "bmk,kn->bmn": _e("bmk,kn->bmn", "b", "q"),
    "bmk,kn->nmb": _e("bmk,kn->nmb", "b", "q"),
    "kn,km->nm": _e("kn,km->nm", "q", "d"),
    "kn,jn->kj": _e("kn,jn->kj", "q", "bn"),
    "kn,kn->": _e("kn,kn->", "q", "d"),
    "kn,kn->k": _e("kn,kn->k", "q", "d"),
    "kn,kn->n": _e("kn,kn->n", "d", "q"),
    "kn,kn->kn": _e("kn,kn->kn", "d", "q"),
    "kn->k": _e("kn->k", "q"),
    "kn->nk": _e("kn->nk", "q"),
    "kn,k->n": _e("kn,k->n", "q", "v"),
    "kn,n->k": _e("kn,n->k", "q", "u"),
    "kn,k,n->": _e("kn,k,n->", "q", "v", "u"),
    "bk,kn,bn->b": _e("bk,kn,bn->b", "x", "q", "bn"),
    "both kn,km->nm": _e("kn,km->nm", "q", "q"),
    "both kn,jn->kj": _e("kn,jn->kj", "q", "q"),
    "both kn,kn->k": _e("kn,kn->k", "q", "q"),
    "both kn,kn->": _e("kn,kn->", "q", "q"),
    "kn,m->knm": _e("kn,m->knm", "q", "one_m"),
    "dg 0,0": _dg(((0,), (0,)), ((), ())),
    "dg 1,1 flipped": _dg(((1,), (1,)), ((), ()), flip=True),
    "dg both": _dg(((0, 1), (0, 1)), ((), ())),
    "dg both crossed": _dg(((1, 0), (1, 0)), ((), ()), flip=True),
    "dg batch 0": _dg(((1,), (1,)), ((0,), (0,))),
    "dg batch 1": _dg(((0,), (0,)), ((1,), (1,)), flip=True),
    "dg batch 0 1": _dg(((), ()), ((1, 0), (1, 0))),
    "dg precision": _dg(((0,), (0,)), ((), ()), precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32),
    "complex": lambda q, a: (a.x + 1j * a.x[::-1]) @ q,
    "integer": lambda q, a: jnp.arange(2 * K).reshape(2, K) @ q,
}

STACKED: dict[str, Callable[[Any, Any], Any]] = {
    "bx @ q": lambda q, a: a.bx @ q,
    "x @ q": lambda q, a: a.x @ q,
    "bmk,bkn->bmn": _e("bmk,bkn->bmn", "bx", "q"),
    "bkn,bmk->mbn": _e("bkn,bmk->mbn", "q", "bx"),
    "bk,bkn->bn": _e("bk,bkn->bn", "bv", "q"),
    "hkn,mhk->mn": _e("hkn,mhk->mn", "q", "mhk"),
    "mhk,hkn->mhn": _e("mhk,hkn->mhn", "mhk", "q"),
    "hkn,mhn->mk": _e("hkn,mhn->mk", "q", "mhn"),
    "hkn,mk->mhn": _e("hkn,mk->mhn", "q", "x"),
    "hkn,mk->hnm": _e("hkn,mk->hnm", "q", "x"),
    "hkn,mkn->mh": _e("hkn,mkn->mh", "q", "mkn"),
    "hkn,mkn->hm": _e("hkn,mkn->hm", "q", "mkn"),
    "hkn,h->kn": _e("hkn,h->kn", "q", "h"),
    "hkn,h->nk": _e("hkn,h->nk", "q", "h"),
    "both ekn,ekn->e": _e("ekn,ekn->e", "q", "q"),
    "both ekn,ejn->ekj": _e("ekn,ejn->ekj", "q", "q"),
    "tensordot 3": lambda q, a: jnp.tensordot(q, q, 3),
    "dg b=2": lambda q, a: lax.dot_general(q, a.bx, (((1,), (2,)), ((0,), (0,)))),
    "dg b,n": lambda q, a: lax.dot_general(a.mkn[0], q, (((0,), (1,)), ((1,), (2,)))),
    "ragged_dot": lambda q, a: lax.ragged_dot(a.bx.reshape(15, K), q, jnp.asarray([4, 0, 9])),
    "q[1]": lambda q, a: q[1] @ a.x.T if q.shape[-1] == K else a.x @ q[1],
    "flip": lambda q, a: q[::-1],
    "transposed": lambda q, a: jnp.transpose(q, (2, 0, 1)),
    "conv": lambda q, a: lax.conv_general_dilated(
        a.bx.swapaxes(1, 2)[:, :, :4].swapaxes(1, 2), q, (1,), [(1, 1)], dimension_numbers=("NWC", "WIO", "NWC")
    ),
}

SHAPES: dict[str, Callable[[Any, Any], Any]] = {
    "T": lambda q, a: q.T,
    "mT": lambda q, a: q.mT,
    "moveaxis": lambda q, a: jnp.moveaxis(q, 0, 1),
    "swap twice": lambda q, a: q.swapaxes(0, 1).swapaxes(0, 1),
    "reshape split rows": lambda q, a: q.reshape(7, 10, N),
    "reshape split columns": lambda q, a: q.reshape(K, 2, 13),
    "reshape merge": lambda q, a: q.reshape(-1),
    "reshape mixed": lambda q, a: q.reshape(35, 52),
    "reshape ones": lambda q, a: q.reshape(1, K, 1, N, 1),
    "ravel": lambda q, a: jnp.ravel(q),
    "expand": lambda q, a: [jnp.expand_dims(q, i) for i in (0, 1, 2)],
    "squeeze": lambda q, a: [jnp.squeeze(jnp.expand_dims(q, i), i) for i in (0, 1, 2)],
    "newaxis": lambda q, a: q[None, :, None],
    "broadcast": lambda q, a: jnp.broadcast_to(q, (2, K, N)),
    "broadcast middle": lambda q, a: jnp.broadcast_to(q[:, None], (K, 2, N)),
    "tile": lambda q, a: jnp.tile(q, (2, 3)),
    "repeat": lambda q, a: jnp.repeat(q, 2, axis=0),
    "row": lambda q, a: [q[0], q[-1], q[5]],
    "column": lambda q, a: [q[:, 0], q[:, -1], q[..., 7]],
    "element": lambda q, a: q[3, 4],
    "rows": lambda q, a: [q[2:9], q[:-3], q[-4:], q[::3], q[60:2:-7]],
    "columns": lambda q, a: [q[:, 2:9], q[:, :-3], q[:, ::5], q[:, ::-1]],
    "window": lambda q, a: q[8:40, 3:20],
    "aligned rows": lambda q, a: [q[:64], q[64:], q[32:64]],
    "aligned columns": lambda q, a: [q[:, :16], q[:, 16:], q[:, 8:16]],
    "empty": lambda q, a: [q[5:5], q[:, :0], q[5:5, :0]],
    "flip": lambda q, a: [jnp.flip(q), jnp.flip(q, 0), jnp.flip(q, 1)],
    "roll": lambda q, a: jnp.roll(q, 3, axis=1),
    "rot90": lambda q, a: jnp.rot90(q),
    "split rows": lambda q, a: jnp.split(q, 5, axis=0),
    "split columns": lambda q, a: jnp.split(q, [4, 20], axis=1),
    "concatenate": lambda q, a: [jnp.concatenate([q, q], i) for i in (0, 1)],
    "concatenate dense": lambda q, a: [jnp.concatenate([q, a.d], 0), jnp.concatenate([a.d, q], 1)],
    "stack": lambda q, a: [jnp.stack([q, q, q], i) for i in (0, 1, 2)],
    "concatenate pieces": lambda q, a: jnp.concatenate([q[:, 9:], q[:, :9]], 1),
    "concatenate rows": lambda q, a: jnp.concatenate([q[64:], q[:64]], 0),
    "take": lambda q, a: [jnp.take(q, a.i, axis=i) for i in (0, 1)],
    "take far": lambda q, a: [jnp.take(q, a.far, axis=i) for i in (0, 1)],
    "take clip": lambda q, a: [jnp.take(q, a.far, axis=i, mode="clip") for i in (0, 1)],
    "take wrap": lambda q, a: [jnp.take(q, a.far, axis=i, mode="wrap") for i in (0, 1)],
    "take filled": lambda q, a: [jnp.take(q, a.far, axis=i, mode="fill", fill_value=7.0) for i in (0, 1)],
    "take many": lambda q, a: jnp.take(q, a.i.reshape(2, 2), axis=0),
    "take flat": lambda q, a: jnp.take(q, a.i),
    "index rows": lambda q, a: q[a.i],
    "index columns": lambda q, a: q[:, a.i],
    "index pairs": lambda q, a: q[a.i, a.i],
    "index outer": lambda q, a: q[a.i[:, None], a.i[None]],
    "index scalar": lambda q, a: [q[a.i[0]], q[:, a.i[0]]],
    "at get": lambda q, a: [q.at[a.far].get(mode="fill"), q.at[:, a.far].get(mode="clip")],
    "take_along_axis": lambda q, a: jnp.take_along_axis(q, jnp.argsort(a.d, 0), 0),
    "take_along_axis 1": lambda q, a: jnp.take_along_axis(q, a.i[None], 1),
    "vmapped rows": lambda q, a: jax.vmap(lambda row, i: row[i])(q[:4], a.i),
    "vmapped index": lambda q, a: jax.vmap(lambda i: q[i])(a.i),
    "vmapped columns": lambda q, a: jax.vmap(lambda i: q[:, i])(a.i),
    "vmap over columns": lambda q, a: jax.vmap(lambda c: c @ a.v, in_axes=1)(q),
    "vmap over rows": lambda q, a: jax.vmap(lambda r: r @ a.u)(q),
    "dynamic_slice": lambda q, a: lax.dynamic_slice(q, (a.i[0], 0), (6, N)),
    "dynamic_slice columns": lambda q, a: lax.dynamic_slice(q, (0, a.i[0]), (K, 5)),
    "dynamic_slice far": lambda q, a: lax.dynamic_slice(q, (a.far[1], a.far[1]), (6, 5)),
    "dynamic_index": lambda q, a: [lax.dynamic_index_in_dim(q, a.i[2], i) for i in (0, 1)],
    "set": lambda q, a: [q.at[0].set(1.0), q.at[:, 1].add(2.0)],
    "update": lambda q, a: lax.dynamic_update_slice(q, a.y[:2, :3], (1, 2)),
    "pad": lambda q, a: jnp.pad(q, ((1, 2), (0, 3))),
    "tril": lambda q, a: jnp.tril(q),
    "diagonal": lambda q, a: [jnp.diagonal(q), jnp.trace(q)],
    "where": lambda q, a: [jnp.where(a.true, q, q[::-1]), jnp.where(a.d > 0, q, a.d)],
    "select": lambda q, a: lax.select(a.true, q, q * 2),
    "iterate": lambda q, a: list(q.T)[2],
    "barrier": lambda q, a: lax.optimization_barrier(q),
    "copy": lambda q, a: [jnp.copy(q), jnp.asarray(q)],
}

VALUES: dict[str, Callable[[Any, Any], Any]] = {
    "neg": lambda q, a: -q,
    "pos": lambda q, a: +q,
    "times 2": lambda q, a: [q * 2, 2 * q, q * 2.5, q * a.one, a.one * q],
    "over 3": lambda q, a: [q / 3, q / 3.0, q / a.one],
    "one over": lambda q, a: 3.0 / (q + 4.0),
    "times row": lambda q, a: [q * a.u, a.u * q, q / (a.u + 9)],
    "times column": lambda q, a: [q * a.v[:, None], q / (9 + a.v[:, None])],
    "twice": lambda q, a: -(q * 2 / a.one) * a.u,
    "fold then product": lambda q, a: a.x @ (q * a.u * 0.5) + (a.x * a.v) @ (-q),
    "add": lambda q, a: [q + a.d, a.d + q, q + 1, 1 - q, q - a.d, q + q],
    "mul": lambda q, a: [q * a.d, a.d * q, q * q, q / (a.d + 9)],
    "pow": lambda q, a: [q**2, q**3, jnp.abs(q) ** 0.5, 2**q],
    "rem": lambda q, a: [q % 2.0, q // 2.0],
    "unary": lambda q, a: [
        f(q) for f in (jnp.exp, jnp.sin, jnp.tanh, jnp.abs, jnp.sign, jnp.floor, jnp.square, jnp.cbrt)
    ],
    "log sqrt": lambda q, a: [jnp.log1p(jnp.abs(q)), jnp.sqrt(jnp.abs(q)), jnp.log(q * q + 1), lax.rsqrt(q * q + 1)],
    "max": lambda q, a: [jnp.maximum(q, 0), jnp.minimum(a.d, q), jnp.clip(q, -0.5, 0.5)],
    "compare": lambda q, a: [q < a.d, q > 0.3, a.d <= q, q == 9.0, q != 9.0],
    "astype": lambda q, a: [q.astype(jnp.int32), q.astype(bool), q.astype(jnp.complex64)],
    "isnan": lambda q, a: [jnp.isnan(q), jnp.isfinite(q), jnp.nan_to_num(q)],
    "activations": lambda q, a: [
        jax.nn.relu(q),
        jax.nn.gelu(q),
        jax.nn.silu(q),
        jax.nn.softmax(q),
        jax.nn.standardize(q),
    ],
    "sum": lambda q, a: [q.sum(), q.sum(0), q.sum(-1), jnp.mean(q, 1, keepdims=True)],
    "spread": lambda q, a: [q.std(), jnp.var(q, 0), jnp.linalg.norm(q), jnp.linalg.norm(q, axis=1), jnp.ptp(q)],
    "extremes": lambda q, a: [q.max(), q.min(0), q.max(-1), jnp.argmax(q, 1), jnp.argmin(q, 0)],
    "logic": lambda q, a: [jnp.any(q > 0), jnp.all(q > 0, axis=0), jnp.count_nonzero(q)],
    "prod": lambda q, a: jnp.prod(q[:4], axis=0),
    "cumulative": lambda q, a: [jnp.cumsum(q), jnp.cumsum(q, 1), jnp.cumprod(q[:5], 0), jnp.maximum.accumulate(q, 0)],
    "sort": lambda q, a: [jnp.sort(q), jnp.sort(q, 0), jnp.argsort(q, 1), lax.top_k(q, 3)],
    "logsumexp": lambda q, a: [jax.nn.logsumexp(q), jax.nn.logsumexp(q, 0)],
    "diff": lambda q, a: [jnp.diff(q, axis=0), jnp.gradient(q, axis=1)],
    "window": lambda q, a: lax.reduce_window(q, -jnp.inf, lax.max, (2, 2), (2, 2), "VALID"),
    "like": lambda q, a: [jnp.zeros_like(q), jnp.ones_like(q), jnp.full_like(q, 3)],
    "reduce": lambda q, a: lax.reduce(q, jnp.zeros((), q.dtype), lax.add, (1,)),
    "linalg": lambda q, a: jnp.linalg.matrix_power(q[:N] * 0.2, 2),
    "fft": lambda q, a: jnp.abs(jnp.fft.fft(q)),
}

# Without other types of x, and without sums to one number of terms of one size, which cancel.
_TO_ONE = ("dg both", "dg both crossed", "kn,kn->", "tensordot 2", "vdot", "dot vectors", "kn,k,n->")
FLOATING = {name: f for name, f in PRODUCTS.items() if name not in ("complex", "integer", *_TO_ONE)}
PROGRAMS = {"products": PRODUCTS, "floating": FLOATING, "shapes": SHAPES, "values": VALUES, "stacked": STACKED}


@functools.cache
def program(group: str) -> Callable[[Any, dict[str, Any]], dict[str, Any]]:
    """One function that runs every operation of a group: one compilation for all of them."""
    table = PROGRAMS[group]

    def run(q: Any, a: dict[str, Any]) -> dict[str, Any]:
        names = types.SimpleNamespace(**a)
        if "u" in a:
            names.one_m = a["u"][:4]
        return {name: operation(q, names) for name, operation in table.items()}

    return run


@functools.cache
def dense_program(group: str) -> Any:
    """The same on dense arrays, compiled once for all formats."""
    return jax.jit(program(group), compiler_options=FAST)
