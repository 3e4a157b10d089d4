"""A tokenizer of 256 bytes and a few special tokens: small, real, and able to split characters."""

from __future__ import annotations

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from worker.text import Tokenizer

VOCAB_SIZE = 259
END = 257  # <|im_end|>
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer(template: str | None = TEMPLATE) -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = tokenizers.Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<|im_start|>", "<|im_end|>", "<|pad|>"])
    return Tokenizer(inner, {"chat_template": template})
