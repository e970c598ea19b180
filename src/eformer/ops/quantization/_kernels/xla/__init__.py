"""The tiled pure JAX path: works on every platform, decodes one panel at a time, never forms the dense matrix."""

from __future__ import annotations

from ._run import qmatmul as qmatmul
