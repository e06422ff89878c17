"""Log-probabilities of tokens as OpenAI's clients read them: those of completions, and those of chats."""

from collections.abc import Sequence
from typing import Any

from mla_jax.engine.core.request import Logprobs
from mla_jax.text.tokenizer import Tokenizer

Scores = Sequence[
    dict[int, float] | None
]  # an entry per token: its own log-probability first; None for a first token
LEAST_LOGPROB = -9999.0  # for a token that cannot come: JSON has no infinity


def of_completion(
    tokenizer: Tokenizer | None, ids: Sequence[int], scores: Scores, offset: int
) -> dict[str, Any]:
    """Four lists with an entry per token; `offset` is where the text of the first begins."""
    tokens = [_token(tokenizer, token) for token in ids]
    offsets = []
    for token in ids:
        offsets.append(offset)
        offset += len(_bytes(tokenizer, token).decode("utf-8", "ignore"))
    return {
        "tokens": tokens,
        "token_logprobs": [
            None if entry is None else _finite(entry[token]) for token, entry in zip(ids, scores, strict=True)
        ],
        "top_logprobs": [None if entry is None else _by_text(tokenizer, entry) for entry in scores],
        "text_offset": offsets,
    }


def of_chat(tokenizer: Tokenizer | None, ids: Sequence[int], scores: Logprobs, most: int) -> dict[str, Any]:
    """An entry per token with its bytes, and the `most` likeliest tokens in its place."""
    content = []
    for token, entry in zip(ids, scores, strict=True):
        likeliest = sorted(entry.items(), key=lambda pair: -pair[1])[:most]
        top = [_entry(tokenizer, *pair) for pair in likeliest]
        content.append({**_entry(tokenizer, token, entry[token]), "top_logprobs": top})
    return {"content": content, "refusal": None}


def of_prompt(tokenizer: Tokenizer | None, scores: Scores) -> list[dict[str, Any] | None]:
    """An entry per token of a prompt, by token id, as vLLM has them; None for the first."""
    return [None if entry is None else _by_id(tokenizer, entry) for entry in scores]


def _by_id(tokenizer: Tokenizer | None, entry: dict[int, float]) -> dict[str, Any]:
    ranks = {token: 1 + rank for rank, token in enumerate(sorted(entry, key=lambda one: -entry[one]))}
    return {
        str(token): {"logprob": _finite(p), "rank": ranks[token], "decoded_token": _token(tokenizer, token)}
        for token, p in entry.items()
    }


def _entry(tokenizer: Tokenizer | None, token: int, logprob: float) -> dict[str, Any]:
    data = _bytes(tokenizer, token)
    return {"token": _token(tokenizer, token), "logprob": _finite(logprob), "bytes": list(data)}


def _by_text(tokenizer: Tokenizer | None, entry: dict[int, float]) -> dict[str, float]:
    """By the text of a token; of two with one text the likelier one."""
    found: dict[str, float] = {}
    for token, logprob in entry.items():
        text = _token(tokenizer, token)
        found[text] = max(_finite(logprob), found.get(text, LEAST_LOGPROB))
    return found


def _token(tokenizer: Tokenizer | None, token: int) -> str:
    """A token's text; a control token's name; of a part of a character its bytes."""
    data = _bytes(tokenizer, token)
    if not data:
        return f"token_id:{token}" if tokenizer is None else tokenizer.model.id_to_token(token) or ""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _bytes(tokenizer: Tokenizer | None, token: int) -> bytes:
    """The bytes that a token adds to a text."""
    if tokenizer is None:
        return b""
    return tokenizer.piece(token) if tokenizer.byte_level else tokenizer.decode([token]).encode()


def _finite(logprob: float) -> float:
    return max(float(logprob), LEAST_LOGPROB)
