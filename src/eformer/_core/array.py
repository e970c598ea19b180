"""`ImplicitArray`: the base class of every array that stands for a dense one without storing it."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import functools
import inspect
import math
import operator
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from eformer import _messages, errors
from eformer._jax import callers, traces

from . import forgotten
from . import materialization as _materialization
from . import shape_dtype as _shape_dtype
from .box import box
from .exporting import register_for_export
from .fields import AUX, DECLARED, StaticData, check_mapped, check_result, layout, replaceable_fields, static_data_of
from .operators import ArrayOperators
from .placement import Placement

_CACHES = ("_known", "_aval", "_aux")
_NEVER_CHILDREN = (str, bytes, type, np.dtype)


class OrginArray(abc.ABC):  # noqa: B024 - a registry of types, spelled as documented
    """Types that count as ordinary arrays when annotating handlers; `jax.Array` is registered."""


OrginArray.register(jax.Array)


class _Derived:
    """`shape` or `dtype`: what the instance was told, or what its children say."""

    def __init__(self, index: int):
        self.index = index

    def __set_name__(self, owner: type, name: str) -> None:
        self.slot = f"_{name}"

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self
        known = instance.__dict__.get("_known")
        return _shape_dtype.derived(instance, self.index) if known is None else known[self.index]

    def __set__(self, instance: Any, value: Any) -> None:
        instance.__dict__[self.slot] = value


class _InitSignature:
    """`inspect.signature` of a subclass: that of its `__init__`, which `__new__` would hide."""

    def __get__(self, instance: Any, owner: type) -> inspect.Signature:
        signature = inspect.signature(owner.__init__)
        return signature.replace(parameters=list(signature.parameters.values())[1:])


class _JaxArrayProtocol:
    """`__jax_array__`, shown to jnp functions and hidden from the operators of jax.Array.

    Those operators would convert us before our own reflected operator gets a chance, and dispatch would be lost.
    """

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None or callers.read_by_array_operator():
            return None
        if callers.read_by_array_constructor() and traces.current_trace() is traces.eval_trace:
            return functools.partial(_materialization.materialize_on_request, instance)
        return functools.partial(box, instance)


@dataclasses.dataclass
class _ArrayBase:
    # Typed loosely: a sequence or None going in, always known coming out.
    shape: Any = dataclasses.field(default=None, kw_only=True, metadata={AUX: True})
    dtype: Any = dataclasses.field(default=None, kw_only=True, metadata={AUX: True})


class ImplicitArray(ArrayOperators, Placement, _ArrayBase):
    """A value that behaves like a `jax.Array` and is stored as something else.

    Subclasses are dataclasses. Fields are children (arrays, or pytrees of arrays, implicit ones included) unless made
    with `aux_field`. `materialize()` computes the dense array; handlers registered with `register` spare that work.

    Class keywords: `commute_ops` lets a handler for `(Q, dense)` serve `(dense, Q)` for commutative primitives,
    `warn_on_materialize=False` silences the warning, `frozen` refuses assignment after construction.

    Class attribute `core_ndim`: the trailing logical axes that belong together. Axes in front of them are batch axes:
    leading axis i of the array is leading axis i of every child. Declaring it lets vmap, scan and indexing slice them.
    `compiles_products`: a `dot_general` outside of jit is one compiled call, whose handler runs when JAX traces it.

    >>> import jax.numpy as jnp
    >>> @dataclasses.dataclass
    ... class Scaled(ImplicitArray):
    ...     codes: jax.Array
    ...     scale: jax.Array
    ...     def materialize(self):
    ...         return self.codes * self.scale
    >>> Scaled(jnp.arange(6, dtype="int8").reshape(2, 3), jnp.float32(0.5))
    Scaled(float32[2,3], 10 bytes)
    """

    commute_ops: ClassVar[bool] = True
    warn_on_materialize: ClassVar[bool] = True
    default_shape: ClassVar[Sequence[int] | None] = None
    default_dtype: ClassVar[Any] = None
    core_ndim: ClassVar[int | None] = None
    compiles_products: ClassVar[bool] = False
    weak_type: ClassVar[bool] = False
    _frozen: ClassVar[bool] = False
    # Which of (shape, dtype) instances remember; None: whatever `materialize` turns out to need.
    _remembers: ClassVar[Any] = None
    __array_priority__: ClassVar[int] = 2000

    shape = _Derived(0)
    dtype = _Derived(1)
    __jax_array__ = _JaxArrayProtocol()
    __signature__ = _InitSignature()

    def __init_subclass__(
        cls,
        *,
        commute_ops: bool | None = None,
        warn_on_materialize: bool | None = None,
        frozen: bool | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init_subclass__(**kwargs)
        chosen = {"commute_ops": commute_ops, "warn_on_materialize": warn_on_materialize, "_frozen": frozen}
        for name, value in chosen.items():
            if value is not None:
                setattr(cls, name, value)
        for name in ("__eq__", "__repr__"):  # `@dataclass` would put field-wise versions here
            if name not in cls.__dict__:
                setattr(cls, name, getattr(cls, name))
        for name in DECLARED:
            _make_keyword_only(cls, name)
        cls.__hash__ = None  # pyright: ignore[reportAttributeAccessIssue]
        if "materialize" in cls.__dict__:
            setattr(cls, "materialize", _materialization.instrumented(cls.__dict__["materialize"]))  # noqa: B010
        fast = _flatten if cls.tree_flatten_with_keys is ImplicitArray.tree_flatten_with_keys else None
        jtu.register_pytree_with_keys(cls, lambda q: q.tree_flatten_with_keys(), cls.tree_unflatten, fast)
        register_for_export(cls)
        traces.register_value_type(cls, _shape_dtype.aval_of, box)

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls is ImplicitArray or cls.materialize is ImplicitArray.materialize:
            raise errors.InvalidImplicitArrayError(_messages.NO_MATERIALIZE.format(name=cls.__name__))
        layout(cls)
        return object.__new__(cls)

    def __post_init__(self) -> None:
        for name in layout(type(self)).children:
            value = getattr(self, name)
            if isinstance(value, _NEVER_CHILDREN) or (callable(value) and not hasattr(value, "shape")):
                raise _shape_dtype.bad_child(self, name, value)
        _shape_dtype.require_hashable(self)
        _shape_dtype.settle(self)
        self.__dict__["_sealed"] = True

    def _refuse_if_sealed(self, what: str, name: str) -> None:
        if self._frozen and "_sealed" in self.__dict__:
            raise dataclasses.FrozenInstanceError(
                f"cannot {what} {name!r}: {type(self).__name__} is immutable; use dataclasses.replace(x, {name}=...)"
            )

    def __delattr__(self, name: str) -> None:
        self._refuse_if_sealed("delete", name)
        object.__delattr__(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._refuse_if_sealed("assign", name)
        state = self.__dict__
        for cache in _CACHES:
            state.pop(cache, None)
        state.pop("_settled", None)
        if name == "shape":
            state["_shape"] = None if value is None else _as_shape(value)
        elif name == "dtype":
            plain = value is not None and not jnp.issubdtype(value, jax.dtypes.extended)
            state["_dtype"] = jax.dtypes.canonicalize_dtype(value) if plain else value
        else:
            object.__setattr__(self, name, value)

    def __getstate__(self) -> dict[str, Any]:
        dropped = (*_CACHES, "__dataclass_fields__")
        return {k: v for k, v in self.__dict__.items() if k not in dropped}

    # -- what subclasses provide ---------------------------------------------------------------------------------------

    def materialize(self) -> Any:
        """The dense array this one stands for. Subclasses must implement it."""
        raise errors.InvalidImplicitArrayError(_messages.NO_MATERIALIZE.format(name=type(self).__name__))

    def compute_shape(self) -> Sequence[int] | None:
        """The logical shape, from the children alone; None lets it be derived from `materialize`."""
        return None

    def compute_dtype(self) -> Any:
        """The logical dtype, from the children alone; None lets it be derived from `materialize`."""
        return None

    def stored_like(self, other: Any) -> Any:
        """The same value with the structure of `other`, if that can be without materializing; else this array.

        Loops and branches ask this where one array takes the place of another.
        """
        del other
        return self

    def child_specs(self, spec: Any) -> Any:
        """Map a PartitionSpec of the logical array to one per child (a pytree like self), or None if that cannot be."""
        del spec
        return None

    def stored_for(self, sharding: Any) -> Any:
        """The same value in storage whose parts are arrays of their own when it is split so; else this array."""
        del sharding
        return self

    @classmethod
    def tangent_error(cls) -> Exception:
        """What to raise when a derivative rule uses the tangent of such an array, a pytree, as if it were an array."""
        return TypeError(_messages.TANGENT_AS_ARRAY.format(name=cls.__name__))

    @classmethod
    def default_handler(cls, primitive: Any, *args: Any, params: dict[str, Any] | None = None) -> Any:
        """What happens to a primitive without a handler: materialize, then bind."""
        return _materialization.materialize_handler(primitive, *args, params=params or {})

    # -- the pytree ----------------------------------------------------------------------------------------------------

    def tree_flatten_with_keys(self) -> tuple[tuple[tuple[Any, Any], ...], Any]:
        """Children with their keys, and the static data."""
        fields = layout(type(self))
        keyed = zip(map(jtu.GetAttrKey, fields.children), fields.get_children(self), strict=True)
        return tuple(keyed), _static_data(self)

    @classmethod
    def tree_unflatten(cls, aux_data: Any, children: Iterable[Any]) -> Any:
        """Rebuild from static data and children, without running `__init__` (children may be placeholders)."""
        fields = layout(cls)
        self = object.__new__(cls)
        state = self.__dict__
        state.update(zip(fields.children, children, strict=True))
        aux, state["_shape"], state["_dtype"], state["_ranks"] = aux_data
        state.update(zip(fields.aux, aux, strict=True))
        state["_aux"] = aux_data
        state["__dataclass_fields__"] = replaceable_fields(cls, (aux_data[1] is not None, aux_data[2] is not None))
        state["_settled"] = state["_sealed"] = True
        return self

    def stores_axis_in_place(self, axis: int, ndim: int) -> bool:
        """Is `axis` of an array of `ndim` axes, that this is one of many of, the same axis of every child?"""
        return self.core_ndim is None or axis < ndim - self.core_ndim

    @property
    def knows_more(self) -> bool:
        """Is there something besides the children that this array would lose by being taken apart and put together?"""
        return False

    # -- the array protocol --------------------------------------------------------------------------------------------

    @property
    def aval(self) -> Any:
        """The abstract value: shape, dtype and, inside shard_map, the axes it varies over."""
        known = self.__dict__.get("_aval")
        return _shape_dtype.aval_of(self) if known is None else known

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def itemsize(self) -> int:
        """Bytes of one element of the logical dtype."""
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes really held by the children, or that they would hold if they are abstract."""
        stored = [leaf for leaf in jtu.tree_leaves(self) if hasattr(leaf, "dtype")]
        return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in stored)

    def block_until_ready(self) -> Any:
        jax.block_until_ready(jtu.tree_leaves(self))
        return self

    def devices(self) -> set[Any]:
        """Every device that holds a part."""
        return set().union(*(leaf.devices() for leaf in jtu.tree_leaves(self) if isinstance(leaf, jax.Array)))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        del copy  # materializing always makes a new array
        # Known values stay known inside jit, as those of any array that a function closes over.
        traced = any(isinstance(leaf, traces.Tracer) for leaf in jtu.tree_leaves(self))
        with contextlib.nullcontext() if traced else jax.ensure_compile_time_eval():
            dense = np.asarray(_materialization.materialize_on_request(self))
        return dense if dtype is None else dense.astype(dtype)

    def __repr__(self) -> str:
        try:
            shape = ",".join(map(str, self.shape))
            return f"{type(self).__name__}({self.dtype.name}[{shape}], {self._storage()})"
        except (AttributeError, LookupError, TypeError, ValueError, RuntimeError, errors.UninitializedAval):
            # No array: what a `tree_map` made of one. It is shown by its parts.
            parts = [f"{name}={getattr(self, name)!r}" for name in layout(type(self)).children]
            return f"{type(self).__name__}({', '.join(parts)})"

    def __format__(self, spec: str) -> str:
        return super().__format__(spec) + _messages.SHOWN_BY_JAX * callers.shown_by_jax()

    def _storage(self) -> str:
        """How the storage is described in `repr`."""
        return f"{self.nbytes:,} bytes"


