"""A Moonshot folder's `tiktoken.model` (Kimi-K2, Moonlight) as a byte-level BPE; the code in the folder is never run.

The file has a line `base64(token) rank` per token. Two parts are merged if the result is a token, the lowest rank first, so the
merges follow from the ranks. The 256 ids after the ranks are control tokens, named in tokenizer_config.json."""

import base64
import binascii
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers

from mla_jax.base.errors import BadFile, printable
from mla_jax.text.byte_level import to_characters

MAX_TIKTOKEN_FILE = 8 << 20  # Kimi-K2's is 2.8 MB
MAX_TOKEN = 1024  # bytes
MAX_MERGES = 64 << 20  # bytes of all pairs of tokens that make a token
RESERVED = 256  # control tokens
FLAGS = ("lstrip", "rstrip", "single_word", "special")  # of a control token

_WORD = r"[^\r\n\p{L}\p{N}]?"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERN = "|".join(
    [
        r"[\p{Han}]+",
        rf"{_WORD}{_UPPER}*{_LOWER}+{_SUFFIX}",
        rf"{_WORD}{_UPPER}+{_LOWER}*{_SUFFIX}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)


def build(data: bytes, where: str, settings: dict, vocab_size: int) -> tokenizers.Tokenizer:
    """The tokenizer of `data`, the content of the file `where`, with the control tokens that `settings` names."""
    ranks = _ranks(data, where)
    vocabulary = {to_characters(token): rank for token, rank in ranks.items()}
    # a piece that is a token is taken as it is, before any merge, as in tiktoken
    model = tokenizers.Tokenizer(models.BPE(vocabulary, merges_of(ranks, where), ignore_merges=True))
    isolate = pre_tokenizers.Split(Regex(PATTERN), behavior="isolated")
    model.pre_tokenizer = pre_tokenizers.Sequence(
        [isolate, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )  # pyright: ignore[reportAttributeAccessIssue]
    model.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    _add_controls(model, settings, len(ranks), vocab_size)
    return model


def _add_controls(model: tokenizers.Tokenizer, settings: dict, first: int, vocab_size: int):
    """Adds the control tokens, whose ids begin at `first`: those that `settings` names, and the reserved ones between them."""
    end = min(first + RESERVED, vocab_size)
    named = _named(settings.get("added_tokens_decoder"), first, end)
    model.add_tokens(
        [named.get(i) or AddedToken(f"<|reserved_token_{i}|>", special=True) for i in range(first, end)]
    )
    if moved := [i for i, token in named.items() if model.token_to_id(token.content) != i]:
        raise BadFile(
            "tokenizer_config.json names a control token twice, or one of the vocabulary",
            f"see id {moved[0]:,}",
        )


def _ranks(data: bytes, where: str) -> dict[bytes, int]:
    """Every token and its rank, which is its id."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(data.splitlines(), 1):
        if not line.strip():
            continue
        token, rank = _entry(line) or (b"", 0)
        if not token or token in ranks:
            shown = printable(line[:80].decode("latin-1"))
            raise BadFile(f"{where} is damaged", f"line {number:,} is no new `base64 rank`: {shown}")
        ranks[token] = rank
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise BadFile(
            f"{where} is damaged",
            f"the ranks of its {len(ranks):,} tokens are not 0, 1, 2 and so on, each once",
        )
    if missing := [byte for byte in range(256) if bytes([byte]) not in ranks]:
        raise BadFile(
            f"{where} is incomplete",
            f"{len(missing)} of the 256 single bytes are no token, the first is {missing[0]}",
        )
    return ranks


def _entry(line: bytes) -> tuple[bytes, int] | None:
    """The token and the rank in a line, None if it is damaged."""
    try:
        text, rank = line.split()
        token = base64.b64decode(text, validate=True)
    except (ValueError, binascii.Error):
        return None
    return (token, int(rank)) if rank.isdigit() and len(rank) <= 9 and len(token) <= MAX_TOKEN else None


def merges_of(ranks: dict[bytes, int], where: str) -> list[tuple[str, str]]:
    """Every pair of tokens that makes a token, by the rank of the result.

    Of the pairs that make one token at most one ever meets in a text, so their order among themselves is free. In a chain of
    ever longer tokens each byte of a token is the place of a pair, so the total length of the pairs is limited."""
    characters = {token: to_characters(token) for token in ranks}
    merges, room = [], MAX_MERGES
    for token in sorted(ranks, key=ranks.__getitem__):
        for cut in range(1, len(token)):
            left = characters.get(token[:cut])
            right = left and characters.get(token[cut:])
            if left and right:
                merges.append((left, right))
                room -= len(token)
        if room < 0:
            shown = f"the pairs that make them have more than {MAX_MERGES:,} bytes"
            raise BadFile(f"{where} has too many tokens that are made of other tokens", shown)
    return merges


def _named(entries: Any, first: int, end: int) -> dict[int, AddedToken]:
    """The control tokens of tokenizer_config.json by id, refused outside the ids that are reserved for them."""
    named = {}
    for key, entry in (entries if isinstance(entries, dict) else {}).items():
        content = entry.get("content") if isinstance(entry, dict) else None
        if not key.isdecimal() or len(key) > 9 or not isinstance(content, str) or not content:
            raise BadFile(
                "added_tokens_decoder in tokenizer_config.json is damaged", f"see its key {printable(key)}"
            )
        if not first <= int(key) < end:
            found = f"{printable(content)} has id {int(key):,}, expected {first:,} to {end - 1:,}"
            raise BadFile("tokenizer_config.json has token ids the model lacks", found)
        flags = {flag: entry.get(flag) is True for flag in FLAGS}
        named[int(key)] = AddedToken(content, normalized=False, **flags)
    return named
