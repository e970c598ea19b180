"""Choosing tokens, remembering a conversation, ending a text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eformer.errors import CheckpointError
from eformer.models import Config, Memory, Model, Sampling, _generate, chat_text, forward, generate, init, load, stream
from eformer.models._generate import chosen

from . import folders

CONFIG = Config(vocabulary=16, width=32, layers=1, heads=2, kv_heads=1, hidden=48)
LOGITS = jnp.log(jnp.array([0.5, 0.25, 0.15, 0.1]))


def drawn(how: Sampling, seen: Any = (), logits: jax.Array = LOGITS) -> set[int]:
    mask = jnp.zeros(len(logits), bool).at[jnp.asarray(seen, int)].set(True)
    pick = jax.vmap(lambda key: chosen(logits, mask, key, how.numbers, how.sorts))
    return {int(token) for token in pick(jax.random.split(jax.random.key(0), 400))}


@pytest.mark.parametrize(
    ("how", "tokens"),
    [
        (Sampling(), {0}),
        (Sampling(1.0), {0, 1, 2, 3}),
        (Sampling(0.01), {0}),
        (Sampling(1.0, top_k=2), {0, 1}),
        (Sampling(1.0, top_k=9), {0, 1, 2, 3}),
        (Sampling(1.0, top_p=0.4), {0}),
        (Sampling(1.0, top_p=0.51), {0, 1}),
        (Sampling(1.0, top_p=0.8), {0, 1, 2}),
        (Sampling(1.0, top_k=3, top_p=0.84), {0, 1, 2}),  # of what the three sum to
        (Sampling(1.0, min_p=0.4), {0, 1}),
        (Sampling(2.0, min_p=0.6), {0, 1}),  # after the temperature: the odds are 1 to 0.71 to 0.55
    ],
)
def test_what_may_be_drawn(how: Sampling, tokens: set[int]):
    assert drawn(how) == tokens


def test_repetition():
    logits = jnp.array([2.0, 1.5, -1.0])
    assert drawn(Sampling(repetition_penalty=1.2), [0], logits) == {0}
    assert drawn(Sampling(repetition_penalty=1.5), [0], logits) == {1}
    assert drawn(Sampling(repetition_penalty=9.0), [0, 1], jnp.array([-0.1, -0.2, -1.1])) == {0}


@pytest.mark.parametrize("wrong", [{"temperature": -1}, {"top_p": 0}, {"min_p": 1}, {"top_k": -1}])
def test_impossible_numbers(wrong: dict[str, Any]):
    with pytest.raises(ValueError, match=f"{next(iter(wrong))}=.* is not allowed; give"):
        Sampling(**wrong)


@pytest.mark.parametrize("wrong", [{"count": -1}, {"chunk": 0}])
def test_impossible_counts(wrong: dict[str, Any]):
    with pytest.raises(ValueError, match="are not allowed; give 0 or more, and at least 1"):
        next(generate(Model(CONFIG, {}), [1], **{"count": 2, **wrong}))


def test_text_takes_a_tokenizer():
    with pytest.raises(ValueError, match="has no tokenizer"):
        next(stream(Model(CONFIG, {}), [1], 2))


def test_a_prompt_is_tokens_of_the_model(key: jax.Array):
    model = Model(CONFIG, init(CONFIG, key))
    for prompt in ([3, CONFIG.vocabulary], [-1]):
        with pytest.raises(
            ValueError, match=f"the prompt holds the tokens .* the model has 0 to {CONFIG.vocabulary - 1}"
        ):
            next(generate(model, prompt, 2))
    for prompt in ([1.5], "text", [[1, 2]]):
        with pytest.raises(TypeError, match="must be a list of whole numbers"):
            next(generate(model, prompt, 2))  # pyright: ignore[reportArgumentType]


def test_what_the_folder_says():
    said = {"do_sample": True, "temperature": 0.6, "top_k": 20, "eos_token_id": [1]}
    assert Sampling.of(said, top_k=None, seed=3) == Sampling(0.6, top_k=20, seed=3)
    assert Sampling.of(said, temperature=0.0, top_k=5) == Sampling(0.0, top_k=5)
    assert Sampling.of({**said, "do_sample": False}) == Sampling()
    assert Sampling.of({"do_sample": True}).temperature == 1.0


def test_a_seed_repeats_a_text(key: jax.Array):
    model = Model(CONFIG, init(CONFIG, key))
    texts = [
        np.concatenate(list(generate(model, [3], 16, temperature=2.0, **how))) for how in ({}, {"seed": 0}, {"seed": 1})
    ]
    np.testing.assert_array_equal(texts[0], texts[1])
    assert (texts[0] != texts[2]).any()


def test_a_memory_changes_nothing(key: jax.Array):
    model, memory = Model(CONFIG, init(CONFIG, key)), Memory()
    prompt = [3, 1, 4]
    for count, more in ((5, [2, 7]), (70, [5] * 50), (4, [9])):  # over the room of the first cache
        again = np.concatenate(list(generate(model, prompt, count, memory=memory))).tolist()
        logits = np.asarray(forward(CONFIG, model.params, jnp.asarray([*prompt, *again])[None]))[0]
        places = np.arange(len(prompt) - 1, len(prompt) + count - 1)
        assert logits[places, again] == pytest.approx(logits[places].max(-1), abs=1e-4)
        assert memory.tokens == [*prompt, *again]
        prompt = [*prompt, *again, *more]
    other = [8, *prompt[1:]]  # nothing in common
    expected = np.concatenate(list(generate(model, other, 6)))
    assert np.concatenate(list(generate(model, other, 6, memory=memory))).tolist() == expected.tolist()


def test_what_is_remembered_is_not_read_again(key: jax.Array, monkeypatch: pytest.MonkeyPatch):
    begun, read = [], _generate._read
    monkeypatch.setattr(_generate, "_read", lambda *given: begun.append(int(given[4])) or read(*given))
    model, memory = Model(CONFIG, init(CONFIG, key)), Memory()
    for prompt in ([3, 1, 4], [3, 1, 4], [3, 1, 5, 9], [8]):  # of the last token the logits are wanted
        memory.read(model, prompt, 4)
    assert begun == [0, 2, 2, 0]


def test_a_memory_in_eight_bits(key: jax.Array):
    """It grows without a second rounding, and its tokens are nearly the likeliest of the exact model."""
    model, memory = Model(CONFIG, init(CONFIG, key)), Memory("int8")
    made = np.concatenate(list(generate(model, [3, 1, 4], 5, memory=memory, cache="int8"))).tolist()
    before = jax.tree.leaves(memory.cache)[0]
    made += np.concatenate(list(generate(model, [3, 1, 4, *made], 160, memory=memory))).tolist()
    after = jax.tree.leaves(memory.cache)[0]
    assert memory.room == 256 > before.shape[-3]
    np.testing.assert_array_equal(after[..., :7, :, :], before[..., :7, :, :])
    assert before.dtype == np.int8
    logits = np.asarray(forward(CONFIG, model.params, jnp.asarray([3, 1, 4, *made])[None]))[0]
    places = np.arange(2, 2 + len(made))
    assert logits[places, made] == pytest.approx(logits[places].max(-1), abs=0.02)
    with pytest.raises(ValueError, match="cache='int4' contradicts the memory, which was made with cache='int8'"):
        next(generate(model, [1], 1, memory=memory, cache="int4"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = folders.write(tmp_path_factory.mktemp("model"), "llama 2")
    template = "{{ bos_token }}{% for m in messages %}{{ m.role[0] }} {{ m.content }}{{ eos_token }}{% endfor %}a "
    folders.write_tokenizer(made, template)
    return made


def test_texts_end_before_a_stop(folder: Path):
    model = load(folder)
    prompt = model.tokenizer.encode("abc")
    text = "".join(piece for piece, _ in stream(model, prompt, 24, chunk=4))
    stop = text[7:10]
    cut = "".join(piece for piece, _ in stream(model, prompt, 24, stop=[stop, "no such"], chunk=4))
    assert cut == text[: text.index(stop)]
    assert "".join(piece for piece, _ in stream(model, prompt, 10, stop=[text[9] + "!"], chunk=4)) == text[:10]


def test_a_conversation_in_words(folder: Path):
    model = load(folder)
    assert chat_text(model, [{"role": "user", "content": "bad"}]) == "<s>u bad</s>a "
    with pytest.raises(CheckpointError, match="has no chat template"):
        chat_text(Model(CONFIG, {}), [])
    hostile = Model(CONFIG, {}, template="{{ ''.__class__.__mro__ }}")
    with pytest.raises(CheckpointError, match="chat template that fails: access to attribute"):
        chat_text(hostile, [])
    refusing = Model(CONFIG, {}, template="{{ raise_exception('only users') }}")
    with pytest.raises(CheckpointError, match="only users"):
        chat_text(refusing, [])
