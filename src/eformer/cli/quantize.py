"""`eformer quantize`: from one checkpoint to a quantized one, a tensor at a time."""

from __future__ import annotations

import argparse
import collections
import json
from pathlib import Path
from typing import Any

from eformer._kernels.parameters import ACTIVATIONS
from eformer._quantize.config import METHODS
from eformer._quantize.leaves import GROUPS
from eformer._quantize.own import imported
from eformer._quantize.plan import MIN_SIZE, SKIP, Plan
from eformer._quantize.tree import reporter
from eformer._table import printable
from eformer.errors import AlreadyQuantizedError, CheckpointError
from eformer.ops.quantization import QuantizationType
from eformer.serialization import GgufFile, StreamReport
from eformer.serialization.streaming.quantize_file import open_source, plan_source, write_quantized
from eformer.serialization.streaming.quantize_folder import SHARD, check_folders, write_folder

from ._calibrated import TOKENS, with_method, write_calibrated
from ._calibrated import check as check_calibration
from ._commands import OK, WrongUse, add_json, print_json, print_table
from .inspect import check_exists

_KEEP = ("none", "dense", "keep")


def from_options(options: argparse.Namespace) -> dict[str, Any]:
    """Arguments of the planner. Rules of the command line come before those of a file."""
    rules = [_rule(text) for text in options.rule]
    if options.rules is not None:
        rules += _rules_file(options.rules)
    default: Any = "nf4" if options.format is None else _choice(options.format)
    given = {"double_quant": True} if options.double_quant else {}
    given |= {} if options.block_size is None else {"block_size": options.block_size}
    given |= {"symmetric": False} if options.asymmetric else {}
    given |= {} if options.activations is None else {"activations": options.activations}
    if given:
        if default is None:
            raise WrongUse(f"{', '.join(given)}: an option of a format, and --format is {options.format!r}.")
        default = {"dtype": default, **given}
    elif options.format == "nf4":  # by name, and not because nothing else was said
        default = {"dtype": "nf4"}
    skip = tuple(name for name in options.skip.split(",") if name)
    return {"rules": rules, "default": default, "axis": options.axis, "min_size": options.min_size, "skip": skip}


def _rule(text: str) -> tuple[str, Any]:
    pattern, equals, choice = text.rpartition("=")
    if not equals or not pattern:
        raise WrongUse(f"--rule {text!r} is not of the form PATTERN=FORMAT, such as '*embed*=int8' or '*norm*=none'.")
    return pattern, _choice(choice)


def _choice(text: str) -> Any:
    return None if text.lower() in _KEEP else imported(text) if ":" in text else text


def _rules_file(path: Path) -> list[tuple[str, Any]]:
    try:
        found = json.loads(path.read_text())
    except ValueError as err:
        raise WrongUse(f"--rules {path} is not JSON: {err}.") from err
    if not isinstance(found, dict):
        raise WrongUse(f"--rules {path} does not hold an object of patterns and formats.")
    return [(pattern, _choice(c) if isinstance(c, str) else c) for pattern, c in found.items()]


