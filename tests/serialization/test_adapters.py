"""Models with adapters: nested arrays come back bit by bit, whole, in slices, in shards, and in other libraries."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from eformer import serialization as files
from eformer.ops.quantization import LoraArray, add_lora, merge, quantize_tree, split_trainable

from .trees import assert_same, dense, random_int8, random_nf4

P = PartitionSpec


@pytest.fixture(scope="module")
def tree() -> Any:
    """Adapters over a stack, over a compressed absmax, over heads, over a dense weight, and over a tied weight."""
    rng = np.random.default_rng(0)
    params = {
        "embed": {"embedding": dense(rng, 96, 64)},
        "layers": {"up": {"kernel": dense(rng, 3, 64, 128), "bias": dense(rng, 3, 128)}},
        "attention": {"query": {"kernel": dense(rng, 64, 4, 16)}, "out": {"kernel": dense(rng, 4, 16, 64)}},
        "head": {"kernel": dense(rng, 64, 80)},
    }
    rules = {"head*": None, "*up*": {"dtype": "nf4", "double_quant": True}, "*out*": "int8", "*query*": "ternary"}
    made = add_lora(quantize_tree(params, rules), "*kernel", rank=4, key=jax.random.key(1))
    made["tied"] = made["head"]["kernel"]
    # Factors that are not zero, as after training.
    trained, frozen = split_trainable(made)
    return merge({name: dense(rng, *value.shape) for name, value in trained.items()}, frozen)


@pytest.mark.parametrize("size", [None, "3kB"])
def test_a_tree_with_adapters(tree, tmp_path, size):
    path = files.save(tmp_path / "m.safetensors", tree, max_shard_size=size)
    found = files.load(path)
    assert_same(found, tree)
    assert found["tied"] is found["head"]["kernel"]
    assert_same(files.load(path, like=jax.eval_shape(lambda: tree)), tree)
    lazy = files.open_lazy(path)
    info = lazy.info("layers.up.kernel")
    assert (info.format, info.shape, info.nbytes) == (
        "nf4 + lora 4",
        (3, 64, 128),
        tree["layers"]["up"]["kernel"].nbytes,
    )
    assert info.tensors[0] == "layers.up.kernel.w.packed"
    assert_same(
        {name: lazy[name] for name in ("attention.query.kernel", "head.kernel")},
        {
            "attention.query.kernel": tree["attention"]["query"]["kernel"],
            "head.kernel": tree["head"]["kernel"],
        },
    )


def test_other_libraries(tree, tmp_path):
    assert_same(files.from_msgpack(files.to_msgpack(tree)), tree)
    assert_same(files.load_orbax(files.save_orbax(tmp_path / "orbax", tree), like=tree), tree)


def test_what_was_trained_is_a_small_file_of_its_own(tree, tmp_path):
    """The factors alone, as plain safetensors; they fit the same frozen model again."""
    trained, frozen = split_trainable(tree)
    path = files.save(tmp_path / "adapter.safetensors", trained)
    assert path.stat().st_size < sum(leaf.nbytes for leaf in jax.tree.leaves(trained)) + 4000
    assert_same(merge(files.load(path), frozen), tree)


@pytest.mark.parametrize(
    ("q", "index"),
    [
        (lambda r: LoraArray(random_nf4(r, (96, 40), 32), dense(r, 96, 4), dense(r, 4, 40), scale=3), np.s_[32:, 7:9]),
        (lambda r: LoraArray(dense(r, 30, 20), dense(r, 30, 2), dense(r, 2, 20)), np.s_[3:, :5]),
        (
            lambda r: LoraArray(
                random_int8(r, (3, 8, 4, 16)), dense(r, 3, 8, 2), dense(r, 3, 2, 4, 16), left=1, right=2
            ),
            np.s_[1:3, ..., 4:9],
        ),
    ],
)  # fmt: skip
def test_slices(tmp_path, q, index):
    q = q(np.random.default_rng(1))
    lazy = files.open_lazy(files.save(tmp_path / "m.safetensors", {"q": q}))
    part = lazy.read_slice("q", index)
    assert isinstance(part, LoraArray)
    assert part.nbytes < q.nbytes
    np.testing.assert_allclose(part.materialize(), np.asarray(q.materialize())[index], rtol=1e-5, atol=1e-5)


def test_shards(tmp_path):
    """Read in shards where `like` is: codes, scales and factors of one slice of the weight lie together."""
    rng = np.random.default_rng(2)
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("x", "y"))
    q = LoraArray(random_nf4(rng, (128, 64), 64), dense(rng, 128, 4), dense(rng, 4, 64), scale=2.0)
    placed = q.with_sharding(NamedSharding(mesh, P("x", "y")))
    assert placed.a.sharding.spec == P("x", None)
    assert placed.b.sharding.spec == P(None, "y")
    assert placed.w.packed.sharding.spec == P("y", "x", None)
    found = files.load(files.save(tmp_path / "m.safetensors", {"q": placed}), like={"q": placed})["q"]
    assert found.sharding == placed.sharding
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(placed), strict=True):
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim)
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    x = dense(rng, 3, 128)
    np.testing.assert_allclose(jax.jit(lambda x, q: x @ q)(x, found), x @ q.materialize(), rtol=1e-4, atol=1e-3)


def test_adapters_that_do_not_fit_are_refused(tmp_path):
    rng = np.random.default_rng(3)
    q = LoraArray(random_nf4(rng, (16, 6), 8), dense(rng, 16, 2), dense(rng, 2, 6))
    state = files.to_state_dict({"q": q})
    text = state["eformer"].tobytes().decode()
    for old, new, message in [
        ('"left":1', '"left":2', "left=2"),
        ('"scale":1.0', '"scale":"1"', "scale='1', which is not of type float"),
        ('"a":"q.a"', '"a":"q.b"', "factors of shapes"),
        ('"w":{"type":"nf4"', '"w":{"type":"none"', "part 'w' that is None instead of floating"),
    ]:
        assert old in text, text
        damaged = {**state, "eformer": np.frombuffer(text.replace(old, new).encode(), np.uint8)}
        with pytest.raises(files.CheckpointError, match=message):
            files.from_state_dict(damaged)