def _make_keyword_only(cls: type, name: str) -> None:
    """A subclass may declare `shape` or `dtype` with a default of its own; it must not come before other fields."""
    default = cls.__dict__.get(name, dataclasses.MISSING)
    if name not in inspect.get_annotations(cls) or default is dataclasses.MISSING:
        return
    if not isinstance(default, dataclasses.Field):
        setattr(cls, name, dataclasses.field(default=default, kw_only=True))
    elif default.kw_only is dataclasses.MISSING:
        default.kw_only = True


def _as_shape(value: Any) -> tuple[int, ...]:
    try:
        return tuple(map(operator.index, value))
    except TypeError as err:
        raise TypeError(f"shape={value!r} is not a shape; give a sequence of integers, such as (64, 32).") from err


def _static_data(q: ImplicitArray) -> Any:
    state = q.__dict__
    if "_settled" not in state:
        _shape_dtype.settle(q)
    aux = state.get("_aux")
    if aux is None:
        data = (layout(type(q)).get_aux(q), *map(state.get, ("_shape", "_dtype", "_ranks")))
        aux = state["_aux"] = static_data_of(q, data)
    elif (source := aux.source() if isinstance(aux, StaticData) else None) is not q:
        # Read from another array, if that still lives; it is not known of data that was stored in between.
        state["_aux"] = static_data_of(q, aux)
        try:
            check_mapped(q, source)
        except BaseException:
            state["_aux"] = aux  # so that the next use is refused, too
            raise
        aux = state["_aux"]
    return aux


def _flatten(q: ImplicitArray) -> tuple[tuple[Any, ...], Any]:
    if traces.has_named_axes():
        check_result(q)
    if (frame := callers.who_takes_apart()) is not None:
        forgotten.check(q, frame)
    return layout(type(q)).get_children(q), _static_data(q)
