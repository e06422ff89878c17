"""Errors as OpenAI's clients read them: `{"error": {message, type, param, code}}` with a status of HTTP."""

import math
import re
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


def api_error(error: BaseException) -> ApiError:
    """The answer to any error that a request has met."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, Overloaded):
        wait = {"Retry-After": str(math.ceil(error.seconds))}
        return ApiError(429, str(error), code="overloaded", headers=wait)
    if isinstance(error, TooLong):
        message = f"This model's maximum context length is {error.context} tokens. {error}"
        return ApiError(400, message, _named(error), "context_length_exceeded")
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
