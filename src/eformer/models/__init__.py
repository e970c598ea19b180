"""Language models of the LLaMA family in plain JAX, with dense weights or quantized ones.

`load` reads a folder as Hugging Face has them (LLaMA, Qwen 2 and 3 with their experts, Mistral, Mixtral, Gemma and
SmolLM), a GGUF file, or what `eformer quantize` made of either; `generate` continues a text.
Tokenizers need the package `tokenizers`, chat templates `jinja2`: `pip install 'eformer[models]'`.

>>> import jax
>>> from eformer import models
>>> config = models.Config(vocabulary=16, width=32, layers=1, heads=2, kv_heads=1, hidden=64)
>>> model = models.Model(config, models.init(config, jax.random.key(0)))
>>> [len(piece) for piece in models.generate(model, [1, 2, 3], 20)]
[16, 4]
"""

from ._adapter import load_adapter as load_adapter
from ._adapter import save_adapter as save_adapter
from ._adapter import save_folder as save_folder
from ._chat import chat_text as chat_text
from ._decoder import Config as Config
from ._decoder import Params as Params
from ._decoder import Rope as Rope
from ._decoder import decode as decode
from ._decoder import forward as forward
from ._decoder import init as init
from ._decoder import make_cache as make_cache
from ._folder import load as load
from ._fused import fuse as fuse
from ._generate import CHUNK as CHUNK
from ._generate import Memory as Memory
from ._generate import Model as Model
from ._generate import Sampling as Sampling
from ._generate import generate as generate
from ._generate import stream as stream
from ._tokenizer import Tokenizer as Tokenizer
