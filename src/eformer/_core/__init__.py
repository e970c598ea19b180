"""The engine behind `eformer.jaximus`: implicit arrays, their handlers and the trace. Knows nothing of quantization."""

from __future__ import annotations

from eformer.errors import AmbiguousHandlerError as AmbiguousHandlerError
from eformer.errors import AvalMismatchError as AvalMismatchError
from eformer.errors import HandlerResultError as HandlerResultError
from eformer.errors import HandlerResultWarning as HandlerResultWarning
from eformer.errors import HandlerSignatureError as HandlerSignatureError
from eformer.errors import InvalidImplicitArrayError as InvalidImplicitArrayError
from eformer.errors import MaterializationError as MaterializationError
from eformer.errors import MaterializationWarning as MaterializationWarning
from eformer.errors import SlicedBelowCoreError as SlicedBelowCoreError
from eformer.errors import UninitializedAval as UninitializedAval
from eformer.errors import UnknownPrimitiveError as UnknownPrimitiveError

from . import placement as placement
from . import rules_call as rules_call
from . import rules_control as rules_control
from . import rules_custom as rules_custom
from .array import ImplicitArray as ImplicitArray
from .array import OrginArray as OrginArray
from .explanation import Explanation as Explanation
from .explanation import explain as explain
from .fields import aux_field as aux_field
from .materialization import default_handler as default_handler
from .materialization import materialization_policy as materialization_policy
from .materialization import materialize as materialize
from .materialization import materialize_handler as materialize_handler
from .materialization import materialize_nested as materialize_nested
from .registry import register as register
from .scopes import implicit as implicit
from .scopes import use_implicit as use_implicit
from .straight_through import ste as ste
from .tree import combine_leaf_predicate as combine_leaf_predicate
from .tree import flatten_one_implicit_layer as flatten_one_implicit_layer
from .tree import implicit_depth as implicit_depth
from .tree import is_array as is_array
from .tree import leaf_predicate as leaf_predicate
from .tree import tree_flatten_with_implicit as tree_flatten_with_implicit
from .tree import tree_flatten_with_path_with_implicit as tree_flatten_with_path_with_implicit
from .tree import tree_leaves_with_implicit as tree_leaves_with_implicit
from .tree import tree_map_with_implicit as tree_map_with_implicit
from .tree import tree_map_with_path_with_implicit as tree_map_with_path_with_implicit
from .tree import tree_structure_with_implicit as tree_structure_with_implicit
