"""MkDocs hook: links to files of the repository outside docs/ become their paths, as the site does not hold them.

On a page read in the repository they stay links. A link to a file that does not exist is left for MkDocs to complain.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

LINK = re.compile(r"\[([^\]\n]+)\]\(((?:\.\./)+[^)\s#]+)(?:#[^)\s]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, config: Any, **kwargs: Any) -> str:
    here = posixpath.dirname(page.file.src_uri)

    def replace(match: re.Match[str]) -> str:
        text, target = match.groups()
        path = posixpath.normpath(posixpath.join(here, target))
        outside = path.startswith("../") and (Path(config.docs_dir) / path).exists()
        if not outside:
            return match[0]
        name = f"`{path.removeprefix('../')}`"
        return name if text.strip("`") in name else f"{text} ({name})"

    return LINK.sub(replace, markdown)
