"""One way to ask for any quantization: a configuration, `quantize` and `straight_through`."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
from collections.abc import Callable
from typing import Any, TypeVar, cast

import jax

from eformer._core import materialize, ste
from eformer._formats.activations.array import ActivationArray
from eformer._formats.arguments import as_index, keep_sharding
from eformer._jax import avals
from eformer._messages import called_otherwise, refuse_other_names, shown
from eformer.errors import ShardingError

from . import inputs
from .names import QuantizationType as QuantizationType
from .names import known_type
from .statistics import LeafStatistics
from .stored import behind, is_packed, unchanged
from .table import DEFAULT_BLOCK, FORMATS, Axis, Default, Format

F = TypeVar("F", bound=Callable[..., Any])
METHODS = ("round", "scale", "gptq", "awq", "awq+gptq")
BY_METHOD: list[Callable[..., Any]] = []  # holds `methods.encode`, whose module stands above this one


@dataclasses.dataclass(frozen=True)
class QuantizationConfig:
    """How to quantize an array. Immutable, validated, and unchanged by a round trip through JSON.

    Attributes:
        dtype: the format.
        block_size: values that share one scale. By default the format's own (64 where there is a choice; INT8
            and FP8 have no blocks); None is one scale per row of integers, 128 gives FP8 blocks of 128 × 128.
        simulate: give a dense array with quantized values and straight-through gradients, for training.
        use_kernel: let products use native kernels where there are any.
        axis: the axis values are packed or scaled along; None leaves it to the format or to the role of the leaf.
        scaled: ternary and binary carry a least-squares scale per output channel; False gives the bare codes.
        double_quant: store the absmax of NF4 at 8 bits too.
        symmetric: integers in blocks have a scale only; False adds a zero point.
        biased: integers in blocks have a bias, not a zero point; it and the scale have 16 bits. Implies
            `symmetric=False`.
        activations: "int8" or "fp8": products round rows of the other operand to that, and multiply codes with codes.
        backward: "int8" or "fp8": also round the gradient of such a product.
        static: one scale for all rows, from the statistics of a calibration, instead of one for each.
        smooth: how much of the outliers of inputs moves into the weight (SmoothQuant), 0 to 1; from statistics, too.
        method: how codes and scales are chosen: "round", "scale", "gptq", "awq" or "awq+gptq"; None is "round", or what
            `quantize_tree(method=...)` says. The last three need the statistics that `quantize_tree` takes.

    An option that the format cannot honour is refused unless it has its default value.

    >>> QuantizationConfig.from_json(QuantizationConfig("nf4", 32, axis=-1).to_json()).axis
    -1
    """

    dtype: QuantizationType | str = QuantizationType.NF4
    block_size: int | None = DEFAULT_BLOCK
    simulate: bool = False
    use_kernel: bool = True
    axis: Axis = dataclasses.field(default=None, kw_only=True)
    scaled: bool = dataclasses.field(default=True, kw_only=True)
    double_quant: bool = dataclasses.field(default=False, kw_only=True)
    symmetric: bool = dataclasses.field(default=True, kw_only=True)
    biased: bool = dataclasses.field(default=False, kw_only=True)
    activations: str | None = dataclasses.field(default=None, kw_only=True)
    backward: str | None = dataclasses.field(default=None, kw_only=True)
    static: bool = dataclasses.field(default=False, kw_only=True)
    smooth: float | None = dataclasses.field(default=None, kw_only=True)
    method: str | None = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", known_type(self.dtype))
        check_method(self.method)
        row = self.format
        given = row.default_block if isinstance(self.block_size, Default) else self.block_size
        object.__setattr__(self, "block_size", row.check_block(given))
        object.__setattr__(self, "axis", _checked_axis(self.axis))
        for name in ("simulate", "use_kernel", "scaled", "double_quant", "symmetric", "biased", "static"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, got {getattr(self, name)!r}.")
        if self.biased:
            object.__setattr__(self, "symmetric", False)
        for name in ("block_size", "scaled", "double_quant", "biased", "symmetric"):
            if name not in row.options and getattr(self, name) != _default(name):
                takers = ", ".join(f'"{kind}"' for kind, other in FORMATS.items() if name in other.options)
                raise ValueError(
                    f"{name}={getattr(self, name)!r} has no meaning for '{self.dtype}': it is an option of {takers}. "
                    "Leave it out, or choose such a format."
                )
        inputs.check(self)

    @property
    def format(self) -> Format:
        """The row of the table of formats."""
        return FORMATS[cast(QuantizationType, self.dtype)]  # which it is since `__post_init__`

    @property
    def label(self) -> str:
        """The format, and what inputs are rounded to."""
        return str(self.dtype) if self.activations is None else f"{self.dtype} x {self.activations}"

    @property
    def scales_many_axes(self) -> bool:
        """Can one scale serve several axes?"""
        return self.format.scales_many_axes and self.block_size is None

    def to_json(self) -> str:
        """The documented fields, and those of the others that have been changed."""
        fields = dataclasses.asdict(self)
        kept = {k: v for k, v in fields.items() if k in _DOCUMENTED or v != _default(k)}
        in_blocks = self.format.default_block is None and self.block_size is not None
        return json.dumps({**kept, "symmetric": self.symmetric} if in_blocks else kept)

    @classmethod
    def from_json(cls, text: str) -> QuantizationConfig:
        """The configuration `to_json` wrote, in this version of the library or an earlier one."""
        fields, allowed = json.loads(text), [f.name for f in dataclasses.fields(cls)]
        if not isinstance(fields, dict) or not set(fields) <= set(allowed):
            raise TypeError(f"a configuration is a JSON object with some of the fields {allowed}, got {text}.")
        # Earlier versions wrote a block size for every format, whatever it was; they did not know `symmetric`.
        row = FORMATS[known_type(fields.get("dtype", "nf4"))]
        if "block_size" not in row.options or (row.default_block is None and "symmetric" not in fields):
            fields.pop("block_size", None)
        return cls(**fields)


_DOCUMENTED = ("dtype", "block_size", "simulate", "use_kernel")


def _default(name: str) -> Any:
    return QuantizationConfig.__dataclass_fields__[name].default


def check_method(method: Any) -> None:
    """Raise unless there is such a method; None is one, too."""
    if method is not None and method not in METHODS:
        raise ValueError(f"{method=} is unknown; allowed are {', '.join(map(repr, METHODS))}.")


def _checked_axis(axis: Any) -> Axis:
    if axis is None:
        return None
    return tuple(as_index(a, "axis") for a in axis) if isinstance(axis, (list, tuple)) else as_index(axis, "axis")


@called_otherwise(
    group_size="values that share a scale are block_size={value}",
    bits='the format is dtype="int{value}", or "nf4", "fp8", "mxfp4" and so on',
    format="the format is dtype={value}",
    mode='the format is dtype=, such as "int4", with symmetric=False or biased=True, or "mxfp4"',
    zero_point="symmetric=False gives zero points",
)
def quantize(
    array: jax.Array,
    config: QuantizationConfig | None = None,
    dtype: QuantizationType | str | None = None,
    block_size: int | None = DEFAULT_BLOCK,
    simulate: bool = False,
    *,
    axis: Axis = None,
    scaled: bool = True,
    double_quant: bool = False,
    symmetric: bool = True,
    biased: bool = False,
    activations: str | None = None,
    backward: str | None = None,
    static: bool = False,
    smooth: float | None = None,
    statistics: LeafStatistics | None = None,
) -> Any:
    """Quantize a floating array to any format.

    An array that already has this configuration is returned as it is; one quantized differently is refused. The
    gradient with respect to `array` is zero, because rounding is a step function; to train, use `straight_through`.

    Args:
        array: the array to quantize; its sharding is kept.
        config: overrides `dtype`, `block_size` and `simulate`; the options below are added to it, and refused where
            they contradict it.
        dtype: the format, by default NF4: "nf4", "int8", "ternary", "binary", "int2" to "int6", "fp8", "fp8_e5m2",
            "mxfp4", "mxfp8", "mxfp8_e5m2", "nvfp4" or "iq4_nl".
        block_size: values that share one scale. By default the format's own (64 where there is a choice; INT8
            and FP8 have no blocks); None is one scale per row of integers, 128 gives FP8 blocks of 128 × 128.
        simulate: give a dense array with quantized values and straight-through gradients instead.
        axis: the axis values are packed or scaled along; each format has its default.
        scaled: ternary and binary carry a least-squares scale per output channel; False gives the bare codes.
        double_quant: store the absmax of NF4 at 8 bits too.
        symmetric: integers in blocks have a scale only; False adds a zero point.
        biased: integers in blocks have a bias instead of a zero point.
        activations: "int8" or "fp8": products round rows of the other operand to that, and multiply codes with codes.
        backward: "int8" or "fp8": also round the gradient of such a product.
        static: one scale for all rows, from `statistics`, instead of one for each.
        smooth: how much of the outliers of inputs moves into the weight (SmoothQuant), 0 to 1; from `statistics`, too.
        statistics: the statistics of this array's inputs, `stats[path]` of a calibration.

    >>> quantize(jax.numpy.ones((64, 32)), dtype="int8", activations="int8")
    ActivationArray(float32[64,32], int8 x int8, 8.50 bits per weight)
    """
    options = {"axis": axis, "scaled": scaled, "double_quant": double_quant, "symmetric": symmetric}
    options |= {"biased": biased, "activations": activations, "backward": backward, "static": static, "smooth": smooth}
    chosen = _chosen(config, dtype, block_size, simulate, options)
    if is_packed(array):
        return unchanged(array, config_of(behind(array)), chosen)
    if chosen.simulate:
        return _simulated(array, chosen)
    return inputs.quantized(array, chosen, statistics, _encoded)


def straight_through(
    array: jax.Array,
    config: QuantizationConfig | None = None,
    dtype: QuantizationType | str | None = None,
    block_size: int | None = DEFAULT_BLOCK,
    *,
    axis: Axis = None,
    scaled: bool = True,
    double_quant: bool = False,
    symmetric: bool = True,
    biased: bool = False,
) -> jax.Array:
    """`quantize(...).materialize()` whose gradient is that of `array` itself, for training with quantized weights."""
    options = {"axis": axis, "scaled": scaled, "double_quant": double_quant, "symmetric": symmetric, "biased": biased}
    chosen = dataclasses.replace(_chosen(config, dtype, block_size, True, options), simulate=True)
    return unchanged(array, config_of(behind(array)), chosen) if is_packed(array) else _simulated(array, chosen)


def dequantize(array: Any, dtype: Any = None) -> jax.Array:
    """The dense array behind a quantized one, in its own dtype or in `dtype`; `dequantize_tree` is for models.

    >>> import jax.numpy as jnp
    >>> dequantize(quantize(jnp.ones((64, 32)), dtype="nf4")).shape
    (64, 32)
    """
    if not hasattr(array, "shape") or not hasattr(array, "dtype"):
        raise TypeError(
            f"dequantize takes an array, got {array!r:.100} of type {type(array).__name__}. The parameters of a model "
            "go to dequantize_tree."
        )
    dense = materialize(array)
    return dense if dtype is None else dense.astype(dtype)


def _encoded(array: jax.Array, config: QuantizationConfig) -> Any:
    if config.method not in (None, "round"):
        bare = dataclasses.replace(inputs.bare(config), method=None, simulate=False)
        return BY_METHOD[0](array, None, bare, config.method)
    try:
        made = config.format.encode(array, config)
    except avals.ShardingTypeError as err:
        raise ShardingError(
            f"an array split as {jax.typeof(array).sharding.spec} cannot be quantized to {config.label} along axis "
            f"{-2 if config.axis is None else config.axis}: the part of a device would end inside a block or a byte. "
            "Split another axis, with jax.sharding.reshard(w, spec) before; or choose another axis= or block_size=."
        ) from err
    return made if config.use_kernel else made.replaced(use_kernel=False)


_simulated = ste(_encoded)


def _chosen(config: Any, dtype: Any, block_size: Any, simulate: Any, options: dict[str, Any]) -> QuantizationConfig:
    """The configuration given, with the options that were given beside it, or one made of the other arguments."""
    if config is None:
        return QuantizationConfig(QuantizationType.NF4 if dtype is None else dtype, block_size, simulate, **options)
    if not isinstance(config, QuantizationConfig):
        raise TypeError(
            f"config={shown(config)} is of type {type(config).__name__}, but must be a QuantizationConfig or None. "
            'Name a format with dtype=, as in quantize(w, dtype="nf4"); make a configuration with '
            "QuantizationConfig(**options)."
        )
    given = {name: value for name, value in options.items() if value is not _default(name)}
    for name, value in given.items():
        if getattr(config, name) not in (_default(name), value):
            raise ValueError(
                f"{name}={value!r} contradicts the configuration, which has {name}={getattr(config, name)!r}. "
                "Give it once."
            )
    return dataclasses.replace(config, **given) if given else config


_KEPT = 'what is to stay dense has a rule, rules={{"*lm_head*": None}}, or is one of the groups of skip='
_IN_RULES = {
    "group_size": 'it is an option of a format, rules={{"*": {{"dtype": "int4", "block_size": {value}}}}}',
    "bits": 'the format is a name in the rules, rules={{"*": "int{value}"}}; plan_bits finds one for each leaf',
    **dict.fromkeys(("exclude", "ignore", "modules_to_not_convert", "llm_int8_skip_modules"), _KEPT),
}


def options_in_rules(function: F) -> F:
    """Make `function` say where an option of a format belongs that it was given as an argument of its own."""
    taken = inspect.signature(function).parameters.keys()
    elsewhere = {field.name for field in dataclasses.fields(QuantizationConfig)} - taken

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        refuse_other_names(function, kwargs, _IN_RULES)
        wrong = {name: str(v) if name == "dtype" else v for name, v in kwargs.items() if name in elsewhere}
        if wrong:
            choice = repr(wrong["dtype"]) if wrong.keys() == {"dtype"} else repr({"dtype": "nf4", **wrong})
            raise TypeError(
                f"{', '.join(wrong)}= is not an argument here: formats and their options go into the rules. Write "
                f'rules={{"*": {choice}}}, or default={choice} for leaves that no rule matches.'
            )
        return function(*args, **kwargs)

    return cast(F, checked)


def quantize_stack(array: Any, config: QuantizationConfig, batch: int, statistics: LeafStatistics | None = None) -> Any:
    """`quantize(array, config)`, where `batch` leading axes number matrices that are quantized one by one."""
    if config.activations is not None:
        return inputs.quantized(array, config, statistics, lambda w, bare: quantize_stack(w, bare, batch))
    axis, ndim = -2 if config.axis is None else config.axis, len(array.shape)
    if not config.format.needs_whole_matrix or not isinstance(axis, int) or not -ndim <= axis < ndim:
        return quantize(array, config)  # what is encoded along one axis does not see the other matrices
    batch = min(batch, axis % ndim)  # an axis that values are packed along numbers no matrices
    if not batch:
        return quantize(array, config)
    inner = dataclasses.replace(config, axis=axis % ndim - ndim)

    def run(matrix: Any) -> Any:
        return quantize(matrix, inner)

    for _ in range(batch):
        run = jax.vmap(run)
    made = run(array)
    return keep_sharding(made, array) if hasattr(made, "with_sharding") else made


def config_of(q: Any) -> QuantizationConfig | None:
    """The configuration that quantizes as this array was quantized; None for a type that is not in the table."""
    if isinstance(q, ActivationArray):
        own = config_of(q.w)
        rounding = {"activations": q.activations, "backward": q.backward, "static": q.x_scale is not None}
        return None if own is None else dataclasses.replace(own, **rounding)
    found = [kind for kind, row in FORMATS.items() if isinstance(q, row.array) and kind == q.format]
    if not found:
        return None
    options = {"axis": q.axis or None, **FORMATS[found[0]].options_of(q)}
    return QuantizationConfig(found[0], use_kernel=q.use_kernel, **options)
