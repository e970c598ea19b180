"""A small table of products for compute-sanitizer: see sanitize.sh."""

from __future__ import annotations

import itertools
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import eformer as ef
from eformer._kernels import cuda, qgather, qmatmul, qragged_dot
from eformer._kernels.attention import attend, attend_joined
from eformer._kernels.cuda import _attention, _tiles, _wide
from eformer._kernels.formats import FORMATS
from eformer._kernels.matmul import IN_STACK
from eformer._kernels.parameters import parameters_of

NF4 = {"fmt": "nf4", "block": 64}
TABLE = [
    (64, 512, 1, NF4),
    (50, 1000, 9, NF4),
    (33, 640, 17, NF4),
    (96, 1024, 40, NF4),
    (40, 96, 3, {"fmt": "nf4", "block": 32}),
]
TABLE += [(40, 520, m, {"fmt": fmt}) for fmt in ("int8", "ternary", "binary") for m in (1, 12, 20, 40)]
# The kernel for few rows: whole chunks of columns, short and long ones.
TABLE += [(50, 1024, 3, how) for how in (NF4, {"fmt": "int8"}, {"fmt": "ternary"}, {"fmt": "binary"})]
TABLE += [(50, 1024, 12, how) for how in (NF4, {"fmt": "int8"}, {"fmt": "ternary"}, {"fmt": "binary"})]
TABLE += [(40, 8192, 2, {"fmt": fmt}) for fmt in ("ternary", "binary")]
# The wide kernel: columns in whole chunks of 16 bytes; tiles with and without edges, splits of the depth.
TABLE += [
    (136, 1280, m, how) for how in (NF4, {"fmt": "int8"}, {"fmt": "ternary"}, {"fmt": "binary"}) for m in (12, 40, 140)
]
# The other formats of 4 bits, in blocks of 32 and 64, and floats of 8 bits.
MORE = ({"fmt": "int4", "block": 64}, {"fmt": "fp4", "block": 32}, {"fmt": "fp8_e4m3"})
TABLE += [(50, 1024, m, how) for how in MORE for m in (3, 12)]
TABLE += [(136, 1280, m, how) for how in MORE for m in (12, 40, 140)]
# Zero points and biases of int4, bytes in blocks: for few rows, whole chunks and odd ones, and in the wide kernel.
SHIFTED = [
    {"fmt": "int4", "block": block, "offset": kind} for block, kind in ((64, "zero"), (32, "zero"), (128, "bias"))
]
BYTES = [{"fmt": fmt, "block": 64} for fmt in ("int8_block", "fp8_e4m3_block")]
TABLE += [(50, cols, m, how) for how in SHIFTED for cols, m in ((1024, 3), (1024, 12), (1000, 9))]
TABLE += [(50, 1024, m, how) for how in (*BYTES, BYTES[0] | {"offset": "zero"}) for m in (3, 12)]
TABLE += [(136, 1280, m, how) for how in (*SHIFTED, *BYTES) for m in (40, 140)]
# The wide kernel for more than 64 rows of x, in every tile that there is.
CUT = [NF4, MORE[0], SHIFTED[0], SHIFTED[2], *BYTES]
CUT += [{"fmt": fmt} for fmt in ("int8", "fp8_e4m3", "ternary", "binary")]
# Few rows in the axpy form: rings that wrap, blocks that share outs (m = 12 is above, too, with a short axis).
TABLE += [(2056, 1280, m, how) for m in (3, 13) for how in (NF4, MORE[0])]
# Tiles that are launched behind the others.
TABLE += [(8576, 1280, 250, NF4)]
# Rows and depths of odd sizes, in both forms.
ODD = [
    (fmt, form, m)
    for fmt in ("nf4", "int8", "ternary", "binary", "fp8_e4m3")
    for form in ("dot", "axpy")
    for m in (3, 40, 128 if form == "dot" else 140)
    if (fmt, form, m) != ("nf4", "dot", 3)  # for another kernel
]
# x rounded to 8 bits: with and without splits, tiles with edges.
ROUNDED = [
    (fmt, activations, form, m)
    for fmt, activations in (("int8", "int8"), ("fp8_e4m3", "fp8"))
    for form in ("dot", "axpy")
    for m in (3, 40, 140, 300)
]
# Attention over caches: a cluster of blocks for each head, and one block; sizes of which INT4 pads one.
ATTENDED = [
    (keys, values, size, group, positions, layers)
    for keys, values in _attention.PAIRS
    for size, group, positions in ((128, 4, 300), (80 if keys == values else 64, 12, 50))
    for layers in (None, 3)
]
PER_BYTE = {"int8": 1, "fp8_e4m3": 1, "ternary": 4, "binary": 8}


