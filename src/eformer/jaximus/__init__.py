"""Implicit arrays: types that behave like `jax.Array` in every JAX program and are stored as something else.

>>> import dataclasses, jax, jax.numpy as jnp
>>> @dataclasses.dataclass
... class Outer(ImplicitArray):
...     a: jax.Array
...     b: jax.Array
...     def materialize(self):
...         return self.a[:, None] * self.b
>>> @register("dot_general")
... def _(x: jax.Array, w: Outer, **params):  # (x @ a) bᵀ without forming the matrix
...     return (x @ w.a)[..., None] * w.b
>>> w = Outer(jnp.arange(3.0), jnp.ones(4))
>>> jnp.ones((2, 3)) @ w
Array([[3., 3., 3., 3.],
       [3., 3., 3., 3.]], dtype=float32)
"""

from __future__ import annotations

from .._errors import AvalMismatchError as AvalMismatchError
from .._errors import HandlerResultError as HandlerResultError
from .._errors import HandlerResultWarning as HandlerResultWarning
from .._errors import HandlerSignatureError as HandlerSignatureError
from .._errors import InvalidImplicitArrayError as InvalidImplicitArrayError
from .._errors import MaterializationError as MaterializationError
from .._errors import MaterializationWarning as MaterializationWarning
from .._errors import SlicedBelowCoreError as SlicedBelowCoreError
from .._errors import UninitializedAval as UninitializedAval
from .._errors import UnknownPrimitiveError as UnknownPrimitiveError
from . import _placement as _placement
from . import _rules_call as _rules_call
from . import _rules_control as _rules_control
from . import _rules_custom as _rules_custom
from ._explain import Explanation as Explanation
from ._explain import explain as explain
from ._fallback import materialization_policy as materialization_policy
from ._fallback import materialize as materialize
from ._imus import ImplicitArray as ImplicitArray
from ._imus import OrginArray as OrginArray
from ._imus import aux_field as aux_field
from ._imus import combine_leaf_predicate as combine_leaf_predicate
from ._imus import default_handler as default_handler
from ._imus import flatten_one_implicit_layer as flatten_one_implicit_layer
from ._imus import implicit as implicit
from ._imus import implicit_depth as implicit_depth
from ._imus import is_array as is_array
from ._imus import leaf_predicate as leaf_predicate
from ._imus import materialize_handler as materialize_handler
from ._imus import materialize_nested as materialize_nested
from ._imus import register as register
from ._imus import ste as ste
from ._imus import tree_flatten_with_implicit as tree_flatten_with_implicit
from ._imus import tree_flatten_with_path_with_implicit as tree_flatten_with_path_with_implicit
from ._imus import tree_leaves_with_implicit as tree_leaves_with_implicit
from ._imus import tree_map_with_implicit as tree_map_with_implicit
from ._imus import tree_map_with_path_with_implicit as tree_map_with_path_with_implicit
from ._imus import tree_structure_with_implicit as tree_structure_with_implicit
from ._imus import use_implicit as use_implicit
from ._registry import AmbiguousHandlerError as AmbiguousHandlerError
