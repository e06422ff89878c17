"""Which tokenizer.json files work on text as released models do, and the harmless rest of any other.

A tokenizer.json can hold normalizers that multiply text, regular expressions that never end, and decoders that fail. The released
models with latent attention have none of them: they are byte-level BPE, and cut text by patterns we know."""

from collections.abc import Mapping
from typing import Any

from mla_jax.text.patterns import BLANKS_AT_THE_END, LINE_ENDS, PATTERNS, SLOW_BLANKS_AT_THE_END

MODELS = ("BPE", "WordLevel")
NORMALIZERS = (None, {"type": "NFC"}, {"type": "Sequence", "normalizers": []})
MAX_PARTS = 16  # of a pre-tokenizer


def known(content: Mapping[str, Any]) -> dict[str, Any] | None:
    """`content` if all of it that works on text is known and takes linear time, else None.

    DeepSeek-V2's slow pattern is replaced by a fast one that cuts alike."""
    model, cuts = content.get("model"), _cuts(content.get("pre_tokenizer"))
    if not isinstance(model, dict) or model.get("type") not in MODELS or content.get("normalizer") not in NORMALIZERS:
        return None
    if cuts is None or not (content.get("decoder") is None or _is_byte_level(content["decoder"])):
        return None
    pre_tokenizer = {"type": "Sequence", "pretokenizers": cuts} if cuts else None
    return {**content, "pre_tokenizer": pre_tokenizer}


def inert(content: Mapping[str, Any]) -> dict[str, Any]:
    """`content` without all that works on text: its vocabulary and its added tokens remain, and whether it is byte-level."""
    decoder = content.get("decoder")
    removed = dict.fromkeys(("normalizer", "pre_tokenizer", "post_processor"))
    return {**content, **removed, "decoder": decoder if _is_byte_level(decoder) else None}


def _cuts(pre_tokenizer: Any) -> list[dict] | None:
    """The known parts of a pre-tokenizer in their order, None if there are others.

    ByteLevel makes text up to twice as long, so it comes once, at the end."""
    parts = pre_tokenizer["pretokenizers"] if _is_sequence(pre_tokenizer) else [pre_tokenizer]
    parts = _fast([part for part in parts if part is not None])
    known_parts = all(_is_cut(part) for part in parts[:-1]) and all(_is_cut(part) or _is_byte_level(part) for part in parts[-1:])
    return parts if known_parts and len(parts) <= MAX_PARTS else None


def _is_sequence(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "Sequence" and isinstance(part.get("pretokenizers"), list)


def _is_byte_level(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "ByteLevel"


def _is_cut(part: Any) -> bool:
    if not isinstance(part, dict):
        return False
    return part.get("type") == "Digits" or (part.get("type") == "Split" and _pattern(part) in PATTERNS)


def _pattern(part: Any) -> str | None:
    pattern = part.get("pattern") if isinstance(part, dict) else None
    found = pattern.get("Regex") if isinstance(pattern, dict) and pattern.keys() == {"Regex"} else None
    return found if isinstance(found, str) else None


def _fast(parts: list) -> list:
    """`parts` with the fast pattern for blanks at the end of a line, where line ends have been cut off."""
    line_ends = [i for i, part in enumerate(parts) if _pattern(part) == LINE_ENDS and part.get("behavior") == "Isolated"]
    first = line_ends[0] if line_ends else len(parts)
    return [
        {**part, "pattern": {"Regex": BLANKS_AT_THE_END}} if i > first and _pattern(part) == SLOW_BLANKS_AT_THE_END else part
        for i, part in enumerate(parts)
    ]
