"""`calibrate`: run a model on batches and record what its matrices are multiplied with.

The function is traced to a program, as `jax.jit` does, and the program is run with further results: see `frame`. So the
model sees ordinary arrays, no value leaves a loop by another way than as its result, and every framework is the same.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from pathlib import Path
from typing import Any

import jax

from eformer._core import ImplicitArray
from eformer._formats.arguments import FLOATS
from eformer._quantize.leaves import Tree, open_tree
from eformer._quantize.plan import Rules
from eformer._quantize.statistics import Statistics
from eformer._quantize.tree import Progress, Reporter, check_alive, reporter
from eformer.errors import CalibrationError

from .accumulate import Accumulator
from .model import Model

_ORDER = "The order is calibrate(forward, params, batches)."
_DENSE = "Calibrate the dense parameters, before quantizing them."


def calibrate(
    forward: Callable[[Any, Any], Any],
    params: Any,
    batches: Iterable[Any],
    *,
    rules: Any = None,
    diagonal_only: bool = False,
    directory: str | os.PathLike[str] | None = None,
    progress: Reporter | bool | None = False,
) -> Statistics:
    """Run `forward(params, batch)` on every batch and record the second moment of what each matrix is multiplied with.

    Any model works: plain functions, Linen, NNX and Equinox modules, Haiku. `forward` is traced as by `jax.jit`, and
    products inside scans, loops, branches, `vmap`, `remat`, `shard_map` and inner `jit`s are seen. Statistics are kept
    per layer of a stack that is scanned, indexed or mapped, and per expert of batched and grouped products.

    The floating-point matrices of `params` are observed; quantized leaves are used but not observed. A warning names
    leaves that no product uses; a leaf that is only looked up, such as an embedding, needs no statistics.

    Args:
        forward: a function of `params` and a batch; its result is not used.
        params: the model or its parameters.
        batches: any iterable; arrays in a batch are traced, other leaves are constants. Each new shape is compiled.
        rules: which leaves to observe. Rules as for `quantize_tree`: a leaf that a rule keeps (None) is not observed. A
            pattern, or a list of patterns: only what they match is.
        diagonal_only: record only sums of squares instead of whole moments, which is cheaper and smaller.
        directory: an empty folder (created if needed) that holds the numbers, memory-mapped; `Statistics.load` opens
            it again.
        progress: called with a `Progress` after each batch; True draws a bar.

    >>> import jax.numpy as jnp
    >>> params = {"w": jnp.ones((2, 3))}
    >>> stats = calibrate(lambda p, x: x @ p["w"], params, [jnp.array([[1.0, 2.0], [3.0, 4.0]])])
    >>> stats["w"].moment
    array([[10., 14.],
           [14., 20.]])
    """
    check_batches(batches)
    check_alive(params, "params")
    tree = open_tree(params)
    model = Model(forward, tree, _observed(tree, rules), diagonal_only)
    sums = Accumulator(tree, None if directory is None else _empty(directory))
    number, done = 0, 0
    count = len(batches) if isinstance(batches, Sized) else None
    with reporter(progress, "calibrating") as tell:
        for number, batch in enumerate(batches, start=1):
            for found in model.run(batch):
                sums.add(found, number - 1)
            done += sum(x.nbytes for x in jax.tree.leaves(batch) if hasattr(x, "nbytes"))
            tell(Progress(f"batch {number}", done, done if count is None else done * count // number))
    if not number:
        raise CalibrationError("there are no batches: give at least one (is an iterator used up?).")
    if not sums.seen and _is_packed(tree):
        raise CalibrationError(f"no product has a dense matrix: those of params are quantized. {_DENSE}")
    model.warn(sums.seen)
    return sums.statistics(model.observed, model.first, model.folds())


def check_batches(batches: Any) -> None:
    """Raise if this is one batch: going through an array gives its rows."""
    if isinstance(batches, Mapping) or hasattr(batches, "shape"):
        what = "a mapping" if isinstance(batches, Mapping) else f"an array of shape {tuple(batches.shape)}"
        raise TypeError(f"batches is {what}, which looks like one batch; give a list of batches: [batch].")


def _observed(tree: Tree, rules: Any) -> dict[int, str]:
    """The leaves to observe, by their number, with their paths."""
    wanted = _wanted(rules, [leaf.path for leaf in tree.leaves])
    found = {}
    for number, leaf in enumerate(tree.leaves):
        value = leaf.value
        if isinstance(value, jax.ShapeDtypeStruct):
            raise TypeError(f"{leaf.path!r} is a jax.ShapeDtypeStruct, which has no values to run a model with.")
        if isinstance(value, ImplicitArray) or not hasattr(value, "dtype") or value.dtype.name not in FLOATS:
            continue
        if value.ndim >= 2 and 0 not in value.shape and wanted(leaf.path):
            found[number] = leaf.path
    if not found:
        asked = f" that rules={rules!r} ask for" if rules is not None else ""
        fix = _DENSE if _is_packed(tree) else _ORDER
        raise CalibrationError(f"params holds no floating-point matrix{asked}. {fix if rules is None else ''}".rstrip())
    return found


def _is_packed(tree: Tree) -> bool:
    return any(isinstance(leaf.value, ImplicitArray) for leaf in tree.leaves)


def _wanted(rules: Any, paths: Sequence[str]) -> Callable[[str], bool]:
    if rules is None:
        return lambda path: True
    patterns: Any = [rules] if isinstance(rules, str) else rules
    if isinstance(patterns, (list, tuple)) and all(isinstance(pattern, str) for pattern in patterns):
        only = Rules([(pattern, "nf4") for pattern in patterns])
        unused = only.unused(paths)
        if unused:
            raise CalibrationError(f"{unused[0]}; paths look like {', '.join(map(repr, list(paths)[:3]))}.")
        return lambda path: only.first(path) is not None
    ordered = Rules(patterns)
    return lambda path: (rule := ordered.first(path)) is None or rule.config is not None


def _empty(directory: str | os.PathLike[str]) -> Path:
    place = Path(directory)
    place.mkdir(parents=True, exist_ok=True)
    if any(place.iterdir()):
        raise CalibrationError(f"directory={str(directory)!r} is not empty; give a new one, or delete what is in it.")
    return place
