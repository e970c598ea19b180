"""The interception core under its documented path; every name lives in a room of its own.

>>> import dataclasses, jax, jax.numpy as jnp
>>> @dataclasses.dataclass
... class Doubled(ImplicitArray):
...     half: jax.Array
...     def materialize(self):
...         return 2 * self.half
>>> @register("dot_general")
... def _(x: jax.Array, w: Doubled, **params):
...     return 2 * jax.lax.dot_general(x, w.half, **params)
>>> implicit(lambda x, w: x @ w)(jnp.ones((1, 2)), Doubled(jnp.eye(2)))
Array([[2., 2.]], dtype=float32)
"""

from __future__ import annotations

from eformer._core import ImplicitArray as ImplicitArray
from eformer._core import aux_field as aux_field
from eformer._core import default_handler as default_handler
from eformer._core import implicit as implicit
from eformer._core import materialize_handler as materialize_handler
from eformer._core import register as register
from eformer._core import ste as ste
from eformer._core import tree_flatten_with_path_with_implicit as tree_flatten_with_path_with_implicit
from eformer._core.array import OrginArray as OrginArray
from eformer._core.materialization import materialize_nested as materialize_nested
from eformer._core.transformations import use_implicit as use_implicit
from eformer._core.tree import combine_leaf_predicate as combine_leaf_predicate
from eformer._core.tree import flatten_one_implicit_layer as flatten_one_implicit_layer
from eformer._core.tree import implicit_depth as implicit_depth
from eformer._core.tree import is_array as is_array
from eformer._core.tree import leaf_predicate as leaf_predicate
from eformer._core.tree import tree_flatten_with_implicit as tree_flatten_with_implicit
from eformer._core.tree import tree_leaves_with_implicit as tree_leaves_with_implicit
from eformer._core.tree import tree_map_with_implicit as tree_map_with_implicit
from eformer._core.tree import tree_map_with_path_with_implicit as tree_map_with_path_with_implicit
from eformer._core.tree import tree_structure_with_implicit as tree_structure_with_implicit
from eformer.errors import UninitializedAval as UninitializedAval
