"""A tokenizer as a GGUF file's metadata, which gguf_tokenizer.py reads. Knows nothing of files or JAX.

Such a file has no patterns by which text is cut, only the name of a set of them that llama.cpp knows: another is refused."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mla_jax.base.errors import Unsupported
from mla_jax.text.gguf_tokenizer import CONTROL, NORMAL, UNUSED, USER_DEFINED, from_metadata
from mla_jax.text.patterns import KNOWN
from mla_jax.text.tokenizer import Tokenizer

END_KEYS = ("eos", "eot", "eom")  # end tokens, as a file names them
# llama.cpp takes these for control tokens whether or not tokenizer.json does. It finds other added tokens in any text.
LOOKS_LIKE_CONTROL = re.compile("<\\|.*\\|>|<\uff5c.*\uff5c>|<pad>", re.DOTALL)
# What tokenizers cut in different ways: words, endings, digits, signs, blanks, line ends, scripts, marks
PROBE = (
    "I'll say: \"We'RE here\", he'd said...  12345.678 + 9 = ?\n\n\n\t\tdef f(x_1):\r\n    return x**2  # ok!!  \n"
    "\u00dcn\u00efc\u00f6de na\u00efve \u4f60\u597d\u4e16\u754c 3.14 \u65e5\u672c\u8a9e\u30c6\u30ad\u30b9\u30c8 \ud55c\uad6d"
    "\u041f\u0440\u0438\u0432\u0435\u0442 \u0639\u0631\u0628\u064a \u0e44\u0e17\u0e22 \U0001f680\U0001f3fd e\u0301"
    " HTTPServer <div>&amp;</div>"
)


def to_metadata(
    tokenizer: Tokenizer,
    vocab_size: int,
    bos_id: int | None,
    end_ids: Sequence[int],
    chat_template: str | None,
) -> dict[str, Any]:
    """The keys `tokenizer.*` of a model with `vocab_size` tokens; ids that the tokenizer lacks become unused tokens.

    `bos_id` is the model's BOS token, whether or not the tokenizer puts it in front of texts; of end tokens a file names three.
    Raises Unsupported for a tokenizer that would cut text otherwise when it is read from these keys."""
    content = json.loads(tokenizer.model.to_str())
    tokens = _tokens(tokenizer, vocab_size)
    bos = bos_id if tokenizer.bos_id is None else tokenizer.bos_id
    names = {"bos": bos, **dict(zip(END_KEYS, end_ids, strict=False))}
    found = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": _pre(content),
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array(_types(tokenizer, tokens), np.int32),
        "tokenizer.ggml.merges": [_merge(pair) for pair in content["model"]["merges"]],
        **{f"tokenizer.ggml.{name}_token_id": number for name, number in names.items()},
        "tokenizer.ggml.add_bos_token": tokenizer.bos_id is not None,
        "tokenizer.chat_template": chat_template,
    }
    found = {key: value for key, value in found.items() if value is not None}
    _refuse_other_cuts(tokenizer, found, vocab_size)
    return found


def _tokens(tokenizer: Tokenizer, vocab_size: int) -> list[str]:
    """The text of each id: llama.cpp counts the tokens to know the rows of the embedding."""
    texts = {number: text for text, number in tokenizer.model.get_vocab(with_added_tokens=True).items()}
    return [texts.get(number, f"[PAD{number}]") for number in range(vocab_size)]


def _types(tokenizer: Tokenizer, tokens: list[str]) -> list[int]:
    added = tokenizer.model.get_added_tokens_decoder()
    return [_type(tokenizer, number, text, number in added) for number, text in enumerate(tokens)]


def _type(tokenizer: Tokenizer, number: int, text: str, added: bool) -> int:
    if tokenizer.model.id_to_token(number) is None:
        return UNUSED
    if not added:
        return NORMAL
    return CONTROL if number in tokenizer.hidden or LOOKS_LIKE_CONTROL.fullmatch(text) else USER_DEFINED


def _merge(pair: str | list[str]) -> str:
    return pair if isinstance(pair, str) else " ".join(pair)


def _pre(content: Mapping[str, Any]) -> str:
    """The name of the patterns by which a tokenizer.json cuts text, as GGUF files name them."""
    model = content["model"]
    patterns = _patterns(content["pre_tokenizer"]) if model["type"] == "BPE" else None
    composed = (content["normalizer"] or {}).get("type") == "NFC"
    alike = {
        name: pre
        for name, pre in KNOWN.items()
        if pre.patterns == patterns and pre.composed == composed and name != "default"
    }
    if not alike:
        raise Unsupported(
            "the tokenizer cannot be written to a GGUF file",
            "such a file names one of the ways to cut text that llama.cpp knows, and none of them is this one's",
            "known: " + ", ".join(KNOWN),
        )
    return min(alike, key=lambda name: alike[name].whole != bool(model.get("ignore_merges")))


def _patterns(pre_tokenizer: Any) -> tuple[str, ...] | None:
    """The patterns that cut text one after the other; None if it is cut or encoded in another way, too."""
    parts = pre_tokenizer and pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    if not parts or parts[-1]["type"] != "ByteLevel" or parts[-1].get("add_prefix_space"):
        return None
    own = KNOWN["gpt-2"].patterns if parts[-1].get("use_regex", True) else ()
    patterns = [_pattern(part) for part in parts[:-1]]
    return None if None in patterns else (*map(str, patterns), *own)


def _pattern(part: Mapping[str, Any]) -> str | None:
    if part["type"] == "Digits":
        return r"\p{N}" if part["individual_digits"] else r"\p{N}+"
    isolates = part["type"] == "Split" and part["behavior"] == "Isolated" and not part["invert"]
    return part["pattern"].get("Regex") if isolates else None


def _refuse_other_cuts(tokenizer: Tokenizer, metadata: Mapping[str, Any], vocab_size: int) -> None:
    """Reads the keys back, and encodes the PROBE and each token's text in a line of its own: both must cut them alike."""
    other = from_metadata(metadata, "the GGUF file", vocab_size)
    lines = (tokenizer.decode([number]).replace("\ufffd", "") for number in range(vocab_size))
    text = "\n".join((PROBE, *lines))
    if other is None or other.tokenizer.encode(text) != tokenizer.encode(text):
        raise Unsupported(
            "the tokenizer cannot be written to a GGUF file",
            f"by the name {metadata['tokenizer.ggml.pre']} of its patterns a text would become other tokens",
        )
