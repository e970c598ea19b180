"""Griffe extension: examples in docstrings become code blocks. Markdown would take `>>>` for three levels of quotes."""

from __future__ import annotations

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


class Doctests(griffe.Extension):
    def on_object(self, *, obj: Any, **kwargs: Any) -> None:
        if obj.docstring and ">>>" in obj.docstring.value:
            obj.docstring.value = fenced(obj.docstring.value)
