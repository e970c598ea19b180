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

from eformer._quantize.tree import Progress as Progress
from eformer.errors import CheckpointError as CheckpointError
from eformer.errors import ProcessError as ProcessError

from .checkpoint.load import LazyCheckpoint as LazyCheckpoint
from .checkpoint.load import LeafInfo as LeafInfo
from .checkpoint.load import load as load
from .checkpoint.load import open_lazy as open_lazy
from .checkpoint.save import save as save
from .distributed import load_distributed as load_distributed
from .distributed import save_distributed as save_distributed
from .foreign.bitsandbytes import from_bitsandbytes as from_bitsandbytes
from .foreign.bitsandbytes import to_bitsandbytes as to_bitsandbytes
from .foreign.export import export as export
from .foreign.gguf import GgufFile as GgufFile
from .foreign.gguf import load_gguf as load_gguf
from .foreign.gguf import open_gguf as open_gguf
from .foreign.packed import PackedCheckpoint as PackedCheckpoint
from .foreign.packed import load_checkpoint as load_checkpoint
from .foreign.packed import open_checkpoint as open_checkpoint
from .foreign.state_dict import from_msgpack as from_msgpack
from .foreign.state_dict import from_state_dict as from_state_dict
from .foreign.state_dict import load_orbax as load_orbax
from .foreign.state_dict import register_flax as register_flax
from .foreign.state_dict import save_orbax as save_orbax
from .foreign.state_dict import to_msgpack as to_msgpack
from .foreign.state_dict import to_state_dict as to_state_dict
from .inspection import FileReport as FileReport
from .inspection import inspect as inspect
from .streaming.quantize_file import StreamReport as StreamReport
from .streaming.quantize_file import quantize_file as quantize_file
from .streaming.quantize_folder import quantize_folder as quantize_folder
from .tree.saved_types import register_type as register_type
