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

from .._errors import UninitializedAval as UninitializedAval
from ._array import ImplicitArray as ImplicitArray
from ._array import OrginArray as OrginArray
from ._fallback import default_handler as default_handler
from ._fallback import materialize_handler as materialize_handler
from ._fallback import materialize_nested as materialize_nested
from ._fields import aux_field as aux_field
from ._interpret import implicit as implicit
from ._interpret import use_implicit as use_implicit
from ._registry import register as register
from ._ste import ste as ste
from ._tree import combine_leaf_predicate as combine_leaf_predicate
from ._tree import flatten_one_implicit_layer as flatten_one_implicit_layer
from ._tree import implicit_depth as implicit_depth
from ._tree import is_array as is_array
from ._tree import leaf_predicate as leaf_predicate
from ._tree import tree_flatten_with_implicit as tree_flatten_with_implicit
from ._tree import tree_flatten_with_path_with_implicit as tree_flatten_with_path_with_implicit
from ._tree import tree_leaves_with_implicit as tree_leaves_with_implicit
from ._tree import tree_map_with_implicit as tree_map_with_implicit
from ._tree import tree_map_with_path_with_implicit as tree_map_with_path_with_implicit
from ._tree import tree_structure_with_implicit as tree_structure_with_implicit
