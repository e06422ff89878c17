# ruff: noqa: RUF001 DeepSeek's control tokens are written with such letters
"""Tools, reasoning and conversations as OpenAI's clients see them, with models that say what a test wants."""

import dataclasses
import json
import threading

import httpx
import jaxtyping
import jsonschema
import pytest
from scripted import DEEPSEEK, write_scripted
from servers import Running, started

pytestmark = [pytest.mark.once, pytest.mark.xdist_group("serve")]

ASKED = [{"role": "user", "content": "The weather in Tromsø?"}]
PROPERTIES = {"city": {"type": "string"}, "days": {"type": "integer"}}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": PROPERTIES}}}
TOOLS = {"tools": [WEATHER]}
THINKING = {"chat_template_kwargs": {"thinking": True}}
CALLING = {"deepseek": {**TOOLS, **THINKING}, "kimi": TOOLS, "glm": TOOLS}  # what makes each model call a tool


def asking(**more) -> dict:
    return {"model": "m", "messages": ASKED, "temperature": 0, "max_tokens": 60, **more}


def answer(running: Running, **more) -> dict:
    response = running.post("/v1/chat/completions", asking(**more))
    assert response.status_code == 200, response.text
    return response.json()


def events(running: Running, **more) -> list[dict]:
    body = {**asking(**more), "stream": True}
    with httpx.stream("POST", f"{running.url}/v1/chat/completions", json=body, timeout=120) as response:
        assert response.status_code == 200, response.read()
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def error(running: Running, **more) -> dict:
    response = running.post("/v1/chat/completions", asking(**more))
    assert response.status_code == 400, response.text
    return response.json()["error"]


