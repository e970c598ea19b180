"""Attention over caches as one operation: next to float64, in stacks, transformed, split over devices."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.jet import jet
from jax.sharding import NamedSharding, PartitionSpec

import eformer as ef
from eformer._kernels.attention import ATTENTION, Attention, attend
from eformer._kernels.cuda import _attention as cuda_attention
from eformer._kernels.cuda import tuning
from eformer.errors import QuantizedGradientError

from .attention_cases import CACHES, attended, caches, check_joined, check_written, error, exact

HOW = {"factor": 0.125}
# Values next to keys of int8.
FOUR_BITS = {"values": "int4", "values_block": 64, "values_scale_dtype": np.dtype(jnp.bfloat16)}


@pytest.mark.parametrize("kinds", CACHES, ids=str)
@pytest.mark.parametrize(
    "options",
    [{}, {"place": 0, "group": 1}, {"cap": 2.0, "window": 50, "layers": 3}, {"size": 80, "place": 37}],
    ids=str,
)
def test_it_is_as_exact_as_the_codes(key, kinds: tuple[str, str], options: dict[str, Any]) -> None:
    assert error(key, kinds, **options) < 1e-5


@pytest.mark.parametrize("kinds", [None, *CACHES], ids=str)
@pytest.mark.parametrize(("layers", "halves", "size"), [(None, True, 64), (3, False, 80), (2, None, 64)])
def test_all_that_a_token_has_may_be_one_array(key, kinds: Any, layers: int | None, halves: Any, size: int) -> None:
    check_joined(key, kinds, layers, 31, halves=halves, size=size)


def test_dense_caches_too(key) -> None:
    q, keys, values = (
        jax.random.normal(k, (2, 3, n, 64)) for k, n in zip(jax.random.split(key, 3), (4, 50, 50), strict=True)
    )
    found = attend(q, keys, values, 20, factor=0.125, window=10)
    np.testing.assert_allclose(found, exact(q, keys, values, 20, factor=0.125, window=10), atol=1e-5)
    # Other kinds of arrays are multiplied as ever.
    packed = ef.quantize(keys, dtype="int8", axis=-1)
    want = exact(q, packed.materialize(), values, 20, **HOW)
    with ef.materialization_policy("error"):
        np.testing.assert_allclose(attended(q, packed, values, 20, **HOW), want, atol=1e-5)


def operands(key: jax.Array) -> tuple[Any, Any, Any]:
    return jax.random.normal(key, (2, 3, 4, 64)), *caches(key, ("int8", "int4"), (2, 3, 50, 64))


def test_derivatives_are_those_of_the_products(key) -> None:
    q, keys, values = operands(key)
    dense = [part.materialize() for part in (keys, values)]

    def norm(q: Any, *both: Any) -> Any:
        return (attended(q, *both, 30, **HOW) ** 2).sum()

    found, want = (jax.grad(norm)(q, *both) for both in ((keys, values), dense))
    np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-6)
    series = [[jnp.ones_like(q), jnp.zeros_like(q)]]
    for both in ((keys, values), dense):
        _, terms = jet(lambda q, both=both: attended(q, *both, 30, **HOW), (q,), series)
        np.testing.assert_allclose(
            terms[0], jax.jvp(lambda q: attended(q, *dense, 30, **HOW), (q,), (series[0][0],))[1], atol=1e-4
        )
    with pytest.raises(QuantizedGradientError):
        jax.grad(lambda rows: norm(q, keys, values.at[:, :, 3].set(rows)))(jnp.ones((2, 3, 64)))


def test_it_is_mapped_and_split_over_devices(key) -> None:
    q, keys, values = operands(key)
    want = attended(q, keys, values, 30, **HOW)
    places = jnp.asarray([10, 30])
    mapped = jax.vmap(lambda place: attended(q, keys, values, place, **HOW))(places)
    np.testing.assert_allclose(mapped[1], want, atol=1e-5)
    each = jax.vmap(lambda q, keys, values: attended(q[None], keys[None], values[None], 30, **HOW)[0])(q, keys, values)
    np.testing.assert_allclose(each, want, atol=1e-5)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("texts",))
    split = jax.device_put((q, keys, values), NamedSharding(mesh, PartitionSpec("texts")))
    found = jax.jit(lambda q, keys, values: attended(q, keys, values, 30, **HOW))(*split)
    np.testing.assert_allclose(found, want, atol=1e-5)


def test_explain_names_it(key) -> None:
    shown = str(ef.explain(lambda *given: attended(*given, 30, **HOW))(*operands(key)))
    assert "cache_attention" in shown
    assert "two products and a softmax" in shown


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, "run on NVIDIA GPUs, not on cpu"),
        ({"values": "int8", "fmt": "int4"}, "keys are int4 and values int8; it takes int8 and int8"),
        ({"m": 17}, "17 queries share a head of the cache; it takes up to 16"),
        ({"cols": 72}, "heads of 72 values"),
        ({"cols": 80, **FOUR_BITS}, "keys of 80 values are int8, and int4 values are padded to 128"),
        ({"rows": 0}, "nothing to attend to"),
        ({"window": 0}, "nothing to attend to"),
        ({"x_dtype": np.dtype(np.float64)}, "q is float64, and it takes float32"),
        ({"scale_dtype": np.dtype(jnp.bfloat16)}, "scales of keys are bfloat16"),
        ({**FOUR_BITS, "values_block": 16}, "scales of values are bfloat16, blocks 16"),
    ],
    ids=str,
)
def test_what_the_kernel_refuses(changes: dict[str, Any], why: str) -> None:
    assert why in str(ATTENTION.choice(problem(**changes)))


def problem(**changes: Any) -> Attention:
    f32 = np.dtype(np.float32)
    sizes = {"batch": (1, 2), "m": 4, "rows": 64, "cols": 64, "scale_dtype": f32, "values_scale_dtype": f32}
    fields = {"fmt": "int8", "values": "int8", "block": None, **sizes, **changes}
    return Attention(form="attention", out_dtype=fields.get("x_dtype", f32), **fields)


def test_it_needs_clusters(monkeypatch: pytest.MonkeyPatch) -> None:
    for capability in ("9.0", "10.0", "8.9"):
        monkeypatch.setattr(tuning, "capability", lambda here=capability: here)
        why = cuda_attention.refuses(problem(platform="cuda"))
        assert "compute capability 8.9" in str(why) if capability == "8.9" else why is None


@pytest.mark.parametrize("kinds", [*CACHES, None], ids=str)
@pytest.mark.parametrize("layers", [None, 3])
@pytest.mark.parametrize("place", [0, 30, 49, 70])
def test_rows_are_written_first(key, kinds: tuple[str, str] | None, layers: int | None, place: int) -> None:
    check_written(key, kinds, layers, place)


def test_what_is_written_is_mapped_and_split_over_devices(key) -> None:
    q, keys, values = operands(key)
    new = tuple(jax.random.normal(key, (2, 2, 3, 64)))
    write = lambda q, keys, values, new, place: attended(q, keys, values, place, new=new, **HOW)  # noqa: E731
    want = write(q, keys, values, new, 30)
    each = jax.vmap(lambda q, *given: write(*(jax.tree.map(lambda a: a[None], part) for part in (q, *given)), 30))
    for found, wanted in zip(jax.tree.leaves(each(q, keys, values, new)), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(found[:, 0], wanted, atol=1e-5)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("texts",))
    split = jax.device_put((q, keys, values, new), NamedSharding(mesh, PartitionSpec("texts")))
    for found, wanted in zip(jax.tree.leaves(jax.jit(write)(*split, 30)), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-5)
    typed = jax.make_mesh((2,), ("texts",), axis_types=(jax.sharding.AxisType.Explicit,), devices=jax.devices()[:2])
    with jax.set_mesh(typed):
        split = jax.device_put((q, keys, values, new), NamedSharding(typed, PartitionSpec("texts")))
        found = jax.jit(write)(*split, 30)
        assert jax.typeof(found[0]).sharding.spec[0] == "texts"
        np.testing.assert_allclose(found[0], want[0], atol=1e-5)


def test_derivatives_of_what_is_written(key) -> None:
    q, keys, values = operands(key)
    new = tuple(jax.random.normal(key, (2, 2, 3, 64)))

    def norm(q: Any, keys: Any, values: Any, new: Any) -> Any:
        return (attended(q, keys, values, 30, new=new, **HOW)[0] ** 2).sum()

    written = [part.at[:, :, 30].set(row) for part, row in zip((keys, values), new, strict=True)]
    want = jax.grad(lambda q: (attended(q, *written, 30, **HOW) ** 2).sum())(q)
    np.testing.assert_allclose(jax.grad(norm)(q, keys, values, new), want, rtol=1e-4, atol=1e-6)
    with pytest.raises(QuantizedGradientError):
        jax.grad(norm, argnums=3)(q, keys, values, new)
    dense = [part.materialize() for part in (keys, values)]
    found = jax.grad(norm, argnums=3)(q, *dense, new)
    assert all(jnp.abs(part).max() > 0 for part in found)


def test_sizes_of_heads_that_are_padded() -> None:
    assert cuda_attention.padded_size(problem(fmt="int4", values="int4", cols=80)) == 128
    assert cuda_attention.padded_size(problem(cols=80)) == 80
