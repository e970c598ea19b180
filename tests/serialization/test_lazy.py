"""Reading no more than what is asked for: maps, slices, shards."""

from __future__ import annotations

import gc
import os
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from eformer import serialization as files

from .trees import assert_same, decoded, dense, random_bits, random_int8, random_nf4

P = PartitionSpec
AROUND = 1 << 21


def resident(path: Any) -> int:
    """Bytes of the file that are in the page table of this process: what it has touched."""
    with open("/proc/self/smaps") as maps:
        blocks = re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", maps.read())
    mine = [block for block in blocks if str(path) in block.partition("\n")[0]]
    return sum(1024 * int(re.search(r"^Rss: +(\d+) kB", block, re.MULTILINE)[1]) for block in mine)  # pyright: ignore[reportOptionalSubscript]


def test_loading_touches_nothing_until_it_is_used(tmp_path):
    rng = np.random.default_rng(0)
    w = rng.standard_normal((4096, 2048)).astype(np.float32)  # 32 MB
    path = files.save(tmp_path / "m.safetensors", {"q": random_nf4(rng, w.shape, 64), "w": jnp.asarray(w)})
    tree = files.load(path)
    assert resident(path) == 0
    mapped = np.asarray(tree["w"])
    assert resident(path) == 0
    assert (mapped[-1] == w[-1]).all()
    # The kernel maps what lies around a page that is read too, up to 2 MB of it.
    assert 0 < resident(path) <= 2 * AROUND
    del tree, mapped
    gc.collect()  # JAX gives back what it borrowed from Python when garbage is collected
    lazy = files.open_lazy(path)
    assert lazy.info("q").shape == (4096, 2048)
    assert resident(path) == 0
    part = lazy.read_slice("w", np.s_[1000:1010, :5])
    assert (np.asarray(part) == w[1000:1010, :5]).all()
    assert 0 < resident(path) <= 2 * AROUND
    del lazy
    copied = files.load(path, memory_map=False)
    gc.collect()
    assert (np.asarray(copied["w"]) == w).all()
    assert resident(path) == 0  # nothing of it is the file's


def test_a_map_outlives_its_file(tmp_path):
    path = files.save(tmp_path / "m.safetensors", {"w": jnp.arange(1000.0)})
    old = files.load(path)
    files.save(path, {"w": jnp.zeros(3)})
    assert (old["w"] == jnp.arange(1000.0)).all()
    path.unlink()
    assert (old["w"] == jnp.arange(1000.0)).all()
    # Donating gives the program a copy: the map cannot be written to.
    assert jax.jit(lambda w: w + 1, donate_argnums=0)(old["w"])[0] == 1


def slices(shape: tuple[int, ...], unit: dict[int, int], rng: np.random.Generator) -> tuple[slice, ...]:
    """Random ranges whose bounds are multiples of `unit` along some axes."""
    found = []
    for axis, size in enumerate(shape):
        step = unit.get(axis - len(shape), 1)
        marks = [*range(0, size, step), size]
        low, high = sorted(rng.choice(len(marks), 2, replace=False))
        found.append(slice(marks[low], marks[high]))
    return tuple(found)


