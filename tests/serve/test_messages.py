"""/v1/messages as Anthropic's client sees it, with models that say what a test wants."""

import json
from typing import Literal

import httpx
import pytest
from pydantic import BaseModel
from servers import Running, started

anthropic = pytest.importorskip("anthropic")
pytestmark = [pytest.mark.once, pytest.mark.xdist_group("serve")]

SAID = [{"role": "user", "content": "The weather in Tromsø?"}]
PROPERTIES = {"city": {"type": "string"}, "days": {"type": "integer"}}
WEATHER = {"name": "weather", "description": "Of a city", "input_schema": {"type": "object", "properties": PROPERTIES}}
TOOLS = {"tools": [WEATHER]}
THINKING = {"thinking": {"type": "enabled", "budget_tokens": 1024}}
CALLING = {"deepseek": {**TOOLS, **THINKING}, "kimi": TOOLS, "glm": TOOLS}
GREEDY = {"model": "m", "max_tokens": 60}  # these folders name no temperature
PATH = "/v1/messages"


class Person(BaseModel):
    name: Literal["Ola", "Kari"]
    likes_rain: bool


def client_of(running: Running):
    return anthropic.Anthropic(base_url=running.url, api_key="none", max_retries=0)


def created(running: Running, said=SAID, **more):
    return client_of(running).messages.create(**{**GREEDY, "messages": said, **more})


def error(running: Running, **more) -> dict:
    response = running.post(PATH, {**GREEDY, "messages": SAID, **more})
    assert response.status_code == 400, response.text
    body = response.json()
    assert (body["type"], set(body["error"])) == ("error", {"type", "message"})
    return body["error"]


def without_ids(content: list) -> list[dict]:
    """Blocks without what differs from answer to answer."""
    found = [block.to_dict() for block in content]
    for block in found:
        block.pop("signature", None)
        block.pop("parsed_output", None)
        if block.get("id", "").startswith("toolu_"):
            block["id"] = ""
    return found


def test_a_message_gets_the_answer_that_a_chat_gets(deepseek):
    message = created(deepseek)
    chat = deepseek.client.chat.completions.create(model="m", messages=SAID, temperature=0, max_tokens=60)
    (block,) = message.content
    assert (block.type, block.text) == ("text", chat.choices[0].message.content)
    assert (message.type, message.role, message.model) == ("message", "assistant", "m")
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    usage = message.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == chat.usage.prompt_tokens
    assert usage.output_tokens == chat.usage.completion_tokens


@pytest.mark.deep
def test_thinking_text_and_a_call_are_blocks_in_their_order(deepseek):
    message = created(deepseek, **TOOLS, **THINKING)
    thinking, text, call = message.content
    assert (thinking.type, thinking.thinking) == ("thinking", "Let me see.")
    assert thinking.signature
    assert (text.type, text.text) == ("text", "I look it up 😀")
    assert (call.type, call.name, call.input) == ("tool_use", "weather", {"city": "Tromsø"})
    assert call.id.startswith("toolu_")
    assert message.stop_reason == "tool_use"
    assert message.usage.output_tokens_details.thinking_tokens == 3


@pytest.mark.deep
@pytest.mark.parametrize("model", CALLING)
def test_a_stream_makes_the_same_blocks_as_a_whole_answer(model, pace, request):
    running, more = request.getfixturevalue(model), CALLING[model]
    whole = created(running, **more)
    with client_of(running).messages.stream(**GREEDY, messages=SAID, **more) as stream:
        final = stream.get_final_message()
    assert without_ids(final.content) == without_ids(whole.content)
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)
    counted = [one.usage.input_tokens + one.usage.cache_read_input_tokens for one in (whole, final)]
    assert counted[0] == counted[1]


@pytest.mark.deep
def test_events_come_in_anthropics_order_each_with_its_name(deepseek):
    body = {**GREEDY, "messages": SAID, "stream": True, **TOOLS, **THINKING}
    with httpx.stream("POST", deepseek.url + PATH, json=body, timeout=120) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.iter_lines() if line]
    names = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    assert names == [event["type"] for event in events]
    assert len(lines) == 2 * len(events)
    assert names[:2] == ["message_start", "ping"]
    names = [name for name in names if name != "ping"]  # there are more while programs are compiled
    of_blocks = [name for at, name in enumerate(names) if not (name.endswith("delta") and names[at - 1] == name)]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert of_blocks == ["message_start", *block * 3, "message_delta", "message_stop"]
    starts = [event for event in events if event["type"] == "content_block_start"]
    assert [event["index"] for event in starts] == [0, 1, 2]
    empty = [{"thinking": "", "signature": ""}, {"text": ""}, {"name": "weather", "input": {}}]
    assert all(parts.items() <= event["content_block"].items() for parts, event in zip(empty, starts, strict=True))
    kinds = list(dict.fromkeys(event["delta"]["type"] for event in events if event["type"] == "content_block_delta"))
    assert kinds == ["thinking_delta", "signature_delta", "text_delta", "input_json_delta"]
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}


