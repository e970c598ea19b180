"""What `calibrate` is given and what it returns: batches, rules, files, and what it says of bad input."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eformer as ef
from eformer import errors
from eformer._calibrate import model as programs

from .references import check

K, N, T = 4, 6, 5


@pytest.fixture
def rng():
    return np.random.default_rng(1)


@pytest.fixture
def params(rng):
    shapes = {"first": (K, N), "second": (N, K), "bias": (N,)}
    return {name: jnp.asarray(rng.standard_normal(shape), jnp.float32) for name, shape in shapes.items()}


def forward(params, x):
    return jnp.tanh(x @ params["first"] + params["bias"]) @ params["second"]


def hidden(params, x):
    return np.tanh(np.asarray(x) @ np.asarray(params["first"]) + np.asarray(params["bias"]))


def test_batches_of_any_shape(params, rng):
    xs = [rng.standard_normal(shape).astype("float32") for shape in ((T, K), (2, T, K), (K,), (T, K))]
    stats = ef.calibrate(forward, params, iter(xs))
    flat = [x.reshape(-1, K) for x in xs]
    check(stats["first"], flat, [0])
    check(stats["second"], [hidden(params, x) for x in flat], [0])
    assert list(stats) == ["first", "second"]


def test_sums_of_parts_are_the_whole(params, rng, tmp_path):
    xs = [rng.standard_normal((T, K)).astype("float32") for _ in range(4)]
    whole = ef.calibrate(forward, params, xs)
    ef.calibrate(forward, params, xs[:2]).save(tmp_path / "a.safetensors")
    found = ef.Statistics.load(tmp_path / "a.safetensors") + ef.calibrate(forward, params, xs[2:])
    for path in whole:
        np.testing.assert_allclose(found[path].moment, whole[path].moment, rtol=1e-12)
        np.testing.assert_array_equal(found[path].absmax, whole[path].absmax)
    assert repr(found) == repr(whole)


def test_diagonals_are_those_of_the_moments(params, rng):
    xs = [rng.standard_normal((T, K)).astype("float32")]
    whole, cheap = (ef.calibrate(forward, params, xs, diagonal_only=only) for only in (False, True))
    assert cheap["first"].moment is None
    for path in whole:
        np.testing.assert_allclose(cheap[path].diagonal, whole[path].diagonal, rtol=1e-5)
        np.testing.assert_allclose(whole[path].diagonal, np.diagonal(whole[path].moment), rtol=1e-12)
        np.testing.assert_array_equal(cheap[path].absmax, whole[path].absmax)


def test_long_sums_stay_exact(rng):
    """A large moment and many small ones: in float32 the small ones would be lost."""
    w, large, small = jnp.ones((1, 2)), np.full((1, 1), 4096.0, "float32"), np.ones((1, 1), "float32")
    stats = ef.calibrate(lambda p, x: x @ p, w, [large] + [small] * 5)
    assert stats[""].moment[0, 0] == 4096.0**2 + 5


def test_a_directory_holds_the_numbers(params, rng, tmp_path):
    xs = [rng.standard_normal((T, K)).astype("float32") for _ in range(2)]
    stats = ef.calibrate(forward, params, xs, directory=tmp_path / "d")
    plain = ef.calibrate(forward, params, xs)
    again = ef.Statistics.load(tmp_path / "d")
    for found in (stats, again):
        assert list(found) == list(plain)
        assert all(np.array_equal(found[path].moment, plain[path].moment) for path in plain)
    base = stats["first"].moment
    while not isinstance(base, np.memmap):
        base = base.base
    assert (tmp_path / "d") in base.filename.parents
    with pytest.raises(errors.CalibrationError, match="is not empty"):
        ef.calibrate(forward, params, xs, directory=tmp_path / "d")


def test_several_passes_find_the_same(params, rng, monkeypatch):
    xs = [rng.standard_normal((T, K)).astype("float32")]
    plain = ef.calibrate(forward, params, xs)
    monkeypatch.setattr(programs, "PASS_BYTES", 1)
    parts = ef.calibrate(forward, params, xs)
    assert all(np.array_equal(parts[path].moment, plain[path].moment) for path in plain)
    assert list(parts) == list(plain)


def test_rules_choose(params, rng):
    xs = [rng.standard_normal((T, K)).astype("float32")]
    assert list(ef.calibrate(forward, params, xs, rules="*second")) == ["second"]
    assert list(ef.calibrate(forward, params, xs, rules=["re:^fi", "none*", "second"][::2])) == ["first", "second"]
    assert list(ef.calibrate(forward, params, xs, rules={"*second": None})) == ["first"]
    with pytest.raises(errors.CalibrationError, match=r"rule '\*third' matches no path; paths look like 'bias'"):
        ef.calibrate(forward, params, xs, rules=["*third"])
    with pytest.raises(errors.CalibrationError, match="no floating-point matrix that rules="):
        ef.calibrate(forward, params, xs, rules={"*": None})


def test_quantized_leaves_take_part(rng):
    w = {"a": jnp.asarray(rng.standard_normal((64, 64)), jnp.float32), "b": jnp.ones((64, 8))}
    packed = {**w, "a": ef.quantize(w["a"], dtype="nf4")}
    x = rng.standard_normal((T, 64)).astype("float32")
    stats = ef.calibrate(lambda p, x: x @ p["a"] @ p["b"], packed, [x])
    assert list(stats) == ["b"]
    check(stats["b"], x @ np.asarray(packed["a"].materialize()), [0])


def test_values_that_are_no_arrays(rng):
    """In the model and in batches: they are constants, and Python code may branch on them."""
    params = {"w": jnp.ones((K, N)), "activation": jnp.tanh, "name": "twice", "ids": jnp.arange(3)}

    def forward(params, batch):
        assert params["name"] == "twice"
        x = batch["x"] * 2 if batch["double"] else batch["x"]
        return params["activation"](x @ params["w"])

    x = rng.standard_normal((T, K)).astype("float32")
    stats = ef.calibrate(forward, params, [{"x": x, "double": True}, {"x": x, "double": False}])
    check(stats["w"], [2 * x, x], [0])


def test_progress_is_told(params, rng):
    seen = []
    ef.calibrate(forward, params, [np.ones((T, K), "float32")] * 3, progress=seen.append)
    assert [(p.name, p.done, p.total) for p in seen] == [(f"batch {i}", i * 80, 240) for i in (1, 2, 3)]


# -- bad input ---------------------------------------------------------------------------------------------------------


def test_a_quantized_model_has_nothing_to_observe():
    """But for its norms, which are matrices where layers are stacked."""
    params = {"w": ef.quantize(jnp.ones((64, 32))), "norms": jnp.ones((2, 32))}
    with pytest.raises(errors.CalibrationError, match="Calibrate the dense parameters"):
        ef.calibrate(lambda p, x: (x @ p["w"]) * p["norms"][0], params, [jnp.ones((4, 64))])


def test_no_batches(params):
    with pytest.raises(errors.CalibrationError, match="no batches"):
        ef.calibrate(forward, params, [])
    with pytest.raises(TypeError, match="looks like one batch"):
        ef.calibrate(forward, params, {"x": jnp.ones((T, K))})


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_no_number_is_named(params, bad):
    good, wrong = np.ones((T, K), "float32"), np.full((T, K), bad, "float32")
    with pytest.raises(errors.CalibrationError, match="in batch 1, what 'first' is multiplied with holds NaN or inf"):
        ef.calibrate(forward, params, [good, wrong])
    swapped = lambda p, x: forward({**params, "first": p["z"], "second": p["a"]}, x)  # noqa: E731
    with pytest.raises(errors.CalibrationError, match="in batch 0, what 'z'"):
        ef.calibrate(swapped, {"z": params["first"], "a": params["second"]}, [wrong])
    with pytest.raises(errors.CalibrationError, match=r"in batch 0, what 'first' .* holds values as large as 1e\+30"):
        ef.calibrate(forward, params, [1e30 * good])


def test_the_first_layer_with_nan_is_named():
    layers = {"a": jnp.ones((3, K, K)), "b": jnp.ones((3, K, K)).at[1, 0, 0].set(jnp.nan)}

    def forward(p, x):
        return jax.lax.scan(lambda x, w: ((x @ w["b"]) @ w["a"], None), x, p)

    with pytest.raises(
        errors.CalibrationError, match=r"what 'a' \(number 1 of the stack\) is multiplied with holds NaN"
    ):
        ef.calibrate(forward, layers, [jnp.ones((T, K))])


def test_leaves_that_were_not_used_are_named(params, rng):
    more = {**params, "extra": jnp.ones((K, N)), "added": jnp.ones((T, N)), "table": jnp.ones((K, N))}

    def used(p, x):
        return forward(p, x), x @ p["first"] + p["added"] + p["table"][0]

    with pytest.warns(errors.CalibrationWarning) as caught:
        stats = ef.calibrate(used, more, [jnp.ones((T, K))])
    (message,) = [str(w.message) for w in caught]
    assert "'extra' was never used" in message
    assert "'added' was only used by add" in message
    assert "'first'" not in message
    assert caught[0].filename == __file__
    assert list(stats) == ["first", "second"]


LOOKUPS = {
    "indexed": lambda table, ids: table[ids],
    "taken": lambda table, ids: jnp.take(table, ids, axis=0),
    "mapped": lambda table, ids: jax.vmap(jax.vmap(lambda i: table[i]))(ids),
    "one row": lambda table, ids: table[1] + jnp.zeros((*ids.shape, 1)),
}


@pytest.mark.parametrize("name", LOOKUPS)
def test_a_lookup_is_a_use(name):
    """It needs no statistics, and no warning."""
    params, ids = {"table": jnp.ones((K, N)), "w": jnp.ones((N, 2))}, jnp.array([[0, 1], [1, 3]])
    stats = ef.calibrate(lambda p, ids: LOOKUPS[name](p["table"], ids) @ p["w"], params, [ids])
    assert list(stats) == ["w"]
    assert stats["w"].count == 4


def test_an_opaque_product_is_named(params):
    def forward(p, x):
        return jax.pure_callback(lambda x, w: x @ w, jax.ShapeDtypeStruct((T, N), jnp.float32), x, p["first"])

    with pytest.warns(errors.CalibrationWarning, match="'first': not observed in pure_callback"):
        ef.calibrate(forward, {"first": params["first"]}, [np.ones((T, K), "float32")])


def test_what_cannot_be_traced_says_how(params):
    with pytest.raises(jax.errors.TracerBoolConversionError) as caught:
        ef.calibrate(lambda p, x: x @ p["first"] if x.sum() > 0 else x, params, [jnp.ones((T, K))])
    assert "calibrate traces forward as jax.jit does" in caught.value.__notes__[-1]
    with pytest.raises(TypeError, match="'w' is a jax\\.ShapeDtypeStruct"):
        ef.calibrate(forward, {"w": jax.ShapeDtypeStruct((2, 2), "float32")}, [jnp.ones((T, K))])
