"""NF4 codes and absmax against bitsandbytes itself, on fresh random tensors. Needs the `oracle` extra: `make oracle`.

The golden vectors in tests/formats hold a sample of the same comparison and run everywhere.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from eformer.ops.quantization import ArrayNF4

bnb = pytest.importorskip("bitsandbytes.functional", reason="needs the oracle extra: make oracle")
torch = pytest.importorskip("torch", reason="needs the oracle extra: make oracle")

BLOCKS = (32, 64, 128, 256)


@pytest.mark.parametrize("seed", range(100))
def test_codes_and_absmax_are_byte_equal(seed: int):
    rng = np.random.default_rng(seed)
    block = BLOCKS[seed % len(BLOCKS)]
    size = int(rng.integers(1, 40)) * block + (0 if seed % 3 else 2 * int(rng.integers(1, block // 2)))
    w = (rng.standard_normal(size) * 10.0 ** rng.integers(-6, 6)).astype(np.float32)
    packed, state = bnb.quantize_4bit(torch.tensor(w), blocksize=block, quant_type="nf4")
    ours = ArrayNF4.quantize(jnp.asarray(w), block)
    stored = np.asarray(ours.packed).reshape(-1)[: (size + 1) // 2]
    np.testing.assert_array_equal(stored, packed.numpy().reshape(-1))
    np.testing.assert_array_equal(np.asarray(ours.absmax), state.absmax.numpy())
    decoded = bnb.dequantize_4bit(packed, state).numpy().reshape(-1)
    np.testing.assert_array_equal(np.asarray(ours.materialize()), decoded)
