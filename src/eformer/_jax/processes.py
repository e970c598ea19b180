"""The processes of one program."""

from __future__ import annotations

from typing import Any

from jax._src import distributed as _distributed


def distributed_client() -> Any:
    """The client of the service that joins the processes of one program, or None before `jax.distributed.initialize`.

    Unlike a collective, what it does has a time limit.
    """
    return _distributed.global_state.client
