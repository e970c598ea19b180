"""Changes one line of `src` at a time and asks the tests whether they notice.

    python tests/mutate.py --count 30 --seed 0            # thirty lines, spread over the rooms
    python tests/mutate.py --count 30 --seed 0 --only 4 7 # two of them again
    python tests/mutate.py --count 30 --files 5           # quicker: the five likeliest test files of each room
    python tests/mutate.py --within _calibrate _formats/cache  # in these folders and files alone, each in turn

The checkout is left alone: the changed tree is a copy, and pytest imports `eformer` from there. A room's test files are
run in order of how often they name what the changed module defines, and the first failure ends the run. The kernels of
NVIDIA GPUs are left out: without a GPU no test can reach them.
"""

from __future__ import annotations

import argparse
import ast
import copy
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
# Room: the folders and files that test it.
ROOMS = {
    "_core": ["core"],
    "_jax": ["core"],
    "_kernels": ["kernels", "formats"],
    "_formats": ["formats"],
    "_quantize": ["quantize", "formats"],
    "_lora": ["lora", "formats"],
    "_calibrate": ["calibrate"],
    "serialization": ["serialization", "cli"],
    "integrations": ["integrations"],
    "cli": ["cli"],
    "models": ["models"],
}
LEFT_OUT = ("_kernels/cuda",)
COMPARISONS = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Lt: ast.GtE,
    ast.GtE: ast.Lt,
    ast.Gt: ast.LtE,
    ast.LtE: ast.Gt,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
ARITHMETIC = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult}
# An editable installation finds the checkout before any path; its finder is taken out.
PYTEST = (
    "import sys; sys.meta_path[:] = [f for f in sys.meta_path if 'Redirecting' not in type(f).__name__]; "
    "sys.path.insert(0, sys.argv.pop(1)); import pytest; sys.exit(pytest.main(sys.argv[1:]))"
)


class Mutant(NamedTuple):
    path: Path  # below src/eformer
    line: int
    start: int  # bytes of the line
    end: int
    new: str
    what: str

    def apply(self, source: bytes) -> bytes:
        lines = source.split(b"\n")
        line = lines[self.line - 1]
        lines[self.line - 1] = line[: self.start] + self.new.encode() + line[self.end :]
        return b"\n".join(lines)


