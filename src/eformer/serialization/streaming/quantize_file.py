"""`quantize_file`: from one checkpoint to a quantized one, a tensor at a time.

Leaves of the input are read one at a time, or copied in chunks, without a map of the whole file.
"""

from __future__ import annotations

import dataclasses
import errno
import functools
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from eformer import _table
from eformer._quantize.config import Axis, options_in_rules, quantize_stack
from eformer._quantize.leaves import named_leaf
from eformer._quantize.plan import MIN_SIZE, SKIP, Choice, Decision, Plan, Unused, plan
from eformer._quantize.tree import Progress, Reporter
from eformer.errors import CheckpointError

from ..checkpoint.index import index_path
from ..checkpoint.load import LazyCheckpoint
from ..checkpoint.save import check_target, checked_metadata, shards_of
from ..foreign.gguf import PACKED, GgufFile
from ..foreign.packed import PackedCheckpoint, open_checkpoint
from ..safetensors.header import about, named_dtype
from ..safetensors.reading import aligned_empty
from ..tree.describe import KEY, NO_STRUCTURE, DescribedTree, Leaf, described_leaf, host, leaves_metadata, tree_metadata
from .output import Output


@dataclasses.dataclass(frozen=True)
class SourceLeaf:
    """A leaf of the input.

    `value` is the leaf with shapes in place of arrays. `copy` gives each of its tensors in chunks, `read` a dense leaf
    in a buffer of bytes. `kept` is the leaf as it is where nobody asks for another format: packed.
    """

    leaf: Leaf
    value: Any
    copy: Mapping[str, Callable[[], Iterable[np.ndarray]]]
    read: Callable[[np.ndarray], np.ndarray] | None = None
    announce: Callable[[], None] = lambda: None
    kept: SourceLeaf | None = None


@dataclasses.dataclass(frozen=True)
class Source:
    """An input: its leaves in order, what else its checkpoint says, and what tells it from any other."""

    opened: LazyCheckpoint | GgufFile
    paths: Sequence[Path]
    leaves: Sequence[SourceLeaf]
    structure: Any
    aliases: Mapping[str, str]
    metadata: Mapping[str, str]
    identity: Any


def open_source(path: str | os.PathLike[str]) -> Source:
    """A checkpoint of safetensors, in one file or more, or a GGUF file; tensors are not read."""
    opened = open_checkpoint(path)
    return _gguf_source(opened) if isinstance(opened, GgufFile) else _safetensors_source(opened)


def _safetensors_source(checkpoint: LazyCheckpoint) -> Source:
    files = checkpoint.files
    opened = sorted({(file.path, file.descriptor) for file in files.owners.values()})
    leaves = [_safetensors_leaf(checkpoint, name, files.owners) for name in checkpoint]
    paths = [files.path, *(path for path, _ in opened)]
    identity = [_identity(path, os.fstat(descriptor)) for path, descriptor in opened]
    return Source(checkpoint, paths, leaves, files.structure, files.aliases, files.metadata, identity)


def _safetensors_leaf(checkpoint: LazyCheckpoint, name: str, owners: Mapping[str, Any]) -> SourceLeaf:
    if isinstance(checkpoint, PackedCheckpoint) and name in checkpoint.weights:
        return _packed_leaf(checkpoint, name)
    value, tensors = checkpoint.abstract(name)[0], checkpoint.tensors[name]
    shapes = {t: jax.ShapeDtypeStruct(checkpoint.entry(t).shape, checkpoint.entry(t).dtype) for t in tensors}
    copy = {tensor: functools.partial(owners[tensor].chunks, tensor) for tensor in tensors}
    leaf = Leaf(name, checkpoint.description(name), shapes)
    if not isinstance(value, jax.ShapeDtypeStruct) or value not in shapes.values():
        return SourceLeaf(leaf, value, copy)  # of several tensors, or stored as bytes
    (tensor,) = tensors
    file = owners[tensor]
    return SourceLeaf(leaf, value, copy, lambda buffer: file.read_into(buffer, tensor), lambda: file.announce(tensor))


def _packed_leaf(checkpoint: PackedCheckpoint | GgufFile, name: str) -> SourceLeaf:
    """A weight another program quantized: arranged as ours in pieces while its largest tensor is written, the codes."""
    value = checkpoint.abstract(name)[0]
    leaf = described_leaf(name, value, set(checkpoint) - {name})
    held: dict[str, list[np.ndarray]] = {}

    def pieces(tensor: str) -> Iterator[np.ndarray]:
        if held:
            yield from held.pop(tensor)
            return
        for made in checkpoint.read_rows(name):
            parts = described_leaf(name, made, set()).tensors.values()
            for (part, whole), array in zip(leaf.tensors.items(), parts, strict=True):
                if part == tensor:
                    yield host(array, part)
                elif part not in held or array.shape != whole.shape:  # else it belongs to all pieces
                    held.setdefault(part, []).append(host(array, part))

    order = sorted(leaf.tensors, key=lambda tensor: -leaf.tensors[tensor].size)
    return SourceLeaf(leaf, value, {tensor: functools.partial(pieces, tensor) for tensor in order})


