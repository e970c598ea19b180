"""The compute layer of quantized arrays: products with packed matrices. Knows nothing of array classes or dispatch."""

from __future__ import annotations

from .grouped import qragged_dot as qragged_dot
from .lookup import qgather as qgather
from .matmul import explain as explain
from .matmul import qmatmul as qmatmul
