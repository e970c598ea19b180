"""Whole models, a leaf at a time: `quantize_tree`, `dequantize_tree`, and `fake_quantize_tree` for training (QAT)."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from eformer._core import ImplicitArray, materialize, ste
from eformer._core.materialization import name_array
from eformer._jax import traces
from eformer._table import printable

from .config import QuantizationConfig, options_in_rules, quantize_stack
from .inputs import bare
from .leaves import nbytes_of, open_tree
from .methods import Chosen, Folding, choose
from .plan import MIN_SIZE, SKIP, Choice, Decision, Plan, plan
from .statistics import Statistics, check_statistics


@dataclasses.dataclass(frozen=True)
class Progress:
    """Where a run stands: bytes of input that are done, out of how many, and the leaf it did last."""

    name: str
    done: int
    total: int


Reporter = Callable[[Progress], None]
Schedule = Callable[[Any], jax.Array]


@contextlib.contextmanager
def reporter(progress: Reporter | bool | None, title: str) -> Iterator[Reporter]:
    """A function to call after each leaf.

    `progress` is that function, or True for a bar, False for nothing, None for a bar if stderr is a terminal.
    """
    if progress is None:
        progress = sys.stderr.isatty() and importlib.util.find_spec("rich") is not None
    plain = progress if callable(progress) else lambda step: None
    with _bar(title) if progress and not callable(progress) else contextlib.nullcontext(plain) as update:
        yield update


@contextlib.contextmanager
def _bar(title: str) -> Iterator[Reporter]:
    try:
        import rich.console
        import rich.progress as bars
    except ImportError as err:
        raise ImportError("progress=True draws a bar with rich, which is not installed: pip install rich.") from err
    columns = (
        bars.TextColumn("{task.description}"),
        bars.BarColumn(),
        bars.DownloadColumn(),
        bars.TimeRemainingColumn(),
        bars.TextColumn("{task.fields[leaf]}", markup=False),
    )
    with bars.Progress(*columns, console=rich.console.Console(stderr=True), transient=True) as shown:
        task = shown.add_task(title, total=None, leaf="")
        yield lambda step: shown.update(task, completed=step.done, total=step.total, leaf=printable(step.name))


@options_in_rules
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
    calibration: Statistics | None = None,
    method: str | None = None,
) -> Any:
    """Quantize the matrices of a model: any pytree, or a Flax NNX module.

    Leaves are taken one after the other. A leaf that appears twice (tied weights) is quantized once, as its first path
    asks, and appears twice again; where another path keeps it, it stays dense there. Leaves already quantized stay as
    they are, and are refused where rules or `default` ask for another format.

    Args:
        params: the model or its parameters. Leaves may be NumPy arrays (memory-mapped ones too).
        rules: ordered `pattern -> format`, the first match decides: a mapping or pairs. A pattern is a glob over paths
            such as "layers/0/mlp/kernel", or a regular expression after "re:". A format is a name, a
            `QuantizationConfig`, a mapping of their options, or None to keep the leaf. One format alone replaces
            `default`. What `plan_bits` returned will do as well. Rules without effect are named in a warning.
        default: for leaves that no rule matches; None keeps them.
        min_size: matrices with fewer values stay as they are, whatever rules say.
        skip: groups that stay as they are, whatever rules say: any of norms, biases, routers, positions, constants
            (scales, masks, frequencies, tokens), unsure (what may be no operand of a product; `plan_tree` says why),
            heads, embeddings, convolutions.
        abstract: compute nothing and give `jax.ShapeDtypeStruct` leaves; the leaves of `params` may be such, too.
        donate: free every JAX array that was quantized and that no result keeps, so that memory never holds the model
            twice. `params` cannot be used afterwards.
        progress: called with a `Progress` after each leaf; True for a bar, False for none, None for one in terminals.
        calibration: what the matrices are multiplied with, from `eformer.calibrate`.
        method: how codes and scales are chosen where rules do not say (`{"*up*": {"dtype": "nf4", "method": "awq"}}`):
            "round" to the nearest, for the largest value of every block; "scale" searches for scales of the least
            error, weighted by the inputs if there are statistics; "gptq" makes later inputs answer for the errors of
            earlier ones, too, as far as tokens suffice to know how; "awq" multiplies inputs by factors first, which the
            norm before takes over or the array carries; "awq+gptq" does both. By default "round"; with statistics
            "gptq", or "scale" where they hold diagonals only. A leaf without statistics is rounded, with a warning.

    >>> params = {"dense": {"kernel": jnp.ones((64, 64)), "bias": jnp.zeros(64)}}
    >>> quantize_tree(params)["dense"]["kernel"]
    ArrayNF4(float32[64,64], nf4, 4.50 bits per weight)
    """
    check_statistics(calibration, "calibration")
    tree = open_tree(params)
    planned = plan(tree.leaves, rules, default=default, min_size=min_size, skip=skip)
    planned.warn()
    decisions = planned.decisions
    folding = Folding(decisions, choose(decisions, calibration, method), calibration)
    if abstract:
        chosen = folding.abstract()
        return tree.rebuild(_abstract(d, chosen) for d in decisions)
    shapes = [d.leaf.path for d in decisions if isinstance(d.leaf.value, jax.ShapeDtypeStruct) and d.config is not None]
    if shapes:
        raise TypeError(
            f"{shapes[0]!r} is a jax.ShapeDtypeStruct, which has no values to quantize. For the shapes of the result, "
            "call quantize_tree(..., abstract=True)."
        )
    total = sum(nbytes_of(d.leaf.value) for d in decisions if d.config is not None)
    arrays = _alive(decisions)
    done, made, kept, results = 0, {}, _kept(decisions), []
    with reporter(progress, "quantizing") as tell:
        for decision in decisions:
            value = decision.leaf.value
            if decision.config is not None:
                if id(value) not in made:
                    freed = donate and (not kept or kept.isdisjoint(_memory(value)))
                    made[id(value)] = _quantized(decision, freed, folding.ready(decision.leaf.path))
                    made |= {id(x): made[id(value)] for x in arrays if x.is_deleted() and id(x) not in made}
                done += nbytes_of(value)
                value = made[id(value)]
                tell(Progress(decision.leaf.path, done, total))
            results.append(value)
    return tree.rebuild(folding.vectors.get(d.leaf.path, x) for d, x in zip(decisions, results, strict=True))


def plan_tree(params: Any, rules: Any = None, **options: Any) -> Plan:
    """What `quantize_tree` would do with every leaf, and why: arguments are the same. Prints as a table.

    >>> print(plan_tree({"norm": {"scale": jnp.ones(64)}, "dense": {"kernel": jnp.ones((64, 64))}}))
    path          format  why
    dense/kernel  nf4     role: kernel
    norm/scale    dense   it is a norm
    """
    return plan(open_tree(params).leaves, rules, **options)


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


# Two arrays may share memory, as those that `device_put` makes of tied weights do: to free one frees both.


def _alive(decisions: Sequence[Decision]) -> list[jax.Array]:
    """The JAX arrays to quantize; raises if one of them has been freed."""
    found = {d.leaf.path: d.leaf.value for d in decisions if d.config is not None and traces.is_concrete(d.leaf.value)}
    _check_alive(found)
    return list(found.values())


def check_alive(params: Any, name: str) -> None:
    """Raise if an array of `params` has been freed."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    _check_alive({name + jax.tree_util.keystr(path): x for path, x in leaves if traces.is_concrete(x)})


