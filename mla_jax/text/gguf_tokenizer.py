"""The tokenizer in a GGUF file's metadata, a byte-level BPE, as a `tokenizers.Tokenizer`.

The file names its pre-tokenizer in a word, `tokenizer.ggml.pre`. The patterns for them are those of the tokenizer.json that each
model was released with (for `default`, llama.cpp's own). Knows nothing of files and of JAX."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from mla_jax.base.errors import BadFile, Unsupported, printable
from mla_jax.text import tiktoken_model
from mla_jax.text.byte_level import BYTES, to_bytes
from mla_jax.text.tokenizer import Tokenizer

MAX_TOKENS = 1 << 21
MAX_TOKEN = tiktoken_model.MAX_TOKEN  # bytes
CONTROL, USER_DEFINED, UNUSED = 3, 4, 5  # values of token_type that matter here

_ENDINGS = "'s|'t|'re|'ve|'m|'ll|'d"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = rf"{_ENDINGS}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)|\s+"
_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
# the cased letters that DeepSeek's first tokenizers know; every other letter stands apart from the space before it
_CASED = re.sub(
    r"\s",
    "",
    """
    A-Z a-z \u00b5 \u00c0-\u00d6 \u00d8-\u00f6 \u00f8-\u01ba \u01bc-\u01bf \u01c4-\u0293 \u0295-\u02af \u0370-\u0373 \u0376
    \u0377 \u037b-\u037d \u037f \u0386 \u0388-\u038a \u038c \u038e-\u03a1 \u03a3-\u03f5 \u03f7-\u0481 \u048a-\u052f
    \u0531-\u0556 \u10a0-\u10c5 \u13a0-\u13f5 \u13f8-\u13fd \u1c90-\u1cba \u1cbd-\u1cbf \u1d00-\u1d2b \u1d6b-\u1d77
    \u1d79-\u1d9a \u1e00-\u1f15 \u1f18-\u1f1d \u1f20-\u1f45 \u1f48-\u1f4d \u1f50-\u1f57 \u1f59 \u1f5b \u1f5d \u1f5f-\u1f7d
    \u1f80-\u1fb4 \u1fb6-\u1fbc \u1fbe \u1fc2-\u1fc4 \u1fc6-\u1fcc \u1fd0-\u1fd3 \u1fd6-\u1fdb \u1fe0-\u1fec \u1ff2-\u1ff4
    \u1ff6-\u1ffc \u2102 \u2107 \u210a-\u2113 \u2115 \u2119-\u211d \u2124 \u2126 \u2128 \u212a-\u212d \u212f-\u2134 \u2139
    \u213c-\u213f \u2145-\u2149 \u214e \u2183 \u2184 \u2c00-\u2c7b \u2c7e-\u2ce4 \u2ceb-\u2cee \u2cf2 \u2cf3 \ua640-\ua66d
    \ua680-\ua69b \ua722-\ua76f \ua771-\ua787 \ua78b-\ua78e \uab70-\uabbf \ufb00-\ufb06 \ufb13-\ufb17 \uff21-\uff3a
    \uff41-\uff5a \U00010400-\U0001044f \U000104b0-\U000104d3 \U000104d8-\U000104fb \U00010c80-\U00010cb2
    \U00010cc0-\U00010cf2 \U000118a0-\U000118df \U0001e900-\U0001e943
    """,
)


def _words(digits: str, ending: str = r"[\r\n]*") -> str:
    """The pattern that began with GPT-4: endings, words with one sign before them, digits, signs, line ends, spaces."""
    return rf"(?i:{_ENDINGS})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+{ending}|{_SPACES}"


def _cased_words(digits: str, ending: str) -> str:
    """The pattern of GPT-4o: a word also ends where a capital follows a small letter."""
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    before, after = r"[^\r\n\p{L}\p{N}]?", f"(?i:{_ENDINGS})?"
    words = f"{before}{upper}*{lower}+{after}|{before}{upper}+{lower}*{after}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+{ending}|{_SPACES}"


@dataclass(frozen=True)
class Pre:
    """How text is cut before tokens are joined: by each pattern in turn, what it leaves by the next.

    `whole`: a piece that is a token is taken as it is, before any merge. `bos`: BOS stands in front if the file says nothing.
    `composed`: text is brought to Unicode's composed form first."""

    patterns: tuple[str, ...]
    whole: bool = False
    bos: bool = False
    composed: bool = False


