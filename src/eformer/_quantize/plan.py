"""What becomes of every leaf, decided before anything is computed: for models in memory, for files, for a dry run.

Rules are an ordered `pattern -> format`, and the first that matches a path decides. A pattern is a glob over the whole
path (`*` crosses separators), or, after `re:`, a regular expression searched for anywhere in it. Paths may be joined by
"/" or by ".": both spellings match.
"""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
import functools
import math
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax

from eformer import _table
from eformer._core import ImplicitArray
from eformer._formats.arguments import FLOATS
from eformer.errors import AlreadyQuantizedError, UnusedRuleWarning

from .config import Axis, QuantizationConfig, QuantizationType, config_of, options_in_rules, quantize_stack
from .inputs import bare
from .leaves import GROUPS, Leaf, Role, nbytes_of, roles_of
from .names import meant
from .own import OwnFormat, own_format
from .statistics import Statistics
from .stored import agree, differences, fitted

SKIP = ("norms", "biases", "routers", "positions", "constants", "unsure")
MIN_SIZE = 4096
_REGEX = "re:"
_UNSURE = "it is unclear whether a product uses it"

Choice = QuantizationConfig | QuantizationType | str | Mapping[str, Any] | Callable[..., Any] | None


# What other programs call an option, or people the absence of a format.
_OPTIONS = {
    "group_size": "block_size",
    "groupsize": "block_size",
    "bits": "dtype",
    "format": "dtype",
    "sym": "symmetric",
}
_DENSE = ("none", "dense")


def as_config(choice: Choice, dtype: Any = "nf4") -> QuantizationConfig | None:
    """What a rule asks for: a format name, a configuration, its fields, a format of one's own; None keeps a leaf dense.

    Fields without `dtype` are options of the format `dtype`.

    >>> as_config({"dtype": "nf4", "block_size": 32, "double_quant": True}).double_quant
    True
    """
    if choice is None or isinstance(choice, QuantizationConfig):
        return choice
    if isinstance(choice, str):
        if choice.lower() in _DENSE:
            raise ValueError(
                f"a rule asks for {choice!r}, which is no format. None, without quotes, keeps a leaf dense."
            )
        return QuantizationConfig(choice)
    if own := own_format(choice):
        return own
    if not isinstance(choice, Mapping):
        near = meant(choice)
        raise TypeError(
            f"a rule asks for {choice!r} of type {type(choice).__name__}; allowed are a format name, a "
            "QuantizationConfig, a mapping of its options, a class with `quantize`, a function, or None."
            + f" Did you mean {near!r}?"
            * bool(near)
        )
    allowed = [f.name for f in dataclasses.fields(QuantizationConfig)]
    unknown = sorted(set(choice) - set(allowed))
    if unknown:
        near = _OPTIONS.get(str(unknown[0])) or "".join(difflib.get_close_matches(str(unknown[0]), allowed, 1))
        hint = f" Did you mean {near!r}?" if near else ""
        raise ValueError(f"a rule has unknown options {unknown}; allowed are {allowed}.{hint}")
    return QuantizationConfig(**{"dtype": dtype, **choice})


def _are_options(pairs: Sequence[tuple[Any, Any]]) -> bool:
    """Options of one format, such as `{"dtype": "int4", "block_size": 128}`, and no patterns?"""
    names = (*(f.name for f in dataclasses.fields(QuantizationConfig)), *_OPTIONS)
    return all(key in names for key, _ in pairs) and any(key == "dtype" or isinstance(v, int) for key, v in pairs)


@dataclasses.dataclass(frozen=True)
class Rule:
    """One pattern and what it asks for."""

    pattern: str
    config: QuantizationConfig | None
    _compiled: re.Pattern[str] = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.pattern, str):
            raise TypeError(f"a pattern is a string, got {self.pattern!r} of type {type(self.pattern).__name__}.")
        source = self.pattern.removeprefix(_REGEX)
        if source == self.pattern:
            source = fnmatch.translate(_slashed(source))
        try:
            object.__setattr__(self, "_compiled", re.compile(source))
        except re.error as err:
            raise ValueError(f"pattern {self.pattern!r} is not a regular expression: {err}.") from err

    def matches(self, path: str) -> bool:
        """Does the pattern match this path?"""
        if self.pattern.startswith(_REGEX):
            return any(self._compiled.search(p) for p in {path, _slashed(path), path.replace("/", ".")})
        return self._compiled.match(_slashed(path)) is not None


