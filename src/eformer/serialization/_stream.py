"""`quantize_file`: from one checkpoint to a quantized one, a tensor at a time."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from eformer._quantize.paths import Leaf as Place
from eformer._quantize.roles import roles_of
from eformer._quantize.rules import Recipe, Rules, Unused
from eformer._quantize.tree import encode
from eformer.errors import CheckpointError

from . import _contents
from ._contents import KEY, Contents, Leaf, about, described_leaf
from ._mapped import aligned_empty
from ._output import Output
from ._save import check_target, checked_metadata, shards_of
from ._sets import index_path
from ._source import Source, SourceLeaf, open_source

_FLOATS = ("float32", "bfloat16", "float16", "float64")


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
    """The outcome of `quantize_file`."""

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


@dataclasses.dataclass(frozen=True)
class Progress:
    """Where a run stands: bytes of input that are done, out of how many, and the leaf it did last."""

    name: str
    done: int
    total: int


@dataclasses.dataclass(frozen=True)
class _Step:
    """One leaf: where it comes from, what it becomes, and how (None: it is copied)."""

    source: SourceLeaf
    leaf: Leaf
    recipe: Recipe | None
    outcome: StreamedLeaf
    batch: int = 0  # leading axes that number matrices

    def quantize(self, array: Any) -> Any:
        """The leaf as `quantize_tree` makes it: every matrix of a stack as if it stood alone."""
        return array if self.recipe is None else encode(self.recipe, array, self.batch)


def quantize_file(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    rules: Any,
    *,
    axis: int | None = None,
    max_shard_size: int | str | None = None,
    metadata: Mapping[str, str] | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> StreamReport:
    """Quantize a checkpoint that need not fit into memory.

    One tensor and its quantized form are held at a time; tensors that stay dense are copied in small chunks. The target
    appears when it is complete. A run that was killed continues where it stopped when it is started again with the same
    arguments; of an input that changed meanwhile, nothing is reused.

    Args:
        source: a safetensors file, an index of several, a folder that holds one of them, or a GGUF file (decoded).
        target: the file to write.
        rules: what `Rules` takes: ordered `pattern -> format, configuration or None`. The first that matches the name
            of a leaf decides; leaves no rule matches stay as they are, and so do those that are not floating, are
            scalars, or are quantized already.
        axis: the axis to quantize along for rules that do not say. Checkpoints of PyTorch keep the contracted axis
            last: -1.
        max_shard_size: as for `save`.
        metadata: more strings to keep; those of the source are kept too.
        progress: called after each leaf.
    """
    begun, target, rules = time.perf_counter(), Path(target), Rules(rules)
    opened = _open(source, target)
    steps = _plan(opened, rules, axis)
    extra = checked_metadata({**{k: v for k, v in opened.metadata.items() if k != KEY}, **(metadata or {})})
    contents = Contents([step.leaf for step in steps], opened.structure, opened.aliases)
    shards = [list(contents.leaves)] if max_shard_size is None else list(shards_of(contents.leaves, max_shard_size))
    batches = [step.batch for step in steps]
    run = _fingerprint([opened.identity, batches], rules, axis, contents, shards, extra)
    with Output(target, contents, shards, extra, run) as output:
        resumed = output.done
        _run(steps, output, progress)
        path = output.commit()
    unused = tuple(rules.unused(step.outcome.name for step in steps))
    return StreamReport(path, tuple(s.outcome for s in steps), unused, resumed, time.perf_counter() - begun)


def _open(source: str | os.PathLike[str], target: Path) -> Source:
    opened = open_source(source)
    check_target(target)
    # The index too: committing the target removes the files of an earlier checkpoint of that name.
    if {p.resolve() for p in opened.paths} & {target.resolve(), index_path(target).resolve()}:
        raise CheckpointError("is the source too; write to another file.", file=target)
    return opened


def _plan(source: Source, rules: Rules, axis: int | None) -> list[_Step]:
    taken = {s.leaf.name for s in source.leaves} | {t for s in source.leaves for t in s.leaf.tensors}
    shapes: dict[Any, Any] = {}
    roles = roles_of([Place(tuple(re.split(r"[./]", s.leaf.name)), s.dense) for s in source.leaves])
    return [
        _step(leaf, role.batch, rules, axis, taken, shapes) for leaf, role in zip(source.leaves, roles, strict=True)
    ]


def _step(
    source: SourceLeaf, batch: int, rules: Rules, axis: int | None, taken: set[str], shapes: dict[Any, Any]
) -> _Step:
    name, nbytes = source.leaf.name, source.leaf.nbytes
    rule = rules.first(name)
    pattern = None if rule is None else rule.pattern
    wanted = None if rule is None else rule.recipe
    reason = "" if wanted is None else _obstacle(source)
    if wanted is None or reason:
        kind = "dense" if source.dense is not None else "as it was"
        return _Step(source, source.leaf, None, StreamedLeaf(name, pattern, kind, nbytes, nbytes, reason))
    recipe = wanted if wanted.axis is not None else dataclasses.replace(wanted, axis=axis)
    shape, dtype = source.dense.shape, jax.dtypes.canonicalize_dtype(source.dense.dtype)  # pyright: ignore[reportOptionalMemberAccess]
    key = (recipe, batch, shape, dtype)
    with about(None, name):
        if key not in shapes:
            shapes[key] = _abstract(recipe, batch, jax.ShapeDtypeStruct(shape, dtype))
        leaf = described_leaf(name, shapes[key], taken)
    outcome = StreamedLeaf(name, pattern, str(recipe.config.dtype), nbytes, leaf.nbytes)
    return _Step(source, leaf, recipe, outcome, batch)


def _obstacle(source: SourceLeaf) -> str:
    """Why a leaf that a rule matches stays as it is, or nothing."""
    if source.dense is None:
        return "it is not a dense array"
    if source.dense.dtype.name not in _FLOATS:
        return f"its dtype is {source.dense.dtype.name}"
    return "" if source.dense.ndim else "it is a scalar"


def _abstract(recipe: Recipe, batch: int, shape: jax.ShapeDtypeStruct) -> Any:
    try:
        return jax.eval_shape(lambda array: encode(recipe, array, batch), shape)
    except (TypeError, ValueError) as err:
        raise CheckpointError(f"cannot be quantized as {recipe}: {err}") from err


def _fingerprint(identity: Any, rules: Rules, axis: Any, contents: Contents, shards: Any, extra: Any) -> str:
    """What must not change between two runs for the second to continue the first."""
    names = [[leaf.name for leaf in shard] for shard in shards]
    tree = _contents.tree_metadata(contents), _contents.leaves_metadata(contents.leaves)
    text = json.dumps([identity, rules.describe(), axis, names, tree, extra, jax.__version__], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _run(steps: Sequence[_Step], output: Output, progress: Callable[[Progress], None] | None) -> None:
    total = sum(step.outcome.nbytes_in for step in steps)
    largest = max((step.outcome.nbytes_in for step in steps if step.recipe is not None), default=0)
    # One buffer for all: JAX may hold on to the memory of an array for a while after it was deleted.
    buffer = aligned_empty(largest)
    done = 0
    for number, step in enumerate(steps):
        if number >= output.done:
            with about(None, step.outcome.name):
                if number + 1 < len(steps):
                    steps[number + 1].source.announce()
                output.begin()
                _do(step, output, buffer)
                output.finish()
        done += step.outcome.nbytes_in
        if progress is not None:
            progress(Progress(step.outcome.name, done, total))


def _do(step: _Step, output: Output, buffer: np.ndarray) -> None:
    if step.recipe is None:
        for name, chunks in step.source.copy.items():
            output.write(name, chunks())
        return
    dense = jax.device_put(step.source.read(buffer))  # pyright: ignore[reportOptionalCall] - planned so
    made = jax.block_until_ready(step.quantize(dense))
    dense.delete()
    leaf = described_leaf(step.leaf.name, made, set())
    for name, array in zip(step.leaf.tensors, leaf.tensors.values(), strict=True):
        output.write(name, [_contents.host(array, name)])
