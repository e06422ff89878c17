# ruff: noqa: RUF001 DeepSeek's control tokens are written with such letters
"""Small tokenizers with the control tokens of real models, and their formats of calls written out."""

import json
from collections.abc import Callable
from dataclasses import dataclass

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from mla_jax.text.answers import ANSWER_FORMATS, AnswerFormat
from mla_jax.text.byte_level import to_characters
from mla_jax.text.tokenizer import Tokenizer

THINK = ["<think>", "</think>"]
DEEPSEEK = [
    "<｜User｜>",
    "<｜Assistant｜>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
]
KIMI = [
    "<|im_end|>",
    "<|im_middle|>",
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
]
GLM = ["<|user|>", "<|assistant|>", "<|observation|>", "<tool_call>", "</tool_call>"]
GLM += ["<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"]
# Pieces that end within a character, or have the end of one text and the beginning of another
PIECES = [
    "ab",
    " the",
    "\n\n",
    '{"',
    '": ',
    "日",
    "</",
    "<｜",
    "｜>",
    "tool",
    "<think",
    "```",
    b"\xf0\x9f",
    b"\x98\x80",
    b"a\xe2",
]

Calls = list[tuple[str, dict]]


def byte_level(special: list[str], added: list[str]) -> Tokenizer:
    """Every byte and a few longer tokens, with control tokens of both kinds."""
    pieces = [piece if isinstance(piece, bytes) else piece.encode() for piece in PIECES]
    tokens = [*(bytes([b]) for b in range(256)), *pieces]
    model = tokenizers.Tokenizer(models.BPE({to_characters(token): i for i, token in enumerate(tokens)}, []))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    model.decoder = decoders.ByteLevel()
    model.add_special_tokens(["<eos>", *special])
    model.add_tokens([tokenizers.AddedToken(text, normalized=False) for text in added])
    return Tokenizer(model, None)


def words() -> Tokenizer:
    """Words with a sign for a space, as sentencepiece makes them, and the tags of reasoning."""
    tokens = ["<unk>", "▁a", "a", "b", "▁b", "<0xE2>", "<0x82>", "<0xAC>"]
    model = tokenizers.Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<unk>"))
    model.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    model.add_tokens([tokenizers.AddedToken(text, normalized=False) for text in THINK])
    return Tokenizer(model, None)


def v3(calls: Calls) -> str:
    one = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>"
    return f"<｜tool▁calls▁begin｜>{_joined(one, calls, chr(10))}<｜tool▁calls▁end｜>"


def v31(calls: Calls) -> str:
    one = "<｜tool▁call▁begin｜>{}<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
    return f"<｜tool▁calls▁begin｜>{_joined(one, calls)}<｜tool▁calls▁end｜>"


def kimi(calls: Calls) -> str:
    one = "<|tool_call_begin|>functions.{}:{}<|tool_call_argument_begin|>{}<|tool_call_end|>"
    written = "".join(one.format(name, at, _json(values)) for at, (name, values) in enumerate(calls))
    return f"<|tool_calls_section_begin|>{written}<|tool_calls_section_end|>"


def glm45(calls: Calls) -> str:
    return "\n".join(_glm(name, values, "\n") for name, values in calls)


def glm47(calls: Calls) -> str:
    return "".join(_glm(name, values, "") for name, values in calls)


def dsml(calls: Calls, outer: str = "function_calls") -> str:
    lines = [f"<｜DSML｜{outer}>"]
    for name, values in calls:
        lines.append(f'<｜DSML｜invoke name="{name}">')
        for key, value in values.items():
            is_string = "true" if isinstance(value, str) else "false"
            begin = f'<｜DSML｜parameter name="{key}" string="{is_string}">'
            lines.append(f"{begin}{_plain(value)}</｜DSML｜parameter>")
        lines.append("</｜DSML｜invoke>")
    return "\n".join([*lines, f"</｜DSML｜{outer}>"])


def dsml_v4(calls: Calls) -> str:
    return dsml(calls, "tool_calls")


def _joined(one: str, calls: Calls, between: str = "") -> str:
    return between.join(one.format(name, _json(values)) for name, values in calls)


def _glm(name: str, values: dict, line: str) -> str:
    pairs = [f"<arg_key>{key}</arg_key>{line}<arg_value>{_plain(value)}</arg_value>{line}" for key, value in values.items()]
    return f"<tool_call>{name}{line}{''.join(pairs)}</tool_call>"


def _plain(value) -> str:
    return value if isinstance(value, str) else _json(value)


def _json(value) -> str:
    return json.dumps(value, ensure_ascii=False)


@dataclass(frozen=True)
class Model:
    """A model's format, its tokenizer, and a function that writes calls as the model does."""

    form: AnswerFormat
    tokenizer: Tokenizer
    write: Callable[[Calls], str]
    numbered: bool = False

    def ids(self, text: str) -> list[int]:
        """Token ids of `text` as the model writes it: what spells a control token is one."""
        return self.tokenizer.encode(text, bos=False, control=True)

    def id(self, name: str, at: int) -> str | None:
        return f"functions.{name}:{at}" if self.numbered else None


FORM = {form.name: form for form in ANSWER_FORMATS}
_DEEPSEEK = byte_level([], [*DEEPSEEK, *THINK])
_GLM = byte_level([], [*GLM, *THINK])
_NOTHING = byte_level([], [])
MODELS = {
    "V3": Model(FORM["deepseek_v3"], _DEEPSEEK, v3),
    "V3.1": Model(FORM["deepseek_v31"], _DEEPSEEK, v31),
    "V3.2": Model(FORM["dsml"], _DEEPSEEK, dsml),
    "V4": Model(FORM["dsml"], byte_level([], ["｜DSML｜", *DEEPSEEK, *THINK]), dsml_v4),
    "Kimi": Model(FORM["kimi_k2"], byte_level(KIMI, THINK), kimi, numbered=True),
    "GLM-4.5": Model(FORM["glm"], _GLM, glm45),
    "GLM-4.7": Model(FORM["glm"], _GLM, glm47),
    "GLM, tags as text": Model(FORM["glm"], _NOTHING, glm47),
    "V3, tags as text": Model(FORM["deepseek_v3"], _NOTHING, v3),
}
