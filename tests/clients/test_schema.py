"""Requests that schemathesis makes of /openapi.json: none meets an error of the server, and each answer is as documented.

CASES=20000 makes so many; the routes that have inputs share them."""

import collections
import itertools
import json
import os

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from openai.types import Completion, CompletionChoice
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi import checks

CASES = int(os.environ.get("CASES", "500"))
WITH_BODIES = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/tokenize",
    "/detokenize",
)
SENT = [*itertools.product(WITH_BODIES, GenerationMode), ("/v1/models/{name}", GenerationMode.POSITIVE)]  # any name is valid
WITHOUT = ("/health", "/metrics", "/version", "/v1/models", "/tokenizer_info")
CHECKS = [
    not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
]


class PieceChoice(CompletionChoice):
    """OpenAI's type of answers serves for streams, too, but has no null, which every piece but the last has."""

    finish_reason: str | None


class CompletionPiece(Completion):
    choices: list[PieceChoice]


# OpenAI's own types of answers, and of the pieces of a stream
TYPES = {
    "/v1/completions": (Completion, CompletionPiece),
    "/v1/chat/completions": (ChatCompletion, ChatCompletionChunk),
}
MANY = settings(deadline=None, database=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def operations(scripted) -> dict:
    """By path."""
    api = schemathesis.openapi.from_asgi("/openapi.json", scripted.server.config.app)
    api.config.update(request_timeout=600)  # on cores that others use, too
    return {found.ok().path: found.ok() for found in api.get_all_operations()}


@pytest.fixture(scope="module")
def answered(request):
    """How many answers there were of each route and status; told at the end."""
    yield (found := collections.Counter())
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print(f"\n{found.total():,} requests:", ", ".join(f"{found[one]:,} x {one}" for one in sorted(found)))


def test_all_routes_are_documented(operations):
    assert {*operations} == {*(path for path, _ in SENT), *WITHOUT}


@pytest.mark.parametrize(("path", "mode"), SENT)
def test_any_request_is_answered_as_documented(operations, answered, path, mode):
    @settings(MANY, max_examples=-(-CASES // len(SENT)))
    @given(operations[path].as_strategy(mode))
    def send(case) -> None:
        check_answer(case, answered)

    send()


@pytest.mark.parametrize("path", WITHOUT)
def test_a_route_without_inputs_answers_as_documented(operations, answered, path):
    check_answer(operations[path].Case(), answered)


def check_answer(case, answered: collections.Counter) -> None:
    response = case.call()
    answered[f"{case.path} {response.status_code}"] += 1
    case.validate_response(response, checks=CHECKS)
    if case.path in TYPES and response.status_code == 200:
        check_by_openais_types(*TYPES[case.path], response)


def check_by_openais_types(whole, piece, response) -> None:
    if not response.headers["content-type"][0].startswith("text/event-stream"):
        whole.model_validate_json(response.content, strict=True)
        return
    lines = [line for line in response.text.split("\n") if line and not line.startswith(":")]
    for event in (line.removeprefix("data: ") for line in lines):
        if event != "[DONE]":
            assert "error" not in json.loads(event)
            piece.model_validate_json(event, strict=True)
