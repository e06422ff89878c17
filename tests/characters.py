"""A byte-level tokenizer of 96 tokens: an end, a BOS and the printable characters of ASCII, one a token."""

import tokenizers
from tokenizers import decoders, pre_tokenizers

from mla_jax.text.tokenizer import Tokenizer

BOS, END = 0, 1
CHARACTERS = [chr(number) for number in range(33, 127)]
WORDS = ["<bos>", "<eos>", *CHARACTERS]


def characters_model() -> tokenizers.Tokenizer:
    model = tokenizers.Tokenizer(tokenizers.models.BPE({word: i for i, word in enumerate(WORDS)}, []))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    model.add_special_tokens(WORDS[:2])
    return model


def characters_tokenizer() -> Tokenizer:
    return Tokenizer(characters_model(), BOS)
