"""`distill`: the codes of a quantized model stay, its scales are trained until it says what the dense model says."""

from __future__ import annotations

import functools
import itertools
import math
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp

from eformer._core import implicit
from eformer._formats.base import QuantizedArray
from eformer._lora.array import LoraArray
from eformer._quantize.leaves import Tree, open_tree, roles_of
from eformer._quantize.tree import check_alive
from eformer.errors import CalibrationWarning

from .calibrate import check_batches
from .trained_scales import changed, first_changes, obstacle, pieces, settled

Loss = Callable[[Any, Any], jax.Array]
_FIRST, _SECOND, _TINY = 0.9, 0.999, 1e-8  # the averages of Adam, and what keeps its quotient finite


def divergence(mine: jax.Array, theirs: jax.Array) -> jax.Array:
    """The mean Kullback-Leibler divergence of the distributions that logits stand for, in nats.

    >>> divergence(jnp.zeros((1, 2)), jnp.log(jnp.array([[0.5, 0.5]]))).item()
    0.0
    """
    log_p, log_q = (jax.nn.log_softmax(logits.astype(jnp.float32)) for logits in (theirs, mine))
    p = jnp.exp(log_p)
    return jnp.mean(jnp.sum(jnp.where(p == 0, 0.0, p * (log_p - log_q)), axis=-1))


def distill(
    forward: Callable[[Any, Any], Any],
    dense: Any,
    packed: Any,
    batches: Iterable[Any],
    *,
    steps: int,
    learning_rate: float = 1e-3,
    norms: bool = False,
    loss: Loss = divergence,
    progress: Callable[[int, float], None] | None = None,
) -> Any:
    """Train the scales of a quantized model until its output follows that of the dense one; codes stay as they are.

    Products are computed, and differentiated, on the codes: no dense copy of a packed matrix is formed. Scales keep
    their dtype, and those that are quantized themselves (`double_quant`) are quantized again at the end. Arrays whose
    scales are bytes (mxfp4, mxfp8, nvfp4), or that have none, stay as they are, and a warning names them.

    Args:
        forward: `forward(params, batch)` gives logits (..., vocabulary), or whatever `loss` takes.
        dense: the parameters to follow, or a function of a batch that gives their output.
        packed: the same model with quantized arrays. It stays usable.
        batches: what `forward` takes; from the beginning again when there are fewer than `steps`.
        steps: how many batches to train on.
        learning_rate: of Adam, relative to each scale; it falls to 0 along a cosine.
        norms: train the weights of norms, too.
        loss: of the output and that of the dense model; by default the mean KL divergence of the two distributions.
        progress: called with the number of steps done and the loss of the last one.
    """
    if not isinstance(steps, int) or steps < 1:
        raise ValueError(f"steps={steps!r} is not allowed; give a number of batches to train on, 1 or more.")
    if not (math.isfinite(learning_rate) and learning_rate > 0):
        raise ValueError(f"learning_rate={learning_rate!r} is not allowed; give a positive number, such as 1e-3.")
    check_batches(batches)
    check_alive(dense, "dense")
    check_alive(packed, "packed")
    tree = open_tree(packed)
    model = _Model(tree, norms)
    values = [leaf.value for leaf in tree.leaves]
    given = itertools.cycle(batches)
    follow = dense if callable(dense) else functools.partial(jax.jit(implicit(forward)), dense)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: Any, number: Any, rate: Any, values: Any, batch: Any, wanted: Any) -> tuple[Any, jax.Array]:
        def cost(trained: Any) -> jax.Array:
            return loss(implicit(forward)(tree.rebuild(model.moved(values, trained)), batch), wanted)

        trained, *averages = state
        found, gradient = jax.value_and_grad(cost)(trained)
        return _adam(trained, gradient, averages, number + 1, rate), found

    zeros = model.start(values)
    state = (zeros, jax.tree.map(jnp.zeros_like, zeros), jax.tree.map(jnp.zeros_like, zeros))
    for number in range(steps):
        try:
            batch = next(given)
        except StopIteration:
            raise ValueError("batches is empty; give what forward takes, such as arrays of tokens.") from None
        rate = learning_rate * 0.5 * (1 + math.cos(math.pi * number / steps))
        state, found = step(state, jnp.float32(number), jnp.float32(rate), values, batch, follow(batch))
        if not math.isfinite(now := float(found)):
            raise ValueError(
                f"the loss of step {number + 1} is {now}: the output of a model is not finite, or learning_rate="
                f"{learning_rate} is too large."
            )
        if progress is not None:
            progress(number + 1, now)
    return tree.rebuild(model.stored(values, state[0]))


