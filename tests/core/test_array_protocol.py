"""What tools ask of an array beyond its value, answered for all the parts of a packed one."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import eformer as ef
from eformer.integrations.nnx import Dispatching


@pytest.fixture(params=["nf4", "int8", "ternary"])
def q(request, key: jax.Array):
    return ef.quantize(jax.random.normal(key, (128, 64)), dtype=request.param)


def test_on_one_device(q):
    here, other = jax.devices()[:2]
    assert q.device == here
    moved = q.to_device(other)
    assert (moved.device, moved.committed, moved.devices()) == (other, True, {other})
    np.testing.assert_array_equal(moved.materialize(), q.materialize())
    assert q.is_fully_addressable
    assert q.is_fully_replicated
    assert q.on_device_size_in_bytes() >= q.nbytes
    q.copy_to_host_async()
    (shard,) = q.addressable_shards
    assert shard.device == here
    np.testing.assert_array_equal(shard.data.materialize(), q.materialize())
    with pytest.raises(ValueError, match="stream=3 is not supported"):
        q.to_device(here, stream=3)
    assert not q.is_deleted()
    q.delete()
    assert q.is_deleted()


def test_split_over_devices(q):
    mesh = jax.make_mesh((4,), ("t",), devices=jax.devices()[:4], axis_types=(jax.sharding.AxisType.Auto,))
    split = q.with_sharding(NamedSharding(mesh, PartitionSpec(None, "t")))
    assert not split.is_fully_replicated
    assert split.committed
    assert q.to_device(split.sharding).sharding == split.sharding
    dense = np.asarray(q.materialize())
    for i, shard in enumerate(split.addressable_shards):
        assert shard.device == jax.devices()[i]
        np.testing.assert_array_equal(shard.data.materialize(), dense[:, 16 * i : 16 * i + 16])
    assert split.addressable_data(2).shape == (128, 16)


def test_dlpack_says_why_not(q):
    for ask in (np.from_dlpack, lambda q: q.__dlpack__()):
        with pytest.raises(
            BufferError, match=r"packed arrays, and DLPack hands over one dense buffer. Give materialize"
        ):
            ask(q)


def test_size_counts_logical_values(key: jax.Array):
    w = jax.random.normal(key, (128, 64))
    tree = {"q": ef.quantize(w), "tied": (w, w), "b": jnp.ones(3), "n": 1}
    assert ef.size(tree) == 128 * 64 * 2 + 3
    lora = ef.add_lora({"q": {"kernel": ef.quantize(w)}}, "*", 2, key)
    assert ef.size(lora) == 128 * 64
    assert ef.size(ef.quantize_tree(nnx.Linear(128, 64, rngs=nnx.Rngs(0)))) == 128 * 64 + 64


def test_tabulate_shows_logical_shapes():
    model = Dispatching(ef.quantize_tree(nnx.Linear(128, 64, rngs=nnx.Rngs(0))))
    table = nnx.tabulate(model, jnp.ones((2, 128)), console_kwargs={"no_color": True, "force_terminal": False})
    assert "float32[128,64]" in table.replace("\x1b[2m", "").replace("\x1b[0m", "")