def variants(node: ast.AST) -> Iterator[tuple[str, Any]]:
    """What a node may be changed into, each with a word for it."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARISONS:
        yield "comparison", ast.Compare(node.left, [COMPARISONS[type(node.ops[0])](), *node.ops[1:]], node.comparators)
    elif isinstance(node, ast.BoolOp):
        yield "and/or", ast.BoolOp(ast.And() if isinstance(node.op, ast.Or) else ast.Or(), node.values)
    elif isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
        yield "arithmetic", ast.BinOp(node.left, ARITHMETIC[type(node.op)](), node.right)
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield "constant", ast.Constant(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        yield "constant", ast.Constant(node.value + 1)
    elif isinstance(node, ast.IfExp):
        yield "condition", ast.IfExp(ast.UnaryOp(ast.Not(), node.test), node.body, node.orelse)
    elif isinstance(node, ast.Call) and node.keywords:
        fewer = copy.copy(node)
        fewer.keywords = node.keywords[:-1]
        yield "argument dropped", fewer
    elif isinstance(node, ast.Call) and len(node.args) > 1:
        yield "argument dropped", ast.Call(node.func, node.args[:-1], node.keywords)


def worth_changing(node: ast.AST) -> Iterator[ast.AST]:
    """Nodes that do something: no annotations, no messages, no imports."""
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list", "exc", "msg") or isinstance(node, ast.JoinedStr):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield child
                yield from worth_changing(child)


def mutants_of(path: Path, source: str) -> list[Mutant]:
    found = []
    for node in worth_changing(ast.parse(source)):
        places: list[tuple[str, ast.AST, Any]] = [(what, node, new) for what, new in variants(node)]
        if isinstance(node, ast.If | ast.While):
            places.append(("condition", node.test, ast.UnaryOp(ast.Not(), node.test)))
        if isinstance(node, ast.Return) and node.value and ast.unparse(node.value) != "None":
            places.append(("return", node.value, ast.Constant(None)))
        for what, old, new in places:
            if old.lineno == old.end_lineno:  # pyright: ignore[reportAttributeAccessIssue]
                text = ast.unparse(new)
                if not isinstance(new, ast.Constant | ast.Call):
                    text = f"({text})"
                found.append(Mutant(path, old.lineno, old.col_offset, old.end_col_offset, text, what))  # pyright: ignore
    return found


def chosen(count: int, seed: int, within: Sequence[str]) -> list[Mutant]:
    """`count` mutants of different lines, from every room (folder or file) of `within` in turn."""
    rng, package = random.Random(seed), ROOT / "src" / "eformer"
    rooms: dict[str, list[Mutant]] = {room: [] for room in within}
    for path in sorted(package.rglob("*.py")):
        inside = path.relative_to(package)
        for room in within:
            if inside.is_relative_to(room) and not str(inside).startswith(LEFT_OUT):
                rooms[room] += mutants_of(inside, path.read_text())
    for found in rooms.values():
        rng.shuffle(found)
    taken: list[Mutant] = []
    while len(taken) < count and any(rooms.values()):
        for found in rooms.values():
            lines = {(mutant.path, mutant.line) for mutant in taken}
            while found and (found[-1].path, found[-1].line) in lines:
                found.pop()
            if found:
                taken.append(found.pop())
    return taken[:count]


def likely_files(mutant: Mutant, most: int | None) -> list[str]:
    """Of the room, the likeliest to notice first: those that name the module or what it defines."""
    source = ast.parse((ROOT / "src" / "eformer" / mutant.path).read_text())
    common = mutant.path.stem in ("__init__", "array", "codec")
    stem = (mutant.path.parent.name if common else mutant.path.stem).strip("_")
    words = {stem, *(node.name for node in source.body if isinstance(node, ast.FunctionDef | ast.ClassDef))}
    files = [path for folder in ROOMS[mutant.path.parts[0]] for path in (ROOT / "tests" / folder).rglob("test_*.py")]

    def order(path: Path) -> tuple[Any, ...]:
        text = path.read_text()
        return stem not in path.stem, -sum(text.count(word) for word in words), len(path.parts), path

    return [str(path.relative_to(ROOT)) for path in sorted(files, key=order)[:most]]


def noticed_by(mutant: Mutant, source: Path, most: int | None) -> str | None:
    """The first test that fails, or None if all pass."""
    target = source / "eformer" / mutant.path
    original = target.read_bytes()
    target.write_bytes(mutant.apply(original))
    try:
        result = subprocess.run(
            [sys.executable, "-B", "-c", PYTEST, str(source), "-x", "-q", "-n", "0", "-p", "no:cacheprovider"]
            + [*likely_files(mutant, most), "-m", "not thorough"],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(source)},
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        target.write_bytes(original)
    if result.returncode == 0:
        return None
    failed = [line for line in result.stdout.splitlines() if line.startswith(("FAILED", "ERROR", "E  "))]
    return failed[-1][:150] if failed else (result.stdout + result.stderr)[-200:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--files", type=int, help="run at most so many test files per mutant")
    parser.add_argument("--within", nargs="+", default=list(ROOMS), help="folders and files of src/eformer")
    parser.add_argument("--only", type=int, nargs="*", help="numbers of the mutants to try")
    options = parser.parse_args()
    survivors, tried = 0, 0
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "src"
        shutil.copytree(ROOT / "src", source)
        for number, mutant in enumerate(chosen(options.count, options.seed, options.within)):
            if options.only and number not in options.only:
                continue
            before = (source / "eformer" / mutant.path).read_bytes()
            line = [text.split(b"\n")[mutant.line - 1].strip().decode() for text in (before, mutant.apply(before))]
            print(f"{number}: {mutant.path}:{mutant.line} {mutant.what}\n  - {line[0]}\n  + {line[1]}", flush=True)
            notice = noticed_by(mutant, source, options.files)
            print(f"  {'SURVIVED' if notice is None else 'caught: ' + notice}", flush=True)
            tried += 1
            survivors += notice is None
    print(f"{tried} mutants, {tried - survivors} caught, {survivors} survived")


if __name__ == "__main__":
    main()
