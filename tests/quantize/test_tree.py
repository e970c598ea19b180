"""`quantize_tree`, `dequantize_tree`, `fake_quantize_tree`: rules, ties, stacks, memory, progress."""

from __future__ import annotations

import gc
import io
import math
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.core import freeze

from eformer._quantize import tree as tree_module
from eformer._quantize.leaves import open_tree
from eformer.errors import UnusedRuleWarning
from eformer.jaximus import ImplicitArray
from eformer.ops.quantization import (
    Array1B,
    Array8B,
    ArrayNF4,
    LoraArray,
    QuantizationConfig,
    dequantize_tree,
    fake_quantize_tree,
    quant_delay,
    quantize,
    quantize_tree,
)


def model(seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    return {
        "embed": {"embedding": normal(96, 64)},
        "layers": {"up": {"kernel": normal(3, 64, 128), "bias": normal(3, 128)}, "norm": {"scale": normal(3, 64)}},
        "head": {"kernel": normal(64, 96)},
    }


def formats(params: Any) -> dict[str, str]:
    implicit = lambda x: isinstance(x, ImplicitArray)  # noqa: E731
    return {leaf.path: leaf.value.format for leaf in open_tree(params).leaves if implicit(leaf.value)}


def same(a: Any, b: Any) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_default_and_rules_in_order():
    every = {"embed/embedding": "nf4", "layers/up/kernel": "nf4", "head/kernel": "nf4"}
    assert formats(quantize_tree(model())) == every
    assert formats(quantize_tree(model(), "int8")) == dict.fromkeys(every, "int8")
    config = QuantizationConfig("nf4", block_size=32)
    rules = [("re:^head", None), ("*/kernel", config), ("*", {"dtype": "nf4", "double_quant": True})]
    made = quantize_tree(model(), rules)
    assert formats(made) == {"embed/embedding": "nf4", "layers/up/kernel": "nf4"}
    assert made["layers"]["up"]["kernel"].block_size == 32
    assert type(made["embed"]["embedding"].absmax).__name__ == "CompressedAbsmax"
    assert formats(quantize_tree(model(), {"head.kernel": "ternary"}, default=None)) == {"head/kernel": "ternary"}
    assert formats(quantize_tree(model(), min_size=10_000)) == {"layers/up/kernel": "nf4"}
    # options without a format are those of the default
    made = quantize_tree(model(), {"head*": {"axis": -1}}, default={"dtype": "int4", "block_size": 32})
    assert formats(made) == dict.fromkeys(every, "int4")
    assert made["head"]["kernel"].axis == -1


def test_values_are_those_of_quantize():
    params = model()
    made = quantize_tree(params, {"head*": "ternary", "embed*": "int8"}, donate=False)
    same(made["head"]["kernel"], quantize(params["head"]["kernel"], dtype="ternary"))
    same(made["embed"]["embedding"], quantize(params["embed"]["embedding"], dtype="int8", axis=-1))
    same(made["layers"]["up"]["kernel"], quantize(params["layers"]["up"]["kernel"], dtype="nf4"))
    assert made["layers"]["up"]["bias"] is params["layers"]["up"]["bias"]
    again = quantize_tree(made)
    assert again["head"]["kernel"] is made["head"]["kernel"]


@pytest.mark.parametrize("fmt", ["nf4", "int8", "ternary", "binary"])
def test_a_stack_is_quantized_layer_by_layer(fmt: str):
    """Layers of very different sizes, so that anything shared between them shows."""
    stack = model()["layers"]["up"]["kernel"] * jnp.array([1.0, 100.0, 0.01])[:, None, None]
    made = quantize_tree({"kernel": stack}, fmt, donate=False)["kernel"]
    for i in range(3):
        alone = quantize_tree({"kernel": stack[i]}, fmt, donate=False)["kernel"]
        np.testing.assert_allclose(made.materialize()[i], alone.materialize(), rtol=1e-6)


@pytest.mark.parametrize("fmt", ["nf4", "int8", "ternary", "binary"])
def test_abstract_simulated_and_traced_agree_with_the_real_ones(fmt: str):
    params = model()
    real = quantize_tree(params, fmt, donate=False)
    for source in (params, jax.eval_shape(lambda: params)):
        shapes = quantize_tree(source, fmt, abstract=True)
        assert jax.tree.structure(shapes) == jax.tree.structure(real)
        assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(shapes))
        assert [(s.shape, s.dtype) for s in jax.tree.leaves(shapes)] == [
            (r.shape, r.dtype) for r in jax.tree.leaves(real)
        ]
    traced = jax.jit(lambda p: quantize_tree(p, fmt))(params)
    assert jax.tree.structure(traced) == jax.tree.structure(real)
    same(fake_quantize_tree(params, fmt), dequantize_tree(real))


