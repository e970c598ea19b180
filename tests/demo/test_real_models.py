"""The demonstrations on real models, with tiny models in the places of the packages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli import tiny
from models.test_tokenizers import word_pieces

from demo import formats, run_minilm, run_smollm2, text
from demo.__main__ import main
from eformer.models import _llama_file
from eformer.serialization import save

FEW = {"f32": None, "int8": "int8", "nf4": "nf4"}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that can be imported from, and fewer formats than usual."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(formats, "FORMATS", FEW)
    return tmp_path


def run(model: str, folder: Path, capsys: pytest.CaptureFixture[str], *more: str) -> Any:
    assert main(["--model", model, "--quick", "--json", "--out", str(folder), *more]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.thorough
def test_a_llama_model(package: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    module, distribution, pattern = _llama_file.SMOLLM2
    (package / module).mkdir()
    tiny.write(package / module / "model.gguf", "Q8_0", **{"tokenizer.ggml.eos_token_id": np.uint32(0)})
    monkeypatch.setattr(text, "topics", lambda held_out: 60 * "ab cd dab\n")
    monkeypatch.setattr(run_smollm2, "PROMPT", "ab ")
    monkeypatch.setattr(run_smollm2, "MIXED", {"*down": "int8"})  # the embedding is too small to be quantized
    found = run("smollm2", package, capsys)
    rows = {row["format"]: row for row in found["rows"]}
    assert list(rows) == [*FEW, "nf4 + int8", "Q4_1 as stored"]
    assert rows["Q4_1 as stored"]["quality"] == pytest.approx(rows["f32"]["quality"], rel=1e-4)
    assert rows["Q4_1 as stored"]["bits_per_weight"] < 9
    assert rows["nf4"]["nbytes"] < rows["int8"]["nbytes"] < rows["f32"]["nbytes"]
    assert all(row["bit_equal"] and not row["materializations"] for row in rows.values())
    assert set(found["text"]) == {"f32", "nf4"}
    cached = run("smollm2", package, capsys, "--cache", "int8", "--activations", "int8")
    assert cached["rows"][0]["quality"] != rows["f32"]["quality"]
    assert not any(row["materializations"] for row in cached["rows"])
    assert main(["--model", "minilm", "--cache", "int8", "--out", str(package)]) == 2
    assert _llama_file.model_file(module, distribution, pattern).name == "model.gguf"


@pytest.mark.thorough
def test_a_bert_model(package: Path, capsys: pytest.CaptureFixture[str]):
    folder = package / run_minilm.PACKAGE[0] / "model"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").touch()  # or the package itself, where it is installed, would come first
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["[UNK]", "[CLS]", "[SEP]", *letters, *(f"##{c}" for c in letters)]
    (folder / "config.json").write_text('{"num_attention_heads": 2}')
    word_pieces({w: i for i, w in enumerate(words)}, folder / "tokenizer.json")
    save(folder / "model.safetensors", bert(len(words), 128, 256, layers=2))
    found = run("minilm", package, capsys)
    rows = {row["format"]: row for row in found["rows"]}
    assert list(rows) == list(FEW)
    assert rows["f32"]["quality"] == pytest.approx(1.0)
    assert 0.9999 < rows["int8"]["quality"] <= 1.0001
    assert 0.95 < rows["nf4"]["quality"] < 0.9999
    assert rows["f32"]["change"] == 1.0
    assert all(row["bit_equal"] and not row["materializations"] for row in rows.values())
    assert found["parameters"] == rows["f32"]["nbytes"] // 4


def bert(words: int, width: int, hidden: int, layers: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(2)

    def linear(name: str, out: int, into: int) -> dict[str, np.ndarray]:
        weight = rng.standard_normal((out, into)).astype(np.float32) * into**-0.5
        return {f"{name}.weight": weight, f"{name}.bias": np.zeros(out, np.float32)}

    def norm(name: str) -> dict[str, np.ndarray]:
        return {f"{name}.weight": np.ones(width, np.float32), f"{name}.bias": np.zeros(width, np.float32)}

    tables = {"word": words, "position": 512, "token_type": 2}
    found = {
        f"embeddings.{k}_embeddings.weight": rng.standard_normal((n, width)).astype("f4") for k, n in tables.items()
    }
    found |= norm("embeddings.LayerNorm")
    for number in range(layers):
        at = f"encoder.layer.{number}"
        for name in ("query", "key", "value"):
            found |= linear(f"{at}.attention.self.{name}", width, width)
        found |= linear(f"{at}.attention.output.dense", width, width) | norm(f"{at}.attention.output.LayerNorm")
        found |= linear(f"{at}.intermediate.dense", hidden, width)
        found |= linear(f"{at}.output.dense", width, hidden) | norm(f"{at}.output.LayerNorm")
    return found | linear("pooler.dense", width, width)
