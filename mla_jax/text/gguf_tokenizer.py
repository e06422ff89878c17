"""The tokenizer in a GGUF file's metadata, a byte-level BPE, as a `tokenizers.Tokenizer`.

The file names its pre-tokenizer in `tokenizer.ggml.pre`. Knows nothing of files or JAX."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from mla_jax.base.errors import BadFile, Unsupported, printable
from mla_jax.text import tiktoken_model
from mla_jax.text.byte_level import BYTES, to_bytes
from mla_jax.text.patterns import KNOWN, Pre
from mla_jax.text.tokenizer import Tokenizer, refusing

MAX_TOKENS = 1 << 21
# Control tokens that end an answer by their text, as llama.cpp knows them: files often name only one of several by its id.
TURN_ENDS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<end_of_turn>",
    "<end_of_utterance>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
)
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5  # values of token_type


@dataclass(frozen=True)
class GgufTokenizer:
    """A file's tokenizer, special tokens and chat template; the template is text that has not been run."""

    tokenizer: Tokenizer
    bos_id: int | None  # the BOS token, whether or not it is put in front of every text
    eos_ids: tuple[int, ...]
    chat_template: str | None
    notes: tuple[str, ...] = ()


class Vocabulary(NamedTuple):
    """The tokens in the order of their ids, and the type of each."""

    tokens: list[str]
    types: list[int]

    def of(self, *types: int) -> list[str]:
        return [token for token, kind in zip(self.tokens, self.types, strict=True) if kind in types]


def from_metadata(metadata: Mapping[str, Any], where: str, vocab_size: int) -> GgufTokenizer | None:
    """The tokenizer in the metadata of the file `where`, None if it has none; ids at or above `vocab_size` are refused."""
    kind = metadata.get("tokenizer.ggml.model", "none")
    if isinstance(kind, str) and kind in ("none", "no_vocab"):
        return None
    if not isinstance(kind, str) or kind != "gpt2":
        raise Unsupported(
            f"{where} has a tokenizer of type {printable(str(kind))}", "known: gpt2, a byte-level BPE"
        )
    vocabulary = _vocabulary(metadata, where, vocab_size)
    pre, notes = _pre(metadata, where)
    model = _model(vocabulary.tokens, _merges(metadata, where, vocabulary), pre, where)
    controls = set(vocabulary.of(CONTROL))
    model.add_tokens(
        [AddedToken(t, normalized=False, special=t in controls) for t in vocabulary.of(CONTROL, USER_DEFINED)]
    )
    bos, *ends = (_id(metadata, name, where, len(vocabulary.tokens)) for name in ("bos", "eos", "eot", "eom"))
    ends += [vocabulary.tokens.index(text) for text in TURN_ENDS if text in controls]
    eos = tuple(dict.fromkeys(end for end in ends if end is not None))
    in_front = bos if _bos_in_front(metadata, where, pre, bos) else None
    return GgufTokenizer(Tokenizer(model, in_front), bos, eos, _template(metadata, where), notes)


def _bos_in_front(metadata: Mapping[str, Any], where: str, pre: Pre, bos: int | None) -> bool:
    wanted = metadata.get("tokenizer.ggml.add_bos_token", pre.bos and bos is not None)
    if not isinstance(wanted, bool):
        raise BadFile(
            f"{where}: tokenizer.ggml.add_bos_token is {printable(str(wanted))}", "expected true or false"
        )
    if wanted and bos is None:
        raise BadFile(f"{where} asks for a BOS token and names none", "expected tokenizer.ggml.bos_token_id")
    return wanted


def _template(metadata: Mapping[str, Any], where: str) -> str | None:
    template = metadata.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise BadFile(f"{where}: tokenizer.chat_template is not text", f"found {printable(str(template))}")
    return template


def _vocabulary(metadata: Mapping[str, Any], where: str, vocab_size: int) -> Vocabulary:
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not _texts(tokens) or not tokens:
        raise BadFile(f"{where} has no vocabulary", "expected texts in tokenizer.ggml.tokens")
    if len(tokens) > min(vocab_size, MAX_TOKENS):
        raise BadFile(
            f"{where} has token ids the model lacks",
            f"found {len(tokens):,} tokens, the vocabulary is {vocab_size:,}",
        )
    _check_tokens(tokens, where)
    return Vocabulary(tokens, _types(metadata, where, len(tokens)))