def test_strength_and_its_schedule():
    params = {"kernel": model()["head"]["kernel"]}
    full = fake_quantize_tree(params, "binary")["kernel"]
    same(fake_quantize_tree(params, "binary", strength=0.0), params)
    half = fake_quantize_tree(params, "binary", strength=0.5)["kernel"]
    np.testing.assert_allclose(half, (params["kernel"] + full) / 2, rtol=1e-5, atol=1e-6)
    ct = jnp.arange(full.size, dtype=jnp.float32).reshape(full.shape)
    for strength in (0.0, 0.3, 1.0):
        grad = jax.grad(lambda p, s=strength: jnp.sum(ct * fake_quantize_tree(p, "nf4", strength=s)["kernel"]))(params)
        np.testing.assert_array_equal(grad["kernel"], ct)
    values = jax.vmap(quant_delay(10, ramp=4))(jnp.arange(16))
    np.testing.assert_allclose(values, [0.0] * 10 + [0.25, 0.5, 0.75] + [1.0] * 3)
    np.testing.assert_allclose(jax.vmap(quant_delay(3))(jnp.arange(5)), [0, 0, 0, 1, 1])
    with pytest.raises(ValueError, match="delay=-1"):
        quant_delay(-1)


def test_tied_leaves_stay_tied():
    shared = model()["embed"]["embedding"]
    made = quantize_tree({"embed": {"embedding": shared}, "decoder": {"kernel": shared}})
    assert made["embed"]["embedding"] is made["decoder"]["kernel"]
    dense = dequantize_tree(made)
    assert dense["embed"]["embedding"] is dense["decoder"]["kernel"]

    class Tied(nnx.Module):
        def __init__(self) -> None:
            self.embed = nnx.Embed(96, 64, rngs=nnx.Rngs(0))
            self.again = self.embed

    tied = quantize_tree(Tied())
    assert tied.embed is tied.again
    assert isinstance(tied.embed.embedding[...], ArrayNF4)
    assert isinstance(dequantize_tree(tied).again.embedding[...], jax.Array)


@pytest.mark.parametrize("placed", [False, True])
def test_what_a_result_keeps_is_not_freed(placed: bool):
    """One array under two paths, or two that share memory: one path is quantized, the other keeps it."""

    def tied(lora: bool = False) -> tuple[Any, Any]:
        e = model()["embed"]["embedding"] * 1.5
        other = LoraArray(e, jnp.ones((e.shape[0], 2)), jnp.ones((2, e.shape[1]))) if lora else e
        params: Any = {"embed": e, "lm_head": other, "z": e}
        return (jax.device_put(params, jax.devices()[0]) if placed else params), np.array(e)

    for options in ({"skip": ("heads",)}, {"rules": {"lm_head": None}}, {"rules": {"embed": None}}):
        params, values = tied()
        made = quantize_tree(params, **options)
        kept, quantized = ("embed", "lm_head") if options.get("rules") == {"embed": None} else ("lm_head", "embed")
        np.testing.assert_array_equal(made[kept], values)
        assert isinstance(made[quantized], ArrayNF4)
        assert isinstance(made["z"], ArrayNF4)
        assert placed or made[quantized] is made["z"]
    params, values = tied(lora=True)
    made = quantize_tree(params)
    np.testing.assert_array_equal(made["lm_head"].w, values)
    assert isinstance(made["embed"], ArrayNF4)
    params, _ = tied()
    made = quantize_tree(params)
    assert made["embed"] is made["lm_head"] is made["z"]
    assert params["z"].is_deleted()
    with pytest.raises(ValueError, match=r"'embed' was freed before .* pass donate=False"):
        quantize_tree(params)


def test_kinds_of_trees():
    kernel = np.ones((64, 64), np.float32)
    assert type(quantize_tree(freeze({"kernel": kernel}))).__name__ == "FrozenDict"
    assert isinstance(quantize_tree(kernel), ArrayNF4)
    assert isinstance(quantize_tree([kernel, (kernel, None)])[1][0], ArrayNF4)
    boxed = quantize_tree({"dense": {"kernel": nn.Partitioned(kernel, ("in", "out"))}}, {"dense/kernel": "int8"})
    assert isinstance(boxed["dense"]["kernel"].value, Array8B)
    assert boxed["dense"]["kernel"].names == ("in", "out")
    linear = eqx.nn.MLP(64, 64, 64, 1, activation=jax.nn.relu, key=jax.random.key(0))
    made = quantize_tree(linear, "int8")
    assert made.activation is linear.activation
    assert isinstance(made.layers[0].weight, Array8B)
    state = quantize_tree(nnx.state(nnx.Linear(64, 64, rngs=nnx.Rngs(0))), "binary")
    assert isinstance(state["kernel"][...], Array1B)
    mixed = {
        "w": jnp.ones((64, 64), jnp.int32),
        "key": jax.random.key(0),
        "n": 3,
        "half": jnp.ones((64, 64), "bfloat16"),
    }
    made = quantize_tree(mixed)
    assert {name: type(value).__name__ for name, value in made.items() if value is not mixed[name]} == {
        "half": "ArrayNF4"
    }
    assert dequantize_tree(made, jnp.float32)["half"].dtype == jnp.float32


