"""/openapi.json says what the server takes: limits are those that are checked, and every route is in the guide."""

from pathlib import Path

import pytest

import mla_jax
from mla_jax import BadRequest, SamplingParams
from mla_jax.base.request_fields import read_fields
from mla_jax.serve.bodies import ChatBody, CompletionBody

pytestmark = [pytest.mark.once, pytest.mark.xdist_group("serve")]

GUIDE = Path(__file__).parents[2] / "docs" / "serving.md"
KEYS = {**ChatBody.model_json_schema()["properties"], **CompletionBody.model_json_schema()["properties"]}
NAMED = {"max_completion_tokens": "max_tokens", "top_logprobs": "logprobs"}  # as errors name keys
LOWEST = {key: shape["minimum"] for key, shape in KEYS.items() if "minimum" in shape}
HIGHEST = {key: shape["maximum"] for key, shape in KEYS.items() if "maximum" in shape}


def read(key: str, value: float) -> None:
    beside = {"logprobs": True} if key == "top_logprobs" else {}
    read_fields({"prompt": "a", **beside, key: value}, SamplingParams(), strict=False)


@pytest.mark.parametrize("key", LOWEST)
def test_nothing_below_a_documented_minimum_is_taken(key):
    read(key, LOWEST[key])
    with pytest.raises(BadRequest, match=NAMED.get(key, key)):
        read(key, LOWEST[key] - 1)


@pytest.mark.parametrize("key", HIGHEST)
def test_nothing_above_a_documented_maximum_is_taken(key):
    read(key, HIGHEST[key])
    with pytest.raises(BadRequest, match=NAMED.get(key, key)):
        read(key, HIGHEST[key] + 1)


def test_most_keys_have_limits():
    assert {"temperature", "top_p", "n", "seed", "logprobs"} <= HIGHEST.keys()
    assert {"max_tokens", "max_completion_tokens", "top_k"} <= LOWEST.keys()


def test_every_route_is_documented_and_in_the_guide(running):
    paths = running.get("/openapi.json").json()["paths"]
    assert {"/v1/completions", "/v1/chat/completions", "/tokenize", "/v1/models"} <= paths.keys()
    guide = GUIDE.read_text("utf-8")
    assert [path for path in paths if f"{path.replace('{name}', 'NAME')}`" not in guide] == []
    assert running.get("/version").json() == {"version": mla_jax.__version__}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_answers_errors_and_streams_are_documented(running, path):
    answers = running.get("/openapi.json").json()["paths"][path]["post"]["responses"]
    assert set(answers) == {"200", "4XX", "5XX"}
    assert set(answers["200"]["content"]) == {"application/json", "text/event-stream"}
    for errors in (answers["4XX"], answers["5XX"]):
        assert errors["content"]["application/json"]["schema"] == {"$ref": "#/components/schemas/ErrorAnswer"}
