"""GGUF: every type against the reference decoder, metadata, and products with the weights as they are stored."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eformer import models
from eformer import serialization as files
from eformer.jaximus import ImplicitArray, implicit, materialization_policy
from eformer.ops.quantization import quantize
from eformer.serialization.foreign.gguf_format import DECODERS

from .gguf_files import BLOCKS, gguf_bytes
from .trees import assert_same, dense

GOLDEN = np.load(Path(__file__).parent / "golden" / "gguf.npz")


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("gguf") / "m.gguf"
    made.write_bytes(gguf_bytes({f"t.{kind}": (kind, (6, 512)) for kind in BLOCKS}))
    return made


def same_values(found: np.ndarray, wanted: np.ndarray) -> bool:
    """Equal bits, or both NaN."""
    return bool(((found.view(np.uint32) == wanted.view(np.uint32)) | (np.isnan(found) & np.isnan(wanted))).all())


@pytest.mark.parametrize("kind", sorted({name.split("/")[0] for name in GOLDEN}))
def test_blocks_decode_as_ggml_decodes_them(kind):
    with np.errstate(all="ignore"):
        found = DECODERS[kind](GOLDEN[f"{kind}/raw"])
        # ggml has integers in its table of MXFP4, and integers have no -0.
        assert same_values(found + 0 if kind == "MXFP4" else found, GOLDEN[f"{kind}/values"])


def test_q8_k():
    """The one type without a reference: an f32 scale, then 256 integers."""
    rng = np.random.default_rng(0)
    scale, codes = rng.standard_normal((3, 1)).astype("<f4"), rng.integers(-128, 128, (3, 256)).astype(np.int8)
    raw = np.concatenate([scale.view(np.uint8), codes.view(np.uint8), np.zeros((3, 32), np.uint8)], axis=1)
    assert (DECODERS["Q8_K"](raw) == codes * scale).all()


@pytest.mark.parametrize(("version", "alignment"), [(2, None), (3, None), (3, 256)])
def test_metadata(tmp_path, version, alignment):
    (tmp_path / "m.gguf").write_bytes(gguf_bytes(version=version, alignment=alignment, metadata={"raw": b"\xff\xfe"}))
    file = files.open_gguf(tmp_path / "m.gguf")
    assert file.version == version
    found = dict(file.metadata)
    assert (found["general.architecture"], found["llama.block_count"], found["yes"]) == ("llama", 2, True)
    assert found["llama.eps"] == float(np.float32(1e-5))
    assert found["big"] == 2**63
    assert found["tokenizer.ggml.tokens"] == ["<s>", "é", "", "word"]
    assert (found["tokenizer.ggml.scores"] == np.arange(4)).all()
    assert found["flags"].tolist() == [True, False]
    assert [np.asarray(inner).tolist() for inner in found["nested"]] == [[-3, 4], []]
    assert found["raw"].encode("utf-8", "surrogateescape") == b"\xff\xfe"
    assert len(file) == len(BLOCKS)
    assert repr(file).endswith(f"'tiny', {len(BLOCKS)} tensors)")
    with pytest.raises(KeyError, match="'nothing' is not in"):
        file["nothing"]


def test_every_type_loads(path):
    packed, flat = files.load_gguf(path, dtype=jnp.float32), files.load_gguf(path, dense=True)
    small = files.load_gguf(path, dtype=jnp.bfloat16)
    raw = path.read_bytes()
    for kind, (_, values, nbytes) in BLOCKS.items():
        q, w, info = packed[f"t.{kind}"], flat[f"t.{kind}"], files.open_gguf(path).tensors[f"t.{kind}"]
        assert q.shape == w.shape == (6, 512), kind
        stored = np.frombuffer(raw, np.uint8, info.nbytes, info.start)
        if values == 1:
            assert np.asarray(q).tobytes() == stored.tobytes(), kind
            continue
        wanted = DECODERS[kind](stored.reshape(-1, nbytes)).reshape(6, 512)
        assert isinstance(q, ImplicitArray) == (kind in ("Q4_0", "Q4_1", "Q8_0", "IQ4_NL", "MXFP4")), kind
        assert same_values(np.asarray(w), wanted), kind
        assert small[f"t.{kind}"].dtype == jnp.bfloat16, kind
        assert same_values(np.asarray(q.materialize() if isinstance(q, ImplicitArray) else q), wanted), kind
    half = files.load_gguf(path, dense=True, dtype=jnp.bfloat16)["t.Q6_K"]
    assert_same(half, flat["t.Q6_K"].astype(jnp.bfloat16))


def operations(w, x):
    """Shape operations, which are exact, and products with their gradients."""
    rows = jnp.array([4, 0, 4])
    exact = {
        "transposed": w.T,
        "rows": w[rows],
        "groups": w[:, 64:128],
        "stacked": implicit(jnp.stack)([w, w]),
        "doubled": w * 2,
        "half": w.astype(jnp.bfloat16),
        "columns": w[:, rows * 7],
    }
    # A weighted sum would let errors cancel; the gradient of a sum of squares does not.
    gradient = jax.grad(lambda x: jnp.sum((x @ w.T) ** 2))(x)
    return exact, {"right": x @ w.T, "left": w @ x[0].T, "gradient": gradient}


def test_packed_weights_work_without_becoming_dense(path, tmp_path):
    tree = {k.removeprefix("t."): v for k, v in files.load_gguf(path).items() if isinstance(v, ImplicitArray)}
    x = dense(np.random.default_rng(0), 2, 3, 512)
    run = jax.jit(operations)
    for name, q in tree.items():
        with materialization_policy("error"):
            exact, products = run(q, x)
        exact_dense, products_dense = run(q.materialize(), x)
        for what, found in exact.items():
            looked_up = what in ("rows", "columns")  # those are activations
            assert isinstance(found, ImplicitArray) != looked_up, (name, what)
            values = np.asarray(found if looked_up else found.materialize(), np.float32)
            assert (values == np.asarray(exact_dense[what], np.float32)).all(), (name, what)
        for what, found in products.items():
            error = jnp.abs(found - products_dense[what]).max() / jnp.abs(products_dense[what]).max()
            assert error < 1e-5, (name, what, error)
    assert_same(files.load(files.save(tmp_path / "m.safetensors", tree)), tree)


def test_a_gradient_keeps_no_dense_weight(path):
    q = files.open_gguf(path)["t.Q4_0"]
    x = jnp.ones((2, 512))
    _, pull = jax.vjp(lambda x: x @ q.T, x)
    kept = sum(leaf.nbytes for leaf in jax.tree.leaves(pull))
    assert kept < q.size * 4


def test_large_tensors_are_arranged_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr("eformer.serialization.foreign.gguf._COPIED", 1 << 12)
    kinds = {"Q4_0": (96, 256), "Q4_1": (24, 4, 128), "Q8_0": (48, 192), "MXFP4": (80, 256)}
    (tmp_path / "m.gguf").write_bytes(gguf_bytes({kind: (kind, shape) for kind, shape in kinds.items()}))
    found, wanted = (files.load_gguf(tmp_path / "m.gguf", dense=dense) for dense in (False, True))
    for kind, shape in kinds.items():
        assert isinstance(found[kind], ImplicitArray)
        assert found[kind].shape == shape
        assert np.asarray(found[kind].materialize()).tobytes() == np.asarray(wanted[kind]).tobytes(), kind


def test_what_stays_packed_is_not_rounded_again(path, tmp_path):
    """Unless another format is asked for: `quantize` keeps the codes and scales of the file."""
    report = files.quantize_file(path, tmp_path / "m.safetensors", min_size=0)
    found = files.load(report.path)
    packed = {n: array for n, array in files.load_gguf(path).items() if isinstance(array, ImplicitArray)}
    assert {name.removeprefix("t.") for name in packed} == {"Q4_0", "Q4_1", "Q8_0", "IQ4_NL", "MXFP4"}
    for name, array in packed.items():
        assert_same(found[name], array)
    assert {leaf.name for leaf in report.leaves if leaf.format == "as it was"} == set(packed)


def test_gguf_is_a_source_of_streaming(path, tmp_path):
    rules = {"*.Q8_0": "int8", "*.Q[2-6]_K": "nf4"}
    report = files.quantize_file(path, tmp_path / "m.safetensors", rules, default=None, min_size=0, skip=(), axis=-1)
    found, wanted = files.load(report.path), files.load_gguf(path, dense=True)
    assert set(found) == set(wanted)
    for name, w in wanted.items():
        kind = name.removeprefix("t.")
        if kind == "Q8_0":
            assert_same(found[name], quantize(w, dtype="int8", axis=-1))
        elif kind in ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"):
            assert_same(found[name], quantize(w, dtype="nf4", axis=-1))
        else:
            assert np.asarray(found[name]).tobytes() == np.asarray(w).tobytes(), name
    packed = {name for name, array in files.load_gguf(path).items() if isinstance(array, ImplicitArray)}
    assert {name for name in packed if not isinstance(found[name], ImplicitArray)} == set()  # nobody asked to decode
    assert '"general.name": "tiny"' in files.open_lazy(report.path).metadata["gguf"]


# -- more than one file, and folders -----------------------------------------------------------------------------------


def write_parts(folder: Path, count: int = 2, **changes: int) -> list[Path]:
    """A model in several files, as llama-gguf-split makes them: tensor `t.i` is in file `i`."""
    paths = [folder / f"m-{i + 1:05d}-of-{count:05d}.gguf" for i in range(count)]
    for i, path in enumerate(paths):
        split = {"split.no": np.uint16(i), "split.count": np.uint16(count), "general.name": f"part {i}"}
        split |= {f"split.{key}": np.uint16(value) for key, value in changes.items()}
        path.write_bytes(gguf_bytes({f"t.{i}": ("Q8_0", (4, 64))}, metadata=split, seed=i))
    return paths


def test_a_model_in_several_files_is_one(tmp_path):
    """Whichever part is named, and by their folder; tensors come from the file they are in."""
    first, second = write_parts(tmp_path)
    wanted = np.frombuffer(second.read_bytes()[-4 * 68 :], np.uint8).reshape(-1, 34)
    for path in (first, second, tmp_path):
        opened = files.open_checkpoint(path)
        assert isinstance(opened, files.GgufFile)
        assert list(opened) == ["t.0", "t.1"]
        assert opened.metadata["general.name"] == "part 0"
        np.testing.assert_array_equal(np.asarray(opened["t.1"].materialize()), DECODERS["Q8_0"](wanted).reshape(4, 64))
    files.quantize_file(tmp_path, tmp_path / "ours.safetensors", min_size=0)
    assert set(files.load(tmp_path / "ours.safetensors")) == {"t.0", "t.1"}
    (tmp_path / "ours.safetensors").unlink()
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(files.CheckpointError, match=r"holds a GGUF file.*Quantize m-00001-of-00002\.gguf to a file"):
        files.quantize_folder(tmp_path, tmp_path / "out")
    with pytest.raises(files.CheckpointError, match=r"m-00001-of-00002\.gguf: says None for llama\."):
        models.load(tmp_path)


def test_parts_that_do_not_belong_together(tmp_path):
    first, second = write_parts(tmp_path)
    moved = first.rename(tmp_path / "first.gguf")
    with pytest.raises(files.CheckpointError, match=r"of a model in 2 files, but is not called NAME-00001-of-00002"):
        files.open_gguf(moved)
    with pytest.raises(files.CheckpointError, match=r"1 are missing, such as m-00001-of-00002\.gguf"):
        files.open_gguf(second)
    first.write_bytes(second.read_bytes())
    with pytest.raises(files.CheckpointError, match=r"m-00001-of-00002\.gguf: is not part 1 of 2 of m-00002"):
        files.open_gguf(second)


def test_types_that_are_not_read_are_listed(tmp_path):
    """The other tensors of the file are read; quantizing it is refused before anything is written."""
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes({"a": ("Q5_1", (2, 2048)), "b": ("F32", (4,))}, seed=1))
    raw = bytearray(path.read_bytes())
    raw[raw.index(b"a" + bytes([2, 0, 0, 0])) + 21] = 18  # IQ3_XXS, which takes fewer bytes
    path.write_bytes(raw)
    assert {t.path: t.format for t in files.inspect(path).tensors} == {"a": "IQ3_XXS", "b": "dense"}
    assert files.open_gguf(path)["b"].shape == (4,)
    with pytest.raises(files.CheckpointError, match="'a': is of the ggml type IQ3_XXS; supported are F32"):
        files.quantize_file(path, tmp_path / "out.safetensors")
    assert [p.name for p in tmp_path.iterdir()] == ["m.gguf"]
