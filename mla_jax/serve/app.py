"""The routes of the server."""

import asyncio
import functools
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from mla_jax.base.errors import BadRequest, MlaJaxError, printable
from mla_jax.base.options import SamplingParams
from mla_jax.engine.async_llm import AsyncLLM
from mla_jax.engine.llm import LLM
from mla_jax.serve import asked, chats, completions, message_events, messages, responses
from mla_jax.serve.answering import Answering
from mla_jax.serve.bodies import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    MessageBody,
    PromptedBody,
    ResponseBody,
    SamplingBody,
    TokenizeBody,
)
from mla_jax.serve.connections import ClientGone, EventStream, StreamForm, named_line_of, unless_gone
from mla_jax.serve.documented import (
    METRICS_TEXT,
    NAMED_STREAM,
    STREAM,
    ChatAnswer,
    CompletionAnswer,
    DetokenizeAnswer,
    ModelEntries,
    ModelEntry,
    TokenizeAnswer,
    TokenizerAnswer,
    VersionAnswer,
    documented,
)
from mla_jax.serve.documented_dialogues import MessageAnswer, MessageError, MessageTokens, ResponseAnswer
from mla_jax.serve.errors import ApiError, api_error
from mla_jax.serve.gate import Gate, response_of
from mla_jax.serve.metrics import Metrics
from mla_jax.serve.options import ServeOptions
from mla_jax.serve.page import page_response
from mla_jax.serve.response_events import ResponseWriter

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

LOADING = "30"  # seconds after which a client may ask again


class ServedModel:
    """The model behind the routes. It may come later than these, and not be ready yet."""

    def __init__(self, names: Sequence[str], options: ServeOptions):
        self.names, self.options = list(names), options
        self.metrics = Metrics(self.names[0])
        self.created = int(time.time())
        self.defaults = SamplingParams(timeout=options.request_timeout)
        self.variables: dict[str, Any] = json.loads(options.chat_template_kwargs or "{}")
        self.is_ready = False
        self._llm: AsyncLLM | None = None

    def take(self, llm: LLM) -> None:
        """The model, once it is loaded."""
        self._llm = AsyncLLM(llm)
        self.metrics.watch(llm)

    @property
    def llm(self) -> AsyncLLM:
        """Raises ApiError while it is not ready."""
        if self._llm is None or not self.is_ready:
            raise ApiError(503, "the model is not ready", headers={"Retry-After": LOADING})
        return self._llm

    def name_of(self, wanted: str | None) -> str:
        """The model's name as a request has it; raises ApiError for another model's."""
        if wanted is None or wanted in self.names:
            return wanted or self.names[0]
        served = ", ".join(self.names)
        message = f"The model `{printable(wanted)}` does not exist; this server has {served}"
        raise ApiError(404, message, "model", "model_not_found")

    def about(self, name: str) -> dict[str, Any]:
        """A model as /v1/models lists it."""
        ours = {"max_model_len": self.llm.llm.context, "root": self.names[0], "parent": None}
        return {"id": name, "object": "model", "created": self.created, "owned_by": "mla-jax", **ours}


def make_app(served: ServedModel, keys: Sequence[bytes] = (), tracer: "Tracer | None" = None) -> FastAPI:
    """The application. Every route but the page and /health needs one of the keys, if there are any.

    `tracer` gets a span of each request that has come through the gate."""
    options = served.options
    app = FastAPI(title="mla-jax", docs_url=None, redoc_url=None)
    _add_models(app, served)
    _add_answers(app, served)
    _add_other_interfaces(app, served)
    _add_tokens(app, served)
    _add_errors(app)
    if tracer is not None:
        from mla_jax.serve.tracing import Traced

        app.add_middleware(Traced, tracer=tracer)
    app.add_middleware(Gate, keys=keys, most_bytes=int(options.max_body * 2**20))
    if options.cors_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=list(options.cors_origins), allow_methods=["*"], allow_headers=["*"]
        )
    return app


