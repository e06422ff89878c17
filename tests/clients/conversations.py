"""A conversation with a tool, as every client holds it: asked, a call, its result, an answer."""

from typing import Literal

from pydantic import BaseModel, Field

QUESTION = "Is it warm in Oslo?"
RESULT = "31 degrees"
GREEDY = {"temperature": 0, "max_tokens": 60}


class Weather(BaseModel):
    """The weather in a city."""

    city: Literal["Oslo", "Bergen"]
    days: int = Field(ge=1, le=9)


WEATHER = {"name": "weather", "description": Weather.__doc__, "parameters": Weather.model_json_schema()}
TOOL = {"type": "function", "function": WEATHER}
NAMED = {"type": "function", "function": {"name": "weather"}}
CHOICES = ["required", NAMED]
