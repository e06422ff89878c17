"""Errors with a status of HTTP in OpenAI's form, `{"error": {message, type, param, code}}`, or in Anthropic's."""

import contextlib
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from mla_jax.base.errors import BadRequest, BadTemplate, MlaJaxError, Overloaded, TooLong, Unsupported
from mla_jax.base.grammar_keys import FORM_KEYS
from mla_jax.base.request_fields import IGNORED, KEYS, NEUTRAL, TOKENS

BODY_KEYS = {*KEYS, *FORM_KEYS, *TOKENS, *NEUTRAL, *IGNORED.split(), "top_logprobs"}
ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
}
# Anthropic's words for them, and where they stand
MESSAGES_PATH = "/v1/messages"
MESSAGE_ERROR_TYPES = {
    **ERROR_TYPES,
    408: "timeout_error",
    413: "request_too_large",
    500: "api_error",
    503: "overloaded_error",
}
TOO_LONG = "context_length_exceeded"


class BadField(BadRequest):
    """A value that cannot be served. `field` says where it is, such as input[2].type; `finding` goes on from there."""

    def __init__(self, field: str, finding: str, *details: str):
        super().__init__(f"{field} {finding}", *details)
        self.field = field


@dataclass
class ApiError(Exception):
    """An answer with an error. `param` is the key of the request that caused it."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    headers: dict[str, str] = field(default_factory=dict)

    def body(self) -> dict[str, Any]:
        kind = ERROR_TYPES.get(self.status, "invalid_request_error")
        about = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": about}

    def message_body(self) -> dict[str, Any]:
        """As Anthropic's clients read it. Agents look for the words by which a prompt is too long."""
        kind = MESSAGE_ERROR_TYPES.get(self.status, "invalid_request_error")
        begin = "prompt is too long: " if self.code == TOO_LONG else ""
        return {"type": "error", "error": {"type": kind, "message": begin + self.message}}

    def body_for(self, path: str) -> dict[str, Any]:
        """In the form that the clients of a route read."""
        return self.message_body() if path.startswith(MESSAGES_PATH) else self.body()


def api_error(error: BaseException) -> ApiError:
    """The answer to any error that a request has met."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, Overloaded):
        wait = {"Retry-After": str(math.ceil(error.seconds))}
        return ApiError(429, str(error), code="overloaded", headers=wait)
    if isinstance(error, TooLong):
        message = f"This model's maximum context length is {error.context} tokens. {error}"
        return ApiError(400, message, _named(error), TOO_LONG)
    if isinstance(error, BadField):
        return ApiError(400, str(error), error.field)
    if isinstance(error, BadRequest | BadTemplate | Unsupported):
        return ApiError(400, str(error), _named(error))
    # It would fail again: clients repeat a 500 unless they are told not to
    message = (
        str(error) if isinstance(error, MlaJaxError) else "the server has met an error; its log has more"
    )
    return ApiError(500, message, headers={"x-should-retry": "false"})


def _named(error: MlaJaxError) -> str | None:
    """The key of a request that the lines of an error name first."""
    words = re.findall(r"\w+", str(error))
    return next((word for word in words if word in BODY_KEYS), None)


@contextlib.contextmanager
def renamed(names: Mapping[str, str]) -> Iterator[None]:
    """Errors that name keys of chats get the names that another route has for these keys."""
    try:
        yield
    except MlaJaxError as error:
        told = api_error(error)
        message = re.sub(_any_of(names), lambda found: names[found[0]], told.message)
        param = names.get(told.param or "", told.param)
        raise ApiError(told.status, message, param, told.code, told.headers) from error


def _any_of(names: Mapping[str, str]) -> str:
    """A pattern of whole names, the longest of several first."""
    return "|".join(rf"\b{re.escape(name)}\b" for name in sorted(names, key=len, reverse=True))
