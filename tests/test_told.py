"""What people are told when something is forgotten or cannot be: the cause, and the one line that mends it."""

from __future__ import annotations

import dataclasses
import errno
import os
import warnings
from typing import Any

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax import lax

import eformer as ef
from eformer._core import materialization
from eformer.cli import main
from eformer.errors import MaterializationError, MaterializationWarning, UnusedRuleWarning


@dataclasses.dataclass
class Half(ef.ImplicitArray):
    codes: Any

    def materialize(self) -> jax.Array:
        return self.codes * 0.5


@ef.register("sin")
def _(x: Half, **params: Any) -> Any:
    return NotImplemented


@ef.register("cos")
def _(x: Half, **params: Any) -> jax.Array:
    return jnp.cos(x.materialize())


@pytest.fixture
def q(key: jax.Array) -> Any:
    return ef.quantize(jax.random.normal(key, (128, 64)), dtype="nf4")


def test_a_function_outside_implicit(q):
    with pytest.warns(
        MaterializationWarning, match=r"wrap the call in implicit\(\.\.\.\), as in implicit\(f\)\(\*args\)"
    ):
        jnp.dot(jnp.ones((2, 128)), q)
    with (
        ef.materialization_policy("error"),
        pytest.raises(MaterializationError, match=r"Refusing .*outside implicit(.|\n)*wrap the call in implicit"),
    ):
        jnp.dot(jnp.ones((2, 128)), q)


def _nnx() -> Any:
    model = ef.quantize_tree(nnx.Linear(128, 64, rngs=nnx.Rngs(0)))
    return lambda x: model(x), "kernel"


def _haiku() -> Any:
    net = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([64, 32])(x)))
    params = ef.quantize_tree(net.init(jax.random.key(0), jnp.ones((2, 128))))
    return lambda x: net.apply(params, x), "mlp/~/linear_0/w"


def _equinox() -> Any:
    model = ef.quantize_tree(eqx.nn.Conv1d(64, 64, 3, key=jax.random.key(0)))
    return lambda x: model(x.reshape(64, -1)), "weight"


@pytest.mark.parametrize("make", [_nnx, _haiku, _equinox])
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
def test_a_framework_goes_dense(make, wrap, monkeypatch):
    """The place is the line of the user that calls the model, and the parameter has its name."""
    f, path = make()
    monkeypatch.setattr(materialization, "_warned", set())
    with pytest.warns(MaterializationWarning) as found:
        wrap(f)(jnp.ones((2, 128)))
    assert {os.path.basename(w.filename) for w in found} == {os.path.basename(__file__)}
    assert f", {path!r}, for a function outside implicit. " in str(found[0].message)
    assert "wrap the call in implicit(...)" in str(found[0].message)


