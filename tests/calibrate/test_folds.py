"""AWQ factors that norms take over: what a calibration sees of it, and models that stay the same."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

import eformer as ef
from eformer._formats.scaled.array import ScaledArray
from eformer._quantize.folds import Fold, Part
from eformer._quantize.statistics import Statistics

K, N, L = 64, 96, 3
METHODS = ("awq", "awq+gptq")


def rms(x: Any, g: Any) -> Any:
    return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * g


def layer_norm(x: Any, g: Any, b: Any) -> Any:
    x = x - jnp.mean(x, -1, keepdims=True)
    return x * (lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * g) + b


def normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape) / (shape[-2] ** 0.5 if len(shape) > 1 else 1)


def inputs(dtype: Any = jnp.float32) -> jax.Array:
    """Channels of very different sizes, so that factors are worth having."""
    return (jax.random.normal(jax.random.key(100), (4, 48, K)) * jnp.exp(normal(101, K))).astype(dtype)


def gain(seed: int, *lead: int) -> jax.Array:
    return jnp.exp(normal(seed, *lead, K) * (1 if not lead else K**0.5 / 8))


def scanned(p: Any, x: Any) -> Any:
    def layer(x: Any, w: Any) -> tuple[Any, None]:
        y = rms(x, w["norm"])
        return x + jnp.tanh(y @ w["q"]) + jnp.tanh(y @ w["v"]), None

    return lax.scan(layer, x, p["layers"])[0]


def stack() -> dict[str, Any]:
    return {"layers": {"norm": gain(1, L), "q": normal(2, L, K, K), "v": normal(3, L, K, K)}}


def indexed(p: Any, x: Any) -> Any:
    for i in range(L):
        y = rms(x, p["layers"]["norm"][i])
        x = x + jnp.tanh(y @ p["layers"]["q"][i]) + jnp.tanh(y @ p["layers"]["v"][i])
    return x


def listed(p: Any, x: Any) -> Any:
    for w in p:
        x = x + rms(x, w["norm"]) @ w["q"]
    return x


def plain() -> dict[str, Any]:
    return {"norm": gain(1), "q": normal(2, K, N), "k": normal(3, K, N)}


def two(p: Any, x: Any) -> Any:
    y = rms(x, p["norm"]).reshape(-1, K)
    return jnp.tanh(y @ p["q"]) * (y @ p["k"])


# What the calibration should see: model, parameters, (vectors, matrices) of every fold.
SEEN: dict[str, tuple[Callable[..., Any], Any, list[tuple[set[str], set[str]]]]] = {
    "two products": (two, plain(), [({"norm"}, {"k", "q"})]),
    "jit and remat": (jax.jit(jax.checkpoint(two)), plain(), [({"norm"}, {"k", "q"})]),
    "einsum of heads": (
        lambda p, x: jnp.einsum("btd,dhe->bhte", rms(x, p["norm"]), p["q"]),
        {"norm": gain(1), "q": normal(2, K, 4 * 16).reshape(K, 4, 16)},
        [({"norm"}, {"q"})],
    ),
    "transposed weight": (
        lambda p, x: rms(x, p["norm"]) @ p["q"].T, {"norm": gain(1), "q": normal(2, N, K)}, [({"norm"}, {"q"})]
    ),
    "some tokens": (lambda p, x: rms(x, p["norm"])[:, -2:] @ p["q"], {"norm": gain(1), "q": normal(2, K, N)},
                    [({"norm"}, {"q"})]),
    "layer norm": (
        lambda p, x: layer_norm(x, p["norm"], p["bias"]) @ p["q"],
        {"norm": gain(1), "bias": normal(5, K), "q": normal(2, K, N)},
        [({"bias", "norm"}, {"q"})],
    ),
    "1 + w": (lambda p, x: rms(x, 1 + p["norm"]) @ p["q"], {"norm": gain(1) - 1, "q": normal(2, K, N)},
              [({"norm"}, {"q"})]),
    "scan": (scanned, stack(), [({"layers/norm"}, {"layers/q", "layers/v"})]),
    "indexed": (indexed, stack(), [({"layers/norm"}, {"layers/q", "layers/v"})]),
    "list": (
        listed,
        [{"norm": gain(i), "q": normal(i + 10, K, K)} for i in range(2)],
        [({"0/norm"}, {"0/q"}), ({"1/norm"}, {"1/q"})],
    ),
}  # fmt: skip


# What is left alone: the value, a vector or a matrix is used in another way as well.
LEFT: dict[str, Callable[..., Any]] = {
    "the value is a result": lambda p, x: (rms(x, p["norm"]), two(p, x)),
    "the value is added": lambda p, x: rms(x, p["norm"]) + two(p, x).sum(),
    "an activation between": lambda p, x: jnp.tanh(rms(x, p["norm"])) @ p["q"] + rms(x, p["norm"]) @ p["k"],
    "the vector is used elsewhere": lambda p, x: two(p, x).sum() + jnp.sum(p["norm"] ** 2),
    "a matrix is used elsewhere": lambda p, x: two(p, x) + (x @ p["k"]).reshape(-1, N),
    "a result that hides arrays": lambda p, x: Opaque(two(p, x)),
    "a shared part": lambda p, x: (rms(x, p["norm"])[..., :32] @ p["q"][:32], rms(x, p["norm"]) @ p["k"]),
    "a loop": lambda p, x: lax.fori_loop(0, jnp.where(x[0, 0, 0] > 9, 1, 2), lambda _, y: y + two(p, x).sum(), 0.0),
}


@dataclasses.dataclass
class Opaque:
    hidden: Any


def shapes_of(stats: Any) -> list[tuple[set[str], set[str]]]:
    return [({v.path for v in f.vectors}, {m.path for m in f.matrices}) for f in stats.folds]


def carried(stats: Any) -> Statistics:
    return Statistics(stats)


def quantized(params: Any, stats: Any, method: str, **options: Any) -> Any:
    return ef.quantize_tree(params, min_size=0, donate=False, calibration=stats, method=method, **options)


def scaled_arrays(tree: Any) -> int:
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, ScaledArray))
    return sum(isinstance(leaf, ScaledArray) for leaf in leaves)


def error(forward: Any, made: Any, params: Any, x: Any) -> Any:
    return np.asarray(ef.implicit(forward)(made, x)) - np.asarray(forward(params, x))


@pytest.mark.parametrize("name", SEEN)
def test_folds_are_seen_and_keep_the_model(name: str) -> None:
    forward, params, expected = SEEN[name]
    x = inputs()
    stats = ef.calibrate(forward, params, [x])
    assert shapes_of(stats) == expected
    for method in METHODS if name in ("scan", "1 + w", "layer norm") else METHODS[:1]:
        made, other = quantized(params, stats, method), quantized(params, carried(stats), method)
        assert scaled_arrays(made) == 0
        assert scaled_arrays(other) == sum(len(m) for _, m in expected)
        shapes = quantized(params, stats, method, abstract=True)
        assert jax.tree.structure(made) == jax.tree.structure(shapes)
        found, wanted, rounded = (
            np.linalg.norm(error(forward, m, params, x)) for m in (made, other, quantized(params, stats, "round"))
        )
        assert found < 0.9 * rounded
        assert found < 1.1 * wanted


def test_with_the_same_factors_a_folded_model_is_the_carried_one() -> None:
    """One matrix for every norm: nothing is shared, and both searches find the same factors."""
    forward, params, _ = SEEN["list"]
    x = inputs()
    stats = ef.calibrate(forward, params, [x])
    for method in METHODS:
        made, other = (ef.implicit(forward)(quantized(params, s, method), x) for s in (stats, carried(stats)))
        np.testing.assert_allclose(made, other, rtol=2e-4, atol=2e-4 * float(jnp.max(jnp.abs(other))))


@pytest.mark.parametrize("name", LEFT)
def test_what_is_used_elsewhere_is_left_alone(name: str) -> None:
    stats = ef.calibrate(LEFT[name], plain(), [inputs()])
    assert stats.folds == ()
    if name == "the value is a result":
        made = quantized(plain(), stats, "awq")
        assert scaled_arrays(made) == 2
        np.testing.assert_array_equal(made["norm"], plain()["norm"])


def test_all_programs_must_agree() -> None:
    def forward(p: Any, batch: Any) -> Any:
        x, both = batch
        return (rms(x, p["norm"]), two(p, x)) if both else two(p, x)

    x = inputs()
    assert shapes_of(ef.calibrate(forward, plain(), [(x, False), (x[:2], False)])) == [({"norm"}, {"k", "q"})]
    assert ef.calibrate(forward, plain(), [(x, False), (x, True)]).folds == ()


def test_tied_leaves_are_left_alone() -> None:
    params = plain()
    params["k"] = params["q"]
    assert ef.calibrate(two, params, [inputs()]).folds == ()
    stats = ef.calibrate(two, plain(), [inputs()])
    made = quantized(params, stats, "awq")  # tied since
    assert scaled_arrays(made) == 2


def test_a_fold_needs_all_its_matrices() -> None:
    stats = ef.calibrate(two, plain(), [inputs()])
    for rules in (
        {"q": None},
        {"q": {"dtype": "nf4", "method": "gptq"}},
        {"q": {"dtype": "int8", "activations": "int8"}},
    ):
        made = quantized(plain(), stats, "awq", rules=rules)
        assert scaled_arrays(made["k"]) == 1
        np.testing.assert_array_equal(made["norm"], plain()["norm"])
    made = quantized(plain(), stats, "awq", rules={"q": {"dtype": "int4", "block_size": 48}})  # of another length
    assert scaled_arrays(made) == 0
    rest = plain() | {"k": plain()["k"].at[0, 0].set(jnp.nan)}
    with pytest.warns(ef.errors.CalibrationWarning, match="not finite"):
        made = quantized(rest, stats, "awq")
    assert isinstance(made["q"], ScaledArray)


def test_reports_and_donated_arrays() -> None:
    stats = ef.calibrate(two, plain(), [inputs()])
    params = plain()
    made = ef.quantize_tree(params, min_size=0, calibration=stats, method="awq")
    assert params["q"].is_deleted()
    assert not params["norm"].is_deleted()
    told = {leaf.path: leaf.method for leaf in ef.report(made).leaves}
    assert told == {"k": "awq, folded", "norm": None, "q": "awq, folded"}
    assert {leaf.relative_error for leaf in ef.report(made, plain()).leaves} == {None}  # of rows that were multiplied
    assert not np.allclose(made["norm"], plain()["norm"])


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_vectors_of_half_precision_lose_nothing(dtype: Any) -> None:
    """Rows are multiplied by what rounding made of the factors: vector times row stays what it was."""
    params = jax.tree.map(lambda a: a.astype(dtype), plain())
    stats = ef.calibrate(two, params, [inputs(dtype)])
    made = quantized(params, stats, "awq", default="int8")
    assert made["norm"].dtype == dtype
    exact = np.asarray(params["norm"], np.float64)[:, None] * np.asarray(params["q"], np.float64)
    found = np.asarray(made["norm"], np.float64)[:, None] * np.asarray(made["q"].materialize(), np.float64)
    rows = np.abs(found - exact).max(1) / np.abs(exact).max(1)
    assert np.median(rows) < 0.01


def test_numpy_leaves_stay_numpy() -> None:
    params = jax.tree.map(np.asarray, plain())
    made = quantized(params, ef.calibrate(two, params, [inputs()]), "awq")
    assert type(made["norm"]) is np.ndarray
    assert scaled_arrays(made) == 0


def test_split_over_devices() -> None:
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2], axis_types=(jax.sharding.AxisType.Auto,))
    split = {"norm": ("x",), "q": ("x", None), "k": (None, "x")}
    shardings = {name: jax.sharding.NamedSharding(mesh, jax.P(*spec)) for name, spec in split.items()}
    params = jax.device_put(plain(), shardings)
    stats = ef.calibrate(two, params, [inputs()])
    made, alone = (quantized(p, stats, "awq", default={"dtype": "nf4", "block_size": 32}) for p in (params, plain()))
    assert made["norm"].sharding == shardings["norm"]
    np.testing.assert_allclose(made["norm"], alone["norm"], rtol=1e-6)
    np.testing.assert_allclose(made["q"].materialize(), alone["q"].materialize(), rtol=1e-5, atol=1e-6)


def test_a_vector_with_zeros() -> None:
    params = plain()
    params["norm"] = params["norm"].at[:5].set(0)
    stats = ef.calibrate(two, params, [inputs()])
    made = quantized(params, stats, "awq")
    assert scaled_arrays(made) == 0
    assert not np.any(made["norm"][:5])
    assert np.isfinite(ef.implicit(two)(made, inputs())).all()


def test_under_jit_factors_are_carried() -> None:
    stats = ef.calibrate(two, plain(), [inputs()])
    made = jax.jit(lambda p: quantized(p, stats, "awq"))(plain())
    assert scaled_arrays(made) == 2


def test_files_and_sums(tmp_path: Path) -> None:
    x, params = inputs(), SEEN["1 + w"][1]
    stats = ef.calibrate(SEEN["1 + w"][0], params, [x], directory=tmp_path / "folder")
    expected = (Fold((Part("norm", 0, (), 1.0),), (Part("q", 0, ()),)),)
    assert stats.folds == expected == ef.Statistics.load(tmp_path / "folder").folds
    stats.save(tmp_path / "one.safetensors")
    read = ef.Statistics.load(tmp_path / "one.safetensors")
    assert read.folds == expected
    assert (read + stats).folds == expected
    assert (stats + Statistics(stats)).folds == ()
    assert (Statistics() + stats).folds == expected
    data = (tmp_path / "one.safetensors").read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    del header["__metadata__"]["eformer.folds"]  # as earlier versions wrote it
    text = json.dumps(header).encode().ljust(size)
    (tmp_path / "old.safetensors").write_bytes(data[:8] + text + data[8 + size :])
    old = ef.Statistics.load(tmp_path / "old.safetensors")
    assert old.folds == ()
    assert list(old) == ["q"]


class LinenLayer(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        y = nn.LayerNorm(name="norm")(x)
        return x + jnp.tanh(nn.Dense(K, name="a")(y)) * nn.Dense(K, use_bias=False, name="b")(y), None


class LinenModel(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        stack = nn.scan(nn.remat(LinenLayer), variable_axes={"params": 0}, split_rngs={"params": True}, length=L)
        return nn.Dense(N, name="head")(nn.RMSNorm(name="last")(stack(name="layers")(x, None)[0]))


def test_linen() -> None:
    model, x = LinenModel(), inputs()
    params = model.init(jax.random.key(0), x)
    stats = ef.calibrate(model.apply, params, [x])
    of = "params/layers/"
    assert shapes_of(stats) == [
        ({of + "norm/bias", of + "norm/scale"}, {of + "a/kernel", of + "b/kernel"}),
        ({"params/last/scale"}, {"params/head/kernel"}),
    ]
    made, other = (quantized(params, s, "awq") for s in (stats, carried(stats)))
    assert (scaled_arrays(made), scaled_arrays(other)) == (0, 3)
    errors = [np.linalg.norm(error(model.apply, m, params, x)) for m in (made, other)]
    assert errors[0] < 1.1 * errors[1]


class NnxModel(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.norm = nnx.RMSNorm(K, rngs=rngs)
        self.gate, self.up = nnx.Linear(K, N, use_bias=False, rngs=rngs), nnx.Linear(K, N, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.norm(x)
        return nnx.silu(self.gate(y)) * self.up(y)


def test_nnx() -> None:
    model, x = NnxModel(nnx.Rngs(0)), inputs()
    run = lambda model, x: model(x)  # noqa: E731
    stats = ef.calibrate(run, model, [x])
    assert shapes_of(stats) == [({"norm/scale"}, {"gate/kernel", "up/kernel"})]
    exact = model(x)
    made, other = (quantized(model, s, "awq") for s in (stats, carried(stats)))
    assert not isinstance(made.gate.kernel[...], ScaledArray)
    assert isinstance(other.gate.kernel[...], ScaledArray)
    found, wanted = (np.linalg.norm(ef.implicit(run)(m, x) - exact) for m in (made, other))
    assert found < 1.1 * wanted
