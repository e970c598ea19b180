"""Random programs: a format × a call of jnp, lax, jax.nn or jax.scipy × a stack of transformations × a way in.

Each is compared with the dense program on `materialize()`: value, shape, dtype, weak type, or both raise. Under `with
implicit:` a raw array is a pytree to JAX, and functions that take trees may refuse it. Without `implicit` they may too,
if they say what to do. The time it takes is fixed: 10
seconds, or EFORMER_FUZZ_SECONDS (`make nightly` sets that, and takes another seed each day).
"""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from core.calls_lax import CALLS as LAX
from core.calls_libraries import CALLS as LIBRARIES
from core.calls_numpy import CALLS as NUMPY
from jax import lax
from jax.sharding import PartitionSpec as P

from eformer import LoraArray, QuantizedCache
from eformer._formats.permuted.array import PermutedArray
from eformer._formats.scaled.array import ScaledArray
from eformer.errors import EformerError
from eformer.jaximus import ImplicitArray, implicit, materialization_policy

from .contract import FORMATS, dense, normal

SECONDS = float(os.environ.get("EFORMER_FUZZ_SECONDS", "10"))
SEED = int(os.environ.get("EFORMER_FUZZ_SEED", datetime.date.today().toordinal() if SECONDS > 10 else 0))
SHAPE = (16, 12)
CALLS = [call for call in (*NUMPY, *LAX, *LIBRARIES) if call.kind == "real" and not call.concrete]
Function = Callable[[Any], Any]


def _is_packed(x: Any) -> bool:
    """Under `with implicit:` a function of trees may give back a raw array: that is one value, too."""
    return isinstance(x, ImplicitArray)


def _gradient(f: Function) -> Function:
    def scaled(s: Any, w: Any) -> Any:
        leaves = [y for y in jax.tree.leaves(f(w), is_leaf=_is_packed) if jnp.issubdtype(y.dtype, jnp.floating)]
        return sum((jnp.sin(y) * s).sum().astype(jnp.float32) for y in leaves) + 0.0 * s

    return lambda w: jax.grad(scaled)(jnp.float32(2.0), w)


def _sharded(f: Function) -> Function:
    # Not an explicit one: there JAX refuses the gradient of the dense program, which takes nothing from the mesh.
    mesh = jax.make_mesh((2,), ("t",), devices=jax.devices()[:2], axis_types=(jax.sharding.AxisType.Auto,))
    return lambda w: jax.shard_map(f, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)(w)


STACK: dict[str, Callable[[Function], Function]] = {
    "jit": lambda f: lambda w: jax.jit(lambda w: f(w))(w),
    "checkpoint": lambda f: lambda w: jax.checkpoint(lambda w: f(w))(w),
    "scan": lambda f: lambda w: lax.scan(lambda c, _: (c, f(w)), 0.0, None, length=2)[1],
    "cond": lambda f: lambda w: lax.cond(jnp.sum(jnp.ones(3)) > 2, f, f, w),
    "vmap": lambda f: lambda w: jax.vmap(lambda _: f(w))(jnp.arange(2)),
    "grad": _gradient,
    "shard_map": _sharded,
}


def _array(rng: np.random.Generator) -> tuple[str, ImplicitArray]:
    w = normal(rng, *SHAPE)
    around: dict[str, Callable[[], ImplicitArray]] = {
        "lora": lambda: LoraArray(FORMATS["nf4"].make(w), w[:, :3] / 4, w[:3] / 4, 0.5),
        "scaled": lambda: ScaledArray(FORMATS["int4"].make(w), 1 + jnp.abs(w[:, :1])),
        "permuted": lambda: PermutedArray(FORMATS["nf4"].make(w), jnp.asarray(rng.permutation(SHAPE[1]))),
        "cache": lambda: QuantizedCache.zeros(SHAPE).at[:].set(w),
    }
    name = str(rng.choice([*FORMATS, *around]))
    return name, around[name]() if name in around else FORMATS[name].make(w)


def _block(f: Function) -> Function:
    def run(w: Any) -> Any:
        with implicit:
            return f(w)

    return run


WAYS: dict[str, Callable[[Function], Function]] = {
    "implicit": implicit,
    "block": _block,
    "compiled": lambda f: jax.jit(implicit(f)),
    "closed over": lambda f: lambda w: jax.jit(implicit(lambda: f(w)))(),
    "bare": lambda f: f,
}


def refused(way: str, found: Any) -> bool:
    """May this way in end with this error, although a dense array gives a result?"""
    if way == "bare":
        return isinstance(found, EformerError) or (isinstance(found, Exception) and "implicit(f)" in str(found))
    return way in ("block", "closed over") and isinstance(found, (TypeError, ValueError))  # the array is raw there


def outcome(f: Function, w: Any) -> Any:
    """The result, its leaves dense; or the error."""
    try:
        with materialization_policy("allow"):
            return dense(f(w))
    except Exception as err:  # noqa: BLE001 - whatever the dense program raises, the other one may raise too
        return err


def difference(found: Any, want: Any) -> str | None:
    if isinstance(found, Exception) or isinstance(want, Exception):
        both = isinstance(found, Exception) and isinstance(want, Exception)
        return None if both else f"{found!r:.300} instead of {want!r:.300}"
    (a, a_tree), (b, b_tree) = jax.tree.flatten(found), jax.tree.flatten(want)
    if a_tree != b_tree:
        return f"{a_tree} instead of {b_tree}"
    for x, y in zip(map(jnp.asarray, a), map(jnp.asarray, b), strict=True):
        if jax.typeof(x).str_short() != jax.typeof(y).str_short() or x.weak_type != y.weak_type:
            return f"{x.aval} (weak: {x.weak_type}) instead of {y.aval} (weak: {y.weak_type})"
        if jnp.issubdtype(y.dtype, jnp.inexact):
            size = np.max(np.abs(np.nan_to_num(np.asarray(y), posinf=0, neginf=0)), initial=1e-6)
            if not np.allclose(x, y, rtol=1e-4, atol=1e-4 * size, equal_nan=True):
                return f"off by {np.nanmax(np.abs(np.asarray(x) - np.asarray(y)))}, largest {size}"
        elif not np.array_equal(jax.random.key_data(x) if jnp.issubdtype(y.dtype, jax.dtypes.prng_key) else x, y):
            return "values differ"
    return None


@pytest.mark.thorough
def test_random_programs() -> None:
    rng, wrong, tried, end = np.random.default_rng(SEED), [], 0, time.process_time() + SECONDS
    while time.process_time() < end:
        name, q = _array(rng)
        call = CALLS[rng.integers(len(CALLS))]
        stack = [str(s) for s in rng.choice([*STACK], size=rng.integers(0, 3))]
        way = str(rng.choice([*WAYS]))
        f = call.function
        for step in stack:
            f = STACK[step](f)
        found = outcome(WAYS[way](f), q)
        why = None if refused(way, found) else difference(found, outcome(f, dense(q)))
        tried += 1
        if why:
            wrong.append(f"{call.name} of {name} under {' of '.join(stack[::-1]) or 'nothing'}, {way}: {why}")
        if tried % 100 == 0:
            jax.clear_caches()
    print(f"{tried} programs with seed {SEED}")
    assert tried > 5
    assert not wrong, f"seed {SEED}:\n" + "\n".join(wrong)
