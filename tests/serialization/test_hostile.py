"""Files made to hurt: every one gets an error that says which file, which tensor and what, and costs nothing."""

from __future__ import annotations

import json
import os
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eformer import serialization as files

from .fuzz import fuzz
from .gguf_files import gguf_bytes, string, value
from .trees import random_nf4

ENTRY = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}


def packed(header: Any, data: bytes = b"\0" * 16, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def one(**changes: Any) -> bytes:
    return packed({"w": {**ENTRY, **changes}})


def two(first: list[int], second: list[int]) -> bytes:
    return packed({"a": {**ENTRY, "data_offsets": first}, "b": {**ENTRY, "data_offsets": second}}, b"\0" * 32)


SAFETENSORS = {
    "empty": (b"", "has 0 bytes"),
    "short": (b"\0" * 7, "has 7 bytes"),
    "8 EB header": (packed({}, length=2**63 - 1), "claims a header of 9,223,372,036,854,775,807 bytes"),
    "header beyond the end": (packed({"w": ENTRY}, length=10**6), "claims a header of 1,000,000 bytes"),
    "no JSON": (packed(b"{nonsense}"), "broken JSON"),
    "no UTF-8": (packed(b'{"\xff": 1}'), "broken JSON"),
    "a list": (packed([ENTRY]), "not a JSON object but list"),
    "NaN": (packed(b'{"w": {"dtype": "F32", "shape": [NaN], "data_offsets": [0, 16]}}'), "holds NaN"),
    "infinite": (packed(b'{"w": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, -Infinity]}}'), "-Infinity"),
    "deep": (packed(b'{"w":' * 100_000 + b"1" + b"}" * 100_000), "nested too deeply"),
    "a number of many digits": (packed(b'{"w": ' + b"9" * 10_000 + b"}"), "broken JSON"),
    "a name twice": (packed(b'{"w": 1, "w": 2}'), "'w': appears twice"),
    "no fields": (packed({"w": 1}), "'w': has no dtype, shape and data_offsets"),
    "unknown dtype": (one(dtype="F7"), "'w': has the unknown dtype 'F7'"),
    "a list for a dtype": (one(dtype=["F32"]), "unknown dtype"),
    "negative size": (one(shape=[-2, -2]), r"'w': has the shape \[-2, -2\]"),
    "a boolean for a size": (one(shape=[True, 4]), "has the shape"),
    "a float for a size": (one(shape=[2.0, 2]), "has the shape"),
    "rank 1000": (one(shape=[1] * 1000), "has the shape"),
    "sizes that overflow": (one(shape=[2**40, 2**40]), "absurd shape"),
    "nothing, very wide": (one(shape=[2**62, 0, 2**62], data_offsets=[0, 0]), "absurd shape"),
    "wrong size": (one(shape=[2, 3]), r"'w': has 16 bytes, but float32\[2, 3\] takes 24"),
    "offsets that are no numbers": (one(data_offsets=["0", "16"]), "not two numbers of bytes"),
    "offsets backwards": (one(data_offsets=[16, 0]), "lies at bytes 16 to 0"),
    "out of range": (one(data_offsets=[8, 24]), "'w': lies at bytes 8 to 24, but the file has 16"),
    "overlap": (two([0, 16], [8, 24]), "'b': begins at byte 8, which overlaps"),
    "the same bytes": (two([0, 16], [0, 16]), "overlaps"),
    "hole": (two([0, 16], [17, 33])[:-1], "lies at bytes 17 to 33"),
    "data nobody describes": (packed({"w": ENTRY}, b"\0" * 17), "has 17 bytes of data, but its tensors describe 16"),
    "metadata of numbers": (packed({"__metadata__": {"a": 1}, "w": ENTRY}), "not a mapping of strings to strings"),
    "metadata of half a character": (packed({"__metadata__": {"eformer": "\ud800"}, "w": ENTRY}), "broken JSON"),
}  # fmt: skip


def described(**metadata: Any) -> bytes:
    """A file with a tensor `w`, described as told."""
    text = json.dumps({"version": 1, **metadata})
    return packed(
        {"__metadata__": {"eformer": text}, "w": ENTRY, "u": {"dtype": "U8", "shape": [0], "data_offsets": [16, 16]}}
    )


def leaf(**description: Any) -> bytes:
    return described(leaves={"x": description})


def nf4(codes: str = "u", **changes: Any) -> bytes:
    fields = {"block_size": 4, "axis": -1, "pad": 0, "use_kernel": True, "dtype": {"dtype": "float32"}, **changes}
    return leaf(type="nf4", shape=[0], dtype="float32", fields=fields, parts={"packed": codes, "absmax": "w"})


def of_type(kind: Any) -> bytes:
    return leaf(type=kind, shape=[], dtype="int8", fields={}, parts={})


def nested(depth: int) -> Any:
    return "w" if depth == 0 else {"list": [nested(depth - 1)]}


def boxed(depth: int) -> Any:
    return 3 if depth == 0 else {"items": [boxed(depth - 1)]}


METADATA = {
    "a newer version": (described(version=99), "version 99 of the format.*Install a newer"),
    "no version": (described(version=None), "metadata under 'eformer'"),
    "leaves that are a list": (described(leaves=[]), "leaves in its metadata that are not a mapping"),
    "a missing tensor": (described(leaves={"x": "gone"}), "'x': needs 'gone', which is not there"),
    "an unknown type": (of_type("os.system"), "'x': is of the type 'os.system', which is not registered"),
    "a type that is no name": (of_type(["nf4"]), "is not registered"),
    "parts that are a string": (leaf(type="nf4", parts="w"), "parts 'w' that are neither"),
    "a description that is a number": (described(leaves={"x": 3}), "'x': has the description 3"),
    "a block of no size": (nf4(block_size=0), "'x'.*does not make a ArrayNF4|'x'.*instead of"),
    "a block size that is text": (nf4(block_size="4"), "block_size='4', which is not of type int"),
    "a pad that is true": (nf4(pad=True), "pad=True, which is not of type int"),
    "an axis that is a mapping": (nf4(axis={"a": 1}), "which is not a plain value"),
    "a field too many": (nf4(sharding=None), "takes .*'absmax', 'packed'"),
    "codes that are floating": (nf4("w"), "part 'packed' that is float32.* instead of uint8"),
    "an unknown dtype": (leaf(type="numpy", tensor="w", dtype="object"), "'object' is not a dtype"),
    "a dtype that does not fit": (leaf(type="numpy", tensor="w", dtype="int4"), "cannot hold values of dtype int4"),
    "a key of an unknown kind": (leaf(type="key", tensor="w", impl="dice"), "not a random key of the kind 'dice'"),
    "a deep description": (described(leaves={"x": boxed(200)}), "nested more than 64 deep"),
    "a deep structure": (described(structure=nested(90)), "holds a structure it should not"),
    "a structure of nothing": (described(structure={"list": ["gone"]}), "'gone': is part of the structure, but"),
    "a structure that is no structure": (described(structure={"set": [1]}), "unknown kind 'set'"),
    "a dict of no pairs": (described(structure={"dict": [1]}), "a key and value that are 1"),
    "keys that are lists": (described(structure={"dict": [[["a"], None]]}), "not a plain value"),
    "aliases that are numbers": (described(aliases={"a": 1}), "aliases that are not names"),
}  # fmt: skip


def read(path: Path) -> None:
    lazy = files.open_lazy(path)
    for name in lazy:
        lazy.info(name)
    files.load(path)


def assert_refused(path: Path, message: str, reader: Any) -> None:
    tracemalloc.start()
    with pytest.raises(files.CheckpointError, match=message) as caught:
        reader(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert path.name in str(caught.value)
    assert len(str(caught.value)) < 1000
    assert peak < 40 * path.stat().st_size + 5_000_000, f"{peak:,} bytes for a file of {path.stat().st_size:,}"


@pytest.mark.parametrize("case", [*SAFETENSORS, *METADATA])
def test_safetensors(tmp_path, case):
    data, message = {**SAFETENSORS, **METADATA}[case]
    (tmp_path / "evil.safetensors").write_bytes(data)
    assert_refused(tmp_path / "evil.safetensors", message, read)


def test_metadata_of_nothing(tmp_path):
    """As MLX writes it where it is given none."""
    (tmp_path / "m.safetensors").write_bytes(packed({"__metadata__": None, "w": ENTRY}))
    assert files.load(tmp_path / "m.safetensors")["w"].shape == (2, 2)


def test_names_that_are_too_long_are_cut(tmp_path):
    (tmp_path / "evil.safetensors").write_bytes(packed({"w" * 100_000: 1}))
    assert_refused(tmp_path / "evil.safetensors", r"w'\.\.\. \(100000 characters\): has no dtype", read)


@pytest.mark.parametrize(
    "name",
    [
        "../../etc/passwd",
        "/etc/passwd",
        "sub/w.safetensors",
        "..",
        ".hidden",
        "a\\b",
        "c:w",
        "a\0b",
        "",
        3,
        None,
        "\ud800",
    ],
)
def test_an_index_names_files_beside_it_only(tmp_path, name):
    index = tmp_path / "m.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w": name}}))
    assert_refused(index, "'w': is listed in .*only files in its own folder", files.load)
    with pytest.raises(files.CheckpointError, match="only files in its own folder"):
        files.quantize_file(index, tmp_path / "out.safetensors", "nf4")