def _gguf_source(file: GgufFile) -> Source:
    """Block types that stay packed do, unless another format is asked for; the others are decoded to f32."""
    described = {k: v for k, v in file.metadata.items() if isinstance(v, (str, bool, int, float))}
    leaves = [_gguf_leaf(file, name) for name in file]
    identity = [_identity(path, os.stat(path)) for path in file.paths]
    return Source(file, file.paths, leaves, NO_STRUCTURE, {}, {"gguf": json.dumps(described)}, identity)


def _gguf_leaf(file: GgufFile, name: str) -> SourceLeaf:
    tensor = file.known(name)
    value = jax.ShapeDtypeStruct(tensor.shape, named_dtype(tensor.type.dtype or "float32"))
    leaf = Leaf(name, name, {name: value})
    if tensor.type.dtype is not None:
        return SourceLeaf(leaf, value, {name: lambda: [file.plain_view(name)]}, lambda _: file.plain_view(name))
    return SourceLeaf(
        leaf,
        value,
        {name: lambda: (values for _, values in file.decoded_chunks(name))},
        lambda buffer: file.decode_into(buffer, name),
        kept=_packed_leaf(file, name) if tensor.type.name in PACKED else None,
    )


def _identity(path: Path, status: os.stat_result) -> list[Any]:
    """What changes when a file is replaced or written to."""
    return [path.name, status.st_size, status.st_mtime_ns, status.st_ino]


@dataclasses.dataclass(frozen=True)
class StreamedLeaf:
    """What happened to one leaf: the rule that decided (None: none matched), the new format, why it stayed dense."""

    name: str
    rule: str | None
    format: str
    nbytes_in: int
    nbytes_out: int
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class StreamReport:
    """The outcome of `quantize_file`. Prints as a table."""

    path: Path
    leaves: tuple[StreamedLeaf, ...]
    unused: tuple[Unused, ...]
    resumed: int
    seconds: float

    @property
    def nbytes_in(self) -> int:
        return sum(leaf.nbytes_in for leaf in self.leaves)

    @property
    def nbytes_out(self) -> int:
        return sum(leaf.nbytes_out for leaf in self.leaves)

    def __str__(self) -> str:
        rows = [[x.name, x.format, f"{x.nbytes_in:,}", f"{x.nbytes_out:,}", x.reason] for x in self.leaves]
        total = f"{self.path}: {self.nbytes_in:,} bytes to {self.nbytes_out:,}"
        return "\n".join([*_table.lines(("name", "format", "bytes before", "after", "why"), rows), total])


@options_in_rules
def quantize_file(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    rules: Any = None,
    *,
    default: Choice = "nf4",
    min_size: int = MIN_SIZE,
    skip: Iterable[str] = SKIP,
    axis: Axis = None,
    max_shard_size: int | str | None = None,
    metadata: Mapping[str, str] | None = None,
    progress: Reporter | None = None,
) -> StreamReport:
    """Quantize a checkpoint that need not fit into memory, as `quantize_tree` quantizes a model.

    One tensor and its quantized form are held at a time; tensors that stay dense are copied in small chunks. The target
    appears when it is complete. A run that was killed continues where it stopped when it is started again with the same
    arguments; of an input that changed meanwhile, nothing is reused.

    Args:
        source: a safetensors file, an index of several, a folder that holds one of them, or a GGUF file.
        target: the file to write.
        rules: as for `quantize_tree`: ordered `pattern -> format, configuration or None`, or one format for everything.
            The first pattern that matches the name of a leaf decides. Rules that decide nothing are warned of, and
            listed in the report.
        default: for leaves that no rule matches; None keeps them.
        min_size: matrices with fewer values stay as they are, whatever rules say.
        skip: groups that stay as they are, whatever rules say, as for `quantize_tree`.
        axis: the axis to quantize along for rules that do not say; by default the contracted one, found by the name:
            the last of a `weight`, as PyTorch stores it, and the second last of others.
        max_shard_size: as for `save`.
        metadata: more strings to keep; those of the source are kept too.
        progress: called after each leaf.
    """
    opened = open_source(source)
    planned = plan_source(opened, rules, default=default, min_size=min_size, skip=skip, axis=axis)
    planned.warn()
    return write_quantized(opened, planned, target, max_shard_size=max_shard_size, metadata=metadata, progress=progress)


def plan_source(source: Source, rules: Any = None, **options: Any) -> Plan:
    """What becomes of every leaf of a file; options are those of `plan`."""
    planned = plan([named_leaf(s.leaf.name, s.value) for s in source.leaves], rules, **options)
    pairs = zip(source.leaves, planned.decisions, strict=True)
    return dataclasses.replace(planned, decisions=tuple(d if s.kept is None else _kept(d) for s, d in pairs))


def _kept(decision: Decision) -> Decision:
    """The decision about a leaf that can stay packed."""
    if decision.config is not None and not decision.by_default:
        return decision
    return dataclasses.replace(decision, config=None, reason="it is quantized already")


