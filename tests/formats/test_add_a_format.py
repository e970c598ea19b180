"""A format from somebody else's package, by public names alone: all that the base promises."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "add_a_format.py"

FORMAT = '''
"""Four levels with a scale per row, nothing packed; and the format of the documentation."""
import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

import eformer as ef


@dataclasses.dataclass
class Coarse(ef.QuantizedArray):
    codes: jax.Array
    scale: jax.Array
    sharding: Any = ef.aux_field(default=None)

    format: ClassVar[str] = "coarse"
    parts: ClassVar[tuple[ef.Part, ...]] = (ef.Part("codes"), ef.Part("scale", is_scale=True))
    blocked: ClassVar[None] = None

    def materialize(self):
        return self.constrained((self.codes.astype(jnp.float32) * self.frozen_scale()).astype(self.dtype))

    @classmethod
    def quantize(cls, array):
        scale = jnp.max(jnp.abs(array), axis=-1, keepdims=True) / 3
        return cls(jnp.round(array / scale).astype(jnp.int8), scale, dtype=array.dtype)


ef.serialization.register_type(Coarse, "somebody.coarse")
'''

PROGRAM = """
import tempfile

import jax
import jax.numpy as jnp
import numpy as np

import eformer as ef
from somebody_s_formats import Coarse, Uniform2

ef.serialization.register_type(Uniform2, "somebody.uniform2")
mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
x = jax.random.normal(jax.random.key(1), (5, 96))
for cls in (Uniform2, Coarse):
    for n in (8, 600):  # less than a panel of 256 rows, and two with a rest
        w = jax.random.normal(jax.random.key(0), (96, n)) / n**0.5
        q = cls.quantize(w)
        dense = q.materialize()
        with ef.materialization_policy("error"):
            loss = lambda x, q, way: jnp.sum(jnp.sin(way(x, q)))
            ways = {
                "x @ q": lambda x, q: x @ q,
                "q.T @ x.T": lambda x, q: q.T @ x.T,
                "einsum": lambda x, q: jnp.einsum("mk,kn->nm", x, q),
                "other side": lambda x, q: (x @ q) @ q.T,
                "heads": lambda x, q: jnp.einsum("mk,khd->mhd", x, q.reshape(96, 2, n // 2)),
                "stack": lambda x, q: jnp.einsum("bmk,bkn->bmn", jnp.stack([x, x]), jnp.stack([q, q])),
                "bf16": lambda x, q: (x.astype(jnp.bfloat16) @ q.astype(jnp.bfloat16)).astype(jnp.float32),
                "factor": lambda x, q: x @ (q * jax.lax.stop_gradient(x[0, 0])),
            }
            for name, way in ways.items():
                compiled = jax.jit(jax.value_and_grad(ef.implicit(lambda x, q: loss(x, q, way))))
                found = compiled(x, q)
                wanted = jax.value_and_grad(lambda x: loss(x, dense, way))(x)
                limit = 0.2 if name == "bf16" else 1e-3
                np.testing.assert_allclose(found[1], wanted[1], rtol=limit, atol=limit, err_msg=f"{cls} {n} {name}")
            assert type(q[16:32]) is type(q.T) is cls
            np.testing.assert_array_equal(q[16:32].materialize(), dense[16:32])
            np.testing.assert_array_equal(q[:, jnp.array([0, 7])], dense[:, jnp.array([0, 7])])
            chosen = ef.explain(lambda x: x @ q)(x)
        assert [event.name for event in chosen.kernels] == ["panels"]
        assert not chosen.materializations
        try:
            jax.grad(lambda q: (x @ q).sum(), allow_int=True)(q)
            raise SystemExit("differentiated")
        except ef.errors.QuantizedGradientError:
            pass
        split = q.with_sharding(jax.NamedSharding(mesh, jax.P(None, "x")))
        assert {len(leaf.sharding.device_set) for leaf in jax.tree.leaves(split)} == {8}
        np.testing.assert_allclose(jax.jit(lambda x, q: x @ q)(x, split), x @ dense, rtol=1e-4, atol=1e-3)
        assert ef.report({"w": q}).leaves[0].format == cls.format
        with tempfile.TemporaryDirectory() as folder:
            loaded = ef.load(ef.save(f"{folder}/w.safetensors", {"w": q}))["w"]
        assert type(loaded) is cls
        np.testing.assert_array_equal(loaded.materialize(), dense)
    large = cls.quantize(jax.random.normal(jax.random.key(0), (96, 8192)))
    memory = jax.jit(lambda x, q: x @ q).lower(x, large).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 2 * large.size, memory  # half the dense weight
print("everything is there")
"""


def test_the_document_uses_public_names_and_is_short() -> None:
    source = DOCUMENT.read_text()
    assert len(source.splitlines()) <= 100
    assert not re.search(r"eformer\._|ef\._|self\._", source)


@pytest.mark.thorough
def test_a_format_of_a_package_elsewhere(tmp_path: Path) -> None:
    package = tmp_path / "somebody_s_formats"
    package.mkdir()
    codec_and_class = DOCUMENT.read_text().split("\nw, x = ")[0]
    (package / "uniform2.py").write_text(codec_and_class)
    (package / "coarse.py").write_text(FORMAT)
    (package / "__init__.py").write_text("from .coarse import Coarse\nfrom .uniform2 import Uniform2\n")
    (tmp_path / "program.py").write_text(PROGRAM)
    paths = [str(tmp_path), str(ROOT / "src")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "JAX_PLATFORMS": "cpu"}
    result = subprocess.run(
        [sys.executable, "-W", "ignore", tmp_path / "program.py"], env=env, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.strip() == "everything is there"