def test_slices_of_every_format(tmp_path):
    """Any slice from block to block equals the slice of the dense array; nothing else is allowed."""
    rng = np.random.default_rng(2)
    shape = (2, 70, 24)
    cases: dict[str, tuple[Any, dict[int, int]]] = {
        "nf4": (random_nf4(rng, shape, 16), {-2: 16}),
        "nf4_last": (random_nf4(rng, shape, 8, -1), {-1: 8}),
        "nf4_double": (random_nf4(rng, shape[1:], 16, double=True), {-2: 16}),
        "nf4_double_stack": (random_nf4(rng, shape, 16, double=True), {-2: 16}),
        "int8": (random_int8(rng, shape), {}),
        "int8_axes": (random_int8(rng, shape, (-3, -1)), {}),
        "ternary": (random_bits(rng, shape, 2, "channel"), {-2: 4}),
        "ternary_tensor": (random_bits(rng, shape, 2, "tensor"), {-2: 4}),
        "bare": (random_bits(rng, shape, 2, None), {-2: 4}),
        "binary": (random_bits(rng, shape, 1, "channel", -1), {-1: 8}),
        "dense": (dense(rng, *shape), {}),
    }
    lazy = files.open_lazy(files.save(tmp_path / "m.safetensors", {name: q for name, (q, _) in cases.items()}))
    for name, (q, unit) in cases.items():
        whole = decoded(q)
        for _ in range(5):
            index = slices(q.shape, unit, rng)
            part = lazy.read_slice(name, index)
            assert type(part) is type(q), name
            assert part.shape == whole[index].shape, name
            assert (decoded(part) == whole[index]).all(), (name, index)
            assert name == "dense" or part.nbytes < q.nbytes or part.shape == q.shape, name
    assert lazy.read_slice("nf4", ...).shape == shape
    assert lazy.read_slice("nf4.packed", (0, slice(2))).shape == (2, 5, 8)
    assert lazy.read_slice("dense", np.s_[1, ::7, None]).shape == (10, 1, 24)
    with pytest.raises(files.CheckpointError, match=r"'nf4'.*blocks of 16 values along axis 1, and 16:40 would cut"):
        lazy.read_slice("nf4", np.s_[:, 16:40])
    with pytest.raises(TypeError, match=r"axis 0 .* read by a slice"):
        lazy.read_slice("nf4", 1)
    with pytest.raises(IndexError, match="is empty or has a step"):
        lazy.read_slice("int8", np.s_[::2])


@pytest.mark.parametrize("spec", [P("x", None), P(None, "x"), P("x", "y")])
def test_shards_are_read_where_they_go(tmp_path, spec):
    """A sharded `like` gives sharded arrays, whatever the format, without going through one device."""
    rng = np.random.default_rng(4)
    w = dense(rng, 512, 64)
    tree = {
        "nf4": random_nf4(rng, w.shape, 64),
        "int8": random_int8(rng, w.shape),
        "dense": w,
        "bits": random_bits(rng, w.shape, 1, "channel"),
    }
    path = files.save(tmp_path / "m.safetensors", tree, max_shard_size="40kB")
    mesh = jax.make_mesh((4, 2), ("x", "y"))
    sharding = NamedSharding(mesh, spec)
    like = {name: jax.ShapeDtypeStruct(w.shape, w.dtype, sharding=sharding) for name in tree}
    found = files.load(path, like=like)
    assert found["dense"].sharding == sharding
    for name in ("nf4", "int8", "bits"):
        assert found[name].sharding.spec == P(*spec), name
        expected = tree[name].with_sharding(sharding)
        assert_same(found[name], expected)
        for a, b in zip(jax.tree.leaves(found[name]), jax.tree.leaves(expected), strict=True):
            assert a.sharding.is_equivalent_to(b.sharding, a.ndim), name
    assert_same(files.from_state_dict(files.to_state_dict(tree), like=like), found)


def test_a_split_that_cuts_blocks_is_refused(tmp_path):
    path = files.save(tmp_path / "m.safetensors", {"w": random_nf4(np.random.default_rng(0), (192, 8), 64)})
    sharding = NamedSharding(jax.make_mesh((4,), ("x",), devices=jax.devices()[:4]), P("x"))
    with pytest.raises(files.CheckpointError, match=r"'w'.*cannot be split"):
        files.open_lazy(path).read("w", sharding)


def test_what_is_there_can_be_listed(tmp_path):
    tree = {
        "q": [random_bits(np.random.default_rng(0), (64, 4), 2, "channel")],
        "key": jax.random.key(0),
        "n": 3,
        "b": jnp.ones(2, "bfloat16"),
    }
    lazy = files.open_lazy(files.save(tmp_path / "m.safetensors", tree))
    found = {name: (lazy.info(name).format, lazy.info(name).shape, lazy.info(name).nbytes) for name in lazy}
    assert found == {
        "q.0": ("ternary", (64, 4), 64 + 16),
        "key": ("dense", (2,), 8),
        "n": ("int", (), 0),
        "b": ("dense", (2,), 4),
    }
    assert lazy.info("b").dtype == jnp.bfloat16
    assert repr(lazy) == f"LazyCheckpoint('{lazy.path}', 4 leaves, 92 bytes)"
    assert lazy.entry("q.0.weight").shape == (4, 16)


def test_descriptors_are_given_back(tmp_path):
    path = files.save(tmp_path / "m.safetensors", {"w": jnp.ones(3)})
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        files.load(path)
    assert len(os.listdir("/proc/self/fd")) <= before + 1
