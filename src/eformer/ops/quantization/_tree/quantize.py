"""`quantize_tree` and `dequantize_tree`: whole models, a leaf at a time."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eformer import _jax_compat as compat
from eformer.jaximus import ImplicitArray, materialize

from .._rules import Choice, Recipe
from .paths import open_tree
from .plan import MIN_SIZE, SKIP, Decision, plan
from .progress import Progress, Reporter, reporter


def quantize_tree(
    params: Any,
    rules: Any = None,
    *,
    default: Choice = "nf4",
    min_size: int = MIN_SIZE,
    skip: Iterable[str] = SKIP,
    abstract: bool = False,
    donate: bool = True,
    progress: Reporter | bool | None = None,
) -> Any:
    """Quantize the matrices of a model: any pytree, or a Flax NNX module.

    Leaves are taken one after the other. A leaf that appears twice (tied weights) is quantized once, as its first path
    asks, and appears twice again. Leaves already quantized stay as they are.

    Args:
        params: the model or its parameters. Leaves may be NumPy arrays (memory-mapped ones too).
        rules: ordered `pattern -> format`, the first match decides: a mapping or pairs. A pattern is a glob over paths
            such as "layers/0/mlp/kernel", or a regular expression after "re:". A format is a name, a
            `QuantizationConfig`, a mapping of their options, or None to keep the leaf. One format alone replaces
            `default`. Rules without effect are named in a warning.
        default: for leaves that no rule matches; None keeps them.
        min_size: matrices with fewer values stay as they are, whatever rules say.
        skip: groups that stay as they are, whatever rules say: any of norms, biases, routers, positions, heads,
            embeddings, convolutions.
        abstract: compute nothing and give `jax.ShapeDtypeStruct` leaves; the leaves of `params` may be such, too.
        donate: free every JAX array that was quantized, so that memory never holds the model twice. `params` cannot be
            used afterwards.
        progress: called with a `Progress` after each leaf; True for a bar, False for none, None for one in terminals.

    >>> params = {"dense": {"kernel": jnp.ones((64, 64)), "bias": jnp.zeros(64)}}
    >>> quantize_tree(params)["dense"]["kernel"]
    ArrayNF4(float32[64,64], nf4, 4.50 bits per weight)
    """
    tree = open_tree(params)
    decisions = plan(tree.leaves, rules, default=default, min_size=min_size, skip=skip)
    if abstract:
        return tree.rebuild(_abstract(d) for d in decisions)
    total = sum(_nbytes(d.leaf.value) for d in decisions if d.recipe is not None)
    done, made = 0, {}
    results = []
    with reporter(progress, "quantizing") as tell:
        for decision in decisions:
            value = decision.leaf.value
            if decision.recipe is not None:
                nbytes = _nbytes(value)
                if id(value) not in made:
                    # The dense value stays in the table, so that its id is not given to another.
                    made[id(value)] = _quantized(decision, donate), value
                value = made[id(value)][0]
                done += nbytes
                tell(Progress(decision.leaf.path, done, total))
            results.append(value)
    return tree.rebuild(results)


def dequantize_tree(params: Any, dtype: Any = None) -> Any:
    """The model with every implicit array materialized, in its own dtype or in `dtype`; ties are kept.

    >>> dequantize_tree(quantize_tree({"kernel": jnp.ones((64, 64))}))["kernel"].dtype
    dtype('float32')
    """
    tree, made = open_tree(params), {}
    for leaf in tree.leaves:
        value = leaf.value
        if isinstance(value, ImplicitArray) and id(value) not in made:
            dense = materialize(value)
            made[id(value)] = dense if dtype is None else dense.astype(dtype)
    return tree.rebuild(made.get(id(leaf.value), leaf.value) for leaf in tree.leaves)


def encode(recipe: Recipe, value: Any, batch: int) -> Any:
    """`value` quantized; every matrix of a stack as if it stood alone."""
    if not batch or recipe.config.dtype != "ternary":  # all other formats look along one axis only
        return recipe.quantize(value)
    run: Any = recipe.quantize
    for _ in range(batch):
        run = jax.vmap(run)
    made = run(value)
    sharding = None if isinstance(value, compat.Tracer) else getattr(value, "sharding", None)
    split = isinstance(sharding, jax.sharding.NamedSharding) and sharding.mesh.size > 1
    return made.with_sharding(sharding) if split and hasattr(made, "with_sharding") else made


def _quantized(decision: Decision, donate: bool) -> Any:
    value, recipe = decision.leaf.value, decision.recipe
    if recipe is None:
        raise ValueError(f"{decision.leaf.path!r} is not to be quantized: {decision.reason}.")
    ours = not isinstance(value, jax.Array)  # a copy on the device that nobody else holds
    dense = jnp.asarray(value) if ours else value
    try:
        made = encode(recipe, dense, decision.role.batch)
    except (TypeError, ValueError) as err:
        err.add_note(f"while quantizing {decision.leaf.path!r} as {recipe}")
        raise
    if (donate or ours) and not isinstance(dense, compat.Tracer) and made is not dense:
        jax.block_until_ready(jax.tree.leaves(made))
        dense.delete()
    return made


def _abstract(decision: Decision) -> Any:
    value, recipe = decision.leaf.value, decision.recipe
    if isinstance(value, ImplicitArray) or not hasattr(value, "shape") or not hasattr(value, "dtype"):
        return jax.tree.map(_struct, value) if isinstance(value, ImplicitArray) else value
    if recipe is None:
        return _struct(value)
    dtype = jax.dtypes.canonicalize_dtype(value.dtype)
    return jax.eval_shape(lambda w: encode(recipe, w, decision.role.batch), jax.ShapeDtypeStruct(value.shape, dtype))


def _struct(value: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=getattr(value, "sharding", None))


def _nbytes(value: Any) -> int:
    return math.prod(value.shape) * np.dtype(value.dtype).itemsize
