"""The contract of `ActivationArray`: programs of the contract suite give what they give on the dense array.

Operands have one magnitude, 127 (or 448): every row of them is rounded to itself, whatever is contracted.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eformer._formats.activations.array import ActivationArray
from eformer.jaximus import implicit

from .contract import FAST, FORMATS, K, N, check, dense, make, normal, seeded
from .contract_programs import dense_program, operands, program, stack_operands
from .test_contract_transforms import MODES, STACKS

OFTEN = ("nf4", "int8-columns", "int4-zero", "fp8")


def around(q: Any, **options: Any) -> ActivationArray:
    kind = "fp8" if q.kernel_format.startswith("fp8") else "int8"
    return ActivationArray(q, activations=kind, **options)


def of_one_magnitude(tree: Any, size: float) -> Any:
    return jax.tree.map(lambda x: jnp.where(x < 0, -size, size) if x.dtype == jnp.float32 and x.ndim else x, tree)


def row(name: str, group: str) -> Any:
    often = name in OFTEN and (group != "shapes" or name == "nf4")
    return pytest.param(name, group, marks=[] if often else pytest.mark.thorough)


@pytest.mark.parametrize(
    ("name", "group"),
    [
        *(row(name, "floating") for name in FORMATS if name not in ("nf4-double", "codes", "codes-last")),
        *(row(name, group) for name in (*OFTEN, "ternary-last", "int8") for group in ("stacked", "shapes")),
        row("int8-matrix", "values"),
    ],
)
def test_operations(name: str, group: str) -> None:
    rng = seeded(name, group)
    made = make(name, rng, 3, K, N) if group == "stacked" else make(name, rng, K, N)
    q = around(made)
    size = 448.0 if q.activations == "fp8" else 127.0
    a = of_one_magnitude(stack_operands(rng) if group == "stacked" else operands(rng), size)
    found = jax.jit(lambda q, a: dense(implicit(program(group))(q, a)), compiler_options=FAST)(q, a)
    # Kernels may take integers for the entries of a table that has fractions.
    check(found, dense_program(group)(dense(q), a), tolerance=1e-4 if q.w.kernel_format == "nf4" else None)


@pytest.mark.parametrize("mode", [*MODES, *STACKS])
@pytest.mark.parametrize("name", ["nf4", pytest.param("int8-matrix", marks=pytest.mark.thorough)])
def test_transformations(name: str, mode: str) -> None:
    """Values here are not of one magnitude, so they are only near those of the dense program."""
    rng, stacked = seeded(name), mode in STACKS
    x, q = normal(rng, 4, 36), around(make(name, rng, *([3] if stacked else []), 36, 20))
    run = (STACKS if stacked else MODES)[mode]
    found = run(x, q)
    check(found, run(x, dense(q)), tolerance=0.05)
    scale = jnp.full((3, 1, 1) if stacked else (1, 1), 1e-4, jnp.float32)  # cuts values off, unless it is lost
    far = jax.tree.leaves(dense(run(x * 0 + 1.0, around(q.w, x_scale=scale))))
    near = jax.tree.leaves(dense(run(x * 0 + 1.0, q)))
    assert any(not np.allclose(a, b, rtol=1e-3) for a, b in zip(far, near, strict=True)) or mode in UNROUNDED


# Programs whose results are no products of x: of weights alone, or derivatives, which go straight through.
UNROUNDED = ("switch", "jacobian", "associative")
