"""GPTQ: rows (inputs) are rounded one after the other, and each hands its error on to those that are not yet rounded.

For weights `W` (K, N) and the second moment `H` (K, K) of their inputs, the error of the outputs is `trace(Eᵀ H E)`.
With `H⁻¹ = Uᵀ U`, U upper triangular, row k gets its codes, and `W[j] -= U[k, j] / U[k, k] * (W[k] - rounded[k])` for
every later j keeps that error least (Frantar et al., 2022). Later rows are brought up to date once for a whole batch.

Few tokens show correlations that other tokens do not have, and errors handed on along these make outputs worse:
`shrunk` takes away as much of all correlations as chance explains.

Blocks keep their scales whatever the order of rows is, so that nothing of the order has to be stored. Once codes are
known, the scales of their blocks are fitted to them by least squares with the whole moment (`matrices.refitted`), and
every row is looked at again: its best codes, now that those of all others are known (`matrices.revisited`).
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

BATCH = 32  # rows that stay in a cache
DAMPING, MORE_DAMPING, ATTEMPTS = 0.01, 10.0, 4


def shrunk(moment: jax.Array, count: jax.Array) -> jax.Array:
    """The moment with all entries off its diagonal made smaller by a share that depends on the number of tokens.

    The share is the variance of all correlations r over the sum of their squares, which leaves the least squared error
    (Schäfer and Strimmer, 2005). The variance for n tokens is about `(1 - r²)² / n`; it is scaled to be 1 / n, the mean
    of r², for inputs without correlations. Strong ones, such as a common mean brings, hide what is chance in the rest:
    the share is at least `(k / (k + n))²` for k active channels. One token, or none, leaves the diagonal only.
    """
    diagonal = jnp.diagonal(moment)
    active = diagonal > 0
    inverse = jnp.where(active, lax.rsqrt(jnp.where(active, diagonal, 1)), 0)
    pairs = active[:, None] & active & ~jnp.eye(len(diagonal), dtype=bool)
    squares = jnp.where(pairs, jnp.square(moment * inverse[:, None] * inverse), 0)
    found, k = jnp.sum(squares), jnp.sum(active)
    n = jnp.maximum(count, 2)
    chance = jnp.sum(jnp.where(pairs, jnp.square(1 - squares), 0)) * (n + 2) / ((n - 1) * (n + 1))
    share = jnp.clip(chance / jnp.where(found > 0, found, 1), jnp.square(k / (k + n)), 1)
    share = jnp.where((count > 1) & (found > 0), share, 1)
    return moment - share * jnp.where(pairs, moment, 0)


def damped(moment: jax.Array, times: jax.Array | float = 0.0) -> jax.Array:
    """The moment in units of the mean of its diagonal, with some of that on the diagonal."""
    mean = jnp.mean(jnp.diagonal(moment))
    eye = jnp.eye(moment.shape[-1], dtype=jnp.float32)
    return moment / jnp.where(mean > 0, mean, 1) + DAMPING * MORE_DAMPING**times * eye


def factor(moment: jax.Array) -> tuple[jax.Array, jax.Array]:
    """U, and how often the damping had to be raised; U is the identity, and errors stay, where nothing helped.

    Damping adds a hundredth of the mean of the diagonal to it, ten times that at every further attempt. Channels that
    were never active have no other entries, so that their errors go nowhere.
    """
    k = moment.shape[-1]

    def upper(times: jax.Array) -> jax.Array:
        # Reversed in both directions, the lower Cholesky factor of a matrix gives R Rᵀ with R upper: U is its inverse.
        lower = jnp.linalg.cholesky(damped(moment, times)[::-1, ::-1], symmetrize_input=False)
        inverse = lax.linalg.triangular_solve(lower, jnp.eye(k, dtype=jnp.float32), left_side=True, lower=True)
        return inverse[::-1, ::-1]

    def fails(state: tuple[jax.Array, jax.Array]) -> jax.Array:
        return (state[0] < ATTEMPTS) & ~jnp.all(jnp.isfinite(state[1]))

    first = jnp.zeros((), jnp.float32)
    times, found = lax.while_loop(fails, lambda s: (s[0] + 1, upper(s[0] + 1)), (first, upper(first)))
    usable = jnp.all(jnp.isfinite(found))
    return jnp.where(usable, found, jnp.eye(k, dtype=jnp.float32)), jnp.where(usable, times, ATTEMPTS)


def sweep(rows: jax.Array, matrix: jax.Array, step: Callable[..., tuple[jax.Array, jax.Array]]) -> jax.Array:
    """Codes (K, N). Rows (K, N) get theirs one after the other, and each changes the others.

    `step(row, k, matrix[k, k])` gives the codes of row k, and an error e; then `rows[j] -= matrix[k, j] * e` for all j.
    """
    given = rows.shape[0]
    missing = -given % BATCH
    if missing:
        rows = jnp.pad(rows, ((0, missing), (0, 0)))
        matrix = jnp.pad(matrix, (0, missing)) + jnp.diag((jnp.arange(given + missing) >= given).astype(matrix.dtype))

    def some(rows: jax.Array, first: jax.Array) -> tuple[jax.Array, jax.Array]:
        these, onward = (lax.dynamic_slice_in_dim(a, first, BATCH) for a in (rows, matrix))
        within = lax.dynamic_slice_in_dim(onward, first, BATCH, axis=1)

        def one(these: jax.Array, j: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
            codes, error = step(these[j], jnp.minimum(first + j, given - 1), within[j, j])
            return these - within[j][:, None] * error, (codes, error)

        _, (codes, errors) = lax.scan(one, these, jnp.arange(BATCH))
        return rows - jnp.matmul(onward.T, errors, precision="highest"), codes

    _, codes = lax.scan(some, rows, jnp.arange(0, given + missing, BATCH))
    return codes.reshape(given + missing, -1)[:given]
