"""The tests themselves: each one asserts something, and no file is too long to read."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

FILES = sorted(Path(__file__).parent.rglob("*.py"))
Function = ast.FunctionDef | ast.AsyncFunctionDef
ASSERTING = {"raises", "warns", "fail"}  # of pytest; what is called assert_something asserts as well


def called(function: ast.AST) -> set[str]:
    names = [node.func for node in ast.walk(function) if isinstance(node, ast.Call)]
    return {
        name.attr if isinstance(name, ast.Attribute) else name.id
        for name in names
        if hasattr(name, "attr") or hasattr(name, "id")
    }


def asserts(function: ast.AST, asserting: set[str]) -> bool:
    plain = any(isinstance(node, ast.Assert | ast.Raise) for node in ast.walk(function))
    return plain or any(name in asserting or name.startswith("assert_") for name in called(function))


def functions(source: str) -> list[Function]:
    return [node for node in ast.walk(ast.parse(source)) if isinstance(node, Function)]


def asserting_helpers(helpers: list[Function]) -> set[str]:
    """Names of the functions that assert, or call one that does."""
    found = set(ASSERTING)
    while more := {helper.name for helper in helpers if helper.name not in found and asserts(helper, found)}:
        found |= more
    return found


def toothless(source: str, asserting: set[str]) -> list[str]:
    return [f.name for f in functions(source) if f.name.startswith("test_") and not asserts(f, asserting)]


def test_every_test_asserts():
    sources = {path: path.read_text() for path in FILES}
    helpers = [f for source in sources.values() for f in functions(source) if not f.name.startswith("test_")]
    asserting = asserting_helpers(helpers)
    found = [f"{path.name}::{name}" for path, source in sources.items() for name in toothless(source, asserting)]
    assert not found, f"these tests can only fail by an exception: {found}"


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("def test_a():\n    x = 1", ["test_a"]),
        ("def test_a():\n    assert f()", []),
        ("def test_a():\n    helper()", []),
        ("def test_a():\n    other()", ["test_a"]),
        ("def test_a():\n    with pytest.raises(ValueError):\n        f()", []),
        ("def test_a():\n    np.testing.assert_array_equal(f(), 1)", []),
    ],
)
def test_what_asserts_is_recognized(source, found):
    helpers = functions("def inner():\n    assert 1\ndef helper():\n    inner()\ndef other():\n    pass")
    assert toothless(source, asserting_helpers(helpers)) == found


def test_what_runs_on_the_newest_jax_exists():
    makefile = (Path(__file__).parents[1] / "Makefile").read_text().replace("\\\n", " ")
    (line,) = [line for line in makefile.splitlines() if line.startswith("JAX_TESTS := ")]
    paths = line.removeprefix("JAX_TESTS := ").split()
    assert len(paths) > 3
    assert [path for path in paths if not (Path(__file__).parents[1] / path).exists()] == []


def test_files_are_small_enough_to_read():
    long = [path.name for path in FILES if len(path.read_text().splitlines()) >= 400]
    assert not long, f"give their second subject a file: {long}"
