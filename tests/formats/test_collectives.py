"""`all_gather` and `ppermute` of quantized arrays: codes travel, and results are those of dense arrays."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import eformer as ef
from eformer.jaximus import explain, implicit, materialization_policy

from .test_shard_map_specs import MAKE

MORE = {
    "int8-2": lambda w: ef.quantize(w, dtype="int8", activations="int8", axis=-2),
    "int4-points": lambda w: ef.quantize(w, dtype="int4", block_size=16, symmetric=False),
    "int3-rows": lambda w: ef.quantize(w, dtype="int3", block_size=None),
    "fp8": lambda w: ef.quantize(w, dtype="fp8", axis=-2),
    "mxfp4": lambda w: ef.quantize(w, dtype="mxfp4"),
    "nvfp4": lambda w: ef.quantize(w, dtype="nvfp4"),
    "iq4_nl": lambda w: ef.quantize(w, dtype="iq4_nl"),
}
ALL = MAKE | MORE
DEVICES, WHOLE = 4, P()


def over_devices(body, *operands, out=WHOLE, check=True):
    """`body` on four devices, each with one entry of the leading axis of every operand."""
    mesh = jax.make_mesh((DEVICES,), ("t",), (AxisType.Auto,), devices=jax.devices()[:DEVICES])
    inside = lambda *ops: body(*jax.tree.map(lambda leaf: leaf[0], ops))  # noqa: E731
    return jax.jit(jax.shard_map(inside, mesh=mesh, in_specs=P("t"), out_specs=out, check_vma=check))(*operands)


def made(kind: str):
    """Arrays of one layout that differ in codes and scales, stacked leaf by leaf, and their values."""
    values = jax.random.normal(jax.random.key(7), (DEVICES, 64, 32)) * jnp.arange(1.0, DEVICES + 1)[:, None, None]
    arrays = [ALL[kind](w) for w in values]
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *arrays), jnp.stack([q.materialize() for q in arrays])


@pytest.mark.parametrize("kind", ALL)
def test_ppermute_sends_what_is_stored(kind):
    ring = [(i, (i + 1) % DEVICES) for i in range(DEVICES)]
    stacked, dense = made(kind)
    body = implicit(lambda q: ef.materialize(lax.ppermute(q, "t", ring))[None])
    with materialization_policy("error"):
        got = over_devices(body, stacked, out=P("t"))
    np.testing.assert_array_equal(got, jnp.roll(dense, 1, 0))


@pytest.mark.parametrize("kind", ["nf4", "int4-points", "mxfp4", "nvfp4", "ternary", "binary-last", "ternary-last"])
def test_who_is_sent_nothing_has_zeros(kind):
    stacked, dense = made(kind)
    body = implicit(lambda q: lax.ppermute(q, "t", [(0, 1), (2, 3)])[None])
    with materialization_policy("error" if kind != "binary-last" and kind != "ternary-last" else "allow"):
        got = over_devices(lambda q: ef.materialize(body(q)), stacked, out=P("t"))
    want = jnp.zeros_like(dense).at[1].set(dense[0]).at[3].set(dense[2])
    np.testing.assert_array_equal(got, want)


# Along an axis that shares a scale, values are gathered: every device may have another one.
DENSE = {
    0: {"int8-columns", "int8-matrix", "ternary", "binary", "fp8", "nvfp4", "int8-2"},
    1: {"int8", "int8-matrix", "ternary-last", "binary-last", "nvfp4"},
}
DENSE = {axis: kinds | {"lora", "lora-nf4", "lora-nf4-double"} for axis, kinds in DENSE.items()}


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("kind", ALL)
def test_all_gather_joins_what_is_stored(kind, axis):
    stacked, dense = made(kind)
    body = implicit(lambda q: ef.materialize(lax.all_gather(q, "t", axis=axis, tiled=True)))
    run = functools.partial(over_devices, body, check=False)
    with materialization_policy("allow"):
        got, found = run(stacked), explain(run)(stacked)
    # The sum of a weight and its adapter is computed, not stored.
    near = 1e-6 * float(jnp.abs(dense).max()) if "lora" in kind else 0
    np.testing.assert_allclose(got, jnp.concatenate(list(dense), axis), rtol=0, atol=near)
    gathered = [event for event in found.materializations if event.primitive == "all_gather"]
    assert bool(gathered) == (kind in DENSE[axis]), found.details()


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("kind", ["nf4", "int8", "nvfp4", "ternary", "int4-points", "int8-columns"])
def test_all_gather_makes_a_stack(kind, axis):
    stacked, dense = made(kind)
    with materialization_policy("error"):
        body = implicit(lambda q: lax.all_gather(q, "t", axis=axis))
        got = over_devices(lambda q: body(q).materialize(), stacked, check=False)
    np.testing.assert_array_equal(got, jnp.stack(list(dense), axis))


def test_fsdp_gathers_codes(leak_check):
    """The weights of a layer are gathered for its product; the program holds no dense matrix, gradient included."""
    mesh = jax.make_mesh((DEVICES,), ("t",), (AxisType.Auto,), devices=jax.devices()[:DEVICES])
    w = ef.quantize(jax.random.normal(jax.random.key(0), (256, 96)), dtype="nf4")
    x = jax.random.normal(jax.random.key(1), (8, 256))

    def loss(x, w):
        body = lambda x, w: x @ lax.all_gather(w, "t", axis=1, tiled=True)  # noqa: E731
        y = jax.shard_map(body, mesh=mesh, in_specs=(P("t"), P(None, "t")), out_specs=P("t"))(x, w)
        return jnp.sum(y**2)

    with materialization_policy("error"):
        step = jax.jit(jax.grad(implicit(loss)))
        got, program = step(x, w), step.lower(x, w).as_text()
    np.testing.assert_allclose(got, jax.grad(lambda x: jnp.sum((x @ w.materialize()) ** 2))(x), rtol=1e-4, atol=1e-2)
    sent = [line for line in program.splitlines() if "all_gather" in line and "tensor" in line]
    assert any("ui8" in line for line in sent), program


def test_all_gather_of_a_vmapped_axis():
    stacked, dense = made("int4-points")
    with materialization_policy("error"):
        got = jax.vmap(implicit(lambda q: lax.all_gather(q, "t", axis=0, tiled=True)), axis_name="t")(stacked)
    np.testing.assert_array_equal(got.materialize()[1], jnp.concatenate(list(dense), 0))
