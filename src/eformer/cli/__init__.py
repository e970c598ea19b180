"""The command line, `python -m eformer COMMAND`.

>>> main(["--version"])  # doctest: +ELLIPSIS
eformer ...
0
"""

from __future__ import annotations

from ._commands import main as main