def message_of(pieces: list[dict]) -> tuple[dict, str]:
    """The message that the deltas of a stream make, as a client joins them, and its finish reason."""
    assert pieces[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    *pieces, last = pieces
    assert last["choices"][0]["delta"] == {}, "the end comes alone"
    message: dict = {"content": ""}
    for piece in pieces:
        (choice,) = piece["choices"]
        assert choice["finish_reason"] is None
        for key in ("content", "reasoning_content", "reasoning"):
            if text := choice["delta"].get(key):
                assert "\ufffd" not in text
                message[key] = message.get(key, "") + text
        for delta in choice["delta"].get("tool_calls", []):
            _add_call(message.setdefault("tool_calls", []), delta)
    return message, last["choices"][0]["finish_reason"]


def _add_call(calls: list[dict], delta: dict) -> None:
    index, function = delta["index"], delta["function"]
    if index == len(calls):
        assert function["arguments"] == ""
        calls.append({"id": delta["id"], "type": delta["type"], "function": dict(function)})
    else:
        assert index == len(calls) - 1
        assert set(delta) == {"index", "function"}, "id and type come once"
        assert set(function) == {"arguments"}, "the name comes once"
        calls[index]["function"]["arguments"] += function["arguments"]


def without_ids(message: dict) -> dict:
    calls = [{**call, "id": "" if call["id"].startswith("call_") else call["id"]} for call in message["tool_calls"]]
    return {**message, "tool_calls": calls}


@pytest.mark.parametrize("model", CALLING)
def test_a_call_is_the_same_whole_and_in_pieces_of_any_size(model, pace, request):
    running, more = request.getfixturevalue(model), CALLING[model]
    whole = answer(running, **more)["choices"][0]
    message, reason = message_of(events(running, **more))
    assert (whole["finish_reason"], reason) == ("tool_calls", "tool_calls")
    found = {key: value for key, value in whole["message"].items() if key not in ("role", "refusal")}
    assert without_ids({**found, "content": found["content"] or ""}) == without_ids(message)
    assert all(json.loads(call["function"]["arguments"]) for call in message["tool_calls"])


def test_reasoning_content_and_a_call_are_parts_of_one_answer(deepseek):
    found = answer(deepseek, **TOOLS, **THINKING)
    message = found["choices"][0]["message"]
    assert message["reasoning_content"] == message["reasoning"] == "Let me see."
    assert message["content"] == "I look it up 😀"
    (call,) = message["tool_calls"]
    assert call["id"].startswith("call_")
    assert call["function"] == {"name": "weather", "arguments": '{"city": "Tromsø"}'}
    assert found["usage"]["completion_tokens_details"] == {"reasoning_tokens": 3}
    last = events(deepseek, **TOOLS, **THINKING, stream_options={"include_usage": True})[-1]
    assert last["usage"]["completion_tokens_details"] == {"reasoning_tokens": 3}


def test_the_id_is_the_models_own_where_it_writes_one_and_empty_content_is_null(kimi):
    message = kimi.client.chat.completions.create(**asking(**TOOLS)).choices[0].message
    assert message.content is None
    (call,) = message.tool_calls
    assert (call.id, call.function.name, call.function.arguments) == ("functions.weather:0", "weather", '{"city": "Oslo"}')
    stream = kimi.client.chat.completions.create(**asking(**TOOLS), stream=True)
    calls = [call for chunk in stream for call in chunk.choices[0].delta.tool_calls or []]
    assert [call.id for call in calls] == ["functions.weather:0", *[None] * (len(calls) - 1)]
    assert "".join(call.function.arguments for call in calls) == '{"city": "Oslo"}'


def test_calls_are_counted_and_arguments_have_the_types_of_the_schema(glm):
    with glm.client.chat.completions.stream(**asking(**TOOLS)) as stream:
        calls = stream.get_final_completion().choices[0].message.tool_calls
    assert [json.loads(call.function.arguments) for call in calls] == [{"city": "42"}, {"days": 3}]
    assert len({call.id for call in calls}) == 2
    deltas = [call for piece in events(glm, **TOOLS) for call in piece["choices"][0]["delta"].get("tool_calls", [])]
    assert [delta["index"] for delta in deltas if "id" in delta] == [0, 1]


def test_an_answer_may_be_held_to_one_call(glm):
    whole = answer(glm, **TOOLS, parallel_tool_calls=False)
    assert len(whole["choices"][0]["message"]["tool_calls"]) == 1
    assert whole["choices"][0]["finish_reason"] == "tool_calls"
    message, reason = message_of(events(glm, **TOOLS, parallel_tool_calls=False))
    assert (len(message["tool_calls"]), reason) == (1, "tool_calls")
    assert whole["usage"]["completion_tokens"] < answer(glm, **TOOLS)["usage"]["completion_tokens"]


@pytest.mark.deep
@pytest.mark.parametrize("model", CALLING)
def test_many_calls_at_once_are_those_of_each_alone(model, request):
    running, found = request.getfixturevalue(model), []
    expected = without_ids(message_of(events(running, **CALLING[model]))[0])

    def ask() -> None:
        found.append(message_of(events(running, **CALLING[model]))[0])

    threads = [threading.Thread(target=ask) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [without_ids(message) for message in found] == [expected] * 12


def test_a_call_that_the_limit_cuts_has_the_finish_reason_length(deepseek):
    found = answer(deepseek, **TOOLS, **THINKING, max_tokens=13)["choices"][0]
    assert found["finish_reason"] == "length"
    assert found["message"]["tool_calls"][0]["function"]["arguments"].startswith('{"ci')


def test_without_tools_what_looks_like_a_call_is_content(deepseek):
    for more in ({}, {**TOOLS, "tool_choice": "none"}, {"tools": []}):
        message = answer(deepseek, **more, **THINKING)["choices"][0]["message"]
        assert "tool_calls" not in message
        assert "weather" in message["content"]
        assert message["reasoning_content"] == "Let me see."


def test_text_that_only_begins_like_a_tag_is_complete(deepseek):
    for more in ({}, TOOLS):
        whole = answer(deepseek, **more)["choices"][0]
        assert whole["message"]["content"] == "plain words < </that\n\nis all"
        assert message_of(events(deepseek, **more)) == ({"content": whole["message"]["content"]}, "stop")


def test_a_stop_text_ends_reasoning_and_content(deepseek):
    found = answer(deepseek, **THINKING, stop=["see"])["choices"][0]
    assert (found["message"]["reasoning_content"], found["message"]["content"]) == ("Let me ", "")
    found = answer(deepseek, stop="words")["choices"][0]
    assert (found["message"]["content"], found["finish_reason"]) == ("plain ", "stop")


def test_log_probabilities_and_ids_are_of_all_tokens_of_a_stream(deepseek):
    more = {**TOOLS, **THINKING, "logprobs": True, "return_token_ids": True}
    whole = answer(deepseek, **more)["choices"][0]
    pieces = [piece["choices"][0] for piece in events(deepseek, **more)]
    assert [token for piece in pieces for token in piece.get("token_ids", [])] == whole["token_ids"]
    tokens = [entry["token"] for piece in pieces if piece["logprobs"] for entry in piece["logprobs"]["content"]]
    assert tokens == [entry["token"] for entry in whole["logprobs"]["content"]]


def named_tool(name: str) -> dict:
    return {"type": "function", "function": {"name": name}}


CITY = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 9}}, "required": ["city"]}
CLOSED = {**CITY, "additionalProperties": False}
FORCED = {"tools": [{"type": "function", "function": {"name": "weather", "parameters": CLOSED}}, named_tool("now")]}
ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named_tool("weather")]}}
SCHEMAS = {"weather": CLOSED, "now": {"maxProperties": 0}}
LONG = {"max_tokens": None}  # as many as the context allows
ONCE = {"parallel_tool_calls": False}
FORCING = {"deepseek": {}, "kimi": {}, "glm": ONCE}  # so that each model comes to an end


