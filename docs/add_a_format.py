"""Add a format, shown by adding one: 2 bits a value and one scale per block. Every claim is followed by an assert.

python docs/add_a_format.py
"""

# %% The codec
# Start from two pure functions. Blocks of 16 values share a scale; codes stand for -1.5, -0.5, 0.5 and 1.5 times it.
# Storage keeps the free axes in front, in order, and the packed axis last: (free..., blocks, bytes).
import dataclasses
import tempfile
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

import eformer as ef

BLOCK, SHIFTS = 16, jnp.arange(6, -2, -2, dtype=jnp.uint8)  # the first of four values in the highest bits


def encode(w, axis):
    rows = jnp.moveaxis(w, axis, -1).astype(jnp.float32)
    rows = jnp.pad(rows, [(0, 0)] * (w.ndim - 1) + [(0, -w.shape[axis] % BLOCK)])
    blocks = rows.reshape(*rows.shape[:-1], -1, BLOCK)
    scale = jnp.max(jnp.abs(blocks), axis=-1) / 1.5
    steps = blocks / jnp.where(scale == 0, 1, scale)[..., None] + 1.5
    codes = jnp.clip(jnp.round(steps), 0, 3).astype(jnp.uint8).reshape(*scale.shape, -1, 4)
    return jnp.sum(codes << SHIFTS, axis=-1, dtype=jnp.uint8), scale


def decode(packed, scale):
    codes = (packed[..., None] >> SHIFTS) & jnp.uint8(3)
    return (codes.reshape(*packed.shape[:-1], BLOCK).astype(jnp.float32) - 1.5) * scale[..., None]


# %% The class
# A subclass of `QuantizedArray` says where its storage is. `parts` names each stored array: how many trailing axes hold
# the packed axis, and how many values one step along it holds. Everything that is shared needs no more than that.
@dataclasses.dataclass
class Uniform2(ef.QuantizedArray):
    packed: jax.Array
    scale: jax.Array
    axis: int = ef.aux_field(default=-1)  # counted from the end, so that axes in front may come and go
    pad: int = ef.aux_field(default=0)  # values at the end of the last block that exist in storage only
    sharding: Any = ef.aux_field(default=None)

    format: ClassVar[str] = "uniform2"
    parts: ClassVar[tuple[ef.Part, ...]] = (ef.Part("packed", 2, BLOCK), ef.Part("scale", 1, BLOCK, is_scale=True))

    def materialize(self):
        values = decode(self.packed, self.frozen_scale())
        rows = values.reshape(*values.shape[:-2], values.shape[-2] * BLOCK)[..., : self.shape[self.axis]]
        return self.constrained(jnp.moveaxis(rows, -1, self.axis).astype(self.dtype))

    @classmethod
    def quantize(cls, array, axis=-2):
        return cls(*encode(array, axis), axis=axis, pad=-array.shape[axis] % BLOCK, dtype=array.dtype)


w, x = jax.random.normal(jax.random.key(0), (40, 512)), jax.random.normal(jax.random.key(1), (3, 40))
q = Uniform2.quantize(w)
dense = q.materialize()
print(q)
assert (q.packed.shape, q.scale.shape, q.pad) == ((512, 3, 4), (512, 3), 8)  # 40 values: three blocks, 8 values padding
assert 0.3 < jnp.linalg.norm(dense - w) / jnp.linalg.norm(w) < 0.4

# %% What is there already
# Whatever moves codes and scales without touching values keeps the type. A product decodes 256 rows of storage at a
# time, and so does its gradient with respect to x. A lookup decodes what it asks for.
ids = jnp.array([3, 250, 3])
with ef.materialization_policy("error"):
    moved = {
        "transpose": (q.T, dense.T),
        "whole blocks": (q[16:], dense[16:]),
        "reshape": (q.reshape(40, 2, 256), dense.reshape(40, 2, 256)),
        "stack": (ef.implicit(jnp.stack)([q, q]), jnp.stack([dense, dense])),
        "times 2": (q * 2, dense * 2),
    }
    y, slope = jax.value_and_grad(lambda x: jnp.sum(jnp.sin(x @ q)))(x)
    columns = q[:, ids]
for name, (found, wanted) in moved.items():
    assert type(found) is Uniform2, name
    assert (found.materialize() == wanted).all(), name
assert jnp.allclose(slope, jnp.cos(x @ dense) @ dense.T, atol=1e-4)
assert "f32[512,40]" not in str(jax.make_jaxpr(lambda x: x @ q)(x))  # no dense weight in the program
assert (columns == dense[:, ids]).all()
assert ef.report({"w": q}).leaves[0].format == "uniform2"
ef.serialization.register_type(Uniform2)
with tempfile.TemporaryDirectory() as folder:
    loaded = ef.load(ef.save(f"{folder}/w.safetensors", {"w": q}))["w"]
assert (loaded.materialize() == dense).all()

# %% What is not there
# Anything else still gives the right answer, and `explain` tells where it went dense. Training needs `ste` only.
with ef.materialization_policy("allow"):
    report = ef.explain(ef.implicit(jax.lax.sin))(q)
assert [event.primitive for event in report.materializations] == ["sin"]
assert (jax.grad(lambda w: (ef.ste(Uniform2.quantize)(w) ** 2).sum())(w) == 2 * dense).all()
print(str(report).split(" at ")[0])
