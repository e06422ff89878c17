"""/v1/responses as OpenAI's client sees it, with models that say what a test wants."""

import json

import httpx
import openai
import pytest
from pydantic import BaseModel, Field
from servers import Running

pytestmark = [pytest.mark.once, pytest.mark.xdist_group("serve")]

ASKED = "The weather in Tromsø?"
SAID = [{"role": "user", "content": ASKED}]
PROPERTIES = {"city": {"type": "string"}, "days": {"type": "integer"}}
WEATHER = {"type": "function", "name": "weather", "parameters": {"type": "object", "properties": PROPERTIES}, "strict": False}
CHAT_WEATHER = {"type": "function", "function": {key: WEATHER[key] for key in ("name", "parameters", "strict")}}
THINKING, AT_ONCE = ({"chat_template_kwargs": {"thinking": wanted}} for wanted in (True, False))
TOOLS = {"tools": [WEATHER]}
CALLING = {"deepseek": {**TOOLS, "extra_body": THINKING}, "kimi": TOOLS, "glm": TOOLS}
GREEDY = {"model": "m", "temperature": 0, "max_output_tokens": 60}


class Person(BaseModel):
    name: str = Field(max_length=6)
    age: int = Field(ge=0, le=150)


def created(running: Running, said=ASKED, **more):
    return running.client.responses.create(**{**GREEDY, "input": said, **more})


def error(running: Running, **more) -> dict:
    response = running.post("/v1/responses", {**GREEDY, "input": ASKED, **more})
    assert response.status_code == 400, response.text
    return response.json()["error"]


def without_ids(items: list) -> list[dict]:
    """Output items without what differs from answer to answer."""
    found = [item.to_dict() for item in items]
    drawn = [{"id": ""} | ({"call_id": ""} if str(item.get("call_id")).startswith("call_") else {}) for item in found]
    return [{**item, **ids} for item, ids in zip(found, drawn, strict=True)]


def test_a_text_gets_the_answer_that_a_chat_gets(deepseek):
    response = created(deepseek)
    chat = deepseek.client.chat.completions.create(model="m", messages=SAID, temperature=0, max_tokens=60)
    assert response.output_text == chat.choices[0].message.content
    assert (response.status, response.object, response.model, response.error) == ("completed", "response", "m", None)
    assert response.completed_at >= response.created_at
    assert (response.usage.input_tokens, response.usage.output_tokens) == (chat.usage.prompt_tokens, chat.usage.completion_tokens)
    assert response.usage.total_tokens == chat.usage.total_tokens
    assert response.usage.input_tokens_details.cached_tokens <= response.usage.input_tokens
    (message,) = response.output
    assert (message.type, message.role, message.status) == ("message", "assistant", "completed")


def test_the_answer_repeats_what_was_asked(deepseek):
    about = {"metadata": {"of": "a test"}, "instructions": "Be brief.", "parallel_tool_calls": False, "top_p": 0.5}
    response = created(deepseek, **about, reasoning={"effort": "low"}, store=True, truncation="disabled", user="someone")
    assert {key: getattr(response, key) for key in about} == about
    assert (response.temperature, response.max_output_tokens) == (0, 60)
    assert (response.store, response.previous_response_id, response.reasoning.effort) == (False, None, "low")


def test_reasoning_text_and_a_call_are_items_in_their_order(deepseek):
    response = created(deepseek, **TOOLS, extra_body=THINKING)
    reasoning, message, call = response.output
    assert [part.text for part in reasoning.content] == ["Let me see."]
    assert (reasoning.type, reasoning.summary) == ("reasoning", [])
    assert message.content[0].text == response.output_text == "I look it up 😀"
    assert (call.type, call.name, call.arguments) == ("function_call", "weather", '{"city": "Tromsø"}')
    assert call.call_id.startswith("call_")
    assert response.usage.output_tokens_details.reasoning_tokens == 3
    assert len({item.id for item in response.output}) == 3


@pytest.mark.deep
@pytest.mark.parametrize("model", CALLING)
def test_a_stream_makes_the_same_items_as_a_whole_answer(model, pace, request):
    running, more = request.getfixturevalue(model), CALLING[model]
    whole = created(running, **more)
    with running.client.responses.stream(**GREEDY, input=ASKED, **more) as stream:
        events = list(stream)
        response = stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    plain = [{key: value for key, value in item.items() if not key.startswith("parsed")} for item in without_ids(response.output)]
    for item in plain:
        for part in item.get("content", []):
            part.pop("parsed", None)
    assert plain == without_ids(whole.output)
    assert response.usage.output_tokens == whole.usage.output_tokens
    assert len({event.response.id for event in events if hasattr(event, "response")}) == 1


