"""An array type of your own: a low-rank matrix that is multiplied without being formed."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from eformer.jaximus import ImplicitArray, implicit, register


@dataclass
class LowRank(ImplicitArray):
    """Stands for `u @ v`."""

    u: jax.Array
    v: jax.Array

    def materialize(self) -> jax.Array:
        return self.u @ self.v


@register("dot_general")
def matmul(x: jax.Array, w: LowRank, *, dimension_numbers, **params):
    if dimension_numbers != (((x.ndim - 1,), (0,)), ((), ())):
        return NotImplemented  # not a plain x @ w: let the library materialize w
    return (x @ w.u) @ w.v


def layer(x, w):
    return jax.nn.relu(x @ w)


def temporary_bytes(f, *args) -> int:
    return jax.jit(f).lower(*args).compile().memory_analysis().temp_size_in_bytes


def main() -> None:
    n, rank = 1024, 8
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (4, n))
    w = LowRank(jax.random.normal(keys[1], (n, rank)), jax.random.normal(keys[2], (rank, n)))
    dense = w.materialize()

    y = jax.jit(implicit(layer))(x, w)
    error = jnp.max(jnp.abs(y - layer(x, dense))) / jnp.max(jnp.abs(y))
    print(f"weight          {w.shape} {w.dtype}, rank {rank}")
    print(f"bytes held      {w.u.nbytes + w.v.nbytes:>9,}   dense: {dense.nbytes:,}")
    print(f"bytes for x @ w {temporary_bytes(implicit(layer), x, w):>9,}   if formed: ", end="")
    print(f"{temporary_bytes(lambda x, w: layer(x, w.materialize()), x, w):,}")
    print(f"relative error  {error:.1e}")

    gradient = jax.grad(implicit(lambda w: jnp.sum(layer(x, w))))(w)
    print(f"gradient        {type(gradient).__name__} with u {gradient.u.shape} and v {gradient.v.shape}")


if __name__ == "__main__":
    main()
