"""`register` and the table behind it: handlers per primitive name, resolved by operand types with plum, memoized."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import sys
import threading
import types
import typing
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import plum

from eformer import _messages, errors
from eformer._jax import primitives

HandlerT = TypeVar("HandlerT", bound=Callable[..., Any])

# Common names of primitives whose own name differs; all aliases of one primitive share its handlers.
_ALIASES = {
    "pjit": "jit",
    "checkpoint": "remat2",
    "remat": "remat2",
    "while_loop": "while",
    "switch": "cond",
    "custom_jvp": "custom_jvp_call",
    "custom_vjp": "custom_vjp_call",
    "custom_vjp_call_jaxpr": "custom_vjp_call",
    "custom_vmap": "custom_vmap_call",
    "ragged_dot": "ragged_dot_general",
    "select": "select_n",
}
_PRODUCTS = ("dot", "einsum", "inner", "matmul", "matvec", "tensordot", "vdot", "vecdot", "vecmat")


@dataclasses.dataclass(frozen=True, eq=False)
class Handler:
    """A registered function and what was learnt about its signature, once, when it was registered."""

    fn: Callable[..., Any]
    signature: plum.Signature
    wants_primitive: bool
    keywords: frozenset[str]
    takes_any_keyword: bool

    @property
    def name(self) -> str:
        return f"{self.fn.__module__}.{self.fn.__qualname__}"

    def __call__(self, primitive: Any, operands: list[Any], params: dict[str, Any]) -> Any:
        if not self.takes_any_keyword:
            params = self._accepted(primitive, params)
        return self.fn(primitive, *operands, **params) if self.wants_primitive else self.fn(*operands, **params)

    def _accepted(self, primitive: Any, params: dict[str, Any]) -> dict[str, Any]:
        """Drop unknown parameters that mean nothing (None, False); refuse to ignore the others."""
        unknown = {k: v for k, v in params.items() if k not in self.keywords and v is not None and v is not False}
        if unknown:
            listed = ", ".join(f"{k}={v!r}" for k, v in unknown.items())
            s = "s" if len(unknown) > 1 else ""
            raise errors.HandlerSignatureError(
                _messages.UNACCEPTED_PARAMS.format(handler=self.name, primitive=primitive, s=s, params=listed)
            )
        return {k: v for k, v in params.items() if k in self.keywords}


class Registry:
    """Handlers by primitive name. `any_operand` is the union used for operands without annotation."""

    def __init__(self) -> None:
        self.any_operand: Any = jax.Array
        self.version = 0
        self._handlers: dict[str, list[Handler]] = {}
        self._names: dict[Any, str | None] = {}
        self._memo: dict[tuple[str, tuple[type, ...], int], Handler | None] = {}
        self._lock = threading.Lock()

    def add(self, name: str, handler: Handler) -> None:
        with self._lock:
            known = self._handlers.get(name, [])
            # The same signature and precedence again is a redefinition (a reloaded module, a notebook cell run twice).
            self._handlers[name] = [h for h in known if h.signature != handler.signature] + [handler]
            self._memo.clear()
            self._names = {}
            self.version += 1

    def filed_under(self, primitive: Any) -> str | None:
        """The name under which there are handlers for `primitive`, or None if there are none. Remembered."""
        names = self._names  # a new table after every registration
        try:
            return names[primitive]
        except KeyError:
            name = primitive.name if primitive.name in self._handlers else canonical_name(primitive)
            found = names[primitive] = name if name in self._handlers else None
            return found

    def lookup(self, name: str, operand_types: tuple[type, ...], skip: int = 0) -> Handler | None:
        """The most specific handler for these operand types; `skip` leaves out that many better ones that declined."""
        key = (name, operand_types, skip)
        try:
            return self._memo[key]
        except KeyError:
            declined = [self.lookup(name, operand_types, i) for i in range(skip)]
            target = plum.Signature(*operand_types)
            matching = [h for h in self._handlers.get(name, ()) if target <= h.signature and h not in declined]
            found = self._memo[key] = _most_specific(name, operand_types, matching)
            return found


def _most_specific(name: str, operand_types: tuple[type, ...], matching: list[Handler]) -> Handler | None:
    signatures = [h.signature for h in matching]
    best = [h for h in matching if not any(s <= h.signature and not h.signature <= s for s in signatures)]
    if len(best) > 1:  # precedence only decides between handlers neither of which is more specific
        highest = max(h.signature.precedence for h in best)
        best = [h for h in best if h.signature.precedence == highest]
    if len(best) > 1:
        candidates = "\n".join(f"  {h.name}: {h.signature}" for h in best)
        shown = ", ".join(t.__name__ for t in operand_types)
        raise errors.AmbiguousHandlerError(
            _messages.AMBIGUOUS.format(primitive=name, types=shown, candidates=candidates)
        )
    return best[0] if best else None


registry = Registry()


def register(primitive: Any, *, precedence: int = 0) -> Callable[[HandlerT], HandlerT]:
    """Make the decorated function the handler of a primitive for the operand types it is annotated with.

    The function is called as `handler(*operands, **params)`, or `handler(primitive, *operands, **params)` if its first
    parameter is called `primitive`. Operands are implicit arrays or `jax.Array`s; an unannotated operand (or `Any`)
    matches both. It returns the result (dense or implicit), a list for primitives with several results, or
    `NotImplemented` to let the next best handler, and finally the default, have its turn.

    Args:
        primitive: a JAX primitive, or the name of one. Unknown names are refused.
        precedence: an integer that decides between handlers of which neither is more specific. The more specific
            signature wins whatever its precedence.
    """
    name = canonical_name(primitive)
    namespace = sys._getframe(1).f_locals

    def decorate(fn: HandlerT) -> HandlerT:
        registry.add(name, _describe(fn, precedence, namespace))
        return fn

    return decorate


def canonical_name(primitive: Any) -> str:
    """The name handlers are filed under."""
    if not isinstance(primitive, str):
        if not isinstance(primitive, primitives.Primitive):
            kind = type(primitive).__name__
            raise errors.UnknownPrimitiveError(f"register takes a primitive or its name, got {primitive!r} ({kind}).")
        return _ALIASES.get(str(primitive.name), str(primitive.name))
    name: str = _ALIASES.get(primitive, primitive)
    known = primitives.primitive_names()
    if name in known:
        return name
    in_lax = getattr(jax.lax, f"{primitive}_p", None)
    if in_lax is not None:
        return canonical_name(in_lax)
    if callable(getattr(jax.numpy, primitive, None)) or callable(getattr(jax.nn, primitive, None)):
        made_of = "a product is 'dot_general'" if primitive in _PRODUCTS else "jax.make_jaxpr of it shows them"
        raise errors.UnknownPrimitiveError(_messages.NOT_A_PRIMITIVE.format(name=primitive, made_of=made_of))
    close = difflib.get_close_matches(primitive, sorted(known | set(_ALIASES)), n=5)
    hint = f" Did you mean {', '.join(map(repr, close))}?" if close else ""
    raise errors.UnknownPrimitiveError(_messages.UNKNOWN_PRIMITIVE.format(name=primitive, hint=hint))


def _describe(fn: Callable[..., Any], precedence: int, namespace: dict[str, Any]) -> Handler:
    if not isinstance(precedence, int):
        raise errors.HandlerSignatureError(f"precedence must be an integer, got {precedence!r}.")
    parameters = list(inspect.signature(fn).parameters.values())
    hints = _type_hints(fn, namespace)
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    first = positional[0].name if positional else ""
    wants_primitive = first in ("primitive", "prim") or hints.get(first) is primitives.Primitive
    # Positional parameters with a default are parameters of the primitive, never operands.
    operands = [p for p in positional if p.default is p.empty][int(wants_primitive) :]
    rest = next((p for p in parameters if p.kind is p.VAR_POSITIONAL), None)
    keywords = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}
    keywords |= {p.name for p in positional if p.default is not p.empty}
    more = {} if rest is None else {"varargs": _operand_type(hints.get(rest.name))}
    return Handler(
        fn=fn,
        signature=plum.Signature(*(_operand_type(hints.get(p.name)) for p in operands), precedence=precedence, **more),
        wants_primitive=wants_primitive,
        keywords=frozenset(keywords),
        takes_any_keyword=any(p.kind is p.VAR_KEYWORD for p in parameters),
    )


def _type_hints(fn: Callable[..., Any], namespace: dict[str, Any]) -> dict[str, Any]:
    """Annotations, with names resolved where the decorator was applied too (classes local to a function)."""
    try:
        return typing.get_type_hints(fn, localns=namespace)
    except NameError as err:
        raise errors.HandlerSignatureError(
            f"the annotations of handler {fn.__qualname__} cannot be resolved: {err}. "
            "Annotate with names visible where it is registered."
        ) from err


def _operand_type(hint: Any) -> Any:
    """Unannotated, `Any` and `object` mean every operand; so does a union that contains one of them."""
    anything = (None, Any, object, inspect.Parameter.empty)
    if hint in anything:
        return registry.any_operand
    if typing.get_origin(hint) in (typing.Union, types.UnionType) and any(a in anything for a in typing.get_args(hint)):
        return registry.any_operand
    return hint
