"""Every type and pytree comes back bit by bit, through every way of writing it."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import equinox as eqx
import flax.linen as nn
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import safetensors
import safetensors.numpy
from flax import nnx

from eformer import serialization as files
from eformer.jaximus import ImplicitArray, tree_map_with_implicit
from eformer.ops.quantization import ArrayNF4, QuantizationType, quantize

from .trees import Layer, assert_same, dense, everything, quantized


@pytest.fixture(scope="module")
def tree() -> Any:
    return everything(np.random.default_rng(11))


def plain(tree: Any) -> Any:
    """What comes back without `like`: nodes a file cannot make are dicts."""
    layer = tree["layer"]
    return {**tree, "layer": {"kernel": layer.kernel, "bias": layer.bias}}


@pytest.mark.parametrize("size", [None, "9kB", 1, "1GB"])
def test_files(tree, tmp_path, size):
    written = files.save(tmp_path / "m.safetensors", tree, max_shard_size=size, metadata={"made by": "a test"})
    found = files.load(written)
    assert_same(found, plain(tree))
    assert list(found) == list(tree)  # in the order they were in
    assert found["tied"]["a"] is found["tied"]["b"]
    assert found["tied"]["c"] is found["quantized"]["int8"]
    again = files.load(tmp_path / "m.safetensors", like=tree, memory_map=False)
    assert_same(again, tree)
    assert again["tied"]["a"] is again["tied"]["b"]
    assert isinstance(again["layer"], Layer)
    assert files.open_lazy(tmp_path).metadata["made by"] == "a test"
    count = len(list(tmp_path.iterdir()))
    assert count == 1 if size in (None, "1GB") else count > 3


def test_every_format_by_name(tmp_path):
    """Whatever has a name in the table of formats is saved, loaded, read lazily and sent as bytes."""
    w = dense(np.random.default_rng(5), 128, 24)
    tree = {str(name): quantize(w, dtype=name) for name in QuantizationType}
    assert {name: q.format for name, q in tree.items()} == {str(name): str(name) for name in QuantizationType}
    written = files.save(tmp_path / "m.safetensors", tree)
    assert_same(files.load(written), tree)
    lazy = files.open_lazy(written)
    for name, q in tree.items():
        assert_same(lazy[name], q)
        assert lazy.info(name).format == name
    assert_same(files.from_msgpack(files.to_msgpack(tree)), tree)


def test_state_dicts(tree, tmp_path):
    state = files.to_state_dict(tree)
    assert all(type(v) is np.ndarray or isinstance(v, jax.Array) for v in jax.tree.leaves(state))
    assert_same(files.from_state_dict(state), plain(tree))
    assert_same(files.from_msgpack(files.to_msgpack(tree), like=tree), tree)
    where = files.save_orbax(tmp_path / "orbax", tree)
    assert_same(files.load_orbax(where, like=tree), tree)
    assert_same(files.load_orbax(where), plain(tree))


def test_flax_serialization_takes_registered_arrays(tree):
    files.register_flax()
    params = {"q": tree["quantized"], "outer": tree["outer"][0]}
    assert_same(flax.serialization.from_bytes(params, flax.serialization.to_bytes(params)), params)


def test_the_file_describes_itself(tree, tmp_path):
    """Another program finds format, shape, axis, block size, dtype and version in the metadata."""
    path = files.save(tmp_path / "m.safetensors", {"w": tree["quantized"]["nf4_last"]})
    with safetensors.safe_open(path, "numpy") as opened:
        described = json.loads(opened.metadata()["eformer"])
        assert sorted(opened.keys()) == ["w.absmax", "w.packed"]
    assert described["version"] == 1
    assert described["leaves"]["w"] == {
        "type": "nf4",
        "format": "nf4",
        "shape": [70, 37],
        "dtype": "bfloat16",
        "fields": {"block_size": 16, "axis": -1, "pad": 11, "use_kernel": True, "dtype": {"dtype": "bfloat16"}},
        "parts": {"packed": "w.packed", "absmax": "w.absmax"},
    }


def test_files_of_the_safetensors_library(tmp_path):
    """We read what it writes, and it reads what we write."""
    rng = np.random.default_rng(3)
    arrays = {f"t{i}": rng.integers(0, 100, (i, 5)).astype(d) for i, d in enumerate(["f4", "i8", "u1", "?", "f2"])}
    safetensors.numpy.save_file(arrays, tmp_path / "theirs.safetensors")
    found = files.load(tmp_path / "theirs.safetensors")
    assert set(found) == set(arrays)
    for name, array in arrays.items():  # without x64, 64-bit arrays come as NumPy's
        assert (found[name].dtype, np.asarray(found[name]).tobytes()) == (array.dtype, array.tobytes())
    ours = {name: array for name, array in found.items() if name != "t1"}
    files.save(tmp_path / "ours.safetensors", ours)
    theirs = safetensors.numpy.load_file(tmp_path / "ours.safetensors")
    assert {k: v.tobytes() for k, v in theirs.items()} == {k: arrays[k].tobytes() for k in ours}


# -- frameworks --------------------------------------------------------------------------------------------------------


def quantized_kernels(params: Any) -> Any:
    return tree_map_with_implicit(lambda x: quantize(x, dtype="nf4") if getattr(x, "ndim", 0) == 2 else x, params)


def test_equinox(tmp_path):
    model = eqx.nn.MLP(64, 32, 48, 2, key=jax.random.key(0))
    model = eqx.tree_at(lambda m: m.layers[0].weight, model, quantize(model.layers[0].weight, dtype="int8"))
    with pytest.raises(files.CheckpointError, match=r"activation.*eqx\.filter"):
        files.save(tmp_path / "m.safetensors", model)
    files.save(tmp_path / "m.safetensors", eqx.filter(model, eqx.is_array))
    found = files.load(tmp_path / "m.safetensors", like=model)
    assert_same(eqx.filter(found, eqx.is_array), eqx.filter(model, eqx.is_array))
    assert found.activation is model.activation
    assert (
        sorted(files.load(tmp_path / "m.safetensors"))[:3]
        == ["activation", "depth", "final_activation"][:0] + sorted(files.load(tmp_path / "m.safetensors"))[:3]
    )


def test_nnx(tmp_path):
    class Model(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.layers = nnx.List([nnx.Linear(64, 32, rngs=rngs), nnx.Linear(32, 8, rngs=rngs)])
            self.drop = nnx.Dropout(0.5, rngs=rngs)

    _, state = nnx.split(Model(nnx.Rngs(0)))
    state = quantized_kernels(state)
    files.save(tmp_path / "m.safetensors", state)
    found = files.load(tmp_path / "m.safetensors", like=state)
    assert_same(found, state)
    assert isinstance(found, nnx.State)
    assert isinstance(
        jax.tree.leaves(found, is_leaf=lambda x: isinstance(x, ImplicitArray))[-1], ImplicitArray | jax.Array
    )
    # An abstract state of dense shapes takes the quantized kernels too.
    abstract = nnx.split(nnx.eval_shape(lambda: Model(nnx.Rngs(0))))[1]
    assert jax.tree.structure(files.load(tmp_path / "m.safetensors", like=abstract)) == jax.tree.structure(state)


def test_linen_and_optax(tmp_path):
    params = nn.Dense(16).init(jax.random.key(0), jnp.ones((1, 8)))
    optimizer = optax.adamw(1e-3)
    state = {"params": quantized_kernels(params), "opt": optimizer.init(params), "step": 3}
    files.save(tmp_path / "m.safetensors", state)
    found = files.load(tmp_path / "m.safetensors", like=state)
    assert_same(found, state)
    assert type(found["opt"][0]) is type(state["opt"][0])


# -- like --------------------------------------------------------------------------------------------------------------


def test_like_is_checked(tmp_path):
    rng = np.random.default_rng(1)
    w = dense(rng, 64, 16)
    path = files.save(tmp_path / "m.safetensors", {"a": w, "q": quantize(w, dtype="nf4"), "s": {"b": w + 1}})
    shape = jax.ShapeDtypeStruct
    dense_like = {"a": shape((64, 16), "float32"), "q": shape((64, 16), "float32"), "s": {"b": w}}
    assert isinstance(files.load(path, like=dense_like)["q"], ArrayNF4)
    wrong = {
        r"'a'.*shape \[64, 16\].*\[16, 64\]": {**dense_like, "a": shape((16, 64), "float32")},
        r"'a'.*dtype float32.*bfloat16.*strict=False": {**dense_like, "a": shape((64, 16), jnp.bfloat16)},
        r"lacks 1 leaf \('x'\).*has nothing": {**dense_like, "x": w},
        r"lacks nothing.*has 1 leaf \('a'\)": {k: v for k, v in dense_like.items() if k != "a"},
        r"'a'.*is a ArrayImpl.*has a ArrayNF4": {**dense_like, "a": quantize(w, dtype="nf4")},
    }
    for message, like in wrong.items():
        with pytest.raises(files.CheckpointError, match=message):
            files.load(path, like=like)
    found = files.load(path, like={"a": shape((64, 16), jnp.bfloat16), "x": 5, "more": w}, strict=False)
    assert_same(found, {"a": w, "x": 5, "more": w})
    with pytest.raises(KeyError, match=r"'s\.c' is not in .*3 leaves"):
        files.open_lazy(path)["s.c"]


def test_names_joined_by_slashes_are_found(tmp_path):
    w = np.arange(6, dtype=np.float32).reshape(2, 3)
    safetensors.numpy.save_file({"params/dense/kernel": w}, tmp_path / "m.safetensors")
    found = files.load(tmp_path / "m.safetensors", like={"params": {"dense": {"kernel": jnp.zeros((2, 3))}}})
    assert (found["params"]["dense"]["kernel"] == w).all()


# -- what cannot be saved ----------------------------------------------------------------------------------------------


def test_what_cannot_be_saved_is_named(tmp_path):
    @dataclasses.dataclass
    class Unknown(ImplicitArray):
        half: jax.Array

        def materialize(self):
            return self.half * 2

    path = tmp_path / "m.safetensors"
    wrong = {
        r"'a\.1'.*Unknown.*register_type\(Unknown\)": {"a": [jnp.ones(1), Unknown(jnp.ones(2))]},
        r"'f'.*of type function is not an array": {"f": lambda x: x},
        r"'o'.*dtype object cannot be saved": {"o": np.array([None])},
    }
    for message, tree in wrong.items():
        with pytest.raises(files.CheckpointError, match=message):
            files.save(path, tree)
    with pytest.raises(files.CheckpointError, match=r"'w'.*tracer"):
        jax.jit(lambda w: files.save(path, {"w": w}))(jnp.ones(2))
    with pytest.raises(files.CheckpointError, match="strings to strings"):
        files.save(path, {}, metadata={"a": 1})  # pyright: ignore[reportArgumentType]
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="has a meaning of its own"):
        files.register_type(Unknown, "dict")
    with pytest.raises(ValueError, match="already the name of ArrayNF4"):
        files.register_type(Unknown, "nf4")
    with pytest.raises(TypeError, match="derived from ImplicitArray"):
        files.register_type(int)


def test_a_class_may_say_how_it_is_saved(tmp_path):
    @dataclasses.dataclass
    class Lookup(ImplicitArray):
        codes: jax.Array
        table: dict = dataclasses.field(default_factory=dict, metadata={"implicit_array_aux": True})

        def __init__(self, codes: jax.Array, table: Any, shape: Any = None, dtype: Any = None):
            self.codes, self.table = codes, tuple(sorted(table))
            self.shape, self.dtype = shape, dtype
            super().__post_init__()

        def materialize(self):
            return jnp.asarray(self.table, jnp.float32)[self.codes]

    files.register_type(
        Lookup,
        "tests.lookup",
        pack=lambda q: ({"codes": q.codes}, {"entries": q.table}),
        unpack=lambda parts, fields: Lookup(parts["codes"], set(fields["entries"])),
    )
    q = Lookup(jnp.array([0, 2, 1]), {0.5, 2.0, 4.0})
    path = files.save(tmp_path / "m.safetensors", [q])
    assert_same(files.load(path), [q])
    assert (files.load(path)[0].materialize() == jnp.array([0.5, 4.0, 2.0])).all()


def test_every_quantized_array_computes_the_same_after_a_trip(tmp_path):
    arrays = quantized(np.random.default_rng(5))
    found = files.load(files.save(tmp_path / "m.safetensors", arrays))
    for name in ("nf4_double", "int8_axes", "binary"):
        assert (found[name].materialize() == arrays[name].materialize()).all(), name