def _check_alive(arrays: Mapping[str, jax.Array]) -> None:
    lost = [path for path, value in arrays.items() if value.is_deleted()]
    if lost:
        raise ValueError(
            f"{lost[0]!r} was freed before (is_deleted() is true), as quantize_tree and jit free what is donated to "
            "them. Use what they returned, or pass donate=False to the first quantize_tree."
        )


def _kept(decisions: Sequence[Decision]) -> set[Any]:
    """The memory of arrays that stay, alone or inside an implicit array, and that may be one of those to quantize."""
    shapes = {_look(d.leaf.value) for d in decisions if d.config is not None}
    stay = [x for d in decisions if d.config is None for x in jax.tree.leaves(d.leaf.value) if _look(x) in shapes]
    return {place for x in stay for place in _memory(x)}


def _look(value: Any) -> Any:
    return str(getattr(value, "shape", None)), str(getattr(value, "dtype", None))


def _memory(value: Any) -> list[Any]:
    """What identifies the memory of an array: addresses where it has some, else the object itself."""
    if not traces.is_concrete(value) or value.is_deleted():
        return [id(value)]
    return [(shard.device, shard.data.unsafe_buffer_pointer()) for shard in value.addressable_shards] or [id(value)]


def _quantized(decision: Decision, donate: bool, how: Chosen) -> Any:
    value, config = decision.leaf.value, cast(QuantizationConfig, decision.config)
    ours = not isinstance(value, jax.Array)  # a copy on the device that only we hold
    try:
        dense = jnp.asarray(np.asarray(value, _native(value))) if ours else value
        made = how.encode(dense, config, decision)
    except (TypeError, ValueError) as err:
        err.add_note(f"while quantizing {decision.leaf.path!r} as {config}")
        raise
    if isinstance(made, ImplicitArray):
        name_array(made, decision.leaf.path, how.note)
    if (donate or ours) and not isinstance(dense, traces.Tracer) and made is not dense:
        jax.block_until_ready(jax.tree.leaves(made))
        dense.delete()
    return made


