"""Checkpoints in pieces, as one process sees them: other meshes, slices, and everything that can be wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from eformer.ops.quantization import quantize
from eformer.serialization import (
    CheckpointError,
    load,
    load_distributed,
    open_lazy,
    quantize_file,
    save,
    save_distributed,
)


def mesh_of(**axes: int) -> jax.sharding.Mesh:
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def made(mesh: jax.sharding.Mesh) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    dense = jnp.asarray(rng.standard_normal((256, 64)), jnp.float32)

    def split(value: Any, spec: P) -> Any:
        sharding = NamedSharding(mesh, spec)
        return value.with_sharding(sharding) if hasattr(value, "with_sharding") else jax.device_put(value, sharding)

    return {
        "nf4": split(quantize(dense, dtype="nf4", block_size=32), P("a", "b")),
        "double": split(quantize(dense, dtype="nf4", block_size=32, double_quant=True), P(None, "a")),
        "int8": split(quantize(dense, dtype="int8"), P(None, ("a", "b"))),
        "ternary": split(quantize(dense, dtype="ternary"), P("b", "a")),
        "dense": split(dense.astype(jnp.bfloat16), P("a")),
        "tiny": split(jnp.asarray(rng.integers(-8, 8, (8, 4)), jnp.int4), P("a")),
        "step": 7,
        "key": jax.random.key(3),
        "host": np.arange(5),
        "empty": jnp.zeros((0, 3)),
        "tied": [],
    }


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    tree = made(mesh_of(a=4, b=2))
    tree["tied"] = [tree["int8"]]
    return save_distributed(tmp_path_factory.mktemp("pieces") / "m.safetensors", tree), tree


def raw(value: Any) -> np.ndarray:
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    return np.asarray(value)


def assert_same(found: Any, wanted: Any) -> None:
    assert jax.tree.map(raw, found).keys() == jax.tree.map(raw, wanted).keys()
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(raw(a), raw(b))


def test_round_trip(saved: tuple[Path, dict[str, Any]]) -> None:
    """As it was, on one device, and on other meshes; ties stay ties."""
    file, tree = saved
    assert_same(load(file), tree)
    assert_same(load(file, like=tree), tree)
    specs = {"nf4": P("c"), "d*": P(None, "c"), "int8": P("c"), "host": P()}
    again = load_distributed(file, mesh_of(c=8), specs)
    assert_same(again, tree)
    assert again["nf4"].sharding.spec == P("c", None)
    assert again["tied"][0] is again["int8"]
    assert isinstance(again["host"], np.ndarray)
    assert again["step"] == 7


def test_slices(saved: tuple[Path, dict[str, Any]]) -> None:
    file, tree = saved
    lazy = open_lazy(file)
    assert lazy.info("nf4").format == "nf4"
    part = lazy.read_slice("nf4", (slice(32, 160), slice(20, 50)))
    np.testing.assert_array_equal(part.materialize(), np.asarray(tree["nf4"].materialize())[32:160, 20:50])
    for index in (slice(3, 250), (slice(None), slice(1, 60)), (5, [1, 2]), ..., (slice(0, 64, 3),)):
        np.testing.assert_array_equal(raw(lazy.read_slice("dense", index)), raw(tree["dense"])[index])
    with pytest.raises(CheckpointError, match="split in pieces"):
        quantize_file(file, file.parent / "other.safetensors", "int8")


BAD_SPECS = [
    ({"nf4": P(None, None, "c")}, "tensor 'nf4'.*only 2 axes"),
    ({"dense": P(None, None, "c")}, "tensor 'dense'.*only 2 axes"),
    ({"nf4": P("x")}, "tensor 'nf4'.*'x' is not an axis of the mesh"),
    ({"dense": P("x")}, "tensor 'dense'.*'x'"),
    ({"tiny": P(None, "c")}, "tensor 'tiny'.*4 entries, not a multiple of 8"),
    ({"int8": P("c", "c")}, "tensor 'int8'.*'c' is used twice"),
    ({"int8": "c"}, "tensor 'int8'.*not a PartitionSpec"),
    ({"nowhere": P()}, "no leaf that 'nowhere' matches"),
]


@pytest.mark.parametrize(("specs", "message"), BAD_SPECS)
def test_specs_that_do_not_fit(specs: Any, message: str, saved: tuple[Path, dict[str, Any]]) -> None:
    with pytest.raises(CheckpointError, match=message):
        load_distributed(saved[0], mesh_of(c=8), specs)


def test_a_block_is_not_cut(tmp_path: Path) -> None:
    path = save(tmp_path / "m.safetensors", {"layer": {"w": quantize(jnp.ones((128, 8)), dtype="nf4", block_size=64)}})
    with pytest.raises(CheckpointError, match=r"tensor 'layer.w'.*cut a block of 64.*block size of 16 fits"):
        load_distributed(path, mesh_of(c=8), {"layer/w": P("c")})
    sharded = jax.ShapeDtypeStruct((128, 8), jnp.float32, sharding=NamedSharding(mesh_of(c=8), P("c")))
    with pytest.raises(CheckpointError, match=r"tensor 'layer.w'.*cut a block"):
        load(path, like={"layer": {"w": sharded}})


def test_truncated_and_missing_files(tmp_path: Path) -> None:
    file = save_distributed(tmp_path / "m.safetensors", {"layer": {"w": jnp.ones((64, 8))}})
    (part,) = tmp_path.glob("m-00001*")
    part.write_bytes(part.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"m-00001.*tensor 'layer.w.*truncated"):
        load(file)
    part.unlink()
    with pytest.raises(CheckpointError, match=r"m-00001.*Fetch all files"):
        load(file)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d["pieces"].pop("w"), "w"),
        (lambda d: d["pieces"]["w"]["pieces"].pop(), "do not make up|pieces"),
        (lambda d: d["pieces"]["w"]["pieces"].append(d["pieces"]["w"]["pieces"][0]), "where 8 different ones"),
        (lambda d: d["pieces"]["w"].update(dtype="F16"), "has the piece"),
        (lambda d: d["pieces"]["w"].update(dtype="Q9"), "no dtype"),
        (lambda d: d["pieces"]["w"].update(shape=[32, 16]), "do not make up|has the piece"),
        (lambda d: d["pieces"]["w"].update(shape=[-1]), "shape"),
        (lambda d: d["pieces"]["w"]["pieces"][0].__setitem__(0, "../secret"), "not a file of the checkpoint"),
        (lambda d: d["pieces"]["w"]["pieces"][0].__setitem__(1, "absent"), "not in the file"),
        (lambda d: d["pieces"]["w"]["pieces"][0].__setitem__(2, [[0, True], "x"]), "piece it should not"),
        (lambda d: d["pieces"]["w"]["pieces"].__setitem__(0, 5), "piece it should not"),
        (lambda d: d.update(pieces=[1]), "not a mapping"),
    ],
)
def test_hostile_indices(change: Any, message: str, tmp_path: Path) -> None:
    w = jax.device_put(jnp.arange(512.0).reshape(64, 8), NamedSharding(mesh_of(c=8), P("c")))
    file = save_distributed(tmp_path / "m.safetensors", {"w": w})
    index = json.loads(file.read_text())
    described = json.loads(index["metadata"]["eformer"])
    change(described)
    index["metadata"]["eformer"] = json.dumps(described)
    file.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=message):
        load(file)


def test_saving_again_replaces(tmp_path: Path) -> None:
    """An older checkpoint of the name goes, whichever kind it was."""
    path = tmp_path / "m.safetensors"
    save(path, {"w": jnp.ones(3)})
    save_distributed(path, {"w": jnp.zeros(3)})
    file = save_distributed(path, {"w": jnp.full(3, 2.0)})
    assert len(list(tmp_path.iterdir())) == 2
    np.testing.assert_array_equal(load(file)["w"], np.full(3, 2.0))
    np.testing.assert_array_equal(load(path)["w"], np.full(3, 2.0))
    save(path, {"w": jnp.ones(3)})
    assert [p.name for p in tmp_path.iterdir()] == ["m.safetensors"]
