"""The routes, and how their errors look."""

from __future__ import annotations

from collections.abc import AsyncIterator, Coroutine
from contextlib import closing
from typing import Annotated, Any, TypeVar

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from fastapi.routing import APIRouter
from starlette.exceptions import HTTPException

from model.engine.async_engine import EngineFailed, EngineFull, Stream
from model.errors import ModelError
from model.serve.errors import ApiError, engine_stopped, queue_is_full, stopping_now
from model.serve.http.gate import KEY_SALT, combine_salts, error_bytes
from model.serve.http.page import page
from model.serve.log import LOG
from model.serve.metrics import CONTENT_TYPE, Metrics
from model.serve.openai import answers
from model.serve.openai.audio.answers import Transcription, VerboseTranscription
from model.serve.openai.audio.form import form_parts
from model.serve.openai.audio.requests import audio_request, form_schema
from model.serve.openai.audio.transcription import Task, Transcribing
from model.serve.openai.chatting import Chatting
from model.serve.openai.generation import ClientGone, Completing, Service, while_connected
from model.serve.openai.requests import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from nkw.version import version

_SENTENCES = {
    400: "an argument cannot be",
    401: "a key is needed",
    403: "the host's name is none of this server's, or the request comes from another site's page",
    404: "the model does not exist",
    408: "the body came too slowly",
    413: "the body is too large",
    415: "the body is no form",
    429: "the queue is full",
    500: "the model could not compute the answer",
    503: "the server is stopping",
}
_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": answers.ErrorAnswer, "description": text} for status, text in _SENTENCES.items()
}
_EVENTS: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/event-stream": {}}, "description": "The answer, or its pieces as events"}
}
_SAID: dict[int | str, dict[str, Any]] = {
    200: {
        "content": {"text/plain": {}, "text/event-stream": {}},
        "description": "What was said, as an object, a text or subtitles, or its pieces as events",
    }
}

T = TypeVar("T")
router = APIRouter(responses=_ERRORS)


def make_app(service: Service, metrics: Metrics) -> FastAPI:
    """The application; FastAPI's own pages are left out, because they load scripts of other hosts."""
    app = FastAPI(
        title="NKI Workbench",
        version=version(),
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        exception_handlers={
            ApiError: _said,
            EngineFailed: _stopped,
            EngineFull: _full,
            ModelError: _refused,
            RequestValidationError: _invalid,
            HTTPException: _http,
            ClientGone: _gone,
            Exception: _failed,
        },
    )
    app.state.service, app.state.metrics = service, metrics
    app.include_router(router)
    return app


def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


Shared = Annotated[Service, Depends(_service)]


@router.get("/", include_in_schema=False)
async def page_for_people() -> Response:
    """A conversation and the server's numbers, for a browser."""
    text, policy = page()
    headers = {
        "content-security-policy": policy,
        "x-content-type-options": "nosniff",
        "cache-control": "no-cache",
    }
    return Response(text, headers=headers, media_type="text/html")


@router.get("/v1/models")
async def models(service: Shared) -> answers.ModelList:
    """The model."""
    return answers.ModelList(data=[_card(service)])


@router.get("/v1/models/{name:path}")
async def model(name: str, service: Shared) -> answers.ModelCard:
    """The model, by its name."""
    service.check_model(name)
    return _card(service)


@router.post("/v1/completions", response_model=answers.Completion, responses=_EVENTS)
async def completions(asked: CompletionRequest, request: Request, service: Shared) -> Any:
    """Continue texts."""
    return await _generated(Completing, asked, request, service)


@router.post("/v1/chat/completions", response_model=answers.ChatCompletion, responses=_EVENTS)
async def chat(asked: ChatRequest, request: Request, service: Shared) -> Any:
    """Answer a conversation."""
    return await _generated(Chatting, asked, request, service)


@router.post(
    "/v1/audio/transcriptions",
    response_model=Transcription | VerboseTranscription,
    responses=_SAID,
    openapi_extra={"requestBody": form_schema()},
)
async def transcriptions(request: Request, service: Shared) -> Any:
    """Transcribe a recording."""
    return await _transcription("transcribe", request, service)


@router.post(
    "/v1/audio/translations",
    response_model=Transcription | VerboseTranscription,
    responses=_SAID,
    openapi_extra={"requestBody": form_schema()},
)
async def translations(request: Request, service: Shared) -> Any:
    """Translate what is said in a recording to English."""
    return await _transcription("translate", request, service)


@router.post("/v1/embeddings", include_in_schema=False)
async def embeddings() -> None:
    """What is not computed, said so."""
    raise ApiError(
        400,
        "embeddings are not computed: steps return tokens, and no hidden state leaves them",
        "unsupported",
    )


@router.post("/tokenize")
async def tokenize(asked: TokenizeRequest, request: Request, service: Shared) -> answers.Tokens:
    """The token ids of a text, or of the prompt that a conversation makes."""
    service.check_model(asked.model)
    if (asked.prompt is None) == (asked.messages is None):
        raise ApiError(400, "either prompt or messages is needed", param="prompt")
    if asked.prompt is not None:
        await service.texts.check_length(asked.prompt)  # before a place is taken
    ids = await _beside_engine(request, service, _token_ids(asked, service))
    return answers.Tokens(count=len(ids), max_model_len=service.engine.limits.max_model_len, tokens=ids)


