"""A conversation with a tool, as every client holds it: asked, a call, its result, an answer."""

from typing import Literal

from pydantic import BaseModel, Field
from servers import Running

QUESTION = "Is it warm in Oslo?"
RESULT = "31 degrees"
GREEDY = {"temperature": 0, "max_tokens": 24}
WHOLE = {"max_tokens": 200}  # more than a call has, or a structured answer


class Weather(BaseModel):
    """The weather in a city."""

    city: Literal["Oslo", "Bergen"]
    days: int = Field(ge=1, le=9)


WEATHER = {"name": "weather", "description": Weather.__doc__, "parameters": Weather.model_json_schema()}
TOOL = {"type": "function", "function": WEATHER}
NAMED = {"type": "function", "function": {"name": "weather"}}
MODELS = ("demo", "demo_tags")  # fixtures: arguments of calls as JSON, and in tags


def prompt_tokens(running: Running, id: str, arguments: str, result: str) -> int:
    """Tokens of the conversation before its last answer, as the library counts them."""
    call = {"id": id, "type": "function", "function": {"name": "weather", "arguments": arguments}}
    messages = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": id, "content": result},
    ]
    return len(running.llm.encode_chat(messages, chat_template_kwargs={"thinking": False}))
