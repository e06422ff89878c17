# ruff: noqa: RUF001 DeepSeek's control tokens are written with such letters
"""Answers of every format: read at once, token by token or in random parts, they are the same, and lose nothing."""

import json
from itertools import pairwise

import pytest
from answer_formats import FORM, MODELS, Model, words
from hypothesis import given, settings
from hypothesis import strategies as st

from mla_jax.base.errors import BadRequest
from mla_jax.text.answers import (
    PLAIN_ANSWER,
    Answer,
    AnswerStream,
    CallArguments,
    CallBegin,
    CallEnd,
    Content,
    Reasoning,
    ToolCall,
    answer_of,
    parse_answer,
)
from mla_jax.text.stream import TextStream

pytestmark = pytest.mark.once

EVERY_MODEL = pytest.mark.parametrize("name", MODELS)
VALUES = {"city": "Zürich 😀", "code": '42"\n\\</b>', "days": 3, "where": {"lat": 1.5, "tags": ["a", None]}, "old": True}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "code": {"type": "string"},
                    "days": {"type": "integer"},
                    "where": {"type": "object"},
                    "old": {"type": "boolean"},
                },
            },
        },
    }
    for name in ("get_weather", "mcp.find-places", "now")
]
CALLS = [("get_weather", VALUES), ("now", {}), ("mcp.find-places", {"city": "42"})]
# Without an end, a key at the end of an answer is dropped
ENDS_OF_KEYS = {"glm": "</arg_key><arg_value></arg_value></tool_call>", "dsml": '"></｜DSML｜parameter></｜DSML｜invoke>'}
TAG_FRAGMENTS = [
    "<",
    "</",
    "<think",
    "<tool_",
    "<｜",
    "<｜DSML｜",
    "｜>",
    "tool▁calls▁begin",
    "<|tool_call",
    "```json",
    "```",
    '">',
]
TEXTS = st.lists(st.text('ab 😀é\n"{}', max_size=4) | st.sampled_from(TAG_FRAGMENTS), max_size=12).map("".join)


def read(model: Model, text: str, **options) -> Answer:
    return parse_answer(model.ids(text), model.tokenizer, model.form, tools=TOOLS, **options)


def in_parts(model: Model, parts: list[list[int]], **options) -> Answer:
    stream = AnswerStream(model.tokenizer, model.form, tools=TOOLS, **options)
    got = [part for some in parts for part in stream.push(some)]
    return answer_of([*got, *stream.finish()])


def random_parts(ids: list[int], draw) -> list[list[int]]:
    ends = [0, *sorted(draw(st.lists(st.integers(0, len(ids)), max_size=6))), len(ids)]
    return [ids[a:b] for a, b in pairwise(ends)]


def called(model: Model, calls) -> list[tuple]:
    return [(name, model.id(name, at), values, True) for at, (name, values) in enumerate(calls)]


def calls_of(answer: Answer) -> list[tuple]:
    return [(call.name, call.id, json.loads(call.arguments), call.complete) for call in answer.calls]


@EVERY_MODEL
def test_calls_are_read_with_their_names_ids_and_arguments(name):
    model = MODELS[name]
    answer = read(model, model.write(CALLS))
    assert calls_of(answer) == called(model, CALLS)
    assert (answer.reasoning, answer.content) == ("", "")


@EVERY_MODEL
def test_reasoning_content_and_calls_are_told_apart_without_the_blanks_around_tags(name):
    model = MODELS[name]
    text = "<think>\nLet me\nsee.\n</think>\n\n I will look.\n\n" + model.write(CALLS[:1])
    answer = read(model, text)
    assert (answer.reasoning, answer.content) == ("Let me\nsee.", " I will look.")
    assert calls_of(answer) == called(model, CALLS[:1])


@EVERY_MODEL
def test_content_is_empty_where_a_call_follows_the_reasoning(name):
    model = MODELS[name]
    answer = read(model, "</think>\n\n" + model.write(CALLS), in_reasoning=True)
    assert (answer.reasoning, answer.content, len(answer.calls)) == ("", "", 3)