def described(planned: Plan) -> dict[str, Any]:
    """The plan as plain data."""
    lines = [
        {
            "path": ".".join(d.leaf.names),
            "format": "dense" if d.config is None else d.config.label,
            "axis": None if d.config is None else d.config.axis,
            "reason": d.reason,
        }
        for d in planned.decisions
    ]
    return {"tensors": lines, "unsure": planned.unsure, "warnings": planned.warnings}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    names = ", ".join(str(kind) for kind in QuantizationType)
    parser.add_argument(
        "source",
        type=Path,
        help="a folder with config.json and weights, a safetensors file, an index, a folder of them, a PyTorch file "
        "(read by torch.load with weights_only=True), or a GGUF file",
    )
    parser.add_argument(
        "target",
        type=Path,
        help="the safetensors file to write; or, if the source is a folder with config.json, a folder, which also gets "
        "config.json and the tokenizer",
    )
    parser.add_argument("--force", action="store_true", help="replace what the target holds")
    parser.add_argument("--format", help=f"for matrices no rule matches: {names}, or none (default: nf4)")
    parser.add_argument("--double-quant", action="store_true", help="for --format nf4: quantize the scales too")
    parser.add_argument(
        "--block-size",
        type=int,
        help="for nf4 and int2 to int6: values that share a scale (default: 64); int8 and fp8 have blocks only if "
        "it is given (fp8: 128, for 128 x 128)",
    )
    parser.add_argument("--asymmetric", action="store_true", help="for integers: a zero point for every block")
    parser.add_argument(
        "--activations",
        choices=tuple(ACTIVATIONS),
        help="also round the inputs of products to this, and multiply codes with codes",
    )
    parser.add_argument(
        "--rule",
        action="append",
        default=[],
        metavar="PATTERN=FORMAT",
        help="a glob over paths, or a regular expression after re:, and a format or none; the first that matches wins",
    )
    parser.add_argument(
        "--rules", type=Path, metavar="JSON", help="a file with a JSON object of pattern: format, or pattern: {options}"
    )
    parser.add_argument("--axis", type=int, help="the axis to quantize along (default: the contracted one, by name)")
    parser.add_argument(
        "--min-size", type=int, default=MIN_SIZE, help=f"tensors with fewer values stay dense (default: {MIN_SIZE})"
    )
    parser.add_argument(
        "--skip",
        default=",".join(SKIP),
        metavar="GROUPS",
        help=f"the groups that stay dense, among {', '.join(GROUPS)} (default: {','.join(SKIP)})",
    )
    parser.add_argument(
        "--max-shard-size",
        metavar="SIZE",
        help="split the result into files of this size, such as 2GB (default: one file; in a folder 5GB)",
    )
    parser.add_argument(
        "--method", choices=METHODS, help="how codes and scales are chosen (default: round; gptq with --calibrate)"
    )
    parser.add_argument(
        "--calibrate",
        type=Path,
        metavar="TEXT",
        help="for folders and GGUF files: the model reads this file first, so that --method knows what matrices are "
        "multiplied with",
    )
    parser.add_argument(
        "--calibration-tokens",
        type=int,
        default=TOKENS,
        metavar="N",
        help=f"tokens of the text to read (default: {TOKENS})",
    )
    parser.add_argument("--dry-run", action="store_true", help="only show what would be done")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Quantize the file or folder; rules without effect are named in warnings."""
    check_exists(options.source)
    to_folder = _check_target(options)
    check_calibration(options, to_folder)
    source = open_source(options.source)
    try:
        planned = plan_source(source, **from_options(options))
    except AlreadyQuantizedError as err:
        raise WrongUse(
            f"{options.source}: {err.what} is already quantized, with {err.found}, but {err.asked} was requested. "
            f"Nothing is quantized twice: start from the dense checkpoint, or keep it: --rule {err.what[:-1]}=none'."
        ) from err
    except (TypeError, ValueError) as err:
        raise WrongUse(str(err)) from err
    planned = planned if options.calibrate is not None else with_method(planned, options.method)
    if options.dry_run:
        found = described(planned)
        print_json(found) if options.json else show_plan(found)
        return OK
    size = options.max_shard_size or (SHARD if to_folder else None)
    notes = tokenizer_notes(source.opened)
    with reporter(False if options.quiet else None, "quantizing") as tell:
        try:
            if options.calibrate is not None:
                done = write_calibrated(options, planned, size, tell, {**source.metadata, **notes})
            elif to_folder:
                done = write_folder(source, planned, options.source, options.target, max_shard_size=size, progress=tell)
            else:
                done = write_quantized(
                    source, planned, options.target, max_shard_size=size, metadata=notes, progress=tell
                )
        except CheckpointError:
            raise
        except ValueError as err:  # a size that cannot be read
            raise WrongUse(str(err)) from err
    found = {**summary(done, planned.warnings), "unsure": planned.unsure}
    print_json(found) if options.json else show(found)
    return OK


def _check_target(options: argparse.Namespace) -> bool:
    """Whether the target is a folder; refuses one that cannot be written, or that holds something."""
    source, target = options.source, options.target
    if target.suffix == ".gguf":
        raise WrongUse(f"{target}: GGUF files are read, not written; name a .safetensors file or a folder.")
    if (source / "config.json").is_file() and target.suffix != ".safetensors":
        check_folders(source, target, overwrite=options.force or options.dry_run)
        return True
    there = [path for path in (target, target.with_name(f"{target.name}.index.json")) if path.is_file()]
    if there and not (options.force or options.dry_run) and source.resolve() != target.resolve():
        raise WrongUse(f"{there[0]} exists already; name another file, or replace it with --force.")
    return False


def tokenizer_notes(opened: Any) -> dict[str, str]:
    """What `eformer generate` needs of a GGUF file besides its tensors and the numbers that are kept anyway."""
    if not isinstance(opened, GgufFile):
        return {}
    lists = {k: v for k, v in opened.metadata.items() if k.startswith("tokenizer.") and not isinstance(v, str)}
    return {"tokenizer": json.dumps(lists, default=lambda array: array.tolist())} if lists else {}


def summary(done: StreamReport, warnings: list[str]) -> dict[str, Any]:
    """What was done, as plain data."""
    formats: dict[str, list[int]] = collections.defaultdict(lambda: [0, 0, 0])
    for leaf in done.leaves:
        sums = formats[leaf.format]
        sums[0], sums[1], sums[2] = sums[0] + 1, sums[1] + leaf.nbytes_in, sums[2] + leaf.nbytes_out
    return {
        "file": str(done.path),
        "formats": {k: dict(zip(("tensors", "nbytes_in", "nbytes_out"), v, strict=True)) for k, v in formats.items()},
        "nbytes_in": done.nbytes_in,
        "nbytes_out": done.nbytes_out,
        "seconds": done.seconds,
        "bytes_per_second": done.nbytes_in / max(done.seconds, 1e-9),
        "resumed": done.resumed,
        "warnings": warnings,
    }


def show(found: dict[str, Any]) -> None:
    print_table(
        found["file"],
        ["format", "tensors", "bytes before", "bytes after"],
        [
            [name, str(f["tensors"]), f"{f['nbytes_in']:,}", f"{f['nbytes_out']:,}"]
            for name, f in found["formats"].items()
        ],
    )
    share = found["nbytes_out"] / max(found["nbytes_in"], 1)
    print(
        f"{found['nbytes_in'] / 1e6:,.1f} MB to {found['nbytes_out'] / 1e6:,.1f} MB ({share:.1%}) in "
        f"{found['seconds']:.1f} s, {found['bytes_per_second'] / 1e6:,.0f} MB/s"
    )
    if found["resumed"]:
        print(f"{found['resumed']} tensors were finished by an earlier run")
    if found["unsure"]:
        names, more = ", ".join(map(printable, found["unsure"][:5])), len(found["unsure"]) - 5
        print(f"left dense, as it is unclear whether a product uses them: {names}{f' and {more} more' * (more > 0)}")
    for line in found["warnings"]:
        print(f"warning: {line}")


def show_plan(found: dict[str, Any]) -> None:
    rows = [[t["path"], t["format"], json.dumps(t["axis"]), t["reason"]] for t in found["tensors"]]
    print_table("plan", ["path", "format", "axis", "why"], rows)
    for line in found["warnings"]:
        print(f"warning: {line}")