def checked_calls(message: dict) -> list[str]:
    """The names of the calls in a message that has nothing else but reasoning; their arguments follow the schemas."""
    assert not message["content"]
    for call in message["tool_calls"]:
        jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMAS[call["function"]["name"]])
    return [call["function"]["name"] for call in message["tool_calls"]]


@pytest.mark.deep
@pytest.mark.parametrize("model", CALLING)
@pytest.mark.parametrize("choice", [named_tool("weather"), ALLOWED, "required"])
def test_a_call_can_be_forced_whole_and_in_pieces(model, choice, pace, request):
    running, more = request.getfixturevalue(model), {**FORCED, **LONG, **FORCING[model], "tool_choice": choice}
    (whole,) = answer(running, **more)["choices"]
    message, reason = message_of(events(running, **more))
    assert (whole["finish_reason"], reason) == ("tool_calls", "tool_calls")
    assert without_ids(message)["tool_calls"] == without_ids(whole["message"])["tool_calls"], "nothing comes twice"
    names = checked_calls(message)
    assert names[0] == "weather" or choice == "required"
    assert len(names) == 1 or choice != named_tool("weather")


@pytest.mark.deep
@pytest.mark.parametrize("model", CALLING)
@pytest.mark.parametrize("seed", range(3))
def test_forced_calls_that_are_drawn_follow_their_schemas(model, seed, request):
    running = request.getfixturevalue(model)
    more = {**FORCED, **LONG, **ONCE, "tool_choice": "required", "temperature": 2.0, "seed": seed, "n": 2}
    for choice in answer(running, **more, chat_template_kwargs={"thinking": False})["choices"]:
        assert len(checked_calls(choice["message"])) == 1
        assert choice["finish_reason"] == "tool_calls"


def test_a_forced_call_comes_behind_reasoning(deepseek):
    more = {**FORCED, **THINKING, **LONG, "tool_choice": "required"}
    (choice,) = answer(deepseek, **more)["choices"]
    assert choice["message"]["reasoning_content"] == "Let me see."
    assert [call["function"] for call in choice["message"]["tool_calls"]] == [
        {"name": "weather", "arguments": '{"city": "Tromsø"}'}
    ]
    assert choice["message"]["content"] is None, "the text that the model says before its call is not allowed"
    message, _ = message_of(events(deepseek, **more))
    assert (message["reasoning_content"], checked_calls(message)) == ("Let me see.", ["weather"])


@pytest.mark.deep
@pytest.mark.parametrize("model", CALLING)
def test_the_function_that_a_request_names_is_called(model, request):
    running, more = request.getfixturevalue(model), {**FORCED, **LONG, "tool_choice": named_tool("now")}
    completion = running.client.chat.completions.create(**asking(**more))
    (call,) = completion.choices[0].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("now", {})


def test_tools_that_are_allowed_are_all_that_a_free_answer_knows(deepseek):
    auto = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [named_tool("now")]}}
    found = answer(deepseek, **FORCED, tool_choice=auto, return_token_ids=True)
    assert found["prompt_token_ids"] == deepseek.llm.encode_chat(ASKED, tools=[named_tool("now")])
    assert found["choices"][0]["message"]["content"].startswith("plain words")


