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

from eformer._core import AmbiguousHandlerError as AmbiguousHandlerError
from eformer._core import AvalMismatchError as AvalMismatchError
from eformer._core import Explanation as Explanation
from eformer._core import HandlerResultError as HandlerResultError
from eformer._core import HandlerResultWarning as HandlerResultWarning
from eformer._core import HandlerSignatureError as HandlerSignatureError
from eformer._core import ImplicitArray as ImplicitArray
from eformer._core import InvalidImplicitArrayError as InvalidImplicitArrayError
from eformer._core import MaterializationError as MaterializationError
from eformer._core import MaterializationWarning as MaterializationWarning
from eformer._core import OrginArray as OrginArray
from eformer._core import SlicedBelowCoreError as SlicedBelowCoreError
from eformer._core import UninitializedAval as UninitializedAval
from eformer._core import UnknownPrimitiveError as UnknownPrimitiveError
from eformer._core import aux_field as aux_field
from eformer._core import combine_leaf_predicate as combine_leaf_predicate
from eformer._core import default_handler as default_handler
from eformer._core import explain as explain
from eformer._core import flatten_one_implicit_layer as flatten_one_implicit_layer
from eformer._core import implicit as implicit
from eformer._core import implicit_depth as implicit_depth
from eformer._core import is_array as is_array
from eformer._core import leaf_predicate as leaf_predicate
from eformer._core import materialization_policy as materialization_policy
from eformer._core import materialize as materialize
from eformer._core import materialize_handler as materialize_handler
from eformer._core import materialize_nested as materialize_nested
from eformer._core import register as register
from eformer._core import ste as ste
from eformer._core import tree_flatten_with_implicit as tree_flatten_with_implicit
from eformer._core import tree_flatten_with_path_with_implicit as tree_flatten_with_path_with_implicit
from eformer._core import tree_leaves_with_implicit as tree_leaves_with_implicit
from eformer._core import tree_map_with_implicit as tree_map_with_implicit
from eformer._core import tree_map_with_path_with_implicit as tree_map_with_path_with_implicit
from eformer._core import tree_structure_with_implicit as tree_structure_with_implicit
from eformer._core import use_implicit as use_implicit
