"""Which tokenizer.json files work on text as released models do, and the harmless rest of any other.

A tokenizer.json can hold normalizers that multiply text, regular expressions that never end, and decoders that fail. The released
models with latent attention have none of them: they are byte-level BPE, and cut text by patterns we know."""

from collections.abc import Mapping
from typing import Any

from mla_jax.text.patterns import BLANKS_AT_THE_END, LINE_ENDS, PATTERNS, SLOW_BLANKS_AT_THE_END

MODELS = ("BPE", "WordLevel")
NORMALIZERS = (None, {"type": "NFC"}, {"type": "Sequence", "normalizers": []})
MAX_PARTS = 16  # of a pre-tokenizer or post-processor


def known(content: Mapping[str, Any]) -> dict[str, Any] | None:
    """`content` if all of it that works on text is known and takes linear time, else None.

    DeepSeek-V2's slow pattern is replaced by a fast one that cuts alike. Texts are neither cut nor padded."""
    cuts = _cuts(content.get("pre_tokenizer"))
    decoder, added = content.get("decoder"), content.get("added_tokens", [])
    holds = (
        _is_plain_model(content.get("model")),
        content.get("normalizer") in NORMALIZERS,
        cuts is not None,
        decoder is None or _is_byte_level(decoder),
        _keeps_its_text(content.get("post_processor")),
        isinstance(added, list) and not any(_looks_around(token) for token in added),
    )
    if not all(holds):
        return None
    pre_tokenizer = {"type": "Sequence", "pretokenizers": cuts} if cuts else None
    return {**content, "pre_tokenizer": pre_tokenizer, "truncation": None, "padding": None}


def inert(content: Mapping[str, Any]) -> dict[str, Any]:
    """`content` without all that works on text: its vocabulary and its added tokens remain, and whether it is byte-level."""
    decoder = content.get("decoder")
    removed = dict.fromkeys(("normalizer", "pre_tokenizer", "post_processor", "truncation", "padding"))
    return {**content, **removed, "decoder": decoder if _is_byte_level(decoder) else None}


def _is_plain_model(model: Any) -> bool:
    """With dropout, merges are chosen at random, each after very many attempts."""
    return isinstance(model, dict) and model.get("type") in MODELS and not model.get("dropout")


def _looks_around(token: Any) -> bool:
    """Whether the library searches the text before and after each occurrence of an added token. It skips special ones."""
    if not isinstance(token, dict):
        return True
    return not token.get("special") and any(token.get(flag) for flag in ("lstrip", "rstrip", "single_word"))


def _keeps_its_text(post_processor: Any) -> bool:
    """Whether it puts ids around a text; a template can also repeat the text."""
    parts = post_processor.get("processors") if _is(post_processor, "Sequence") else [post_processor]
    if not isinstance(parts, list) or len(parts) > MAX_PARTS:
        return False
    return all(part is None or _is_byte_level(part) or _has_its_text_once(part) for part in parts)


def _has_its_text_once(part: Any) -> bool:
    template = part.get("single") if _is(part, "TemplateProcessing") else None
    if not isinstance(template, list):
        return False
    return sum(not isinstance(piece, dict) or "SpecialToken" not in piece for piece in template) <= 1


def _cuts(pre_tokenizer: Any) -> list[dict] | None:
    """The known parts of a pre-tokenizer in their order, None if there are others.

    ByteLevel makes text up to twice as long, so it comes once, at the end."""
    parts = pre_tokenizer.get("pretokenizers") if _is(pre_tokenizer, "Sequence") else [pre_tokenizer]
    if not isinstance(parts, list) or len(parts) > MAX_PARTS:
        return None
    parts = _fast([part for part in parts if part is not None])
    before_bytes = parts[:-1] if parts and _is_byte_level(parts[-1]) else parts
    return parts if all(_is_cut(part) for part in before_bytes) else None


def _is(part: Any, kind: str) -> bool:
    return isinstance(part, dict) and part.get("type") == kind


def _is_byte_level(part: Any) -> bool:
    return _is(part, "ByteLevel")


def _is_cut(part: Any) -> bool:
    return _is(part, "Digits") or (_is(part, "Split") and _pattern(part) in PATTERNS)


def _pattern(part: Any) -> str | None:
    pattern = part.get("pattern") if isinstance(part, dict) else None
    found = pattern.get("Regex") if isinstance(pattern, dict) and pattern.keys() == {"Regex"} else None
    return found if isinstance(found, str) else None


def _fast(parts: list) -> list:
    """`parts` with the fast pattern for blanks at the end of a line, where line ends have been cut off."""
    line_ends = [
        i
        for i, part in enumerate(parts)
        if _pattern(part) == LINE_ENDS and part.get("behavior") == "Isolated"
    ]
    first = line_ends[0] if line_ends else len(parts)
    return [
        {**part, "pattern": {"Regex": BLANKS_AT_THE_END}}
        if i > first and _pattern(part) == SLOW_BLANKS_AT_THE_END
        else part
        for i, part in enumerate(parts)
    ]