def test_a_silent_stream_gets_pings(deepseek, monkeypatch):
    monkeypatch.setattr("mla_jax.serve.connections.SILENT_SECONDS", 0.001)
    with client_of(deepseek).messages.stream(**GREEDY, messages=SAID) as stream:
        assert "".join(stream.text_stream) == created(deepseek).content[0].text
    body = {**GREEDY, "messages": SAID, "stream": True}
    assert deepseek.post(PATH, body).text.count('event: ping\ndata: {"type":"ping"}\n\n') > 1


@pytest.mark.deep
@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_tells_which_stop_sequence_ended_it(deepseek, stream):
    more = {"stop_sequences": ["never", "words", "ords"]}
    message = created(deepseek, **more)
    if stream:
        with client_of(deepseek).messages.stream(**GREEDY, messages=SAID, **more) as pieces:
            message = pieces.get_final_message()
    assert (message.content[0].text, message.stop_reason, message.stop_sequence) == ("plain ", "stop_sequence", "words")


@pytest.mark.deep
@pytest.mark.parametrize("stream", [False, True])
def test_a_limit_ends_an_answer_and_may_cut_a_call(deepseek, stream):
    more = {**TOOLS, **THINKING, "max_tokens": 13}
    message = created(deepseek, **more)
    if stream:
        with client_of(deepseek).messages.stream(**{**GREEDY, **more}, messages=SAID) as pieces:
            message = pieces.get_final_message()
    assert (message.stop_reason, message.usage.output_tokens) == ("max_tokens", 13)
    assert message.content[-1].input == ({} if stream else {"arguments": '{"ci'})


def test_more_tokens_than_the_context_has_room_for_are_cut_to_that(deepseek):
    message = created(deepseek, max_tokens=20_000, extra_body={"ignore_eos": True})
    usage = message.usage
    assert message.stop_reason == "max_tokens"
    assert usage.input_tokens + usage.cache_read_input_tokens + usage.output_tokens == deepseek.llm.context