def _add_models(app: FastAPI, served: ServedModel) -> None:
    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        """A page to chat with the model. Its own requests carry the key that is typed in there."""
        return page_response()

    @app.get("/health", response_class=Response, responses={503: {"description": "The model is not ready."}})
    async def health() -> Response:
        """200 when the model is ready, else 503."""
        return Response(status_code=200 if served.is_ready else 503)

    @app.get("/metrics", response_class=Response, **documented(None, **METRICS_TEXT))
    async def metrics() -> Response:
        """Figures for Prometheus."""
        return Response(served.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/version", **documented(VersionAnswer))
    async def version() -> dict[str, str]:
        """The version of this library."""
        from mla_jax import __version__

        return {"version": __version__}

    @app.get("/v1/models", **documented(ModelEntries))
    async def models() -> dict[str, Any]:
        """The names of the model."""
        return {"object": "list", "data": [served.about(name) for name in served.names]}

    @app.get("/v1/models/{name:path}", **documented(ModelEntry))
    async def model(name: str) -> dict[str, Any]:
        """One name of the model."""
        return served.about(served.name_of(name))


def _add_answers(app: FastAPI, served: ServedModel) -> None:
    @app.post("/v1/completions", **documented(CompletionAnswer, **STREAM))
    async def complete(body: CompletionBody, request: Request) -> Response:
        """Continues prompts: texts or token ids."""
        kind = "cmpl-", completions.whole_completion, completions.completion_events
        return await _answer(served, request, body, asked.read_completion, *kind)

    @app.post("/v1/chat/completions", **documented(ChatAnswer, **STREAM))
    async def chat(body: ChatBody, request: Request) -> Response:
        """Answers a conversation."""
        read = functools.partial(asked.read_chat, variables=served.variables)
        kind = "chatcmpl-", chats.whole_chat, chats.chat_events
        return await _answer(served, request, body, read, *kind)


def _add_other_interfaces(app: FastAPI, served: ServedModel) -> None:
    """Chats in other words: bodies become those of chats, and parts of answers what these routes call them."""

    @app.post("/v1/responses", **documented(ResponseAnswer, **NAMED_STREAM))
    async def respond(body: ResponseBody, request: Request) -> Response:
        """Answers a conversation, as OpenAI's newer interface has it."""
        read = functools.partial(responses.read_response, variables=served.variables)
        writer = ResponseWriter(body)
        form = StreamForm(named_line_of, writer.failed, end=b"")
        return await _answer(served, request, body, read, "resp_", writer.whole, writer.events, form)

    @app.post("/v1/messages", **documented(MessageAnswer, MessageError, **NAMED_STREAM))
    async def message(body: MessageBody, request: Request) -> Response:
        """Answers a conversation, as Anthropic's interface has it."""
        read = functools.partial(messages.read_message, variables=served.variables)
        kind = "msg_", message_events.whole_message, message_events.message_events
        return await _answer(served, request, body, read, *kind, message_events.MESSAGE_STREAM)

    @app.post("/v1/messages/count_tokens", **documented(MessageTokens, MessageError))
    async def count_tokens(body: PromptedBody) -> dict[str, int]:
        """The number of tokens of a conversation."""
        llm = served.llm.llm
        served.name_of(body.model)
        ids = await asyncio.to_thread(messages.tokens_of_message, body, llm, served.variables)
        return {"input_tokens": len(ids)}


async def _answer(
    served: ServedModel,
    request: Request,
    body: SamplingBody,
    read: Callable[..., asked.Asked],
    kind: str,
    whole: Callable[[Answering], Awaitable[dict[str, Any]]],
    events: Callable[[Answering], AsyncIterator[dict[str, Any]]],
    form: StreamForm | None = None,
) -> Response:
    """The answer to a body that `read` understands, whole or as events. `kind` begins its id."""
    llm, name = served.llm, served.name_of(body.model)
    wanted = await asyncio.to_thread(read, body, llm.llm, served.defaults, name)
    answering = Answering(llm, wanted, served.metrics, kind)
    _note(request, served, answering)
    await answering.begin()
    if wanted.form.stream:
        return EventStream(events(answering), answering.end, form)
    try:
        return JSONResponse(await unless_gone(request, whole(answering)))
    finally:
        await answering.end()


def _note(request: Request, served: ServedModel, answering: Answering) -> None:
    """For the log, and for spans."""
    prompts = answering.asked.prompts
    about = (
        f"  {answering.id} {len(answering.asked.requests)} x {sum(len(one.prompt) for one in prompts)} tokens"
    )
    if served.options.log_prompts:
        about += f"  {[one.prompt for one in prompts]}"
    request.state.about, request.state.answering = about, answering


def _add_tokens(app: FastAPI, served: ServedModel) -> None:
    @app.post("/tokenize", **documented(TokenizeAnswer))
    async def tokenize(body: TokenizeBody) -> dict[str, Any]:
        """The token ids of a text or a conversation."""
        llm = served.llm.llm
        served.name_of(body.model)
        ids = await asyncio.to_thread(_tokens_of, llm, body, served.variables)
        names = [_tokenizer_of(llm).model.id_to_token(i) for i in ids] if body.return_token_strs else None
        return {"count": len(ids), "max_model_len": llm.context, "tokens": ids, "token_strs": names}

    @app.post("/detokenize", **documented(DetokenizeAnswer))
    async def detokenize(body: DetokenizeBody) -> dict[str, str]:
        """The text of token ids."""
        served.name_of(body.model)
        return {"prompt": _tokenizer_of(served.llm.llm).decode(body.tokens)}

    @app.get("/tokenizer_info", **documented(TokenizerAnswer))
    async def tokenizer_info() -> dict[str, Any]:
        """The tokenizer's names and the chat template, for evaluation harnesses."""
        llm = served.llm.llm
        tokenizer, template = _tokenizer_of(llm), llm.chat_template
        ends = llm.inputs.text.end_ids
        eos = tokenizer.eos_id if tokenizer.eos_id is not None else next(iter(ends), None)
        names = {"bos_token": tokenizer.bos_id, "eos_token": eos, "pad_token": eos}
        found = {key: i if i is None else tokenizer.model.id_to_token(i) for key, i in names.items()}
        return {**found, "chat_template": None if template is None else template.source}


def _tokens_of(llm: LLM, body: TokenizeBody, variables: dict[str, Any]) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise BadRequest('expected either "prompt" or "messages"')
    if body.messages is not None:
        return asked.tokens_of_chat(body.given(), llm, variables)
    wants_bos = body.add_special_tokens is not False
    # Names of control tokens are these tokens: harnesses ask for their ids, and for those of conversations that they rendered
    return _tokenizer_of(llm).encode(body.prompt or "", bos=wants_bos, control=True)


def _tokenizer_of(llm: LLM):
    if llm.tokenizer is None:
        raise ApiError(404, "this model folder has no tokenizer")
    return llm.tokenizer


def _add_errors(app: FastAPI) -> None:
    async def ours(request: Request, error: Exception) -> Response:
        return response_of(api_error(error), request.url.path)

    async def of_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        told = ApiError(error.status_code, str(error.detail), headers=dict(error.headers or {}))
        return response_of(told, request.url.path)

    async def of_body(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return response_of(_of_fault(error.errors()[0]), request.url.path)

    async def unexpected(request: Request, error: Exception) -> Response:
        return response_of(api_error(error), request.url.path)

    async def gone(_: Request, __: Exception) -> Response:
        return Response(status_code=499)  # nobody reads it; the log has it

    handlers = {ApiError: ours, MlaJaxError: ours, HTTPException: of_http, RequestValidationError: of_body}
    for kind, handler in {**handlers, ClientGone: gone, Exception: unexpected}.items():
        app.add_exception_handler(kind, handler)


def _of_fault(fault: Mapping[str, Any]) -> ApiError:
    """A fault that pydantic has found in a body."""
    if fault["type"] == "json_invalid":
        return ApiError(400, f"the body is no JSON: {fault['ctx']['error']}")
    where = [str(part) for part in fault["loc"][1:]]
    message = f"{'.'.join(where) or 'the body'}: {fault['msg']}"
    return ApiError(400, message, where[0] if where else None)