def _check_tokens(tokens: list[str], where: str):
    seen: dict[str, int] = {}
    for i, token in enumerate(tokens):
        if not 0 < len(token.encode()) <= tiktoken_model.MAX_TOKEN:
            raise BadFile(
                f"{where} has an empty or too long token",
                f"id {i:,}, expected 1 to {tiktoken_model.MAX_TOKEN:,} bytes",
            )
        if seen.setdefault(token, i) != i:
            raise BadFile(
                f"{where} has a token twice", f"{printable(token)} has the ids {seen[token]:,} and {i:,}"
            )


def _types(metadata: Mapping[str, Any], where: str, count: int) -> list[int]:
    types = metadata.get("tokenizer.ggml.token_type")
    if types is None:
        return [NORMAL] * count
    if not isinstance(types, np.ndarray) or types.dtype.kind not in "iu" or types.shape != (count,):
        expected = "expected a number for each in tokenizer.ggml.token_type"
        raise BadFile(f"{where} has {count:,} tokens and another number of token types", expected)
    return types.tolist()


def _texts(found: Any) -> bool:
    return isinstance(found, list) and all(isinstance(text, str) for text in found)


def _pre(metadata: Mapping[str, Any], where: str) -> tuple[Pre, tuple[str, ...]]:
    name = metadata.get("tokenizer.ggml.pre")
    if name is None:
        return KNOWN["default"], (
            f"{where} does not name its pre-tokenizer; text may be cut otherwise than in training",
        )
    if not isinstance(name, str) or name not in KNOWN:
        raise Unsupported(
            f"{where} names the pre-tokenizer {printable(str(name))}", "known: " + ", ".join(KNOWN)
        )
    return KNOWN[name], ()


def _merges(metadata: Mapping[str, Any], where: str, vocabulary: Vocabulary) -> list[tuple[str, str]]:
    if metadata.get("tokenizer.ggml.pre") == "kimi-k2":  # whose file may hold none, and whose ranks are exact
        return _merges_of_ranks(vocabulary, where)
    merges = metadata.get("tokenizer.ggml.merges", [])
    if not _texts(merges):
        raise BadFile(f"{where} has no merges", "expected texts in tokenizer.ggml.merges")
    known, found = set(vocabulary.tokens), []
    for i, merge in enumerate(merges):
        left, right = _pair(merge)
        if not {left, right, left + right} <= known:
            raise BadFile(
                f"{where} has a merge of parts that are not tokens", f"merge {i:,} is {printable(merge)}"
            )
        found.append((left, right))
    return found


def _pair(merge: str) -> tuple[str, str]:
    cut = merge.find(" ", 1)  # a token may begin with a space
    return (merge[:cut], merge[cut + 1 :]) if cut > 0 else ("", "")


def _merges_of_ranks(vocabulary: Vocabulary, where: str) -> list[tuple[str, str]]:
    apart = {*vocabulary.of(CONTROL, USER_DEFINED, UNUSED)}
    ranked = [token for token in vocabulary.tokens if token not in apart and BYTES.keys() >= {*token}]
    if sum(map(len, ranked)) > tiktoken_model.MAX_TIKTOKEN_FILE:
        raise BadFile(
            f"{where} has too large a vocabulary",
            f"the limit is {tiktoken_model.MAX_TIKTOKEN_FILE:,} characters",
        )
    return tiktoken_model.merges_of({to_bytes(token): rank for rank, token in enumerate(ranked)}, where)


def _model(tokens: list[str], merges: list[tuple[str, str]], pre: Pre, where: str) -> tokenizers.Tokenizer:
    with refusing(BadFile, f"{where} is refused by the tokenizers library"):
        bpe = models.BPE({token: i for i, token in enumerate(tokens)}, merges, ignore_merges=pre.whole)
    model = tokenizers.Tokenizer(bpe)
    if pre.composed:
        model.normalizer = normalizers.NFC()  # pyright: ignore[reportAttributeAccessIssue]
    cuts: list[Any] = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in pre.patterns]
    model.pre_tokenizer = pre_tokenizers.Sequence(
        [*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )  # pyright: ignore[reportAttributeAccessIssue]
    model.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    return model


def _id(metadata: Mapping[str, Any], name: str, where: str, count: int) -> int | None:
    found = metadata.get(f"tokenizer.ggml.{name}_token_id")
    if found is not None and (type(found) is not int or not 0 <= found < count):
        raise BadFile(
            f"{where}: tokenizer.ggml.{name}_token_id is {printable(str(found))}",
            f"expected 0 to {count - 1:,}",
        )
    return found
