"""Files: safetensors that describe themselves, and what other programs write.

>>> import tempfile, jax.numpy as jnp
>>> from eformer.ops.quantization import quantize
>>> params = {"dense": {"kernel": quantize(jnp.ones((64, 32)), dtype="nf4"), "bias": jnp.zeros(32)}}
>>> with tempfile.TemporaryDirectory() as folder:
...     file = save(f"{folder}/model.safetensors", params)
...     load(file)["dense"]["kernel"]
ArrayNF4(float32[64,32], nf4, 4.50 bits per weight)
"""

from __future__ import annotations

from eformer._formats.grouped.array import GroupedArray as GroupedArray
from eformer._quantize.progress import Progress as Progress
from eformer.errors import CheckpointError as CheckpointError
from eformer.errors import ProcessError as ProcessError

from . import _builtin as _builtin
from ._bitsandbytes import from_bitsandbytes as from_bitsandbytes
from ._bitsandbytes import to_bitsandbytes as to_bitsandbytes
from ._distributed import load_distributed as load_distributed
from ._distributed import save_distributed as save_distributed
from ._gguf import GgufFile as GgufFile
from ._gguf import load_gguf as load_gguf
from ._gguf import open_gguf as open_gguf
from ._inspect import FileReport as FileReport
from ._inspect import inspect as inspect
from ._lazy import LazyCheckpoint as LazyCheckpoint
from ._lazy import LeafInfo as LeafInfo
from ._lazy import open_lazy as open_lazy
from ._libraries import from_msgpack as from_msgpack
from ._libraries import load_orbax as load_orbax
from ._libraries import register_flax as register_flax
from ._libraries import save_orbax as save_orbax
from ._libraries import to_msgpack as to_msgpack
from ._load import load as load
from ._save import save as save
from ._state import from_state_dict as from_state_dict
from ._state import to_state_dict as to_state_dict
from ._stream import StreamReport as StreamReport
from ._stream import quantize_file as quantize_file
from ._types import register_type as register_type
