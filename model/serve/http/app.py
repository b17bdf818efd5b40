"""Routes of the server as a FastAPI application, and the answers to their errors.

Handlers in `model/serve/openai/` check, submit and answer requests; this module connects them with HTTP. The
descriptions of routes are part of /openapi.json.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import closing
from typing import Annotated, Any, TypeVar

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import PlainTextResponse, Response, StreamingResponse
from fastapi.routing import APIRouter
from starlette.exceptions import HTTPException

from model.engine.async_engine import EngineFailed, EngineFull, Stream
from model.errors import ContextFull, ModelError
from model.serve.errors import ApiError, engine_stopped_error, queue_full_error, server_stopping_error
from model.serve.http.admission import KEY_SALT, combine_salts, make_error_response
from model.serve.http.page import load_page
from model.serve.http.shared_routes import ERRORS, MetricSource, ServedModel, get_service
from model.serve.http.shared_routes import router as shared_router
from model.serve.log import LOG
from model.serve.openai import answers
from model.serve.openai.audio.answers import Transcription, VerboseTranscription
from model.serve.openai.audio.form import parse_form
from model.serve.openai.audio.requests import build_form_schema, read_audio_request
from model.serve.openai.audio.transcription import Task, TranscriptionHandler
from model.serve.openai.chat import ChatHandler
from model.serve.openai.generation import (
    ClientGone,
    CompletionHandler,
    Service,
    run_while_connected,
)
from model.serve.openai.messages import build_template_variables
from model.serve.openai.requests import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from model.serve.openai.response_requests import ResponseRequest
from model.serve.openai.responses import ResponseHandler
from nkw.version import version

_EVENTS: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/event-stream": {}}, "description": "The answer, or the events of its stream"}
}
_TRANSCRIPTIONS: dict[int | str, dict[str, Any]] = {
    200: {
        "content": {"text/plain": {}, "text/event-stream": {}},
        "description": "The transcription as an object, a text or subtitles, or the events of its stream",
    }
}

T = TypeVar("T")
Handler = CompletionHandler | ChatHandler | TranscriptionHandler
router = APIRouter(responses=ERRORS)
TEXT_ROUTERS = (router, shared_router)
"""Routes of a server of texts or recordings."""


def make_app(
    service: ServedModel, metrics: MetricSource, routers: Sequence[APIRouter] = TEXT_ROUTERS
) -> FastAPI:
    """Return the FastAPI application with all routes.

    It has no pages of FastAPI, which load scripts from other hosts.

    Args:
        service: State shared by all routes.
        metrics: Metrics behind /metrics.
        routers: The routes.
    """
    app = FastAPI(
        title="NKI Workbench",
        version=version(),
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        exception_handlers={
            ApiError: _answer_with(lambda error: error),
            EngineFailed: _answer_with(lambda error: engine_stopped_error()),
            EngineFull: _answer_with(lambda error: queue_full_error(error.seconds)),
            ContextFull: _answer_with(lambda error: ApiError(400, error.message, "context_length_exceeded")),
            ModelError: _answer_with(lambda error: ApiError(400, error.message)),
            RequestValidationError: _answer_with(_describe_invalid_request),
            HTTPException: _answer_with(_describe_http_error),
            ClientGone: _answer_gone_client,
            Exception: _answer_with(_log_failure),
        },
    )
    app.state.service, app.state.metrics = service, metrics
    for included in routers:
        app.include_router(included)
    return app


Shared = Annotated[Service, Depends(get_service)]


@router.get("/", include_in_schema=False)
async def show_page() -> Response:
    """Return the HTML page for a browser: a conversation with the model and the server's metrics."""
    text, policy = load_page()
    headers = {
        "content-security-policy": policy,
        "x-content-type-options": "nosniff",
        "cache-control": "no-cache",
    }
    return Response(text, headers=headers, media_type="text/html")


@router.post("/v1/completions", response_model=answers.Completion, responses=_EVENTS)
async def completions(request: CompletionRequest, raw_request: Request, service: Shared) -> Any:
    """Continue texts: return the completion, or a stream of its pieces as server-sent events."""
    return await _generate(CompletionHandler.prepare, request, raw_request, service)


@router.post("/v1/chat/completions", response_model=answers.ChatCompletion, responses=_EVENTS)
async def chat(request: ChatRequest, raw_request: Request, service: Shared) -> Any:
    """Answer a conversation: return the chat completion, or a stream of its pieces as server-sent events."""
    return await _generate(ChatHandler.prepare, request, raw_request, service)


