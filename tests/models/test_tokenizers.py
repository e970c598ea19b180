"""The tokenizers of model files against tokens that were made once (golden/make_tokenizers.py)."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Reference
from tokenizers import models, normalizers, pre_tokenizers, processors

from eformer.errors import CheckpointError
from eformer.models import Tokenizer

GOLDEN = json.loads((Path(__file__).parent / "golden" / "tokenizers.json").read_text())


def test_byte_pairs():
    golden = GOLDEN["byte_pairs"]
    tokenizer = Tokenizer.byte_pairs(golden["tokens"], golden["merges"], single_digits=True)
    assert len(golden["cases"]) > 60
    for text, tokens in golden["cases"]:
        assert tokenizer.encode(text).tolist() == tokens, text
        assert tokenizer.decode(tokens) == text


def word_pieces(vocabulary: dict[str, int], path: Path) -> Path:
    """A tokenizer.json as BERT has it, with texts cut and padded."""
    made = Reference(models.WordPiece(vocabulary, unk_token="[UNK]"))
    made.normalizer, made.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    made.post_processor = processors.BertProcessing(("[SEP]", vocabulary["[SEP]"]), ("[CLS]", vocabulary["[CLS]"]))
    made.enable_padding(length=128)
    made.enable_truncation(8)
    made.save(str(path))
    return path


def test_word_pieces(tmp_path: Path):
    golden = GOLDEN["word_pieces"]
    path = word_pieces(golden["tokens"], tmp_path / "tokenizer.json")
    tokenizer = Tokenizer.from_file(path)
    assert len(golden["cases"]) > 60
    for text, tokens in golden["cases"]:
        assert tokenizer.encode(text).tolist() == tokens, text
    text, tokens = golden["cases"][0]
    assert Tokenizer.from_file(path, longest=5).encode(text).tolist() == [*tokens[:4], tokens[-1]]


NOTES = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "default",
    "tokenizer.ggml.tokens": ["<|end|>", "1", "2", "12", "Ã", "©", "Ċ"],
    "tokenizer.ggml.token_type": [3, 1, 1, 1, 1, 1, 1],
    "tokenizer.ggml.merges": ["1 2"],
}


def test_special_tokens_and_numbers():
    tokenizer = Tokenizer.from_metadata(NOTES)
    assert tokenizer.encode("12<|end|>é").tolist() == [3, 0, 4, 5]
    assert tokenizer.decode([3, 0, 4, 5]) == "12<|end|>é"
    assert tokenizer.decode([4]) == "�"  # half of a character
    assert tokenizer.encode("").tolist() == []
    single = Tokenizer.from_metadata({**NOTES, "tokenizer.ggml.pre": "smollm"})
    assert single.encode("12").tolist() == [1, 2]


@pytest.mark.parametrize("text", ["x", "1x2", "<|end|>x", "1\udc78"])
def test_nothing_is_dropped(text: str):
    with pytest.raises(CheckpointError, match=r"no token for '[x?]', which .* needs"):
        Tokenizer.from_metadata(NOTES).encode(text)


def test_damage(tmp_path: Path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer.json: is not a tokenizer: .* Fetch it again"):
        Tokenizer.from_file(tmp_path / "tokenizer.json")
    with pytest.raises(CheckpointError, match="'llama'; only 'gpt2'"):
        Tokenizer.from_metadata({"tokenizer.ggml.model": "llama"})
    with pytest.raises(CheckpointError, match="a merge with '3', which is not in its vocabulary"):
        Tokenizer.from_metadata({**NOTES, "tokenizer.ggml.merges": ["1 2", "12 3"]})


def test_without_the_package(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ImportError, match=r"pip install 'eformer\[models\]'"):
        Tokenizer.from_metadata(NOTES)
