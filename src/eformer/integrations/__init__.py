"""Models of other libraries with quantized weights: `linen`, `nnx` and `equinox`, each needing only that library.

`eformer.quantize_tree` quantizes the models of all of them, and any function runs with dispatch on inside
`eformer.implicit`. The modules here add what one library needs beyond that; each is imported when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import equinox as equinox
    from . import linen as linen
    from . import nnx as nnx

_MODULES = ("equinox", "linen", "nnx")


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(_MODULES)}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
