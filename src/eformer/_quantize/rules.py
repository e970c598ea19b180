"""Rules: ordered `pattern -> format`, matched against the paths of leaves. Shared by whole models and by files.

The first rule that matches a path decides. A pattern is a glob over the whole path (`*` crosses separators), or, after
`re:`, a regular expression searched for anywhere in it. Paths may be joined by "/" or by ".": both spellings match.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .config import QuantizationConfig
from .formats import QuantizationType

_REGEX = "re:"

Choice = QuantizationConfig | QuantizationType | str | Mapping[str, Any] | None


def as_config(choice: Choice) -> QuantizationConfig | None:
    """What a rule asks for: a format name, a configuration, or a mapping of its fields; None keeps the leaf dense.

    >>> as_config({"dtype": "nf4", "block_size": 32, "double_quant": True}).double_quant
    True
    """
    if choice is None or isinstance(choice, QuantizationConfig):
        return choice
    if isinstance(choice, str):
        return QuantizationConfig(choice)
    if not isinstance(choice, Mapping):
        raise TypeError(
            f"a rule asks for {choice!r} of type {type(choice).__name__}; allowed are a format name, a "
            "QuantizationConfig, a mapping of its options, or None."
        )
    allowed = [f.name for f in dataclasses.fields(QuantizationConfig)]
    unknown = sorted(set(choice) - set(allowed))
    if unknown:
        raise ValueError(f"a rule has unknown options {unknown}; allowed are {allowed}.")
    return QuantizationConfig(**choice)


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

    def __init__(self, rules: Mapping[str, Choice] | Iterable[tuple[str, Choice]]):
        pairs: Any = list(rules.items() if isinstance(rules, Mapping) else rules)
        wrong = [pair for pair in pairs if not (isinstance(pair, (tuple, list)) and len(pair) == 2)]
        if wrong:
            raise TypeError(f"rules are pairs (pattern, format), got {wrong[0]!r}.")
        self._rules = tuple(Rule(pattern, as_config(choice)) for pattern, choice in pairs)

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