def test_other_bad_indexes(tmp_path):
    index = tmp_path / "m.safetensors.index.json"
    (tmp_path / "good.safetensors").write_bytes(one())
    os.mkfifo(tmp_path / "pipe.safetensors")
    (tmp_path / "folder.safetensors").mkdir()
    cases = {
        "[]": "is not an index",
        '{"weight_map": [1]}': "is not an index",
        '{"weight_map": {"x": "good.safetensors"}}': "'x': is not in the file",
        '{"weight_map": {"w": "gone.safetensors"}}': "'gone.safetensors', which cannot be opened",
        '{"weight_map": {"w": "%s"}}' % ("x" * 5000): "cannot be opened: File name too long",
        '{"weight_map": {"w": "pipe.safetensors"}}': "is not an ordinary file",
        '{"weight_map": {"w": "folder.safetensors"}}': "is not an ordinary file",
        '{"metadata": {"eformer": 3}, "weight_map": {"w": "good.safetensors"}}': "that is not a string",
    }
    for text, message in cases.items():
        index.write_text(text)
        with pytest.raises(files.CheckpointError, match=message):
            files.load(index)
    with open(index, "wb") as file:
        file.truncate(200_000_000)
    assert_refused(index, "is an index of 200,000,000 bytes", files.load)
    with pytest.raises(files.CheckpointError, match="is not an ordinary file"):
        files.load_gguf(tmp_path / "pipe.safetensors")
    with pytest.raises(FileNotFoundError):
        files.load(tmp_path / "nothing.safetensors")
    (tmp_path / "other.index.json").write_text("{}")
    with pytest.raises(files.CheckpointError, match="a folder with 2 checkpoints"):
        files.load(tmp_path)