def _adam(values: Any, gradient: Any, averages: Any, number: Any, rate: Any) -> Any:
    """One step of Adam; `number` counts from 1."""
    means, squares = averages
    means = jax.tree.map(lambda m, g: _FIRST * m + (1 - _FIRST) * g, means, gradient)
    squares = jax.tree.map(lambda s, g: _SECOND * s + (1 - _SECOND) * g * g, squares, gradient)

    def moved(value: Any, mean: Any, square: Any) -> Any:
        mean, square = mean / (1 - _FIRST**number), square / (1 - _SECOND**number)
        return value - rate * mean / (jnp.sqrt(square) + _TINY)

    return jax.tree.map(moved, values, means, squares), means, squares


class _Model:
    """Which numbers of a model are trained: for every leaf, the pieces that are, by the name of their changes.

    An array that appears twice (tied weights) has one name.
    """

    def __init__(self, tree: Tree, norms: bool):
        self.names: list[dict[int, str]] = []
        known: dict[int, str] = {}
        skipped: dict[str, str] = {}
        for leaf, role in zip(tree.leaves, roles_of(tree.leaves), strict=True):
            found: dict[int, str] = {}
            if isinstance(leaf.value, LoraArray):
                skipped[leaf.path] = "it is the frozen weight of an adapter: distill first, then add adapters"
                self.names.append(found)
                continue
            for i, piece in enumerate(pieces(leaf.value)[0]):
                if isinstance(piece, QuantizedArray):
                    if why := obstacle(piece):
                        skipped[leaf.path] = why
                        continue
                elif not (norms and role.kind == "norm" and _is_floating(piece)):
                    continue
                found[i] = known.setdefault(id(piece), f"{leaf.path}:{i}")
            self.names.append(found)
        if not known:
            why = "; ".join(f"{path!r} is left out because {reason}" for path, reason in list(skipped.items())[:3])
            raise ValueError(f"packed has no scales that can be trained. {why or 'It holds no quantized array.'}")
        if skipped:
            path, why = next(iter(skipped.items()))
            more = f" (and {len(skipped) - 1} more)" if len(skipped) > 1 else ""
            warnings.warn(f"{path!r}{more} stays as it is, because {why}.", CalibrationWarning, stacklevel=3)

    def start(self, values: list[Any]) -> dict[str, Any]:
        """The changes at first, by name."""
        made = {}
        for value, names in zip(values, self.names, strict=True):
            held = pieces(value)[0]
            for i, name in names.items():
                is_array = isinstance(held[i], QuantizedArray)
                made[name] = first_changes(held[i]) if is_array else jnp.zeros(held[i].shape, jnp.float32)
        return made

    def moved(self, values: list[Any], trained: dict[str, Any]) -> list[Any]:
        """The leaves with numbers that can be differentiated."""
        return self._replaced(values, trained, lambda piece, name: changed(piece, trained[name]))

    def stored(self, values: list[Any], trained: dict[str, Any]) -> list[Any]:
        """The leaves with numbers as they are stored; what was one array before is one array again."""
        made: dict[str, Any] = {}

        def once(piece: Any, name: str) -> Any:
            if name not in made:
                made[name] = settled(piece, trained[name])
            return made[name]

        return self._replaced(values, trained, once)

    def _replaced(self, values: list[Any], trained: dict[str, Any], change: Callable[[Any, str], Any]) -> list[Any]:
        results = []
        for value, names in zip(values, self.names, strict=True):
            held, structure = pieces(value)
            for i, name in names.items():
                piece = held[i]
                held[i] = change(piece, name) if isinstance(piece, QuantizedArray) else _norm(piece, trained[name])
            results.append(structure.unflatten(held) if names else value)
        return results


def _is_floating(value: Any) -> bool:
    return hasattr(value, "dtype") and jnp.issubdtype(value.dtype, jnp.floating)


def _norm(weight: jax.Array, change: jax.Array) -> jax.Array:
    """A norm's weights with a change in units of their root mean square (of 1 where they are zeros)."""
    wide = weight.astype(jnp.float32)
    size = jnp.sqrt(jnp.mean(wide * wide))
    return (wide + jnp.where(size == 0, 1.0, size) * change).astype(weight.dtype)
