"""How an operation of the compute layer is run and becomes part of a program: one rule for every platform."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

from eformer._jax import define_platform_lowering

from . import switch

PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
Params = tuple[tuple[str, Any], ...]


def register(primitive: Any, build: Callable[..., Callable[..., Any]]) -> None:
    """Evaluate and lower `primitive` as the function that `build(platform, split, **params)` returns.

    `split` says that XLA will cut the program up for several devices: such a function must not call native code by
    itself. What `build` returns is remembered, so that equal operations of a program share their code.
    """

    # Native kernels may be turned off between two programs, so the state of the switches is part of what is remembered.
    @functools.lru_cache(maxsize=1024)
    def jitted(native: tuple[bool, bool], params: Params) -> Any:
        del native
        return jax.jit(lambda *operands: primitive.bind(*operands, **dict(params)))

    @functools.lru_cache(maxsize=1024)
    def built(native: tuple[bool, bool], platform: str, split: bool, params: Params) -> Any:
        del native
        return build(platform, split, **dict(params))

    def evaluate(*operands: Any, **params: Any) -> Any:
        with jax.disable_jit(False):  # where it is on, the jitted function would ask for its own evaluation
            return jitted(switch.state(), tuple(params.items()))(*operands)

    def choose(split: bool, *, platform: str, **params: Any) -> Any:
        return built(switch.state(), platform, split, tuple(params.items()))

    primitive.def_impl(evaluate)
    for platform in PLATFORMS:
        define_platform_lowering(primitive, platform, functools.partial(choose, platform=platform))
