"""The long messages of errors and warnings, as templates for `str.format`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])


def shown(value: object) -> str:
    """A value on one short line: an array by its dtype and shape, a container by its type, others by their repr.

    >>> import numpy as np
    >>> shown(np.ones((2, 3))), shown({"a": 1}), shown("nf4")
    ('float64[2,3]', 'a dict of length 1', "'nf4'")
    """
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if isinstance(shape, tuple) and dtype is not None:
        return f"{dtype}[{','.join(map(str, shape))}]"
    if isinstance(value, (dict, list, tuple, set)):
        return f"a {type(value).__name__} of length {len(value)}"
    text = " ".join(repr(value).split())
    return text if len(text) <= 100 else f"{text[:100]}..."


def refuse_other_names(function: Callable[..., Any], given: dict[str, Any], meant: dict[str, str]) -> None:
    for name in given:
        if name in meant:
            hint = meant[name].format(value=shown(given[name]))
            raise TypeError(f"{function.__name__}() has no argument {name}=: {hint}.")


def called_otherwise(**meant: str) -> Callable[[F], F]:
    """Make a function answer arguments that other libraries have with what it has instead.

    >>> @called_otherwise(bits='the format is dtype="int{value}"')
    ... def quantize(w, dtype="nf4"): ...
    >>> quantize(None, bits=4)
    Traceback (most recent call last):
    TypeError: quantize() has no argument bits=: the format is dtype="int4".
    """

    def decorated(function: F) -> F:
        @functools.wraps(function)
        def checked(*args: Any, **kwargs: Any) -> Any:
            refuse_other_names(function, kwargs, meant)
            return function(*args, **kwargs)

        return cast(F, checked)

    return decorated


NOT_A_DATACLASS = """\
{name} derives from ImplicitArray but is not a dataclass of its own, so its fields are unknown.
Decorate it:

    @dataclasses.dataclass
    class {name}(ImplicitArray): ..."""

NO_MATERIALIZE = """\
{name} does not implement materialize(), the method that computes the dense array it stands for.
Add one:

    def materialize(self):
        return ...  # a jax.Array"""

BAD_CHILD = """\
field {field!r} of {name} holds {value!r} of type {kind}, which is not an array.
Children must be arrays (or pytrees of arrays). Static data belongs in auxiliary fields:

    {field}: ... = aux_field()"""

UNHASHABLE_AUX = """\
auxiliary field {field!r} of {name} holds an unhashable {kind}: {value!r}.
Auxiliary data becomes part of compilation keys and must be hashable; store a tuple, a string or a number."""

NEEDS_SHAPE = """\
{name}.materialize() reads self.{what}, which cannot be derived from the children without calling materialize().
Pass {what}= when constructing it, or override compute_{what}() to derive it from the children."""

BELOW_CORE = """\
{name} was sliced below its core rank: its children have ranks {now}, and it was built with ranks {built}{core}.
This happens when vmap, scan or indexing maps over an axis that is not a leading batch axis of every child.
Materialize it first, or declare on the class how many trailing axes belong together:

    core_ndim: ClassVar[int] = 2  # axes in front of the last two are batch axes of every child"""

BELOW_DECLARED_CORE = """\
{name} was sliced below its core rank: its children have ranks {now}, too few for the {core} trailing axes that belong
together (core_ndim={core}).
This happens when vmap, scan or indexing maps over one of those axes. Map over a leading batch axis instead, or let vmap
see the array instead of its parts:

    implicit(jax.vmap(f))(q)"""

MAPPED_CORE = """\
jax.vmap maps over axes of the arrays that {name} stores, and these in_axes do not correspond to one axis of the array
itself. Map over the array itself, with vmap inside implicit,

    implicit(jax.vmap(f, in_axes=...))(q)

or move that axis to the front first."""

SHARDED_STORAGE = """\
jax.shard_map applies {spec} to the arrays that {name} stores, whose axes are not those of the array itself.
Split the array itself, with shard_map inside implicit,

    implicit(jax.shard_map(f, in_specs=...))(q)

or give a spec for every stored array: in_specs=q.child_specs({spec})."""

SHARDED_RESULT = """\
jax.shard_map applies {spec} to the arrays that its result, {name}, stores, whose axes are not those of the array
itself. Give a spec for every stored array; an array shaped like the result on one device provides them,

    out_specs=jax.eval_shape(ef.quantize, one_part).child_specs({spec})

or let the body return a dense array."""

SCANNED_STORAGE = """\
jax.lax.associative_scan takes apart the arrays that {name} stores. Scan the array itself, inside implicit:

    implicit(lambda q: jax.lax.associative_scan(f, q))(q)"""