def test_the_same_leaf_in_two_files(tmp_path):
    text = json.dumps({"version": 1, "leaves": {"x": "w"}})
    for name in "ab":
        header = {"__metadata__": {"eformer": text}, f"w{name}": ENTRY}
        (tmp_path / f"{name}.safetensors").write_bytes(packed(header))
    index = tmp_path / "m.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"wa": "a.safetensors", "wb": "b.safetensors"}}))
    assert_refused(index, "'x': is described in two files", files.load)


# -- GGUF --------------------------------------------------------------------------------------------------------------


def gguf(*pairs: bytes, tensors: bytes = b"", count: int = 0, version: int = 3, claim: int | None = None) -> bytes:
    counts = struct.pack("<IQQ", version, count, len(pairs) if claim is None else claim)
    return b"GGUF" + counts + b"".join(pairs) + tensors


def tensor(
    shape: tuple[int, ...] = (32,), code: int = 0, offset: int = 0, name: str = "t", rank: int | None = None
) -> bytes:
    sizes = struct.pack(f"<I{len(shape)}Q", len(shape) if rank is None else rank, *shape)
    return string(name) + sizes + struct.pack("<IQ", code, offset)


def pair(*numbers: int, form: str = "<IIQ") -> bytes:
    return string("k") + struct.pack(form, *numbers)