def test_events_come_in_openais_order_and_deltas_make_what_is_done(deepseek):
    stream = created(deepseek, stream=True, **TOOLS, extra_body=THINKING)
    events = list(stream)
    kinds = [event.type.removeprefix("response.") for event in events]
    text = ["output_item.added", "content_part.added", "{}.delta", "{}.done", "content_part.done", "output_item.done"]
    expected = ["created", "in_progress"]
    expected += [kind.format("reasoning_text") for kind in text] + [kind.format("output_text") for kind in text]
    call = ["delta", "done"]
    expected += ["output_item.added", *(f"function_call_arguments.{kind}" for kind in call), "output_item.done", "completed"]
    assert [kind for at, kind in enumerate(kinds) if kinds[at - 1] != kind or not kind.endswith("delta")] == expected
    for name, key in (("reasoning_text", "text"), ("output_text", "text"), ("function_call_arguments", "arguments")):
        deltas = [event.delta for event in events if event.type == f"response.{name}.delta"]
        (done,) = [event for event in events if event.type == f"response.{name}.done"]
        assert "".join(deltas) == getattr(done, key)
    items = {event.output_index: event.item for event in events if event.type == "response.output_item.done"}
    for event in events:
        if hasattr(event, "item_id"):
            assert event.item_id == items[event.output_index].id
    assert [items[at].id for at in range(3)] == [item.id for item in events[-1].response.output]


def test_each_event_is_named_and_nothing_follows_the_last_one(deepseek):
    body = {**GREEDY, "input": ASKED, "stream": True}
    with httpx.stream("POST", f"{deepseek.url}/v1/responses", json=body, timeout=120) as response:
        lines = [line for line in response.iter_lines() if line]
    names = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
    told = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    assert names == [event["type"] for event in told]
    assert len(lines) == 2 * len(told)
    assert names[-1] == "response.completed"


@pytest.mark.parametrize("stream", [False, True])
def test_a_limit_leaves_an_answer_and_its_last_item_incomplete(deepseek, stream):
    response = created(deepseek, **TOOLS, extra_body=THINKING, max_output_tokens=13, stream=stream)
    if stream:
        *_, last = response
        assert last.type == "response.incomplete"
        response = last.response
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert [item.status for item in response.output] == ["completed", "completed", "incomplete"]
    assert response.output[-1].arguments.startswith('{"ci')
    assert response.usage.output_tokens == 13


def test_an_answer_of_a_form_is_parsed(deepseek):
    drawn = {"model": "m", "input": ASKED, "temperature": 2.0, "extra_body": {**AT_ONCE, "seed": 3}}
    response = deepseek.client.responses.parse(**drawn, text_format=Person)
    assert isinstance(response.output_parsed, Person)
    with deepseek.client.responses.stream(**drawn, text_format=Person) as stream:
        assert stream.get_final_response().output_parsed == response.output_parsed
    form = {"format": {"type": "json_object"}, "verbosity": "low"}
    text = deepseek.client.responses.create(**drawn, text=form, max_output_tokens=400).output_text
    assert text.startswith("{")


@pytest.mark.deep
@pytest.mark.parametrize("model", ["deepseek", "kimi"])
def test_a_conversation_goes_on_with_the_results_of_its_calls(model, read, request):
    running = request.getfixturevalue(model)
    first = created(running, **CALLING[model])
    call = first.output[-1]
    said = [*SAID, *first.output, {"type": "function_call_output", "call_id": call.call_id, "output": "31 °C"}]
    response = created(running, said, **TOOLS)
    assert response.output_text.startswith("It is warm." if model == "deepseek" else "Once more:")
    user, answer, result = read[-1]["messages"]
    assert (user, result) == (SAID[0], {"role": "tool", "tool_call_id": call.call_id, "content": "31 °C"})
    function = {"name": "weather", "arguments": call.arguments}
    assert answer["tool_calls"] == [{"id": call.call_id, "type": "function", "function": function}]
    assert answer.get("reasoning_content") == ("Let me see." if model == "deepseek" else None)
    assert answer["content"] == first.output_text


def test_items_become_messages_of_a_chat(deepseek, read):
    part = {"type": "input_text", "text": "two"}
    items = [
        {"role": "developer", "content": "Be brief."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "One, "}, part]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": None},
        {"type": "reasoning", "id": "rs_2", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}", "id": "fc_1", "status": "completed"},
        {"type": "function_call", "call_id": "b", "name": "g", "arguments": '{"x": 1}'},
        {"type": "function_call_output", "call_id": "a", "output": [part]},
        {"type": "function_call_output", "call_id": "b", "output": "three"},
        {"role": "assistant", "content": [{"type": "output_text", "text": "Done.", "annotations": []}]},
        {"role": "assistant", "content": "Really."},
        {"role": "user", "content": "Thanks."},
    ]
    created(deepseek, items, instructions="Obey.")
    calls = [
        {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}},
        {"id": "b", "type": "function", "function": {"name": "g", "arguments": '{"x": 1}'}},
    ]
    assert read[-1]["messages"] == [
        {"role": "system", "content": "Obey."},
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "One, two"},
        {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "a", "content": "two"},
        {"role": "tool", "tool_call_id": "b", "content": "three"},
        {"role": "assistant", "content": "Done."},
        {"role": "assistant", "content": "Really."},
        {"role": "user", "content": "Thanks."},
    ]


ALLOWED = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "weather"}]}


