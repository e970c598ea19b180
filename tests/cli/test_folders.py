"""From a folder to a folder on the command line, and talking to what is in it."""

from __future__ import annotations

import importlib.util
import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from models import folders

import eformer as ef
from eformer.cli import main
from eformer.errors import CheckpointError

from . import tiny

TEMPLATE = "{% for m in messages %}{{ m.role[0] }}{{ m.content }}</s>{% endfor %}a"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    made = folders.write(tmp_path / "source", "llama 3")
    folders.write_tokenizer(made, TEMPLATE)
    (made / "generation_config.json").write_text('{"do_sample": true, "temperature": 0.5, "eos_token_id": [1]}')
    return made


def test_a_folder_to_a_folder_to_text(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "out"
    argv = ["quantize", str(source), str(out), "--format", "int8", "--min-size", "0", "--json"]
    assert main(argv) == 0
    assert json.loads(capsys.readouterr().out)["formats"]["int8"]["tensors"] == 15
    assert {path.name for path in out.iterdir()} == {path.name for path in source.iterdir()}
    assert main(argv) == 1
    assert "holds files already" in capsys.readouterr().err
    assert main([*argv, "--force"]) == 0
    capsys.readouterr()
    argv = ["generate", str(out), "--prompt", "abc", "--tokens", "6", "--top-k", "3", "--json"]
    assert main(argv) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["tokens"]) <= 6
    assert (found["sampling"]["temperature"], found["sampling"]["top_k"]) == (0.5, 3)
    assert main([*argv, "--top-p", "2"]) == 2
    assert "top_p=2.0 is not allowed" in capsys.readouterr().err


