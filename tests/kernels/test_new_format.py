"""A format is a row in a table: with nothing else it has products, gradients, lookups, groups and sharding."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from eformer._kernels import explain, formats, qgather, qmatmul, qragged_dot
from eformer._kernels.parameters import product_problem

from .cases import relative_error
from .hlo_cases import mesh_of

RNG = np.random.default_rng(31)
ROWS, COLS, BLOCK = 64, 512, 32
NAME = "signed_nibbles"


@pytest.fixture(autouse=True)
def row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four-bit integers in blocks with one scale each, in no backend's list of kernels."""
    made = formats.Format(NAME, 99, zero=8, per_code=2, blocked=True)
    monkeypatch.setitem(formats._ROWS, NAME, made)


def storage(*batch: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    numbers = RNG.integers(0, 16, (*batch, ROWS, COLS // BLOCK, BLOCK))
    scale = RNG.uniform(0.5, 2, numbers.shape[:-1]).astype(np.float32)
    dense = ((numbers - 8) * scale[..., None].astype(np.float64)).reshape(*batch, ROWS, COLS)
    return (numbers[..., ::2] << 4 | numbers[..., 1::2]).astype(np.uint8), scale, dense


def test_products_and_gradients() -> None:
    codes, scale, dense = storage()
    x = RNG.standard_normal((3, COLS)).astype(np.float32)
    product = lambda x: qmatmul(x, codes, scale, fmt=NAME, form="dot", cols=COLS)  # noqa: E731
    assert relative_error(product(x), x @ dense.T) < 3e-6
    gradient = jax.grad(lambda x: (product(x) ** 2).sum())(x)
    assert relative_error(gradient, 2 * (x @ dense.T) @ dense) < 1e-5


@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
def test_backends_without_a_kernel_say_so(platform: str) -> None:
    codes, scale, _ = storage()
    x = jax.ShapeDtypeStruct((3, COLS), np.float32)
    choice = explain(product_problem(x, codes, scale, platform, fmt=NAME, form="dot", cols=COLS))
    assert choice.name == "xla"
    kernel = {"cpu": "native_cpu", "cuda": "native_cuda", "tpu": "pallas_tpu"}[platform]
    assert dict(choice.rejected)[kernel] == f"it has no kernels for {NAME}"


def test_lookups_and_groups() -> None:
    codes, scale, dense = storage(2)
    ids = np.array([[3, 0], [63, 3]])
    assert relative_error(qgather(codes[0], scale[0], ids, fmt=NAME, cols=COLS), dense[0][ids]) < 1e-6
    x = RNG.standard_normal((5, COLS)).astype(np.float32)
    y = qragged_dot(x, codes, scale, np.array([2, 3]), fmt=NAME, form="dot", cols=COLS)
    assert relative_error(y, np.concatenate([x[:2] @ dense[0].T, x[2:] @ dense[1].T])) < 3e-6


def test_sharded() -> None:
    codes, scale, dense = storage()
    mesh = mesh_of()
    placed = [jax.device_put(part, NamedSharding(mesh, PartitionSpec("b", "a"))) for part in (codes, scale)]
    x = jnp.asarray(RNG.standard_normal((4, COLS)), jnp.float32)
    program = jax.jit(lambda x, c, s: qmatmul(x, c, s, fmt=NAME, form="dot", cols=COLS)).lower(x, *placed).compile()
    assert relative_error(program(x, *placed), np.asarray(x, np.float64) @ dense.T) < 3e-6
    assert "all-gather" not in program.as_text()
