"""The helpers of OpenAI's own client, and its classes of errors. Its plain requests are in tests/serve."""

import asyncio
import json

import openai
import pytest
from clients.conversations import GREEDY, QUESTION, RESULT, TOOL, WHOLE, Weather, prompt_tokens
from openai import AsyncOpenAI, OpenAI
from scripted import KIMI, write_scripted
from servers import started

ASKED = [{"role": "user", "content": QUESTION}]
FORCED = {"tool_choice": "required", "parallel_tool_calls": False, **WHOLE}


def asking(**more) -> dict:
    return {"model": "demo", "messages": ASKED, **GREEDY, **more}


def test_a_conversation_with_a_tool_by_parse_and_by_a_stream(demo):
    strict = [openai.pydantic_function_tool(Weather, name="weather")]
    chats = demo.client.chat.completions
    whole = chats.parse(**asking(**FORCED, tools=strict)).choices[0]
    (call,) = whole.message.tool_calls
    assert whole.finish_reason == "tool_calls"
    assert isinstance(call.function.parsed_arguments, Weather)
    with chats.stream(**asking(**FORCED, tools=strict)) as stream:
        kinds = [event.type for event in stream]
        (again,) = stream.get_final_completion().choices[0].message.tool_calls
    assert again.function.parsed_arguments == call.function.parsed_arguments
    assert "tool_calls.function.arguments.delta" in kinds

    said = whole.message.model_dump()  # with what the client has parsed
    result = {"role": "tool", "tool_call_id": call.id, "content": RESULT}
    answer = chats.create(**asking(messages=[*ASKED, said, result]))
    assert answer.choices[0].message.content
    assert answer.usage.prompt_tokens == prompt_tokens(demo, call.id, call.function.arguments, RESULT)


def test_a_structured_answer_is_parsed_whole_and_in_a_stream(demo):
    chats = demo.client.chat.completions
    whole = chats.parse(**asking(response_format=Weather, **WHOLE)).choices[0].message.parsed
    assert isinstance(whole, Weather)
    with chats.stream(**asking(response_format=Weather, **WHOLE)) as stream:
        pieces = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion().choices[0].message
    assert final.parsed == whole
    assert json.loads("".join(pieces)) == whole.model_dump()


def test_an_event_loop_asks_for_models_and_texts(demo):
    async def ask() -> tuple[list[str], str, str]:
        async with AsyncOpenAI(base_url=f"{demo.url}/v1", api_key="none", max_retries=0) as client:
            names = [model.id async for model in await client.models.list()]
            given = {"model": names[0], "prompt": "def f(", **GREEDY}
            whole = await client.completions.create(**given)
            stream = await client.completions.create(**given, stream=True)
            return names, whole.choices[0].text, "".join([piece.choices[0].text async for piece in stream])

    names, whole, joined = asyncio.run(ask())
    assert names == ["demo"]
    assert whole == joined != ""


def test_a_list_of_the_models_can_be_had_raw(scripted):
    raw = scripted.client.models.with_raw_response.list()
    assert raw.headers["content-type"] == "application/json"
    assert [model.id for model in raw.parse().data] == ["m"]
    assert scripted.client.models.retrieve("m").object == "model"


@pytest.fixture
def client(scripted):
    return scripted.client


@pytest.mark.parametrize(
    ("error", "more"),
    [
        (openai.NotFoundError, {"model": "gpt-4"}),
        (openai.BadRequestError, {"temperature": -1}),
        (openai.BadRequestError, {"messages": [{"role": "user", "content": "x" * 1000}]}),
        (openai.BadRequestError, {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}}),
    ],
)
@pytest.mark.parametrize("streamed", [False, True])
def test_a_refusal_is_an_error_of_its_class(client, error, more, streamed):
    with pytest.raises(error) as caught:
        client.chat.completions.create(**asking(**{"model": "m", **more}), stream=streamed)
    assert caught.value.body["message"]
    assert caught.value.type in ("invalid_request_error", "not_found_error")


def test_errors_of_keys_sizes_and_a_server_that_is_not_ready(scripted, monkeypatch):
    served = scripted.server.served
    monkeypatch.setattr(served, "is_ready", False)
    with pytest.raises(openai.InternalServerError) as caught:
        scripted.client.models.list()
    assert caught.value.status_code == 503
    monkeypatch.setattr(served, "is_ready", True)
    large = "x" * int(served.options.max_body * 2**20)
    with pytest.raises(openai.APIStatusError) as caught:
        scripted.client.completions.create(model="m", prompt=large)
    assert caught.value.status_code == 413


def test_a_client_asks_again_when_the_server_is_ready(scripted, monkeypatch):
    """After a 503 that says when."""
    served, retries = scripted.server.served, []
    monkeypatch.setattr("mla_jax.serve.app.LOADING", "0.01")
    monkeypatch.setattr(served, "is_ready", False)
    client = OpenAI(base_url=f"{scripted.url}/v1", api_key="none", max_retries=3)
    sleep = OpenAI._sleep_for_retry

    def ready(self, **given):
        retries.append(given)
        served.is_ready = True
        return sleep(self, **given)

    monkeypatch.setattr(OpenAI, "_sleep_for_retry", ready)
    assert [model.id for model in client.models.list()] == ["m"]
    assert len(retries) == 1


def test_a_wrong_key_is_an_error_of_its_class(tmp_path):
    (tmp_path / "keys").write_text("secret")
    for running in started(write_scripted(tmp_path, KIMI), model_name="m", api_key_file=tmp_path / "keys"):
        with pytest.raises(openai.AuthenticationError) as caught:
            running.client.models.list()
        assert caught.value.code == "invalid_api_key"
        assert [model.id for model in OpenAI(base_url=f"{running.url}/v1", api_key="secret").models.list()] == ["m"]
