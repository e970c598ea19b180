"""An operation of the compute layer, declared once: everything JAX has to know of its primitive.

Products, grouped products, lookups, attention and the NF4 encoder are declarations. The operands of the first three end
with the scale, which is left out where there is none; behind it there may be an offset or a factor, and the scale of x.
Implementations take them in the same order, but for offset and factor, which have names: `offset=`, `factor=`.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from eformer._jax import avals, primitives
from eformer._jax.primitives import Primitive, ad, batching
from eformer._record import record, recording
from eformer.errors import QuantizedGradientError

from .parameters import Parameters, Problem
from .select import Candidate, Choice, choose, default_platform, switches

_config: Any = jax.config
PLATFORMS = ("cpu", "cuda", "rocm", "tpu")

NO_GRADIENT = """\
a gradient with respect to the {what} of a quantized {fmt} matrix was requested: rounding has no useful derivative.
Keep the quantized array out of the differentiated arguments and train a low-rank update (LoRA) next to it, or keep the
dense weight and quantize it in the forward pass with `straight_through`. For rows written into a QuantizedCache: train
with a dense cache, or write `jax.lax.stop_gradient(rows)`."""

Axes = Sequence[tuple[Any, int]]  # (operand, axis): what an axis of the result is sharded like


@dataclasses.dataclass(eq=False)
class Operation:
    """What differs between operations; the rest is here.

    `operands` names them. `result` gives the shape and dtype of every result from the parameters and the operands,
    `problem` what `candidates` choose by, `batch` the rule of vmap. `arrange` brings operands to the shape candidates
    take, and the result back. `split` computes a part of a program that XLA cuts up for several devices. `sharded_like`
    gives, for every axis of the result, where its explicit sharding comes from. `derivative` is "linear" (in the first
    operand; the transpose is the other form), "refused", or a rule of its own. A product that rounds its first operand
    has the derivative of the one that does not; `fold` prepares the transpose of one whose gradient is rounded. What is
    linear in the scale as well has `scale_gradient`: the gradient with respect to it, given the parameters, the
    gradient of the result, the other operands and the type of the scale. `correction` is what an offset adds to the
    result; without it, only candidates that take offsets are asked.
    """

    name: str
    operands: tuple[str, ...]
    result: Callable[..., Any]
    problem: Callable[..., Problem]
    candidates: tuple[Candidate, ...]
    batch: Callable[..., tuple[Any, Any]]
    split: Callable[..., Any]
    sharded_like: Callable[..., Axes] = lambda parameters, *operands: ()
    arrange: Callable[..., Any] = lambda run, problem, *operands: run(problem, *operands)
    derivative: str | Callable[..., tuple[Any, Any]] = "linear"
    fold: Callable[..., Any] = lambda parameters, ct, *others: (ct, *others)
    multiple_results: bool = False
    scale_gradient: Callable[..., Any] | None = None
    correction: Callable[..., jax.Array] | None = None

    def __post_init__(self) -> None:
        self.primitive = Primitive(f"eformer_{self.name}")
        self.primitive.multiple_results = self.multiple_results
        self.primitive.def_abstract_eval(self._types)
        self.primitive.def_impl(self._evaluate)
        ad.primitive_jvps[self.primitive] = self._jvp if isinstance(self.derivative, str) else self.derivative
        if self.derivative == "linear":
            ad.primitive_transposes[self.primitive] = self._transpose
        batching.primitive_batchers[self.primitive] = self._batched
        primitives.define_series(self.primitive, self._series)
        for platform in PLATFORMS:
            primitives.define_platform_lowering(self.primitive, platform, functools.partial(self._program, platform))

    def bind(self, parameters: Parameters, *operands: Any, out: Any = None, announced: bool = False) -> Any:
        """Apply the primitive; `explain` records it, unless the operation being transformed already did."""
        operands = operands[:-1] if operands[-1] is None else operands
        if not announced and recording():
            self.announce(self.problem(parameters, default_platform(), *operands))
        if out is None and not avals.typed_by_a_mesh(*operands):
            return self.primitive.bind(*operands, parameters=parameters)
        out = _sharding_of_result(self.sharded_like(parameters, *operands)) if out is None else out
        apply: Any = functools.partial(self.primitive.bind, parameters=parameters)
        agreeing = avals.agree(*operands)
        if out is not None:
            apply = jax.sharding.auto_axes(apply, axes=avals.explicit_axes(), out_sharding=out)
        return apply(*agreeing)

    def choice(self, problem: Problem) -> Choice:
        """What would compute this problem, and why the others would not."""
        return choose(self.candidates, problem, self.correction is not None)[1]

    def announce(self, problem: Problem, choice: Choice | None = None) -> None:
        choice = choice or self.choice(problem)
        facts = {"op": self.name, "name": choice.name, "reason": choice.reason, "rejected": choice.rejected}
        record("kernel", **facts, problem=problem)

    def compute(self, problem: Problem, *operands: Any) -> Any:
        chosen = choose(self.candidates, problem, self.correction is not None)[0]
        if not problem.extras and not problem.stores_scale:
            return self.arrange(chosen.run, problem, *operands)
        return self.arrange(functools.partial(self._with_extras, chosen), problem, *operands)

    def _with_extras(self, chosen: Candidate, problem: Problem, *operands: Any) -> Any:
        """What belongs to the scale is handed over by name, and stored scales as the implementation takes them."""
        at, names = len(self.operands), problem.extras
        extras = dict(zip(names, operands[at : at + len(names)], strict=True))
        others = [*operands[:at], *operands[at + len(names) :]]
        if problem.offset is None or chosen.takes_offsets(problem):
            seen, others[at - 1], extras = chosen.given(problem, others[at - 1], extras)
            return chosen.run(seen, *others, **extras)
        assert self.correction is not None  # or the candidate would have been refused
        y = chosen.run(problem.symmetric(), *others)
        return (y + self.correction(problem, *operands)).astype(problem.out_dtype)

    def _names(self, parameters: Parameters) -> tuple[str, ...]:
        """Of the operands, but for the scale of x."""
        return (*self.operands, *parameters.extras)

    def _types(self, *operands: Any, parameters: Parameters) -> Any:
        made = self.result(parameters, *operands)
        types = [avals.result_type(shape, dtype, operands[0]) for shape, dtype in made]
        return types if self.multiple_results else types[0]

    def _jvp(self, primals: Any, tangents: Any, *, parameters: Parameters) -> tuple[Any, Any]:
        linear = {"x"} if self.derivative == "linear" else set[str]()
        if parameters.by_scale and self.scale_gradient is not None:
            linear.add("scale")
        y, changes, names = self.bind(parameters, *primals, announced=True), [], self._names(parameters)
        for i, (what, tangent) in enumerate(zip(names, tangents, strict=False)):
            if isinstance(tangent, ad.Zero):
                continue
            if what not in linear:
                raise QuantizedGradientError(NO_GRADIENT.format(what=what, fmt=parameters.fmt))
            held = primals[: len(names)]  # without the scale of x
            changes.append(self.bind(parameters.linear(), *held[:i], tangent, *held[i + 1 :], announced=True))
        return y, sum(changes[1:], changes[0]) if changes else ad.Zero(jax.typeof(y).to_tangent_aval())

    def _series(self, primals: Any, series: Any, *, parameters: Parameters) -> tuple[Any, Any]:
        """`jet`: products are linear in x and in scales (with biases), lookups in these, and the encoder is a step."""
        y = self.bind(parameters, *primals, announced=True)
        if not isinstance(self.derivative, str):
            return y, [[jnp.zeros_like(part) for _ in series[0]] for part in y]
        names = self._names(parameters)
        held = primals[: len(names)]  # without the scale of x
        floats = [i for i, operand in enumerate(held) if jnp.issubdtype(operand.dtype, jnp.inexact)]
        together = [[i for i in floats if names[i] in group] for group in (("x",), ("scale", "offset"), ("factor",))]
        moving = [group for group in together if group]

        def term(order: int) -> Any:
            """The sum over all ways in which the orders of the operands add up to this one."""
            total = jnp.zeros_like(y)
            for orders in itertools.product(range(order + 1), repeat=len(moving)):
                if sum(orders) == order:
                    given = {i: series[i][n - 1] for group, n in zip(moving, orders, strict=True) if n for i in group}
                    operands = (given.get(i, operand) for i, operand in enumerate(held))
                    total += self.bind(parameters.linear(), *operands, announced=True)
            return total

        return y, [term(order + 1) for order in range(len(series[0]))]

    def _transpose(self, ct: Any, *operands: Any, parameters: Parameters) -> list[Any]:
        """Of the operand that is not known, which is x, or the scale."""
        found: list[Any] = [None] * len(operands)
        at = next(i for i, operand in enumerate(operands) if ad.is_undefined_primal(operand))
        if isinstance(ct, ad.Zero):
            found[at] = ad.Zero(operands[at].aval)
        elif at == 0:
            transposed = parameters.transposed(operands[0].aval.dtype)
            found[0] = self.bind(transposed, *self.fold(transposed, ct, *operands[1:]))
        else:
            assert self.scale_gradient is not None  # or it would have been refused
            found[at] = self.scale_gradient(parameters, ct, *operands[:at], operands[at].aval)
        return found

    def _batched(self, operands: Any, dims: Any, *, parameters: Parameters) -> tuple[Any, Any]:
        return self.batch(functools.partial(self.bind, parameters, announced=True), parameters, operands, dims)

    def _evaluate(self, *operands: Any, parameters: Parameters) -> Any:
        jitted = self._jitted(switches(), parameters)
        if not _config.jax_disable_jit:
            return jitted(*operands)
        with jax.disable_jit(False):  # or the jitted function would ask for its own evaluation
            return jitted(*operands)

    # Native kernels may be turned off between two programs, so the state of the switches is part of what is remembered.
    @functools.lru_cache(maxsize=4096)  # noqa: B019 - operations live as long as the library
    def _jitted(self, native: tuple[bool, bool], parameters: Parameters) -> Any:
        del native
        return jax.jit(lambda *operands: self.primitive.bind(*operands, parameters=parameters))

    def _program(self, platform: str, split: bool, *, parameters: Parameters) -> Any:
        return self._built(switches(), platform, split, parameters)

    @functools.lru_cache(maxsize=4096)  # noqa: B019
    def _built(self, native: tuple[bool, bool], platform: str, split: bool, parameters: Parameters) -> Any:
        """A jitted function, remembered, so that equal operations in one program share one computation.

        Where XLA splits the program over devices, it must not call native code on its own.
        """

        def run(*operands: Any) -> Any:
            problem = self.problem(parameters, platform, *operands)
            if split and not problem.is_empty:
                return self.split(self, problem, *operands)
            return self.compute(problem, *operands)

        run.__name__ = self.primitive.name
        if split:  # JAX's cache of compiled programs on disk sees of a computation that XLA splits only its name
            run.__name__ += f"_{hashlib.sha256(repr((native, parameters)).encode()).hexdigest()[:16]}"
        return jax.jit(run)


def one_after_another(bind: Any, parameters: Parameters, operands: Any, dims: Any) -> tuple[Any, int]:
    """A batching rule: a loop over what is mapped."""
    del parameters
    mapped = [None if d is None else jnp.moveaxis(o, d, 0) for o, d in zip(operands, dims, strict=True)]

    def one(values: list[Any]) -> Any:
        return bind(*(o if v is None else v for o, v in zip(operands, values, strict=True)))

    return lax.map(one, mapped), 0


# -- meshes whose axes are part of the types: state the sharding of the result, then let XLA split ---------------------


def _sharding_of_result(axes: Sequence[tuple[Any, int]]) -> NamedSharding | None:
    """The sharding of a result each axis of which is sharded as an axis of an operand, given as (operand, axis).

    None unless an operand has an explicit sharding.
    """
    shardings = {id(value): avals.explicit_sharding_of(value) for value, _ in axes}
    known = next((sharding for sharding in shardings.values() if sharding is not None), None)
    if known is None:
        return None
    entries = [_entries(shardings[id(value)], value.ndim)[axis] for value, axis in axes]
    used: set[str] = set()
    return NamedSharding(known.mesh, PartitionSpec(*(_unused(entry, used) for entry in entries)))


def _entries(sharding: Any, ndim: int) -> tuple[Any, ...]:
    spec = () if sharding is None else tuple(sharding.spec)
    return (*spec, *[None] * (ndim - len(spec)))


def _unused(entry: Any, used: set[str]) -> Any:
    """An axis can split one dimension only: the first one keeps it."""
    axes = avals.mesh_axes(entry)
    if used.intersection(axes):
        return None
    used.update(axes)
    return entry
