"""Trees that hold everything a checkpoint can hold, and what it means for two of them to be equal bit by bit."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import ml_dtypes
import numpy as np

from eformer._formats.nf4.array import CompressedAbsmax
from eformer._lora.array import LoraArray
from eformer.jaximus import ImplicitArray, aux_field, tree_leaves_with_implicit
from eformer.ops.quantization import Array1B, Array8B, ArrayNF4
from eformer.serialization import register_type

DTYPES = (
    "bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "float16", "bfloat16", "float32", "complex64",
    "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float8_e3m4",
    "float8_e4m3b11fnuz", "float8_e4m3", "float4_e2m1fn", "int4", "uint4", "int2", "uint2",
)  # fmt: skip


@dataclasses.dataclass
class Outer(ImplicitArray):
    """A user's array over another one, with a tuple among its children and plain data of every kind."""

    base: Any
    factors: tuple[jax.Array, ...]
    gain: float = aux_field(default=1.0)
    label: str = aux_field(default="")
    when: Any = aux_field(default=())

    def materialize(self) -> jax.Array:
        a, b = self.factors
        return self.base.materialize() + self.gain * (a @ b)


register_type(Outer, "tests.outer")


@jtu.register_dataclass
@dataclasses.dataclass
class Layer:
    kernel: Any
    bias: Any
    name: str = dataclasses.field(default="layer", metadata={"static": True})


def dense(rng: np.random.Generator, *shape: int, dtype: Any = "float32") -> jax.Array:
    return jnp.asarray(rng.standard_normal(shape), dtype)


def of_every_dtype(rng: np.random.Generator) -> dict[str, jax.Array]:
    """Random bytes, so NaN of every kind, signed zeros and subnormals included; bits where a byte would not fit."""
    made = {}
    for name in DTYPES:
        dtype = jnp.dtype(name if name == "bool" else getattr(jnp, name))
        if name in ("bool", "int4", "uint4", "int2", "uint2", "float4_e2m1fn"):
            made[name] = jnp.asarray(rng.integers(0, 2, (3, 5)), dtype)
        else:
            raw = rng.integers(0, 256, (3, 5 * dtype.itemsize), dtype=np.uint8)
            made[name] = jax.device_put(raw.view(dtype))
    return made


