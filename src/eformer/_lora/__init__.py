"""Low-rank adapters over any weights (QLoRA): `LoraArray`, `add_lora`, `split_trainable` and `merge`, `merge_lora`.

>>> import jax, jax.numpy as jnp
>>> from eformer.ops.quantization import quantize
>>> params = {"kernel": quantize(jnp.ones((64, 32)), dtype="nf4")}
>>> params = add_lora(params, "*", rank=4, key=jax.random.key(0))
>>> params["kernel"]
LoraArray(float32[64,32], nf4 + lora 4, 2,688 bytes)
>>> trainable, frozen = split_trainable(params)
>>> {name: value.shape for name, value in trainable.items()}
{'kernel/a': (64, 4), 'kernel/b': (4, 32)}
"""

from __future__ import annotations

from .array import LoraArray as LoraArray
from .dora import DoraArray as DoraArray
from .parts import lora_dropout as lora_dropout
from .tree import MergeReport as MergeReport
from .tree import add_lora as add_lora
from .tree import lora_mask as lora_mask
from .tree import merge as merge
from .tree import merge_lora as merge_lora
from .tree import split_trainable as split_trainable
