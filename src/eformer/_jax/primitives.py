"""Primitives: their rules, how they become part of a program, and the names JAX knows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax._src import dispatch as _dispatch
from jax._src.interpreters import batching as _batching
from jax._src.interpreters import mlir as _mlir
from jax.experimental import jet as jet
from jax.extend import core as _ext
from jax.extend.core import Primitive as Primitive
from jax.interpreters import ad as ad
from jax.interpreters import batching as batching
from jax.interpreters import mlir as mlir


def define_lowering(primitive: Any, function: Callable[..., Any]) -> None:
    """Lower `primitive` as `function`, a program in JAX, on every platform."""
    mlir.register_lowering(primitive, mlir.lower_fun(function, multiple_results=primitive.multiple_results))


def define_platform_lowering(primitive: Any, platform: str, choose: Callable[..., Callable[..., Any]]) -> None:
    """Lower `primitive` on one platform as the function that `choose(split, **params)` gives.

    `split` says that XLA will cut the program up for several devices.
    """

    def lower(ctx: Any, *operands: Any, **params: Any) -> Any:
        run = choose(_splits_over_devices(ctx), **params)
        return mlir.lower_fun(run, multiple_results=primitive.multiple_results)(ctx, *operands)

    mlir.register_lowering(primitive, lower, platform=platform)
    _dispatch.prim_requires_devices_during_lowering.add(primitive)


def _splits_over_devices(ctx: Any) -> bool:
    """Is this part of a program XLA will partition? Inside shard_map, or when exporting, it is not (or must not be)."""
    context = ctx.module_context
    if context.lowering_parameters.for_export or hasattr(context.axis_context, "manual_axes"):
        return False
    return context.axis_context.num_devices > 1 and context.axis_context.device_assignment is not None


def define_series(primitive: Any, rule: Callable[..., tuple[Any, Any]]) -> None:
    """What `jax.experimental.jet` does with `primitive`: `rule(primals, series, **params)` gives the result's own."""
    jet.jet_rules[primitive] = rule


# Primitives of modules JAX loads on first use.
_LAZY_NAMES = frozenset(
    {"pallas_call", "ffi_call", "pure_callback", "io_callback", "debug_callback", "custom_vmap_call"}
)


def primitive_names() -> frozenset[str]:
    """The name of every primitive JAX knows now: anything with a lowering, a batching or a differentiation rule."""
    tables: tuple[Any, ...] = (
        _mlir._lowerings,
        *_mlir._platform_specific_lowerings.values(),
        _batching.fancy_primitive_batchers,
        ad.primitive_jvps,
    )
    names = {primitive.name for table in tables for primitive in table}
    names.update(p.name for p in vars(_ext.primitives).values() if isinstance(p, Primitive))
    names.update(("custom_jvp_call", "custom_vjp_call", "shard_map", "call_hi_primitive"))
    return frozenset(names) | _LAZY_NAMES