@router.post("/detokenize")
async def detokenize(asked: DetokenizeRequest, request: Request, service: Shared) -> answers.Text:
    """The text of token ids."""
    service.check_model(asked.model)
    text = await _beside_engine(request, service, service.texts.decode(asked.tokens))
    return answers.Text(prompt=text)


@router.get("/health")
async def health(service: Shared) -> answers.Status:
    """Whether steps are computed."""
    if not service.engine.alive:
        raise engine_stopped()
    return answers.Status(status="ok")


@router.get("/ready")
async def ready(service: Shared) -> answers.Status:
    """Whether requests are taken."""
    if service.draining:
        raise stopping_now()
    if not service.engine.alive:
        raise engine_stopped()
    return answers.Status(status="ready")


@router.get("/version")
async def version_of_this() -> answers.Version:
    """The version of NKI Workbench."""
    return answers.Version(version=version())


@router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
async def metrics(request: Request) -> Response:
    """Numbers for Prometheus."""
    return Response(request.app.state.metrics.text(), headers={"content-type": CONTENT_TYPE})


async def _generated(
    kind: type[Completing] | type[Chatting], asked: Any, request: Request, service: Service
) -> Any:
    """The whole answer, or a response that streams it. A client that leaves cancels its request."""
    service.check_texts()
    answering: Completing | Chatting = await while_connected(request.receive, kind.prepared(service, asked))
    salt = combine_salts(getattr(request.state, KEY_SALT, ""), asked.cache_salt)
    stream = await answering.open(asked.priority, salt)
    if asked.stream:
        return _streamed(answering, stream)
    async with stream:
        return await while_connected(request.receive, answering.answer(stream))


async def _token_ids(asked: TokenizeRequest, service: Service) -> list[int]:
    """Return the token ids of a text, or of the prompt that a conversation makes."""
    if asked.messages is not None:
        return list((await service.conversation(asked.messages, asked.variables())).ids)
    return await service.texts.encode(asked.prompt or "", asked.add_special_tokens)


async def _beside_engine(request: Request, service: Service, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of work that takes a place in the queue; a client that leaves cancels it.

    Raises ApiError where the server is stopping, and EngineFull where no place is free.
    """
    with closing(work):
        if service.draining:
            raise stopping_now()
        with service.engine.occupy(1):
            return await while_connected(request.receive, work)


async def _transcription(task: Task, request: Request, service: Service) -> Any:
    """What is said, whole or in pieces. A client that leaves cancels its windows."""
    service.check_speech()
    body = await request.body()  # the gate has read it
    asked, file = audio_request(form_parts(request.headers.get("content-type", ""), body))

    async def prepared() -> Transcribing:
        return await Transcribing.prepared(service, asked, file, task)

    answering = await while_connected(request.receive, prepared())
    if asked.stream:
        return _streamed(answering, await answering.open())
    said = await while_connected(request.receive, answering.answer())
    return PlainTextResponse(said) if isinstance(said, str) else said


def _streamed(answering: Completing | Chatting | Transcribing, stream: Stream) -> StreamingResponse:
    headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
    return StreamingResponse(_events(answering, stream), media_type="text/event-stream", headers=headers)


async def _events(answering: Completing | Chatting | Transcribing, stream: Stream) -> AsyncIterator[bytes]:
    """Server-sent events; an error is the last one but [DONE]."""
    async with stream:
        try:
            async for event in answering.events(stream):
                yield f"data: {event}\n\n".encode()
        except ApiError as error:
            yield b"data: " + error_bytes(error) + b"\n\n"
        yield b"data: [DONE]\n\n"


def _card(service: Service) -> answers.ModelCard:
    return answers.ModelCard(
        id=service.model, created=service.created, max_model_len=service.engine.limits.max_model_len
    )


async def _said(request: Request, error: Any) -> Response:
    return JSONResponse(error.document, error.status, headers=error.headers)


async def _stopped(request: Request, error: Any) -> Response:
    return await _said(request, engine_stopped())


async def _full(request: Request, error: Any) -> Response:
    return await _said(request, queue_is_full(error.seconds))


async def _refused(request: Request, error: Any) -> Response:
    return await _said(request, ApiError(400, error.message))


async def _invalid(request: Request, error: Any) -> Response:
    """The first thing that is wrong with the arguments, without the values."""
    first = error.errors()[0]
    name = ".".join(str(each) for each in first["loc"][1:]) or None
    if first["type"] == "extra_forbidden":
        return await _said(
            request,
            ApiError(400, f"nkw serve does not take the argument {name}", "unsupported_parameter", name),
        )
    if first["type"] == "json_invalid":
        return await _said(request, ApiError(400, "the body is no JSON", "invalid_json"))
    return await _said(request, ApiError(400, f"{name or 'the body'}: {first['msg']}", None, name))


async def _http(request: Request, error: Any) -> Response:
    """Unknown paths and methods, and bodies that cannot be read."""
    sentences = {404: "there is no such path", 405: "the path does not take this method"}
    message = sentences.get(error.status_code, "the request cannot be read")
    return await _said(request, ApiError(error.status_code, message, headers=dict(error.headers or {})))


async def _gone(request: Request, error: Any) -> Response:
    return Response(status_code=499)


async def _failed(request: Request, error: Any) -> Response:
    LOG.error("a request failed", exc_info=error.__cause__ or error)
    return await _said(request, ApiError(500, "the server could not answer", "internal_error"))
