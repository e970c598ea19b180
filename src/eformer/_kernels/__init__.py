"""The compute layer of quantized arrays: products with packed matrices. Knows nothing of array classes or dispatch."""

from __future__ import annotations

from .gather import qgather as qgather
from .problem import Problem as Problem
from .ragged import qragged_dot as qragged_dot
from .select import explain as explain
from .spec import qmatmul as qmatmul
