"""Products that round x to 8 bits, on other GPUs than Hopper: where the kernel is chosen, and what it computes."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eformer._kernels import cuda, explain, native
from eformer._kernels.cuda import _bytes, _tiles, _wide
from eformer._kernels.parameters import product_problem

from .test_bytes import RNG, ROUNDED, SIZES, assert_defined, assert_same, defined, make, product
from .test_selection import lowered

# More: odd numbers of outs (in the dot form alone).
ODD = ((3, 272, 131), (130, 400, 7))


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As on a GPU without Hopper's instruction, which a Hopper can play: it has those of the other kernel."""
    monkeypatch.setattr(_wide, "has_wgmma", lambda: False)
    monkeypatch.setattr(_tiles, "capability", lambda: "8.9")
    jax.clear_caches()  # equal products share a program
    yield
    jax.clear_caches()


def cuts_of(k: int) -> list[_bytes.Cut]:
    return [_bytes.Cut(width, splits) for width in _tiles.COSTS for splits in ((1, 2, 3, 8) if k >= 1024 else (1,))]


@pytest.mark.gpu
@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("form", ["dot", "axpy"])
@pytest.mark.parametrize(("fmt", "activations"), ROUNDED)
def test_products_are_those_of_the_definition(
    fmt: str, activations: str, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """int8: bit for bit, whatever the cut. e4m3: as exact as the other kernel."""
    for i, (m, k, n) in enumerate((*SIZES, *(ODD if form == "dot" else ()))):
        dtype = (jnp.bfloat16, jnp.float32, jnp.float16)[i % 3]
        k = k - 3 if form == "axpy" and i % 2 else k
        operands = make(fmt, form, m, k, n, dtype)
        expected, magnitude = defined(fmt, form, *operands)
        for cut in [None, *cuts_of(k)]:
            with monkeypatch.context() as patch:
                if cut is not None:
                    patch.setattr(_tiles, "cut", lambda *sizes, cut=cut: cut)
                    jax.clear_caches()
                program = jax.jit(lambda *operands: product(fmt, form, *operands)).lower(*operands)
                assert "@eformer_cuda_tiles" in program.as_text()
                y = program.compile()(*operands)
            assert y.dtype == dtype
            assert_defined(fmt, y, expected, magnitude, (m, k, n, cut))


@pytest.mark.gpu
@pytest.mark.usefixtures("elsewhere")
def test_scales_that_are_given_stacks_and_a_nan_among_the_weights() -> None:
    x, codes, scale = make("int8", "axpy", 40, 512, 256)
    given = (RNG.random(40) * 0.05 + 0.005).astype(np.float32)
    y = jax.jit(functools.partial(product, "int8", "axpy"))(x, codes, scale, x_scale=jnp.asarray(given))
    assert_same(y, defined("int8", "axpy", x, codes, scale, given)[0])

    parts = [make("int8", "dot", 24, 2048, 208) for _ in range(3)]
    stack = [jnp.stack(part) for part in zip(*parts, strict=True)]
    mapped = jax.jit(jax.vmap(functools.partial(product, "int8", "dot")))(*stack)
    for one, part in zip(mapped, parts, strict=True):
        assert_same(one, defined("int8", "dot", *part)[0])
    layers = jax.jit(lambda *stack: jax.lax.scan(lambda _, part: (None, product("int8", "dot", *part)), None, stack)[1])
    assert_same(layers(*stack), np.asarray(mapped, np.float32))

    for form in ("dot", "axpy"):
        x, codes, scale = make("fp8_e4m3", form, 9, 512, 256)
        codes = codes.at[(7, 5) if form == "dot" else (5, 7)].set(0x7F)
        found = np.isnan(np.asarray(product("fp8_e4m3", form, x, codes, scale), np.float32))
        np.testing.assert_array_equal(found, np.broadcast_to(np.arange(256) == 7, found.shape))


def choice(fmt: str, m: int = 9, form: str = "dot") -> Any:
    x, codes, scale = make(fmt, form, m, 256, 128)
    how = {"fmt": fmt, "form": form, "cols": codes.shape[1], "activations": _bytes.ROUNDED[fmt]}
    return explain(product_problem(x, codes, scale, "cuda", **how))


@pytest.mark.usefixtures("elsewhere")
def test_where_it_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    there = native.Loaded(Path("libeformer_cuda.so"), SimpleNamespace(), None)
    monkeypatch.setattr(cuda, "loaded", lambda: there)
    here = ["8.0"]
    monkeypatch.setattr(_tiles, "capability", lambda: here[0])
    for here[0] in ("8.0", "8.6", "8.9", "10.0", "12.0"):
        for (fmt, _), form in itertools.product(ROUNDED, ("dot", "axpy")):
            assert choice(fmt, form=form).name == "native_cuda"
            text = lowered(functools.partial(product, fmt, form), *make(fmt, form, 9, 128, 64))
            assert text.count("@eformer_cuda_tiles") == 1
            assert "@eformer_cuda_bytes" not in text
        assert choice("int8", 1000).name == "native_cuda"
        many = choice("fp8_e4m3", 1000)
        if here[0] in ("8.9", "12.0"):
            assert many.name == "native_cuda"
        else:
            assert f"{here[0]} it converts e4m3 to float16, and more than 128" in dict(many.rejected)["native_cuda"]


def test_the_cut_is_one_the_kernel_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few tiles are split, and there is no work space for what is not."""
    monkeypatch.setattr(_tiles, "multiprocessors", lambda: 108)
    _tiles.cut.cache_clear()
    for batch, m, outs, deep in itertools.product((1, 3), (1, 17, 64, 100, 256, 4096), (16, 4096), (16, 1000, 14336)):
        width, splits = _tiles.cut(batch, m, outs, deep)
        assert width in _tiles.COSTS
        assert width < 2 * max(m, 64)
        assert 1 <= splits <= -(-deep // 512)
    assert _tiles.cut(1, 16, 4096, 14336) == (16, 3)
    assert _tiles.cut(1, 4096, 4096, 14336) == (128, 1)
    _tiles.cut.cache_clear()
