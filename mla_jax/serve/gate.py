"""The gate before all routes: keys, the size and the pace of bodies, and a line of the log for each request."""

import asyncio
import hmac
import time
from collections.abc import Sequence
from pathlib import Path

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mla_jax.base.errors import BadFile
from mla_jax.base.files import read_bounded
from mla_jax.serve import log
from mla_jax.serve.errors import ApiError

MAX_KEY_FILE = 1 << 20  # bytes
BODY_SECONDS = 30  # between two parts of a body
KEYLESS = ("/", "/health")  # paths that need no key


def read_keys(path: Path) -> list[bytes]:
    """The keys in a file, one per line; raises BadFile if it has none."""
    lines = [line.strip() for line in read_bounded(path, MAX_KEY_FILE).splitlines()]
    keys = [line for line in lines if line and not line.startswith(b"#")]
    if not keys:
        raise BadFile(f"{path} has no key", "write one on each line")
    return keys


class Gate:
    """Lets a request through to `app`, or answers it. Without keys everybody may ask."""

    def __init__(self, app: ASGIApp, keys: Sequence[bytes], most_bytes: int):
        self.app, self.keys, self.most = app, keys, most_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began, status = time.perf_counter(), 0

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        refusal = self._refusal(scope)
        try:
            if refusal is not None:
                await response_of(refusal, scope["path"])(scope, receive, noting)
            else:
                await self.app(scope, self._limited(receive), noting)
        finally:
            seconds = time.perf_counter() - began
            about = scope.get("state", {}).get("about", "")
            log.info("%s %s %d %.3f s%s", scope["method"], scope["path"], status, seconds, about)

    def _refusal(self, scope: Scope) -> ApiError | None:
        headers = Headers(scope=scope)
        if not self._may_enter(scope["path"], headers):
            wanted = {"WWW-Authenticate": "Bearer"}
            return ApiError(401, "the API key is missing or wrong", code="invalid_api_key", headers=wanted)
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length) > self.most:
            return self._too_large()
        return None

    def _may_enter(self, path: str, headers: Headers) -> bool:
        """Whether a key is right; each is compared in a time that says nothing about it."""
        if not self.keys or path in KEYLESS:
            return True
        bearer = headers.get("authorization", "").removeprefix("Bearer ")
        given = (headers.get("x-api-key") or bearer).encode("latin-1")  # Anthropic's header, or OpenAI's
        found = [hmac.compare_digest(given, key) for key in self.keys]
        return any(found)

    def _limited(self, receive: Receive) -> Receive:
        """`receive`, which refuses a body that turns out to be too large, or comes too slowly."""
        read, is_whole = 0, False

        async def limited() -> Message:
            nonlocal read, is_whole
            try:
                message = await asyncio.wait_for(receive(), None if is_whole else BODY_SECONDS)
            except TimeoutError:
                raise HTTPException(408, f"nothing of the body has come for {BODY_SECONDS} seconds") from None
            is_whole = not message.get("more_body", False)
            read += len(message.get("body", b""))
            if read > self.most:
                raise HTTPException(413, self._too_large().message)
            return message

        return limited

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body has more than {self.most:,} bytes, which is the limit")


def response_of(error: ApiError, path: str) -> JSONResponse:
    """An error as an answer of the route `path`."""
    return JSONResponse(error.body_for(path), error.status, error.headers)
