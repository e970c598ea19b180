"""C++ kernels for the CPU (csrc/cpu), called through XLA's foreign function interface."""

from __future__ import annotations

from ._calls import nf4_encode as nf4_encode
from ._calls import qgather as qgather
from ._calls import qmatmul as qmatmul
from ._calls import qragged as qragged
from ._library import LIBRARY as LIBRARY
from ._library import isa_name as isa_name
from ._library import loaded as loaded
from ._refusals import refuses_encode as refuses_encode
from ._refusals import refuses_gather as refuses_gather
from ._refusals import refuses_product as refuses_product
from ._refusals import refuses_ragged as refuses_ragged
