"""All that eformer knows of JAX's private and undocumented parts: named views of single facts, no policy of ours.

No other module imports `jax._src` or reads undocumented attributes of JAX's objects, but for a short list that
`tests/test_house.py` holds. A release of JAX that moves something is met here.
"""

from __future__ import annotations

from typing import Any

from jax._src import distributed as _distributed


def distributed_client() -> Any:
    """The client of the service that joins the processes of one program, or None before `jax.distributed.initialize`.

    Unlike a collective, what it does has a time limit.
    """
    return _distributed.global_state.client
