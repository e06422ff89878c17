# ruff: noqa: RUF001 DeepSeek's control tokens are written with such letters
"""Formats are found by the folder's control tokens and template; the prompt tells whether its answer begins as reasoning."""

import pytest
from answer_formats import FORM, MODELS, byte_level

from mla_jax.text.answers import PLAIN_ANSWER, answer_format_of, starts_in_reasoning

pytestmark = pytest.mark.once

V3_WORDS = "{{'function<｜tool▁sep｜>' + name + '\n```json\n'}}"
V31_WORDS = "{{'<｜tool▁call▁begin｜>' + name + '<｜tool▁sep｜>'}}<think></think>"
DSML_WORDS = "<｜DSML｜tool_calls>"
NOTHING = byte_level([], [])


@pytest.mark.parametrize(
    ("model", "template", "model_type", "expected"),
    [
        ("V3", V3_WORDS, "deepseek_v3", "deepseek_v3"),
        ("V3.1", V31_WORDS, "deepseek_v3", "deepseek_v31"),
        ("V3.1", V31_WORDS, "deepseek_v32", "deepseek_v31"),  # V3.2-Exp has the template of V3.1
        ("V3.1", None, "deepseek_v3", "deepseek_v31"),
        ("V3.2", None, "deepseek_v32", "dsml"),  # its folder has no template
        ("V3.2", DSML_WORDS, "deepseek_v3", "dsml"),
        ("V4", None, "another", "dsml"),
        ("V4", None, "deepseek_v4", "dsml"),
        ("Kimi", "{{ messages }}", "kimi_k2", "kimi_k2"),
        ("Kimi", None, "deepseek_v3", "kimi_k2"),
        ("GLM-4.7", None, "glm4_moe_lite", "glm"),
        ("GLM-4.5", "<tool_call>", "glm4_moe", "glm"),
    ],
)
def test_the_format_is_found_by_what_the_folder_has(model, template, model_type, expected):
    assert answer_format_of(MODELS[model].tokenizer, template, model_type).name == expected


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (None, PLAIN_ANSWER),
        ("{{ messages }}", PLAIN_ANSWER),
        ("a </think> b", FORM["reasoning"]),
        ("<tool_call><arg_key><arg_value>", FORM["glm"]),
    ],
)
def test_without_control_tokens_the_template_s_words_decide(template, expected):
    assert answer_format_of(NOTHING, template, "deepseek_v2") == expected
    assert answer_format_of(None, template, "deepseek_v2") == expected


def test_tags_of_reasoning_alone_are_a_format():
    assert answer_format_of(byte_level([], ["<think>", "</think>"]), None, "deepseek_v2") == FORM["reasoning"]


@pytest.mark.parametrize(
    ("model", "prompt", "expected"),
    [
        ("V3", "<｜User｜>hi<｜Assistant｜><think>\n", True),
        ("V3.1", "<｜User｜>hi<｜Assistant｜><think>", True),
        ("V3.1", "<｜User｜>hi<｜Assistant｜></think>", False),
        ("V3.1", "<｜User｜>hi<｜Assistant｜>", False),
        ("V3.1", "<｜Assistant｜><think>So far", True),
        ("V3.1", "<｜Assistant｜><think>So</think>It is", False),
        ("V3.1", "<think>a<｜User｜>b<｜Assistant｜>", False),
        ("V3.1", "", False),
        ("GLM-4.7", "<|user|>hi<|assistant|><think>", True),
        ("GLM-4.7", "<|user|>hi<|assistant|></think>", False),
        ("GLM-4.5", "<|user|>hi<|assistant|>", False),
        ("Kimi", "assistant<|im_middle|>", False),
        ("GLM, tags as text", "assistant: <think>\n", True),
        ("GLM, tags as text", "assistant: <think></think>", False),
        ("GLM, tags as text", "what is <think>? assistant:", False),
    ],
)
def test_the_end_of_the_prompt_tells_whether_the_answer_begins_as_reasoning(model, prompt, expected):
    one = MODELS[model]
    assert starts_in_reasoning(one.ids(prompt), one.tokenizer, one.form) is expected


def test_a_tag_that_a_user_has_typed_opens_no_reasoning():
    one = MODELS["V3.1"]
    typed = one.tokenizer.encode("say <think>", bos=False)
    assert not starts_in_reasoning([*one.ids("<｜User｜>"), *typed], one.tokenizer, one.form)
    assert starts_in_reasoning(one.ids("<think>"), one.tokenizer, FORM["reasoning"])
    assert not starts_in_reasoning(one.ids("<think>"), one.tokenizer, PLAIN_ANSWER)


def test_a_format_without_calls_keeps_the_rest():
    form = FORM["glm"].without_calls()
    assert (form.calls, form.think) == (None, FORM["glm"].think)
