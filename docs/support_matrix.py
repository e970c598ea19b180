"""Finds which operation does what with which format, and which kernel computes it where. No cell is written by hand.

python docs/support_matrix.py            (prints the tables, and compares them with support_matrix.md)
python docs/support_matrix.py --all      (with every format; else one of each column, and the rows of four)
python docs/support_matrix.py --write    (writes them there)

Formats that do the same share a column, or a row. Every operation of the first table is run with one of each column,
and its result compared with that of the dense array: equal to rounding.
In the second, `cpu` and `tiled` are run and compared with the reference; `tpu` is lowered for a TPU and must have a
kernel of its own in the program; `cuda` is what the selection answers for a GPU.
"""

import os
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from eformer import QuantizationType, explain, implicit, materialization_policy, materialize, quantize
from eformer._kernels import qgather, qmatmul, qragged_dot, select
from eformer._kernels.backends import is_kernel_available
from eformer._kernels.cuda import refuses_machine
from eformer._kernels.formats import FORMATS as STORED
from eformer._kernels.grouped import GROUPED_PRODUCT
from eformer._kernels.lookup import LOOKUP
from eformer._kernels.matmul import PRODUCT
from eformer._kernels.parameters import FORMS, Problem, product_problem
from eformer.cli.doctor import random_storage
from eformer.jaximus import leaf_predicate

MARK = "<!-- written by support_matrix.py -->\n\n"
OFTEN = ("nf4", "int8", "ternary", "binary")
PAGE = Path(__file__).with_suffix(".md")
WRITES = "--write" in sys.argv
ALL = WRITES or "--all" in sys.argv or bool(os.environ.get("EFORMER_TEST_THOROUGH"))
K, N, EXPERTS = 256, 128, 3  # more than 2**14 values, below which the reference is the quicker choice
rng = np.random.default_rng(0)


def normal(*shape):
    return jnp.asarray(rng.standard_normal(shape), jnp.float32)


x, row, out, column = normal(4, K), normal(1, K), normal(4, N), normal(N, 2)
xs, pair, image = normal(EXPERTS, 4, K), normal(2, K, N), normal(1, 3, 3, K)
ids, sizes, yes = jnp.array([5, 0, 5]), jnp.array([1, 0, 3]), jnp.array(True)