UNEVEN_BATCH = """\
the children of {name} gained different numbers of leading axes (ranks {now}, built with {built}), so its
shape is ambiguous. Map over all children together, or declare `core_ndim` on the class."""

DECLARED_MISMATCH = """\
{name} was declared with {what}={declared}, but {source} gives {found}.
Leave {what}= out (it follows the children), or correct it."""

TANGENT_AS_ARRAY = """\
the derivative rule of a function was given the tangent of {name}, a pytree, and used it as an array.
Functions with such rules (jax.custom_jvp) take arrays apart unless they are called under `implicit`: implicit(f)(x)."""

NOTHING_TO_TRAIN = """\
split_trainable: there is nothing to train. The model has no adapters (add_lora adds them), and `also=` names no dense
leaves ("*" trains all of them)."""

REFUSED = """\
Refusing to materialize {array} ({dense_bytes:,} bytes dense){path} for {primitive} at {where}: the policy is "error".
{cause}
Otherwise call materialize() explicitly, or relax the policy with materialization_policy("warn")."""

WARNED = """\
materializing {array} ({dense_bytes:,} bytes dense){path} for {primitive}. {cause}
Otherwise call materialize() explicitly, or silence this with materialization_policy("allow") or
warn_on_materialize=False. explain(f)(*args) lists everything that f materializes."""

FORGOTTEN = """\
That function does not know {type}: wrap the call in implicit(...), as in implicit(f)(*args).
Other arrays that become dense in the same call are not reported."""

SHOWN_BY_JAX = " (an array only inside implicit: wrap the call in implicit(...), as in implicit(f)(*args))"

DENSE_ON_ONE_SIDE = """\
{where}{name} meets a dense array where both must have the same type: the input and the output of a loop step, or the
results of all branches. Outside implicit, JAX functions return dense arrays. To keep it packed, wrap the whole call
in implicit(...), as in implicit(f)(*args)."""

LINEN_TAKES_APART = """\
Flax Linen compares the shape {wanted} of parameter {param!r} with the arrays that {name} stores, because the variables
are not passed to a function wrapped in `implicit`. Wrap the call:

    implicit(model.apply)(variables, x)"""

GRADIENT_OF_STORED = """\
a gradient with respect to {name} was requested, which stores integers: rounding has no useful derivative.
Differentiate with respect to what can be trained, and keep the rest out of the differentiated arguments,

    trainable, frozen = ef.split_trainable(params)  # the factors of LoRA; add_lora adds them

or keep the dense weight and quantize it in the forward pass with `straight_through`."""

NO_HANDLER = "No handler keeps it implicit: register one for {primitive!r} on {type}."

CUT = """\
The spec {cut} does not split what it stores into arrays of its type: it cuts a block, a byte or a scale.
Split another axis or use smaller blocks; q.with_sharding(NamedSharding(mesh, spec)) names a size that fits."""

DECLINED = """\
Handler {handler} returned NotImplemented for {params}.
Let it cover them, or register another one for {primitive!r} on {type}."""

WRONG_RESULT = """\
handler {handler} for {primitive} returned {found}, expected {expected}.
The operands were ({operands})."""

UNKNOWN_PRIMITIVE = """\
no JAX primitive is called {name!r}.{hint}
Pass the primitive object itself if it is your own."""

NOT_A_PRIMITIVE = """\
{name!r} is a function, not a JAX primitive. Handlers are registered for the primitives it uses: {made_of}.
Register one of those, as in @register("dot_general")."""

UNACCEPTED_PARAMS = """\
handler {handler} for {primitive} does not accept the parameter{s} {params}.
Add `**params` to its signature (and honour or forward them)."""

AMBIGUOUS = """\
{primitive}({types}) matches several handlers and none is more specific:
{candidates}
Register one for exactly these types, or give one of them a higher precedence=."""

BROKEN_KERNELS = """\
the native {title} kernels in {path} cannot be used: {cause}.
Products with quantized arrays fall back to the tiled XLA path, which is slower. Reinstall eformer for this machine, or
set EFORMER_KERNELS=0 to run without native kernels; `python -m eformer doctor` says more."""

MISSING_KERNELS = """\
eformer: this installation has no native {title} kernels (there was no {compiler} when it was built, or EFORMER_NATIVE \
was OFF), so products with quantized arrays take the tiled XLA path, which is slower. Reinstall eformer where the \
compiler is available, or set EFORMER_KERNELS=0 to hide this message."""