@pytest.mark.deep
@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}, ALLOWED])
def test_a_call_can_be_forced(deepseek, choice):
    schema = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 9}}, "required": ["city"]}
    tool = {**WEATHER, "parameters": {**schema, "additionalProperties": False}}
    response = created(deepseek, tools=[tool], tool_choice=choice, extra_body=THINKING)
    assert [item.type for item in response.output] == ["reasoning", "function_call"]
    assert json.loads(response.output[-1].arguments) == {"city": "Tromsø"}


def test_tools_become_those_of_a_chat_and_those_that_agents_always_send_are_left_out(deepseek, read):
    others = [{"type": kind, "name": "x"} for kind in ("web_search", "image_generation", "namespace", "custom", "tool_search")]
    response = created(deepseek, tools=[*others, WEATHER], parallel_tool_calls=False, extra_body=THINKING)
    assert read[-1]["tools"] == [CHAT_WEATHER]
    assert read[-1]["parallel_tool_calls"] is False
    assert response.output[-1].name == "weather"
    created(deepseek, **TOOLS, tool_choice="none")
    assert read[-1]["tool_choice"] == "none"
    found = error(deepseek, tools=others, tool_choice="required")
    assert (found["param"], "no tools to call" in found["message"]) == ("tool_choice", True)


def test_keys_that_change_nothing_are_let_through_and_null_is_absent(deepseek):
    ignored = {"include": ["reasoning.encrypted_content"], "prompt_cache_key": "a", "service_tier": "auto", "store": True}
    ignored |= {"client_metadata": {"a": 1}, "stream_options": {"include_obfuscation": False}, "safety_identifier": "b"}
    nulls = dict.fromkeys(("previous_response_id", "background", "prompt", "tools", "text", "reasoning", "truncation", "top_p"))
    response = deepseek.post("/v1/responses", {**GREEDY, "input": ASKED, **ignored, **nulls})
    assert response.status_code == 200, response.text
    assert response.json()["output"][0]["content"] == created(deepseek).to_dict()["output"][0]["content"]


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "nothing is stored here: send the whole conversation"),
        ({"conversation": "conv_1"}, "conversation", "nothing is stored here"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].type", "nothing is stored here"),
        ({"background": True}, "background", "wait for the answer"),
        ({"truncation": "auto"}, "truncation", "expected disabled"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt", "send the prompt as input"),
        ({"top_logprobs": 2}, "top_logprobs", "not supported"),
        ({"include": ["message.output_text.logprobs"]}, "include", "not supported"),
        ({"input": []}, "input", "empty list"),
        ({"input": None}, "input", "valid"),
        ({"input": [{"role": "robot", "content": "a"}]}, "input[0].role", "expected user or assistant or system or developer"),
        ({"input": [*SAID, {"role": "user", "content": 3}]}, "input[1].content", "expected a text"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type", "'input_image'"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id", "expected a text"),
        ({"input": [{"type": [1]}]}, "input[0].type", "not supported"),
        ({"input": [{"role": [], "content": "a"}]}, "input[0].role", "not supported"),
        ({"input": [{"role": "user", "content": [{"type": {}}]}]}, "input[0].content[0].type", "not supported"),
        (
            {"input": [{"type": "computer_call"}]},
            "input[0].type",
            "expected message or reasoning or function_call or function_call_output",
        ),
        ({"max_output_tokens": 0}, "max_output_tokens", "greater than or equal to 1"),
        ({"temperature": -1}, "temperature", "expected a number"),
        ({"tools": [{"type": "file_search"}]}, "tools[0].type", "expected function"),
        ({"tools": [{"type": "function"}]}, "tools[0].name", "expected a text"),
        ({**TOOLS, "tool_choice": {"type": "file_search"}}, "tool_choice", "expected auto, none, required"),
        ({**TOOLS, "tool_choice": "sometimes"}, "tool_choice", "expected auto, none, required"),
        ({"text": {"format": {"type": "yaml"}}}, "text.format", "the type of text.format is 'yaml'"),
        ({"text": {"format": {"type": "json_schema", "name": "a", "schema": 3}}}, "text.format", "text.format.schema is 3"),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
def test_what_cannot_be_served_is_refused_by_its_name(deepseek, body, param, words, stream):
    found = error(deepseek, **body, stream=stream)
    assert (found["param"], found["type"]) == (param, "invalid_request_error")
    assert words in found["message"]


def test_an_input_that_is_too_long_names_the_context_and_another_model_is_not_found(deepseek):
    for more in ({"input": "a" * 600}, {"max_output_tokens": 100_000}):
        assert error(deepseek, **more)["code"] == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError, match="gpt-4"):
        created(deepseek, model="gpt-4")


def test_a_stream_that_fails_ends_with_an_event_that_says_so(deepseek, monkeypatch):
    async def pieces(_):
        raise RuntimeError("/secret/path")
        yield

    monkeypatch.setattr("mla_jax.serve.answering.Answering.pieces", pieces)
    first, second, last = created(deepseek, stream=True)
    assert (first.type, second.type, last.type) == ("response.created", "response.in_progress", "response.failed")
    assert (last.response.status, last.response.error.code) == ("failed", "server_error")
    assert "secret" not in last.response.error.message
    with pytest.raises(openai.InternalServerError):
        created(deepseek)
