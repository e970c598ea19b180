"""The tokenizers against tokens made by the `tokenizers` library (golden/make_tokenizers.py)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eformer.demo.bpe import BytePairTokenizer
from eformer.demo.wordpiece import WordPieceTokenizer
from eformer.errors import CheckpointError

GOLDEN = json.loads((Path(__file__).parent / "golden" / "tokenizers.json").read_text())


def test_byte_pairs_are_those_of_the_reference():
    golden = GOLDEN["byte_pairs"]
    tokenizer = BytePairTokenizer(golden["tokens"], golden["merges"], single_digits=True)
    assert len(golden["cases"]) > 60
    for text, tokens in golden["cases"]:
        assert tokenizer.encode(text).tolist() == tokens, text
        assert tokenizer.decode(tokens) == text


def test_word_pieces_are_those_of_the_reference(tmp_path: Path):
    golden = GOLDEN["word_pieces"]
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({"model": {"type": "WordPiece", "vocab": golden["tokens"]}}))
    tokenizer = WordPieceTokenizer.from_file(path)
    assert len(golden["cases"]) > 60
    for text, tokens in golden["cases"]:
        assert tokenizer.encode(text) == tokens, text
    long = golden["cases"][0][0]
    assert tokenizer.encode(long, longest=5) == [*golden["cases"][0][1][:4], golden["cases"][0][1][-1]]


def test_special_tokens_numbers_and_damage():
    notes = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": ["<|end|>", "1", "2", "12", "Ã", "©", "Ċ"],
        "tokenizer.ggml.token_type": [3, 1, 1, 1, 1, 1, 1],
        "tokenizer.ggml.merges": ["1 2"],
    }
    tokenizer = BytePairTokenizer.from_metadata(notes)
    assert tokenizer.encode("12<|end|>é").tolist() == [3, 0, 4, 5]
    assert tokenizer.decode([3, 0, 4, 5]) == "12<|end|>é"
    assert tokenizer.decode([4]) == "�"  # half of a character
    single = BytePairTokenizer.from_metadata({**notes, "tokenizer.ggml.pre": "smollm"})
    assert single.encode("12").tolist() == [1, 2]
    with pytest.raises(CheckpointError, match=r"no token for 'x', which 'x' needs"):
        tokenizer.encode("x")
    with pytest.raises(CheckpointError, match="'llama'; only 'gpt2'"):
        BytePairTokenizer.from_metadata({"tokenizer.ggml.model": "llama"})


def test_vocabulary_files(tmp_path: Path):
    (tmp_path / "vocab.txt").write_text("[UNK]\n[CLS]\n[SEP]\nw\n##x\n")
    tokenizer = WordPieceTokenizer.from_file(tmp_path / "vocab.txt")
    assert tokenizer.encode("WX wy " + 101 * "w") == [1, 3, 4, 0, 0, 2]
    (tmp_path / "tokenizer.json").write_text('{"model": {"type": "Unigram", "vocab": []}}')
    with pytest.raises(CheckpointError, match="no WordPiece tokenizer"):
        WordPieceTokenizer.from_file(tmp_path / "tokenizer.json")
    with pytest.raises(CheckpointError, match=r"no token \[UNK\]"):
        WordPieceTokenizer({"a": 0})
