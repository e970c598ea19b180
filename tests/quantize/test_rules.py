"""Rules: which one decides, and which decided nothing."""

from __future__ import annotations

import pytest

from eformer._quantize.plan import Rules, as_config
from eformer.ops.quantization import QuantizationConfig, QuantizationType

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
    found = [rules.first(p).config for p in PATHS]  # pyright: ignore[reportOptionalMemberAccess]
    nf4, int8 = QuantizationConfig("nf4", 32), QuantizationConfig("int8")
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
    assert as_config(config) is config
    assert as_config(None) is None
    assert as_config(QuantizationType.INT8) == as_config("int8") == as_config({"dtype": "int8"})
    assert as_config({"dtype": "int8", "axis": [0, 1]}) == QuantizationConfig("int8", axis=(0, 1))
    full = {"dtype": "nf4", "block_size": 32, "axis": -1, "double_quant": True}
    assert as_config(full) == QuantizationConfig("nf4", 32, axis=-1, double_quant=True)


@pytest.mark.parametrize(
    ("rules", "error", "message"),
    [
        ({"a": "nf5"}, ValueError, "Supported types: nf4"),
        ({"a": {"dtype": "nf4", "blocks": 3}}, ValueError, r"unknown options \['blocks'\]"),
        ({"a": {"dtype": "nf4", "group_size": 32}}, ValueError, "Did you mean 'block_size'"),
        ({"a": "none"}, ValueError, "None, without quotes, keeps a leaf dense"),
        ({"a": {"dtype": "binary", "block_size": 32}}, ValueError, "block_size=32 has no meaning for 'binary'"),
        ({"a": {"dtype": "nf4", "scaled": False}}, ValueError, "scaled=False has no meaning for 'nf4'"),
        ({"a": 3}, TypeError, "a rule asks for 3 of type int"),
        ({"re:(": "nf4"}, ValueError, r"'re:\(' is not a regular expression"),
        ([("a", "nf4", 1)], TypeError, "pairs"),
        ({1: "nf4"}, TypeError, "a pattern is a string"),
    ],
)
def test_wrong_rules_are_refused(rules, error, message):
    with pytest.raises(error, match=message):
        Rules(rules)