GGUF = {
    "empty": (b"", "is empty"),
    "short": (b"GG", "claims 4 bytes"),
    "another magic": (b"GGML" + b"\0" * 100, "does not begin with GGUF"),
    "version 1": (gguf(version=1), "GGUF version 1; versions 2 and 3"),
    "big-endian": (gguf(version=0x03000000), "big-endian"),
    "8 EB of pairs": (gguf(claim=2**63), "pairs of metadata at byte 24"),
    "a billion tensors": (gguf(count=10**9), "1,000,000,000 tensors"),
    "a long string": (gguf(pair(8, 2**60, form="<IQ")), "claims a string of 1,152,921,504,606,846,976 bytes"),
    "a string beyond the end": (gguf(pair(8, 10**6, form="<IQ")), "claims 1,000,000 bytes"),
    "a long array": (gguf(pair(9, 6, 2**62)), "claims .* bytes at byte"),
    "a long array of strings": (gguf(pair(9, 8, 2**60)), "an array of 1,152"),
    "strings beyond the end": (gguf(pair(9, 8, 1, 99, form="<IIQQ")), "a string beyond the end"),
    "arrays in arrays": (gguf(pair(9, *(9, 1) * 9, form="<I" + "IQ" * 9) + b"\0" * 99), "nested 4 deep"),
    "an unknown type of value": (gguf(pair(77, 0, 0)), "metadata of the type 77"),
    "a key twice": (gguf(string("k") + value("a"), string("k") + value("b")), "the metadata 'k' twice"),
    "alignment 0": (gguf(string("general.alignment") + value(np.uint32(0))), "general.alignment 0"),
    "alignment of text": (gguf(string("general.alignment") + value("x")), "general.alignment 'x'"),
    "rank 4 billion": (gguf(tensors=tensor(rank=2**32 - 1) + b"\0" * 99, count=1), "'t': claims 4,294,967,295 axes"),
    "an unknown tensor type": (gguf(tensors=tensor(code=999), count=1), "'t': is of the ggml type 999; supported"),
    "a tensor type not read": (
        gguf(tensors=tensor(shape=(256,), code=22), count=1) + b"\0" * 200,
        "'t': is of the ggml type IQ2_S; supported",
    ),
    "half a block": (gguf(tensors=tensor(shape=(33,), code=8), count=1), "Q8_0 holds rows of whole blocks of 32"),
    "sizes that overflow": (gguf(tensors=tensor(shape=(2**40, 2**40)), count=1), "has the shape"),
    "out of range": (gguf(tensors=tensor(), count=1), r"'t': lies at bytes .* of a file of"),
    "far out of range": (gguf(tensors=tensor(offset=2**63), count=1) + b"\0" * 999, r"'t': lies at bytes"),
    "not aligned": (gguf(tensors=tensor(offset=4), count=1) + b"\0" * 999, "alignment 32"),
    "a tensor twice": (gguf(tensors=tensor() * 2, count=2) + b"\0" * 999, "'t': appears twice"),
    "overlap": (gguf(tensors=tensor() + tensor(name="u", offset=32), count=2) + b"\0" * 999, "overlaps the tensor"),
}  # fmt: skip


@pytest.mark.parametrize("case", GGUF)
def test_gguf(tmp_path, case):
    data, message = GGUF[case]
    path = tmp_path / "evil.gguf"
    path.write_bytes(data)
    assert_refused(path, message, files.load_gguf)