@EVERY_MODEL
def test_the_end_of_reasoning_alone_ends_reasoning_that_the_prompt_has_opened(name):
    answer = read(MODELS[name], "Let me see.</think>It is 4.", in_reasoning=True)
    assert (answer.reasoning, answer.content) == ("Let me see.", "It is 4.")


@EVERY_MODEL
def test_a_tag_of_reasoning_that_repeats_what_the_prompt_did_is_no_text(name):
    model = MODELS[name]
    assert read(model, "<think>\nSo.</think>4", in_reasoning=True) == Answer("So.", "4")
    assert read(model, "\n</think>\n\n4") == Answer("", "4")


@EVERY_MODEL
def test_the_words_of_reasoning_later_in_the_content_are_content(name):
    text = "Write <think> and </think>, or <think>."
    assert read(MODELS[name], text) == Answer("", text)


@EVERY_MODEL
def test_a_call_may_interrupt_reasoning(name):
    model = MODELS[name]
    answer = read(model, "I need the time.\n" + model.write([("now", {})]), in_reasoning=True)
    assert (answer.reasoning, answer.content) == ("I need the time.", "")
    assert calls_of(answer) == called(model, [("now", {})])


@EVERY_MODEL
def test_reasoning_that_the_answer_does_not_end_is_reasoning(name):
    assert read(MODELS[name], "Hm.\n", in_reasoning=True) == Answer("Hm.\n", "")


@EVERY_MODEL
def test_the_first_token_is_not_lost_where_tools_are_given(name):
    model = MODELS[name]
    stream = AnswerStream(model.tokenizer, model.form, tools=TOOLS)
    assert stream.push(model.ids("H")) == [Content("H")]


@EVERY_MODEL
def test_a_whole_call_in_one_push_gives_all_its_parts(name):
    model = MODELS[name]
    stream = AnswerStream(model.tokenizer, model.form, tools=TOOLS)
    begin, arguments, end = stream.push(model.ids("Look:" + model.write([("get_weather", VALUES)])))[1:]
    assert begin == CallBegin(0, "get_weather", model.id("get_weather", 0))
    assert isinstance(arguments, CallArguments)
    assert json.loads(arguments.text) == VALUES
    assert end == CallEnd(0)


@pytest.mark.deep
@EVERY_MODEL
def test_every_way_to_split_a_call_in_two_gives_the_same(name):
    model = MODELS[name]
    ids = model.ids("<think>A</think>B😀\n" + model.write([("now", {"city": "é"})]))
    expected = parse_answer(ids, model.tokenizer, model.form, tools=TOOLS)
    assert (expected.reasoning, expected.content, len(expected.calls)) == ("A", "B😀", 1)
    for at in range(1, len(ids)):
        assert in_parts(model, [ids[:at], ids[at:]]) == expected
    assert in_parts(model, [[token] for token in ids]) == expected


@EVERY_MODEL
@settings(max_examples=15)
@given(data=st.data())
def test_random_answers_are_read_alike_in_any_parts(name, data):
    model = MODELS[name]
    size = model.tokenizer.model.get_vocab_size()
    controls = st.sampled_from(sorted(model.tokenizer.control.values()))
    ids = data.draw(st.lists(st.integers(0, size - 1) | controls | st.sampled_from(model.ids('ab{"\n')), max_size=40))
    options = {"in_reasoning": data.draw(st.booleans()), "stop": data.draw(st.lists(st.sampled_from(["ab", "\n", "tool", "b{"])))}
    expected = parse_answer(ids, model.tokenizer, model.form, tools=TOOLS, **options)
    assert in_parts(model, random_parts(ids, data.draw), **options) == expected


@EVERY_MODEL
@settings(max_examples=15)
@given(reasoning=TEXTS, content=TEXTS)
def test_text_with_fragments_of_tags_loses_no_character(name, reasoning, content):
    model = MODELS[name]
    reasoning, content = f"r{reasoning}.", f"c{content}."
    text = f"<think>{reasoning}</think>{content}"
    assert read(model, text + model.write(CALLS[1:])) == Answer(reasoning, content, read(model, model.write(CALLS[1:])).calls)
    assert read(model, text) == Answer(reasoning, content)
    assert read(model, content + "\n ") == Answer("", content + "\n ")


