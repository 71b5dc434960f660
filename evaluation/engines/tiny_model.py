"""A model of random weights that a real engine serves on two CPU cores: made on the spot, nothing is downloaded.

The folder holds no weights: the engine makes them up (``--load-format dummy``). What it says is noise, what it costs is
not. With two ranks on one core each, 8 decodes take 5 ms and a chunk of 256 to 512 tokens 20 to 33 ms, so TBT SLOs of
25 to 50 ms and chunks pull in opposite directions, as on a GPU.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

NAME = "tiny"
VOCABULARY = 4096
FIRST_WORD_TOKEN = 2
"""Token ids below it are special: 0 begins, 1 ends a text."""
LONGEST_TOKENS = 8192
_BEGIN, _END = "<|begin|>", "<|end|>"

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": LONGEST_TOKENS,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
    "bos_token_id": 0,
    "eos_token_id": 1,
}
"""``config.json``, as Hugging Face's Qwen2 reads it. Two KV heads: it can be split over two ranks."""

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


class TokenizersMissing(RuntimeError):
    """The package ``tokenizers`` is not installed; it comes with vLLM."""


def make_tiny_model(folder: Path) -> None:
    """Writes config, tokenizer and generation config into an existing folder; takes about a second.

    The same files come out every time.

    Raises:
        TokenizersMissing: see there.
    """
    _trained_tokenizer().save(str(folder / "tokenizer.json"))
    documents = {
        "config.json": CONFIG,
        "generation_config.json": {"bos_token_id": 0, "eos_token_id": 1},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": _BEGIN,
            "eos_token": _END,
            "model_max_length": LONGEST_TOKENS,
            "chat_template": CHAT_TEMPLATE,
        },
    }
    for name, document in documents.items():
        (folder / name).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def random_texts(model: Path, tokens: Sequence[int], seed: int) -> list[str]:
    """Returns texts of so many tokens each for the model in a folder; nearly, for a cut may join two tokens.

    Raises:
        TokenizersMissing: see there.
    """
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise TokenizersMissing("the package tokenizers is missing; it comes with vLLM: see docs/vllm.md") from error
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    draw = random.Random(seed)  # noqa: S311  no secret depends on it
    words = _words(random.Random(0))  # noqa: S311
    texts = []
    for count in tokens:
        text = " ".join(draw.choices(words, k=count))  # a word is a token at the least
        end = tokenizer.encode(text).offsets[count - 1][1]
        texts.append(text[:end])
    return texts


def _trained_tokenizer() -> Any:
    """Returns a byte-level BPE tokenizer of VOCABULARY entries, trained on made-up words."""
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    except ImportError as error:
        raise TokenizersMissing("the package tokenizers is missing; it comes with vLLM: see docs/vllm.md") from error
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[_BEGIN, _END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_lines(), trainer)
    return tokenizer


def _lines() -> Iterator[str]:
    """Yields lines of words made of syllables: enough different ones to fill the vocabulary."""
    draw = random.Random(0)  # noqa: S311  no secret depends on it
    words = _words(draw)
    for _ in range(2000):
        yield " ".join(draw.choices(words, k=12))


def _words(draw: random.Random) -> list[str]:
    syllables = [a + b for a in "bcdfghjklmnprstvwz" for b in ("a", "e", "i", "o", "u", "an", "er", "in", "os")]
    return ["".join(draw.choices(syllables, k=draw.randint(1, 4))) for _ in range(6000)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Makes a model folder for `vllm serve FOLDER --load-format dummy`.")
    parser.add_argument("folder", type=Path)
    make_tiny_model(parser.parse_args().folder)
