"""`quantize_tree`, `quantize_file` and `eformer quantize` decide alike."""

from __future__ import annotations

import json
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from eformer import serialization as files
from eformer.cli import main
from eformer.ops.quantization import QuantizationConfig, quantize_tree

# Name, shape, and what becomes of it by default: a format and an axis, or why it stays.
LEAVES: list[tuple[str, tuple[int, ...], Any]] = [
    ("model.embed_tokens.weight", (160, 64), -1),
    ("model.layers.0.self_attn.q_proj.weight", (64, 64), -1),
    ("model.layers.0.self_attn.q_proj.bias", (64,), "it is a bias"),
    ("model.layers.0.self_attn.rotary_emb.inv_freq", (32,), "it is not a matrix"),
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
        assert line["reason"] == leaf.reason
        assert line["format"] == leaf.format


def test_what_is_quantized_already_stays(tmp_path, capsys):
    dense = {"a.kernel": jnp.ones((64, 64)), "b.kernel": jnp.ones((64, 64))}
    once = files.quantize_file(files.save(tmp_path / "in.safetensors", dense), tmp_path / "one", {"b*": None})
    assert main(["quantize", str(once.path), str(tmp_path / "never"), "--dry-run", "--json"]) == 0
    lines = json.loads(capsys.readouterr().out)["tensors"]
    twice = files.quantize_file(once.path, tmp_path / "two")
    reasons = {"a.kernel": "it is quantized already", "b.kernel": ""}
    assert {line["path"]: line["reason"] for line in lines} == reasons
    assert {leaf.name: leaf.reason for leaf in twice.leaves} == reasons