@pytest.mark.deep
@EVERY_MODEL
@settings(max_examples=15)
@given(city=TEXTS, more=st.text(max_size=20))
def test_text_values_come_back_as_they_were(name, city, more):
    model = MODELS[name]
    values = {"city": city, "code": more, "days": 1}
    assert calls_of(read(model, model.write([("get_weather", values)]))) == called(model, [("get_weather", values)])


@EVERY_MODEL
@settings(max_examples=15)
@given(data=st.data())
def test_no_answer_loses_text_or_fails_whatever_its_tokens(name, data):
    """Letters that no tag has are in order in the parts, however broken the markup."""
    model = MODELS[name]
    tags = st.sampled_from([*model.form.tags, *model.form.calls.openings, "function", '">', "</｜DSML｜invoke>", "\n"])
    written = "".join(data.draw(st.lists(tags | st.text("XYZÄ", min_size=1, max_size=3), max_size=25)))
    answer = read(model, written + ENDS_OF_KEYS.get(model.form.name, ""))
    got = answer.reasoning + answer.content + "".join(f"{call.name}{call.id or ''}{call.arguments}" for call in answer.calls)
    assert all(got.count(letter) >= written.count(letter) for letter in "XYZÄ")


@pytest.mark.deep
@EVERY_MODEL
def test_an_answer_that_ends_within_a_call_keeps_what_is_known(name):
    model = MODELS[name]
    ids = model.ids("Look." + model.write([("get_weather", {"city": "Zürich", "days": 3})]))
    whole = parse_answer(ids, model.tokenizer, model.form, tools=TOOLS).calls[0]
    begun = 0
    for end in range(0, len(ids), 3):
        answer = parse_answer(ids[:end], model.tokenizer, model.form, tools=TOOLS)
        assert answer.content.startswith("Look."[:end])
        for call in answer.calls:
            begun += 1
            assert (call.name, call.id) == (whole.name, whole.id)
            half_a_letter = call.arguments.endswith("\ufffd")
            assert half_a_letter or whole.arguments.startswith(call.arguments)
    assert begun > 5


@EVERY_MODEL
def test_arguments_of_a_string_arrive_while_they_are_written(name):
    model = MODELS[name]
    stream = AnswerStream(model.tokenizer, model.form, tools=TOOLS)
    parts = [part for token in model.ids(model.write([("get_weather", {"city": "x" * 100})])) for part in stream.push([token])]
    pieces = [part.text for part in parts if isinstance(part, CallArguments)]
    assert len(pieces) > 90
    assert json.loads("".join(pieces)) == {"city": "x" * 100}


@EVERY_MODEL
def test_long_arguments_are_whole(name):
    model = MODELS[name]
    values = {"city": "long 😀 " * 200}
    ids = model.ids(model.write([("get_weather", values)]))
    assert calls_of(in_parts(model, [ids[at : at + 7] for at in range(0, len(ids), 7)])) == called(
        model, [("get_weather", values)]
    )


@EVERY_MODEL
def test_a_request_without_calls_has_them_as_content(name):
    model = MODELS[name]
    written = model.write([("now", {})])
    answer = parse_answer(model.ids("a" + written), model.tokenizer, model.form.without_calls())
    assert answer.calls == []
    assert answer.content.startswith("a")
    assert "now" in answer.content


@pytest.mark.parametrize("name", ["V3", "V3.1", "V4", "Kimi", "GLM-4.5", "GLM-4.7"])
def test_text_that_only_spells_control_tokens_is_text(name):
    model = MODELS[name]
    text = "<think>no</think> see " + model.write(CALLS)
    spelled = list(text.encode())  # the first 256 tokens are the bytes
    answer = parse_answer(spelled, model.tokenizer, model.form, tools=TOOLS, in_reasoning=True)
    assert answer == Answer(reasoning=text)


