"""The pages of the reference show what a class takes."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_signatures_show_defaults_and_not_how_fields_are_made():
    griffe = pytest.importorskip("griffe", reason="makes the pages; in the docs extra")
    extensions = griffe.load_extensions(ROOT / "docs" / "_site" / "doctests.py")
    package = griffe.load("eformer", search_paths=[ROOT / "src"], extensions=extensions)
    shown = {p.name: str(p.default) for p in package["_formats.nf4.array.ArrayNF4"].parameters}
    assert shown["block_size"] == "64"
    assert shown["use_kernel"] == "True"
    made = [c for path in ("_formats.nf4.array", "_lora.array") for c in package[path].classes.values()]
    assert not [p for c in made for p in c.parameters if "aux_field" in str(p.default)]
