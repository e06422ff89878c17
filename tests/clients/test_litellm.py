"""litellm's provider `hosted_vllm`: tools, structured answers, streams, errors."""

import asyncio
import json

import litellm
import pytest
from clients.conversations import GREEDY, MODELS, NAMED, QUESTION, RESULT, TOOL, WHOLE, Weather, prompt_tokens

ASKED = [{"role": "user", "content": QUESTION}]


def asking(running, **more) -> dict:
    given = {"model": "hosted_vllm/demo", "api_base": f"{running.url}/v1", "api_key": "none", "messages": ASKED}
    return {**given, "num_retries": 0, **GREEDY, **more}


def completed(running, streamed: bool, **more):
    """The answer; of a stream, as litellm joins its pieces."""
    if not streamed:
        return litellm.completion(**asking(running, **more))
    pieces = list(litellm.completion(**asking(running, **more), stream=True, stream_options={"include_usage": True}))
    return litellm.stream_chunk_builder(pieces, messages=more.get("messages", ASKED))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("choice", "streamed"), [("required", False), (NAMED, True)])
def test_a_conversation_with_a_tool(model, choice, streamed, request):
    demo = request.getfixturevalue(model)
    first = completed(demo, streamed, tools=[TOOL], tool_choice=choice, parallel_tool_calls=False, **WHOLE)
    (asked,) = first.choices
    assert asked.finish_reason == "tool_calls"
    (call,) = asked.message.tool_calls
    assert call.function.name == "weather"
    Weather.model_validate_json(call.function.arguments)

    result = {"role": "tool", "tool_call_id": call.id, "content": RESULT}
    messages = [*ASKED, asked.message.model_dump(), result]
    second = completed(demo, streamed, messages=messages, tools=[TOOL], tool_choice="none")
    (answer,) = second.choices
    assert answer.finish_reason in ("stop", "length")
    assert not answer.message.tool_calls
    expected = prompt_tokens(demo, call.id, call.function.arguments, RESULT)
    assert second.usage.prompt_tokens == expected, "the prompt has the call and its result"


def test_a_stream_says_what_the_whole_answer_says(demo):
    said = [{"role": "user", "content": "def __eq__(self, other):"}]
    whole = completed(demo, False, messages=said)
    joined = completed(demo, True, messages=said)
    assert joined.choices[0].message.content == whole.choices[0].message.content != ""
    assert joined.usage.completion_tokens == whole.usage.completion_tokens


def test_an_answer_has_the_form_of_a_class(demo):
    found = completed(demo, False, response_format=Weather, **WHOLE).choices[0].message.content
    assert Weather.model_validate_json(found)


def test_keys_of_vllm_go_through(demo):
    found = completed(demo, False, max_tokens=8, top_k=1, temperature=1.0, min_p=0.0, extra_body={"ignore_eos": True})
    assert found.usage.completion_tokens == 8
    greedy = completed(demo, False, max_tokens=8, extra_body={"ignore_eos": True})
    assert found.choices[0].message.content == greedy.choices[0].message.content


def test_requests_of_an_event_loop_stream(demo):
    async def ask(number: int) -> str:
        said = [{"role": "user", "content": f"def f{number}(x):"}]
        stream = await litellm.acompletion(**asking(demo, messages=said, max_tokens=12), stream=True)
        return "".join([piece.choices[0].delta.content or "" async for piece in stream])

    async def together() -> list[str]:
        return await asyncio.gather(*map(ask, range(4)))

    whole = [
        completed(demo, False, messages=[{"role": "user", "content": f"def f{number}(x):"}], max_tokens=12) for number in range(4)
    ]
    assert asyncio.run(together()) == [answer.choices[0].message.content for answer in whole]


def test_errors_are_those_that_litellm_knows(demo):
    with pytest.raises(litellm.NotFoundError, match="gpt-4"):
        completed(demo, False, model="hosted_vllm/gpt-4")
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        completed(demo, False, temperature=-1)
    for streamed in (False, True):
        with pytest.raises(litellm.ContextWindowExceededError):
            completed(demo, streamed, messages=[{"role": "user", "content": "word " * 5_000}])
    with pytest.raises(litellm.BadRequestError, match="tools has weather"):
        completed(demo, False, tools=[TOOL], tool_choice={**NAMED, "function": {"name": "wether"}})


def test_the_arguments_of_a_call_come_in_pieces(demo):
    pieces = list(litellm.completion(**asking(demo, tools=[TOOL], tool_choice=NAMED, **WHOLE), stream=True))
    deltas = [call for piece in pieces for call in piece.choices[0].delta.tool_calls or []]
    assert json.loads("".join(delta.function.arguments or "" for delta in deltas))
