"""Formats of one's own in rules, in files and on the command line."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eformer as ef
from eformer.cli import main


@dataclasses.dataclass
class Rounded(ef.ImplicitArray):
    """Values in steps of a hundredth, in int16."""

    codes: jax.Array
    axis: Any = ef.aux_field(default=None)

    @classmethod
    def quantize(cls, array: jax.Array, axis: Any = None) -> Rounded:
        return cls(jnp.round(array * 100).astype(jnp.int16), axis)

    def materialize(self) -> jax.Array:
        return self.codes.astype(jnp.float32) / 100


ef.serialization.register_type(Rounded, "tests.rounded")


def tree(key: jax.Array) -> dict[str, Any]:
    return {"up": {"kernel": jax.random.normal(key, (64, 96)), "bias": jnp.zeros(96)}}


@pytest.mark.parametrize(
    "rules",
    [{"*": Rounded.quantize}, {"*": Rounded}, Rounded, lambda w: Rounded.quantize(w)],
    ids=["method", "class", "alone", "function"],
)
def test_in_rules(rules, key: jax.Array):
    dense = tree(key)
    made = ef.quantize_tree(dense, rules, donate=False)
    assert isinstance(made["up"]["kernel"], Rounded)
    assert isinstance(made["up"]["bias"], jax.Array)
    np.testing.assert_allclose(made["up"]["kernel"].materialize(), dense["up"]["kernel"], atol=0.00501)
    faked = ef.fake_quantize_tree(dense, rules)
    np.testing.assert_array_equal(faked["up"]["kernel"], made["up"]["kernel"].materialize())
    assert jax.tree.structure(ef.quantize_tree(dense, rules, abstract=True)) == jax.tree.structure(made)


def test_the_plan_and_the_axis(key: jax.Array):
    planned = ef.plan_tree(tree(key), {"*kernel": Rounded, "*": "int8"})
    assert "up/kernel  Rounded  role: kernel" in str(planned)
    assert ef.quantize_tree(tree(key), Rounded)["up"]["kernel"].axis == -2  # the contracted one


def test_what_is_no_format(key: jax.Array):
    with pytest.raises(TypeError, match=r"a class with `quantize`, a function, or None"):
        ef.quantize_tree(tree(key), {"*": 3})
    with pytest.raises(TypeError, match="must give an ImplicitArray of that shape"):
        ef.quantize_tree(tree(key), {"*": lambda w: w})


def test_in_files_and_on_the_command_line(key: jax.Array, tmp_path, monkeypatch, capsys):
    dense = tree(key)
    source = ef.save(tmp_path / "in.safetensors", dense)
    monkeypatch.setitem(sys.modules, "my_package", sys.modules[__name__])
    target = tmp_path / "out.safetensors"
    assert main(["quantize", str(source), str(target), "--format", "my_package:Rounded", "--quiet"]) == 0
    capsys.readouterr()
    stored = ef.load(target)["up"]["kernel"]
    assert isinstance(stored, Rounded)
    np.testing.assert_array_equal(stored.codes, Rounded.quantize(dense["up"]["kernel"]).codes)
    assert main(["quantize", str(source), str(tmp_path / "x.safetensors"), "--format", "my_package:Missing"]) == 2
    assert "'my_package:Missing' cannot be imported" in capsys.readouterr().err


def test_a_plot_with_an_unknown_suffix_is_one_line(key: jax.Array, tmp_path, capsys):
    source = ef.save(tmp_path / "in.safetensors", tree(key))
    assert main(["report", str(source), "--plot", str(tmp_path / "x.txt")]) == 1
    told = capsys.readouterr().err
    assert told.startswith("eformer report: ")
    assert "Traceback" not in told
