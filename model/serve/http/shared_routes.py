"""Routes that every server has, of texts and of images: the model's name, health, version and metrics.

The descriptions of routes are part of /openapi.json.
"""

from __future__ import annotations

from typing import Annotated, Any, Protocol

from fastapi import Depends, Request
from fastapi.responses import Response
from fastapi.routing import APIRouter

from model.serve.errors import engine_stopped_error, server_stopping_error
from model.serve.metrics import CONTENT_TYPE
from model.serve.openai import answers
from nkw.version import version

_ERROR_DESCRIPTIONS = {
    400: "an argument is refused",
    401: "the request has no valid key",
    403: "the host name is not one of this server's, or the request comes from a page of another site",
    404: "the model does not exist",
    408: "the body took too long to arrive",
    413: "the body is too large",
    415: "the body is not a form",
    429: "the queue is full",
    500: "the model could not compute the answer",
    503: "the server is stopping",
}
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": answers.ErrorAnswer, "description": text}
    for status, text in _ERROR_DESCRIPTIONS.items()
}
"""Descriptions of refusals by status, for the schema of routes."""


class ServedModel(Protocol):
    """State that the routes of every server read.

    `model` is the name by which clients ask for the model, and `created` the time of the start in seconds. `draining`
    is True once the server takes no further requests.
    """

    model: str
    created: int
    draining: bool

    @property
    def is_alive(self) -> bool:
        """Whether requests are still computed."""

    @property
    def max_model_len(self) -> int | None:
        """Length of the longest sequence of tokens; None for a model without sequences."""

    def check_model(self, name: str | None) -> None:
        """Refuse a name that is not this server's model; None stands for the model.

        Raises:
            ApiError: The name is another one (404).
        """


class MetricSource(Protocol):
    """What the route of metrics reads."""

    def format_samples(self) -> bytes:
        """Return all samples in Prometheus' text format."""


router = APIRouter(responses=ERRORS)


def get_service(request: Request) -> Any:
    """Return the state that the routes of a server share."""
    return request.app.state.service


Shared = Annotated[ServedModel, Depends(get_service)]


@router.get("/v1/models")
async def models(service: Shared) -> answers.ModelList:
    """List the models of this server, which has one."""
    return answers.ModelList(data=[_describe_model(service)])


@router.get("/v1/models/{name:path}")
async def model(name: str, service: Shared) -> answers.ModelCard:
    """Describe the model of this server; another name is refused with status 404."""
    service.check_model(name)
    return _describe_model(service)


@router.get("/health")
async def health(service: Shared) -> answers.Status:
    """Report with status 200 that the engine computes steps, or refuse with 503 once it has failed."""
    if not service.is_alive:
        raise engine_stopped_error()
    return answers.Status(status="ok")


@router.get("/ready")
async def ready(service: Shared) -> answers.Status:
    """Report with status 200 that the server takes requests; 503 if it is stopping or its engine has failed."""
    if service.draining:
        raise server_stopping_error()
    await health(service)
    return answers.Status(status="ready")


@router.get("/version")
async def version_of_this() -> answers.Version:
    """Return the version of NKI Workbench."""
    return answers.Version(version=version())


@router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
async def metrics(request: Request) -> Response:
    """Return the server's metrics in Prometheus' text format."""
    return Response(request.app.state.metrics.format_samples(), headers={"content-type": CONTENT_TYPE})


def _describe_model(service: ServedModel) -> answers.ModelCard:
    return answers.ModelCard(id=service.model, created=service.created, max_model_len=service.max_model_len)
