"""The CUDA kernels on an entry of a stack. Runs with EFORMER_TEST_PLATFORM=cuda."""

from __future__ import annotations

import pytest

from ..test_stacks import check_entries, stack_of

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("fmt", ["nf4", "int8", "ternary", "binary", "int4", "fp8_e4m3"])
@pytest.mark.parametrize("form", ["dot", "axpy"])
@pytest.mark.parametrize("m", [1, 12, 40, 200, 1500])
def test_an_entry_of_a_stack(key, fmt: str, form: str, m: int) -> None:
    for rows, cols in ((320, 512), (136, 960)):
        check_entries(key, m, stack_of(key, fmt, form, along_columns=form == "axpy", rows=rows, cols=cols))


@pytest.mark.parametrize("form", ["dot", "axpy"])
@pytest.mark.parametrize("m", [1, 60, 300])
def test_scales_along_the_contracted_axis_and_x_that_is_rounded(key, form: str, m: int) -> None:
    sizes = {"rows": 320, "cols": 512}
    check_entries(key, m, stack_of(key, "int8", form, along_columns=form == "dot", **sizes))
    for fmt, activations in (("int8", "int8"), ("fp8_e4m3", "fp8")):
        check_entries(key, m, stack_of(key, fmt, form, along_columns=form == "axpy", **sizes), activations)
