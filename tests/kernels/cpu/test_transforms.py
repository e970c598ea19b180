"""The kernel is what runs under every transformation of JAX, on one device and on eight."""

from __future__ import annotations

import re
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from eformer._record import recorder
from eformer.jaximus import explain, implicit
from eformer.ops.quantization import quantize
from eformer.ops.quantization.kernels import export_checks

from ..cases import FORMATS, FORMS, make_case, relative_error
from ..hlo_cases import mesh_of
from .calls import FLOAT32_LIMIT

ROWS, COLS, M = 256, 512, 8


def calls_in(function, *operands) -> int:
    """How many custom calls of the product kernel the compiled program has."""
    text = jax.jit(function).lower(*operands).compile().as_text()
    return text.count('custom_call_target="eformer_cpu_qmatmul"')


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("fmt", FORMATS)
def test_gradient_uses_the_other_form(fmt: str, form: str, rng: np.random.Generator) -> None:
    case = make_case(rng, fmt, ROWS, COLS)
    matrix = jnp.asarray(case.dense.T if form == "dot" else case.dense, jnp.float32)
    x = jnp.asarray(rng.standard_normal((M, matrix.shape[0])), jnp.float32)
    ct = jnp.asarray(rng.standard_normal((M, matrix.shape[1])), jnp.float32)

    def backward(x, ct, codes, scale):
        return jax.vjp(lambda x: case.product(x, form, codes=codes, scale=scale), x)[1](ct)[0]

    with recorder() as events:
        gradient = jax.jit(backward)(x, ct, case.codes, case.scale)
    other = "axpy" if form == "dot" else "dot"
    assert [(e.name, e.problem.form) for e in events] == [("native_cpu", form), ("native_cpu", other)]
    assert relative_error(gradient, case.expected(ct, other)) <= FLOAT32_LIMIT
    assert calls_in(backward, x, ct, case.codes, case.scale) == 1  # the forward product is dead code here


def test_second_derivative_and_forward_mode(rng: np.random.Generator) -> None:
    case = make_case(rng, "nf4", ROWS, COLS)
    dense = jnp.asarray(case.dense.T, jnp.float32)
    x = jnp.asarray(rng.standard_normal((2, COLS)) / 50, jnp.float32)
    losses = [lambda x, f=f: jnp.sin(f(x)).sum() for f in (case.product, lambda x: x @ dense)]
    ours, theirs = (jax.jvp(jax.grad(loss), (x,), (jnp.ones_like(x),)) for loss in losses)
    for a, b in zip(ours, theirs, strict=True):
        assert relative_error(a, b) < 1e-5


def test_vmap_makes_one_call(rng: np.random.Generator) -> None:
    case = make_case(rng, "int8", ROWS, COLS)
    x = rng.standard_normal((5, 3, COLS)).astype(np.float32)
    mapped = jax.vmap(case.product)
    assert relative_error(mapped(x), case.expected(x)) <= FLOAT32_LIMIT
    assert calls_in(mapped, x) == 1
    stack = make_case(rng, "nf4", ROWS, COLS, batch=(3,))
    y = rng.standard_normal((3, 2, COLS)).astype(np.float32)

    def each(x, codes, scale):
        return jax.vmap(lambda x, c, s: stack.product(x, codes=c, scale=s))(x, codes, scale)

    assert relative_error(each(y, stack.codes, stack.scale), stack.expected(y)) <= FLOAT32_LIMIT
    assert calls_in(each, y, stack.codes, stack.scale) == 1
    shared = jax.vmap(lambda c, s: stack.product(y[0], codes=c, scale=s))(stack.codes, stack.scale)
    assert relative_error(shared, stack.expected(np.stack([y[0]] * 3))) <= FLOAT32_LIMIT


