"""`evaluate`: how well a language model predicts a text, and how far its predictions are from those of another one.

A text is read in windows. Every token but the first is predicted once, from what precedes it in its window:

    window 8, stride 4      0 1 2 3 4 5 6 7 8           tokens 1 to 8 are judged
                                    4 5 6 7 8 9 10 11 12    tokens 9 to 12, with at least 4 tokens before them
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eformer import _table
from eformer._core import implicit
from eformer._quantize.report import finite
from eformer._quantize.tree import check_alive

from .estimates import Estimate, exponential, mean_of

WINDOW = 512
_LOGITS = 1 << 26  # how many are made at a time
_COUNTED = ("tokens", "windows", "window", "stride")


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """How well a text was predicted. Prints as a table; `to_json` gives the same to programs.

    `perplexity` is exp of the mean negative log likelihood per token, `bits` that mean in bits. Against a reference,
    `change` is how much larger the perplexity is, as a fraction; `divergence` is the mean Kullback-Leibler divergence
    of the predictions from those of the reference, in nats; `agreement` is the share of tokens for which both find the
    same token most likely. Errors are standard errors of the mean over windows, and those of `change` are errors of the
    difference between two models on one text, which is far smaller than that of either.
    """

    tokens: int
    windows: int
    window: int
    stride: int
    perplexity: Estimate
    bits: Estimate
    reference_perplexity: Estimate | None = None
    change: Estimate | None = None
    divergence: Estimate | None = None
    agreement: Estimate | None = None

    def rows(self) -> list[tuple[str, str]]:
        """The measures as text, by name."""
        shown = {
            "perplexity": self.perplexity.text(3),
            "bits per token": self.bits.text(4),
            "perplexity of the reference": self.reference_perplexity and self.reference_perplexity.text(3),
            "change of perplexity": self.change and self.change.text(2, percent=True, sign=True),
            "KL divergence (nats)": self.divergence and self.divergence.text(5),
            "same most likely token": self.agreement and self.agreement.text(2, percent=True),
        }
        return [(name, value) for name, value in shown.items() if value is not None]

    @property
    def reading(self) -> str:
        """How the text was read."""
        return f"{self.tokens:,} tokens in {self.windows:,} windows of {self.window}, stride {self.stride}"

    def __str__(self) -> str:
        return "\n".join([self.reading, *_table.lines(("measure", "value ± standard error"), self.rows())])

    def to_dict(self) -> dict[str, Any]:
        """Numbers, and pairs of a value and its error; what is not finite is None, as JSON has no name for it."""
        found: dict[str, Any] = {name: getattr(self, name) for name in _COUNTED}
        for field in dataclasses.fields(self):
            if field.name not in _COUNTED and (value := getattr(self, field.name)) is not None:
                found[field.name] = {k: finite(v) for k, v in dataclasses.asdict(value).items()}
        return found

    def to_json(self) -> str:
        return json.dumps(self.to_dict())


def evaluate(
    forward: Callable[[Any, Any], Any],
    params: Any,
    tokens: Any,
    *,
    against: Any = None,
    window: int | None = None,
    stride: int | None = None,
    batch: int | None = None,
) -> Evaluation:
    """Measure how well a language model predicts a text.

    Args:
        forward: `forward(params, tokens)` gives logits (texts, length, vocabulary) for tokens (texts, length).
        params: dense or quantized; `forward` is run under `implicit`.
        tokens: integers, one text (length,) or several of one length (texts, length).
        against: the reference: other parameters for `forward`, a pair `(function, parameters)`, or a function of tokens
            alone, which is called as it is (so that it may remember its results).
        window: the most tokens a prediction sees; by default 512, or the whole text if it is shorter.
        stride: the distance from one window to the next; by default the size of a window. A shorter one gives every
            prediction at least `window - stride` tokens of context (except in the first window), and takes longer.
        batch: how many windows are computed at a time; by default enough for 2**26 logits.

    >>> table = jnp.log(jnp.array([[0.9, 0.1], [0.1, 0.9]]))
    >>> found = evaluate(lambda params, tokens: params[tokens], table, [0, 1, 0, 1, 0, 1, 0, 1], window=2)
    >>> f"{found.perplexity.value:.2f}", found.tokens
    ('10.00', 7)
    """
    texts = _checked_tokens(tokens)
    check_alive(params, "params")
    check_alive(against, "against")
    window, stride = _checked_windows(window, stride, texts.shape[1])
    reference = _reference(forward, against)
    run = _program(forward)
    vocabulary = _vocabulary(run, params, texts[:1, :window])
    if int(texts.max()) >= vocabulary:
        raise ValueError(f"tokens has {int(texts.max())}, but the model knows tokens from 0 to {vocabulary - 1} only.")
    starts, first = _windows(texts.shape[1], window, stride)
    places = [(row, start, skip) for row in range(len(texts)) for start, skip in zip(starts, first, strict=True)]
    size = _checked_batch(batch, window * vocabulary, len(places))
    sums: list[Any] = []
    for at in range(0, len(places), size):
        some = places[at : at + size]
        padded = some + [some[-1]] * (size - len(some))  # one program for all of them
        read = np.stack([texts[row, start : start + window + 1] for row, start, _ in padded])
        judged = np.arange(window) >= np.array([[skip] for _, _, skip in padded])
        inputs = jnp.asarray(read[:, :-1])
        logits = run(params, inputs)
        other = None if reference is None else _same_shape(reference(inputs), logits)
        found = _measured(logits, other, jnp.asarray(read[:, 1:]), jnp.asarray(judged))
        sums += [{name: float(value[i]) for name, value in found.items()} for i in range(len(some))]
    counts = np.array([window - skip for _, _, skip in places], np.int64)
    means = {name: mean_of(np.array([s[name] for s in sums], np.float64), counts) for name in sums[0]}
    return _evaluation(means, int(counts.sum()), len(places), window, stride)


def _evaluation(means: dict[str, Estimate], tokens: int, windows: int, window: int, stride: int) -> Evaluation:
    loss, nat = means["loss"], 1 / math.log(2)
    bits = Estimate(loss.value * nat, None if loss.error is None else loss.error * nat)
    found = Evaluation(tokens, windows, window, stride, exponential(loss), bits)
    if "reference" not in means:
        return found
    return dataclasses.replace(
        found,
        reference_perplexity=exponential(means["reference"]),
        change=exponential(means["difference"], less=1.0),
        divergence=means["divergence"],
        agreement=means["agreement"],
    )


@functools.lru_cache(maxsize=4)
def _jitted(forward: Callable[..., Any]) -> Callable[..., Any]:
    return jax.jit(implicit(forward))


def _program(forward: Any) -> Callable[..., Any]:
    """`forward` under implicit and jit: the last few are remembered, since compiling takes longer than reading."""
    if not callable(forward):
        raise TypeError(f"forward is {type(forward).__name__}, not a function of parameters and tokens.")
    try:
        return _jitted(forward)
    except TypeError:  # it cannot be hashed
        return jax.jit(implicit(forward))


def _reference(forward: Any, against: Any) -> Callable[[Any], Any] | None:
    """A function of tokens."""
    if against is None or callable(against):
        return against
    if isinstance(against, tuple) and len(against) == 2 and callable(against[0]):
        forward, against = against
    return functools.partial(_program(forward), against)


def _checked_tokens(tokens: Any) -> np.ndarray:
    try:
        texts = np.asarray(tokens)
    except ValueError as err:
        lengths = sorted({len(text) if hasattr(text, "__len__") else 1 for text in tokens})
        if len(lengths) < 2:
            raise
        raise ValueError(
            f"tokens are texts of different lengths, from {lengths[0]} to {lengths[-1]}. Give texts of one length: cut "
            "them, join them to one text, or call evaluate for each."
        ) from err
    if not np.issubdtype(texts.dtype, np.integer):
        raise TypeError(f"tokens are integers, got {texts.dtype}{list(texts.shape)}; encode the text first.")
    if texts.ndim not in (1, 2) or texts.shape[-1] < 2 or not texts.size:
        raise ValueError(
            f"tokens has the shape {list(texts.shape)}; give (length,) or (texts, length) with a length of 2 or more: "
            "the first token is not predicted."
        )
    if texts.min() < 0:
        raise ValueError(f"tokens has {int(texts.min())}; tokens are 0 or more.")
    return np.atleast_2d(texts).astype(np.int32)


def _checked_windows(window: int | None, stride: int | None, length: int) -> tuple[int, int]:
    if window is None:
        window = min(WINDOW, length - 1)
    if not isinstance(window, int) or not 1 <= window < length:
        raise ValueError(
            f"window={window!r} is not allowed: a text of {length} tokens has windows of 1 to {length - 1}."
        )
    stride = window if stride is None else stride
    if not isinstance(stride, int) or not 1 <= stride <= window:
        raise ValueError(f"stride={stride!r} is not allowed: give 1 to {window} (the window), or tokens are left out.")
    return window, stride


def _checked_batch(batch: int | None, logits: int, windows: int) -> int:
    if batch is not None and (not isinstance(batch, int) or batch < 1):
        raise ValueError(f"batch={batch!r} is not allowed; give a number of windows, 1 or more.")
    return min(windows, max(1, _LOGITS // logits) if batch is None else batch)


def _windows(length: int, window: int, stride: int) -> tuple[list[int], list[int]]:
    """Where windows begin, and how many predictions of each belong to the one before.

    The last one is moved back to end with the text.

    >>> _windows(13, 8, 4), _windows(12, 8, 4), _windows(9, 8, 4)
    (([0, 4], [0, 4]), ([0, 3], [0, 5]), ([0], [0]))
    """
    last = length - 1 - window
    starts = [*range(0, last, stride), last]
    ends = [0, *(start + window for start in starts[:-1])]
    return starts, [end - start if i else 0 for i, (start, end) in enumerate(zip(starts, ends, strict=True))]


def _vocabulary(run: Any, params: Any, tokens: np.ndarray) -> int:
    made = jax.eval_shape(run, params, jax.ShapeDtypeStruct(tokens.shape, jnp.int32))
    shape = getattr(made, "shape", None)
    if shape is None or len(shape) != 3 or shape[:2] != tokens.shape or not jnp.issubdtype(made.dtype, jnp.floating):
        what = f"{made.dtype}{list(shape)}" if shape is not None else jax.tree.structure(made)
        raise ValueError(
            f"forward(params, tokens) of tokens {list(tokens.shape)} gives {what}; floating logits "
            f"{[*tokens.shape, 'vocabulary']} are needed. Wrap it in a function that returns them."
        )
    return int(shape[-1])


def _same_shape(reference: Any, logits: Any) -> Any:
    if tuple(np.shape(reference)) != tuple(logits.shape):
        raise ValueError(
            f"the reference gives logits of shape {list(np.shape(reference))}, the model {list(logits.shape)}: their "
            "vocabularies differ, so they cannot be compared."
        )
    return jnp.asarray(reference)


@jax.jit
def _measured(logits: jax.Array, reference: Any, targets: jax.Array, judged: jax.Array) -> dict[str, jax.Array]:
    """Sums over the judged tokens of every window."""

    def total(values: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(judged, values, 0.0), axis=-1)

    def loss(of: jax.Array) -> jax.Array:
        return -jnp.take_along_axis(of, targets[..., None], axis=-1)[..., 0]

    mine = jax.nn.log_softmax(logits.astype(jnp.float32))
    found = {"loss": loss(mine)}
    if reference is not None:
        theirs = jax.nn.log_softmax(reference.astype(jnp.float32))
        found |= {"reference": loss(theirs), "difference": loss(mine) - loss(theirs)}
        odds = jnp.exp(theirs)
        found["divergence"] = jnp.sum(jnp.where(odds == 0, 0.0, odds * (theirs - mine)), axis=-1)
        same = (jnp.argmax(mine, axis=-1) == jnp.argmax(theirs, axis=-1)).astype(jnp.float32)
        found["agreement"] = jnp.where(jnp.isnan(found["divergence"]), jnp.nan, same)
    return {name: total(values) for name, values in found.items()}