@router.post("/v1/responses", responses=_EVENTS)
async def responses(request: ResponseRequest, raw_request: Request, service: Shared) -> Any:
    """Answer a conversation in OpenAI's Responses API: return the response, or a stream of its events."""
    return await _generate(ResponseHandler.prepare_response, request, raw_request, service)


@router.api_route("/v1/responses/{path:path}", methods=["GET", "POST", "DELETE"], include_in_schema=False)
async def stored_responses(path: str) -> None:
    """Refuse the routes of stored responses with status 404."""
    raise ApiError(404, "responses are not stored: keep the response of POST /v1/responses", "unsupported")


@router.post(
    "/v1/audio/transcriptions",
    response_model=Transcription | VerboseTranscription,
    responses=_TRANSCRIPTIONS,
    openapi_extra={"requestBody": build_form_schema()},
)
async def transcriptions(raw_request: Request, service: Shared) -> Any:
    """Transcribe a recording: return an object, a text or subtitles, or a stream of server-sent events."""
    return await _transcribe("transcribe", raw_request, service)


@router.post(
    "/v1/audio/translations",
    response_model=Transcription | VerboseTranscription,
    responses=_TRANSCRIPTIONS,
    openapi_extra={"requestBody": build_form_schema()},
)
async def translations(raw_request: Request, service: Shared) -> Any:
    """Translate the speech of a recording to English: return the same formats as /v1/audio/transcriptions."""
    return await _transcribe("translate", raw_request, service)


@router.post("/v1/embeddings", include_in_schema=False)
async def embeddings() -> None:
    """Refuse embeddings with status 400, because this server does not compute them."""
    raise ApiError(
        400,
        "embeddings are not computed: steps return tokens, and no hidden state leaves them",
        "unsupported",
    )


@router.post("/tokenize")
async def tokenize(request: TokenizeRequest, raw_request: Request, service: Shared) -> answers.Tokens:
    """Return the token ids of a text, or of the prompt that the chat template makes of a conversation.

    A request with both or with neither is refused with status 400.
    """
    service.check_model(request.model)
    if (request.prompt is None) == (request.messages is None):
        raise ApiError(400, "the request needs either prompt or messages", param="prompt")
    if request.prompt is not None:
        await service.texts.check_length(request.prompt)  # before the request takes a place in the queue
    ids = await _run_beside_engine(raw_request, service, _encode(request, service))
    return answers.Tokens(count=len(ids), max_model_len=service.engine.limits.max_model_len, tokens=ids)


@router.post("/detokenize")
async def detokenize(request: DetokenizeRequest, raw_request: Request, service: Shared) -> answers.Text:
    """Return the text of token ids; an id that the vocabulary lacks is refused with status 400."""
    service.check_model(request.model)
    text = await _run_beside_engine(raw_request, service, service.texts.decode(request.tokens))
    return answers.Text(prompt=text)


@router.get("/tokenizer_info")
async def tokenizer_info(raw_request: Request, service: Shared) -> answers.TokenizerInfo:
    """Return the tokenizer's class and special tokens, and the chat template, from which clients can make prompts."""
    facts = await _run_beside_engine(raw_request, service, service.texts.describe())
    return answers.TokenizerInfo(**facts, max_model_len=service.engine.limits.max_model_len)


@router.post("/v1/images/{path:path}", include_in_schema=False)
async def images(path: str) -> None:
    """Refuse the routes of images with status 400, because the model makes none."""
    raise ApiError(
        400, "this model makes no images: start nkw serve with a folder of a diffusion model", "unsupported"
    )


@router.post("/v1/messages", include_in_schema=False)
async def messages() -> None:
    """Refuse the route of Anthropic's API with status 400, because this server does not implement it."""
    raise ApiError(
        400,
        "Anthropic's API is not served: send the conversation to /v1/chat/completions or /v1/responses",
        "unsupported",
    )


async def _generate(
    prepare: Callable[[Service, Any], Coroutine[Any, Any, CompletionHandler | ChatHandler]],
    request: Any,
    raw_request: Request,
    service: Service,
) -> Any:
    """Return the whole answer to a request for texts, or a response that streams it.

    A client that disconnects cancels its request.

    Args:
        prepare: Checks and encodes the request, and returns its handler.
        request: The parsed body.
        raw_request: The HTTP request.
        service: State shared by all routes.

    Raises:
        ApiError: The model is a speech model, or the request is refused.
        ClientGone: The client disconnected.
    """
    service.check_texts()
    handler = await run_while_connected(raw_request.receive, prepare(service, request))
    salt = combine_salts(getattr(raw_request.state, KEY_SALT, ""), request.cache_salt)
    stream = await handler.submit(request.priority, salt)
    if request.stream:
        return _stream_events(handler, stream)
    async with stream:
        return await run_while_connected(raw_request.receive, handler.answer(stream))


