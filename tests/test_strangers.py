"""What a stranger gets wrong in the first hour: each message is short, and names the fix."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import eformer as ef
from eformer.errors import CalibrationError, UnusedRuleWarning

W = jnp.ones((64, 64))


def forward(params, x):
    return x @ params["up"]["kernel"]


def test_arrays_in_the_wrong_place_are_shown_by_shape():
    with pytest.raises(TypeError, match=r"config=float32\[64,64\] is of type"):
        ef.quantize("nf4", W)
    with pytest.raises(TypeError, match=r"got a dict of length 1 of type dict"):
        ef.quantize({"a": W})
    with pytest.raises(ValueError, match=r"rank=a dict of length 1 is not allowed(.|\n)*add_lora\(params, rules"):
        ef.add_lora("*", {"a": {"kernel": W}}, rank=4, key=jax.random.key(0))
    with pytest.raises(TypeError, match=r"key=0 is not a random key; give one, such as jax.random.key\(0\)"):
        ef.add_lora({"kernel": W}, "*", rank=4, key=0)


@pytest.mark.parametrize("call", [lambda: ef.implicit(), lambda: ef.implicit(forward, W), lambda: ef.implicit(W)])
def test_implicit_takes_a_function(call):
    with pytest.raises(TypeError, match=r"implicit wraps a function(.|\n)*decorate with @implicit"):
        call()


def test_a_model_without_adapters_has_nothing_to_train():
    packed = ef.quantize_tree({"kernel": W}, donate=False)
    with pytest.warns(UnusedRuleWarning, match="nothing to train"):
        assert ef.split_trainable(packed)[0] == {}


def test_merge_inside_implicit_says_where_it_belongs():
    trainable, frozen = ef.split_trainable(ef.add_lora({"kernel": W}, "*", rank=4, key=jax.random.key(0)))
    with pytest.raises(ValueError, match="merge outside of implicit"):
        ef.implicit(ef.merge)(trainable, frozen)


def test_calibration_arguments():
    params, batches = {"up": {"kernel": W}}, [jnp.ones((8, 64))]
    with pytest.raises(CalibrationError, match=r"calibrate\(forward, params, batches\)"):
        ef.calibrate(params, forward, batches)
    with pytest.raises(CalibrationError, match="the dense parameters, before quantizing"):
        ef.calibrate(forward, ef.quantize_tree(params, donate=False), batches)
    stats = ef.calibrate(forward, params, batches)
    with pytest.raises(KeyError, match="no statistics of 'up'; paths look like 'up/kernel'"):
        stats["up"]
    with pytest.raises(TypeError, match=r"calibration=stats"):
        ef.quantize_tree(params, stats, donate=False)


def test_the_state_of_an_optimizer_stays_dense():
    params = {"up": {"kernel": W}}
    state = {"params": params, "opt_state": ({"count": jnp.array(0), "mu": params, "nu": params}, ())}
    packed = ef.quantize_tree(state, donate=False)
    assert isinstance(packed["params"]["up"]["kernel"], ef.ArrayNF4)
    assert isinstance(packed["opt_state"][0]["nu"]["up"]["kernel"], jax.Array)
    assert "opt_state/0/mu/up/kernel  dense   it is part of the state of an optimizer" in str(ef.plan_tree(state))
    adapted = ef.add_lora(state, "*kernel", rank=2, key=jax.random.key(0))
    assert [
        isinstance(x, ef.LoraArray)
        for x in (adapted["params"]["up"]["kernel"], adapted["opt_state"][0]["mu"]["up"]["kernel"])
    ] == [True, False]


def test_a_report_with_the_models_swapped():
    packed = ef.quantize_tree({"up": {"kernel": W}}, donate=False)
    with pytest.raises(ValueError, match=r"'up/kernel' is ArrayNF4(.|\n)*report\(quantized, dense\)"):
        ef.report({"up": {"kernel": W}}, packed)


@pytest.mark.parametrize("dtype", ["nf4", "int8", "int4", "mxfp4", "ternary"])
def test_a_layer_with_a_jvp_of_its_own_keeps_its_weight_packed(dtype):
    @jax.custom_jvp
    def layer(x, w):
        return jnp.tanh(x @ w)

    @layer.defjvp
    def _(primals, tangents):
        (x, w), (dx, _) = primals, tangents
        y = layer(x, w)
        return y, (1 - y**2) * (dx @ w)

    q = ef.quantize(jax.random.normal(jax.random.key(0), (64, 32)), dtype=dtype)
    x = jax.random.normal(jax.random.key(1), (4, 64)) / 8
    with ef.materialization_policy("error"):
        value, got = jax.jit(jax.value_and_grad(lambda x: ef.implicit(layer)(x, q).sum()))(x)
    want = jax.value_and_grad(lambda x: layer(x, q.materialize()).sum())(x)
    assert jnp.allclose(value, want[0], rtol=1e-5)
    assert jnp.allclose(got, want[1], rtol=1e-4, atol=1e-5)
