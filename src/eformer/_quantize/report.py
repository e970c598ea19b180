"""`report`: what a model holds, leaf by leaf, and what quantizing it cost."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eformer import _table
from eformer._core import ImplicitArray, materialize
from eformer._core.materialization import note_of
from eformer._formats.blocks import wide
from eformer._jax import traces

from .folds import FOLDED
from .leaves import nbytes_of, open_tree


@dataclasses.dataclass(frozen=True)
class LeafReport:
    """One leaf. Errors are against the original, where there is one and no norm has taken over factors of its rows;
    `tied_to` names the leaf it shares memory with.

    `method` is how `quantize_tree` chose codes and scales, where it was asked for more than rounding.
    """

    path: str
    format: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    bits_per_weight: float
    relative_error: float | None = None
    sqnr_db: float | None = None
    tied_to: str | None = None
    method: str | None = None

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def dense_nbytes(self) -> int:
        """Bytes of the same values in their own dtype."""
        return self.size * jnp.dtype(self.dtype).itemsize


@dataclasses.dataclass(frozen=True)
class Report:
    """Every array of a model. Prints as a table; `to_json` and `plot` give the same to programs and to the eye."""

    leaves: tuple[LeafReport, ...]

    @property
    def nbytes(self) -> int:
        """Bytes held, tied leaves counted once."""
        return sum(leaf.nbytes for leaf in self.leaves if leaf.tied_to is None)

    @property
    def dense_nbytes(self) -> int:
        return sum(leaf.dense_nbytes for leaf in self.leaves if leaf.tied_to is None)

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.nbytes / max(sum(leaf.size for leaf in self.leaves if leaf.tied_to is None), 1)

    def rows(self, digits: int = 3) -> list[list[str]]:
        """The cells of the table, one row per leaf."""
        return [_row(leaf, digits) for leaf in self.leaves]

    def __str__(self) -> str:
        total = ["total", "", "", f"{self.nbytes:,}", f"{self.bits_per_weight:.2f}", "", ""]
        saved = f"{self.dense_nbytes:,} bytes dense, {self.nbytes / max(self.dense_nbytes, 1):.1%} of that held"
        return "\n".join([*_table.lines(COLUMNS, [*self.rows(), total]), saved])

    def to_json(self) -> str:
        """The leaves and the totals as a JSON object; figures that are not finite are null."""
        totals = {name: getattr(self, name) for name in ("nbytes", "dense_nbytes", "bits_per_weight")}
        leaves = [{k: finite(v) for k, v in dataclasses.asdict(leaf).items()} for leaf in self.leaves]
        return json.dumps({**totals, "leaves": leaves}, indent=2, allow_nan=False)

    def plot(self, path: Any) -> None:
        """Draw bytes and errors per leaf into an image file, with matplotlib."""
        try:
            from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]
        except ImportError as err:
            raise ImportError(
                "Report.plot draws with matplotlib, which is not installed: pip install 'eformer[plot]'. "
                "str(report) and report.to_json() need no extra package."
            ) from err
        _draw(Figure, self.leaves).savefig(path)


def report(params: Any, original: Any = None) -> Report:
    """What a model holds: path, format, bytes and bits per weight of every array.

    Args:
        params: the model, quantized or not.
        original: the same model before, to measure errors against. Its leaves are compared one at a time.

    >>> from .tree import quantize_tree
    >>> model = {"up": {"kernel": jax.random.normal(jax.random.key(0), (64, 128)), "bias": jnp.zeros(128)}}
    >>> print(report(quantize_tree(model, donate=False), model))
    path       format   shape     bytes  bits/weight  rel. error  SQNR dB
    up/bias    float32  (128,)      512        32.00
    up/kernel  nf4      (64,128)  4,608         4.50       0.092     20.8
    total                         5,120         4.92
    33,280 bytes dense, 15.4% of that held
    """
    kinds = (jax.Array, np.ndarray, ImplicitArray, jax.ShapeDtypeStruct)
    found = [leaf for leaf in open_tree(params).leaves if isinstance(leaf.value, kinds)]
    found = [leaf for leaf in found if not jnp.issubdtype(leaf.value.dtype, jax.dtypes.extended)]  # no random keys
    before = {} if original is None else {leaf.path: leaf.value for leaf in open_tree(original).leaves}
    if before and found and before.keys().isdisjoint(leaf.path for leaf in found):
        here, there = (", ".join(map(repr, names)) for names in ([x.path for x in found[:3]], list(before)[:3]))
        raise ValueError(
            f"the model and the original have no path in common: {here} here, {there} there. Give the same part of "
            "both, so that errors can be measured."
        )
    packed = next((path for path, value in before.items() if isinstance(value, ImplicitArray)), None)
    if packed is not None and not any(isinstance(leaf.value, ImplicitArray) for leaf in found):
        raise ValueError(
            f"the original is quantized ({packed!r} is {before[packed]!r}) and the model is not: the quantized one "
            "comes first, report(quantized, dense)."
        )
    seen: dict[int, str] = {}
    lines = []
    for leaf in found:
        tied = seen.setdefault(id(leaf.value), leaf.path)
        lines.append(_leaf_report(leaf.path, leaf.value, before.get(leaf.path), None if tied == leaf.path else tied))
    return Report(tuple(lines))


def size(tree: Any) -> int:
    """The number of values of a model: of quantized arrays the logical ones, not what is stored; ties count once.

    >>> from .config import quantize
    >>> size({"kernel": quantize(jnp.ones((64, 32))), "bias": jnp.zeros(32)})
    2080
    """
    values = {id(leaf.value): leaf.value for leaf in open_tree(tree).leaves}
    return sum(math.prod(value.shape) for value in values.values() if hasattr(value, "shape"))


def relative_error(value: Any, original: Any) -> float:
    """‖value − original‖ / ‖original‖; 0 for two zeros, NaN where one of them is not finite."""
    dense = jnp.asarray(materialize(original))
    noise, signal = (float(v) for v in _energies(value, dense))
    if not signal and not noise:  # zeros, or numbers so small that the device takes them for zeros
        exact = np.asarray(dense, np.float64)
        noise = float(np.sum(np.square(np.asarray(materialize(value), np.float64) - exact)))
        signal = float(np.sum(np.square(exact)))
    return math.sqrt(noise / signal) if signal else (0.0 if not noise else math.inf)


def _leaf_report(path: str, value: Any, original: Any, tied_to: str | None) -> LeafReport:
    shape, size = tuple(value.shape), math.prod(value.shape)
    implicit = isinstance(value, ImplicitArray)
    nbytes = sum(nbytes_of(x) for x in jax.tree.leaves(value)) if implicit else nbytes_of(value)
    name = value.dtype.name
    fmt = (getattr(value, "format", None) or type(value).__name__) if implicit else name
    error = sqnr = None
    method = note_of(value) or None if implicit else None
    if implicit and original is not None and not (method or "").endswith(FOLDED):  # whose rows were multiplied
        if tuple(original.shape) != shape:
            raise ValueError(f"{path!r} has shape {shape}, but the original has {tuple(original.shape)}.")
        if isinstance(original, jax.Array) and not isinstance(original, traces.Tracer) and original.is_deleted():
            raise ValueError(
                f"{path!r} of the original was freed, as quantize_tree frees what it quantizes, so errors cannot be "
                "measured. Keep it with quantize_tree(..., donate=False), or call report without the original."
            )
        error = relative_error(value, original)
        sqnr = -20 * math.log10(error) if error else math.inf
    return LeafReport(path, fmt, shape, name, nbytes, 8 * nbytes / max(size, 1), error, sqnr, tied_to, method)


def finite(value: Any) -> Any:
    """The value as JSON has it: None for a number that is not finite."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


