"""Matrices that are multiplied with the same x, joined into one: queries, keys and values; the two of an MLP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from eformer._core import ImplicitArray, implicit
from eformer._core.materialization import materialization_policy

# What is joined, by the name it then has.
JOINED: dict[str, tuple[str, ...]] = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up")}


def fuse(params: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of a model with `q`, `k` and `v` of every layer as one matrix, and `gate` and `up` as another.

    Each is one product instead of several: the same codes and scales, and as accurate. Matrices stay apart where they
    are not stored alike, carry adapters, belong to experts, or are split over devices.

    >>> from eformer import models
    >>> config = models.Config(vocabulary=16, width=32, layers=2, heads=2, kv_heads=1, hidden=64)
    >>> sorted(fuse(models.init(config, jax.random.key(0)))["layers"])
    ['down', 'gate_up', 'norm_attention', 'norm_mlp', 'o', 'qkv']
    """
    layers: Any = params["layers"]
    joined = _layer(layers) if isinstance(layers, Mapping) else [_layer(layer) for layer in layers]
    return {**params, "layers": joined}


def _layer(layer: Mapping[str, Any]) -> dict[str, Any]:
    made = dict(layer)
    for name, parts in JOINED.items():
        if "router" in made and "gate" in parts:
            continue
        whole = _joined([made.get(part) for part in parts])
        biases = [made[f"{part}_bias"] for part in parts if f"{part}_bias" in made]
        if whole is None or len(biases) not in (0, len(parts)):
            continue
        made = {key: value for key, value in made.items() if key.removesuffix("_bias") not in parts}
        made[name] = whole
        if biases:
            made[f"{name}_bias"] = jnp.concatenate(biases, axis=-1)
    return made


def _joined(matrices: list[Any]) -> Any:
    """The matrices next to each other; None where that would not be the same matrices in one."""
    leaves = jax.tree.leaves(matrices)
    if any(m is None for m in matrices) or any(len(leaf.sharding.device_set) > 1 for leaf in leaves):
        return None
    if len({(type(m), m.dtype, m.shape[:-1]) for m in matrices}) > 1:
        return None
    if not isinstance(matrices[0], ImplicitArray):
        return jnp.concatenate(matrices, axis=-1)
    with materialization_policy("allow"):  # of shapes: nothing becomes dense
        whole = jax.eval_shape(implicit(lambda *m: jnp.concatenate(m, axis=-1)), *matrices)
    held = [sum(leaf.size for leaf in jax.tree.leaves(tree)) for tree in (whole, matrices)]
    if type(whole) is not type(matrices[0]) or held[0] != held[1]:
        return None
    return implicit(lambda *m: jnp.concatenate(m, axis=-1))(*matrices)