def test_scan_and_checkpoint(rng: np.random.Generator) -> None:
    case = make_case(rng, "nf4", 256, 256, batch=(4,))
    x = rng.standard_normal((2, 256)).astype(np.float32)

    def layers(x, codes, scale):
        def layer(x, weight):
            return jnp.tanh(case.product(x, codes=weight[0], scale=weight[1]) / 16), None

        return jax.lax.scan(jax.checkpoint(layer), x, (codes, scale))[0]

    expected = x.astype(np.float64)
    for matrix in case.dense:
        expected = np.tanh(expected @ matrix.T / 16)
    assert relative_error(jax.jit(layers)(x, case.codes, case.scale), expected) < 1e-5
    assert calls_in(layers, x, case.codes, case.scale) == 1
    gradient = jax.grad(lambda x, c, s: layers(x, c, s).sum())
    assert calls_in(gradient, x, case.codes, case.scale) >= 2
    assert np.isfinite(jax.jit(gradient)(x, case.codes, case.scale)).all()


# sharding of x and of the codes
PLACEMENTS = {
    "rows of x": (P("a"), P()),
    "rows of D": (P(), P("a")),
    "rows and columns": (P(), P("a", "b")),
    "x and rows": (P("b"), P("a")),
    "two axes on rows": (P(), P(("a", "b"))),
    "contracted axis of x": (P(None, "a"), P()),
}


@pytest.mark.parametrize("name", PLACEMENTS)
def test_eight_devices(name: str, rng: np.random.Generator) -> None:
    """Each device multiplies what it holds; no codes move. The gradient too."""
    mesh, (x_spec, codes_spec) = mesh_of(), PLACEMENTS[name]
    for fmt, form in (("nf4", "dot"), ("ternary", "axpy")):
        case = make_case(rng, fmt, ROWS, COLS, block=32)
        scale_spec = codes_spec if fmt == "nf4" else P(*codes_spec[:1])
        x = rng.standard_normal((M, COLS if form == "dot" else ROWS)).astype(np.float32)
        placed = ((x, x_spec), (case.codes, codes_spec), (case.scale, scale_spec))
        operands = [jax.device_put(value, NamedSharding(mesh, spec)) for value, spec in placed]

        def program(x, c, s, case=case, form=form):
            y, back = jax.vjp(lambda x: case.product(x, form, codes=c, scale=s), x)
            return y, back(y)[0]

        with recorder() as events:
            y, gradient = jax.jit(program)(*operands)
        assert {e.name for e in events} == {"native_cpu"}
        assert relative_error(y, case.expected(x, form)) < 3e-6
        back = case.expected(case.expected(x, form), "axpy" if form == "dot" else "dot")
        assert relative_error(gradient, back) < 5e-6
        text = jax.jit(program).lower(*operands).compile().as_text()
        assert text.count('custom_call_target="eformer_cpu_qmatmul"') == 2
        assert not re.search(r"[us]8\[[^\n]* (all-gather|all-to-all|collective-permute)\(", text)
        assert not re.search(r"all-gather|all-to-all|collective-permute", text) or name == "contracted axis of x"


def test_shard_map_and_explicit_meshes(rng: np.random.Generator) -> None:
    case = make_case(rng, "int8", ROWS, COLS)
    x = rng.standard_normal((M, COLS)).astype(np.float32)
    product = jax.shard_map(
        lambda x, c, s: case.product(x, codes=c, scale=s),
        mesh=mesh_of(), in_specs=(P(), P("a"), P("a")), out_specs=P(None, "a"),
    )  # fmt: skip
    for function in (product, jax.jit(product)):
        assert relative_error(function(x, case.codes, case.scale), case.expected(x)) <= FLOAT32_LIMIT
    assert calls_in(product, x, case.codes, case.scale) == 1
    gradient = jax.jit(jax.grad(lambda x: product(x, case.codes, case.scale).sum()))(x)
    assert relative_error(gradient, np.broadcast_to(case.dense.sum(0), x.shape)) < 1e-5
    mesh = mesh_of(AxisType.Explicit)
    with jax.set_mesh(mesh):
        placed = ((x, P("b")), (case.codes, P("a")), (case.scale, P("a")))
        operands = [jax.device_put(value, NamedSharding(mesh, spec)) for value, spec in placed]

        def typed(x, c, s):
            return case.product(x, codes=c, scale=s)

        y = jax.jit(typed)(*operands)
        assert jax.typeof(y).sharding.spec == P("b", "a")
        assert relative_error(y, case.expected(x)) <= FLOAT32_LIMIT
        assert calls_in(typed, *operands) == 1


