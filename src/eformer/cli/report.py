"""`eformer report`: what a checkpoint holds, what quantizing it cost, and what devices of a mesh would hold of it."""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.tree_util as jtu
import numpy as np
from jax.sharding import AbstractMesh, PartitionSpec

from eformer._core import ImplicitArray
from eformer._jax.avals import mesh_axes
from eformer._quantize.leaves import Role, named_leaf, nbytes_of, roles_of
from eformer._quantize.report import COLUMNS, Report
from eformer._quantize.report import report as report_of
from eformer.errors import CheckpointError
from eformer.serialization.checkpoint.parts import specs_of

from ._commands import OK, Failure, WrongUse, add_json, print_json, print_table
from .inspect import open_checkpoint


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, help="a safetensors file, an index of several, their folder, or a GGUF file")
    parser.add_argument("--against", type=Path, metavar="ORIGINAL", help="measure errors against this checkpoint")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw sizes and errors (needs matplotlib)")
    parser.add_argument("--mesh", metavar="AXIS=SIZE,...", help="also show what each device of such a mesh would hold")
    parser.add_argument(
        "--spec",
        action="append",
        default=[],
        metavar="PATTERN=AXES",
        help="with --mesh: split the leaves a pattern matches along these mesh axes, one per axis of the array, "
        "'-' for none and '+' for several: '*up*=-,model'. Others are split as suggested.",
    )
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Print the report, and draw it with --plot."""
    leaves = dict(open_checkpoint(options.file))
    found = report_of(leaves, None if options.against is None else _original(options.against, leaves))
    if options.plot is not None:
        try:
            found.plot(options.plot)
        except (ImportError, ValueError) as err:  # no matplotlib, or a suffix that it does not know
            raise Failure(str(err)) from err
    mesh = _mesh_section(options, leaves)
    if options.json:
        print_json({"file": str(options.file), **json.loads(found.to_json()), **({"mesh": mesh} if mesh else {})})
        return OK
    show(str(options.file), found)
    if mesh:
        _show_mesh(mesh)
    return OK


def _original(path: Path, leaves: dict[str, Any]) -> dict[str, Any]:
    opened = open_checkpoint(path)
    shared = [name for name in leaves if name in opened]
    if not shared:
        there = ", ".join(map(repr, list(opened)[:3]))
        raise Failure(f"--against {path} has none of the tensors of the report; its names look like {there}.")
    original = {name: opened[name] for name in shared}
    if any(isinstance(x, ImplicitArray) for x in original.values()) and not any(
        isinstance(x, ImplicitArray) for x in leaves.values()
    ):
        raise Failure(f"--against {path} is quantized, and the other checkpoint is not: exchange the two.")
    for name, value in original.items():
        here, before = (tuple(getattr(x, "shape", ())) for x in (leaves[name], value))
        if before != here:
            raise Failure(f"--against {path} is another model: {name!r} has the shape {before} there, {here} here.")
    return original


def show(title: str, found: Report) -> None:
    print_table(title, COLUMNS, found.rows(digits=4))
    share = found.nbytes / max(found.dense_nbytes, 1)
    print(
        f"{found.nbytes:,} bytes, {found.bits_per_weight:.2f} bits per weight; "
        f"{found.dense_nbytes:,} bytes dense, {share:.1%} of that held"
    )


# -- on a mesh ---------------------------------------------------------------------------------------------------------
# No devices are needed. Specs are given, or suggested: kernels are split along their outputs over the mesh axis `model`
# (or the last one), those that lead back to the width of the model along their inputs, embeddings along the vocabulary,
# stacks of experts along the experts; what does not divide stays whole, with the reason.

# Kernels whose output is added to the residual stream: their inputs are what the kernels before have split.
_BACK = re.compile(r"(^|[._/])(w?o|w2|out|output|down|fc2|c_proj|dense_4h_to_h|(o|out|down|output)_proj|wo)([._/]|$)")


@dataclasses.dataclass(frozen=True)
class Placed:
    """One leaf on a mesh: bytes per device, and bytes that are summed across devices per row of x."""

    path: str
    spec: str
    nbytes: int
    per_device: int
    summed: int
    note: str = ""


def _mesh_section(options: argparse.Namespace, leaves: Mapping[str, Any]) -> dict[str, Any] | None:
    """Every leaf and the totals, or None without --mesh."""
    if options.mesh is None:
        if options.spec:
            raise WrongUse("--spec needs --mesh.")
        return None
    mesh, given = parsed_mesh(options.mesh), [parsed_spec(text) for text in options.spec]
    found = placements(leaves, mesh, given)
    return {
        "axes": dict(mesh.shape),
        "devices": mesh.size,
        "per_device": sum(leaf.per_device for leaf in found),
        "nbytes": sum(leaf.nbytes for leaf in found),
        "summed_per_row": sum(leaf.summed for leaf in found),
        "leaves": [dataclasses.asdict(leaf) for leaf in found],
    }


def parsed_mesh(text: str) -> AbstractMesh:
    """
    >>> dict(parsed_mesh("data=4,model=8").shape)
    {'data': 4, 'model': 8}
    """
    pairs = [part.split("=") for part in text.split(",")]
    if not all(len(p) == 2 and p[0].isidentifier() and p[1].isdecimal() and int(p[1]) for p in pairs):
        raise WrongUse(f"--mesh {text!r} is not a list of axes and sizes; write for example data=4,model=8.")
    names = tuple(name for name, _ in pairs)
    if len(set(names)) != len(names):
        raise WrongUse(f"--mesh {text!r} names an axis twice.")
    return AbstractMesh(tuple(int(size) for _, size in pairs), names)


def parsed_spec(text: str) -> tuple[str, PartitionSpec]:
    """
    >>> parsed_spec("*up*=-,data+model") == ("*up*", PartitionSpec(None, ("data", "model")))
    True
    """
    pattern, _, axes = text.rpartition("=")
    if not pattern or not axes:
        raise WrongUse(f"--spec {text!r} is not of the form PATTERN=AXES; write for example '*up*=-,model'.")
    entries = [tuple(part.split("+")) for part in axes.split(",")]
    return pattern, PartitionSpec(*(None if e == ("-",) else e[0] if len(e) == 1 else e for e in entries))


def placements(
    leaves: Mapping[str, Any], mesh: AbstractMesh, given: Sequence[tuple[str, PartitionSpec]] = ()
) -> list[Placed]:
    """Where every leaf goes. A spec that was given and does not fit is an error that names the leaf."""
    arrays = {name: value for name, value in leaves.items() if hasattr(value, "shape") and hasattr(value, "dtype")}
    unused = [p for p, _ in given if not any(_matches(p, name) for name in arrays)]
    if unused:
        raise WrongUse(f"--spec {unused[0]!r} matches no leaf; names look like {list(arrays)[:3]}.")
    roles = roles_of([named_leaf(name, value) for name, value in arrays.items()])
    found = []
    for (name, value), role in zip(arrays.items(), roles, strict=True):
        wanted = next((spec for pattern, spec in given if _matches(pattern, name)), None)
        found.append(
            _suggested(name, value, role, mesh) if wanted is None else _placed(name, value, role, mesh, wanted)
        )
    return found


def _matches(pattern: str, name: str) -> bool:
    return fnmatch.fnmatchcase(name.replace(".", "/"), pattern.replace(".", "/"))


def _suggested(name: str, value: Any, role: Role, mesh: AbstractMesh) -> Placed:
    notes = []
    for axis in _wishes(name, value, role):
        entries: list[Any] = [None] * len(value.shape)
        entries[axis] = "model" if "model" in mesh.shape else mesh.axis_names[-1]
        try:
            return _placed(name, value, role, mesh, PartitionSpec(*entries), "; ".join(notes))
        except CheckpointError as err:
            why = re.search(r"would cut .*|has \d+ entries.*", str(err))
            notes.append(f"not along axis {axis % len(value.shape)}: {why[0].rstrip('.') if why else err}")
    return _placed(name, value, role, mesh, PartitionSpec(), "; ".join(notes))


def _wishes(name: str, value: Any, role: Role) -> list[int]:
    """Axes to split along, the best first."""
    if len(value.shape) < 2 or role.kind in ("norm", "bias", "router", "position", "conv"):
        return []
    if role.batch and "expert" in name.lower():
        return [0, role.outputs[0], role.inputs[0]]
    if role.kind == "embedding":
        return [-2, -1]
    sides = (role.inputs[0], role.outputs[0]) if _BACK.search(name) else (role.outputs[0], role.inputs[0])
    return list(sides)


def _placed(name: str, value: Any, role: Role, mesh: AbstractMesh, spec: PartitionSpec, note: str = "") -> Placed:
    try:
        specs = specs_of(value, mesh, spec)
    except CheckpointError as err:
        raise CheckpointError(err.what, tensor=name, fix=err.fix) from err
    parts = list(zip(jtu.tree_leaves(value), specs, strict=True))
    per_device = sum(nbytes_of(part) // _shares(s, mesh) for part, s in parts)
    text = ", ".join("+".join(mesh_axes(entry)) or "-" for entry in spec) or "-"
    return Placed(
        name, text, sum(nbytes_of(part) for part, _ in parts), per_device, _summed(value, role, mesh, spec), note
    )


def _shares(spec: PartitionSpec, mesh: AbstractMesh) -> int:
    """Into how many parts a spec splits an array."""
    return math.prod(mesh.shape[name] for entry in spec for name in mesh_axes(entry))


def _summed(value: Any, role: Role, mesh: AbstractMesh, spec: PartitionSpec) -> int:
    """Bytes of a partial result per row of x and device, if a contracted axis (or the vocabulary) is split."""
    ndim = len(value.shape)
    if ndim < 2 or role.kind not in ("kernel", "head", "embedding"):
        return 0
    split = {axis - ndim for axis, entry in enumerate(spec) if entry is not None}
    if role.kind == "embedding":
        return value.shape[-1] * np.dtype(value.dtype).itemsize if -2 in split else 0
    if not split.intersection(role.inputs):
        return 0
    kept = math.prod(value.shape[axis] for axis in role.outputs)
    outputs = PartitionSpec(*(spec[ndim + a] if ndim + a < len(spec) else None for a in role.outputs))
    return 4 * kept // _shares(outputs, mesh)  # partial sums are float32


def _show_mesh(data: Mapping[str, Any]) -> None:
    axes = ", ".join(f"{name}={size}" for name, size in data["axes"].items())
    print_table(
        f"on a mesh of {axes} ({data['devices']} devices)",
        ["path", "split along", "bytes", "per device", "summed per row", "note"],
        [
            [x["path"], x["spec"], f"{x['nbytes']:,}", f"{x['per_device']:,}", f"{x['summed']:,}", x["note"]]
            for x in data["leaves"]
        ],
    )
    share = data["per_device"] / max(data["nbytes"], 1)
    print(
        f"{data['per_device']:,} bytes per device, {share:.2%} of {data['nbytes']:,}; "
        f"each row of x costs sums of {data['summed_per_row']:,} bytes per device"
    )
