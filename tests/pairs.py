"""A tokenizer of two letters a token, so that a stop text can cross their borders."""

import tokenizers
from tokenizers import decoders, pre_tokenizers

WORDS = ["<bos>", "<eos>", *(chr(97 + i // 10) + str(i % 10) for i in range(94))]  # a0, a1, .. j3: two letters a token


def pairs_tokenizer() -> tokenizers.Tokenizer:
    """Text in tokens of two letters, so that a stop text can cross their borders."""
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<eos>"))
    model.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(".."), "isolated")
    model.decoder = decoders.Fuse()
    model.add_special_tokens(["<bos>", "<eos>"])
    return model
