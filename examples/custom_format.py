"""A format of your own: weights as powers of two. A class, two handlers, and it works in any model and file.

python examples/custom_format.py
"""

from __future__ import annotations

import dataclasses
import tempfile
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

import eformer as ef


def decode(codes: jax.Array) -> jax.Array:
    size = jnp.where(codes & 127 == 0, 0.0, jnp.ldexp(jnp.float32(1), (codes & 127).astype(jnp.int32) - 64))
    return jnp.where(codes > 127, -size, size)


@dataclasses.dataclass
class PowerOfTwo(ef.ImplicitArray):
    """`w = sign * 2**exponent`, in one byte: the sign in the highest bit, the exponent + 64 below; 0 is zero."""

    codes: jax.Array
    core_ndim: ClassVar[int] = 2  # axes in front of a matrix are batch axes: scan and vmap may slice them

    def materialize(self) -> jax.Array:
        return decode(self.codes)

    @classmethod
    def quantize(cls, w: jax.Array) -> PowerOfTwo:
        exponent = jnp.round(jnp.log2(jnp.maximum(jnp.abs(w), 2.0**-63))).clip(-63, 63)
        codes = jnp.where(w == 0, 0, exponent + 64).astype(jnp.uint8)
        return cls(jnp.where(w < 0, codes | 128, codes))


@ef.register("dot_general")
def product(x: jax.Array, w: PowerOfTwo, *, dimension_numbers: Any, **params: Any) -> Any:
    """`x @ w`, 64 rows of w at a time: no more than those are ever decoded."""
    if w.ndim != 2 or w.shape[0] % 64 or dimension_numbers != (((x.ndim - 1,), (0,)), ((), ())):
        return NotImplemented  # the library materializes w, with a warning

    def step(y: jax.Array, part: Any) -> tuple[jax.Array, None]:
        return y + jnp.moveaxis(part[0], 0, -1) @ decode(part[1]), None

    rows = jnp.moveaxis(x, -1, 0).reshape(-1, 64, *x.shape[:-1])
    start = jnp.zeros((*x.shape[:-1], w.shape[1]), jnp.result_type(x.dtype, jnp.float32))
    return jax.lax.scan(step, start, (rows, w.codes.reshape(-1, 64, w.shape[1])))[0]


@ef.register("transpose")
def transpose(w: PowerOfTwo, *, permutation: Any, **params: Any) -> PowerOfTwo:
    return PowerOfTwo(jnp.transpose(w.codes, permutation))


def main() -> None:
    w, x = jax.random.normal(jax.random.key(0), (256, 64)), jax.random.normal(jax.random.key(1), (8, 256))
    q = PowerOfTwo.quantize(w)
    print(q, f"relative error {jnp.linalg.norm(q.materialize() - w) / jnp.linalg.norm(w):.3f}")
    with ef.materialization_policy("error"):
        y = jax.jit(ef.implicit(lambda x, q: jax.nn.relu(x @ q)))(x, q)
        stack = jax.tree.map(lambda leaf: jnp.stack([leaf] * 3), q)
        ys = ef.implicit(lambda x, stack: jax.lax.map(lambda q: x @ q, stack))(x, stack)
    assert jnp.allclose(y, jax.nn.relu(x @ q.materialize()), atol=1e-4)
    assert ys.shape == (3, 8, 64)
    print("gradient through the rounding:", jax.grad(lambda w: ef.ste(PowerOfTwo.quantize)(w).sum())(w)[0, :3])
    with ef.materialization_policy("allow"):
        print(str(ef.explain(ef.implicit(jnp.cumsum))(q)).split(" at ")[0])
    ef.serialization.register_type(PowerOfTwo, "example.power_of_two")
    with tempfile.TemporaryDirectory() as folder:
        print("from a file:", ef.load(ef.save(f"{folder}/m.safetensors", {"w": q}))["w"])


if __name__ == "__main__":
    main()
