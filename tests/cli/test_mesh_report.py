"""`eformer report --mesh`: what it says of every leaf, against arrays that are really split and compiled products."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from eformer.cli import main
from eformer.cli.report import parsed_mesh, parsed_spec, placements
from eformer.jaximus import implicit
from eformer.ops.quantization import quantize
from eformer.serialization import save


def model() -> dict[str, Any]:
    def q(*shape: int, **options: Any) -> Any:
        return quantize(jnp.asarray(np.random.default_rng(0).standard_normal(shape), jnp.float32), **options)

    return {
        "embed.weight": q(64, 128, dtype="int8"),
        "layers.0.q_proj.kernel": q(128, 64, dtype="nf4", block_size=32),
        "layers.0.o_proj.kernel": q(64, 128, dtype="nf4", block_size=16),
        "layers.0.down.kernel": q(96, 128, dtype="nf4", block_size=32),
        "layers.0.experts.up.kernel": q(4, 128, 32, dtype="ternary"),
        "layers.0.norm.scale": jnp.ones(128),
        "head.kernel": q(128, 66, dtype="binary"),
    }


SUGGESTED = {
    "embed.weight": "model, -",
    "layers.0.q_proj.kernel": "-, model",
    "layers.0.o_proj.kernel": "model, -",
    "layers.0.down.kernel": "-, model",  # 96 rows are 3 blocks
    "layers.0.experts.up.kernel": "model, -, -",
    "layers.0.norm.scale": "-",
    "head.kernel": "model, -",  # 66 columns do not divide
}


def test_suggestions_hold_on_devices() -> None:
    leaves, mesh = model(), jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto, AxisType.Auto))
    found = placements(leaves, parsed_mesh("data=2,model=4"))
    assert {leaf.path: leaf.spec for leaf in found} == SUGGESTED
    assert "3 blocks" not in found[3].note
    assert re.search(r"axis 0: would cut a block of 32", found[3].note)
    assert "66 entries, not a multiple of 4" in found[6].note
    for leaf in found:
        spec = P(*(None if e == "-" else e for e in leaf.spec.split(", ")))
        split = put(leaves[leaf.path], NamedSharding(mesh, spec))
        assert leaf.nbytes == sum(x.nbytes for x in jax.tree.leaves(split))
        assert leaf.per_device == sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(split))
        if "kernel" in leaf.path and split.ndim == 2:
            x = jnp.ones((1, split.shape[0]))
            text = jax.jit(implicit(jnp.matmul)).lower(x, split).compile().as_text()
            summed = sum(4 * int(n) for n in re.findall(r"= f32\[1,(\d+)\]\S* all-reduce", text))
            assert leaf.summed == summed


def put(value: Any, sharding: NamedSharding) -> Any:
    return value.with_sharding(sharding) if hasattr(value, "with_sharding") else jax.device_put(value, sharding)


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(save(tmp_path / "m.safetensors", model()))
    assert main(["report", file, "--json", "--mesh", "data=2,model=4", "--spec", "*q_proj*=-,data+model"]) == 0
    data = json.loads(capsys.readouterr().out)["mesh"]
    assert (data["devices"], data["axes"]) == (8, {"data": 2, "model": 4})
    by_path = {leaf["path"]: leaf for leaf in data["leaves"]}
    chosen = by_path["layers.0.q_proj.kernel"]
    assert (chosen["spec"], chosen["per_device"]) == ("-, data+model", chosen["nbytes"] // 8)
    assert data["per_device"] == sum(leaf["per_device"] for leaf in data["leaves"])
    assert main(["report", file, "--mesh", "model=4"]) == 0
    assert "bytes per device" in capsys.readouterr().out
    assert main(["report", file]) == 0
    assert "per device" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--mesh", "model"], 2, "not a list of axes and sizes"),
        (["--mesh", "model=0"], 2, "not a list of axes and sizes"),
        (["--mesh", "a=2,a=2"], 2, "twice"),
        (["--spec", "x=-"], 2, "needs --mesh"),
        (["--mesh", "a=2", "--spec", "nothing"], 2, "PATTERN=AXES"),
        (["--mesh", "a=2", "--spec", "x=a"], 2, "matches no leaf"),
        (["--mesh", "a=2", "--spec", "head*=-,-,a"], 1, "tensor 'head.kernel'.*only 2 axes"),
        (["--mesh", "a=2", "--spec", "*down*=b"], 1, "tensor 'layers.0.down.kernel'.*'b' is not an axis"),
        (["--mesh", "a=2", "--spec", "*down*=a"], 1, "tensor 'layers.0.down.kernel'.*cut a block of 32"),
    ],
)
def test_bad_arguments(
    arguments: list[str], status: int, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(save(tmp_path / "m.safetensors", model()))
    assert main(["report", file, *arguments]) == status
    assert re.search(message, capsys.readouterr().err)


def test_spelling() -> None:
    assert parsed_spec("a=b=-,x+y") == ("a=b", P(None, ("x", "y")))
    assert parsed_mesh("x=2,y=3").size == 6