@dataclasses.dataclass(frozen=True)
class Unused:
    """A rule that decided nothing, and the earlier rules that took what it matches (none: it matches no path)."""

    pattern: str
    shadowed_by: tuple[str, ...] = ()

    def __str__(self) -> str:
        if not self.shadowed_by:
            return f"rule {self.pattern!r} matches no path"
        return f"rule {self.pattern!r} matches only paths that {', '.join(map(repr, self.shadowed_by))} already took"


class Rules(Sequence[Rule]):
    """An ordered list of rules.

    >>> rules = Rules({"*norm*": None, "*embed*": "int8", "re:attn.(q|k)": "nf4"})
    >>> rules.first("layers.0.attn.q").config.dtype
    <QuantizationType.NF4: 'nf4'>
    >>> print(*rules.unused(["layers/0/norm", "layers/0/attn/q"]))
    rule '*embed*' matches no path
    """

    def __init__(self, rules: Mapping[str, Choice] | Iterable[tuple[str, Choice]], dtype: Any = "nf4"):
        if isinstance(rules, Statistics):
            raise TypeError(f"rules={rules!r} are statistics; pass them as quantize_tree(params, calibration=stats).")
        pairs: Any = list(rules.items() if isinstance(rules, Mapping) else rules)
        wrong = [pair for pair in pairs if not (isinstance(pair, (tuple, list)) and len(pair) == 2)]
        if wrong:
            raise TypeError(f"rules are pairs (pattern, format), got {wrong[0]!r}.")
        if _are_options(pairs):
            raise ValueError(
                f"rules={dict(pairs)} are options of a format, where patterns and formats are expected. For all leaves "
                f'write {{"*": {dict(pairs)}}}.'
            )
        self._rules = tuple(Rule(pattern, as_config(choice, dtype)) for pattern, choice in pairs)

    def __len__(self) -> int:
        return len(self._rules)

    def __getitem__(self, index: Any) -> Any:
        return self._rules[index]

    def first(self, path: str) -> Rule | None:
        """The first rule that matches, or None."""
        return next((rule for rule in self._rules if rule.matches(path)), None)

    def unused(self, paths: Iterable[str]) -> list[Unused]:
        """The rules that decided nothing for these paths."""
        taken: dict[int, set[int]] = {}  # rule -> the rules that came before it somewhere
        deciding: set[int] = set()
        for path in paths:
            hits = [i for i, rule in enumerate(self._rules) if rule.matches(path)]
            deciding.update(hits[:1])
            for later in hits[1:]:
                taken.setdefault(later, set()).add(hits[0])
        return [
            Unused(rule.pattern, tuple(self._rules[j].pattern for j in sorted(taken.get(i, ()))))
            for i, rule in enumerate(self._rules)
            if i not in deciding
        ]


def _slashed(path: str) -> str:
    return path.replace(".", "/")


@dataclasses.dataclass(frozen=True)
class Decision:
    """A leaf, its role, how to quantize it (None: it stays as it is), why, and the pattern that decided.

    `by_default`: no rule decided, and no format was asked for.
    """

    leaf: Leaf
    role: Role
    config: QuantizationConfig | None
    reason: str = ""
    rule: str | None = None
    by_default: bool = False