@pytest.mark.deep
@pytest.mark.parametrize("model", ["deepseek", "kimi"])
def test_a_conversation_goes_on_with_the_results_of_its_calls(model, read, request):
    running = request.getfixturevalue(model)
    first = created(running, **CALLING[model])
    call = first.content[-1]
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "31 °C"}]}
    said = [*SAID, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    answer = created(running, said, **TOOLS)
    assert answer.content[0].text.startswith("It is warm." if model == "deepseek" else "Once more:")
    user, before, after = read[-1]["messages"]
    assert (user, after) == (SAID[0], {"role": "tool", "tool_call_id": call.id, "content": "31 °C"})
    function = {"name": "weather", "arguments": call.input}
    assert before["tool_calls"] == [{"id": call.id, "type": "function", "function": function}]
    assert before.get("reasoning_content") == ("Let me see." if model == "deepseek" else None)


def test_blocks_become_messages_of_a_chat(deepseek, read):
    cached = {"cache_control": {"type": "ephemeral"}}
    billing = {"type": "text", "text": "x-anthropic-billing-header: cc_version=1; cch=8a7b;"}
    calls = [{"type": "tool_use", "id": id, "name": "f", "input": {"x": id}} for id in "ab"]
    results = [{"type": "tool_result", "tool_use_id": "a"}, {"type": "tool_result", "tool_use_id": "b", "content": "two"}]
    thinking = [{"type": "thinking", "thinking": "hm", "signature": "s"}, {"type": "redacted_thinking", "data": "?"}]
    texts = [{"type": "text", "text": "Let "}, {"type": "text", "text": "me."}]
    said = [
        {"role": "user", "content": [{"type": "text", "text": "One", **cached}, {"type": "text", "text": "two"}]},
        {"role": "assistant", "content": [*thinking, *texts, *calls]},
        {"role": "user", "content": [*results, {"type": "text", "text": "And?"}]},
        {"role": "assistant", "content": "Done."},
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Thanks."},
    ]
    created(deepseek, said, system=[billing, {"type": "text", "text": "Obey.", **cached}, {"type": "text", "text": "Be brief."}])
    asked = [{"id": id, "type": "function", "function": {"name": "f", "arguments": {"x": id}}} for id in "ab"]
    assert read[-1]["messages"] == [
        {"role": "system", "content": "Obey.\nBe brief."},
        {"role": "user", "content": "One\ntwo"},
        {"role": "assistant", "content": "Let me.", "reasoning_content": "hm", "tool_calls": asked},
        {"role": "tool", "tool_call_id": "a", "content": ""},
        {"role": "tool", "tool_call_id": "b", "content": "two"},
        {"role": "user", "content": "And?"},
        {"role": "assistant", "content": "Done."},
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Thanks."},
    ]


def test_a_last_answer_is_continued(deepseek, read):
    created(deepseek, [*SAID, {"role": "assistant", "content": "pl"}], max_tokens=1)
    assert (read[-1]["continue_final_message"], read[-1]["add_generation_prompt"]) == (True, False)
    call = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
    created(deepseek, [*SAID, {"role": "assistant", "content": [call]}], max_tokens=1)
    assert "continue_final_message" not in read[-1]


@pytest.mark.parametrize(("thinking", "expected"), [("enabled", True), ("adaptive", True), ("disabled", False), (None, None)])
def test_thinking_is_a_variable_of_the_template(deepseek, read, thinking, expected):
    created(deepseek, **({"thinking": {"type": thinking}} if thinking else {}))
    assert read[-1]["chat_template_kwargs"] == ({} if expected is None else {"thinking": expected})


@pytest.mark.deep
@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
def test_a_call_can_be_forced(deepseek, choice):
    schema = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 9}}, "required": ["city"]}
    tool = {"name": "weather", "input_schema": {**schema, "additionalProperties": False}}
    message = created(deepseek, tools=[tool], tool_choice=choice, **THINKING)
    assert [block.type for block in message.content] == ["thinking", "tool_use"]
    assert message.content[-1].input == {"city": "Tromsø"}