def random_nf4(
    rng: np.random.Generator,
    shape: tuple[int, ...],
    block: int,
    axis: int = -2,
    dtype: Any = "float32",
    double: bool = False,
) -> ArrayNF4:
    """Random storage: what a file holds does not depend on where codes come from, and nothing has to be compiled."""
    free, blocks = without_axis(shape, axis), -(-shape[axis] // block)
    packed = jnp.asarray(rng.integers(0, 256, (*free, blocks, block // 2), dtype=np.uint8))
    absmax: Any = jnp.asarray(rng.random((*free, blocks)), jnp.float32)
    if double:
        core = min(2, absmax.ndim)
        batch, groups = absmax.shape[:-core], -(-int(np.prod(absmax.shape[-core:])) // 256)
        codes = jnp.asarray(rng.integers(0, 256, absmax.shape, dtype=np.uint8))
        absmax = CompressedAbsmax(codes, dense(rng, *batch, groups), dense(rng, *batch), core=core)
    return ArrayNF4(packed, absmax, block, axis=axis, pad=blocks * block - shape[axis], dtype=jnp.dtype(dtype))


def random_int8(rng: np.random.Generator, shape: tuple[int, ...], axis: Any = (-1,), dtype: Any = "float32") -> Array8B:
    scale = [1 if i - len(shape) in axis else n for i, n in enumerate(shape)]
    weight = jnp.asarray(rng.integers(-127, 128, shape, dtype=np.int8))
    return Array8B(dense(rng, *scale), weight, axis, dtype=jnp.dtype(dtype))


def random_bits(
    rng: np.random.Generator,
    shape: tuple[int, ...],
    bits: int,
    scale: str | None,
    axis: int = -2,
    dtype: Any = "float32",
) -> Array1B:
    free, steps = without_axis(shape, axis), -(-shape[axis] * bits // 8)
    weight = rng.integers(0, 256, (*free, steps), dtype=np.uint8)
    weight &= np.uint8(0xAA) if bits == 2 else np.uint8(0xFF)  # at two bits 0b11 is no code
    scales = {"channel": (*free, 1), "tensor": (1,) * len(shape), None: None}[scale]
    made = None if scales is None else dense(rng, *scales)
    pad = steps * 8 // bits - shape[axis]
    return Array1B(jnp.asarray(weight), scale=made, bits=bits, axis=axis, pad=pad, dtype=jnp.dtype(dtype))


def without_axis(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    return tuple(n for i, n in enumerate(shape) if i - len(shape) != axis)


def quantized(rng: np.random.Generator) -> dict[str, Any]:
    """Each format with its options: axes, ragged sizes, stacks, dtypes, shared scales, bare codes."""
    w, ragged, stack = (96, 40), (70, 37), (3, 64, 24)
    return {
        "nf4": random_nf4(rng, w, 32),
        "nf4_last": random_nf4(rng, ragged, 16, -1, "bfloat16"),
        "nf4_double": random_nf4(rng, (128, 300), 64, double=True),
        "nf4_stack": random_nf4(rng, stack, 64, dtype="float16", double=True),
        "nf4_vector": random_nf4(rng, (33,), 8, -1),
        "nf4_no_kernel": random_nf4(rng, w, 64).replaced(use_kernel=False),
        "int8": random_int8(rng, w),
        "int8_axes": random_int8(rng, stack, (-2, -1), "float16"),
        "int8_f16_scale": Array8B(jnp.ones((1, 5), jnp.float16), jnp.ones((4, 5), jnp.int8)),
        "ternary": random_bits(rng, ragged, 2, "channel", dtype="bfloat16"),
        "ternary_tensor": random_bits(rng, stack, 2, "tensor"),
        "ternary_bare": random_bits(rng, (9, 7), 2, None, dtype="int8"),
        "binary": random_bits(rng, ragged, 1, "channel", -1),
        "binary_bare": random_bits(rng, w, 1, None),
        "lora": LoraArray(random_nf4(rng, w, 32), dense(rng, 96, 4), dense(rng, 4, 40), scale=0.3),
        "lora_dense": LoraArray(dense(rng, *ragged), dense(rng, 70, 2), dense(rng, 2, 37)),
    }


def everything(rng: np.random.Generator) -> Any:
    q = quantized(rng)
    tied = dense(rng, 4, 4)
    outer = Outer(
        q["nf4"], (dense(rng, 96, 2), dense(rng, 2, 40)), gain=float("inf"), label="µ/.#", when=(1, (None, 2.5))
    )
    return {
        "dtypes": of_every_dtype(rng),
        "quantized": q,
        "outer": [outer, (Outer(random_int8(rng, (3, 2)), (dense(rng, 3, 1), dense(rng, 1, 2))),)],
        "tied": {"a": tied, "b": tied, "c": q["int8"]},
        "keys": {"one": jax.random.key(7), "many": jax.random.split(jax.random.key(1), 3)},
        "numpy": {
            "f64": rng.standard_normal((2, 3)),
            "i64": np.arange(5, dtype=np.int64) << 40,
            "c128": rng.standard_normal(3) + 1j,
            "scalar": np.float32(2.5),
            "bf16": np.float32([1, 2]).astype(ml_dtypes.bfloat16),
            "strided": np.arange(24.0).reshape(4, 6)[::2, ::-1],
        },
        "python": [True, 3, -0.0, float("nan"), "text", 1 << 70, 2j],
        "empty": [{}, [], (), None, jnp.zeros((0, 3)), jnp.float32(4)],
        "ordered": collections.OrderedDict([("z", dense(rng, 2)), ("a", dense(rng, 3))]),
        "keys of dicts": [
            {1: dense(rng, 1), 2: dense(rng, 1)},
            {(1, "x"): dense(rng, 1), (2, None): dense(rng, 1)},
            {"a.b": dense(rng, 1), "a": {"b": dense(rng, 2)}},
        ],
        "__metadata__": dense(rng, 2),
        "layer": Layer(q["ternary"], dense(rng, 3)),
    }


def decoded(q: Any) -> np.ndarray:
    """The values of an array, by the codecs written for reading: nothing is compiled for yet another shape."""
    from formats import references  # here: `python -m tests.serialization.fuzz` does not find it

    if isinstance(q, ArrayNF4):
        absmax, size = np.asarray(q.part(q.scale_part)), q.shape[q.blocked]
        return references.nf4_decode(np.asarray(q.packed), absmax, axis=q.blocked, size=size, dtype=q.dtype)
    if isinstance(q, Array8B):
        return references.int8_decode(np.asarray(q.weight), np.asarray(q.scale), dtype=q.dtype)
    if isinstance(q, Array1B):
        size = q.shape[q.blocked]
        codes = references.unpack(np.asarray(q.weight), axis=q.blocked, bits=q.bits, size=size)
        scale = 1 if q.scale is None else np.moveaxis(np.asarray(q.scale), -1, q.blocked)
        return (codes * scale).astype(q.dtype)
    return np.asarray(q)


def assert_same(found: Any, wanted: Any) -> None:
    """Same structure, types, dtypes and bits."""
    assert jtu.tree_structure(found) == jtu.tree_structure(wanted)
    pairs = zip(jtu.tree_leaves_with_path(found), jtu.tree_leaves(wanted), strict=True)
    for (path, a), b in pairs:
        where = jtu.keystr(path)
        if isinstance(b, jax.Array):
            assert isinstance(a, jax.Array), where
            if jnp.issubdtype(b.dtype, jax.dtypes.prng_key):
                assert a.dtype == b.dtype, where
                a, b = jax.random.key_data(a), jax.random.key_data(b)
        elif isinstance(b, (np.ndarray, np.generic)):
            assert isinstance(a, type(b)), where
        else:
            assert type(a) is type(b), where
            assert repr(a) == repr(b), where
            continue
        assert (a.shape, a.dtype) == (b.shape, b.dtype), where
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), where
    for a, b in zip(tree_leaves_with_implicit(found), tree_leaves_with_implicit(wanted), strict=True):
        if isinstance(b, ImplicitArray):
            assert (type(a), a.shape, a.dtype) == (type(b), b.shape, b.dtype)
