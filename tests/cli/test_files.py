"""`eformer quantize`, `inspect` and `report`: their data, their tables, their errors."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from serialization.gguf_files import gguf_bytes

from eformer.cli import main
from eformer.ops.quantization import ArrayNF4, quantize
from eformer.serialization import inspect, load, save

from . import tiny


def run(capsys: pytest.CaptureFixture[str], *argv: object, status: int = 0) -> Any:
    assert main([*map(str, argv), "--json"]) == status
    return json.loads(capsys.readouterr().out)


@pytest.fixture
def dense(tmp_path: Path) -> Path:
    rng = np.random.default_rng(5)
    layers = {f"layers.{i}.mlp.kernel": jnp.asarray(rng.standard_normal((128, 96)), jnp.float32) for i in range(2)}
    others = {"embedding": jnp.asarray(rng.standard_normal((64, 80)), jnp.float32), "norm.scale": jnp.ones(8192)}
    return save(tmp_path / "dense.safetensors", {**layers, **others, "steps": jnp.arange(3)})


def test_quantize_like_quantize_tree(dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    target = tmp_path / "small.safetensors"
    found = run(capsys, "quantize", dense, target, "--rule", "embedding=int8", "--rule", "*head*=ternary")
    assert found["formats"]["nf4"]["tensors"] == 2
    assert found["formats"]["int8"]["tensors"] == 1
    assert found["formats"]["dense"]["tensors"] == 2
    assert found["warnings"] == ["rule '*head*' matches no path"]
    assert found["nbytes_in"] == inspect(dense).nbytes
    before, after = load(dense), load(target)
    for name in ("layers.0.mlp.kernel", "layers.1.mlp.kernel"):
        expected = quantize(before[name], dtype="nf4", axis=-2)
        assert isinstance(after[name], ArrayNF4)
        np.testing.assert_array_equal(after[name].packed, expected.packed)
        np.testing.assert_array_equal(after[name].absmax, expected.absmax)
    np.testing.assert_array_equal(
        after["embedding"].materialize(), quantize(before["embedding"], dtype="int8", axis=-1).materialize()
    )
    np.testing.assert_array_equal(after["norm.scale"], before["norm.scale"])


def test_plans_and_options(dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    rules = tmp_path / "rules.json"
    rules.write_text(json.dumps({"layers.0*": "none", "re:layers.1": {"dtype": "nf4", "block_size": 32}}))
    plan = run(capsys, "quantize", dense, tmp_path / "never", "--rules", rules, "--dry-run", "--axis", "-1")
    assert not (tmp_path / "never").exists()
    decided = {line["path"]: (line["format"], line["axis"]) for line in plan["tensors"]}
    assert decided == {
        "layers.0.mlp.kernel": ("dense", None),
        "layers.1.mlp.kernel": ("nf4", -1),
        "embedding": ("nf4", -1),
        "norm.scale": ("dense", None),
        "steps": ("dense", None),
    }
    options = ("--double-quant", "--block-size", "32", "--min-size", "6000", "--max-shard-size", "20kB")
    found = run(capsys, "quantize", dense, tmp_path / "q.safetensors", *options)
    assert found["file"].endswith(".index.json")
    assert found["formats"]["nf4"]["tensors"] == 2
    leaf = load(tmp_path / "q.safetensors")["layers.0.mlp.kernel"]
    assert leaf.block_size == 32
    rounding = ("--format", "int4", "--activations", "int8", "--rule", "embedding=nf4")
    found = run(capsys, "quantize", dense, tmp_path / "a8.safetensors", *rounding)
    assert (found["formats"]["int4 x int8"]["tensors"], found["formats"]["nf4"]["tensors"]) == (2, 1)
    leaf = load(tmp_path / "a8.safetensors")["layers.0.mlp.kernel"]
    assert (leaf.activations, leaf.w.format, leaf.x_scale) == ("int8", "int4", None)
    assert "dense" in main_text(capsys, "quantize", dense, tmp_path / "again.safetensors", "--quiet")
    assert "it is a norm" in main_text(capsys, "quantize", dense, tmp_path / "again.safetensors", "--dry-run")


def main_text(capsys: pytest.CaptureFixture[str], *argv: object, status: int = 0) -> str:
    assert main([*map(str, argv)]) == status
    return capsys.readouterr().out


def test_inspect(dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run(capsys, "quantize", dense, tmp_path / "small.safetensors")
    found = run(capsys, "inspect", tmp_path / "small.safetensors")
    by_path = {tensor["path"]: tensor for tensor in found["tensors"]}
    kernel = by_path["layers.0.mlp.kernel"]
    assert kernel == {
        "path": "layers.0.mlp.kernel",
        "format": "nf4",
        "shape": [128, 96],
        "dtype": "float32",
        "nbytes": 128 * 96 // 2 + 4 * 128 * 96 // 64,
    }
    assert by_path["steps"]["dtype"] == "int32"
    assert found["nbytes"] == sum(found["formats"].values()) == sum(t["nbytes"] for t in found["tensors"])
    gguf = tiny.write(tmp_path / "tiny.gguf", "Q8_0")
    found = run(capsys, "inspect", gguf, "--only", "blk.1.*")
    assert found["kind"] == "gguf"
    assert len(found["tensors"]) == 9
    assert found["formats"] == {"Q8_0": (64 * 64 * 3 + 64 * 96 * 3) // 32 * 34, "dense": 2 * 64 * 4}
    assert found["metadata"]["tokenizer.ggml.tokens"] == "8 values"
    text = main_text(capsys, "inspect", gguf)
    assert "Q8_0" in text
    assert "64 × 96" in text
    assert "general.architecture" in text


@pytest.mark.parametrize("has_rich", [True, False])
def test_names_that_are_no_text_reach_no_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, has_rich: bool
):
    """GGUF allows any bytes: those that are no text, and those that a terminal would obey."""
    name = b"w\xff\x1b[2J\nrow"
    path, target = tmp_path / "hostile.gguf", tmp_path / "out.safetensors"
    tensors: Any = {name: ("F32", (64, 64))}
    path.write_bytes(gguf_bytes(tensors, {"general.name": "\x9b31m evil \x1b]0;title\x07"}))
    if not has_rich:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    commands = (["inspect", path], ["quantize", path, target, "--dry-run"], ["quantize", path, target])
    for argv in (*commands, ["report", target]):
        text = main_text(capsys, *argv)
        text.encode()  # raises where half a character is left
        assert all(letter.isprintable() for letter in text.replace("\n", "")), argv
        assert argv == commands[2] or r"w\udcff\x1b[2J\nrow" in text
    assert r"\x9b31m evil \x1b]0;title\x07" in main_text(capsys, "inspect", path)
    assert run(capsys, "inspect", path)["tensors"][0]["path"] == name.decode("utf-8", "surrogateescape")
    assert "\x1b" not in str(inspect(path))


def test_report(dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    small = tmp_path / "small.safetensors"
    run(capsys, "quantize", dense, small, "--rule", "embedding=int8")
    found = run(capsys, "report", small, "--against", dense)
    leaves = {leaf["path"]: leaf for leaf in found["leaves"]}
    assert leaves["layers.1.mlp.kernel"]["bits_per_weight"] == 4.5
    assert leaves["layers.1.mlp.kernel"]["relative_error"] == pytest.approx(0.092, abs=0.005)
    assert 0.001 < leaves["embedding"]["relative_error"] < 0.01
    assert leaves["steps"]["relative_error"] is None
    assert found["nbytes"] == sum(leaf["nbytes"] for leaf in found["leaves"])
    text = main_text(capsys, "report", small, "--against", dense)
    assert "SQNR dB" in text
    assert f"{found['bits_per_weight']:.2f} bits per weight" in text
    noted = save(tmp_path / "noted.safetensors", {"w": quantize(jnp.ones((64, 64))), "epoch": 3})  # no array
    assert len(run(capsys, "report", noted, "--against", noted)["leaves"]) == 1
    gguf = tiny.write(tmp_path / "tiny.gguf", "Q8_0")
    kept = run(capsys, "quantize", gguf, tmp_path / "kept.safetensors")  # nobody asks to round again
    assert kept["formats"].keys() == {"as it was", "dense"}
    run(capsys, "quantize", gguf, tmp_path / "tiny.safetensors", "--format", "nf4")
    found = run(capsys, "report", tmp_path / "tiny.safetensors", "--against", gguf)
    errors = [leaf["relative_error"] for leaf in found["leaves"] if leaf["format"] == "nf4"]
    assert len(errors) == 2 * 5  # attn_k and attn_v have fewer than 4096 values
    assert 0.05 < min(errors) <= max(errors) < 0.3


@pytest.mark.parametrize(
    ("argv", "status", "words"),
    [
        ("inspect gone.safetensors", 1, "gone.safetensors does not exist"),
        ("inspect broken.safetensors", 1, "broken.safetensors: claims a header"),
        ("inspect .", 1, "."),
        ("report broken.gguf", 1, "broken.gguf"),
        ("report dense.safetensors --against other.safetensors", 1, "none of the tensors of the report"),
        ("report dense.safetensors --against shaped.safetensors", 1, "another model: 'embedding' has the shape (2, 2)"),
        ("report dense.safetensors --against packed.safetensors", 1, "exchange the two"),
        ("quantize dense.safetensors dense.safetensors", 1, "is the source too"),
        ("quantize dense.safetensors out --format int7", 2, "int7"),
        ("quantize dense.safetensors out --rule int8", 2, "not of the form PATTERN=FORMAT"),
        ("quantize dense.safetensors out --rule re:(=int8", 2, "not a regular expression"),
        ("quantize dense.safetensors out --rules broken.gguf", 2, "is not JSON"),
        ("quantize dense.safetensors out --rules list.json", 2, "not hold an object of patterns"),
        ("quantize dense.safetensors out --format int8 --block-size 8", 2, "multiple of 8 values, 16 to"),
        ("quantize dense.safetensors out --format binary --block-size 32", 2, "no meaning for 'binary'"),
        ("quantize dense.safetensors out --format none --asymmetric", 2, "an option of a format"),
        ("quantize dense.safetensors out --format fp8 --activations int8", 2, "fp8 takes activations='fp8'"),
        ("quantize dense.safetensors out --skip noses", 2, "noses"),
        ("quantize dense.safetensors out --max-shard-size wide", 2, "wide"),
        ("quantize dense.safetensors missing/out", 1, "missing"),
    ],
)
def test_errors_are_one_line(
    argv: str,
    status: int,
    words: str,
    dense: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.chdir(tmp_path)
    Path("broken.safetensors").write_bytes(b"\xff" * 64)
    Path("broken.gguf").write_bytes(b"GGUF" + b"\xff" * 64)
    Path("list.json").write_text("[1]")
    save("other.safetensors", {"other": jnp.ones(3)})
    save("shaped.safetensors", {"embedding": jnp.ones((2, 2))})
    save("packed.safetensors", {"embedding": quantize(jnp.ones((64, 64)))})
    assert main(argv.split()) == status
    said = capsys.readouterr()
    assert not said.out
    assert said.err.count("\n") == 1
    assert said.err.startswith(f"eformer {argv.split()[0]}: ")
    assert words in said.err
    assert jax.devices()  # nothing above left JAX in a bad state


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("quantise a b", "Did you mean quantize?"),
        ("quantize a b --dtype int4", "unrecognized arguments: --dtype int4. Did you mean --format?"),
        ("quantize a b --bits 4", "Did you mean --format?"),
        ("report a --agianst b", "Did you mean --against?"),
        ("report a --zzz", "unrecognized arguments: --zzz\n"),
    ],
)
def test_mistyped_words_are_named(line: str, message: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit, match="2"):
        main(line.split())
    assert message in capsys.readouterr().err


def test_help_is_a_word_too(capsys: pytest.CaptureFixture[str]):
    for line, start in (("help", "usage: eformer [--version]"), ("help report", "usage: eformer report")):
        with pytest.raises(SystemExit, match="0"):
            main(line.split())
        assert capsys.readouterr().out.startswith(start)