def test_export_needs_the_target_allowed(rng: np.random.Generator) -> None:
    case = make_case(rng, "nf4", ROWS, COLS)
    x = rng.standard_normal((M, COLS)).astype(np.float32)
    product = jax.jit(lambda x, c, s: case.product(x, codes=c, scale=s))
    with pytest.raises(ValueError, match="eformer_cpu_qmatmul"):
        export.export(product)(x, case.codes, case.scale)
    options = {"platforms": ("cpu", "tpu"), "disabled_checks": export_checks()}
    exported = export.export(product, **options)(x, case.codes, case.scale)
    assert exported.mlir_module().count("@eformer_cpu_qmatmul") == 1
    assert relative_error(exported.call(x, case.codes, case.scale), case.expected(x)) <= FLOAT32_LIMIT


@pytest.mark.parametrize("fmt", FORMATS)
def test_arrays_use_the_kernel_everywhere(fmt: str, rng: np.random.Generator) -> None:
    """Plain operators, `implicit`, jit, grad, vmap and scan on the array classes, without a materialization."""
    w = quantize(jnp.asarray(rng.standard_normal((256, 256)), jnp.float32), dtype=fmt)
    x = jnp.asarray(rng.standard_normal((4, 256)), jnp.float32)
    stack = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), w)
    programs = {
        "operator": lambda: x @ w,
        "implicit": lambda: implicit(jnp.matmul)(x, w),
        "jit": lambda: jax.jit(lambda x: x @ w)(x),
        "grad": lambda: jax.grad(lambda x: (x @ w).sum())(x),
        "vmap": lambda: jax.vmap(lambda x: x @ w)(x),
        "scan": lambda: implicit(lambda x, s: jax.lax.scan(lambda h, w: (h @ w, None), x, s)[0])(x, stack),
    }
    for name, program in programs.items():
        jax.clear_caches()
        report = explain(program)()
        assert report.materializations == (), name
        assert report.kernels, name
        assert {event.name for event in report.kernels} == {"native_cpu"}, name
    dense = np.asarray(w.materialize(), np.float64)
    assert relative_error(programs["operator"](), np.asarray(x, np.float64) @ dense) <= FLOAT32_LIMIT


def test_arrays_on_eight_devices(rng: np.random.Generator) -> None:
    w = quantize(jnp.asarray(rng.standard_normal((512, 256)), jnp.float32), dtype="nf4")
    w = w.with_sharding(NamedSharding(mesh_of(), P("a", "b")))
    x = jnp.asarray(rng.standard_normal((4, 512)), jnp.float32)
    report = explain(lambda: x @ w)()
    assert {event.name for event in report.kernels} == {"native_cpu"}
    dense = np.asarray(w.materialize(), np.float64)
    assert relative_error(report.result, np.asarray(x, np.float64) @ dense) < 3e-6


def test_many_host_threads(rng: np.random.Generator) -> None:
    """Eight threads, fifty calls each, all at once on one pool: the same bits every time."""
    cases = [make_case(rng, fmt, 300, 514) for fmt in FORMATS]
    work = []
    for case in cases:
        for form, m in (("dot", 1), ("axpy", 9)):
            x = jnp.asarray(rng.standard_normal((m, 514 if form == "dot" else 300)), jnp.float32)
            product = jax.jit(lambda x, c, s, case=case, form=form: case.product(x, form, codes=c, scale=s))
            operands = (x, jnp.asarray(case.codes), jnp.asarray(case.scale))
            work.append((product, operands, np.asarray(product(*operands))))
            assert relative_error(work[-1][2], case.expected(x, form)) <= FLOAT32_LIMIT
    wrong: list[str] = []
    start = threading.Barrier(8)

    def run(number: int) -> None:
        start.wait()
        for i in range(50):
            product, operands, expected = work[(number + i) % len(work)]
            if not np.array_equal(product(*operands), expected):
                wrong.append(f"thread {number}, call {i}")

    threads = [threading.Thread(target=run, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