def test_a_value_may_be_text_about_tags():
    model = MODELS["GLM-4.7"]
    values = {"code": "</tool_call><tool_call>x<arg_key>", "city": "</think>"}
    assert calls_of(read(model, model.write([("get_weather", values)]))) == called(model, [("get_weather", values)])


def test_arguments_with_a_fence_of_their_own_are_whole():
    values = {"code": "```py\nx\n```"}
    for name in ("V3", "V3, tags as text"):
        model = MODELS[name]
        assert calls_of(read(model, model.write([("get_weather", values)]))) == called(model, [("get_weather", values)])


def test_json_arguments_are_the_model_s_own_text():
    model = MODELS["V3.1"]
    text = '{"a":1.0,  "b" : [ ]}'
    answer = read(
        model, f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜> {text}\n<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    )
    assert answer.calls == [ToolCall("f", None, text, True)]


@pytest.mark.parametrize("name", ["V3.1", "Kimi"])
def test_arguments_that_are_absent_are_an_empty_object(name):
    model = MODELS[name]
    answer = read(model, model.write([("now", {})]).replace("{}", " "))
    assert [call.arguments for call in answer.calls] == ["{}"]


def test_the_number_of_kimi_s_id_counts_over_the_conversation():
    model = MODELS["Kimi"]
    text = model.write([("now", {}), ("get_weather", {})]).replace(":1", ":7").replace(":0", ":6")
    assert [(call.name, call.id) for call in read(model, text).calls] == [
        ("now", "functions.now:6"),
        ("get_weather", "functions.get_weather:7"),
    ]


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (" functions.a.b:12\n", ("a.b", "functions.a.b:12")),
        ("now:3", ("now", "now:3")),
        ("functions.now", ("now", None)),
        ("now", ("now", None)),
    ],
)
def test_kimi_s_ids_are_read_as_they_are_written(written, expected):
    model = MODELS["Kimi"]
    answer = read(model, f"<|tool_call_begin|>{written}<|tool_call_argument_begin|>{{}}<|tool_call_end|>")
    assert [(call.name, call.id) for call in answer.calls] == [expected]


@pytest.mark.parametrize("name", ["V3.1", "Kimi"])
def test_a_call_whose_end_is_missing_ends_where_the_next_begins_or_the_section_ends(name):
    model = MODELS[name]
    end = model.form.calls.ends[-1]
    answer = read(model, model.write(CALLS).replace(end, ""))
    assert calls_of(answer) == called(model, CALLS)


def test_a_glm_call_whose_end_is_missing_ends_where_the_next_begins():
    model = MODELS["GLM-4.7"]
    text = "<tool_call>now<tool_call>now</tool_call>"
    assert calls_of(read(model, text)) == [("now", None, {}, True)] * 2


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("GLM-4.7", "<tool_call> is a tag, and </tool_call> another"),
        ("GLM-4.7", '<tool_call>{"name": "now"}</tool_call>'),
        ("GLM-4.7", "<tool_call>two words<arg_key>k</arg_key><arg_value>v</arg_value></tool_call>"),
        ("GLM-4.7", "<tool_call>now"),
        ("Kimi", "<|tool_call_begin|>two words<|tool_call_argument_begin|>{}<|tool_call_end|>"),
        ("Kimi", "<|tool_call_begin|>functions.now:0<|tool_call_end|>"),
        ("V3", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>now {}<｜tool▁call▁end｜>"),
        ("V3.1", "<｜tool▁call▁begin｜><｜tool▁sep｜>{}<｜tool▁call▁end｜>"),
        ("V3.1", "<｜tool▁call▁begin｜>no"),
        ("V3.2", '<｜DSML｜invoke name="two words">x</｜DSML｜invoke>'),
        ("V3.2", '<｜DSML｜invoke name="no"'),
        ("V4", '<｜DSML｜invoke name="no</｜DSML｜invoke>'),
        ("V3.2", "<｜DSML｜function_ca"),
    ],
)
def test_malformed_calls_are_content(name, text):
    model = MODELS[name]
    answer = read(model, "See: " + text)
    assert answer.calls == []
    assert answer.content.replace(" ", "") == ("See:" + text).replace(" ", "")