def _native(value: Any) -> np.dtype:
    """The dtype of an array in the byte order of this machine, the only one JAX knows."""
    return np.dtype(value.dtype).newbyteorder("=")


def _abstract(decision: Decision, chosen: Mapping[str, Chosen]) -> Any:
    value, config = decision.leaf.value, decision.config
    if isinstance(value, ImplicitArray) or not hasattr(value, "shape") or not hasattr(value, "dtype"):
        return jax.tree.map(_struct, value) if isinstance(value, ImplicitArray) else value
    if config is None:
        return _struct(value)
    dtype = jax.dtypes.canonicalize_dtype(_native(value))
    how = chosen[decision.leaf.path]
    return jax.eval_shape(lambda w: how.encode(w, config, decision), jax.ShapeDtypeStruct(value.shape, dtype))


def _struct(value: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=getattr(value, "sharding", None))


@options_in_rules
def fake_quantize_tree(
    params: Any,
    rules: Any = None,
    *,
    default: Choice = "nf4",
    min_size: int = MIN_SIZE,
    skip: Iterable[str] = SKIP,
    strength: Any = 1.0,
) -> Any:
    """`dequantize_tree(quantize_tree(params, ...))`, bit for bit, differentiated as the identity.

    Call it on the trained parameters inside the loss. `strength` blends: 0 gives the parameters themselves, 1 their
    quantized values; a schedule such as `quant_delay` makes it grow with the step.

    >>> params = {"kernel": jnp.linspace(-1.0, 1.0, 4096).reshape(64, 64)}
    >>> len(jnp.unique(fake_quantize_tree(params)["kernel"][:, 0])), len(jnp.unique(params["kernel"][:, 0]))
    (16, 64)
    """
    tree = open_tree(params)
    planned = plan(tree.leaves, rules, default=default, min_size=min_size, skip=skip)
    planned.warn()
    results = []
    for decision in planned.decisions:
        value = decision.leaf.value
        if decision.config is not None:
            real = bare(dataclasses.replace(decision.config, simulate=False))
            value = _blend(value, real, decision.role.batch, jnp.asarray(strength, jnp.float32))
        results.append(value)
    return tree.rebuild(results)


@ste
def _blend(value: Any, config: QuantizationConfig, batch: int, strength: jax.Array) -> Any:
    dense = quantize_stack(value, config, batch).materialize()
    # Not `value + 1 * (dense - value)`: at full strength the values are those of the quantized model, to the bit.
    mixed = (1 - strength) * value + strength * dense
    return jnp.where(strength >= 1, dense, mixed.astype(dense.dtype))


def quant_delay(delay: int, ramp: int = 0) -> Schedule:
    """A schedule for `fake_quantize_tree(strength=...)`: 0 for `delay` steps, then linearly to 1 within `ramp` steps.

    Training starts dense and meets the quantized values once the weights have settled.

    >>> schedule = quant_delay(2, ramp=2)
    >>> [float(schedule(step)) for step in range(6)]
    [0.0, 0.0, 0.5, 1.0, 1.0, 1.0]
    """
    for name, value in (("delay", delay), ("ramp", ramp)):
        if value < 0:
            raise ValueError(f"{name}={value} is not allowed; give a number of steps, 0 or more.")

    def schedule(step: Any) -> jax.Array:
        begun = jnp.asarray(step, jnp.float32) - delay + 1
        return jnp.clip(begun / max(ramp, 1), 0.0, 1.0)

    return schedule
