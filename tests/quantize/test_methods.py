"""Methods that look at the inputs: against plain NumPy, on every format, in stacks, in other layouts."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eformer._formats.scaled.array import ScaledArray
from eformer._quantize.config import QuantizationConfig, config_of, quantize
from eformer._quantize.methods import encode, gptq
from eformer._quantize.statistics import LeafStatistics
from eformer.errors import CalibrationError, CalibrationWarning

from .method_twins import nearest, twin_costs, twin_damped, twin_gptq, twin_refit, twin_revisit, twin_scale, twin_shrunk

FORMATS: dict[str, QuantizationConfig] = {
    "nf4": QuantizationConfig("nf4", 32),
    "int4-zero": QuantizationConfig("int4", 32, symmetric=False),
    "int4-bias": QuantizationConfig("int4", 32, biased=True),
    "nvfp4": QuantizationConfig("nvfp4"),
    "ternary": QuantizationConfig("ternary"),
    "fp8-tiles": QuantizationConfig("fp8", 128),
    "nf4-double": QuantizationConfig("nf4", 32, double_quant=True),
    "int2": QuantizationConfig("int2", 32),
    "int3-rows": QuantizationConfig("int3", None),
    "int4": QuantizationConfig("int4", 32),
    "int5": QuantizationConfig("int5", 32),
    "int6": QuantizationConfig("int6", 32),
    "int8-blocks": QuantizationConfig("int8", 32),
    "int8": QuantizationConfig("int8"),
    "fp8": QuantizationConfig("fp8"),
    "fp8_e5m2": QuantizationConfig("fp8_e5m2"),
    "mxfp4": QuantizationConfig("mxfp4"),
    "mxfp8": QuantizationConfig("mxfp8"),
    "mxfp8_e5m2": QuantizationConfig("mxfp8_e5m2"),
    "iq4_nl": QuantizationConfig("iq4_nl"),
    "binary": QuantizationConfig("binary"),
}
OFTEN = ("nf4", "int4-zero", "int4-bias", "nvfp4", "ternary", "fp8-tiles")
EVERY = [name if name in OFTEN else pytest.param(name, marks=pytest.mark.thorough) for name in FORMATS]


def random_inputs(key: int, channels: int, tokens: int = 300) -> np.ndarray:
    """Correlated, and of very different sizes."""
    rng = np.random.default_rng(key)
    return rng.normal(size=(tokens, channels)) @ (
        rng.normal(size=(channels, channels)) * np.exp(rng.normal(size=channels))
    )


def statistics(shape: tuple[int, ...], axes: Any, stack: Any, x: np.ndarray) -> LeafStatistics:
    """Of inputs (stack..., tokens, channels)."""
    moment = np.swapaxes(x, -1, -2) @ x
    diagonal = np.diagonal(moment, axis1=-2, axis2=-1)
    count = np.full(x.shape[:-2], float(x.shape[-2]))
    return LeafStatistics(shape, axes, stack, moment, diagonal, np.abs(x).max(-2), count)


def problem(key: int, k: int = 48, n: int = 24) -> tuple[jax.Array, LeafStatistics]:
    w = jnp.asarray(np.random.default_rng(key + 100).normal(size=(k, n)), jnp.float32)
    return w, statistics((k, n), (0,), (), random_inputs(key, k))


def output_error(q: Any, w: Any, moment: np.ndarray) -> float:
    off = np.asarray(q.materialize(), np.float64) - np.asarray(w, np.float64)
    return float(np.einsum("kn,kj,jn->", off, moment, off, optimize=True))


def weighted_error(q: Any, w: Any, diagonal: np.ndarray) -> float:
    off = np.asarray(q.materialize(), np.float64) - np.asarray(w, np.float64)
    return float(np.sum((diagonal + 0.01 * diagonal.mean())[:, None] * off**2))


def test_scale_and_gptq_agree_with_numpy() -> None:
    w, stats = problem(0, 32, 8)
    config, assumed = QuantizationConfig("nf4", 16, axis=0), np.asarray(w, np.float64)
    scales = twin_scale(assumed, stats.diagonal, 16)
    found = encode(w, stats, config, "scale")
    np.testing.assert_allclose(np.asarray(found.absmax).T, scales, rtol=1e-5)
    np.testing.assert_allclose(found.materialize(), nearest(assumed, np.repeat(scales, 16, axis=0)), rtol=1e-5)
    assert stats.moment is not None
    h = twin_damped(stats.moment, stats.tokens)
    scales = twin_scale(assumed, twin_costs(h), 16)
    made = twin_gptq(assumed, stats.moment, stats.tokens, scales, 16)
    better, scales = twin_refit(assumed, h, made, scales)
    assert np.max(np.abs(better - made)) > 1e-2
    for _ in range(2):
        again = twin_revisit(assumed, h, better, scales)
        assert np.any(again != better)
        better, scales = twin_refit(assumed, h, again, scales)
    np.testing.assert_allclose(encode(w, stats, config, "gptq").materialize(), better, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("tokens", [2, 9, 40, 4000])
def test_shrinking_agrees_with_numpy(tokens: int) -> None:
    x = random_inputs(10, 24, tokens)
    x[:, 5] = 0
    moment = x.T @ x
    found = gptq.shrunk(jnp.asarray(moment, jnp.float32), jnp.asarray(tokens, jnp.float32))
    np.testing.assert_allclose(found, twin_shrunk(moment, tokens), rtol=2e-4, atol=1e-5 * np.abs(moment).max())
    for few in (0, 1):
        alone = gptq.shrunk(jnp.asarray(moment, jnp.float32), jnp.asarray(few, jnp.float32))
        np.testing.assert_array_equal(alone, np.diag(np.diag(moment).astype(np.float32)))


def test_awq_agrees_with_numpy() -> None:
    w, stats = problem(1, 32, 8)
    config, dense = QuantizationConfig("nf4", 16, axis=0), np.asarray(w, np.float64)
    activity = np.sqrt((stats.diagonal / stats.diagonal.mean() + 0.01) / 1.01)
    tried = {}
    for alpha in np.arange(13) / 12:
        factor = activity**alpha / np.sqrt((activity**alpha).max() * (activity**alpha).min())
        rounded = quantize(jnp.asarray(dense * factor[:, None], jnp.float32), config).materialize() / factor[:, None]
        off = np.asarray(rounded, np.float64) - dense
        tried[np.einsum("kn,kj,jn->", off, stats.moment, off)] = factor
    best = tried[min(tried)]
    made = encode(w, stats, config, "awq")
    assert isinstance(made, ScaledArray)
    np.testing.assert_allclose(1 / made.factor[:, 0], best, rtol=1e-3)
    scales = twin_scale(dense * best[:, None], stats.diagonal / best**2, 16)
    np.testing.assert_allclose(np.asarray(made.w.absmax).T, scales, rtol=1e-3)


# -- every format ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("axis", [-2, pytest.param(-1, marks=pytest.mark.thorough)])
def test_every_method_beats_rounding_and_stores_the_same(name: str, axis: int) -> None:
    w, stats = problem(2)
    config = dataclasses.replace(FORMATS[name], axis=axis)
    rounded = quantize(w, config)
    assert stats.moment is not None
    before = output_error(rounded, w, stats.moment)
    for method, share in (("scale", 1.0), ("gptq", 0.75)):
        made = encode(w, stats, config, method)
        assert config_of(made) == config_of(rounded)
        assert made.nbytes == rounded.nbytes
        assert made.dtype == w.dtype
        least = weighted_error(rounded, w, stats.diagonal) * (1 + 1e-12)  # where both are equal, sums of it may differ
        assert weighted_error(made, w, stats.diagonal) <= least or method == "gptq"
        assert output_error(made, w, stats.moment) < share * before or method == "scale"
    x = jnp.asarray(np.random.default_rng(3).normal(size=(5, w.shape[0])), jnp.float32)
    np.testing.assert_allclose(x @ made, x @ made.materialize(), rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("name", ["int4", pytest.param("nf4", marks=pytest.mark.thorough)])
def test_factors_help_both(name: str) -> None:
    w, stats = problem(4)
    config = dataclasses.replace(FORMATS[name], axis=0)
    assert stats.moment is not None
    errors = {m: output_error(encode(w, stats, config, m), w, stats.moment) for m in ("round", "awq", "awq+gptq")}
    assert errors["awq+gptq"] < 0.6 * errors["awq"] < 0.6 * errors["round"]


@pytest.mark.parametrize("thorough", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_a_stack_equals_its_matrices(monkeypatch: pytest.MonkeyPatch, thorough: bool) -> None:
    ws, parts = zip(*(problem(key, 32, 16) for key in range(3)), strict=True)
    x = np.stack([random_inputs(key, 32) for key in range(3)])
    stack, stats = jnp.stack(ws), statistics((3, 32, 16), (1,), (0,), x)
    config = QuantizationConfig("nvfp4", axis=-2)
    for method in ("gptq", "awq")[: 1 + thorough]:
        apart = [encode(w, part, config, method).materialize() for w, part in zip(ws, parts, strict=True)]
        monkeypatch.setattr("eformer._quantize.methods.matrices.WORKING_BYTES", 1 << 28)
        whole = encode(stack, stats, config, method)
        np.testing.assert_allclose(whole.materialize(), jnp.stack(apart), rtol=1e-5, atol=1e-6)
        monkeypatch.setattr("eformer._quantize.methods.matrices.WORKING_BYTES", 1)  # one at a time
        np.testing.assert_allclose(encode(stack, stats, config, method).materialize(), whole.materialize(), atol=1e-6)


@pytest.mark.thorough
def test_other_layouts_are_the_same_matrix() -> None:
    """(out, in); heads among the inputs, packed along one of them with a ragged end, or along the outputs."""
    w, stats = problem(5, 40, 16)
    config = QuantizationConfig("int4", 16, axis=0)
    plain = encode(w, stats, config, "gptq").materialize()
    turned = dataclasses.replace(stats, shape=(16, 40), axes=(1,))
    found = encode(w.T, turned, dataclasses.replace(config, axis=1), "gptq")
    np.testing.assert_array_equal(found.materialize(), plain.T)
    heads = dataclasses.replace(stats, shape=(2, 20, 16), axes=(0, 1))
    assert stats.moment is not None
    for axis in (1, 2):
        made = encode(w.reshape(2, 20, 16), heads, dataclasses.replace(config, axis=axis), "gptq")
        rounded = quantize(w.reshape(2, 20, 16), dataclasses.replace(config, axis=axis))
        assert made.nbytes == rounded.nbytes
        flat = [ScaledArray(q.materialize().reshape(40, 16), jnp.ones((1, 1))) for q in (made, rounded)]
        errors = [output_error(q, w, stats.moment) for q in flat]
        assert errors[0] < 0.6 * errors[1]
    behind = dataclasses.replace(statistics((40, 3, 16), (0,), (1,), np.stack([random_inputs(5, 40)] * 3)))
    stack = encode(jnp.stack([w] * 3, axis=1), behind, config, "gptq")
    np.testing.assert_allclose(stack.materialize()[:, 1], plain, atol=1e-6)


# -- inputs that say little --------------------------------------------------------------------------------------------


CHANNELS = 64
KINDS = ("uncorrelated", "neighbours", "factors", "relu")


def drawn(kind: str, rng: np.random.Generator, tokens: int) -> np.ndarray:
    """Inputs (tokens, CHANNELS) of a kind."""
    x, places = rng.normal(size=(tokens, CHANNELS)), np.arange(CHANNELS)
    if kind == "neighbours":
        return x @ np.linalg.cholesky(0.9 ** np.abs(places[:, None] - places)).T
    if kind == "factors":
        return x + rng.normal(size=(tokens, 4)) @ np.random.default_rng(11).normal(size=(4, CHANNELS))
    return np.maximum(x, 0) if kind == "relu" else x


@pytest.mark.parametrize("kind", KINDS)
def test_few_tokens_make_nothing_worse_on_fresh_inputs(kind: str) -> None:
    """A stack whose matrices have seen fewer tokens or more: each is better than rounded, or nearly as good."""
    rng = np.random.default_rng(12)
    counts = [16, 64, 80, 128, 192, 1024]
    w = jnp.asarray(rng.normal(size=(len(counts), CHANNELS, 48)), jnp.float32)
    parts = [statistics((CHANNELS, 48), (0,), (), drawn(kind, rng, tokens)) for tokens in counts]
    numbers = {part: np.stack([getattr(p, part) for p in parts]) for part in ("moment", "diagonal", "absmax", "count")}
    stats = LeafStatistics(w.shape, (1,), (0,), **numbers)
    fresh = drawn(kind, rng, 20000)
    moment = fresh.T @ fresh

    def errors(method: str) -> np.ndarray:
        off = np.asarray(encode(w, stats, QuantizationConfig("int4", 32, axis=-2), method).materialize() - w, float)
        return np.sqrt(np.einsum("skn,kj,sjn->s", off, moment, off, optimize=True))

    rounded, scaled, propagated = (errors(method) for method in ("round", "scale", "gptq"))
    assert np.all(propagated <= (1.02 if kind == "uncorrelated" else 1.0) * rounded)
    assert np.all(propagated <= 1.05 * scaled)
    if kind in ("neighbours", "factors"):
        assert np.all(propagated < 0.85 * scaled)
        assert np.all(propagated[1:] < 0.75 * rounded[1:])


def test_silent_channels_are_rounded_and_few_tokens_damped() -> None:
    w, _ = problem(6, 32, 8)
    x = random_inputs(6, 32, tokens=5)
    x[:, 7] = 0
    stats = statistics((32, 8), (0,), (), x)
    config = QuantizationConfig("int4", 32, axis=0)
    made, assumed = encode(w, stats, config, "gptq"), np.asarray(w)
    step = np.abs(np.asarray(made.scale))[:, 0]
    assert np.all(np.abs(np.asarray(made.materialize())[7] - assumed[7]) <= step * 1.01 + 0.5 * step)
    assert stats.moment is not None
    assert output_error(made, w, stats.moment) < 0.2 * output_error(quantize(w, config), w, stats.moment)
    nothing = encode(w, statistics((32, 8), (0,), (), np.zeros((4, 32))), config, "gptq")
    np.testing.assert_allclose(nothing.materialize(), w, atol=float(np.abs(np.asarray(nothing.scale)).max()))


@pytest.mark.parametrize("method", ["scale", "gptq", "awq"])
def test_the_size_of_statistics_does_not_matter(method: str) -> None:
    """Sums of squares may be numbers that float32 has not."""
    w, stats = problem(7, 32, 8)
    config = QuantizationConfig("int4", 32, axis=0)
    expected = encode(w, stats, config, method).materialize()
    for size in (2.0**-400, 2.0**400):
        assert stats.moment is not None
        other = dataclasses.replace(stats, moment=stats.moment * size, diagonal=stats.diagonal * size)
        np.testing.assert_array_equal(encode(w, other, config, method).materialize(), expected)


def test_a_moment_that_is_none_needs_damping_or_is_given_up() -> None:
    w, stats = problem(7, 32, 8)
    config = QuantizationConfig("int4", 32, axis=0)
    assert stats.moment is not None
    bent = dataclasses.replace(stats, moment=stats.moment - 0.05 * np.mean(stats.diagonal) * np.eye(32))
    with pytest.warns(CalibrationWarning, match="damping of 0.1 of its mean, instead of 0.01"):
        encode(w, bent, config, "gptq")
    broken = dataclasses.replace(stats, moment=-1e9 * np.eye(32))
    with pytest.warns(CalibrationWarning, match="1 of 1 matrices cannot be factored"):
        made = encode(w, broken, config, "gptq")
    np.testing.assert_array_equal(made.materialize(), encode(w, stats, config, "scale").materialize())


def test_what_cannot_be_used_is_refused() -> None:
    w, stats = problem(8, 32, 8)
    config = QuantizationConfig("nf4", 32, axis=0)
    with pytest.raises(ValueError, match="'gptq' needs statistics of the inputs"):
        quantize(w, dataclasses.replace(config, method="gptq"))
    with pytest.raises(ValueError, match="method='best' is unknown; allowed are 'round', 'scale', 'gptq'"):
        QuantizationConfig("nf4", method="best")
    with pytest.raises(CalibrationError, match=r"shape \(32, 8\), and this one has shape \(8, 32\)"):
        encode(w.T, stats, config, "gptq")
    with pytest.raises(CalibrationError, match="hold diagonals only"):
        encode(w, dataclasses.replace(stats, moment=None), config, "gptq")
    with pytest.raises(CalibrationError, match="not finite"):
        encode(w, dataclasses.replace(stats, diagonal=np.full(32, np.nan)), config, "scale")
    with pytest.raises(ValueError, match="scaled=False has none"):
        encode(w, stats, QuantizationConfig("binary", scaled=False), "scale")
    broken = w.at[3, 3].set(jnp.nan)
    with pytest.warns(CalibrationWarning, match="not finite"):
        made = encode(broken, stats, config, "gptq")
    np.testing.assert_array_equal(made.materialize(), quantize(broken, config).materialize())


def test_without_statistics_scales_are_still_searched_for() -> None:
    w, _ = problem(9, 64, 16)
    config = QuantizationConfig("int3", 32, axis=0, method="scale")
    made, rounded = quantize(w, config), quantize(w, dataclasses.replace(config, method=None))
    errors = [float(jnp.sum(jnp.abs(q.materialize() - w) ** 2.4)) for q in (made, rounded)]
    assert errors[0] < 0.9 * errors[1]
    assert QuantizationConfig.from_json(config.to_json()) == config
    dense = quantize(w, dataclasses.replace(config, simulate=True))
    np.testing.assert_array_equal(dense, made.materialize())
    assert jax.jit(lambda v: quantize(v, config))(w).shape == w.shape


def test_biases_are_fitted_with_the_scales() -> None:
    """Blocks far from 0, and inputs with a mean: a bias leaves less error than a zero point, in fewer bits."""
    rng = np.random.default_rng(5)
    w = jnp.asarray(rng.normal(size=(64, 24)) + 0.7 * rng.normal(size=(1, 24)), jnp.float32)
    x = random_inputs(6, 64) + 3
    stats = statistics((64, 24), (0,), (), x)
    zero, bias = QuantizationConfig("int4", 32, symmetric=False), QuantizationConfig("int4", 32, biased=True)
    for method in ("scale", "gptq"):
        made = {config.biased: encode(w, stats, config, method) for config in (zero, bias)}
        errors = {biased: output_error(q, w, stats.moment) for biased, q in made.items()}
        assert errors[True] < 0.9 * errors[False]
        assert made[True].bias.dtype == made[True].scale.dtype == jnp.bfloat16
        assert made[True].nbytes < made[False].nbytes