@EVERY_MODEL
def test_a_text_that_is_too_long_for_a_name_is_not_held_back(name):
    model = MODELS[name]
    opening = model.form.calls.openings[-1]
    stream = AnswerStream(model.tokenizer, model.form)
    parts = stream.push(model.ids(opening + "word " * 200))
    assert "word word" in answer_of(parts).content


def test_misplaced_text_between_arguments_is_content_and_the_call_goes_on():
    model = MODELS["V3.2"]
    text = model.write([("get_weather", {"city": "a", "days": 3})]).replace("</｜DSML｜parameter>", "</｜DSML｜parameter>oh", 1)
    answer = read(model, text)
    assert calls_of(answer) == called(model, [("get_weather", {"city": "a", "days": 3})])
    assert answer.content.strip() == "oh"
    glm = read(MODELS["GLM-4.7"], "<tool_call>now<arg_key>k</arg_key>?<arg_value>1</arg_value><arg_key>z</arg_key></tool_call>")
    assert (glm.content, calls_of(glm)) == ("?<arg_key>z</arg_key>", [("now", None, {"k": 1}, True)])


def test_a_valid_call_behind_a_malformed_one_is_read():
    model = MODELS["Kimi"]
    text = model.write([("now", {}), ("get_weather", {"days": 1})]).replace("functions.now:0", "!")
    answer = read(model, text)
    assert [call.name for call in answer.calls] == ["get_weather"]
    assert answer.content == "<|tool_call_begin|>!<|tool_call_argument_begin|>{}<|tool_call_end|>"


def test_the_model_says_in_dsml_what_a_string_is_and_else_the_schema_does():
    text = (
        '<｜DSML｜function_calls><｜DSML｜invoke name="get_weather"><｜DSML｜parameter name="days" string="true">3'
        "</｜DSML｜parameter>"
        '<｜DSML｜parameter name="city" string="false">4</｜DSML｜parameter>'
        '<｜DSML｜parameter name="where" string="false">no JSON</｜DSML｜parameter>'
        '<｜DSML｜parameter name="code">5</｜DSML｜parameter></｜DSML｜invoke></｜DSML｜function_calls>'
    )
    assert calls_of(read(MODELS["V3.2"], text)) == [
        ("get_weather", None, {"days": "3", "city": 4, "where": "no JSON", "code": "5"}, True)
    ]


def test_emoji_come_whole():
    model = MODELS["GLM-4.7"]
    stream = AnswerStream(model.tokenizer, model.form, tools=TOOLS)
    text = "<think>🙂</think>😀<tool_call>get_weather<arg_key>city</arg_key><arg_value>🌍</arg_value></tool_call>"
    parts = [part for token in model.ids(text) for part in stream.push([token])]
    texts = [part.text for part in parts if isinstance(part, Reasoning | Content | CallArguments)]
    assert texts == ["🙂", "😀", '{"city": "', "🌍", '"', "}"]


def test_tokens_that_are_no_bytes_keep_their_spaces_around_tags():
    tokenizer = words()
    ids = [tokenizer.model.token_to_id(token) for token in ("a", "▁b", "</think>", "▁a", "<0xE2>", "<0x82>", "<0xAC>", "b")]
    assert parse_answer(ids, tokenizer, FORM["reasoning"], in_reasoning=True) == Answer("a b", " a€b")


def test_half_a_character_before_a_tag_does_not_swallow_the_tag():
    model = MODELS["Kimi"]
    ids = [0xF0, 0x9F, *model.ids("</think>a")]
    assert parse_answer(ids, model.tokenizer, model.form, in_reasoning=True) == Answer("\ufffd", "a")


# -- stop texts


