"""`quantize_tree`, `quantize_file` and `eformer quantize` decide alike."""

from __future__ import annotations

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eformer import serialization as files
from eformer.cli import main
from eformer.ops.quantization import QuantizationConfig, dequantize_tree, quantize_tree, report

# Name, shape, and what becomes of it by default: a format and an axis, or why it stays.
LEAVES: list[tuple[str, tuple[int, ...], Any]] = [
    ("model.embed_tokens.weight", (160, 64), -1),
    ("model.layers.0.self_attn.q_proj.weight", (64, 64), -1),
    ("model.layers.0.self_attn.q_proj.bias", (64,), "it is a bias"),
    ("model.layers.0.self_attn.rotary_emb.inv_freq", (32,), "it is a constant"),
    ("model.layers.0.input_layernorm.weight", (64,), "it is a norm"),
    ("model.layers.0.norm_table.weight", (64, 64), "it is a norm"),
    ("model.layers.0.mlp.gate.weight", (64, 64), "it is a router"),
    ("model.layers.0.mlp.experts.weight", (4, 64, 128), -1),
    ("model.layers.0.mlp.small.weight", (8, 64), "it has 512 values, fewer than 4096"),
    ("model.layers.0.mlp.up.kernel", (64, 128), -2),
    ("model.layers.0.attn.query.kernel", (64, 4, 16), -3),
    ("model.layers.0.attn.out.kernel", (4, 16, 64), -1),
    ("model.position_embeddings.weight", (128, 64), "it is a position"),
    ("lm_head.weight", (160, 64), -1),
]


def tree() -> dict[str, jax.Array]:
    keys = jax.random.split(jax.random.key(0), len(LEAVES))
    return {name: jax.random.normal(key, shape) for key, (name, shape, _) in zip(keys, LEAVES, strict=True)}


def nested(flat: dict[str, Any]) -> dict[str, Any]:
    """The same as a model in memory has it, where a path has as many keys as a name has parts."""
    made: dict[str, Any] = {}
    for name, value in flat.items():
        *holders, last = name.split(".")
        node = made
        for holder in holders:
            node = node.setdefault(holder, {})
        node[last] = value
    return made


def flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict):
        return {prefix: tree}
    pairs = [flat(value, f"{prefix}.{key}" if prefix else key) for key, value in tree.items()]
    return {name: value for found in pairs for name, value in found.items()}


@pytest.mark.parametrize(
    ("rules", "options", "argv"),
    [
        ("nf4", {}, []),
        ("int8", {}, ["--format", "int8"]),
        (None, {"default": QuantizationConfig("nf4", 32, double_quant=True)}, ["--block-size", "32", "--double-quant"]),
        ({"*mlp*": "int8", "*embed*": None}, {}, ["--rule", "*mlp*=int8", "--rule", "*embed*=none"]),
        ({"*mlp*": "ternary"}, {"default": None}, ["--format", "none", "--rule", "*mlp*=ternary"]),
        ("nf4", {"skip": ("heads",), "min_size": 500}, ["--skip", "heads", "--min-size", "500"]),
    ],
)
def test_all_three_decide_alike(rules, options, argv, tmp_path, capsys):
    dense = tree()
    source = files.save(tmp_path / "in.safetensors", dense)
    in_memory = flat(quantize_tree(nested(dense), rules, donate=False, **options))
    files.quantize_file(source, tmp_path / "file.safetensors", rules, **options)
    assert main(["quantize", str(source), str(tmp_path / "cli.safetensors"), "--quiet", *argv]) == 0
    capsys.readouterr()
    for target in ("file.safetensors", "cli.safetensors"):
        stored = files.load(tmp_path / target)
        assert set(stored) == set(in_memory)
        for name, wanted in in_memory.items():
            assert type(stored[name]) is type(wanted), (target, name)
            assert jax.tree.structure(stored[name]) == jax.tree.structure(wanted), (target, name)
            same = jax.tree.map(lambda a, b: bool(jnp.array_equal(a, b)), stored[name], wanted)
            assert all(jax.tree.leaves(same)), (target, name)


def test_the_plan_says_why(tmp_path, capsys):
    source = files.save(tmp_path / "in.safetensors", tree())
    assert main(["quantize", str(source), str(tmp_path / "never"), "--dry-run", "--json"]) == 0
    planned = {line["path"]: line for line in json.loads(capsys.readouterr().out)["tensors"]}
    report = files.quantize_file(source, tmp_path / "out.safetensors")
    for leaf in report.leaves:
        wanted = {name: decided for name, _, decided in LEAVES}[leaf.name]
        line = planned[leaf.name]
        assert (line["axis"] if line["format"] == "nf4" else line["reason"]) == wanted, leaf.name
        assert line["reason"].startswith("role: ") == (line["format"] == "nf4")
        assert line["reason"] == leaf.reason
        assert line["format"] == leaf.format


