"""How released tokenizers cut text before tokens are merged: the patterns of each family, by the name that GGUF files use.

They are those of the tokenizer.json that each model was released with (for `default`, llama.cpp's own)."""

import re
from dataclasses import dataclass

from mla_jax.text import tiktoken_model

# Blanks at the end of a line, whose end `[\r\n]` has cut off. The release has \s+$, which takes quadratic time for blanks within
# the line: it looks for the end from each of them. This one looks only from where a run of blanks begins, and finds the same.
BLANKS_AT_THE_END, SLOW_BLANKS_AT_THE_END = r"(?<!\s)\s++$", r"\s+$"
LINE_ENDS = r"[\r\n]"

_ENDINGS = "'s|'t|'re|'ve|'m|'ll|'d"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = rf"{_ENDINGS}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)|\s+"
_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
# the cased letters that DeepSeek's first tokenizers know; any other letter is cut from the space before it
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
    return (
        rf"(?i:{_ENDINGS})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+{ending}|{_SPACES}"
    )


def _cased_words(digits: str, ending: str) -> str:
    """The pattern of GPT-4o: a word also ends where a capital follows a small letter."""
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    before, after = r"[^\r\n\p{L}\p{N}]?", f"(?i:{_ENDINGS})?"
    words = f"{before}{upper}*{lower}+{after}|{before}{upper}+{lower}*{after}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+{ending}|{_SPACES}"


@dataclass(frozen=True)
class Pre:
    """How text is cut before tokens are merged: by the first pattern, then each piece by the next.

    `whole`: a piece that is a token is taken as it is, before any merge. `bos`: BOS is put in front if the file says nothing.
    `composed`: text is converted to Unicode's composed form (NFC) first."""

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
        LINE_ENDS,
        rf"\s?[{_CASED}]+",
        "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
        BLANKS_AT_THE_END,
        _CJK,
        r"\p{N}",
    )
)
_YOUTU = (
    "[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+"
    "|[\u3105-\u312f]+|[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
)
_LLAMA3 = Pre((_words(r"\p{N}{1,3}"),), whole=True, bos=True)
_GPT4O = Pre((_cased_words(r"\p{N}{1,3}", r"[\r\n/]*"),))
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

# Every pattern of these families: none takes more than linear time, whatever the text.
PATTERNS = frozenset(pattern for pre in KNOWN.values() for pattern in pre.patterns)
