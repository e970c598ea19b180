"""Models from folders as Hugging Face has them: `config.json`, weights, and a tokenizer. Tensors come one at a time."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from eformer._core import ImplicitArray, implicit, materialize
from eformer._core.tree import tree_map_with_implicit
from eformer._quantize.tree import Progress, Reporter, reporter
from eformer.errors import CheckpointError
from eformer.serialization.foreign.configuration import read_json
from eformer.serialization.foreign.gguf import gguf_at
from eformer.serialization.inspection import open_checkpoint

from . import _fused
from ._families import MATRICES, Described, described
from ._generate import Model
from ._llama_file import read as read_file
from ._tokenizer import Tokenizer

# Tables that are computed here, and what a server rounds keys and values by. Here they are not rounded.
_IGNORED = re.compile(r"(rotary_emb\.inv_freq|\.self_attn\.([qkv]|kv|prob)_(scale|zero_point))$")
# Where compressed-tensors says that something is transformed.
_LOCATION = re.compile(r'"location": "(\w+)"')
# What it rounds activations by, beside a quantized weight.
_INPUT_SCALE = re.compile(r"\.(input_(scale|global_scale|zero_point|scale_ub)|(activation|output|[kv])_scale)$")


def load(
    path: str | os.PathLike[str],
    *,
    dense: bool = False,
    dtype: Any = None,
    fuse: bool = False,
    progress: Reporter | bool | None = False,
) -> Model:
    """The model in a folder as Hugging Face has them, in a GGUF file, or in what `eformer quantize` made of either.

    Args:
        path: a folder with `config.json` and weights, dense or quantized, or a file.
        dense: decode quantized weights. Else they stay as they are stored.
        dtype: that of the weights and of what is computed with them; by default the one they are stored with.
        fuse: join the matrices of a layer that are multiplied with the same x (see `fuse`).
        progress: as for `quantize_tree`, after each tensor.
    """
    if is_folder(path) and gguf_at(path) is None:
        with reporter(progress, "loading") as tell:
            model = _of_folder(Path(path), dense, dtype, tell)
    else:
        try:
            opened = open_checkpoint(path)
        except FileNotFoundError as err:
            raise FileNotFoundError(
                f"{path} does not exist. Name a folder or a file on this computer; models of a hub are not fetched, "
                "but `hf download NAME --local-dir FOLDER` does that."
            ) from err
        model = read_file(opened, dense=dense)
        if dtype is not None:
            params = tree_map_with_implicit(lambda w: w.astype(dtype), model.params)
            model = dataclasses.replace(model, params=params)
    return dataclasses.replace(model, params=_fused.fuse(model.params)) if fuse else model


def is_folder(path: str | os.PathLike[str]) -> bool:
    """Is there a folder with a `config.json`?"""
    return (Path(path) / "config.json").is_file()


def _of_folder(folder: Path, dense: bool, dtype: Any, tell: Reporter) -> Model:
    given = read_json(folder / "config.json")
    about = described(given, folder / "config.json")
    if turned := _turned_inputs(given):
        what = f"says {turned}: inputs of matrices are multiplied by another one first, which is not done here."
        raise CheckpointError(what, file=folder / "config.json", fix="Take a checkpoint without such transforms.")
    params = _Reading(open_checkpoint(folder), about, dense, dtype, tell).params()
    extra, words = read_json(folder / "generation_config.json"), read_json(folder / "tokenizer_config.json")
    ends = extra.get("eos_token_id", given.get("eos_token_id", given.get("text_config", {}).get("eos_token_id")))
    special = {k: v.get("content", "") if isinstance(v, dict) else v for k, v in words.items() if k.endswith("_token")}
    special = {k: v for k, v in special.items() if isinstance(v, str)}
    return Model(about.config, params, _tokenizer(folder), ends, folder, extra, _template(folder, words), special)


def _turned_inputs(given: Mapping[str, Any]) -> str:
    """What of a configuration says that inputs are turned while the model runs: of AutoRound, of compressed-tensors.

    Transforms of weights alone are part of these.
    """
    for part in (given, given.get("text_config")):
        stated = part.get("quantization_config") if isinstance(part, Mapping) else None
        if not isinstance(stated, Mapping):
            continue
        for key in ("rotation_config", "spinquant_config"):
            if stated.get(key):
                return key
        places = set(_LOCATION.findall(json.dumps(stated.get("transform_config"))))
        if online := sorted(place for place in places if not place.startswith("weight")):
            return f"transform_config of {', '.join(online)}"
    return ""


def _template(folder: Path, words: Mapping[str, Any]) -> str | None:
    """The chat template: a file of its own, or part of `tokenizer_config.json`; of several, the default one."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    found = read_json(folder / "chat_template.json").get("chat_template", words.get("chat_template"))
    if isinstance(found, list):
        named = {item.get("name"): item.get("template") for item in found if isinstance(item, dict)}
        found = named.get("default")
    return found if isinstance(found, str) else None


def _tokenizer(folder: Path) -> Tokenizer | None:
    """None where there is no file or no package to read it; whoever needs it says so."""
    file = folder / "tokenizer.json"
    if not file.is_file() or importlib.util.find_spec("tokenizers") is None:
        return None
    return Tokenizer.from_file(file)


