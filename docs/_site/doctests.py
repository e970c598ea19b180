"""Griffe extension: examples in docstrings become code blocks, and `aux_field(default=x)` shows as the default it is.

Markdown would take `>>>` for three levels of quotes.
"""

from __future__ import annotations

import ast
from typing import Any

import griffe


def fenced(text: str) -> str:
    """The same text with every run of lines from a `>>>` to the next blank line between fences."""
    lines, inside = [], False
    for line in [*text.splitlines(), ""]:
        if not inside and line.lstrip().startswith(">>>"):
            lines += ["", "```pycon"]
            inside = True
        elif inside and not line.strip():
            lines.append("```")
            inside = False
        lines.append(line)
    return "\n".join(lines)


def default_of(value: str) -> str | None:
    """What a field of static data is unless it is given; None if it has to be.

    >>> default_of("aux_field(default=1.0)"), default_of("aux_field()"), default_of("aux_field(default_factory=tuple)")
    ('1.0', None, 'tuple()')
    """
    call = ast.parse(value, mode="eval").body
    keywords = {k.arg: ast.unparse(k.value) for k in getattr(call, "keywords", ())}
    made = f"{keywords['default_factory']}()" if "default_factory" in keywords else None
    return keywords.get("default", made)


class Doctests(griffe.Extension):
    def on_object(self, *, obj: Any, **kwargs: Any) -> None:
        made = obj.members.get("__init__") if obj.is_class else None
        for parameter in made.parameters if made is not None and made.is_function else ():
            if str(parameter.default).startswith("aux_field("):
                parameter.default = default_of(str(parameter.default))
        if obj.docstring and ">>>" in obj.docstring.value:
            obj.docstring.value = fenced(obj.docstring.value)
