"""What `config.json` says of a model: a table of the architectures, and how each differs from LLaMA.

A new architecture is a row: what its configuration means where it says nothing, and what the decoder does differently.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from eformer.errors import CheckpointError

from ._decoder import Config, Rope

Given = Mapping[str, Any]

# Parts of a layer: our name -> that of the checkpoint. Matrices there are (out, in), ours are (in, out).
MATRICES = {part: f"self_attn.{part}_proj" for part in "qkvo"} | {p: f"mlp.{p}_proj" for p in ("gate", "up", "down")}
NORMS = {
    "norm_attention": "input_layernorm",
    "norm_mlp": "post_attention_layernorm",
    "norm_q": "self_attn.q_norm",
    "norm_k": "self_attn.k_norm",
}
_GEMMA_NORMS = NORMS | {
    "norm_attention_out": "post_attention_layernorm",
    "norm_mlp": "pre_feedforward_layernorm",
    "norm_mlp_out": "post_feedforward_layernorm",
}
_EXPERTS = {part: f"{part}_proj" for part in ("gate", "up", "down")}


def _windowed(given: Given, layer: int) -> bool:
    """Qwen: the upper layers, if any."""
    return bool(given.get("use_sliding_window")) and layer >= given["max_window_layers"]


@dataclasses.dataclass(frozen=True)
class Family:
    """How an architecture differs: `defaults` of its configuration, and a test for layers with a sliding window.

    `experts` are the name of the router, that of the experts, and those of their parts. `biased` are the matrices that
    always have a bias; None: the configuration says which. Gemma adds 1 to the weights of its norms and scales its
    embedding: `is_gemma`.
    """

    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    is_windowed: Callable[[Given, int], bool] = lambda given, layer: False
    norms: Mapping[str, str] = dataclasses.field(default_factory=lambda: NORMS)
    experts: tuple[str, str, Mapping[str, str]] = ("mlp.gate", "mlp.experts", _EXPERTS)
    biased: str | None = None
    norms_heads: bool = False
    is_gemma: bool = False


_GEMMA = {"head_dim": 256, "tie_word_embeddings": True, "hidden_act": "gelu_pytorch_tanh"}
_GEMMA2 = _GEMMA | {"query_pre_attn_scalar": 256, "sliding_window": 4096}
_QWEN = {"max_window_layers": 28, "sliding_window": 4096}
FAMILIES: dict[str, Family] = {
    "llama": Family(),
    "mistral": Family({"sliding_window": 4096, "num_key_value_heads": 8}, lambda given, layer: True, biased=""),
    "mixtral": Family(
        {"num_key_value_heads": 8, "rope_theta": 1e6, "rms_norm_eps": 1e-5, "norm_topk_prob": True},
        lambda given, layer: True,
        experts=("block_sparse_moe.gate", "block_sparse_moe.experts", {"gate": "w1", "up": "w3", "down": "w2"}),
        biased="",
    ),
    "qwen2": Family(_QWEN, _windowed, biased="qkv"),
    "qwen3": Family(_QWEN | {"head_dim": 128}, _windowed, norms_heads=True),
    "qwen3_moe": Family(
        {"num_key_value_heads": 4, "sliding_window": 4096, "norm_topk_prob": False},
        lambda given, layer: bool(given.get("use_sliding_window")),
        norms_heads=True,
    ),
    "gemma": Family(_GEMMA, is_gemma=True),
    "gemma2": Family(
        _GEMMA2 | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        lambda given, layer: layer % 2 == 0,
        _GEMMA_NORMS,
        is_gemma=True,
    ),
    "gemma3_text": Family(
        _GEMMA2 | {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "sliding_window_pattern": 6},
        lambda given, layer: (layer + 1) % given["sliding_window_pattern"] != 0,
        _GEMMA_NORMS,
        norms_heads=True,
        is_gemma=True,
    ),
    "smollm3": Family({"tie_word_embeddings": True, "rope_theta": 2e6, "no_rope_layer_interval": 4}),
}
_DEFAULTS = {"rms_norm_eps": 1e-6, "rope_theta": 1e4, "hidden_act": "silu", "tie_word_embeddings": False}
_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}
_ROPES = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}
_YARN = ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate")


@dataclasses.dataclass(frozen=True)
class Described:
    """A checkpoint as its configuration describes it."""

    config: Config
    family: Family
    tied: bool
    biased: frozenset[str]  # matrices that must have a bias


def described(given: Given, file: Any = None) -> Described:
    """The model of a `config.json`; of one with pictures too, its language part."""
    if isinstance(given.get("text_config"), Mapping):
        inherited = {k: given[k] for k in ("tie_word_embeddings",) if k in given}
        given = {**inherited, **given["text_config"]}
    kind = given.get("model_type")
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None:
        raise CheckpointError(
            f"describes a model of the type {kind!r}; those that run here are {', '.join(FAMILIES)}.", file=file
        )
    given = {**_DEFAULTS, **family.defaults, **{k: v for k, v in given.items() if v is not None or "softcap" in k}}
    config = _config(_Reader(given, file), family)
    said = [*("qkvo" * bool(given.get("attention_bias"))), *(("gate", "up", "down") * bool(given.get("mlp_bias")))]
    biased = frozenset(said if family.biased is None else family.biased)
    return Described(config, family, bool(given["tie_word_embeddings"]), biased)


@dataclasses.dataclass(frozen=True)
class _Reader:
    given: Given
    file: Any

    def number(self, name: str, default: Any = None, kind: type = int) -> Any:
        """A positive number."""
        found = self.given.get(name, default)
        allowed = (int, float) if kind is float else (int,)
        if isinstance(found, bool) or not isinstance(found, allowed) or found <= 0:
            raise self.wrong(name, f"which must be a positive {'number' if kind is float else 'whole number'}")
        return kind(found)

    def wrong(self, name: str, why: str) -> CheckpointError:
        return CheckpointError(f"says {self.given.get(name)!r:.200} for {name}, {why}.", file=self.file)


def possible(file: Any, **sizes: Any) -> Config:
    """The configuration that a file describes."""
    try:
        return Config(**sizes)
    except ValueError as err:
        raise CheckpointError(f"describes a model that cannot be: {err}", file=file) from err


def _config(read: _Reader, family: Family) -> Config:
    given, number = read.given, read.number
    width, heads, layers = number("hidden_size"), number("num_attention_heads"), number("num_hidden_layers")
    if "head_dim" not in given and width % heads:
        raise read.wrong("hidden_size", f"which its {heads} heads do not divide, and no head_dim")
    if given.get("use_bidirectional_attention"):
        raise read.wrong("use_bidirectional_attention", "but tokens only look back here")
    size = number("head_dim", width // heads)
    activation = given["hidden_activation" if "hidden_activation" in given else "hidden_act"]
    if family.is_gemma and activation == "gelu":  # what early releases said, and did not mean
        activation = "gelu_pytorch_tanh"
    if activation not in _ACTIVATIONS:
        raise read.wrong("hidden_act", f"which is none of {', '.join(_ACTIVATIONS)}")
    windows = _windows(read, family, layers)
    ropes = _ropes(read, windows)
    caps = [
        None if given.get(f"{x}_logit_softcapping") is None else float(given[f"{x}_logit_softcapping"])
        for x in ("attn", "final")
    ]
    asked = given.get("query_pre_attn_scalar")
    return possible(
        read.file,
        vocabulary=number("vocab_size"),
        width=width,
        layers=layers,
        heads=heads,
        kv_heads=number("num_key_value_heads", heads),
        hidden=number("intermediate_size"),
        rope_base=next((rope.base for rope in ropes if rope), 1e4),
        epsilon=number("rms_norm_eps", kind=float),
        head_size=size,
        ropes=ropes,
        windows=windows,
        rope_halves=True,
        activation=_ACTIVATIONS[activation],
        norm_offset=1.0 if family.is_gemma else 0.0,
        embedding_scale=width**0.5 if family.is_gemma else 1.0,
        attention_scale=None if asked is None else number("query_pre_attn_scalar", kind=float) ** -0.5,
        attention_cap=caps[0],
        logit_cap=caps[1],
        experts_per_token=number("num_experts_per_tok", 1),
        normalize_experts=bool(given.get("norm_topk_prob", True)),
        positions=number("max_position_embeddings") if given.get("max_position_embeddings") else 0,
    )


def _windows(read: _Reader, family: Family, layers: int) -> tuple[int | None, ...]:
    given = read.given
    if given.get("sliding_window") is None:
        return ()
    kinds = given.get("layer_types")
    if kinds is None:
        windowed = [family.is_windowed(given, layer) for layer in range(layers)]
    else:
        unknown = {*kinds} - {"sliding_attention", "full_attention"} if isinstance(kinds, list) else {kinds}
        if unknown or len(kinds) != layers:
            raise read.wrong("layer_types", f"which must name sliding_attention or full_attention {layers} times")
        windowed = [kind == "sliding_attention" for kind in kinds]
    size = read.number("sliding_window")
    return tuple(size if on else None for on in windowed) if any(windowed) else ()


def _ropes(read: _Reader, windows: tuple[int | None, ...]) -> tuple[Rope | None, ...]:
    given, layers = read.given, read.given["num_hidden_layers"]
    found = given.get("rope_parameters") or {}
    if "full_attention" in found or "sliding_attention" in found:
        far, near = found.get("full_attention") or {}, found.get("sliding_attention") or {}
    else:
        far, near = found or given.get("rope_scaling") or {}, None
    everywhere = _rope(read, far, given["rope_theta"])
    local = everywhere
    if "rope_local_base_freq" in given:  # Gemma 3: layers with a window have positions of their own
        local = _rope(read, near or {}, given["rope_local_base_freq"])
    ropes: list[Rope | None] = [local if window else everywhere for window in windows or (None,) * layers]
    has = given.get("no_rope_layers")
    if has is None and (step := given.get("no_rope_layer_interval")):
        has = [(layer + 1) % step != 0 for layer in range(layers)]
    return tuple(rope if has is None or has[i] else None for i, rope in enumerate(ropes))


def _rope(read: _Reader, scaling: Given, base: float) -> Rope:
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in _ROPES or scaling.get("partial_rotary_factor", 1.0) != 1.0:
        raise CheckpointError(
            f"asks for rotary positions of the kind {dict(scaling)!r:.200}; allowed are whole heads and the kinds "
            f"{', '.join(_ROPES)}.",
            file=read.file,
        )
    given = {"original_max_position_embeddings": read.given.get("max_position_embeddings"), **scaling}
    numbers = [(n, given[n]) for n in (*_ROPES[kind], *(_YARN if kind == "yarn" else ())) if given.get(n) is not None]
    missing = {*_ROPES[kind]} - {n for n, _ in numbers}
    if missing or any(not isinstance(x, (int, float)) for _, x in numbers):
        what = f"asks for {kind} positions, which need the numbers {', '.join(_ROPES[kind])}, and says {dict(scaling)}."
        raise CheckpointError(what, file=read.file)
    return Rope(float(scaling.get("rope_theta", base)), kind, tuple((n, float(x)) for n, x in numbers))