def test_a_folder_is_calibrated_on_a_text(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    text, out = tmp_path / "text.txt", tmp_path / "out"
    text.write_text("abcd dcba " * 60)
    argv = ["quantize", str(source), str(out), "--format", "int4", "--block-size", "16", "--min-size", "0"]
    argv += ["--rule", "*embed*=none", "--rule", "*down_proj*=int8", "--json"]
    assert main([*argv, "--method", "gptq"]) == 2
    assert "give a text, --calibrate FILE" in capsys.readouterr().err
    given = ["--calibrate", str(text)]
    assert main([*argv[:2], str(tmp_path / "out.safetensors"), *argv[3:], *given]) == 2
    assert "the source must be a folder" in capsys.readouterr().err
    assert main([*argv, "--calibrate", str(tmp_path / "none.txt")]) == 2
    assert "there is no such file" in capsys.readouterr().err
    (tmp_path / "short.txt").write_text("")
    assert main(["evaluate", str(source), "--text", str(tmp_path / "short.txt")]) == 1
    assert "short.txt holds 0 tokens; give a text that is longer" in capsys.readouterr().err
    losses = {}
    for method in ("round", "gptq"):
        assert main([*argv, *given, "--method", method, "--force"]) == 0
        formats = json.loads(capsys.readouterr().out)["formats"]
        assert sorted(set(formats) - {"float32"}) == ["int4", "int8"]
        assert main(["evaluate", str(out), "--text", str(text), "--against", str(source), "--json"]) == 0
        losses[method] = json.loads(capsys.readouterr().out)["divergence"]["value"]
    assert 0 < losses["gptq"] < 0.8 * losses["round"]


@pytest.mark.thorough
def test_a_folder_is_quantized_by_other_methods(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    text, out = tmp_path / "text.txt", tmp_path / "out"
    text.write_text("abcd dcba " * 60)
    argv = ["--format", "int4", "--block-size", "16", "--min-size", "0", "--rule", "*embed*=none", "--json"]
    assert main(["quantize", str(source), str(out), *argv, "--calibrate", str(text), "--method", "awq"]) == 0
    formats = json.loads(capsys.readouterr().out)["formats"]
    assert sorted(set(formats) - {"float32"}) == ["int4", "int4, scaled inputs"]  # behind norms nothing is carried
    assert main(["evaluate", str(out), "--text", str(text), "--against", str(source), "--json"]) == 0
    awq = json.loads(capsys.readouterr().out)["divergence"]["value"]
    assert main(["quantize", str(source), str(tmp_path / "more"), *argv, "--method", "scale"]) == 0
    capsys.readouterr()
    assert main(["evaluate", str(tmp_path / "more"), "--text", str(text), "--against", str(source), "--json"]) == 0
    assert 0 < awq < 1.5 * json.loads(capsys.readouterr().out)["divergence"]["value"]  # norms are written, too
    told = json.loads((tmp_path / "more" / "config.json").read_text())["quantization_config"]["groups"]
    assert {group["method"] for group in told} == {"scale"}


@pytest.mark.thorough
def test_a_gguf_file_is_calibrated_on_a_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    gguf, text, out = tiny.write(tmp_path / "tiny.gguf"), tmp_path / "text.txt", tmp_path / "out.safetensors"
    text.write_text("abcd dcba bacd " * 40)
    argv = ["quantize", str(gguf), str(out), "--format", "int3", "--min-size", "0", "--rule", "token*=none", "--json"]
    assert main(argv) == 0
    plain, losses = ef.load(out), {}
    for method in ("round", "gptq"):
        assert main([*argv, "--force", "--calibrate", str(text), "--method", method]) == 0
        capsys.readouterr()
        assert main(["evaluate", str(out), "--text", str(text), "--against", str(gguf), "--json"]) == 0
        losses[method] = json.loads(capsys.readouterr().out)["divergence"]["value"]
        found = ef.load(out)
        assert {name: (w.shape, type(w)) for name, w in found.items()} == {
            name: (w.shape, type(w)) for name, w in plain.items()
        }
    assert 0 < losses["gptq"] < 0.8 * losses["round"]


def test_a_run_that_was_stopped_goes_on(source: Path, tmp_path: Path):
    out, seen = tmp_path / "out", []

    def stop(step: Any) -> None:
        seen.append(step)
        if len(seen) == 9:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ef.quantize_folder(source, out, min_size=0, progress=stop)
    assert not (out / "config.json").exists()
    assert ef.quantize_folder(source, out, min_size=0).resumed > 0
    (out / "config.json").unlink()  # stopped after the weights
    ef.quantize_folder(source, out, min_size=0)
    assert (out / "config.json").exists()
    with pytest.raises(CheckpointError, match="holds files already"):
        ef.quantize_folder(source, out)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("")
    with pytest.raises(CheckpointError, match="holds files already"):
        ef.quantize_folder(source, tmp_path / "other")


@pytest.mark.parametrize(
    ("argv", "status", "words"),
    [
        ("quantize source out.gguf", 2, "GGUF files are read, not written"),
        ("quantize source source", 1, "is the source, or in it"),
        ("quantize source source/in/it", 1, "is the source, or in it"),
        ("quantize source source/config.json", 1, "is a file"),
        ("quantize source/model.safetensors small.safetensors", 2, "small.safetensors exists already"),
        ("quantize done out", 1, "is quantized by 'gptq', as its config.json says"),
        ("quantize torch out", 1, "a file of PyTorch, which is not installed"),
        ("generate bare", 1, "has no tokenizer.json; fetch it"),
        ("chat bare", 1, "has no tokenizer.json"),
        ("generate sentences", 1, "has no tokenizer.json, only tokenizer.model, which is not read; AutoTokenizer"),
        ("generate mute --chat", 2, "mute has no chat template; leave --chat out"),
    ],
)
def test_errors_are_one_line(
    argv: str,
    status: int,
    words: str,
    source: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.chdir(source.parent)
    monkeypatch.setitem(sys.modules, "torch", None)
    Path("small.safetensors").write_bytes(b"")
    folders.write(Path("bare"), "llama 3")
    (folders.write(Path("sentences"), "llama 3") / "tokenizer.model").write_bytes(b"")
    folders.write_tokenizer(folders.write(Path("mute"), "llama 3"))
    folders.write(Path("done"), "llama 3", quantization_config={"quant_method": "gptq"})
    Path("torch").mkdir()
    Path("torch/pytorch_model.bin").write_bytes(b"PK")
    Path("torch/config.json").write_text("{}")
    assert main(argv.split()) == status
    said = capsys.readouterr()
    assert words in said.err
    assert said.err.count("\n") == 1


def test_a_tokenizer_without_its_package(
    source: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "tokenizers" else found(name))
    assert main(["generate", str(source)]) == 1
    said = capsys.readouterr().err
    assert "pip install 'eformer[models]'" in said
    assert "has no tokenizer.json" not in said


def test_a_text_longer_than_the_model_knows(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    short = folders.write(tmp_path / "short", "llama 3", max_position_embeddings=8)
    folders.write_tokenizer(short)
    assert main(["generate", str(short), "--prompt", "abc", "--tokens", "6"]) == 0
    assert "a prompt of 3 tokens and up to 6 more are beyond the 8 positions" in capsys.readouterr().err
    assert main(["generate", str(short), "--prompt", "abc" * 3, "--tokens", "1"]) == 0
    assert "Only a shorter prompt stays within." in capsys.readouterr().err
    assert main(["generate", str(short), "--prompt", "abc", "--tokens", "5"]) == 0
    assert "warning" not in capsys.readouterr().err


def test_all_formats_can_be_named(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main(["generate", "--help"])
    said = capsys.readouterr().out
    assert all(str(kind) in said for kind in ef.QuantizationType)
    assert "default: 'The '" in " ".join(said.split())


def test_a_conversation(source: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    asked: list[Any] = []
    monkeypatch.setattr("eformer.cli.chat.in_words", lambda model, said: asked.append(list(said)) or "abc")
    monkeypatch.setattr("sys.stdin", io.StringIO("bad\n\ncab\n/reset\nbee\n/exit\nnever\n"))
    assert main(["chat", str(source), "--tokens", "4", "--temperature", "0", "--system", "be"]) == 0
    answers = capsys.readouterr().out.splitlines()
    assert len(answers) == 3
    assert [[m["role"][0] for m in said] for said in asked] == [["s", "u"], ["s", "u", "a", "u"], ["s", "u"]]
    assert asked[1][1:] == [
        {"role": "user", "content": "bad"},
        {"role": "assistant", "content": answers[0]},
        {"role": "user", "content": "cab"},
    ]
    monkeypatch.undo()
    monkeypatch.setattr("sys.stdin", io.StringIO("bad\n"))
    assert main(["chat", str(source), "--tokens", "4", "--seed", "1"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1