@pytest.mark.deep
def test_an_answer_may_be_held_to_one_call_or_none(glm, read):
    assert [block.type for block in created(glm, **TOOLS).content].count("tool_use") == 2
    message = created(glm, **TOOLS, tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert [block.type for block in message.content].count("tool_use") == 1
    assert message.stop_reason == "tool_use"
    message = created(glm, **TOOLS, tool_choice={"type": "none"})
    assert {block.type for block in message.content} == {"thinking", "text"}
    assert read[-1]["tools"][0]["function"]["description"] == "Of a city"


@pytest.mark.deep
def test_an_answer_of_a_form_is_parsed(deepseek):
    drawn = {"temperature": 2.0, "seed": 3, "thinking": {"type": "disabled"}}
    parsed = client_of(deepseek).messages.parse(model="m", max_tokens=400, messages=SAID, output_format=Person, extra_body=drawn)
    assert isinstance(parsed.parsed_output, Person)


def test_tokens_of_a_conversation_are_counted(deepseek):
    client = client_of(deepseek)
    for more in ({}, TOOLS, THINKING, {"system": "Be brief."}, {**TOOLS, "tool_choice": {"type": "none"}}):
        counted = client.messages.count_tokens(model="m", messages=SAID, **more).input_tokens
        usage = created(deepseek, **more, max_tokens=1).usage
        assert counted == usage.input_tokens + usage.cache_read_input_tokens
    with pytest.raises(anthropic.BadRequestError, match=r"messages\.0\.role"):
        client.messages.count_tokens(model="m", messages=[{"role": "robot", "content": "a"}])


def test_keys_that_change_nothing_are_let_through(deepseek):
    plain = created(deepseek).content
    ignored = {"metadata": {"user_id": "a"}, "service_tier": "auto", "cache_control": {"type": "ephemeral"}}
    ignored |= {"output_config": {"effort": "low"}, "stop_sequences": [], "extra_body": {"top_k": 5, "context_management": {}}}
    assert created(deepseek, **ignored, extra_headers={"anthropic-beta": "a-b"}).content == plain


@pytest.mark.deep
@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"max_tokens": None}, "max_tokens: Input should be a valid integer"),
        ({"max_tokens": 0}, "max_tokens: Input should be greater than or equal to 1"),
        ({"messages": []}, "messages: List should have at least 1 item"),
        (
            {"messages": [{"role": "robot", "content": "a"}]},
            "messages.0.role is 'robot', which is not supported\n  expected user or assistant or system",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages.0.content.0.type is 'image'"),
        ({"messages": [{"role": {}, "content": "a"}]}, "messages.0.role is"),
        ({"messages": [{"role": "user", "content": [{"type": []}]}]}, "messages.0.content.0.type is"),
        ({"thinking": {"type": []}}, "thinking.type is"),
        ({"tool_choice": {"type": {}}}, "tool_choice.type is"),
        ({"messages": [{"role": "user", "content": ["a"]}]}, "messages.0.content.0 is 'a'"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages.0.content is 3"),
        ({"messages": [{"role": "user"}]}, "messages.0.content is None"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f"}]}]}, "content.0.input is"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "messages.0.content.0.tool_use_id is None"),
        ({"system": [{"type": "image"}]}, "system.0.type is 'image'"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0.type is 'web_search_20250305'"),
        ({"tools": [{"name": "f"}]}, "tools.0.input_schema is None"),
        (
            {**TOOLS, "tool_choice": {"type": "required"}},
            "tool_choice.type is 'required', which is not supported\n  expected auto or any or none or tool",
        ),
        ({**TOOLS, "tool_choice": {"type": "tool", "name": "now"}}, "tool_choice names the function now"),
        ({"tool_choice": {"type": "any"}}, "there are no tools to call"),
        ({"thinking": {"type": "between_tools"}}, "thinking.type is 'between_tools'"),
        ({"output_config": {"format": {"type": "yaml"}}}, "output_config.format is"),
        ({"container": "c_1"}, "container is 'c_1', which is not supported"),
        ({"temperature": -1}, "temperature is -1"),
        ({"stop_sequences": [""]}, "stop"),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
def test_what_cannot_be_served_is_refused_by_its_name(deepseek, body, words, stream):
    found = error(deepseek, **body, stream=stream)
    assert found["type"] == "invalid_request_error"
    assert words in found["message"]


def test_a_prompt_that_is_too_long_is_refused_as_agents_look_for_it(deepseek):
    said = [{"role": "user", "content": "a" * 600}]
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: .*maximum context length is 512 tokens"):
        created(deepseek, said)


@pytest.mark.deep
def test_errors_have_anthropics_form_on_its_routes_alone(deepseek, tmp_path, chat_folder):
    with pytest.raises(anthropic.NotFoundError, match="claude"):
        created(deepseek, model="claude")
    assert deepseek.post("/v1/chat/completions", {"model": "claude", "messages": SAID}).json().keys() == {"error"}
    (tmp_path / "keys").write_text("secret\n")
    for running in started(chat_folder, api_key_file=tmp_path / "keys", max_body=0.01):
        response = running.post(PATH, {"messages": []})
        assert (response.status_code, response.json()["error"]["type"]) == (401, "authentication_error")
        for name, headers in (("x-api-key", {"x-api-key": "secret"}), ("bearer", {"Authorization": "Bearer secret"})):
            body = {"max_tokens": 1, "messages": [{"role": "user", "content": "a1"}]}
            assert running.post(PATH, body, headers=headers).status_code == 200, name
        assert running.post(PATH, body, headers={"x-api-key": "wrong"}).status_code == 401
        large = running.post(PATH, {"messages": "a" * 20_000}, headers={"x-api-key": "secret"})
        assert (large.status_code, large.json()["error"]["type"]) == (413, "request_too_large")


def test_a_stream_that_fails_ends_with_an_error(deepseek, monkeypatch):
    async def pieces(_):
        raise RuntimeError("/secret/path")
        yield

    monkeypatch.setattr("mla_jax.serve.answering.Answering.pieces", pieces)
    with (
        pytest.raises(anthropic.APIStatusError) as raised,
        client_of(deepseek).messages.stream(**GREEDY, messages=SAID) as stream,
    ):
        stream.until_done()
    assert raised.value.body["error"]["type"] == "api_error"
    assert "secret" not in str(raised.value)
    with pytest.raises(anthropic.InternalServerError):
        created(deepseek)