def test_rules_without_effect_are_named():
    with pytest.warns(UnusedRuleWarning) as caught:
        quantize_tree(model(), {"*attn*": "nf4", "*": "int8", "*kernel": "nf4", "*norm*": None})
    (message,) = {str(w.message) for w in caught}
    assert "rule '*attn*' matches no path" in message
    assert "rule '*kernel' matches only paths that '*' already took" in message
    assert caught[0].filename == __file__
    with pytest.warns(UnusedRuleWarning, match=r"'\*norm\*' quantizes nothing: 'layers/norm/scale' .* it is a norm"):
        quantize_tree(model(), {"*norm*": "int8"})
    with pytest.warns(UnusedRuleWarning, match="fewer than 10000"):
        quantize_tree(model(), {"head*": "int8"}, min_size=10_000)


def test_errors_name_the_leaf():
    with pytest.raises(ValueError, match="out of range") as caught:
        quantize_tree(model(), {"head*": {"dtype": "nf4", "axis": 5}})
    assert any("head/kernel" in note for note in caught.value.__notes__)
    with pytest.raises(ValueError, match="nf5"):
        quantize_tree(model(), "nf5")
    with pytest.raises(ValueError, match=r"min_size=-5 is not allowed; .* 0 or more"):
        quantize_tree(model(), min_size=-5)
    with pytest.raises(ValueError, match="min_size='4k' is not allowed"):
        quantize_tree(model(), min_size="4k")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("abstract", [False, True])
def test_arrays_of_any_byte_order(abstract: bool):
    """As some files of NumPy and of Fortran programs have them."""
    dense = {"a": {"kernel": np.random.default_rng(0).normal(size=(64, 64))}}
    for dtype in ("f4", "f2", "f8"):
        foreign, native = (jax.tree.map(lambda x, o=order: x.astype(o + dtype), dense) for order in "><")  # noqa: B023
        made, wanted = (quantize_tree(tree, abstract=abstract) for tree in (foreign, native))
        assert isinstance(made["a"]["kernel"], ArrayNF4)
        assert jax.tree.structure(made) == jax.tree.structure(wanted)
        if not abstract:
            same(made, wanted)


# -- memory ------------------------------------------------------------------------------------------------------------


def live_bytes() -> int:
    return sum(array.nbytes for array in jax.live_arrays() if not array.is_deleted())


@pytest.mark.parametrize("source", ["host", "device"])
def test_memory_never_holds_the_model_twice(source: str):
    """Live device bytes after every leaf, and XLA's temporary bytes for the largest one."""
    rows, cols, layers = 256, 512, 8
    largest = rows * cols * 4
    gc.collect()  # what earlier tests left
    before = live_bytes()
    weights = [np.random.default_rng(i).normal(size=(rows, cols)).astype(np.float32) for i in range(layers)]
    params = {f"layer_{i}": {"kernel": w if source == "host" else jax.device_put(w)} for i, w in enumerate(weights)}
    seen = []
    made = quantize_tree(params, progress=lambda step: seen.append(live_bytes() - before))
    packed = sum(leaf.nbytes for leaf in jax.tree.leaves(made))
    assert packed < layers * largest / 7
    if source == "host":
        assert max(seen) <= packed + 2 * largest
    else:
        dense_left = [(layers - 1 - i) * largest for i in range(layers)]
        assert all(found <= left + packed + 2 * largest for found, left in zip(seen, dense_left, strict=True))
        assert all(params[name]["kernel"].is_deleted() for name in params)
    assert live_bytes() - before <= packed
    from eformer._formats.nf4 import codec

    program = codec.encode.lower(jax.ShapeDtypeStruct((rows, cols), jnp.float32), axis=-2, block_size=64).compile()
    assert program.memory_analysis().temp_size_in_bytes <= 2 * largest


def test_donation_can_be_declined():
    params = model()
    quantize_tree(params, donate=False)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(params))
    quantize_tree(params)
    assert params["head"]["kernel"].is_deleted()
    assert not params["layers"]["up"]["bias"].is_deleted()


def test_sharding_is_kept():
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, None, "x"))
    stack = jax.device_put(model()["layers"]["up"]["kernel"], place)
    for fmt in ("nf4", "ternary"):
        made = quantize_tree({"kernel": stack}, fmt, donate=False)["kernel"]
        assert made.sharding == place
        assert all(len(leaf.sharding.device_set) == 4 for leaf in jax.tree.leaves(made))


# -- progress ----------------------------------------------------------------------------------------------------------


def test_progress_is_told_and_shown(monkeypatch: pytest.MonkeyPatch):
    steps: list[Any] = []
    params = model()
    total = sum(4 * math.prod(x.shape) for x in jax.tree.leaves(params) if math.prod(x.shape) >= 4096)
    quantize_tree(params, progress=steps.append)
    assert [step.name for step in steps] == ["embed/embedding", "head/kernel", "layers/up/kernel"]
    assert [step.done for step in steps][-1] == total == steps[0].total

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for screen, progress, shown in ((Terminal(), None, True), (io.StringIO(), None, False), (Terminal(), False, False)):
        monkeypatch.setattr(tree_module.sys, "stderr", screen)
        quantize_tree(model(), progress=progress)
        assert ("quantizing" in screen.getvalue()) == shown