def test_every_prefix_of_a_file_is_refused(tmp_path):
    """A download that stopped anywhere."""
    tree = {"w": random_nf4(np.random.default_rng(0), (16, 2), 8)}
    whole = files.save(tmp_path / "m.safetensors", tree).read_bytes()
    gguf_whole = gguf_bytes({"a": ("Q4_0", (2, 32)), "b": ("F32", (3,))})
    for name, data, reader in (("m.safetensors", whole, files.load), ("m.gguf", gguf_whole, files.load_gguf)):
        for length in range(0, len(data), 7):
            (tmp_path / name).write_bytes(data[:length])
            with pytest.raises(files.CheckpointError):
                reader(tmp_path / name)


# -- anything ----------------------------------------------------------------------------------------------------------

KEYS = st.sampled_from(["w", "dtype", "shape", "type", "list", "parts"]) | st.text(max_size=4)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**65), 2**65) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)
ENTRIES = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "U8", "BF16", "BOOL", "I64"]) | JSON,
        "shape": st.lists(st.integers(-1, 5), max_size=3) | JSON,
        "data_offsets": st.lists(st.integers(-1, 40), min_size=2, max_size=2) | JSON,
    }
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(header=st.dictionaries(st.text(max_size=3), ENTRIES | JSON, max_size=3) | JSON, data=st.binary(max_size=40))
def test_any_header_is_read_or_refused(tmp_path, header, data):
    path = tmp_path / "any.safetensors"
    path.write_bytes(packed(header, data))
    try:
        found = files.load(path)
    except files.CheckpointError:
        return
    assert sum(np.asarray(a).nbytes for a in found.values()) == len(data)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(metadata=st.dictionaries(st.sampled_from(["version", "leaves", "structure", "aliases"]), JSON) | JSON)
def test_any_metadata_is_read_or_refused(tmp_path, metadata):
    path = tmp_path / "any.safetensors"
    text = json.dumps({"version": 1, **metadata} if isinstance(metadata, dict) else metadata)
    path.write_bytes(packed({"__metadata__": {"eformer": text}, "w": ENTRY}))
    try:
        read(path)
    except files.CheckpointError as err:
        assert path.name in str(err)  # noqa: PT017 - either outcome is fine


def test_damaged_files_are_read_or_refused(tmp_path):
    """The fuzzer, briefly; `python -m tests.serialization.fuzz 20000` runs it at length."""
    outcomes = fuzz(tmp_path, 60, seed=7)
    assert sum(outcomes.values()) == 6 * 60 + 4 * 20
    readers = ("read_safetensors", "read_like", "read_index", "read_gguf", "read_packed")
    assert all(outcomes[f"{reader}: refused"] > 10 for reader in readers)


def state(layouts: Any, **tensors: Any) -> dict[str, Any]:
    text = json.dumps({"version": 1, "layouts": layouts})
    return {"tensors": tensors, "eformer": np.frombuffer(text.encode(), np.uint8)}


@pytest.mark.parametrize(
    ("damaged", "message"),
    [
        ({}, "no 'tensors' and 'eformer'"),
        ({"tensors": {}, "eformer": np.frombuffer(b"{", np.uint8)}, "broken JSON"),
        ({"tensors": {}, "eformer": np.zeros(3)}, "broken JSON"),
        (state({"a": ["float32", [2]]}), "'a': is not among"),
        (state({"a": ["float32", [2]]}, a=np.ones(3, "f4")), r"'a': is float32\[3\] in the state"),
        (state({"a": 3}), "'a': has the layout 3"),
        (state([]), "metadata that it should not"),
    ],
)
def test_states(damaged, message):
    with pytest.raises(files.CheckpointError, match=message):
        files.from_state_dict(damaged)


def test_msgpack_that_is_none():
    whole = files.to_msgpack({"w": jnp.ones(3)})
    for data in (b"", b"\xc1", whole[:-3], b"\x93\x01", whole + b"x", b"\xdf\xff\xff\xff\xff"):
        with pytest.raises(files.CheckpointError, match=r"not Flax msgpack|no 'tensors'"):
            files.from_msgpack(data)
