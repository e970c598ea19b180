"""The engine behind `eformer.jaximus`: implicit arrays, their handlers and the trace. Knows nothing of quantization.

The names here are those that other rooms use; the modules of rules are imported for what they register.
"""

from __future__ import annotations

from . import rules_call as rules_call
from . import rules_control as rules_control
from . import rules_custom as rules_custom
from .array import ImplicitArray as ImplicitArray
from .explanation import explain as explain
from .fields import aux_field as aux_field
from .materialization import default_handler as default_handler
from .materialization import materialize as materialize
from .materialization import materialize_handler as materialize_handler
from .registry import register as register
from .transformations import implicit as implicit
from .transformations import ste as ste
from .tree import tree_flatten_with_path_with_implicit as tree_flatten_with_path_with_implicit
