"""Folders as Hugging Face has them, as small as they can be, with the weights that belong to golden/folders.json."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

GOLDEN = json.loads((Path(__file__).parent / "golden" / "folders.json").read_text())
LETTERS = [chr(ord("a") + i) for i in range(20)]


def weight(name: str, shape: list[int]) -> np.ndarray:
    """Random, but always the same for a name. Vectors are near 1, as norms are."""
    values = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape).astype(np.float32)
    return 1 + 0.3 * values if len(shape) == 1 else values * np.float32(1.5 * shape[-1] ** -0.5)


def write(folder: Path, case: str, **more: Any) -> Path:
    """The folder of a case; `more` replaces parts of its configuration."""
    golden = GOLDEN[case]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**golden["config"], **more}))
    save_file({n: weight(n, s) for n, s in golden["shapes"].items()}, folder / "model.safetensors")
    return folder


def write_tokenizer(folder: Path, template: str | None = None) -> None:
    """Letters, spaces and a few special tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = {token: number for number, token in enumerate(["<s>", "</s>", "Ġ", "Ċ", *LETTERS])}
    made = Tokenizer(models.BPE(vocab=tokens, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in ("<s>", "</s>")])
    made.save(str(folder / "tokenizer.json"))
    words = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps({k: v for k, v in words.items() if v}))