async def _encode(request: TokenizeRequest, service: Service) -> list[int]:
    if request.messages is not None:
        variables = build_template_variables(request.tools, request.chat_template_kwargs)
        if request.add_generation_prompt is not None:
            variables = {"add_generation_prompt": request.add_generation_prompt} | variables
        prompt = await service.encode_conversation(
            request.messages, variables, bool(request.continue_final_message)
        )
        return list(prompt.ids)
    return await service.texts.encode(request.prompt or "", request.add_special_tokens is not False)


async def _run_beside_engine(raw_request: Request, service: Service, work: Coroutine[Any, Any, T]) -> T:
    """Await work that counts as one request in the engine's queue; a client that disconnects cancels it.

    Raises:
        ApiError: The server is stopping.
        EngineFull: The queue is full.
        ClientGone: The client disconnected.
    """
    with closing(work):
        if service.draining:
            raise server_stopping_error()
        with service.engine.occupy(1):
            return await run_while_connected(raw_request.receive, work)


async def _transcribe(task: Task, raw_request: Request, service: Service) -> Any:
    """Return a transcription in the requested format, or a response that streams it.

    A client that disconnects cancels the windows of its recording.

    Raises:
        ApiError: The model is a model of texts, or the request is refused.
        ClientGone: The client disconnected.
    """
    service.check_speech()
    body = await raw_request.body()  # the gate has read it
    request, file = read_audio_request(parse_form(raw_request.headers.get("content-type", ""), body))
    handler = await run_while_connected(
        raw_request.receive, TranscriptionHandler.prepare(service, request, file, task)
    )
    if request.stream:
        return _stream_events(handler, await handler.submit())
    transcription = await run_while_connected(raw_request.receive, handler.answer())
    return PlainTextResponse(transcription) if isinstance(transcription, str) else transcription


def _stream_events(handler: Handler, stream: Stream) -> StreamingResponse:
    headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
    return StreamingResponse(_encode_events(handler, stream), media_type="text/event-stream", headers=headers)


async def _encode_events(handler: Handler, stream: Stream) -> AsyncIterator[bytes]:
    """Yield the answer as server-sent events, in bytes.

    An ApiError becomes the last event. All streams but those of responses end with [DONE].
    """
    fault: ApiError | None = None
    async with stream:
        try:
            async for event in handler.stream_events(stream):
                yield handler.format_event(event)
        except ApiError as error:
            fault = error
        if end := handler.format_end(fault):
            yield end


def _answer_with(
    convert: Callable[[Any], ApiError],
) -> Callable[[Request, Any], Coroutine[Any, Any, Response]]:
    """Return an exception handler for FastAPI; `convert` makes the refusal to answer of an exception."""

    async def answer(request: Request, error: Any) -> Response:
        return make_error_response(convert(error))

    return answer


def _describe_invalid_request(error: RequestValidationError) -> ApiError:
    """Return the refusal of a body that is no JSON or does not validate, with status 400.

    The message names the first invalid argument and never its value.
    """
    first = error.errors()[0]
    name = ".".join(map(str, first["loc"][1:])) or None
    if first["type"] == "extra_forbidden":
        return ApiError(
            400,
            f"nkw serve does not take the argument {name}: leave it out",
            "unsupported_parameter",
            name,
        )
    if first["type"] == "json_invalid":
        return ApiError(400, "the body is no JSON: send a JSON object", "invalid_json")
    return ApiError(400, f"{name or 'the body'}: {first['msg']}", None, name)


def _describe_http_error(error: HTTPException) -> ApiError:
    """Return the refusal of an unknown path (404), of a wrong method for a path (405), or of an unreadable request."""
    sentences = {404: "there is no such path", 405: "the path does not take this method"}
    message = sentences.get(error.status_code, "the request cannot be read")
    return ApiError(error.status_code, message, headers=dict(error.headers or {}))


def _log_failure(error: Exception) -> ApiError:
    LOG.error("a request failed", exc_info=error.__cause__ or error)
    return ApiError(500, "the server could not answer", "internal_error")


async def _answer_gone_client(request: Request, error: Any) -> Response:
    return Response(status_code=499)
