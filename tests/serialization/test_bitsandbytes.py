"""State dicts of bitsandbytes: what it wrote is read exactly, and what we write is what it would have written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from eformer import serialization as files
from eformer.ops.quantization import Array8B, ArrayNF4, quantize

from .trees import assert_same, decoded, dense

GOLDEN = Path(__file__).parent / "golden" / "bitsandbytes.safetensors"
FITTING = {"plain": (24, 128), "nested": (40, 512), "small_blocks": (6, 64)}
OTHERS = {"crossing": (5, 30), "crossing_nested": (7, 9), "fp4": (4, 64)}


@pytest.fixture(scope="module")
def golden() -> files.LazyCheckpoint:
    return files.open_lazy(GOLDEN)


def without(state: Any, *names: str) -> dict[str, Any]:
    return {key: state[key] for key in state if key.split(".")[0] not in names}


def test_what_it_wrote_is_read_exactly(golden):
    found = files.from_bitsandbytes(golden, fallback="dense")
    assert sorted(found) == sorted(f"{name}.{what}" for name in {**FITTING, **OTHERS} for what in ("weight", "decoded"))
    for name, shape in FITTING.items():
        q = found[f"{name}.weight"]
        assert isinstance(q, ArrayNF4), name
        assert (q.shape, q.axis) == (shape, -1), name
        assert_same(jax.device_put(decoded(q)), found[f"{name}.decoded"])
    assert_same(found["nested.weight"].T.materialize(), found["nested.decoded"].T)
    assert (type(found["nested.weight"].absmax).__name__, found["nested.weight"].dtype) == (
        "CompressedAbsmax",
        "bfloat16",
    )
    for name, shape in OTHERS.items():
        assert found[f"{name}.weight"].shape == shape
        assert_same(found[f"{name}.weight"], found[f"{name}.decoded"])


def test_what_it_wrote_is_written_again_byte_by_byte(golden):
    fitting = without(golden, *OTHERS)
    again = files.to_bitsandbytes({k: v for k, v in files.from_bitsandbytes(fitting).items() if "decoded" not in k})
    assert set(again) == {key for key in fitting if "decoded" not in key}
    for key, array in again.items():
        assert_same(array, np.asarray(fitting[key]))


@pytest.mark.parametrize("double_quant", [False, True])
def test_kernels_of_jax_become_weights_of_pytorch(tmp_path, double_quant):
    rng = np.random.default_rng(0)
    kernel, table = dense(rng, 128, 24, dtype="bfloat16"), dense(rng, 24, 64)
    tree = {
        "dense": {"kernel": ArrayNF4.quantize(kernel, 64, double_quant=double_quant), "bias": jnp.ones(24)},
        "embed": quantize(table, dtype="nf4", axis=-1),
    }
    state = files.to_bitsandbytes(tree)
    assert state["dense.kernel"].shape == (128 * 24 // 2, 1)
    assert json.loads(bytes(state["dense.kernel.quant_state.bitsandbytes__nf4"]))["shape"] == [24, 128]
    assert ("dense.kernel.nested_absmax" in state) == double_quant
    path = files.save(tmp_path / "m.safetensors", state)
    assert set(safetensors.numpy.load_file(path)) == set(state)  # tables too, once for each weight
    found = files.from_bitsandbytes(files.open_lazy(path))
    assert (decoded(tree["dense"]["kernel"]) == decoded(found["dense.kernel"]).T).all()
    assert (decoded(found["embed"]) == decoded(tree["embed"])).all()
    assert (found["dense.bias"] == 1).all()


def test_other_tables_and_groups_stay_exact(golden):
    """A compressed absmax that ours cannot hold as it is, is expanded."""
    state = {key: np.asarray(golden[key]) for key in golden if key.startswith("nested.")}
    table = state["nested.weight.nested_quant_map"].copy()
    table[3] *= 2
    found = files.from_bitsandbytes({**state, "nested.weight.nested_quant_map": table})["nested.weight"]
    details = json.loads(bytes(state["nested.weight.quant_state.bitsandbytes__nf4"]))
    codes = state["nested.weight.absmax"]
    scale = state["nested.weight.nested_absmax"][np.arange(codes.size) // 256]
    expanded = table[codes] * scale + np.float32(details["nested_offset"])
    assert_same(found.absmax, jax.device_put(expanded.reshape(40, 8)))


@pytest.mark.parametrize("storage", ["bfloat16", "float32"])
def test_bytes_that_are_called_something_else(storage, golden, tmp_path):
    """`quant_storage`: the same bytes under the dtype that the rest of the model has, as FSDP wants them."""
    state = {key: np.asarray(golden[key]) for key in golden if key.startswith("nested.")}
    stored = {**state, "nested.weight": state["nested.weight"].reshape(-1).view(jnp.dtype(storage))}
    safetensors.numpy.save_file(stored, tmp_path / "m.safetensors")
    assert_same(
        files.load_checkpoint(tmp_path / "m.safetensors")["nested.weight"],
        files.from_bitsandbytes(state)["nested.weight"],
    )


NAME = "plain.weight"


def changed(details: dict[str, Any], **more: Any) -> bytes:
    return json.dumps({**details, **more}).encode()


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        ("", lambda a: a[:-1], "has codes uint8.*needs 1536 values"),
        ("", lambda a: a.astype(np.int8), "has codes int8"),
        (".absmax", lambda a: a[:-1], "has absmax float32.*needs 48"),
        (".quant_map", lambda a: a[:4], "has quant_map"),
        (".quant_map", lambda a: -a, "table that is not that of NF4"),
        (".absmax", None, "lacks absmax"),
        ("", None, "has a quantization state, but no codes"),
        (".quant_state.bitsandbytes__nf4", lambda a: a[:-3], "broken JSON"),
        (".quant_state.bitsandbytes__nf4", {"blocksize": 0}, "blocks of 0"),
        (".quant_state.bitsandbytes__nf4", {"blocksize": 64.0}, "blocks of 64.0"),
        (".quant_state.bitsandbytes__nf4", {"shape": [2**40, 2**40]}, "has the shape"),
        (".quant_state.bitsandbytes__nf4", {"shape": "big"}, "has the shape 'big'"),
        (".quant_state.bitsandbytes__nf4", {"dtype": "object"}, "has the dtype 'object'"),
        (".quant_state.bitsandbytes__nf4", {"shape": [48, 32 * 2 - 0]}, "is fine"),
    ],
)
def test_damaged_states_are_refused(golden, part, change, message):
    state = {key: np.asarray(golden[key]) for key in golden if key.startswith("plain.")}
    if change is None:
        del state[NAME + part]
    elif isinstance(change, dict):
        raw = changed(json.loads(bytes(state[NAME + part])), **change)
        state[NAME + part] = np.frombuffer(raw, np.uint8)
    else:
        state[NAME + part] = change(state[NAME + part])
    if message == "is fine":  # another shape of the same size
        assert files.from_bitsandbytes(state)[NAME].shape == (48, 64)
        return
    with pytest.raises(files.CheckpointError, match=message) as caught:
        files.from_bitsandbytes(state)
    assert NAME in str(caught.value)


def test_nested_groups_cannot_make_it_allocate(golden):
    state = {key: np.asarray(golden[key]) for key in golden if key.startswith("nested.")}
    key = "nested.weight.quant_state.bitsandbytes__nf4"
    details = json.loads(bytes(state[key]))
    for change in ({"nested_blocksize": 2**60}, {"nested_offset": None}, {"nested_offset": 10**400}):
        wrong = {**state, key: np.frombuffer(changed(details, **change), np.uint8)}
        with pytest.raises(files.CheckpointError, match=r"'nested\.weight'.*nested"):
            files.from_bitsandbytes(wrong)


def test_what_it_cannot_hold_is_refused(golden):
    def nf4(*shape: int, axis: int, pad: int = 0) -> ArrayNF4:
        return ArrayNF4(jnp.zeros(shape, "uint8"), jnp.ones(shape[:-1]), 2 * shape[-1], axis=axis, pad=pad)

    wrong = {
        "58 values of padding": nf4(8, 2, 32, axis=-2, pad=58),
        "blocks of 10": nf4(8, 7, 5, axis=-2),
        "is a Array8B": Array8B(jnp.ones((1, 8)), jnp.ones((4, 8), "int8")),
        "is a stack": nf4(2, 8, 1, 32, axis=-2),
    }
    for message, q in wrong.items():
        with pytest.raises(files.CheckpointError, match=message):
            files.to_bitsandbytes({"q": q})
    with pytest.raises(files.CheckpointError, match=r"'crossing\.weight'.*cross the ends of rows.*fallback"):
        files.from_bitsandbytes(without(golden, "crossing_nested", "fp4"))
    with pytest.raises(files.CheckpointError, match=r"'fp4\.weight'.*quantized as 'fp4'"):
        files.from_bitsandbytes(without(golden, "crossing_nested", "crossing"))
    with pytest.raises(ValueError, match="fallback='maybe'"):
        files.from_bitsandbytes({}, fallback="maybe")  # pyright: ignore[reportArgumentType]