def write_quantized(
    source: Source,
    planned: Plan,
    target: str | os.PathLike[str],
    *,
    max_shard_size: int | str | None = None,
    metadata: Mapping[str, str] | None = None,
    progress: Reporter | None = None,
) -> StreamReport:
    """Do what was planned for an open source; arguments as for `quantize_file`."""
    begun, target = time.perf_counter(), Path(target)
    check_target(target)
    # The index too: committing the target removes the files of an earlier checkpoint of that name.
    if {p.resolve() for p in source.paths} & {target.resolve(), index_path(target).resolve()}:
        raise CheckpointError("is the source too; write to another file.", file=target)
    steps = _steps(source, planned)
    extra = checked_metadata({**{k: v for k, v in source.metadata.items() if k != KEY}, **(metadata or {})})
    contents = DescribedTree([step.leaf for step in steps], source.structure, source.aliases)
    shards = shards_of(contents.leaves, max_shard_size)
    run = _fingerprint(source.identity, planned, contents, shards, extra)
    try:
        with Output(target, contents, shards, extra, run) as output:
            resumed = output.done
            _run(steps, output, progress)
            path = output.commit()
    except OSError as err:
        if err.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            err.add_note("Free some space and run the same again: it continues where it stopped.")
        raise
    return StreamReport(path, tuple(s.outcome for s in steps), planned.unused, resumed, time.perf_counter() - begun)


@dataclasses.dataclass(frozen=True)
class _Step:
    """One leaf: where it comes from, what was decided, and what it becomes."""

    source: SourceLeaf
    decision: Decision
    leaf: Leaf

    @property
    def outcome(self) -> StreamedLeaf:
        config, before = self.decision.config, self.source.leaf
        plain = "dense" if self.source.read is not None else "as it was"
        kind = plain if config is None else config.label
        return StreamedLeaf(
            before.name, self.decision.rule, kind, before.nbytes, self.leaf.nbytes, self.decision.reason
        )

    def quantize(self, array: Any) -> Any:
        config: Any = self.decision.config
        return quantize_stack(array, config, self.decision.role.batch)


def _steps(source: Source, planned: Plan) -> list[_Step]:
    taken = {s.leaf.name for s in source.leaves} | {t for s in source.leaves for t in s.leaf.tensors}
    shapes: dict[Any, Any] = {}
    steps = []
    for before, decision in zip(source.leaves, planned.decisions, strict=True):
        before = before.kept if before.kept is not None and decision.config is None else before
        step = _Step(before, decision, before.leaf)
        if decision.config is not None:
            dtype = jax.dtypes.canonicalize_dtype(before.value.dtype)
            key = (decision.config, decision.role.batch, before.value.shape, dtype)
            with about(None, before.leaf.name):
                if key not in shapes:
                    shapes[key] = _abstract(step, jax.ShapeDtypeStruct(before.value.shape, dtype))
                step = dataclasses.replace(step, leaf=described_leaf(before.leaf.name, shapes[key], taken))
        steps.append(step)
    return steps


def _abstract(step: _Step, shape: jax.ShapeDtypeStruct) -> Any:
    try:
        return jax.eval_shape(step.quantize, shape)
    except (TypeError, ValueError) as err:
        raise CheckpointError(f"cannot be quantized: {err}") from err


def _fingerprint(identity: Any, planned: Plan, contents: DescribedTree, shards: Any, extra: Any) -> str:
    """What must not change between two runs for the second to continue the first."""
    names = [[leaf.name for leaf in shard] for shard in shards]
    tree = tree_metadata(contents), leaves_metadata(contents.leaves)
    decided = [[None if d.config is None else d.config.to_json(), d.role.batch] for d in planned.decisions]
    text = json.dumps([identity, decided, names, tree, extra, jax.__version__], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _run(steps: Sequence[_Step], output: Output, progress: Reporter | None) -> None:
    total = sum(step.source.leaf.nbytes for step in steps)
    largest = max((step.source.leaf.nbytes for step in steps if step.decision.config is not None), default=0)
    # One buffer for all: JAX may hold on to the memory of an array for a while after it was deleted.
    buffer = aligned_empty(largest)
    done = 0
    for number, step in enumerate(steps):
        before = step.source.leaf
        if number >= output.done:
            with about(None, before.name):
                if number + 1 < len(steps):
                    steps[number + 1].source.announce()
                output.begin()
                _do(step, output, buffer)
                output.finish()
        done += before.nbytes
        if progress is not None:
            progress(Progress(before.name, done, total))


def _do(step: _Step, output: Output, buffer: np.ndarray) -> None:
    if step.decision.config is None:
        for name, chunks in step.source.copy.items():
            output.write(name, chunks())
        return
    dense = jax.device_put(step.source.read(buffer))  # pyright: ignore[reportOptionalCall] - planned so
    made = jax.block_until_ready(step.quantize(dense))
    dense.delete()
    leaf = described_leaf(step.leaf.name, made, set())
    for name, array in zip(step.leaf.tensors, leaf.tensors.values(), strict=True):
        output.write(name, [host(array, name)])
