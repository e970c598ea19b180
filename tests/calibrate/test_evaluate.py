"""`evaluate`: perplexity, divergence and agreement against NumPy, token by token; the same on the command line."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cli import tiny

import eformer as ef
from eformer._calibrate.estimates import mean_of
from eformer._calibrate.evaluate import _windows  # pyright: ignore[reportPrivateUsage]
from eformer.cli import main

VOCABULARY, WIDTH = 24, 64


def model(seed: int) -> dict[str, jax.Array]:
    a, b, c = jax.random.split(jax.random.key(seed), 3)
    return {
        "embedding": jax.random.normal(a, (VOCABULARY, WIDTH)),
        "mix": jax.random.normal(b, (WIDTH, WIDTH)) / 8,
        "head": jax.random.normal(c, (WIDTH, VOCABULARY)) / 8,
    }


def forward(params: Any, tokens: jax.Array) -> jax.Array:
    """Every prediction depends on all tokens before it, and so on where its window begins."""
    x = jnp.cumsum(ef.materialize(params["embedding"][tokens]), axis=1) / 4
    return jnp.tanh(x @ params["mix"]) @ params["head"]


def log_odds(params: Any, tokens: np.ndarray) -> np.ndarray:
    """The same in NumPy."""
    w = {name: np.asarray(value, np.float64) for name, value in params.items()}
    logits = np.tanh(np.cumsum(w["embedding"][tokens], axis=0) / 4 @ w["mix"]) @ w["head"]
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def by_hand(params: Any, other: Any, text: np.ndarray, window: int, stride: int) -> dict[str, float]:
    """Token by token: each is predicted in the first window that reaches it."""
    found: list[tuple[float, float, float, bool]] = []
    starts = [*range(0, len(text) - 1 - window, stride), len(text) - 1 - window]
    for place in range(1, len(text)):
        start = next(s for s in starts if place <= s + window)
        mine, theirs = (log_odds(p, text[start:place])[-1] for p in (params, other))
        divergence = float(np.sum(np.exp(theirs) * (theirs - mine)))
        found.append((mine[text[place]], theirs[text[place]], divergence, mine.argmax() == theirs.argmax()))
    means = np.mean(np.array(found, np.float64), axis=0)
    names = ("perplexity", "reference_perplexity", "divergence", "agreement")
    values = (math.exp(-means[0]), math.exp(-means[1]), means[2], means[3])
    return {**dict(zip(names, values, strict=True)), "change": math.exp(means[1] - means[0]) - 1}


@pytest.mark.parametrize(("window", "stride", "batch"), [(16, 16, None), (16, 5, 3), (39, None, 1)])
def test_measures_are_those_of_numpy(window, stride, batch):
    text = np.random.default_rng(0).integers(0, VOCABULARY, 40)
    params, other = model(1), model(2)
    found = ef.evaluate(forward, params, text, against=other, window=window, stride=stride, batch=batch)
    assert (found.tokens, found.window, found.stride) == (39, window, stride or window)
    for name, value in by_hand(params, other, text, window, stride or window).items():
        assert getattr(found, name).value == pytest.approx(value, rel=1e-5), name
    assert found.bits.value == pytest.approx(math.log2(found.perplexity.value))
    assert (found.perplexity.error is None) == (window == 39)  # one window


def test_windows_predict_every_token_once():
    for length in range(2, 40):
        for window in range(1, length):
            for stride in range(1, window + 1):
                judged = [
                    start + place + 1
                    for start, skip in zip(*_windows(length, window, stride), strict=True)
                    for place in range(skip, window)
                ]
                assert judged == list(range(1, length)), (length, window, stride)


def test_errors_of_estimation_are_those_seen_in_many_texts():
    rng = np.random.default_rng(1)

    def sample() -> tuple[np.ndarray, np.ndarray]:
        counts = rng.integers(20, 40, 50)
        shift = rng.normal(0, 1, 50)  # tokens of a window go together
        return np.array([rng.normal(3 + s, 1, n).sum() for s, n in zip(shift, counts, strict=True)]), counts

    found = [mean_of(*sample()) for _ in range(300)]
    spread = np.std([estimate.value for estimate in found])
    assert np.mean([estimate.error for estimate in found]) == pytest.approx(spread, rel=0.15)


def test_quantized_models_several_texts_and_other_references():
    texts = np.random.default_rng(3).integers(0, VOCABULARY, (3, 33))
    dense = model(1)
    small = ef.quantize_tree(dense, default="nf4", min_size=0, donate=False)
    calls = []

    def remembered(tokens: jax.Array) -> Any:
        calls.append(tokens.shape)
        return np.asarray(forward(dense, tokens))

    found = ef.evaluate(forward, small, texts, against=remembered)
    assert (found.tokens, found.windows, found.window) == (96, 3, 32)
    assert calls == [(3, 32)]
    pair = ef.evaluate(forward, small, texts, against=(lambda p, t: forward(p["model"], t), {"model": dense}))
    assert pair.divergence is not None
    assert found.divergence is not None
    assert pair.divergence.value == pytest.approx(found.divergence.value, rel=1e-4)
    assert 0 < found.divergence.value < 0.1
    same = ef.evaluate(forward, dense, texts, against=dense)
    assert same.change is not None
    assert same.change.value == 0
    assert same.agreement is not None
    assert same.agreement.value == 1


def test_text_and_json():
    text = np.random.default_rng(4).integers(0, VOCABULARY, 65)
    found = ef.evaluate(forward, model(1), text, against=model(2), window=16)
    assert str(found).splitlines()[0] == "64 tokens in 4 windows of 16, stride 16"
    assert "KL divergence (nats)" in str(found)
    read = json.loads(found.to_json())
    assert read["tokens"] == 64
    assert read["perplexity"] == {"value": found.perplexity.value, "error": found.perplexity.error}
    assert "change" not in json.loads(ef.evaluate(forward, model(1), text).to_json())


def test_nan_stays_nan():
    text = np.arange(20) % VOCABULARY
    broken = {**model(1), "head": model(1)["head"].at[0, 0].set(jnp.nan)}
    found = ef.evaluate(forward, broken, text, against=model(1))
    assert found.change is not None
    assert found.agreement is not None
    assert all(map(math.isnan, (found.perplexity.value, found.change.value, found.agreement.value)))
    assert json.loads(found.to_json())["perplexity"]["value"] is None


@pytest.mark.parametrize(
    ("tokens", "options", "error", "said"),
    [
        ([0.5, 1.0], {}, TypeError, "encode the text first"),
        ([1], {}, ValueError, "length of 2 or more"),
        ([1, -1], {}, ValueError, "tokens has -1"),
        ([1, 2, VOCABULARY], {}, ValueError, "from 0 to 23 only"),
        ([1, 2, 3], {"window": 3}, ValueError, "windows of 1 to 2"),
        ([1, 2, 3], {"window": 2, "stride": 3}, ValueError, "stride=3 is not allowed"),
        ([1, 2, 3], {"batch": 0}, ValueError, "batch=0"),
        ([1, 2, 3], {"against": lambda tokens: np.zeros((1, 2, 7))}, ValueError, "vocabularies differ"),
    ],
)
def test_bad_input(tokens, options, error, said):
    with pytest.raises(error, match=said):
        ef.evaluate(forward, model(1), tokens, **options)


def test_a_forward_that_gives_no_logits():
    with pytest.raises(ValueError, match=r"'vocabulary'\] are needed"):
        ef.evaluate(lambda params, tokens: params["head"], model(1), [1, 2, 3])
    with pytest.raises(TypeError, match="not a function"):
        ef.evaluate(None, model(1), [1, 2, 3])  # pyright: ignore[reportArgumentType]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    gguf, text = tiny.write(tmp_path / "tiny.gguf"), tmp_path / "text.txt"
    text.write_text("ab cd dab\n" * 12)
    argv = ["evaluate", str(gguf), "--quiet", "--text", str(text), "--window", "16", "--stride", "8"]
    assert main([*argv, "--against", str(gguf), "--against-format", "int8", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["window"], found["stride"], found["model"]) == (16, 8, str(gguf))
    assert 0 <= found["divergence"]["value"] < 0.01
    assert 0.9 < found["agreement"]["value"] <= 1
    monkeypatch.setattr("sys.stdin", io.StringIO(text.read_text()))
    assert main([*argv[:4], "-", "--tokens", "17"]) == 0
    said = capsys.readouterr().out
    assert "16 tokens in 1 windows of 16, stride 16" in said
    assert "perplexity" in said
    assert main([*argv[:6], "1000"]) == 1
    assert "windows of 1 to" in capsys.readouterr().err
    assert main([*argv, "--tokens", "1"]) == 2
    assert main(["evaluate", str(gguf), "--text", str(tmp_path / "none.txt")]) == 1