@dataclasses.dataclass
class _Reading:
    """One pass over the tensors of a checkpoint."""

    opened: Any
    about: Described
    dense: bool
    dtype: Any
    tell: Reporter

    def __post_init__(self) -> None:
        tables = [name for name in self.opened if name.endswith("embed_tokens.weight")]
        if len(tables) != 1:
            raise self.wrong("embed_tokens.weight", f"appears {len(tables)} times; a language model has it once.")
        self.prefix = tables[0].removesuffix("embed_tokens.weight")
        self.left = {name for name in self.opened if name.startswith(self.prefix) and not self.ignored(name)}
        self.heads = [name for name in self.opened if name.endswith("lm_head.weight")]
        self.left = self.left - {*self.heads} if self.about.tied else self.left | {*self.heads}
        self.total, self.done = sum(self.opened.info(name).nbytes for name in self.left), 0

    def ignored(self, name: str) -> bool:
        weight = _INPUT_SCALE.sub(".weight", name)
        is_scale = weight != name and weight in self.opened
        return _IGNORED.search(name) is not None or (
            is_scale and isinstance(self.opened.abstract(weight)[0], ImplicitArray)
        )

    def wrong(self, name: str, what: str) -> CheckpointError:
        return CheckpointError(what, file=getattr(self.opened, "path", None), tensor=name)

    def params(self) -> dict[str, Any]:
        config = self.about.config
        params = {
            "embedding": self.leaf("embed_tokens.weight", (config.vocabulary, config.width)),
            "layers": [self.layer(f"layers.{number}.") for number in range(config.layers)],
            "norm": self.leaf("norm.weight", (config.width,)),
        }
        if not self.about.tied:
            if not self.heads:
                raise self.wrong("lm_head.weight", "is missing, and config.json does not say that it is the embedding.")
            params["head"] = self.read(self.heads[0], (config.vocabulary, config.width), turned=True)
        unused = sorted(self.left)
        if unused:
            raise self.wrong(unused[0], f"is not part of the model that config.json describes (one of {len(unused)}).")
        return params

    def layer(self, at: str) -> dict[str, Any]:
        config, family = self.about.config, self.about.family
        inner, kv, width = config.heads * config.head_size, config.kv_heads * config.head_size, config.width
        shapes = {"q": (inner, width), "k": (kv, width), "v": (kv, width), "o": (width, inner)}
        router, experts, parts = family.experts
        made: dict[str, Any] = {}
        if self.has(f"{at}{router}.weight"):
            made["router"] = self.leaf(f"{at}{router}.weight", turned=True)
            together = f"{at}{experts.rpartition('.')[0]}.switch_mlp."  # of MLX: all experts in one tensor
            for our, part in parts.items():
                if self.has(whole := f"{together}{our}_proj.weight"):
                    made[our] = self.leaf(whole, turned=True)
                else:
                    made[our] = self.stacked(f"{at}{experts}", part, made["router"].shape[1])
        else:
            shapes |= {"gate": (config.hidden, width), "up": (config.hidden, width), "down": (width, config.hidden)}
        for our, shape in shapes.items():
            made[our] = self.leaf(f"{at}{MATRICES[our]}.weight", shape, turned=True)
            if self.has(bias := f"{at}{MATRICES[our]}.bias") or our in self.about.biased:
                made[f"{our}_bias"] = self.leaf(bias, shape[:1])
        for our, name in family.norms.items():
            of_heads = our in ("norm_q", "norm_k")
            if not of_heads or family.norms_heads or self.has(f"{at}{name}.weight"):
                made[our] = self.leaf(f"{at}{name}.weight", (config.head_size if of_heads else width,))
        return made

    def has(self, name: str) -> bool:
        return self.prefix + name in self.opened

    def leaf(self, name: str, shape: tuple[int, ...] | None = None, *, turned: bool = False) -> Any:
        return self.read(self.prefix + name, shape, turned=turned)

    def stacked(self, at: str, part: str, count: int) -> Any:
        found = [self.leaf(f"{at}.{i}.{part}.weight", turned=True) for i in range(count)]
        if len({(type(w), w.shape) for w in found}) > 1:
            raise self.wrong(f"{self.prefix}{at}", f"has experts whose {part} differ in format or shape.")
        return implicit(lambda: jnp.stack(found))()

    def read(self, name: str, shape: tuple[int, ...] | None, *, turned: bool = False) -> Any:
        if name not in self.opened:
            raise self.wrong(name, "is missing.")
        leaf = _array(self.opened[name])
        if shape is not None and tuple(leaf.shape) != shape:
            raise self.wrong(name, f"has the shape {list(leaf.shape)}, but config.json says {list(shape)}.")
        if self.dense:
            leaf = materialize(leaf)
        if self.dtype is not None:
            leaf = leaf.astype(self.dtype)
        if turned:
            leaf = leaf.mT
        self.left.discard(name)
        self.done += self.opened.info(name).nbytes
        self.tell(Progress(name, self.done, self.total))
        return jax.block_until_ready(leaf)  # so that no two tensors are being turned at once


def _array(leaf: Any) -> Any:
    """A leaf as an array of JAX; those that were NumPy arrays when they were saved come back as such."""
    return leaf if isinstance(leaf, ImplicitArray) else jnp.asarray(leaf)