@given(data=st.data())
def test_a_plain_answer_is_the_text_of_a_text_stream(data):
    tokenizer = MODELS["GLM-4.7"].tokenizer
    ids = data.draw(st.lists(st.integers(0, tokenizer.model.get_vocab_size() - 1), max_size=30))
    stop = data.draw(st.lists(st.sampled_from(["a", "ab", "\n", "<th", "</think>", " the"])))
    rules = {"least": data.draw(st.integers(0, 9)), "kept": data.draw(st.booleans())}
    answers, texts = AnswerStream(tokenizer, PLAIN_ANSWER, stop=stop, **rules), TextStream(tokenizer, stop, **rules)
    answer = answer_of([*answers.push(ids), *answers.finish()])
    assert answer.content == texts.push(ids) + texts.finish()
    assert (answers.stopped, answers.used) == (texts.stopped, texts.used)


@EVERY_MODEL
def test_a_stop_text_ends_content_and_reasoning_but_no_call(name):
    model = MODELS[name]
    written = model.write([("get_weather", {"city": "stop here"})])
    answer = read(model, "go " + written + "then stop, please", stop=["stop"])
    assert calls_of(answer) == called(model, [("get_weather", {"city": "stop here"})])
    assert "then" in answer.content or model.form.name != "glm"
    assert read(model, "a stop b", stop=["stop"]) == Answer("", "a ")
    assert read(model, "a stop b</think>c", stop=["stop"], in_reasoning=True) == Answer("a ", "")


@EVERY_MODEL
def test_after_a_stop_text_nothing_is_read_or_counted(name):
    model = MODELS[name]
    stream = AnswerStream(model.tokenizer, model.form, stop=["b"])
    assert stream.push(model.ids("axbcd")) == [Content("ax")]
    assert (stream.push(model.ids("e")), stream.finish(), stream.used, stream.stopped) == ([], [], 3, True)


@EVERY_MODEL
def test_a_stop_text_may_be_the_tag_that_ends_reasoning(name):
    assert read(MODELS[name], "So. </think>4", stop=["</think>"], in_reasoning=True) == Answer("So. ", "")


@pytest.mark.parametrize("name", ["V3.2", "GLM, tags as text"])
def test_a_stop_text_within_a_tag_of_text_does_not_stop(name):
    model = MODELS[name]
    written = "ask " + model.write([("now", {})])
    assert len(read(model, written, stop=["<", "k <", "invoke", "tool_"]).calls) == 1
    assert read(model, "a <tool", stop=["<"]) == Answer("", "a ")
    assert read(model, "ask <tool", stop=["k <t"]) == Answer("", "as")


def test_an_empty_stop_text_is_refused_and_one_that_is_no_unicode():
    model = MODELS["Kimi"]
    for stop in ("", "\ud800"):
        with pytest.raises(BadRequest):
            AnswerStream(model.tokenizer, model.form, stop=["a", stop])


def test_every_format_of_calls_is_tested():
    assert {model.form.name for model in MODELS.values()} == {form.name for form in FORM.values() if form.calls}


@EVERY_MODEL
def test_a_reading_of_one_call_stops_at_its_end_in_any_parts(name):
    model = MODELS[name]
    ids = model.ids("Hm.</think>Now." + model.write(CALLS))
    whole = AnswerStream(model.tokenizer, model.form, tools=TOOLS, in_reasoning=True, one_call=True)
    found = answer_of([*whole.push(ids), *whole.finish()])
    assert (found.reasoning, found.content, calls_of(found)) == ("Hm.", "Now.", called(model, CALLS[:1]))
    assert found.calls[0].complete
    assert whole.stopped
    single = AnswerStream(model.tokenizer, model.form, tools=TOOLS, in_reasoning=True, one_call=True)
    assert answer_of([part for token in ids for part in single.push([token])]) == found
    assert single.used == whole.used < len(ids)


@EVERY_MODEL
def test_tokens_of_reasoning_are_counted_without_its_tags(name):
    model = MODELS[name]
    stream = AnswerStream(model.tokenizer, model.form, tools=TOOLS)
    for token in model.ids("<think>" + "x" * 50 + "</think>content" + model.write(CALLS)):
        stream.push([token])
    tags_are_text = "</think>" not in model.tokenizer.control
    assert 50 <= stream.reasoning_tokens <= 50 + 7 * tags_are_text  # what may begin the tag is not known yet