def convolve(w):
    return lax.conv_general_dilated(
        image, w.reshape(1, 1, K, N), (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


# Each takes a (K, N) array w whose values are packed, or share a scale, along K.
MATRIX = {
    "`x @ w`": lambda w: x @ w,
    "`x @ w`, one row": lambda w: row @ w,
    "`x @ w.T`": lambda w: out @ w.T,
    "`w @ x`": lambda w: w @ column,
    "`x @ w[:, :16]`": lambda w: x @ w[:, :16],
    '`einsum("bk,kn->bn")`': lambda w: jnp.einsum("bk,kn->bn", x, w),
    "`tensordot`, both axes": lambda w: jnp.tensordot(pair, w, 2),
    "`w.T @ w`": lambda w: w.T @ w,
    "`jit(x @ w)`": lambda w: jax.jit(jnp.matmul)(x, w),
    "gradient to `x` of `x @ w`": lambda w: jax.grad(lambda x: jnp.sum(jnp.sin(x @ w)))(x),
    "`conv_general_dilated`": convolve,
    "`w.T`": lambda w: w.T,
    "`w.reshape(K, 4, N // 4)`": lambda w: w.reshape(K, 4, N // 4),
    "`w.reshape(K * N)`": lambda w: w.reshape(K * N),
    "`w[None]`": lambda w: w[None],
    "`w[None][0]`": lambda w: jnp.squeeze(w[None], 0),
    "`broadcast_to(w, (2, K, N))`": lambda w: jnp.broadcast_to(w, (2, K, N)),
    "`w[:, 2:9]`": lambda w: w[:, 2:9],
    "`w[:, 3]`": lambda w: w[:, 3],
    "`w[64:192]` (whole blocks)": lambda w: w[64:192],
    "`w[1:9]` (inside a block)": lambda w: w[1:9],
    "`dynamic_slice` along N": lambda w: lax.dynamic_slice_in_dim(w, 7, 5, 1),
    "`take(w, ids, axis=1)`": lambda w: jnp.take(w, ids, axis=1),
    "`take(w, ids, axis=0)`": lambda w: jnp.take(w, ids, axis=0),
    "`split(w, 4, axis=1)`": lambda w: jnp.split(w, 4, axis=1),
    "`split(w, 4, axis=0)`": lambda w: jnp.split(w, 4, axis=0),
    "`concatenate([w, w], 1)`": lambda w: jnp.concatenate([w, w], 1),
    "`concatenate([w, w], 0)`": lambda w: jnp.concatenate([w, w], 0),
    "`stack([w, w])`": lambda w: jnp.stack([w, w]),
    "`flip(w, 1)`": lambda w: jnp.flip(w, 1),
    "`flip(w, 0)`": lambda w: jnp.flip(w, 0),
    "`lax.select(yes, w, w)`": lambda w: lax.select(yes, w, w),
    "`where(mask, w, 0)`": lambda w: jnp.where(w > 0, w, 0),
    "`w.astype(bfloat16)`": lambda w: w.astype(jnp.bfloat16),
    "`w.astype(int32)`": lambda w: w.astype(jnp.int32),
    "`optimization_barrier`": lambda w: lax.optimization_barrier(w),
    "`-w`": lambda w: -w,
    "`w * 3`, `w / 3`": lambda w: [w * 3, w / 3],
    "`w * v`, a factor per column": lambda w: w * out[0],
    "`w + 1`": lambda w: w + 1,
    "`w + w`": lambda w: w + w,
    "`exp(w)`": lambda w: jnp.exp(w),
    "`w.sum(0)`": lambda w: w.sum(0),
    "`sort(w)`": lambda w: jnp.sort(w),
    "`w.at[0].set(0)`": lambda w: w.at[0].set(0.0),
}
# Each takes a stack of such arrays, (EXPERTS, K, N).
STACK = {
    "`w[1]` of a stack": lambda w: w[1],
    "`w[i]`, `i` traced": lambda w: lax.dynamic_index_in_dim(w, 1, keepdims=False),
    "`swapaxes(w, 1, 2)`": lambda w: jnp.swapaxes(w, 1, 2),
    "`matmul` of stacks": lambda w: xs @ w,
    "`vmap(x @ w)`": lambda w: jax.vmap(jnp.matmul)(xs, w),
    "`scan` over layers": lambda w: lax.scan(lambda i, layer: (i + 1, (i + x) @ layer), 0, w)[1],
    "`ragged_dot`": lambda w: lax.ragged_dot(x, w, sizes),
}
PATHS = {"xla": "tiled", "reference": "reference"}  # any other name is that of a native kernel
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def cell(operation, q):
    """What happened to `q` while `operation` was traced. All choices are made then."""
    with materialization_policy("allow"):
        report = explain(lambda q: jax.eval_shape(implicit(operation), q))(q)
    results = jax.tree.leaves(report.result, is_leaf=leaf_predicate)
    paths = sorted({PATHS.get(event.name, "kernel") for event in report.kernels})
    if report.materializations or paths:
        return " + ".join([*paths, *["materializes"] * bool(report.materializations)])
    return "exact" if all(type(result) is type(q) for result in results) else "decodes part"


def check(operations, q):
    """All operations in one program, compared with the same program on the dense array."""
    run = lambda w: [operation(w) for operation in operations.values()]  # noqa: E731
    with materialization_policy("allow"):
        found = jax.jit(implicit(run), compiler_options=QUICK)(q)
    wanted = jax.jit(run, compiler_options=QUICK)(q.materialize())
    for name, result, value in zip(operations, found, wanted, strict=True):
        for a, b in zip(jax.tree.leaves(result, is_leaf=leaf_predicate), jax.tree.leaves(value), strict=True):
            dense = materialize(a)
            assert (dense.shape, dense.dtype) == (b.shape, b.dtype), name
            a, b = (np.asarray(v, np.float32) for v in (dense, b))
            assert np.abs(a - b).max() <= 1e-5 * (1 + np.abs(b).max()), (name, q)


# -- kernels -----------------------------------------------------------------------------------------------------------

# A product of bfloat16 x with random storage, in the shape of each operation: (operands -> result, its problem).
ROWS, M = 128, 8


def product(fmt, form, codes, scale):
    x = normal(M, K if form == "dot" else ROWS).astype(jnp.bfloat16)
    options = {"fmt": fmt, "form": form, "cols": K}

    def run(preference):
        return lambda x, c, s: qmatmul(x, c, s, preference=preference, **options)

    def asked(platform):
        return PRODUCT.candidates, product_problem(x, codes, scale, platform, **options)

    return (x, codes, scale), run, asked


def groups(fmt, form, codes, scale):
    codes, scale = (jnp.stack([part] * EXPERTS) for part in (codes, scale))
    x = normal(M, K if form == "dot" else ROWS).astype(jnp.bfloat16)
    options = {"fmt": fmt, "form": form, "cols": K}
    counts = jnp.array([3, 0, 5])

    def run(preference):
        return lambda x, c, s: qragged_dot(x, c, s, counts, preference=preference, **options)

    def asked(platform):
        return GROUPED_PRODUCT.candidates, product_problem(x, codes, scale, platform, **options)

    return (x, codes, scale), run, asked


def lookup(fmt, form, codes, scale):
    del form
    rows = jnp.array([3, 0, 90])
    options = {"fmt": fmt, "cols": K, "dtype": jnp.bfloat16}

    def run(preference):
        return lambda i, c, s: qgather(c, s, i, preference=preference, **options)

    def asked(platform):
        row = STORED[fmt]
        block = row.per_code * (codes.shape[-1] // row.unit) if row.blocked else None
        sizes = {"platform": platform, "m": rows.size, "rows": ROWS, "scale_dtype": np.dtype(scale.dtype)}
        problem = Problem(fmt, "lookup", K, block, np.dtype(jnp.bfloat16), preference="native", **sizes)
        return LOOKUP.candidates, problem

    return (rows, codes, scale), run, asked


KERNELS = {
    **{f"`x @ D{'.T' * (form == 'dot')}` ({form})": (product, form) for form in FORMS},
    **{f"groups of rows, {form}": (groups, form) for form in FORMS},
    "rows looked up": (lookup, "dot"),
}


def refusal(name, platform, asked):
    """Why a kernel is not chosen on a platform, or None."""
    chosen, choice = select.choose(*asked(platform))
    return None if chosen.name == name else dict(choice.rejected)[name]


def together(cases, preference):
    """One program with the operation in every format, and its operands."""
    runs = [run(preference) for _, run, _ in cases]
    return jax.jit(lambda all_of_them: [run(*o) for run, o in zip(runs, all_of_them, strict=True)]), [
        c[0] for c in cases
    ]


def on_cpu(cases):
    """Run with native kernels, and compare with the reference."""
    if not is_kernel_available():
        return ["not built here" for _ in cases]
    refused = [refusal("native_cpu", "cpu", asked) for _, _, asked in cases]
    program, operands = together([c for c, why in zip(cases, refused, strict=True) if why is None], "native")
    compiled = program.lower(operands).compile(QUICK)
    assert compiled.as_text().count('custom_call_target="eformer_cpu_') == len(operands)
    compare(compiled(operands), cases, refused)
    return ["kernel" if why is None else f"no: {why}" for why in refused]


def on_tpu(cases):
    """Lower for a TPU; the program must hold a kernel for each."""
    refused = [refusal("pallas_tpu", "tpu", asked) for _, _, asked in cases]
    program, operands = together([c for c, why in zip(cases, refused, strict=True) if why is None], "native")
    text = program.trace(operands).lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("tpu_custom_call") == len(operands)
    return ["kernel" if why is None else f"no: {why}" for why in refused]


def on_cuda(cases):
    """Ask; that the library was not built here does not count."""
    refused = [refusal("native_cuda", "cuda", asked) for _, _, asked in cases]
    return ["kernel" if why in (None, refuses_machine("cuda")) else f"no: {why}" for why in refused]


def tiled(cases):
    program, operands = together(cases, "xla")
    compare(program.lower(operands).compile(QUICK)(operands), cases, [None] * len(cases))
    return ["yes" for _ in cases]


def compare(found, cases, refused):
    program, operands = together([c for c, why in zip(cases, refused, strict=True) if why is None], "reference")
    for a, b in zip(found, program.lower(operands).compile(QUICK)(operands), strict=True):
        a, b = (np.asarray(v, np.float32) for v in (a, b))
        assert np.abs(a - b).max() <= 1e-2 * np.abs(b).max()  # results are bfloat16


BACKENDS = {"cpu": on_cpu, "cuda": on_cuda, "tpu": on_tpu, "tiled": tiled}


def columns_of(heading):
    """The formats of every column of the page, as it is; when all are run, every format by itself."""
    if ALL:
        return [[str(kind)] for kind in QuantizationType]
    head = next(line for line in PAGE.read_text().splitlines() if line.startswith(heading))
    return [column.split(", ") for column in head.strip("| ").split(" | ")[1:]]


def operations():
    """The first table, line by line. Formats whose cells are equal share a column."""
    heading = f"| `w` has the shape {(K, N)} |"
    columns = columns_of(heading)
    cells = [[] for _ in columns]
    for programs, w in ((MATRIX, normal(K, N)), (STACK, normal(EXPERTS, K, N))):
        for column, found in zip(columns, cells, strict=True):
            q = quantize(w, dtype=column[0], axis=-2)
            check(programs, q)
            found += [cell(operation, q) for operation in programs.values()]
    groups = {}
    for column, found in zip(columns, cells, strict=True):
        groups.setdefault(tuple(found), []).extend(column)
    yield f"{heading} " + " | ".join(", ".join(names) for names in groups.values()) + " |"
    yield "|---" * (len(groups) + 1) + "|"
    for name, *row in zip((*MATRIX, *STACK), *groups, strict=True):
        yield "| " + " | ".join([name, *row]) + " |"


def kernel_rows():
    """The rows of the second table, by operation; formats whose cells are equal share one."""
    formats = [*OFTEN, *(fmt for fmt in STORED if fmt not in OFTEN)] if ALL else OFTEN
    for name, (operation, form) in KERNELS.items():
        cases = [operation(fmt, form, *map(jnp.asarray, random_storage(fmt, ROWS, K))) for fmt in formats]
        groups = {}
        for fmt, *row in zip(formats, *[ask(cases) for ask in BACKENDS.values()], strict=True):
            groups.setdefault(tuple(cell.replace(f" for {fmt}", " for these") for cell in row), []).append(fmt)
        yield from ([name, ", ".join(names), *row] for row, names in groups.items())


def tables():
    """The lines of both tables, each with its head."""
    yield from ("## Operations", "", *operations(), "", "## Kernels", "")
    yield f"bfloat16 `x`, and a stored matrix `D` of {ROWS} rows and {K} columns with blocks of 64."
    yield from ("", "| operation | formats | " + " | ".join(BACKENDS) + " |", "|---" * (len(BACKENDS) + 2) + "|")
    for row in kernel_rows():
        yield "| " + " | ".join(row) + " |"


def of_four(text):
    """The page with only those formats in the rows of kernels that are always run."""
    before, head, rows = text.partition("## Kernels")
    lines = []
    for line in rows.splitlines():
        cells = line.split(" | ")
        if len(cells) == 2 + len(BACKENDS) and cells[1] != "formats":
            cells[1] = ", ".join(name for name in cells[1].split(", ") if name in OFTEN)
        lines += [" | ".join(cells)] if len(cells) < 2 or cells[1] else []
    return f"{before}{head}" + "\n".join(lines) + "\n"


def main():
    print(f"JAX {jax.__version__} on {jax.default_backend()}\n")
    found = "\n".join(tables()) + "\n"
    print(found)
    text, _, shown = PAGE.read_text().partition(MARK)
    if WRITES:
        PAGE.write_text(f"{text}{MARK}{found}")
    elif is_kernel_available() and jax.default_backend() == "cpu":
        shown = shown if ALL else of_four(shown)
        assert shown == found, "docs/support_matrix.md shows another table: python docs/support_matrix.py --write"


main()