@dataclasses.dataclass(frozen=True)
class Plan:
    """A decision for every leaf, in order; the rules that decided nothing, and those whose leaves stay all the same."""

    decisions: tuple[Decision, ...]
    unused: tuple[Unused, ...]
    without_effect: tuple[str, ...]

    @property
    def warnings(self) -> list[str]:
        """A line for every rule that might as well not be there."""
        return [*map(str, self.unused), *self.without_effect]

    @property
    def unsure(self) -> list[str]:
        """The leaves that stay because it is not sure that a product uses them."""
        return [d.leaf.path for d in self.decisions if d.config is None and d.reason.startswith(_UNSURE)]

    def __str__(self) -> str:
        rows = [(d.leaf.path, "dense" if d.config is None else d.config.label, d.reason) for d in self.decisions]
        return "\n".join([*_table.lines(("path", "format", "why"), rows), *self.warnings])

    def warn(self) -> None:
        """Name such rules to whoever called the caller, which is behind `options_in_rules`."""
        if self.warnings:
            near = ", ".join(repr(d.leaf.path) for d in self.decisions[:3])
            hint = f"paths look like {near}; `skip=` and `min_size=` decide which of them may be quantized"
            warnings.warn("\n".join([*self.warnings, hint]), UnusedRuleWarning, stacklevel=4)


@options_in_rules
def plan(
    leaves: Sequence[Leaf],
    rules: Any = None,
    *,
    default: Choice = "nf4",
    min_size: int = MIN_SIZE,
    skip: Iterable[str] = SKIP,
    axis: Axis = None,
) -> Plan:
    """Decide for every leaf by the rules, its name, its shape and its neighbours.

    Only shapes and dtypes are looked at. Arguments are those of `quantize_tree`; `axis` is for rules that name none.
    """
    rules = getattr(rules, "rules", rules)  # those of a BitPlan
    asked = default != "nf4"  # by name, and not because nothing else was said
    if isinstance(rules, (str, QuantizationConfig)) or callable(rules):  # one choice for everything
        rules, default, asked = None, rules, True
    fallback = as_config(default)
    named = "nf4" if fallback is None or isinstance(fallback, OwnFormat) else fallback.dtype
    ordered = Rules({} if rules is None else rules, named)
    kinds = skipped_kinds(skip)
    if not isinstance(min_size, (int, float)) or min_size < 0:
        raise ValueError(f"min_size={min_size!r} is not allowed; give a number of values, 0 or more.")
    decisions = []
    for leaf, role in zip(leaves, roles_of(leaves), strict=True):
        rule = ordered.first(leaf.path)
        wanted = fallback if rule is None else rule.config
        config, why = None, "a rule keeps it"
        if wanted is not None:
            if asked or rule is not None:
                _check_format(leaf, wanted)
            why = _obstacle(leaf.value, role, min_size, kinds)
            config, why = (None, why) if why else _smaller(wanted, leaf.value, role, axis)
        by_default = rule is None and not asked
        decisions.append(Decision(leaf, role, config, why, None if rule is None else rule.pattern, by_default))
    unused = ordered.unused(leaf.path for leaf in leaves)
    asking = [rule.pattern for rule in ordered if rule.config is not None]
    without_effect = [line for pattern in asking if (line := _without_effect(pattern, decisions))]
    return Plan(tuple(decisions), tuple(unused), tuple(without_effect))


def skipped_kinds(skip: Iterable[str]) -> frozenset[str]:
    """The kinds of leaves that group names stand for."""
    names = (skip,) if isinstance(skip, str) else tuple(skip)
    unknown = [name for name in names if name not in GROUPS]
    if unknown:
        raise ValueError(
            f"skip={names!r} names {unknown}; allowed are {', '.join(GROUPS)}. To keep leaves by their path, give a "
            'rule: {"*pattern*": None}.'
        )
    return frozenset(GROUPS[name] for name in names)


def _obstacle(value: Any, role: Role, min_size: int, skip: frozenset[str]) -> str:
    """Why a leaf cannot or should not be quantized, or nothing."""
    if isinstance(value, ImplicitArray):
        return "it is quantized already"
    if not (hasattr(value, "shape") and hasattr(value, "dtype")):
        return "it is not an array"
    if value.dtype.name not in FLOATS:
        return f"its dtype is {value.dtype.name}"
    if role.kind == "scale":
        return "it belongs to a weight that is quantized already"
    if role.kind == "optimizer":
        return "it is part of the state of an optimizer"
    if role.kind in skip:
        return f"{_UNSURE}: {role.doubt}" if role.doubt else f"it is a {role.kind}"
    if len(value.shape) < 2:
        return "it is not a matrix"
    size = math.prod(value.shape)
    return f"it has {size} values, fewer than {min_size}" if size < min_size or not size else ""


