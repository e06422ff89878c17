# ruff: noqa: RUF001 DeepSeek's control tokens are written with such letters
"""Tiny models that say what a test wants. Each token has one that follows it, so the last of a prompt decides what is said."""

import json
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import tokenizers
from models import FAMILIES, tensors, write
from tokenizers import decoders, pre_tokenizers

from mla_jax.text.byte_level import to_characters

HF = {**FAMILIES["v3"], "num_hidden_layers": 1, "first_k_dense_replace": 0, "max_position_embeddings": 512}
HF |= {"hidden_size": 96, "num_nextn_predict_layers": 0}
BOS, EOS = "<bos>", "<eos>"
# Content between tokens that no content can have; results of tools end with <end>
MESSAGES = """{{ bos_token }}{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}
{%- if m.role == 'tool' %}<result>{{ m.content }}<end>
{%- else %}<turn>{{ m.role }} {{ m.reasoning_content or '' }}{{ m.content or '' }}
{%- for call in m.tool_calls or [] %}{{ call.id }} {{ call.function.name }} {{ call.function.arguments | tojson }}{% endfor %}
{%- endif %}{% endfor %}"""
PROMPTS = """{%- if add_generation_prompt and messages[-1].role != 'tool' %}<answer>
{%- if thinking is defined %}{{ '<think>' if thinking else '</think>' }}{% endif %}{% endif %}"""


@dataclass(frozen=True)
class Script:
    """The answers of a model: the tokens of each in order, behind the last token of a prompt.

    `controls` are control tokens, `signs` what the template has of the format."""

    controls: tuple[str, ...]
    answers: tuple[tuple[str | bytes, ...], ...]
    signs: str = ""
    template: str = MESSAGES + PROMPTS

    @property
    def pieces(self) -> list[bytes]:
        """Tokens of answers that are no control tokens."""
        said = [token for answer in self.answers for token in answer if token not in self.all_controls]
        return [token if isinstance(token, bytes) else token.encode() for token in dict.fromkeys(said)]

    @property
    def all_controls(self) -> list[str]:
        return [BOS, EOS, "<turn>", "<answer>", "<result>", "<end>", *self.controls]


def write_scripted(folder: Path, script: Script) -> Path:
    """A model folder whose greedy answers are those of `script`."""
    model = _tokenizer(script)
    hf = {**HF, "vocab_size": model.get_vocab_size(), "bos_token_id": model.token_to_id(BOS)}
    write(folder, {**hf, "eos_token_id": model.token_to_id(EOS)}, _weights(hf, _successors(script, model)))
    model.save(str(folder / "tokenizer.json"))
    template = script.template + "{# " + script.signs + " #}"
    settings = {"bos_token": BOS, "add_bos_token": True, "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def _tokenizer(script: Script) -> tokenizers.Tokenizer:
    """Every byte, and the tokens of the script; text is encoded as bytes alone."""
    tokens = [*(bytes([byte]) for byte in range(256)), *(piece for piece in script.pieces if len(piece) > 1)]
    vocabulary = {to_characters(token): at for at, token in enumerate(tokens)}
    model = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    model.decoder = decoders.ByteLevel()
    model.add_special_tokens([BOS, EOS])
    model.add_tokens([tokenizers.AddedToken(text, normalized=False) for text in script.all_controls])
    return model


def _successors(script: Script, model: tokenizers.Tokenizer) -> dict[int, int]:
    def id_of(token: str | bytes) -> int:
        if token in script.all_controls:
            return model.token_to_id(str(token))
        return model.token_to_id(to_characters(token if isinstance(token, bytes) else token.encode()))

    found: dict[int, int] = {}
    for answer in script.answers:
        for token, after in pairwise(map(id_of, answer)):
            assert found.setdefault(token, after) == after, f"{answer} has a token that two others follow"
    for answer in script.answers:
        found.setdefault(id_of(answer[-1]), id_of(EOS))  # unless another answer goes on behind it
    return found


def _weights(hf: dict, successors: dict[int, int]) -> dict[str, np.ndarray]:
    """Layers add nothing, so that the logits are of the last token alone."""
    weights = tensors(hf)
    for name, value in weights.items():
        if "o_proj" in name or "down_proj" in name:
            value[:] = 0
    embeddings, head = weights["model.embed_tokens.weight"], weights["lm_head.weight"]
    weights["model.norm.weight"][:] = 1
    head[:] = 0
    for token, after in successors.items():
        head[after] += embeddings[token]
    return weights


DEEPSEEK = Script(
    (
        "<think>",
        "</think>",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁sep｜>",
    ),
    (
        (
            "<think>",
            "Let",
            " me",
            " see.",
            "</think>",
            "I look",
            " it up ",
            b"\xf0\x9f",
            b"\x98\x80",
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁call▁begin｜>",
            "weather",
            "<｜tool▁sep｜>",
            '{"ci',
            'ty": "Troms',
            b"\xc3",
            b'\xb8"',
            "}",
            "<｜tool▁call▁end｜>",
            "<｜tool▁calls▁end｜>",
        ),
        ("<end>", "It", " is", " warm."),
        ("<answer>", "plain", " words", " < ", "</", "th", "at\n", "\n", "is all"),
    ),
    "<｜tool▁sep｜>",
)
KIMI = Script(
    (
        "<think>",
        "</think>",
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        "<|tool_call_begin|>",
        "<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
    ),
    (
        (
            "<answer>",
            "<|tool_calls_section_begin|>",
            "<|tool_call_begin|>",
            "functions.",
            "weather",
            ":0",
            "<|tool_call_argument_begin|>",
            '{"city"',
            ': "Oslo"}',
            "<|tool_call_end|>",
            "<|tool_calls_section_end|>",
        ),
        ("<end>", "Once", " more: ", "<|tool_calls_section_begin|>"),
    ),
    "<|tool_call_argument_begin|>",
)
# Tags are plain text here, so that tokens may have parts of several, and two calls can be said
GLM = Script(
    (),
    (
        (
            "<answer>",
            "<th",
            "ink>",
            "Two",
            " cities.",
            "</thi",
            "nk><to",
            "ol_call>weath",
            "er<arg_key>ci",
            "ty</arg_key><arg_",
            "value>42</arg_va",
            "lue></tool_",
            "call><tool_call",
            ">weather<",
            "arg_key>days</arg_",
            "key><arg_value",
            ">3",
            "</arg_value",
            "></tool_call>",
        ),
    ),
    "<tool_call> <arg_key> <arg_value>",
)