def test_what_is_quantized_already_stays(tmp_path, capsys):
    dense = {"a.kernel": jnp.ones((64, 64)), "b.kernel": jnp.ones((64, 64))}
    once = files.quantize_file(files.save(tmp_path / "in.safetensors", dense), tmp_path / "one", {"b*": None})
    assert main(["quantize", str(once.path), str(tmp_path / "never"), "--dry-run", "--json"]) == 0
    lines = json.loads(capsys.readouterr().out)["tensors"]
    twice = files.quantize_file(once.path, tmp_path / "two")
    reasons = {"a.kernel": "it is quantized already", "b.kernel": "role: kernel"}
    assert {line["path"]: line["reason"] for line in lines} == reasons
    assert {leaf.name: leaf.reason for leaf in twice.leaves} == reasons


# Shapes whose contracted axis is shorter than a block, or has one entry only.
NARROW = {
    "mixer.conv1d.weight": (4096, 1, 4),
    "cls_token": (1, 1, 4096),
    "q_proj.lora_B.weight": (4096, 16),
    "depthwise.kernel": (3, 3, 1, 512),
    "up.kernel": (2, 4096),
    "stack.kernel": (64, 2, 64),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("fmt", ["nf4", "int8", "ternary", "binary"])
def test_quantizing_never_enlarges(fmt, dtype, tmp_path):
    keys = jax.random.split(jax.random.key(1), len(NARROW))
    dense = {n: jax.random.normal(k, shape).astype(dtype) for k, (n, shape) in zip(keys, NARROW.items(), strict=True)}
    made = quantize_tree(nested(dense), fmt, donate=False, skip=())
    for leaf in report(made).leaves:
        assert leaf.nbytes < leaf.dense_nbytes, leaf
    restored = flat(dequantize_tree(made))
    for name, w in dense.items():
        error = jnp.linalg.norm((restored[name] - w).astype("float32")) / jnp.linalg.norm(w.astype("float32"))
        assert error < {"nf4": 0.1, "int8": 0.02, "ternary": 0.5, "binary": 0.65}[fmt], name
    source = files.save(tmp_path / "in.safetensors", dense)
    done = files.quantize_file(source, tmp_path / "out.safetensors", fmt, skip=())
    assert all(leaf.nbytes_out < leaf.nbytes_in for leaf in done.leaves)
    assert all(leaf.format == fmt for leaf in done.leaves)


def test_a_shorter_block_changes_no_value():
    w = jax.random.normal(jax.random.key(2), (4096, 16)).astype(jnp.bfloat16)
    made = quantize_tree({"lora_B": {"weight": w}}, donate=False)["lora_B"]["weight"]
    assert (made.axis, made.block_size, made.bits_per_weight) == (-1, 16, 6.0)
    same = quantize_tree({"lora_B": {"weight": w}}, {"*": {"dtype": "nf4", "simulate": True}})["lora_B"]["weight"]
    np.testing.assert_array_equal(np.asarray(made.materialize(), np.float32), np.asarray(same, np.float32))


def test_what_cannot_get_smaller_stays_and_says_so(tmp_path, capsys):
    dense = {"conv1d.weight": jnp.ones((4096, 1, 4))}
    source = files.save(tmp_path / "in.safetensors", dense)
    rules = {"*": {"dtype": "nf4", "axis": 1}}  # an axis that is asked for is not replaced
    nothing = r"rule '\*' quantizes nothing: .* would not get smaller"
    with pytest.warns(UserWarning, match=nothing):
        done = files.quantize_file(source, tmp_path / "out.safetensors", rules, skip=())
    wanted = "it would not get smaller: it has 65,536 bytes"
    assert [(leaf.format, leaf.reason) for leaf in done.leaves] == [("dense", wanted)]
    with pytest.warns(UserWarning, match=nothing):
        kept = quantize_tree(nested(dense), rules, donate=False, skip=())
    assert isinstance(kept["conv1d"]["weight"], jax.Array)
    argv = ["quantize", str(source), str(tmp_path / "never"), "--dry-run", "--json", "--axis", "1", "--skip", ""]
    assert main(argv) == 0
    assert [line["reason"] for line in json.loads(capsys.readouterr().out)["tensors"]] == [wanted]