_V3 = Pre(
    (
        r"\p{N}{1,3}",
        "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
        + _SPACES,
    )
)
_LLM = Pre(
    (
        r"[\r\n]",
        rf"\s?[{_CASED}]+",
        "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
        r"\s+$",
        _CJK,
        r"\p{N}",
    )
)
_YOUTU = (
    "[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+"
    "|[\u3105-\u312f]+|[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
)
_LLAMA3, _GPT4O = Pre((_words(r"\p{N}{1,3}"),), whole=True, bos=True), Pre((_cased_words(r"\p{N}{1,3}", r"[\r\n/]*"),))
_GLM4, _GPT_2 = Pre((_words(r"\p{N}{1,3}"),)), Pre((_GPT2,))
KNOWN = {
    "deepseek-llm": _LLM,
    "deepseek-coder": Pre((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")),
    "deepseek-v3": _V3,
    "joyai-llm": _V3,
    "kimi-k2": Pre((tiktoken_model.PATTERN,), whole=True),
    "youtu": Pre((_YOUTU, _cased_words(r"\p{N}", r"[\r\n/]*")), whole=True),
    "glm4": _GLM4,
    "chatglm-bpe": _GLM4,
    "qwen2": Pre((_words(r"\p{N}"),), composed=True),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "gpt-2": _GPT_2,
    "gigachat": _GPT_2,
    "gpt-4o": _GPT4O,
    "kanana2": _GPT4O,
    "default": Pre((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
}


@dataclass(frozen=True)
class Found:
    """What a file holds to turn text into ids and back; `chat_template` is text that nothing has run yet."""

    tokenizer: Tokenizer
    bos_id: int | None  # the BOS token, whether or not it stands in front of every text
    eos_ids: tuple[int, ...]
    chat_template: str | None
    notes: tuple[str, ...] = ()


def build(metadata: Mapping[str, Any], where: str, vocab_size: int) -> Found | None:
    """The tokenizer in the metadata of the file `where`, None if it has none; ids at or above `vocab_size` are refused."""
    kind = metadata.get("tokenizer.ggml.model", "none")
    if isinstance(kind, str) and kind in ("none", "no_vocab"):
        return None
    if not isinstance(kind, str) or kind != "gpt2":
        raise Unsupported(f"{where} has a tokenizer of kind {printable(str(kind))}", "known: gpt2, a byte-level BPE")
    tokens, types = _tokens(metadata, where, vocab_size)
    pre, notes = _pre(metadata, where)
    model = _model(tokens, _merges(metadata, where, tokens, types), pre, where)
    added = [AddedToken(t, normalized=False, special=k == CONTROL) for t, k in zip(tokens, types, strict=True) if k in _ADDED]
    model.add_tokens(added)
    bos, *ends = (_id(metadata, name, where, len(tokens)) for name in ("bos", "eos", "eot", "eom"))
    eos = tuple(dict.fromkeys(end for end in ends if end is not None))
    in_front = bos if _bos_in_front(metadata, where, pre, bos) else None
    return Found(Tokenizer(model, in_front), bos, eos, _template(metadata, where), notes)


def _bos_in_front(metadata: Mapping[str, Any], where: str, pre: Pre, bos: int | None) -> bool:
    wanted = metadata.get("tokenizer.ggml.add_bos_token", pre.bos and bos is not None)
    if not isinstance(wanted, bool):
        raise BadFile(f"{where}: tokenizer.ggml.add_bos_token is {printable(str(wanted))}", "expected a truth")
    if wanted and bos is None:
        raise BadFile(f"{where} wants a BOS token and names none", "expected tokenizer.ggml.bos_token_id")
    return wanted


def _template(metadata: Mapping[str, Any], where: str) -> str | None:
    template = metadata.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise BadFile(f"{where}: tokenizer.chat_template is no text", f"found {printable(str(template))}")
    return template


_ADDED = (CONTROL, USER_DEFINED)


def _tokens(metadata: Mapping[str, Any], where: str, vocab_size: int) -> tuple[list[str], list[int]]:
    """The vocabulary in the order of its ids, and the type of each token."""
    tokens, types = metadata.get("tokenizer.ggml.tokens"), metadata.get("tokenizer.ggml.token_type")
    if not _texts(tokens) or not tokens:
        raise BadFile(f"{where} has no vocabulary", "expected texts in tokenizer.ggml.tokens")
    if len(tokens) > min(vocab_size, MAX_TOKENS):
        raise BadFile(f"{where} has token ids the model lacks", f"found {len(tokens):,} tokens, the vocabulary is {vocab_size:,}")
    types = np.ones(len(tokens), np.int32) if types is None else types
    if not isinstance(types, np.ndarray) or types.dtype.kind not in "iu" or types.shape != (len(tokens),):
        expected = "expected a number for each in tokenizer.ggml.token_type"
        raise BadFile(f"{where} has {len(tokens):,} tokens, and not as many types of tokens", expected)
    seen: dict[str, int] = {}
    for i, token in enumerate(tokens):
        if not 0 < len(token.encode()) <= MAX_TOKEN:
            raise BadFile(f"{where} has a token of no or too many bytes", f"id {i:,}, expected 1 to {MAX_TOKEN:,} bytes")
        if seen.setdefault(token, i) != i:
            raise BadFile(f"{where} has a token twice", f"{printable(token)} has the ids {seen[token]:,} and {i:,}")
    return tokens, types.tolist()


def _texts(found: Any) -> bool:
    return isinstance(found, list) and all(isinstance(text, str) for text in found)


def _pre(metadata: Mapping[str, Any], where: str) -> tuple[Pre, tuple[str, ...]]:
    name = metadata.get("tokenizer.ggml.pre")
    if name is None:
        return KNOWN["default"], (f"{where} does not name its pre-tokenizer; text may be cut otherwise than in training",)
    if not isinstance(name, str) or name not in KNOWN:
        raise Unsupported(f"{where} names the pre-tokenizer {printable(str(name))}", "known: " + ", ".join(KNOWN))
    return KNOWN[name], ()


def _merges(metadata: Mapping[str, Any], where: str, tokens: list[str], types: list[int]) -> list[tuple[str, str]]:
    if metadata.get("tokenizer.ggml.pre") == "kimi-k2":  # whose file may hold none, and whose ranks are exact
        return _merges_of_ranks(tokens, types, where)
    merges = metadata.get("tokenizer.ggml.merges", [])
    if not _texts(merges):
        raise BadFile(f"{where} has no merges", "expected texts in tokenizer.ggml.merges")
    known, found = set(tokens), []
    for i, merge in enumerate(merges):
        cut = merge.find(" ", 1)  # a token may itself begin with a space
        left, right = (merge[:cut], merge[cut + 1 :]) if cut > 0 else ("", "")
        if not {left, right, left + right} <= known:
            raise BadFile(f"{where} has a merge of what is no token", f"merge {i:,} is {printable(merge)}")
        found.append((left, right))
    return found


def _merges_of_ranks(tokens: list[str], types: list[int], where: str) -> list[tuple[str, str]]:
    normal = [t for t, k in zip(tokens, types, strict=True) if k not in (*_ADDED, UNUSED) and not {*t} - BYTES.keys()]
    if sum(map(len, normal)) > tiktoken_model.MAX_FILE:  # the work is the square of a token's length
        raise BadFile(f"{where} has too large a vocabulary", f"the limit is {tiktoken_model.MAX_FILE:,} characters")
    return tiktoken_model.merges_of({to_bytes(token): rank for rank, token in enumerate(normal)}, where)


def _model(tokens: list[str], merges: list[tuple[str, str]], pre: Pre, where: str) -> tokenizers.Tokenizer:
    try:
        bpe = models.BPE({token: i for i, token in enumerate(tokens)}, merges, ignore_merges=pre.whole)
    except Exception as e:  # the library raises bare Exception
        raise BadFile(f"{where} is refused by the tokenizers library", printable(str(e), 300)) from e
    model = tokenizers.Tokenizer(bpe)
    if pre.composed:
        model.normalizer = normalizers.NFC()  # pyright: ignore[reportAttributeAccessIssue]
    cuts: list[Any] = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in pre.patterns]
    model.pre_tokenizer = pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])  # pyright: ignore[reportAttributeAccessIssue]
    model.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    return model


def _id(metadata: Mapping[str, Any], name: str, where: str, count: int) -> int | None:
    found = metadata.get(f"tokenizer.ggml.{name}_token_id")
    if found is not None and (type(found) is not int or not 0 <= found < count):
        raise BadFile(f"{where}: tokenizer.ggml.{name}_token_id is {printable(str(found))}", f"expected 0 to {count - 1:,}")
    return found
