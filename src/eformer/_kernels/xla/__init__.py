"""The pure JAX path, for every platform: one decoded panel at a time, and on GPUs what XLA fuses (`gpu`)."""

from __future__ import annotations

from ._run import qmatmul as qmatmul
from ._run import refuses as refuses