def in_stack(x: Any, codes: Any, scale: Any, offset: Any = None, **how: Any) -> jax.Array:
    """The product with the last of three equal entries."""
    numbers = [array for array in (scale, offset) if array is not None]
    stored = [jnp.asarray(array)[None].repeat(3, 0) for array in (codes, *numbers)]
    return IN_STACK.bind(parameters_of(x, codes, scale, offset, **how), x, stored[0], jnp.int32(2), *stored[1:])


def storage(rng: np.random.Generator, rows: int, cols: int, how: dict[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
    """Codes and scale of a random matrix, and the options of its products: with an array for what offset it has."""
    if "block" not in how:
        codes = rng.integers(0, 2, (rows, -(-cols // PER_BYTE[how["fmt"]]))) * 0x55
        return codes.astype(FORMATS[how["fmt"]].code_dtype), rng.random((rows, 1)).astype(np.float32), how
    row, blocks = FORMATS[how["fmt"]], -(-cols // how["block"])
    codes = rng.integers(0, 96 if row.per_code == 1 else 256, (rows, blocks, how["block"] // row.per_code))
    scale, kind = rng.random((rows, blocks)).astype(np.float32), how.get("offset")
    if kind is not None:
        how = how | {"offset": rng.integers(0, 16, scale.shape).astype(np.uint8 if kind == "zero" else np.float32)}
    return codes.astype(row.code_dtype), scale, how


def main(*asked: str) -> None:
    """Everything, or the parts that are asked for."""
    assert cuda.loaded().reason is None, cuda.loaded().reason
    rng = np.random.default_rng(0)
    for name in asked or PARTS:
        PARTS[name](rng)


def check_products(rng: np.random.Generator) -> None:
    small = _wide.SMALL
    for rows, cols, m, what in TABLE:
        _wide.SMALL = (
            small if cols == 1280 else {}
        )  # INT8 with 12 rows: the wide kernel there, the skinny one elsewhere
        x = jnp.asarray(rng.standard_normal((m, cols)), jnp.bfloat16)
        codes, scale, how = storage(rng, rows, cols, what)
        y = qmatmul(x, codes, scale, form="dot", cols=cols, **how)
        # The other form only where the matrix product is not XLA's, whose own kernels the sanitizer does not survive.
        back = qmatmul(jnp.ones((m, rows), x.dtype), codes, scale, form="axpy", cols=cols, **how) if cols == 1280 else y
        looked_up = qgather(codes, scale, np.arange(0, rows, 3), cols=cols, **how)
        sizes = jnp.array([m // 2, m - m // 2])
        two = {"offset": how["offset"][None].repeat(2, 0)} if "offset" in how else {}
        stack = [array[None].repeat(2, 0) for array in (codes, scale)]
        grouped = m <= 64 and how["fmt"] in cuda.LIMITS.formats
        ragged = qragged_dot(x, *stack, sizes, form="dot", cols=cols, **how | two) if grouped else y
        entry = y if m > 64 else in_stack(x, codes, scale, form="dot", cols=cols, **how)
        found = jax.block_until_ready((y, back, looked_up, ragged, entry))
        assert all(bool(jnp.isfinite(v.astype(jnp.float32)).all()) for v in found)
    print(f"{len(TABLE)} products, each with its ragged twin, an entry of a stack and a lookup: finite")
    _wide.SMALL = small


def check_odd(rng: np.random.Generator) -> None:
    for fmt, form, m in ODD:
        rows, cols = 133, 907
        codes, scale, how = storage(rng, rows, cols, {"fmt": fmt} | ({"block": 96} if fmt == "nf4" else {}))
        scale = scale if fmt == "nf4" or form == "dot" else np.ones((1, cols), np.float32)
        x = jnp.asarray(rng.standard_normal((m, cols if form == "dot" else rows)), jnp.bfloat16)
        for multiply in (qmatmul, in_stack):
            run = jax.jit(lambda x, multiply=multiply: multiply(x, codes, scale, form=form, cols=cols, **how))  # noqa: B023
            assert "eformer_cuda_odd" in run.lower(x).as_text()
            assert bool(jnp.isfinite(run(x).astype(jnp.float32)).all())
    print(f"{len(ODD)} products of odd sizes, each with an entry of a stack: finite")


def check_rounded(rng: np.random.Generator) -> None:
    hopper, capability, _tiles.capability = _wide.has_wgmma, _tiles.capability, lambda: "8.9"
    for tiles, (fmt, activations, form, m) in itertools.product((False, True), ROUNDED):
        _wide.has_wgmma = (lambda: False) if tiles else hopper  # the kernel of other GPUs
        jax.clear_caches()
        x = jnp.asarray(rng.standard_normal((m, 1280 if form == "dot" else 144)), jnp.bfloat16)
        codes = jnp.asarray(rng.integers(0, 64, (144, 1280)), jnp.int8 if fmt == "int8" else jnp.uint8)
        scale = jnp.ones((144, 1) if form == "dot" else (1, 1280))
        for multiply in (qmatmul, in_stack):
            how = {"fmt": fmt, "form": form, "cols": 1280, "activations": activations, "preference": "native"}
            y = multiply(x, codes, scale, **how)
            assert bool(jnp.isfinite(y.astype(jnp.float32)).all())
    _wide.has_wgmma, _tiles.capability = hopper, capability
    print(f"{len(ROUNDED)} products that round x, by both kernels: finite")


def check_tiles(rng: np.random.Generator) -> None:
    """Edges in every direction, and two splits of the contracted axis."""
    planned, count = _wide.cut, 0
    for what, form in itertools.product(CUT, ("dot", "axpy")):
        codes, scale, how = storage(rng, 520, 1152, what)
        if "block" not in what and form == "axpy":
            scale = rng.random((1, 1152)).astype(np.float32)
        x = jnp.asarray(rng.standard_normal((140, 1152 if form == "dot" else 520)), jnp.bfloat16)
        tiles = [tile for tile in _wide.costs_of(_wide.Kind(what["fmt"], form, "offset" in what)) if tile[0] > 64]
        for tile in tiles:
            _wide.cut = lambda *_, tile=tile: _wide.Cut(*tile, 2)
            jax.clear_caches()  # equal products share a program
            y = qmatmul(x, codes, scale, form=form, cols=1152, **how)
            assert bool(jnp.isfinite(y.astype(jnp.float32)).all()), (what, form, tile)
        count += len(tiles)
    _wide.cut = planned
    print(f"{count} products in tiles of their own: finite")


def check_attention(rng: np.random.Generator) -> None:
    for *kinds, size, group, positions, layers in ATTENDED:
        q, rows = (
            jnp.asarray(rng.standard_normal(shape), jnp.bfloat16)
            for shape in ((2, 3, group, size), (layers or 1, 2, 3, positions, size))
        )
        keys, values = (ef.QuantizedCache.quantize(rows if layers else rows[0], kind) for kind in kinds)
        index = jnp.int32(layers - 1) if layers else None
        how = {"factor": size**-0.5, "window": positions // 2 if group == 12 else None}
        given = (q, keys, values, jnp.int32(positions - 7))
        for new in (None, (q[:, :, 0], q[:, :, 0])):
            run = jax.jit(
                ef.implicit(lambda *given, index=index, how=how, new=new: attend(*given, index, new=new, **how))
            )
            assert "native_cuda" in str(ef.explain(run)(*given))
            found = jax.tree.leaves(run(*given))
            assert all(bool(jnp.isfinite(part.astype(jnp.float32)).all()) for part in found)
        row = jnp.asarray(rng.standard_normal((2, 3 * (group + 2) * size)), jnp.bfloat16)
        for halves in (False, True):
            joined = {"size": size, "turns": jnp.ones((2, size // 2)), "halves": halves, "cap": None, **how}
            run = jax.jit(ef.implicit(lambda *given, how=joined, index=index: attend_joined(*given, index, **how)))
            found = jax.tree.leaves(run(row, *given[1:]))
            assert all(bool(jnp.isfinite(part.astype(jnp.float32)).all()) for part in found)
    print(f"{len(ATTENDED)} times attention over a cache, with and without rows to write, and of one array: finite")


PARTS = {
    "products": check_products,
    "odd": check_odd,
    "rounded": check_rounded,
    "tiles": check_tiles,
    "attention": check_attention,
}

if __name__ == "__main__":
    main(*sys.argv[1:])