def _check_format(leaf: Leaf, wanted: QuantizationConfig) -> None:
    """Refuse to leave a quantized leaf as it is where another format was asked for by name."""
    found = config_of(leaf.value) if isinstance(leaf.value, ImplicitArray) else None
    if found is None:
        return
    same = dataclasses.replace(wanted, axis=found.axis, use_kernel=found.use_kernel, simulate=False)
    if not agree(found, same, leaf.value.shape) and found != _in_one_block(same, leaf.value.shape):
        fix = f"call dequantize_tree first, or keep it with a rule, {{{leaf.path!r}: None}}."
        raise AlreadyQuantizedError(repr(leaf.path), *differences(found, same), fix)


def _smaller(wanted: QuantizationConfig, value: Any, role: Role, axis: Axis) -> tuple[QuantizationConfig | None, str]:
    """The configuration with an axis along which the leaf gets smaller, or why there is none.

    The contracted axis if that will do, cut into shorter blocks if it is shorter than one; else the longest that does.
    An axis that was asked for is not replaced.
    """
    asked = axis if wanted.axis is None else wanted.axis
    axes = [role.axis(wanted.scales_many_axes) if asked is None else asked]
    if asked is None:
        axes += sorted(range(-len(value.shape), 0), key=lambda i: -value.shape[i])
        if role.kind == "conv" and isinstance(axes[0], int) and value.shape[axes[0]] < 8:  # the colours of an image
            axes = [*axes[1:], axes[0]]
    dense = nbytes_of(value)
    for config in (dataclasses.replace(wanted, axis=a) for a in axes):
        for fit in (fitted, _in_one_block):
            candidate = fit(config, value.shape)
            nbytes = None if wanted.simulate else _stored_nbytes(candidate, role.batch, value.shape, value.dtype.name)
            if nbytes is None or nbytes < dense:
                return candidate, f"role: {role.kind}"
    return None, f"it would not get smaller: it has {dense:,} bytes"


def _in_one_block(config: QuantizationConfig, shape: Sequence[int]) -> QuantizationConfig:
    """The same values in less storage, where the axis is shorter than a block."""
    axis, ndim = config.axis, len(shape)
    row, block = config.format, config.block_size
    in_blocks = "block_size" in row.options and (block or row.default_block) is not None
    if not in_blocks or not isinstance(axis, int) or not -ndim <= axis < ndim:
        return config
    whole = row.one_block(shape[axis])
    return dataclasses.replace(config, block_size=min(block or whole, whole))


@functools.lru_cache(maxsize=4096)
def _stored_nbytes(config: QuantizationConfig, batch: int, shape: tuple[int, ...], dtype: str) -> int | None:
    """Bytes of an array once it is quantized; None if the format refuses it, which it will say itself."""
    value = jax.ShapeDtypeStruct(shape, jax.dtypes.canonicalize_dtype(dtype))
    config = dataclasses.replace(config, method=None)  # which needs as many
    try:
        made = jax.eval_shape(lambda w: quantize_stack(w, bare(config), batch), value)
    except (TypeError, ValueError):
        return None
    return sum(map(nbytes_of, jax.tree.leaves(made)))


def _without_effect(pattern: str, decisions: Sequence[Decision]) -> str:
    """What to say of a rule if all leaves it decided stay as they are."""
    decided = [d for d in decisions if d.rule == pattern]
    if not decided or any(d.config is not None for d in decided):
        return ""
    more = f" (and {len(decided) - 1} more)" if len(decided) > 1 else ""
    first = f"{decided[0].leaf.path!r}{more} stays as it is because {decided[0].reason}"
    return f"rule {pattern!r} quantizes nothing: {first}"