def test_beside_tools_a_form_of_the_answer_leaves_the_choice_to_the_model(deepseek, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # JSON has ids of tokens as texts
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {**schema, "additionalProperties": False}}}
    more = {**FORCED, **THINKING, **LONG, "response_format": form}
    begins = deepseek.llm.tokenizer.control["<｜tool▁calls▁begin｜>"]
    (choice,) = answer(deepseek, **more, logit_bias={begins: -50})["choices"]
    assert choice["finish_reason"] == "stop"
    jsonschema.validate(json.loads(choice["message"]["content"]), schema)
    (choice,) = answer(deepseek, **more, logit_bias={begins: 50})["choices"]
    assert (choice["finish_reason"], checked_calls(choice["message"])) == ("tool_calls", ["weather"])


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        ("sometimes", "tool_choice is 'sometimes'\n  expected auto, none, required"),
        ({"type": "function"}, "expected auto, none, required"),
        ({"type": "function", "name": "weather"}, "expected auto, none, required"),
        ({"type": "custom", "custom": {"name": "weather"}}, "expected auto, none, required"),
        (named_tool("wether"), "names the function wether\n  tools has weather, now"),
        (named_tool(3), "names the function 3"),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "none", "tools": []}}, 'expected {"mode": "auto" or "required"'),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [named_tool("then")]}}, "the function then"),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
def test_another_choice_of_tools_is_refused(deepseek, choice, words, stream):
    found = error(deepseek, **FORCED, tool_choice=choice, stream=stream)
    assert (found["param"], found["type"]) == ("tool_choice", "invalid_request_error")
    assert words in found["message"]


def test_a_call_without_tools_cannot_be_forced(deepseek):
    for tools in ({}, {"tools": []}, {"tools": None}):
        found = error(deepseek, **tools, tool_choice="required")
        assert (found["param"], "no tools to call" in found["message"]) == ("tool_choice", True)


def test_tools_that_no_grammar_can_hold_are_refused_with_the_reason(deepseek, glm):
    def refused(running: Running, *tools: dict) -> str:
        found = error(running, tools=[{"type": "function", "function": tool} for tool in tools], tool_choice="required")
        assert found["param"] == "tools"
        return found["message"]

    either = {"name": "f", "parameters": {"anyOf": [CITY, {"type": "object"}]}}
    assert "a call of f cannot be forced: its parameters have anyOf" in refused(glm, either)
    broken = {"name": "g", "parameters": {"properties": {"a": {"type": "string", "pattern": "("}}}}
    message = refused(deepseek, {"name": "f"}, broken)
    assert "tools has g, whose calls cannot be held to its parameters\n  the JSON schema cannot be compiled" in message
    assert "513 entries" in refused(deepseek, *({"name": f"f{at}"} for at in range(513)))
    large = {"name": "f", "parameters": {"description": "x" * 300_000}}
    assert "make a grammar of 300," in refused(deepseek, large)


def with_template(running: Running, monkeypatch, source: str | None) -> None:
    """Gives the model another chat template, or none."""
    inputs = running.llm.inputs
    template = source and dataclasses.replace(running.llm.chat_template, source=source)
    monkeypatch.setattr(inputs, "text", inputs.text._replace(chat_template=template))


@pytest.mark.parametrize(
    ("source", "words"),
    [("{{ messages[0].content }} <tool_call> <arg_key> <arg_value>", "no place"), ("{{ tools }}", "format of its calls")],
)
def test_a_model_that_cannot_be_told_of_tools_or_whose_calls_are_not_known_refuses_them(glm, monkeypatch, source, words):
    with_template(glm, monkeypatch, source)
    found = error(glm, **TOOLS)
    assert (found["param"], words in found["message"]) == ("tools", True), found
    answer(glm, **TOOLS, tool_choice="none")


def test_a_folder_without_a_template_answers_no_conversation(glm, monkeypatch):
    with_template(glm, monkeypatch, None)
    for more in ({}, TOOLS):
        assert "no chat template" in error(glm, **more)["message"]
    assert glm.get("/tokenizer_info").json()["chat_template"] is None


def test_a_prompt_has_bos_once_on_every_route(deepseek):
    bos = deepseek.llm.tokenizer.bos_id
    chat = answer(deepseek, return_token_ids=True)["prompt_token_ids"]
    more = {"prompt": "a", "max_tokens": 1, "return_token_ids": True}
    completion = deepseek.post("/v1/completions", more).json()["choices"][0]["prompt_token_ids"]
    tokenized = [deepseek.post("/tokenize", body).json()["tokens"] for body in ({"prompt": "a"}, {"messages": ASKED})]
    for ids in (chat, completion, *tokenized):
        assert (ids[0], ids.count(bos)) == (bos, 1)


@pytest.mark.parametrize("temperature", [1e-12, 1e-7, 1e-4])
def test_a_tiny_temperature_is_greedy(deepseek, temperature):
    found = answer(deepseek, **TOOLS, **THINKING, temperature=temperature)["choices"][0]
    assert without_ids(found["message"]) == without_ids(answer(deepseek, **TOOLS, **THINKING)["choices"][0]["message"])