class TwoLayers(nnx.Module):
    def __init__(self, rngs: Any):
        self.up, self.down = nnx.Linear(128, 256, rngs=rngs), nnx.Linear(256, 128, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.up(x)
        return self.down(x)


@pytest.mark.parametrize("wrap", [lambda f: f, nnx.jit])
def test_what_a_program_makes_dense_is_one_warning(wrap, monkeypatch):
    """Two layers, two lines, two types: the line of the first, and what lists the rest."""
    model = ef.quantize_tree(TwoLayers(nnx.Rngs(0)), {"up/*": "nf4", "down/*": "int8"})
    monkeypatch.setattr(materialization, "_warned", set())
    with pytest.warns(MaterializationWarning) as found:
        wrap(lambda model, x: model(model(x)))(model, jnp.ones((2, 128)))
    assert len(found) == 1
    assert "'up/kernel', for a function outside implicit" in str(found[0].message)
    assert "Other arrays that become dense in the same call are not reported" in str(found[0].message)
    assert "explain(f)(*args) lists everything" in str(found[0].message)


@pytest.mark.parametrize("jit", [lambda f: f, jax.jit])
def test_a_linen_model_outside_implicit(jit):
    model = nn.Dense(256)
    variables = ef.quantize_tree(model.init(jax.random.key(0), jnp.ones((2, 256))), "nf4")
    with pytest.raises(TypeError, match=r"parameter '/kernel'.*ArrayNF4(.|\n)*implicit\(model.apply\)\(variables, x\)"):
        jit(model.apply)(variables, jnp.ones((2, 256)))
    assert ef.implicit(model.apply)(variables, jnp.ones((2, 256))).shape == (2, 256)


@pytest.mark.parametrize(
    "call",
    [
        lambda q: jax.scipy.linalg.block_diag(q),
        lambda q: lax.split(q, (64, 64)),
        lambda q: lax.reduce(q, 0.0, lax.add, (0,)),
        lambda q: lax.fori_loop(0, 2, lambda i, c: (c[0], c[1] * 2.0 + 1.0), (0, q)),
        lambda q: lax.cond(jnp.bool_(True), lambda q: q + 1, lambda q: q, q),
    ],
)
def test_functions_that_cannot_go_on(call, q):
    with pytest.raises(
        (TypeError, ValueError), match=r"[Ww]rap the (whole )?call\s+in implicit\(\.\.\.\), as in implicit\(f\)"
    ):
        call(q)
    with ef.materialization_policy("allow"):
        ef.implicit(call)(q)


def test_a_cache_in_a_loop_and_in_a_gradient():
    cache, row = ef.QuantizedCache.zeros((2, 8, 32)), jnp.ones((2, 1, 32))

    def steps(cache: Any) -> Any:
        return lax.scan(lambda c, i: (lax.dynamic_update_slice(c, row, (0, i, 0)), i), cache, jnp.arange(4))[0]

    with pytest.raises(TypeError, match=r"QuantizedCache meets a dense array(.|\n)*implicit\(f\)\(\*args\)"):
        steps(cache)
    assert isinstance(ef.implicit(steps)(cache), ef.QuantizedCache)
    with pytest.raises(TypeError, match=r"written into a QuantizedCache(.|\n)*stop_gradient\(rows\)"):
        jax.grad(lambda row: cache.at[:, 3:4].set(row).materialize().sum())(row)


def test_materialize_by_name_inside_a_handler_is_allowed():
    x = Half(jnp.ones(3))
    with ef.materialization_policy("error"), warnings.catch_warnings():
        warnings.simplefilter("error")
        found = ef.explain(ef.implicit(jnp.cos))(x)
    assert [event.primitive for event in found.materializations] == ["an explicit call"]


def test_a_handler_that_declined_is_named():
    with pytest.warns(MaterializationWarning, match=r"Handler .*test_told._ returned NotImplemented for accuracy=None"):
        ef.implicit(jnp.sin)(Half(jnp.ones(3)))
    with pytest.warns(MaterializationWarning, match="No handler keeps it implicit: register one for 'tan' on Half"):
        ef.implicit(jnp.tan)(Half(jnp.ones(3)))


def test_vmap_over_rows(q):
    with pytest.raises(ValueError, match=r"implicit\(jax\.vmap\(f\)\)\(q\)"):
        jax.vmap(lambda row: row.sum())(q)


def test_a_gradient_with_respect_to_packed_values(q):
    f = ef.implicit(lambda q: (jnp.ones((2, 128)) @ q).sum())
    with pytest.raises(TypeError, match=r"Keep the quantized array out of the differentiated arguments(.|\n)*LoRA"):
        jax.grad(f, allow_int=True)(q)
    for wrong in (q, {"w": ef.LoraArray(q, jnp.ones((128, 2)), jnp.ones((2, 64)))}):
        with pytest.raises(TypeError, match=r"stores integers(.|\n)*trainable, frozen = ef.split_trainable\(params\)"):
            jax.grad(
                lambda tree: (
                    jnp.ones((2, 128)) @ jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, ef.ImplicitArray))[0]
                ).sum()
            )(wrong)


def test_add_lora_twice(q):
    once = ef.add_lora({"up": {"kernel": q}}, "*", 2, jax.random.key(0))
    with pytest.warns(
        UnusedRuleWarning, match="'up/kernel' already has an adapter, which stays. Call merge_lora first"
    ):
        twice = ef.add_lora(once, "*", 2, jax.random.key(1))
    assert twice["up"]["kernel"] is once["up"]["kernel"]


