"""Quantize a matrix four ways, multiply without unpacking it, and see what each costs."""

from __future__ import annotations

import jax
import jax.numpy as jnp

import eformer as ef


def main() -> None:
    key_w, key_x = jax.random.split(jax.random.key(0))
    w = jax.random.normal(key_w, (1024, 512))
    x = jax.random.normal(key_x, (4, 1024))
    exact = x @ w
    print(f"{'format':8} {'array':58} {'error of w':>10} {'error of x @ w':>15}")
    for name in ("int8", "nf4", "ternary", "binary"):
        q = ef.quantize(w, dtype=name)
        y = jax.jit(ef.implicit(lambda x, q: x @ q))(x, q)
        error_w = jnp.linalg.norm(q.materialize() - w) / jnp.linalg.norm(w)
        error_y = jnp.linalg.norm(y - exact) / jnp.linalg.norm(exact)
        print(f"{name:8} {q!r:58} {error_w:10.4f} {error_y:15.4f}")
    print("\nexplain(x @ w) says:")
    print(ef.explain(lambda x: x @ ef.quantize(w))(x))


if __name__ == "__main__":
    main()