@jax.jit
def _energies(value: Any, original: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Sums of squares of the difference and of the original, in f32 at least, in units of the largest value."""
    dtype = wide(original.dtype)
    original = original.astype(dtype)
    peak = jnp.max(jnp.abs(original), initial=0)
    unit = jnp.where((peak >= jnp.finfo(dtype).tiny) & jnp.isfinite(peak), peak, 1)  # squares of it may not be numbers
    original = original / unit
    difference = materialize(value).astype(dtype) / unit - original
    return jnp.sum(jnp.square(difference)), jnp.sum(jnp.square(original))


COLUMNS = ("path", "format", "shape", "bytes", "bits/weight", "rel. error", "SQNR dB")


def _row(leaf: LeafReport, digits: int) -> list[str]:
    error = "" if leaf.relative_error is None else f"{leaf.relative_error:.{digits}f}"
    sqnr = "" if leaf.sqnr_db is None else f"{leaf.sqnr_db:.1f}"
    shape = f"({','.join(map(str, leaf.shape))}{',' if len(leaf.shape) == 1 else ''})"
    held = f"{leaf.nbytes:,}" if leaf.tied_to is None else f"as {leaf.tied_to}"
    made = leaf.format if leaf.method is None else f"{leaf.format} ({leaf.method})"
    return [leaf.path, made, shape, held, f"{leaf.bits_per_weight:.2f}", error, sqnr]


def _draw(figure: Any, leaves: Sequence[LeafReport]) -> Any:
    """Two panels with one bar per leaf: bytes held next to bytes dense, and the relative error."""
    made = figure(figsize=(10, 1.5 + 0.25 * len(leaves)), layout="constrained")
    sizes, errors = made.subplots(1, 2, sharey=True)
    names, places = [leaf.path for leaf in leaves], list(range(len(leaves)))
    sizes.barh(places, [leaf.dense_nbytes for leaf in leaves], color="0.85", label="dense")
    sizes.barh(places, [leaf.nbytes for leaf in leaves], height=0.5, label="held")
    sizes.set_yticks(places, names)
    sizes.invert_yaxis()
    sizes.set_xscale("log")
    sizes.set_xlabel("bytes")
    sizes.legend()
    errors.barh(places, [finite(leaf.relative_error) or 0.0 for leaf in leaves], color="tab:red")
    for place, leaf in enumerate(leaves):
        if leaf.relative_error is not None and not math.isfinite(leaf.relative_error):
            errors.text(0, place, f" {leaf.relative_error}", va="center", color="tab:red")
    errors.set_xlabel("relative error")
    return made
