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

from eformer._core import explain as explain
from eformer._core import materialize as materialize
from eformer._core.explanation import Explanation as Explanation
from eformer._core.materialization import materialization_policy as materialization_policy
from eformer.errors import AmbiguousHandlerError as AmbiguousHandlerError
from eformer.errors import AvalMismatchError as AvalMismatchError
from eformer.errors import HandlerResultError as HandlerResultError
from eformer.errors import HandlerResultWarning as HandlerResultWarning
from eformer.errors import HandlerSignatureError as HandlerSignatureError
from eformer.errors import InvalidImplicitArrayError as InvalidImplicitArrayError
from eformer.errors import MaterializationError as MaterializationError
from eformer.errors import MaterializationWarning as MaterializationWarning
from eformer.errors import SlicedBelowCoreError as SlicedBelowCoreError
from eformer.errors import UnknownPrimitiveError as UnknownPrimitiveError

from ._imus import *  # noqa: F403
