"""Rules: which one decides, and which decided nothing."""

from __future__ import annotations

import json

import jax.numpy as jnp
import pytest

from eformer._quantize.rules import Recipe, Rules, recipe
from eformer.ops.quantization import Array8B, ArrayNF4, QuantizationConfig, QuantizationType

PATHS = ["embed/table", "layers/0/attn/q/kernel", "layers/0/norm/scale", "layers/11/mlp/up/kernel", "head/kernel"]


@pytest.mark.parametrize(
    ("pattern", "matched"),
    [
        ("*", PATHS),
        ("*kernel", [1, 3, 4]),
        ("layers/*/kernel", [1, 3]),
        ("layers.*.kernel", [1, 3]),
        ("layers/?/*", [1, 2]),
        ("layers/[0-9]/*", [1, 2]),
        ("kernel", []),
        ("Head/kernel", []),
        ("head/kernel", [4]),
        ("re:kernel", [1, 3, 4]),
        ("re:^layers/\\d+/(attn|norm)", [1, 2]),
        ("re:^layers\\.\\d\\.", [1, 2]),
        ("re:^head.kernel$", [4]),
    ],
)
def test_patterns(pattern, matched):
    wanted = [p if isinstance(p, str) else PATHS[p] for p in matched]
    rules = Rules({pattern: "nf4"})
    assert [p for p in PATHS if rules.first(p)] == wanted
    assert [p for p in PATHS if rules.first(p.replace("/", "."))] == wanted


def test_the_first_rule_decides():
    rules = Rules([("*norm*", None), ("layers/0/*", "int8"), ("*", {"dtype": "nf4", "block_size": 32})])
    found = [rules.first(p).recipe for p in PATHS]  # pyright: ignore[reportOptionalMemberAccess]
    nf4, int8 = Recipe(QuantizationConfig("nf4", 32)), Recipe(QuantizationConfig("int8"))
    assert found == [nf4, int8, None, nf4, nf4]
    assert rules.unused(PATHS) == []


def test_rules_that_decided_nothing_are_reported():
    rules = Rules({"*": "nf4", "*norm*": None, "re:^deco(der)?": "int8"})
    assert [str(u) for u in rules.unused(PATHS)] == [
        "rule '*norm*' matches only paths that '*' already took",
        "rule 're:^deco(der)?' matches no path",
    ]
    assert [u.pattern for u in rules.unused([])] == ["*", "*norm*", "re:^deco(der)?"]


def test_choices():
    config = QuantizationConfig("nf4", 128, use_kernel=False)
    assert recipe(config) == Recipe(config)
    assert recipe(QuantizationType.INT8) == recipe("int8") == recipe({"dtype": "int8"})
    assert recipe({"dtype": "int8", "axis": [0, 1]}).axis == (0, 1)  # pyright: ignore[reportOptionalMemberAccess]
    assert len(Rules("nf4")) == len(Rules(config)) == len(Rules(None)) == 1
    full = Rules({"a*": {"dtype": "nf4", "block_size": 32, "axis": -1, "double_quant": True}, "b": None, "c": "binary"})
    assert Rules(json.loads(json.dumps(full.describe())))[:] == full[:]
    assert Rules(full)[:] == full[:]


def test_a_recipe_quantizes():
    w = jnp.ones((64, 32))
    assert isinstance(recipe("int8").quantize(w), Array8B)  # pyright: ignore[reportOptionalMemberAccess]
    made = recipe({"dtype": "nf4", "block_size": 32, "axis": -1, "double_quant": True}).quantize(w)  # pyright: ignore[reportOptionalMemberAccess]
    assert isinstance(made, ArrayNF4)
    assert (made.block_size, made.axis, type(made.absmax).__name__) == (32, -1, "CompressedAbsmax")


@pytest.mark.parametrize(
    ("rules", "error", "message"),
    [
        ({"a": "nf5"}, ValueError, "Supported types: nf4"),
        ({"a": {"dtype": "nf4", "blocks": 3}}, ValueError, r"unknown options \['blocks'\]"),
        ({"a": 3}, TypeError, "a rule asks for 3 of type int"),
        ({"re:(": "nf4"}, ValueError, r"'re:\(' is not a regular expression"),
        ([("a", "nf4", 1)], TypeError, "pairs"),
        ({1: "nf4"}, TypeError, "a pattern is a string"),
    ],
)
def test_wrong_rules_are_refused(rules, error, message):
    with pytest.raises(error, match=message):
        Rules(rules)
