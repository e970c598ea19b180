"""Writes folders.json: configurations, shapes and logits of tiny models, by `transformers`.

Run by hand, with the `oracle` extra: PYTHONPATH=tests/models:tests/oracle python tests/models/golden/make_folders.py
"""

from __future__ import annotations

import importlib
import json
import tempfile
from pathlib import Path
from typing import Any

from safetensors import safe_open

SMALL = {"vocab_size": 24, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 16}
SMALL |= {"num_attention_heads": 2, "num_key_value_heads": 1, "bos_token_id": 0, "eos_token_id": 1}
NARROW = {"sliding_window": 4, "moe_intermediate_size": 16, "max_window_layers": 1}
TOKENS = [3, 14, 15, 9, 2, 6, 5, 3, 5, 8, 9, 7]


def made(case: str, oracle: Any, folders: Any) -> dict[str, Any]:
    family, more = oracle.CASES[case]
    more = {**more, **SMALL, **{k: v for k, v in NARROW.items() if more.get(k)}}
    if family in ("Qwen2", "SmolLM3"):
        del more["head_dim"]
    torch, transformers = oracle.torch, oracle.transformers
    model = getattr(transformers, f"{family}ForCausalLM")(oracle.config_of(family, more)).eval()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        config = json.loads((Path(folder) / "config.json").read_text())
        with safe_open(Path(folder) / "model.safetensors", "np") as file:
            shapes = {name: list(file.get_slice(name).get_shape()) for name in sorted(file.keys())}
        folders.GOLDEN[case] = {"config": config, "shapes": shapes}
        folders.write(Path(folder), case)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
        with torch.no_grad():
            logits = model(torch.tensor([TOKENS])).logits[0].numpy()
    rows = {str(place): [round(float(x), 5) for x in logits[place]] for place in (0, 6, 11)}
    return {"config": config, "shapes": shapes, "tokens": TOKENS, "logits": rows}


def main() -> None:
    oracle, folders = importlib.import_module("test_transformers"), importlib.import_module("folders")
    text = json.dumps({case: made(case, oracle, folders) for case in oracle.CASES}, separators=(",", ":"))
    (Path(__file__).parent / "folders.json").write_text(text.replace('},"', '},\n"') + "\n")


if __name__ == "__main__":
    main()
