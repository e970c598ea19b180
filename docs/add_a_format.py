"""Add a format, shown by adding one: 2 bits a value and one scale per block. Every claim is followed by an assert.

python docs/add_a_format.py
"""

# %% The codec
# Start from two pure functions. Blocks of 16 values share a scale; codes stand for -1.5, -0.5, 0.5 and 1.5 times it.
# Storage keeps the free axes in front, in order, and the blocked axis last: (free..., blocks, bytes).
import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

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
# the blocked axis, and how many values one step along it holds. The shared handlers need no more than that.
from eformer._formats.base import Part, QuantizedArray
from eformer.jaximus import aux_field, explain, implicit, materialization_policy, materialize_handler, register, ste


@dataclasses.dataclass
class Uniform2(QuantizedArray):
    packed: jax.Array
    scale: jax.Array
    axis: int = aux_field(default=-1)  # counted from the end, so that axes in front may come and go
    pad: int = aux_field(default=0)  # values at the end of the last block that exist in storage only
    sharding: Any = aux_field(default=None)
    use_kernel: bool = aux_field(default=True)

    format: ClassVar[str] = "uniform2"
    parts: ClassVar[tuple[Part, ...]] = (Part("packed", 2, BLOCK), Part("scale", 1, BLOCK, is_scale=True))
    blocked = property(lambda self: self.axis)

    def compute_shape(self):
        free = list(self.packed.shape[:-2])
        free.insert(len(free) + 1 + self.axis, self.packed.shape[-2] * BLOCK - self.pad)
        return tuple(free)

    def materialize(self):
        values = decode(self.packed, self.scale)
        rows = values.reshape(*values.shape[:-2], values.shape[-2] * BLOCK)[..., : self.shape[self.axis]]
        return self._constrained(jnp.moveaxis(rows, -1, self.axis).astype(self.dtype))

    @classmethod
    def quantize(cls, array, axis=-2):
        return cls(*encode(array, axis), axis=axis, pad=-array.shape[axis] % BLOCK, dtype=array.dtype)


w, x = jax.random.normal(jax.random.key(0), (40, 256)), jax.random.normal(jax.random.key(1), (3, 40))
q = Uniform2.quantize(w)
dense = q.materialize()
print(q)
assert (q.packed.shape, q.scale.shape, q.pad) == ((256, 3, 4), (256, 3), 8)  # 40 values: three blocks, 8 values padding
assert 0.3 < jnp.linalg.norm(dense - w) / jnp.linalg.norm(w) < 0.4

# %% What is there already
# Whatever moves codes and scales without touching values keeps the type. Nothing below has a line of code above.
with materialization_policy("error"):
    moved = {
        "transpose": (q.T, dense.T),
        "whole blocks": (q[16:], dense[16:]),
        "reshape": (q.reshape(40, 2, 128), dense.reshape(40, 2, 128)),
        "stack": (implicit(jnp.stack)([q, q]), jnp.stack([dense, dense])),
        "times 2": (q * 2, dense * 2),
    }
for name, (found, wanted) in moved.items():
    assert type(found) is Uniform2, name
    assert (found.materialize() == wanted).all(), name
print("keeps the type:", ", ".join(moved))


# %% The product
# The shared product knows the library's own formats only, so a new one brings its own: `precedence` puts it first.
# It decodes one block of every column per step. Other cases, such as `q @ x`, it leaves to the dense product.
@register("dot_general", precedence=1)
def product(primitive, x: jax.Array | Uniform2, w: jax.Array | Uniform2, **params):
    plain = params["dimension_numbers"] == (((1,), (0,)), ((), ()))
    if not (plain and isinstance(w, Uniform2) and (w.ndim, w.axis) == (2, -2)):
        return materialize_handler(primitive, x, w, params=params)
    blocks = jnp.pad(jnp.asarray(x), ((0, 0), (0, w.pad))).reshape(x.shape[0], -1, BLOCK)
    parts = [jnp.swapaxes(part, 0, 1) for part in (blocks, w.packed, w.scale)]
    step = lambda y, part: (y + part[0] @ decode(*part[1:]).T, None)  # noqa: E731
    y, _ = jax.lax.scan(step, jnp.zeros((x.shape[0], w.shape[1])), parts)
    return y.astype(params.get("preferred_element_type") or jnp.result_type(x.dtype, w.dtype))


with materialization_policy("error"):
    y = jax.jit(implicit(jnp.matmul))(x, q)
assert jnp.allclose(y, x @ dense, atol=1e-4)
assert "f32[40,256]" not in str(jax.make_jaxpr(implicit(jnp.matmul))(x, q))  # no dense weight in the program

# %% What is not there
# Anything else still gives the right answer, and `explain` tells where it went dense. Training needs `ste` only.
with materialization_policy("allow"):
    report = explain(implicit(jax.lax.sin))(q)
    assert jnp.allclose(q.T @ x.T, y.T, atol=1e-4)
assert [event.primitive for event in report.materializations] == ["sin"]
assert (jax.grad(lambda w: (ste(Uniform2.quantize)(w) ** 2).sum())(w) == 2 * dense).all()
print(str(report).split(" at ")[0])