def test_text_before_a_call_and_the_call_come_in_a_stream(kimi):
    call = {"id": "functions.weather:0", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    messages = [*ASKED, {"role": "assistant", "content": None, "tool_calls": [call]}]
    messages += [{"role": "tool", "tool_call_id": "functions.weather:0", "content": "nothing"}]
    message, reason = message_of(events(kimi, messages=messages, **TOOLS))
    assert (message["content"], len(message["tool_calls"]), reason) == ("Once more:", 1, "tool_calls")


@pytest.mark.parametrize(
    "tools",
    [[{"type": "web_search"}], [{"type": "function", "function": {}}], [{"function": {"name": "f", "parameters": 5}}], ["f"]],
)
def test_tools_of_other_shapes_are_refused(deepseek, tools):
    error(deepseek, tools=tools)


def test_a_conversation_goes_on_with_the_results_of_its_calls(deepseek):
    first = deepseek.client.chat.completions.create(**asking(**TOOLS), extra_body=THINKING).choices[0].message
    said = first.model_dump()  # with every key that the client knows, null or not
    for arguments in (said["tool_calls"][0]["function"]["arguments"], {"city": "Tromsø"}):
        said["tool_calls"][0]["function"]["arguments"] = arguments
        result = {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": [{"type": "text", "text": "31 °C"}]}
        found = answer(deepseek, messages=[*ASKED, said, result], **TOOLS)["choices"][0]
        assert (found["message"]["content"], found["finish_reason"]) == ("It is warm.", "stop")


def tokens(running: Running, messages, **more) -> str:
    found = running.post("/tokenize", {"messages": messages, **more})
    assert found.status_code == 200, found.text
    return running.llm.tokenizer.decode(found.json()["tokens"])


def test_keys_of_messages_that_the_library_does_not_know_are_let_through(deepseek):
    plain = {"role": "assistant", "content": "yes", "reasoning_content": "hm"}
    from_client = {"annotations": [], "audio": {"id": "a"}, "refusal": None, "function_call": None, "tool_call_id": "of no call"}
    from_client |= {"provider_specific_fields": {"refusal": None}, "tool_calls": None}
    expected = tokens(deepseek, [*ASKED, plain, *ASKED])
    assert "hm" in expected
    assert tokens(deepseek, [*ASKED, {**plain, **from_client}, *ASKED]) == expected
    assert tokens(deepseek, [*ASKED, {"role": "assistant", "content": "yes", "reasoning": "hm"}, *ASKED]) == expected
    answer(deepseek, messages=[{**ASKED[0], "cache_control": {"type": "ephemeral"}}])


def test_tokens_of_a_conversation_are_those_of_its_prompt(deepseek):
    for more in (TOOLS, THINKING, {"add_generation_prompt": False}):
        given = {key: more[key] for key in more}
        found = deepseek.post("/tokenize", {"messages": ASKED, **given}).json()
        assert found["tokens"] == deepseek.llm.encode_chat(ASKED, **given)


def test_a_last_message_may_be_continued(deepseek):
    messages = [*ASKED, {"role": "assistant", "content": "I th"}]
    more = {"continue_final_message": True, "add_generation_prompt": False, "return_token_ids": True}
    found = answer(deepseek, messages=messages, **more, max_tokens=1)
    assert found["prompt_token_ids"] == deepseek.llm.encode_chat(messages, continue_final_message=True)


@pytest.mark.deep
def test_variables_of_a_request_stand_above_those_of_the_server_under_either_name(tmp_path):
    folder = write_scripted(tmp_path, DEEPSEEK)
    for running in started(folder, model_name="m", chat_template_kwargs='{"thinking": true, "lang": "no"}'):
        assert tokens(running, ASKED).endswith("<think>")
        for name in ("thinking", "enable_thinking"):
            asked = {"chat_template_kwargs": {name: False}}
            assert tokens(running, ASKED, **asked).endswith("</think>")
            assert "reasoning_content" not in answer(running, **asked)["choices"][0]["message"]
        assert answer(running)["choices"][0]["message"]["reasoning_content"] == "Let me see."


@pytest.mark.parametrize(
    ("variables", "words"),
    [({"messages": []}, "not the client's"), ({"a b": 1}, "no name"), ([], "chat_template_kwargs")],
)
def test_variables_that_are_not_the_clients_are_refused(deepseek, variables, words):
    assert words in error(deepseek, chat_template_kwargs=variables)["message"]
