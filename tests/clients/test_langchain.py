"""LangChain's ChatOpenAI: tools, structured answers, streams, errors."""

import asyncio
import json

import openai
import pytest
from clients.conversations import GREEDY, MODELS, QUESTION, RESULT, WHOLE, Weather, prompt_tokens
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI


@tool(args_schema=Weather)
def weather(city: str, days: int) -> str:
    """The weather in a city."""
    return f"{RESULT} in {city} for {days} days"


def chat_model(running, **more) -> ChatOpenAI:
    given = {"model": "demo", "base_url": f"{running.url}/v1", "api_key": "none", "max_retries": 0, "stream_usage": True}
    return ChatOpenAI(**given | GREEDY | more)


def joined(pieces) -> AIMessage:
    """A stream's message, as LangChain adds its pieces."""
    whole = None
    for piece in pieces:
        assert isinstance(piece, AIMessageChunk)
        whole = piece if whole is None else whole + piece
    return whole


def asked(model, messages, streamed: bool) -> AIMessage:
    return joined(model.stream(messages)) if streamed else model.invoke(messages)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("choice", "streamed"), [("any", False), ("weather", True)])
def test_a_conversation_with_a_tool(model, choice, streamed, request):
    demo = request.getfixturevalue(model)
    caller = chat_model(demo, **WHOLE).bind_tools([weather], tool_choice=choice, parallel_tool_calls=False)
    call = asked(caller, [HumanMessage(QUESTION)], streamed)
    assert call.response_metadata["finish_reason"] == "tool_calls"
    assert not call.invalid_tool_calls
    (asks,) = call.tool_calls
    assert asks["name"] == "weather"
    Weather.model_validate(asks["args"])

    result = weather.invoke(asks)
    assert isinstance(result, ToolMessage)
    assert result.content.startswith(RESULT)
    answering = chat_model(demo).bind_tools([weather], tool_choice="none")
    answer = asked(answering, [HumanMessage(QUESTION), call, result], streamed)
    assert answer.response_metadata["finish_reason"] in ("stop", "length")
    assert not answer.tool_calls
    assert answer.content
    expected = prompt_tokens(demo, asks["id"], json.dumps(asks["args"]), result.content)
    assert answer.usage_metadata["input_tokens"] == expected, "the prompt has the call and its result"


def test_a_stream_says_what_the_whole_answer_says(demo):
    model = chat_model(demo)
    whole = model.invoke("def __eq__(self, other):")
    pieces = list(model.stream("def __eq__(self, other):"))
    assert len([piece for piece in pieces if piece.content]) > 1
    assert joined(pieces).content == whole.content != ""
    assert joined(pieces).usage_metadata == whole.usage_metadata


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_an_answer_has_the_form_of_a_class(demo, method):
    model = chat_model(demo, **WHOLE).with_structured_output(Weather, method=method, include_raw=True)
    found = model.invoke(QUESTION)
    assert found["parsing_error"] is None
    assert isinstance(found["parsed"], Weather)


def test_many_conversations_at_once_are_those_of_each_alone(demo):
    prompts = [f"def f{number}(x):" for number in range(4)]
    model = chat_model(demo, max_tokens=12)
    alone = [model.invoke(prompt).content for prompt in prompts]
    assert [answer.content for answer in model.batch(prompts)] == alone

    async def together():
        return await asyncio.gather(*(model.ainvoke(prompt) for prompt in prompts))

    assert [answer.content for answer in asyncio.run(together())] == alone


def test_errors_are_openais(demo):
    with pytest.raises(openai.NotFoundError, match="gpt-4"):
        chat_model(demo, model="gpt-4").invoke(QUESTION)
    with pytest.raises(openai.BadRequestError, match="temperature"):
        chat_model(demo, temperature=-1).invoke(QUESTION)
    with pytest.raises(openai.BadRequestError) as too_long:
        list(chat_model(demo).stream("word " * 5_000))
    assert too_long.value.code == "context_length_exceeded"
