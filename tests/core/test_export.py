"""Quantized arrays as arguments of exported programs, called in another process."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import eformer as ef
from eformer.ops.quantization.kernels import export_checks

pytest.importorskip("flatbuffers", reason="jax.export writes programs with it; in the test extra")

MAKERS = {
    "nf4": lambda w: ef.quantize(w, dtype="nf4"),
    "double": lambda w: ef.quantize(w, dtype="nf4", double_quant=True),
    "int8": lambda w: ef.quantize(w, dtype="int8"),
    "ternary": lambda w: ef.quantize(w, dtype="ternary"),
    "bfloat16": lambda w: ef.quantize(w.astype(jnp.bfloat16), dtype="binary"),
    "lora": lambda w: ef.add_lora({"w": ef.quantize(w, dtype="nf4")}, "*", 2, jax.random.key(1))["w"],
}
OTHER = """
import sys
import numpy as np
from jax import export
import eformer as ef
from eformer.ops.quantization.kernels import load_kernels

load_kernels()
folder = sys.argv[1]
params, x = ef.load(folder + "/params.safetensors"), np.load(folder + "/x.npy")
program = export.deserialize(open(folder + "/program.bin", "rb").read())
out, passed = program.call(x, params)
assert isinstance(passed["nf4"], ef.ArrayNF4), passed
np.save(folder + "/out.npy", out)
"""


def test_a_new_process_calls_it_with_quantized_arguments(key: jax.Array, tmp_path: Path):
    w, x = jax.random.normal(key, (64, 32)), jax.random.normal(jax.random.fold_in(key, 1), (4, 64))
    params = {name: make(w) for name, make in MAKERS.items()}

    @jax.jit
    @ef.implicit
    def program(x: jax.Array, params: Any) -> Any:
        return jnp.stack([(x @ q).astype(jnp.float32) for _, q in sorted(params.items())]), {"nf4": params["nf4"]}

    exported = export.export(program, disabled_checks=export_checks())(x, params)
    (tmp_path / "program.bin").write_bytes(exported.serialize())
    np.save(tmp_path / "x.npy", x)
    ef.save(tmp_path / "params.safetensors", params)
    subprocess.run([sys.executable, "-c", OTHER, str(tmp_path)], check=True)
    dense = [np.asarray(x) @ np.asarray(q.materialize().astype(jnp.float32)) for _, q in sorted(params.items())]
    np.testing.assert_allclose(np.load(tmp_path / "out.npy"), np.stack(dense), rtol=2e-2, atol=2e-2)
    np.testing.assert_array_equal(np.load(tmp_path / "out.npy"), program(x, params)[0])


@dataclasses.dataclass
class Scaled(ef.ImplicitArray):
    codes: Any
    step: Any = ef.aux_field(default=1.0)

    def materialize(self) -> jax.Array:
        return self.codes * self.step


def test_types_of_ones_own(key: jax.Array):
    q = Scaled(jax.random.normal(key, (3, 4)), 0.5)
    program = jax.jit(lambda q: jnp.sum(q.materialize()))
    back = export.deserialize(export.export(program)(q).serialize())
    np.testing.assert_allclose(back.call(q), program(q), rtol=1e-6)
    with pytest.raises(ValueError, match="pytree"):
        back.call(Scaled(q.codes, 0.25))  # other static data is another program
    odd = Scaled(q.codes, frozenset([1]))
    with pytest.raises(TypeError, match=r"Scaled has static data that jax.export cannot write: frozenset\(\{1\}\)"):
        export.export(jax.jit(lambda q: q.codes.sum()))(odd).serialize()