def test_shapes_without_abstract():
    with pytest.raises(
        TypeError, match=r"'up/kernel' is a jax.ShapeDtypeStruct.*quantize_tree\(\.\.\., abstract=True\)"
    ):
        ef.quantize_tree({"up": {"kernel": jax.ShapeDtypeStruct((64, 64), jnp.float32)}})


def test_a_report_after_the_original_was_freed():
    dense = {"up": {"kernel": jnp.ones((64, 64))}}
    made = ef.quantize_tree(dense)
    with pytest.raises(
        ValueError, match=r"'up/kernel' of the original was freed.*quantize_tree\(\.\.\., donate=False\)"
    ):
        ef.report(made, dense)


@pytest.mark.parametrize("name", ["einsum", "matmul", "dot"])
def test_register_a_function_that_is_a_product(name):
    with pytest.raises(ValueError, match=rf"'{name}' is a function(.|\n)*@register\(\"dot_general\"\)"):
        ef.register(name)


def test_register_another_function():
    with pytest.raises(ValueError, match=r"'softmax' is a function.*jax.make_jaxpr of it shows them"):
        ef.register("softmax")


@pytest.mark.parametrize(("name", "begin"), [("model.pt", b"PK\x03\x04"), ("pytorch_model.bin", b"\x80\x02\x8a\x0a")])
def test_files_of_pytorch(name, begin, tmp_path, capsys):
    file = tmp_path / name
    file.write_bytes(begin + bytes(100))
    with pytest.raises(ef.errors.CheckpointError, match=r"is a file of PyTorch.*(Install torch|safetensors)"):
        ef.load(file)
    assert main(["inspect", str(file)]) == 1
    assert "is a file of PyTorch" in capsys.readouterr().err


def test_a_full_disk_and_an_interruption(tmp_path, monkeypatch, capsys):
    file = ef.save(tmp_path / "in.safetensors", {"up": {"kernel": jnp.ones((64, 64))}})
    argv = ["quantize", str(file), str(tmp_path / "out.safetensors"), "--quiet"]

    real = os.pwrite

    def full(descriptor: int, data: Any, position: int) -> int:
        if len(data) < 1000:  # the journal
            return real(descriptor, data, position)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", full)
        assert main(argv) == 1
    told = capsys.readouterr().err
    assert "No space left on device. Free some space and run the same again: it continues where it stopped." in told

    def stop(descriptor: int, data: Any, position: int) -> int:
        if len(data) < 1000:
            return real(descriptor, data, position)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", stop)
        assert main(argv) == 130
    assert "interrupted; the same command continues where it stopped" in capsys.readouterr().err
    assert main(argv) == 0


def test_explain_is_short_for_a_model_of_any_depth(key: jax.Array):
    layers = [
        {"up": ef.quantize(jax.random.normal(k, (64, 128))), "down": ef.quantize(jax.random.normal(k, (128, 64)))}
        for k in jax.random.split(key, 24)
    ]

    def model(x: jax.Array, layers: Any) -> jax.Array:
        for layer in layers:
            x = jnp.tanh(x @ layer["up"]) @ layer["down"]
        return x

    found = ef.explain(jax.jit(ef.implicit(model)))(jnp.ones((2, 64)), layers)
    lines = str(found).splitlines()
    assert len(lines) == 2
    assert all(line.endswith(", 24 times") for line in lines)
    assert "2 rows of float32 with nf4 128 × 64" in lines[0]
    assert len(found.kernels) == 48
    assert "Problem(" not in found.details()
    assert found.details().count("\nkernel qmatmul") == 47
    assert "    not " in found.details()
    with ef.materialization_policy("allow"):
        many = ef.explain(lambda: [ef.implicit(jnp.cumsum)(ef.quantize(jnp.ones((n, 64)))) for n in range(64, 80)])()
    assert len(str(many).splitlines()) == 10
    assert str(many).splitlines()[-1] == "and 7 more: print(explanation.details())"
